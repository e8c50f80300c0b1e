"""Can this model run by a strategy? Decided at load, in one sentence that says why not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from batchspec.layout.packed import pack
from batchspec.models.attention import builds_window_masks, own_attention
from batchspec.models.invariance import Limits, find_shapes
from batchspec.models.padded_runner import PoolRunner, RealigningRunner
from batchspec.models.runner import PackedRunner, Runner
from batchspec.stats import StageTimer

KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})

RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "recurrent", "conv", "hybrid"})

WITHOUT_FLAG = ("stablelm",)
"""Run packed although they do not set `_supports_attention_backend`."""

PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest relative distance of probe logits. Far above rounding, far below a wrong position or mask."""


def make_runner(
    strategy: str, model: PreTrainedModel, num_rows: int, max_length: int, timer: StageTimer
) -> Runner:
    """The runner of a strategy, if the model can run that way.

    Raises:
        ValueError: one sentence that names the model type, the reason, and what to use instead.
    """
    check_support(strategy, model, max_length)
    return RUNNERS[strategy](model, num_rows, max_length, timer)


def make_invariant_runner(model: PreTrainedModel, limits: Limits) -> Runner:
    """A packed runner whose results for a row do not depend on what else is in a step.

    Raises:
        ValueError: the model cannot run packed, or not invariantly on this device.
    """
    check_support("packed", model, limits.max_length)
    return PackedRunner(model, limits.num_rows, limits.max_length, find_shapes(model, limits))


def check_support(strategy: str, model: PreTrainedModel, max_length: int) -> None:
    """Refuse models that the strategy's steps would compute wrongly.

    Raises:
        ValueError: one sentence that names the model type, the reason, and what to use instead.
    """
    reason = _reason_against(strategy, model, max_length)
    if reason is None:
        return
    instead = "use transformers' own generate for it"
    if strategy == "packed" and _reason_against("eqspec", model, max_length) is None:
        instead = 'use strategy="eqspec" or "exspec" for it'
    kind = "packed" if strategy == "packed" else "padded"
    raise ValueError(f"model type {model.config.model_type!r} cannot run {kind}: {reason}; {instead}")


def _reason_against(strategy: str, model: PreTrainedModel, max_length: int) -> str | None:
    by_layout = _reason_against_packing if strategy == "packed" else _reason_against_padding
    return (
        _reason_against_any(model)
        or by_layout(model)
        or _reason_by_rope(model, max_length)
        or _reason_by_window(model, max_length)
        or _reason_by_probe(RUNNERS[strategy](model, 2, 16, StageTimer()))
    )


def _reason_against_any(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config(decoder=True)
    layers = _layer_kinds(model)
    if config.is_encoder_decoder or model.config.is_encoder_decoder:
        return "it is an encoder-decoder model, and batchspec runs decoders"
    only_attention = bool(layers) and layers <= KNOWN_LAYERS  # some Granite 4 models, of a class made for hybrids
    if layers & RECURRENT_LAYERS or (getattr(model, "_is_stateful", False) and not only_attention):
        return "it keeps a recurrent state, which cannot be rolled back to an earlier token"
    for name, module in model.named_modules():
        is_self_attention = hasattr(module, "layer_idx") and "cross" not in name and "encoder" not in name
        if is_self_attention and getattr(module, "is_causal", True) is False:
            return f"{type(module).__name__} is not causal, so that later tokens change earlier ones"
    return None


def _reason_against_padding(model: PreTrainedModel) -> str | None:
    if model.config.model_type == "doge":
        return "its attention keeps the keys of highest score, and counts padding among them"
    return None


def _reason_against_packing(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config(decoder=True)
    if unknown := sorted(_layer_kinds(model) - KNOWN_LAYERS):
        return f"its layers of kind {unknown[0]!r} attend by a rule not known here"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "its attention adds a position bias (ALiBi) that is computed from a padding mask"
    if not model._supports_attention_backend and config.model_type not in WITHOUT_FLAG:
        return "its attention cannot be replaced through transformers' AttentionInterface"
    return None


def _layer_kinds(model: PreTrainedModel) -> set[str]:
    return set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())


def _reason_by_rope(model: PreTrainedModel, max_length: int) -> str | None:
    """Some rotary scalings change all frequencies with the longest position of the *batch*: one request's
    tokens would depend on its neighbours. Within the original window they do not scale."""
    config = model.config.get_text_config(decoder=True)
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


def _reason_by_window(model: PreTrainedModel, max_length: int) -> str | None:
    """A window that the config has and the code does not know (a converted checkpoint's leftover): the model
    sees all tokens, but transformers' cache drops by it, so that its tokens depend on how they are computed."""
    if any(builds_window_masks(type(module)) for module in model.modules()):
        return None
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    if window and max_length > window:
        return f"its config has a sliding window that its code does not apply ({_within(window)})"
    return None


def _within(window: int) -> str:
    return f"max_model_len of at most {window} avoids it"


@torch.inference_mode()
def _reason_by_probe(runner: Runner) -> str | None:
    """Run two tiny rows in one batch, with a prefill and a roll-back, and compare with the plain model."""
    vocabulary = runner.model.config.get_text_config(decoder=True).vocab_size
    short = [token % vocabulary for token in (3, 1, 4)]
    long = [token % vocabulary for token in (2, 7, 1, 8, 2, 8)]
    try:
        batched = _batched_logits(runner, short, long)
        plain = torch.stack([_plain_logits(runner.model, short), _plain_logits(runner.model, long)])
        distance = float((batched - plain).double().norm() / plain.double().norm())
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError, NotImplementedError) as error:
        return f"a trial step failed ({type(error).__name__}: {error})".splitlines()[0]
    if not distance <= PROBE_TOLERANCE.get(batched.dtype, 0.2):
        return f"its logits in a batch are off its plain logits by {distance:.1%}"
    return None


def _batched_logits(runner: Runner, short: list[int], long: list[int]) -> Tensor:  # [2, vocabulary]
    runner.prefill(0, short[:1])
    runner.prefill(1, long[:2])
    rejected = torch.tensor([short[0], *long[:3]], device=runner.device)
    runner.forward(pack([1, 2], [1, 3], runner.device), rejected)  # junk, rolled back by the lengths below
    tokens = torch.tensor([*short[1:], *long[2:]], device=runner.device)
    step = pack([1, 2], [len(short) - 1, len(long) - 2], runner.device)
    return runner.forward(step, tokens, keep=step.last_index)


def _plain_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:  # [vocabulary]
    with own_attention(model):
        output = model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False)
    return output.logits[0, -1]


RUNNERS: dict[str, Callable[[PreTrainedModel, int, int, StageTimer], Runner]] = {
    "packed": lambda model, num_rows, max_length, timer: PackedRunner(model, num_rows, max_length),
    "eqspec": RealigningRunner,
    "exspec": PoolRunner,
}
"""How each strategy runs a model."""
