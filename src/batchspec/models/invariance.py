"""Which shapes give a token the same bits whatever stands beside it: measured at load, not believed.

Three questions, asked of this model on this device in this dtype:

1. At which numbers of tokens does every matrix product give a token the same bits, wherever it stands? Measured
   for each weight shape with random inputs, as libraries choose their code by shape (`token_counts`).
2. How many queries must a row have, and has attention to be summed block by block, for a query's result not to
   depend on the draft length, the other rows and the width of the cache? Measured for each kind of attention layer
   (`min_queries`).
3. Does the whole model, norms, positions and experts included, keep to it? Tokens are computed in the smallest and
   in the largest steps, and their logits compared bit by bit (`is_kept_by`).

Answers are remembered for the life of the process, by device, dtype and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from batchspec.layout.packed import pack
from batchspec.layout.shapes import SLOT_BLOCK, Shapes
from batchspec.models.attention import AttentionKind, attend_invariantly, observed_attention, with_queries
from batchspec.models.prepacking import PrepackedLinear
from batchspec.models.runner import PackedRunner

ANCHOR = 32
"""Tokens of the step that all others have to agree with. It is the same for every engine, so that a request gets
the same tokens in batches of any size."""

WIDTHS = (1, 2, 3, 5, 9)
"""Cache widths that attention is tried at, in blocks of slots."""

ROWS, COLUMNS = (1, 4), (1, 2, 5)
"""Numbers of rows, and of queries of a row, that attention is tried with."""

QUERIES = (1, 2, 4, 8, 16)

Answer = TypeVar("Answer")
_answers: dict[Hashable, Any] = {}


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
    key = (_device(model), type(model), layers, model.config.to_json_string(), limits)
    return _remembered(key, lambda: _find_shapes(model, limits))


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
    for in_blocks in (False, True):
        smallest = [min_queries(kind, in_blocks) for kind in kinds]
        if counts[-1] >= limits.num_tokens and None not in smallest:
            yield Shapes(counts, max((size for size in smallest if size), default=1), in_blocks)
    groups = max((kind.num_groups for kind in kinds), default=1)
    yield Shapes((limits.num_tokens,), groups * limits.num_columns, in_blocks=True)


def token_counts(model: PreTrainedModel, largest: int) -> tuple[int, ...]:
    """Numbers of tokens at which all products give the same bits as at ANCHOR, wherever a token stands."""
    products = {
        (type(module), tuple(module.weight.shape), module.weight.dtype, module.bias is None): module
        for module in model.modules()
        if isinstance(module, nn.Linear | Conv1D | PrepackedLinear)
    }
    sizes = sizes_to_try(max(largest, ANCHOR))
    common = set(sizes)
    for shape, module in products.items():
        common &= _remembered((_device(model), shape, sizes[-1]), partial(_like_anchor, module, sizes))
    return tuple(sorted(common))


def sizes_to_try(largest: int) -> list[int]:
    """Each number up to 16, then in steps of at most a quarter, up to one that is large enough.

    >>> sizes_to_try(30)
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 24, 28, 32]
    """
    sizes = list(range(1, 17))
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 3)))
    return sizes


def _like_anchor(module: nn.Module, sizes: list[int]) -> set[int]:
    """The sizes whose results equal those of ANCHOR, row by row, in any order of the rows."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    num_outputs, num_inputs = reversed(weight.shape) if isinstance(module, Conv1D) else weight.shape
    inputs, weights = cancelling((sizes[-1], num_inputs), (num_outputs, num_inputs), weight)
    multiply = _product_of(module, weights)

    anchors = multiply(inputs[:ANCHOR])
    alike = set()
    for size in sizes:
        result, turned = multiply(inputs[:size]), multiply(inputs[:size].flip(0)).flip(0)
        shared = min(size, ANCHOR)
        if torch.equal(result, turned) and torch.equal(result[:shared], anchors[:shared]):
            alike.add(size)
    return alike


def _product_of(module: nn.Module, weights: Tensor) -> Callable[[Tensor], Tensor]:
    """The module's way to multiply rows by weights `[outputs, inputs]`."""
    match module:
        case PrepackedLinear():
            return PrepackedLinear(weights, None)
        case Conv1D():
            return lambda rows: torch.addmm(weights[:, 0], rows, weights.t())
        case _:
            return lambda rows: F.linear(rows, weights)


