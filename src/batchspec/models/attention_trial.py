"""How must attention be computed for a query's result not to depend on other queries, rows and the cache's width?

Each of its three stages is tried by itself, since rounding in one would hide what another does: a query is
computed alone over the narrowest cache that holds it, then beside others, in other rows, over caches of other
widths, and the results are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from batchspec.layout.shapes import SLOT_BLOCK, padded_to
from batchspec.models.explicit_attention import scores, weigh, weigh_in_blocks, weighted_sum, with_queries
from batchspec.models.products import cancelling, circumstances, random_like, remembered

QUERIES = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (4, 4), (8, 8), (16, 16))
"""Least numbers of queries of a row and kv head, and what they are a multiple of, from the cheapest on."""

SUM_SLOTS = (1024, 512, 256, 128)
"""Numbers of slots to sum over at once that are tried, from the cheapest on."""

WIDTHS = (*range(1, 13), 16, 17, 32)
"""Cache widths, in blocks of slots."""

POSITIONS = (5, 129, 301, 699, 1400)

GRIDS = ((1, 1), (1, 2), (4, 5), (2, 17))
"""Numbers of rows, and of queries of each."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What may decide how a library computes attention, but for the shape of a step."""

    num_kv_heads: int
    num_groups: int
    """Query heads for each of them."""
    head_size: int
    value_size: int
    has_softcap: bool
    has_sinks: bool
    dtype: torch.dtype
    device: torch.device


class Manner(NamedTuple):
    """How attention is computed: the parts of `Shapes` that concern it, in their order."""

    min_queries: int
    query_multiple: int
    sum_slots: int
    weighs_in_blocks: bool


def find_manner(kinds: frozenset[AttentionKind]) -> Manner | None:
    """The cheapest manner in which a query's result is its own, in layers of all these kinds; None if there is
    none."""
    likes = (torch.empty(0, dtype=kind.dtype, device=kind.device) for kind in kinds)
    key = (kinds, *(circumstances(like) for like in likes))
    return remembered(key, lambda: _find_manner([AttentionTrial(kind) for kind in kinds]))


def _find_manner(trials: list[AttentionTrial]) -> Manner | None:
    for in_blocks in (False, True):
        if all(trial.is_weighing_alike(in_blocks) for trial in trials):
            break
    else:
        return None
    for queries in QUERIES:
        if all(trial.are_scores_alike(*queries) for trial in trials):
            for sum_slots in SUM_SLOTS:
                manner = Manner(*queries, sum_slots, in_blocks)
                if all(trial.are_sums_alike(manner) for trial in trials):
                    return manner
    return None


