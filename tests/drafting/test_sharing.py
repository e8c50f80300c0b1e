"""Drafters that share the target's weights: early exit, and draft checkpoints. Outputs stay the target's."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from toy_folders import save_text_llama, text_llama
from toy_models import VOCAB_SIZE, make_model
from toy_text import byte_tokenizer

from batchspec import LLM, SamplingParams
from batchspec.drafting.draft_model import DraftModelDrafter
from batchspec.models.draft_checkpoint import TargetIdentity, make_draft, save_draft
from batchspec.models.prepacking import PrepackedLinear, can_prepack

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 5, 6], [9] * 4, [11, 3], [20, 21, 22, 23, 24]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.3),
    SamplingParams(temperature=0.8, seed=3, max_tokens=16),
    SamplingParams(temperature=0.0, max_tokens=8, allowed_token_ids=[2, 4]),
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
]
IDS = torch.arange(0, VOCAB_SIZE, 3)  # neither 2 nor 4 is among them


def run(model, speculative_config, **settings):
    llm = LLM(model, skip_tokenizer_init=True, speculative_config=speculative_config, max_num_seqs=4, **settings)
    return llm, llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)


def check_same(model, speculative_config, **settings) -> LLM:
    _, wanted = run(model, None, **settings)
    llm, outputs = run(model, speculative_config, **settings)
    assert [output.outputs[0].token_ids for output in outputs] == [
        output.outputs[0].token_ids for output in wanted
    ]
    assert llm.engine.stats.num_draft_tokens > 0
    return llm


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3", "qwen2_sliding"])
@pytest.mark.parametrize("strategy", ["packed", "eqspec"])
def test_early_exit_changes_no_token_and_copies_no_weight(family, strategy):
    model = make_model(family)
    llm = check_same(model, {"method": "early_exit", "num_layers": 1}, strategy=strategy)
    assert isinstance(llm.engine.drafter, DraftModelDrafter)
    draft = llm.engine.drafter.runner.model
    assert draft.config.num_hidden_layers == 1
    own = {weight.data_ptr() for weight in model.parameters()}
    assert {weight.data_ptr() for weight in draft.parameters()} < own
    assert llm.engine.stats.num_accepted_tokens > 0


@pytest.mark.skipif(not can_prepack(torch.float32), reason="this PyTorch cannot prepack weights")
def test_early_exit_shares_prepacked_weights(tmp_path):
    folder = save_text_llama(tmp_path, seed=1)
    llm = check_same(folder, {"method": "early_exit", "num_layers": 1}, dtype="float32")
    own = {id(module) for module in llm.model.modules()}
    packed = [part for part in llm.engine.drafter.runner.model.modules() if isinstance(part, PrepackedLinear)]
    assert packed
    assert all(id(part) in own for part in packed)


def test_early_exit_with_all_layers_is_refused():
    with pytest.raises(ValueError, match="num_layers must be at most 1, fewer layers than the target has, got 2"):
        run(make_model("llama"), {"method": "early_exit", "num_layers": 2})


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_draft_checkpoint_changes_no_token(tmp_path, family, ids):
    model = make_model(family)
    save_draft(tmp_path, make_draft(model, [0], ids), model, [0])
    llm = check_same(model, {"method": "draft_model", "model": tmp_path})
    assert llm.engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("method", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_a_short_head_other_tokens_are_never_drafted(tmp_path, method, temperature):
    model = make_model("llama")
    save_draft(tmp_path, make_draft(model, [0], IDS), model, [0])
    config = {"method": "draft_model", "model": tmp_path, "sampling_method": method}
    llm = LLM(model, skip_tokenizer_init=True, speculative_config=config)
    drafted = []
    propose = llm.engine.drafter.propose

    def noted(batch, limits):
        draft = propose(batch, limits)
        drafted.extend(
            token
            for row, count in zip(draft.token_ids.tolist(), draft.num_tokens, strict=True)
            for token in row[:count]
        )
        return draft

    llm.engine.drafter.propose = noted
    wishes = [
        {},
        {"logit_bias": {4: 100.0}},
        {"logits_processors": [lambda ids, logits: logits.index_fill(0, torch.tensor(4), 1e9)]},
    ]
    params = [SamplingParams(temperature=temperature, seed=1, max_tokens=24, **wish) for wish in wishes]
    outputs = llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 3, params, use_tqdm=False)
    assert outputs[1].outputs[0].token_ids[-1] == outputs[2].outputs[0].token_ids[-1] == 4
    assert len(drafted) > 20
    assert set(drafted) <= set(IDS.tolist())


def test_tokens_that_a_short_head_cannot_say_are_given_out_by_rejection_all_the_same(tmp_path):
    model = make_model("llama")
    save_draft(tmp_path, make_draft(model, [0], IDS), model, [0])
    config = {"method": "draft_model", "model": tmp_path, "sampling_method": "rejection"}
    llm = LLM(model, skip_tokenizer_init=True, speculative_config=config)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24, allowed_token_ids=[2, 4])
    output = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)[0].outputs[0]
    assert set(output.token_ids) <= {2, 4}
    assert len(output.token_ids) == 24


def test_the_short_way_of_greedy_rows_drafts_what_the_long_way_does(tmp_path):
    """`min_tokens` sends the same request the long way."""
    model = make_model("llama")
    save_draft(tmp_path, make_draft(model, [0], IDS), model, [0])
    counts = []
    for least in (0, 1):
        llm = LLM(model, skip_tokenizer_init=True, speculative_config={"method": "draft_model", "model": tmp_path})
        params = SamplingParams(temperature=0.0, max_tokens=32, min_tokens=least)
        llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        counts.append((llm.engine.stats.num_draft_tokens, llm.engine.stats.num_accepted_tokens))
    assert counts[0] == counts[1]
    assert counts[0][1] > 0


def test_a_draft_checkpoint_of_another_target_is_refused_in_one_line(tmp_path):
    target, other = text_llama(seed=1), text_llama(seed=2)
    save_draft(tmp_path, make_draft(other, [0]), other, [0])
    with pytest.raises(ValueError, match=r"draft model: .* drafts for another target: its embedding_digest is"):
        LLM(
            target,
            tokenizer=byte_tokenizer(),
            speculative_config={"method": "draft_model", "model": tmp_path},
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_target_is_known_again_in_another_dtype(dtype):
    target = text_llama()
    assert TargetIdentity.of(deepcopy(target).to(dtype)) == TargetIdentity.of(target)
