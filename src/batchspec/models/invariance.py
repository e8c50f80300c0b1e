"""Which shapes give a token the same bits whatever stands beside it: measured at load, not believed.

Three questions, asked of this model on this device in this dtype:

1. At which numbers of tokens does every matrix product give a token the same bits, wherever it stands? Measured
   for each weight shape with random inputs, as libraries choose their code by shape (`token_counts`).
2. How must attention be computed for a query's result not to depend on the draft length, the other rows and the
   width of the cache? Measured for the kinds of attention layers that it has (`attention_trial.py`).
3. Does the whole model, norms, positions and experts included, keep to it? Tokens are computed in the smallest and
   in the largest steps, over short and long rows, and their logits compared bit by bit (`is_kept_by`).

Answers are remembered for the life of the process, by device, dtype and shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from batchspec.layout.packed import pack
from batchspec.layout.shapes import SLOT_BLOCK, Shapes
from batchspec.models.attention import observed_attention
from batchspec.models.attention_trial import AttentionKind, find_manner
from batchspec.models.prepacking import PrepackedLinear, as_prepacked, weight_of
from batchspec.models.products import (
    ANCHOR,
    Way,
    as_conv1d,
    as_linear,
    noise,
    remembered,
    sizes_like_anchor,
    sizes_to_try,
    where,
)
from batchspec.models.runner import PackedRunner

LONG = (700, 1400)
"""Lengths of a row, and of one beside it, over which the whole model is tried."""

WAYS: dict[type[nn.Module], Way] = {nn.Linear: as_linear, Conv1D: as_conv1d, PrepackedLinear: as_prepacked}
"""How each kind of linear layer multiplies."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large the steps of an engine get."""

    num_rows: int
    num_columns: int
    """Tokens of a row: its newest, and its draft."""
    max_length: int
    """Tokens that a row may hold."""

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.num_columns


@torch.inference_mode()
def find_shapes(model: PreTrainedModel, limits: Limits) -> Shapes:
    """Shapes that make a token's bits its own, for steps within these limits; the cheapest that do.

    Raises:
        ValueError: there are none on this device.
    """
    layers = frozenset(type(module) for module in model.modules())
    key = (*where(_line(model, []).to(model.dtype)), type(model), layers, model.config.to_json_string(), limits)
    return remembered(key, lambda: _find_shapes(model, limits))


def _find_shapes(model: PreTrainedModel, limits: Limits) -> Shapes:
    for shapes in _candidates(model, limits):
        if is_kept_by(model, shapes, limits):
            return shapes
    raise ValueError(
        f"numerics='invariant' cannot be had for model type {model.config.model_type!r} in {model.dtype} on "
        f"{model.device}: what a token computes depends on the others in a step; use numerics='fast'"
    )


def _candidates(model: PreTrainedModel, limits: Limits) -> Iterator[Shapes]:
    """From the cheapest to the dearest: steps of many sizes, or all of one."""
    counts = token_counts(model, limits.num_tokens)
    kinds = attention_kinds(model)
    manner = find_manner(kinds)
    if counts[-1] >= limits.num_tokens and manner is not None:
        yield Shapes(counts, manner.min_queries, manner.sum_slots, manner.weighs_in_blocks)
    groups = max((kind.num_groups for kind in kinds), default=1)
    yield Shapes((limits.num_tokens,), groups * limits.num_columns, SLOT_BLOCK, weighs_in_blocks=True)


def token_counts(model: PreTrainedModel, largest: int) -> tuple[int, ...]:
    """Numbers of tokens at which all products give the same bits as at ANCHOR, wherever a token stands."""
    largest = max(largest, ANCHOR)
    common = frozenset(sizes_to_try(largest))
    for layer in model.modules():
        for kind, way in WAYS.items():
            if isinstance(layer, kind):
                common &= sizes_like_anchor(way, *weight_of(layer), largest)
    return tuple(sorted(common))


def attention_kinds(model: PreTrainedModel) -> frozenset[AttentionKind]:
    """The kinds of attention layers, as one token meets them."""
    with observed_attention() as kinds:
        PackedRunner(model, 1, 1).forward(pack([0], [1], model.device), _line(model, [0]))
    return frozenset(kinds)


def is_kept_by(model: PreTrainedModel, shapes: Shapes, limits: Limits) -> bool:
    """Does the whole model give a row's tokens the same logits one by one and alone, and as a draft among other
    rows, few and many, with few tokens and many?"""
    prompt = _tokens(model, min(5, limits.max_length - 1))
    block = _tokens(model, min(limits.num_columns, limits.max_length - len(prompt)))[::-1]
    alone = PackedRunner(model, 1, limits.max_length, shapes)
    alone.prefill(0, prompt)
    steps = [pack([len(prompt) + place], [1], model.device) for place in range(len(block))]
    wanted = torch.cat(
        [alone.forward(step, _line(model, [token])) for step, token in zip(steps, block, strict=True)]
    )
    for num_rows in sorted({1, min(2, limits.num_rows), limits.num_rows}):
        runner = PackedRunner(model, num_rows, limits.max_length, shapes)
        for row, num_others in product({0, num_rows - 1}, {1, limits.num_columns}):
            runner.prefill(row, prompt)
            lines = [_tokens(model, num_others)] * num_rows
            lines[row] = block
            lengths = [len(prompt) if place == row else 0 for place in range(num_rows)]
            step = pack(lengths, [len(line) for line in lines], model.device)
            got = runner.forward(step, _line(model, [token for line in lines for token in line]))
            if not torch.equal(got[step.cache_rows == row], wanted):
                return False
    return _is_kept_over_long_rows(model, shapes, limits)


def _is_kept_over_long_rows(model: PreTrainedModel, shapes: Shapes, limits: Limits) -> bool:
    """The same for a token behind many others, alone and beside a longer row. What is cached is noise."""
    length, beside = LONG
    if limits.max_length <= beside or limits.num_rows == 1:
        return True
    alone = PackedRunner(model, 1, limits.max_length, shapes)
    together = PackedRunner(model, 2, limits.max_length, shapes)
    results = []
    for runner, lengths in ((alone, [length]), (together, [beside, length])):
        step, line = (
            pack(lengths, [1] * len(lengths), model.device),
            _line(model, _tokens(model, 2)[-len(lengths) :]),
        )
        runner.forward(step, line)  # which makes room
        for layer in (*runner.cache.keys.values(), *runner.cache.values.values()):
            layer[-1, :, :length] = noise((layer.shape[1], length, layer.shape[3]), layer)
        results.append(runner.forward(step, line)[-1])
    return torch.equal(*results)


def _tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Some token ids."""
    return [(7 * place + 3) % model.get_input_embeddings().weight.shape[0] for place in range(count)]


def _line(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    return torch.tensor(token_ids, device=model.device)