class AttentionTrial:
    """One query of one row, everywhere."""

    def __init__(self, kind: AttentionKind) -> None:
        self.kind = kind
        like = torch.empty(0, dtype=kind.dtype, device=kind.device)
        rows, columns = map(max, zip(*GRIDS, strict=True))
        heads, slots = kind.num_kv_heads, WIDTHS[-1] * SLOT_BLOCK
        grid = (rows, heads, kind.num_groups, columns)
        self.queries, self.keys = cancelling((*grid, kind.head_size), (rows, heads, slots, kind.head_size), like)
        self.scores = random_like((*grid, slots), like)
        self.weights = random_like((*grid, slots), like).abs()
        self.values = random_like((rows, heads, slots, kind.value_size), like)

    def are_scores_alike(self, min_queries: int, query_multiple: int) -> bool:
        scores_of = partial(self._scores, min_queries, query_multiple)
        return self._is_alike(lambda position: (self.queries, self.keys), scores_of, of_slots=True)

    def is_weighing_alike(self, in_blocks: bool) -> bool:
        weights_of = partial(self._weights, in_blocks)
        return self._is_alike(lambda position: (self.scores, self.keys), weights_of, of_slots=True)

    def are_sums_alike(self, manner: Manner) -> bool:
        sums_of = partial(self._sums, manner)
        return self._is_alike(self._cancelling_up_to, sums_of, of_slots=False)

    def _cancelling_up_to(self, position: int) -> tuple[Tensor, Tensor]:
        """Weights and values of which those that the first query of the first row sees cancel each other in pairs,
        far apart, so that the sum is what rounding leaves of it."""
        order = torch.randperm(position + 1, generator=torch.Generator().manual_seed(2))
        half = len(order) // 2
        first, second = order[:half].to(self.values.device), order[half : 2 * half].to(self.values.device)
        weights, values = self.weights.clone(), self.values.clone()
        weights[0, :, :, 0, second] = weights[0, :, :, 0, first]
        values[0, :, second] = -values[0, :, first]
        if len(order) % 2:
            values[0, :, int(order[-1])] = 0
        return weights, values

    def _scores(self, least: int, multiple: int, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        num_queries = padded_to(queries.shape[2], least, multiple)
        mask = with_queries(_mask(seen, queries), num_queries)
        softcap = 30.0 if self.kind.has_softcap else None
        return scores(with_queries(queries, num_queries), keys, mask, 0.1, softcap)

    def _weights(self, in_blocks: bool, line: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        sinks = torch.ones_like(line[:1, ..., :1]) if self.kind.has_sinks else None
        return (weigh_in_blocks if in_blocks else weigh)(line[..., : keys.shape[2]] + _mask(seen, line), sinks)

    def _sums(self, manner: Manner, weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        weights = weights[..., : values.shape[2]].masked_fill(~seen, 0.0)
        num_queries = padded_to(weights.shape[2], manner.min_queries, manner.query_multiple)
        return weighted_sum(with_queries(weights, num_queries), values, manner.sum_slots)

    def _is_alike(
        self,
        inputs: Callable[[int], tuple[Tensor, Tensor]],
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
        of_slots: bool,
    ) -> bool:
        """Does the first query of the first row get the same result everywhere? `inputs` gives for its position a
        grid `[rows, kv heads, groups, columns, size]` and a store `[rows, kv heads, slots, size]`. `of_slots`: a
        result for each slot, of which those that it sees count."""
        for position in POSITIONS:
            wanted = None
            grid, store = inputs(position)
            for place in _places(position):
                result = self._at(grid, store, compute, position, *place)
                result = result[..., : position + 1] if of_slots else result
                wanted = result if wanted is None else wanted
                if not torch.equal(result, wanted):
                    return False
        return True

    def _at(
        self,
        grid: Tensor,
        store: Tensor,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
        position: int,
        width: int,
        num_rows: int,
        num_columns: int,
        is_last: bool,
    ) -> Tensor:  # [kv heads, groups, size]
        """The query's result in the first row and column, or in the last ones. As in a cache, the slots that are
        read are a part of those that there are."""
        row, column = (num_rows - 1, num_columns - 1) if is_last else (0, 0)
        rows = [0 if place == row else place or row for place in range(num_rows)]
        columns = [0 if place == column else place or column for place in range(num_columns)]
        queries = grid[rows][..., columns, :].flatten(2, 3)
        positions = torch.full((num_rows, num_columns), width - 1, device=store.device)
        positions[row, column] = position
        seen = torch.arange(width, device=store.device) <= positions.unsqueeze(-1)
        seen = seen.repeat(1, self.kind.num_groups, 1).unsqueeze(1)
        result = compute(queries, store[rows][:, :, :width], seen)[:, :, : queries.shape[2]]
        return result.unflatten(2, (self.kind.num_groups, num_columns))[row, :, :, column]


def _places(position: int) -> Iterator[tuple[int, int, int, bool]]:
    """Widths, rows, columns, and whether the query is the last: alone over the narrowest cache first."""
    for width, (num_rows, num_columns) in product(WIDTHS, GRIDS):
        if width * SLOT_BLOCK > position:
            yield width * SLOT_BLOCK, num_rows, num_columns, False
            if num_rows * num_columns > 1:
                yield width * SLOT_BLOCK, num_rows, num_columns, True


def _mask(seen: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)
