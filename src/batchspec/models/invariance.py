"""Which shapes give a token the same bits whatever stands beside it: measured at load, not believed.

Three questions, asked of this model on this device in this dtype:

1. At which numbers of tokens do every matrix product and every activation give a token the same bits, wherever it
   stands? Measured for each weight shape with random inputs, as libraries choose their code by shape
   (`token_counts`, `activations.py`).
2. With how many queries must attention be computed for a query's result not to depend on the draft length and the
   other rows? Measured for the kinds of attention layers that it has (`attention_trial.py`).
3. Does the whole model, norms, activations, positions and experts included, keep to it? Tokens are computed one by
   one and alone, and in steps of all those sizes, over short and long rows, and their logits compared bit by bit.

Answers are remembered: those to 1 and 2 by device, dtype and shape, those to 3 for each model.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from batchspec.layout.blocks import BLOCK
from batchspec.layout.packed import pack
from batchspec.layout.shapes import Shapes
from batchspec.models.activations import sizes_of_even_activations
from batchspec.models.attention import observed_attention
from batchspec.models.attention_trial import AttentionKind, find_queries
from batchspec.models.prepacking import PrepackedLinear, as_prepacked, description
from batchspec.models.products import (
    ANCHOR,
    Way,
    as_conv1d,
    as_linear,
    circumstances,
    random_like,
    sizes_like_anchor,
    sizes_to_try,
)
from batchspec.models.runner import PackedRunner

LONG = 1400
"""Most tokens of a long row over which the whole model is tried, beside one of half the length."""

EXPERTS_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What configs call their number of experts."""

WAYS: dict[type[nn.Module], Way] = {nn.Linear: as_linear, Conv1D: as_conv1d, PrepackedLinear: as_prepacked}
"""How each kind of linear layer multiplies; others, such as routers, as `nn.Linear` does, or so in float32."""

_found: WeakKeyDictionary[PreTrainedModel, dict[Hashable, Shapes]] = WeakKeyDictionary()


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
    key = (limits, layers, *circumstances(_like(model)))
    found = _found.setdefault(model, {})
    if key not in found:
        found[key] = _find_shapes(model, limits)
    return found[key]


def _find_shapes(model: PreTrainedModel, limits: Limits) -> Shapes:
    _refuse_looped_experts(model)
    for shapes in _candidates(model, limits):
        counts = _Trial(model, shapes, limits).even_sizes()
        found = replace(shapes, token_counts=counts)
        if counts and _is_alike_over_long_rows(model, found, limits):
            return found
    raise ValueError(
        f"numerics='invariant' cannot be had for model type {model.config.model_type!r} in {model.dtype} on "
        f"{model.device}: what a token computes depends on the others in a step; use numerics='fast'"
    )


def _refuse_looped_experts(model: PreTrainedModel) -> None:
    """Experts that transformers cannot compute token by token come in shapes that depend on the whole step."""
    config = model.config.get_text_config(decoder=True)
    has_experts = any((getattr(config, name, None) or 0) > 1 for name in EXPERTS_FIELDS)
    if has_experts and not any(hasattr(module, "_is_expert_parallel") for module in model.modules()):
        raise ValueError(
            f"numerics='invariant' cannot be had for model type {model.config.model_type!r}: its experts are "
            "computed in shapes that depend on all requests in a step; use numerics='fast'"
        )


def _candidates(model: PreTrainedModel, limits: Limits) -> Iterator[Shapes]:
    """Steps of many sizes, or, if that cannot be, all of one."""
    counts = token_counts(model, 2 * limits.num_tokens)  # the first that is large enough may turn out uneven
    counts = sizes_of_even_activations(lambda count: _run_some_tokens(model, count), counts)
    kinds = attention_kinds(model)
    queries = find_queries(kinds)
    if counts and counts[-1] >= limits.num_tokens and queries is not None:
        yield Shapes(counts, *queries)
    warnings.warn(
        f"in {model.dtype} on {model.device}, {model.config.model_type!r} gives other bits in steps of other "
        f"sizes: all are padded to {limits.num_tokens} tokens, and only engines with the same max_num_seqs and "
        "num_speculative_tokens (none is 0) give the same tokens",
        stacklevel=2,
    )
    groups = max((kind.num_groups for kind in kinds), default=1)
    yield Shapes((limits.num_tokens,), groups * limits.num_columns, 1)


def token_counts(model: PreTrainedModel, largest: int) -> tuple[int, ...]:
    """Numbers of tokens at which all products give the same bits as at ANCHOR, wherever a token stands."""
    largest = max(largest, ANCHOR)
    common = frozenset(sizes_to_try(largest))
    for layer in model.modules():
        if not _is_product(layer):
            continue
        shape, has_bias, like = description(layer)
        way = next((way for kind, way in WAYS.items() if isinstance(layer, kind)), None)
        common &= sizes_like_anchor(way or as_linear, shape, has_bias, like, largest)
        if way is None:
            # Of another kind, as routers are, which may multiply in float32 whatever the weight's type.
            single = like.new_empty(0, dtype=torch.float32)
            common &= sizes_like_anchor(as_linear, shape, has_bias, single, largest)
    return tuple(sorted(common))


def _is_product(layer: nn.Module) -> bool:
    if isinstance(layer, PrepackedLinear):  # whose weight would be a copy
        return True
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(layer, nn.Embedding)


def attention_kinds(model: PreTrainedModel) -> frozenset[AttentionKind]:
    """The kinds of attention layers, as one token meets them."""
    with observed_attention() as kinds:
        _run_some_tokens(model, 1)
    return frozenset(kinds)


