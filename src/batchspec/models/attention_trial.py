"""With how many queries must attention be computed for a query's result not to depend on those beside it?

Each of its stages is tried by itself, since rounding in one would hide what another does: the queries of a block
are computed alone, then among others, beside other blocks, and the results are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.layout.blocks import BLOCK
from batchspec.layout.shapes import padded_to
from batchspec.models.block_attention import logs_of_sums, scores, share, weighted_sums
from batchspec.models.products import cancelling, circumstances, random_like, remembered

QUERIES = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (4, 4), (8, 8), (16, 16))
"""Least numbers of queries of a block and kv head, and what they are a multiple of, from the cheapest on."""

COLUMNS = (1, 2, 3, 4, 5, 8, 9, 16, 17)
"""Numbers of tokens that a row adds: drafts with the newest token, and without."""

BLOCKS = (1, 2, 3, 8, 33, 50)
"""Numbers of blocks in a step."""


Stage = Callable[[Tensor, Tensor], Tensor]
"""From a grid of queries, and keys or values, to what the stage gives for each query."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What may decide how a library computes attention, but for the shape of a step."""

    num_kv_heads: int
    num_groups: int
    """Query heads for each of them."""
    head_size: int
    value_size: int
    has_softcap: bool
    dtype: torch.dtype
    device: torch.device


def find_queries(kinds: frozenset[AttentionKind]) -> tuple[int, int] | None:
    """The least number of queries, and the multiple, at which a query's result is its own in layers of all these
    kinds; None if there is none."""
    likes = (torch.empty(0, dtype=kind.dtype, device=kind.device) for kind in kinds)
    key = (kinds, *(circumstances(like) for like in likes))
    return remembered(key, lambda: _find_queries([AttentionTrial(kind) for kind in kinds]))


def _find_queries(trials: list[AttentionTrial]) -> tuple[int, int] | None:
    return next((queries for queries in QUERIES if all(trial.is_alike(*queries) for trial in trials)), None)


class AttentionTrial:
    """The queries of one row's block, everywhere."""

    def __init__(self, kind: AttentionKind) -> None:
        like = torch.empty(0, dtype=kind.dtype, device=kind.device)
        precise = torch.empty(0, dtype=_precise(kind.dtype), device=kind.device)
        blocks, heads = BLOCKS[-1], kind.num_kv_heads
        queries = padded_to(kind.num_groups * COLUMNS[-1], QUERIES[-1][0], QUERIES[-1][1])
        grid = (blocks, heads, queries)
        self.kind = kind
        self.grid, self.keys = cancelling((*grid, kind.head_size), (blocks, heads, BLOCK, kind.head_size), like)
        self.scores = random_like((*grid, BLOCK), precise)
        weights, values = cancelling((*grid, BLOCK), (blocks, heads, kind.value_size, BLOCK), like)
        self.weights, self.values = weights.to(precise), values.transpose(-1, -2).contiguous()

    def is_alike(self, least: int, multiple: int) -> bool:
        """Does each query get the same bits in each stage, whatever number of queries and blocks is computed?"""
        softcap = 30.0 if self.kind.has_softcap else None
        stages: list[tuple[Tensor, Tensor, Stage]] = [
            (self.grid, self.keys, lambda grid, keys: grid_scores(grid, keys, softcap)),
            (self.scores, self.keys, grid_weights),
            (self.weights, self.values, grid_sums),
            (self.scores[..., :1], self.keys, lambda logs, keys: share(logs, torch.ones_like(logs))),
        ]
        sizes = sorted({padded_to(self.kind.num_groups * columns, least, multiple) for columns in COLUMNS})
        return all(_is_alike(*stage, sizes) for stage in stages)


def grid_scores(grid: Tensor, keys: Tensor, softcap: float | None) -> Tensor:  # [B, kv heads, queries, block]
    shape = len(grid), 1, grid.shape[2], keys.shape[2]
    mask = torch.zeros(shape, dtype=_precise(grid.dtype), device=grid.device)
    scored = scores([grid.flatten(0, 1)], [keys.flatten(0, 1)], [mask], 0.1, softcap)
    return scored.view(*grid.shape[:-1], -1)


def grid_weights(scored: Tensor, keys: Tensor) -> Tensor:  # [B, kv heads, queries, block + 1], with their logs
    weights = torch.softmax(scored, dim=-1)
    return torch.cat([weights, logs_of_sums(scored, weights).unsqueeze(-1)], dim=-1)


def grid_sums(weights: Tensor, values: Tensor) -> Tensor:  # [B, kv heads, queries, value size]
    vectors = weights.flatten(0, 2)
    return weighted_sums(vectors, [values.flatten(0, 1)], [len(vectors)]).view(*weights.shape[:-1], -1)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _is_alike(grid: Tensor, store: Tensor, stage: Stage, sizes: list[int]) -> bool:
    """`grid` `[blocks, kv heads, queries, size]`; each query is computed in steps of all sizes, at both ends, and
    one place further on, as those of a draft are when they are a part of their own."""
    whole = stage(_part(grid, slice(None), slice(sizes[-1])), store)
    for count in BLOCKS:
        for first in {0, BLOCKS[-1] - count}:
            blocks = slice(first, first + count)
            for size in sizes:
                for start in {0, min(1, sizes[-1] - size), sizes[-1] - size}:
                    queries = slice(start, start + size)
                    if not torch.equal(
                        stage(_part(grid, blocks, queries), store[blocks]), whole[blocks, :, queries]
                    ):
                        return False
    return True


def _part(grid: Tensor, blocks: slice, queries: slice) -> Tensor:
    """A tensor of its own, as a step's is: how it lies in memory may decide what code is chosen."""
    return grid[blocks, :, queries].clone(memory_format=torch.contiguous_format)
