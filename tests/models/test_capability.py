"""Models that packed steps would compute wrongly are refused at load, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from greedy import greedy
from torch import Tensor, nn
from toy_models import (
    ALTERNATING,
    DROP,
    FAMILIES,
    HEAD_SIZE,
    LONGROPE,
    MAX_LENGTH,
    NO_SIZES,
    PADDED_FAMILIES,
    WINDOW,
    make_model,
    make_model_of,
)
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, T5Config

from batchspec import LLM
from batchspec.models.block_cache import BlockCache
from batchspec.models.capability import check_support

TWO_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}

POSITION_BIAS = "position bias"
RECURRENT = "recurrent state, which cannot be rolled back"
NOT_REPLACEABLE = "cannot be replaced through transformers' AttentionInterface"


def padded_family(name: str) -> tuple[str, Mapping[str, Any]]:
    return PADDED_FAMILIES[name].model_type, PADDED_FAMILIES[name].overrides


REFUSED: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "bloom": (*padded_family("bloom"), POSITION_BIAS),
    "mpt": (*padded_family("mpt"), POSITION_BIAS),
    "falcon_alibi": (*padded_family("falcon_alibi"), POSITION_BIAS),
    "falcon_rotary": (*padded_family("falcon_rotary"), NOT_REPLACEABLE),
    "gpt_neo": (*padded_family("gpt_neo"), NOT_REPLACEABLE),
    "llama4": (
        *padded_family("llama4"),
        "layers of kind 'chunked_attention' attend by a rule not known here",
    ),
    "mamba": (
        "mamba",
        {"num_attention_heads": DROP, "num_key_value_heads": DROP, "max_position_embeddings": DROP}
        | {"intermediate_size": DROP, "state_size": 4},
        RECURRENT,
    ),
    "bamba": (
        "bamba",
        {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 1, "attn_layer_indices": [1]},
        RECURRENT,
    ),
    "qwen3_next": (
        "qwen3_next",
        HEAD_SIZE
        | TWO_LAYERS
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32},
        RECURRENT,
    ),
    "granite_hybrid": (
        "granitemoehybrid",
        FAMILIES["granitemoehybrid"].overrides | TWO_LAYERS,
        RECURRENT,
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}, RECURRENT),
    "bart_decoder": (
        "bart",
        NO_SIZES
        | {"d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
        | {"max_position_embeddings": 64},
        NOT_REPLACEABLE,
    ),
    "gemma3_bidirectional": (
        "gemma3_text",
        ALTERNATING | HEAD_SIZE | {"use_bidirectional_attention": True},
        "Gemma3Attention is not causal, so that later tokens change earlier ones",
    ),
    "doge": (
        "doge",
        {"keep_window_size": 8},
        "derives its own mask, and DogeAttention passes one that the model built",
    ),
}


PADDED_REASONS = {
    "bart_decoder": "its logits in a batch are off its plain logits by",
    "doge": "its attention keeps the keys of highest score, and counts padding among them",
}
"""Why the padded strategies refuse the others, where it is not for the same reason."""

GENERATE = "; use transformers' own generate for it"
PADDED = '; use strategy="eqspec" or "exspec" for it'


def assert_refused(
    model: PreTrainedModel,
    reason: str,
    max_length: int = MAX_LENGTH,
    strategy: str = "packed",
    instead: str = GENERATE,
) -> None:
    """The message is one sentence: the model type, the reason, what to use instead."""
    kind = "packed" if strategy == "packed" else "padded"
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"cannot run {kind}") as caught:
        check_support(strategy, model, max_length)
    message = str(caught.value)
    assert message.startswith(f"model type {model.config.model_type!r} cannot run {kind}: ")
    assert reason in message
    assert message.endswith(instead)
    assert "\n" not in message
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", REFUSED)
def test_models_of_other_kinds_are_refused_with_the_reason(name: str):
    model_type, overrides, reason = REFUSED[name]
    instead = PADDED if name in PADDED_FAMILIES else GENERATE
    assert_refused(make_model_of(model_type, overrides, torch.float32), reason, instead=instead)


@pytest.mark.parametrize("strategy", ["eqspec", "exspec"])
@pytest.mark.parametrize("name", REFUSED)
def test_padded_strategies_run_what_can_be_cropped_and_refuse_the_rest(name: str, strategy: str):
    model_type, overrides, packed_reason = REFUSED[name]
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model_of(model_type, overrides, dtype)
        if name in PADDED_FAMILIES:
            check_support(strategy, model, MAX_LENGTH)
        else:
            assert_refused(model, PADDED_REASONS.get(name, packed_reason), strategy=strategy)


def test_encoder_decoder_models_are_refused():
    config = T5Config(vocab_size=96, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    assert_refused(AutoModelForSeq2SeqLM.from_config(config), "it is an encoder-decoder model")


def test_refusal_reaches_the_user_for_target_and_draft_model():
    bad, good = make_model_of(*REFUSED["bloom"][:2], torch.float32), make_model("llama")
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 32}
    with pytest.raises(ValueError, match="'bloom' cannot run packed"):
        LLM(bad, **settings)
    with pytest.raises(ValueError, match="'bloom' cannot run packed"):
        LLM(good, **settings, speculative_config={"method": "draft_model", "model": bad})


@pytest.mark.parametrize("family", ["llama", "gemma2", "stablelm", "granitemoehybrid", "deepseek_v3"])
def test_known_families_are_taken(family: str):
    check_support("packed", make_model(family), MAX_LENGTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mixtral"])
def test_rounding_is_no_reason_to_refuse(family: str, dtype: torch.dtype):
    entry = FAMILIES[family]
    check_support("packed", make_model_of(entry.model_type, entry.overrides, dtype), MAX_LENGTH)


def test_longrope_is_taken_within_its_original_window_only():
    model = make_model("phi3_longrope")
    window = LONGROPE["original_max_position_embeddings"]
    check_support("packed", model, window)
    assert_refused(model, f"(max_model_len of at most {window} avoids it)", window + 1)
    with pytest.raises(ValueError, match="longrope rotary scaling depends on the longest row"):
        LLM(model, skip_tokenizer_init=True)


def test_dynamic_rope_is_taken_within_the_context_window_only():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = make_model_of("llama", {"rope_parameters": rope})
    check_support("packed", model, MAX_LENGTH)
    assert_refused(model, "dynamic rotary scaling depends on the longest row", MAX_LENGTH + 1)


def test_rope_of_each_layer_type_is_looked_at():
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = make_model("gemma3")
    model.config.rope_parameters = {"sliding_attention": rope, "full_attention": {**rope, "rope_type": "dynamic"}}
    assert_refused(model, "dynamic rotary scaling", MAX_LENGTH + 1)


def test_window_that_the_code_does_not_apply_is_refused_where_it_would_count():
    # transformers' cache drops tokens by it and its mask does not, so its outputs are not those of the model.
    model = make_model_of("llama", {"sliding_window": WINDOW})
    assert_refused(model, f"does not apply (max_model_len of at most {WINDOW} avoids it)", WINDOW + 1)
    llm = LLM(model, skip_tokenizer_init=True, max_model_len=WINDOW)
    output = llm.generate([[3, 1]], greedy(max_tokens=4), use_tqdm=False)[0]
    alone = model.generate(torch.tensor([[3, 1]]), do_sample=False, max_new_tokens=4)
    assert output.outputs[0].token_ids == alone[0, 2:].tolist()


def count_positions_itself(model: PreTrainedModel, forward: Any, **kwargs: Any) -> Any:
    """A model that does not take positions: it numbers the tokens of a call from 0."""
    return forward(**{**kwargs, "position_ids": None})


def scale_by_length(model: PreTrainedModel, forward: Any, **kwargs: Any) -> Any:
    """A model whose answer depends on how many tokens are computed at once."""
    output = forward(**kwargs)
    output.last_hidden_state[..., 0] += kwargs["input_ids"].shape[1]
    return output


def ignore_the_cache(model: PreTrainedModel, forward: Any, **kwargs: Any) -> Any:
    """A model that forgets: each call sees its own tokens only."""
    return forward(**{**kwargs, "cache": None})


@pytest.mark.parametrize("fault", [count_positions_itself, scale_by_length, ignore_the_cache])
def test_probe_refuses_models_with_rules_of_their_own(fault: Any, monkeypatch: pytest.MonkeyPatch):
    model = make_model("llama")
    monkeypatch.setattr(model.model, "forward", partial(fault, model, model.model.forward))
    with pytest.raises(ValueError, match=r"its logits in a batch are off its plain logits|a trial step failed"):
        check_support("packed", model, MAX_LENGTH)


class BiasedAttention(nn.Module):
    """Adds to the attention's output what depends on a token's place in the call: a bias not told to anyone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        output, weights = self.inner(hidden_states=hidden_states, **kwargs)
        return output + torch.linspace(0, 1, output.shape[1], dtype=output.dtype)[:, None], weights


def test_probe_refuses_a_bias_that_it_is_not_told_of():
    model = make_model("llama")
    layer = model.model.layers[1]
    layer.self_attn = BiasedAttention(layer.self_attn)
    assert_refused(model, "its logits in a batch are off its plain logits by")


def test_probe_refuses_when_the_cache_is_off_by_one(monkeypatch: pytest.MonkeyPatch):
    places = BlockCache._places

    def off_by_one(cache: BlockCache, num_heads: int) -> Tensor:
        return (places(cache, num_heads) - 1).clamp(min=0)

    monkeypatch.setattr(BlockCache, "_places", off_by_one)
    assert_refused(make_model("llama"), "its logits in a batch are off its plain logits by", instead=PADDED)


def test_probe_refuses_when_the_model_fails(monkeypatch: pytest.MonkeyPatch):
    model = make_model("llama")
    monkeypatch.setattr(BlockCache, "get_seq_length", lambda self, layer_idx=0: 1 / 0)
    monkeypatch.setattr(BlockCache, "update", lambda *args, **kwargs: [][0])
    assert_refused(model, "a trial step failed (IndexError: list index out of range)", instead=PADDED)
