"""Can this model run packed? Decided at load, in one sentence that says why not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from batchspec.layout.packed import pack
from batchspec.models.attention import builds_window_masks
from batchspec.models.runner import PackedRunner

INSTEAD = "use transformers' own generate for it"

KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})

RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "recurrent", "conv", "hybrid"})

WITHOUT_FLAG = ("stablelm",)
"""Run packed although they do not set `_supports_attention_backend`."""

PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest relative distance of probe logits. Far above rounding, far below a wrong position or mask."""


def check_packed_support(model: PreTrainedModel, max_length: int) -> None:
    """Refuse models that packed steps would compute wrongly.

    Raises:
        ValueError: one sentence that names the model type, the reason, and what to use instead.
    """
    reason = _reason_by_name(model, max_length) or _reason_by_probe(model)
    if reason is not None:
        raise ValueError(f"model type {model.config.model_type!r} cannot run packed: {reason}; {INSTEAD}")


def _reason_by_name(model: PreTrainedModel, max_length: int) -> str | None:
    config = model.config.get_text_config(decoder=True)
    layers = set(getattr(config, "layer_types", None) or ())
    if config.is_encoder_decoder or model.config.is_encoder_decoder:
        return "it is an encoder-decoder model, and packed rows are decoders'"
    only_attention = bool(layers) and layers <= KNOWN_LAYERS  # some Granite 4 models, of a class made for hybrids
    if layers & RECURRENT_LAYERS or (getattr(model, "_is_stateful", False) and not only_attention):
        return "it keeps a recurrent state, which cannot be rolled back to an earlier token"
    if layers - KNOWN_LAYERS:
        return f"its layers of kind {sorted(layers - KNOWN_LAYERS)[0]!r} attend by a rule not known here"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "its attention adds a position bias (ALiBi) that is computed from a padding mask"
    if not model._supports_attention_backend and config.model_type not in WITHOUT_FLAG:
        return "its attention cannot be replaced through transformers' AttentionInterface"
    return _reason_by_rope(config, max_length) or _reason_by_window(model, config, max_length)


def _reason_by_rope(config: Any, max_length: int) -> str | None:
    """Some rotary scalings change all frequencies with the longest position of the *batch*: one request's
    tokens would depend on its neighbours. Within the original window they do not scale."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type") or "default"
        if kind == "longrope":
            window = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        elif "dynamic" in kind:
            window = config.max_position_embeddings
        else:
            continue
        if max_length > window:
            return f"its {kind} rotary scaling depends on the longest row of a batch ({_within(window)})"
    return None


def _reason_by_window(model: PreTrainedModel, config: Any, max_length: int) -> str | None:
    """A window that the config has and the code does not know (a converted checkpoint's leftover): the model
    sees all tokens, but transformers' cache drops by it, so that its tokens depend on how they are computed."""
    if any(builds_window_masks(type(module)) for module in model.modules()):
        return None
    window = getattr(config, "sliding_window", None)
    if window and max_length > window:
        return f"its config has a sliding window that its code does not apply ({_within(window)})"
    return None


def _within(window: int) -> str:
    return f"max_model_len of at most {window} avoids it"


@torch.inference_mode()
def _reason_by_probe(model: PreTrainedModel) -> str | None:
    """Run two tiny rows packed, with a prefill and a roll-back, and compare with the plain model."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    short = [token % vocabulary for token in (3, 1, 4)]
    long = [token % vocabulary for token in (2, 7, 1, 8, 2, 8)]
    try:
        packed = _packed_logits(model, short, long)
        plain = torch.stack([_plain_logits(model, short), _plain_logits(model, long)])
        distance = float((packed - plain).double().norm() / plain.double().norm())
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError, NotImplementedError) as error:
        return f"a packed trial step failed ({type(error).__name__}: {error})".splitlines()[0]
    if not distance <= PROBE_TOLERANCE.get(packed.dtype, 0.2):
        return f"its packed logits are off its plain logits by {distance:.1%}"
    return None


def _packed_logits(model: PreTrainedModel, short: list[int], long: list[int]) -> Tensor:  # [2, vocabulary]
    runner = PackedRunner(model, num_rows=2, max_length=16)
    runner.prefill(0, short[:1])
    runner.prefill(1, long[:2])
    rejected = torch.tensor([short[0], *long[:3]], device=runner.device)
    runner.forward(pack([1, 2], [1, 3], runner.device), rejected)  # junk, rolled back by the lengths below
    tokens = torch.tensor([*short[1:], *long[2:]], device=runner.device)
    step = pack([1, 2], [len(short) - 1, len(long) - 2], runner.device)
    return runner.forward(step, tokens, keep=step.last_index)


def _plain_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:  # [vocabulary]
    output = model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False)
    return output.logits[0, -1]