def cancelling(left: tuple[int, ...], right: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    """Random tensors `[..., K]` whose products over K are sums of pairs a and -a, far apart.

    So the result is what rounding leaves, and shows in every bit whether two sums were taken in the same order. Of
    ordinary sums, whose last bits are rounded away in half precision, one in 65,000 would show it.
    """
    half, odd = left[-1] // 2, left[-1] % 2
    order = torch.randperm(left[-1], generator=torch.Generator().manual_seed(1))
    first, second = _noise((*left[:-1], half), like), _noise((*right[:-1], half), like)
    rest = [tensor.new_zeros(*tensor.shape[:-1], odd) for tensor in (first, second)]
    order = order.to(like.device)
    pairs = torch.cat([first, -first, rest[0]], dim=-1), torch.cat([second, second, rest[1]], dim=-1)
    return pairs[0][..., order], pairs[1][..., order]


def attention_kinds(model: PreTrainedModel) -> frozenset[AttentionKind]:
    """The kinds of attention layers, as one token meets them."""
    with observed_attention() as kinds:
        PackedRunner(model, 1, 1).forward(pack([0], [1], model.device), _line(model, [0]))
    return frozenset(kinds)


def min_queries(kind: AttentionKind, in_blocks: bool) -> int | None:
    """The fewest queries of a row and kv head to which attention has to be padded; None if no number helps."""
    return _remembered((kind, in_blocks, torch.get_num_threads()), partial(_min_queries, kind, in_blocks))


def _min_queries(kind: AttentionKind, in_blocks: bool) -> int | None:
    trial = AttentionTrial(kind)
    return next((least for least in QUERIES if trial.is_alike(Shapes((1,), least, in_blocks))), None)


class AttentionTrial:
    """One query over one row, beside other queries, in other rows, and in caches of other widths."""

    def __init__(self, kind: AttentionKind) -> None:
        self.kind = kind
        like = torch.empty(0, dtype=kind.dtype, device=kind.device)
        rows, heads, slots = ROWS[-1], kind.num_kv_heads, WIDTHS[-1] * SLOT_BLOCK
        queries = (rows, heads, kind.num_groups, COLUMNS[-1], kind.head_size)
        self.queries, keys = cancelling(queries, (rows, heads, slots, kind.head_size), like)
        # Equal keys have equal weights, and their values cancel each other.
        self.keys = keys.repeat_interleave(2, dim=2)[:, :, :slots]
        values = _noise((rows, heads, slots // 2, kind.value_size), like)
        self.values = torch.stack([values, -values], dim=3).flatten(2, 3)

    def is_alike(self, shapes: Shapes) -> bool:
        """Does the query get the same result everywhere?"""
        for position in (5, 300):
            widths = [width * SLOT_BLOCK for width in WIDTHS if width * SLOT_BLOCK > position]
            wanted = self._result(shapes, position, widths[0], 1, 1, False)
            for width, rows, columns, last in product(widths, ROWS, COLUMNS, (False, True)):
                if not torch.equal(self._result(shapes, position, width, rows, columns, last), wanted):
                    return False
        return True

    def _result(
        self, shapes: Shapes, position: int, width: int, num_rows: int, num_columns: int, last: bool
    ) -> Tensor:  # [kv heads, groups, value size]
        """The query is in the first row and column, or in the last ones."""
        row, column = (num_rows - 1, num_columns - 1) if last else (0, 0)
        keys, values = self.keys[:num_rows, :, :width].clone(), self.values[:num_rows, :, :width].clone()
        keys[row], values[row] = self.keys[0, :, :width], self.values[0, :, :width]
        queries = self.queries[:num_rows, :, :, :num_columns].clone()
        queries[row, :, :, column] = self.queries[0, :, :, 0]
        positions = torch.full((num_rows, num_columns), width - 1, device=keys.device)
        positions[row, column] = position
        visible = torch.arange(width, device=keys.device) <= positions.unsqueeze(-1)
        mask = torch.zeros(visible.shape, dtype=keys.dtype, device=keys.device).masked_fill_(~visible, -torch.inf)
        mask = with_queries(mask.repeat(1, self.kind.num_groups, 1).unsqueeze(1), shapes.min_queries)
        softcap = 30.0 if self.kind.has_softcap else None
        sinks = torch.ones_like(queries[:1, ..., :1]).flatten(2, 3) if self.kind.has_sinks else None
        out = attend_invariantly(queries.flatten(2, 3), keys, values, mask, 0.1, softcap, sinks, shapes)
        return out.unflatten(2, (self.kind.num_groups, num_columns))[row, :, :, column]


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
    return True


def _tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Some token ids."""
    return [(7 * place + 3) % model.get_input_embeddings().weight.shape[0] for place in range(count)]


def _line(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    return torch.tensor(token_ids, device=model.device)


def _noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Random numbers of the type and on the device of `like`; the global generator stays as it is."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like)


def _device(model: PreTrainedModel) -> Hashable:
    name = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
    return str(model.device), name, model.dtype, torch.get_num_threads()


def _remembered(key: Hashable, ask: Callable[[], Answer]) -> Answer:
    if key not in _answers:
        _answers[key] = ask()
    answer: Answer = _answers[key]
    return answer