def _run_some_tokens(model: PreTrainedModel, count: int) -> None:
    PackedRunner(model, 1, count).forward(pack([0], [count], model.device), _line(model, [0] * count))


class _Trial:
    """The whole model, norms, activations, positions and experts included, over a prompt and a block behind it."""

    def __init__(self, model: PreTrainedModel, shapes: Shapes, limits: Limits) -> None:
        """`shapes` say how attention is computed; if they are of one size, all is held against that."""
        self.model, self.shapes, self.limits = model, shapes, limits
        self.prompt = _tokens(model, min(5, limits.max_length - 1))
        self.block = _tokens(model, min(limits.num_columns, limits.max_length - len(self.prompt)))[::-1]
        alone = self._runner(1, shapes if len(shapes.token_counts) == 1 else self._of_size(ANCHOR))
        alone.prefill(0, self.prompt)
        steps = [pack([len(self.prompt) + place], [1], model.device) for place in range(len(self.block))]
        lines = [_line(model, [token]) for token in self.block]
        self.wanted = torch.cat([alone.forward(step, line) for step, line in zip(steps, lines, strict=True)])
        """`[block, vocabulary]`: logits of the block's tokens, one by one and alone."""
        self._full = self._runner(limits.num_rows, shapes)
        self._full.prefill(0, self.prompt)
        for row in range(1, limits.num_rows):
            self._full.copy_row(0, row, len(self.prompt))

    def even_sizes(self) -> tuple[int, ...]:
        """The sizes of steps that give the same logits, up to the first for all tokens of an engine; none if there
        is no such size."""
        uneven: set[int] = set()
        while True:
            counts: list[int] = []
            for count in self.shapes.token_counts:
                if count in uneven or not self.is_alike_in_all_rows(count):
                    uneven.add(count)
                    continue
                counts.append(count)
                if count >= self.limits.num_tokens:
                    break
            else:
                return ()
            found = self.uneven_beside_others(replace(self.shapes, token_counts=tuple(counts)))
            if not found:
                return tuple(counts)
            uneven |= found

    def is_alike_in_all_rows(self, count: int) -> bool:
        """Do steps of so many tokens, as far as rows have any, give the same logits? All rows hold the prompt and
        go on with the block, so each place in the step is a witness."""
        num_rows = self.limits.num_rows
        num_new = [min(len(self.block), count // num_rows + (row < count % num_rows)) for row in range(num_rows)]
        step = pack([len(self.prompt)] * num_rows, num_new, self.model.device)
        columns = [column for new in num_new for column in range(new)]
        line = _line(self.model, [self.block[column] for column in columns])
        self._full.shapes = self._of_size(count)
        return torch.equal(self._full.forward(step, line), self.wanted[_line(self.model, columns)])

    def uneven_beside_others(self, shapes: Shapes) -> set[int]:
        """The sizes at which a row gives something else among others, few and many, that start from nothing."""
        uneven = set()
        for num_rows in sorted({1, min(2, self.limits.num_rows), self.limits.num_rows}):
            runner = self._runner(num_rows, shapes)
            for row, num_others in product({0, num_rows - 1}, {1, self.limits.num_columns}):
                runner.prefill(row, self.prompt)
                lines = [_tokens(self.model, num_others)] * num_rows
                lines[row] = self.block
                lengths = [len(self.prompt) if place == row else 0 for place in range(num_rows)]
                step = pack(lengths, [len(line) for line in lines], self.model.device)
                got = runner.forward(step, _line(self.model, [token for line in lines for token in line]))
                if not torch.equal(got[step.cache_rows == row], self.wanted):
                    uneven.add(shapes.num_tokens(step.num_tokens))
        return uneven

    def _of_size(self, count: int) -> Shapes:
        return replace(self.shapes, token_counts=(count,))

    def _runner(self, num_rows: int, shapes: Shapes) -> PackedRunner:
        return PackedRunner(self.model, num_rows, self.limits.max_length, shapes)


def _is_alike_over_long_rows(model: PreTrainedModel, shapes: Shapes, limits: Limits) -> bool:
    """Does a token behind few or many others give the same alone and beside a longer row?"""
    beside = min(LONG, limits.max_length - 1)
    if beside < BLOCK or limits.num_rows == 1:  # no row has a longer one beside it
        return True
    return all(
        torch.equal(*(_of_last_row(model, shapes, limits, lengths) for lengths in ([length], [beside, length])))
        for length in {BLOCK // 2, beside // 2}
    )


def _of_last_row(model: PreTrainedModel, shapes: Shapes, limits: Limits, lengths: list[int]) -> Tensor:
    """The logits of one more token behind so many. What is cached is noise, the same for the last row however many
    there are."""
    runner = PackedRunner(model, len(lengths), limits.max_length, shapes)
    line = _line(model, _tokens(model, 2)[-len(lengths) :])
    step = pack(lengths, [1] * len(lengths), model.device)
    runner.forward(step, line)  # which makes room
    blocks = runner.cache.table.rows[len(lengths) - 1]
    for seed, layer in enumerate((*runner.cache.keys.values(), *runner.cache.values.values())):
        layer[blocks] = random_like((len(blocks), *layer.shape[1:]), layer, seed)
    return runner.forward(step, line)[-1]


def _tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Some token ids."""
    return [(7 * place + 3) % model.get_input_embeddings().weight.shape[0] for place in range(count)]


def _like(model: PreTrainedModel) -> Tensor:
    return torch.empty(0, dtype=model.dtype, device=model.device)


def _line(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    return torch.tensor(token_ids, device=model.device)
