"""How the tokens of a step meet the blocks of their rows.

All blocks of one part of a step are met by as many queries as the widest row has. So where few rows draft and many
do not, the draft tokens of those few are a part of their own: their blocks are read twice, and no other row is
widened by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchspec.layout.blocks import BlockTable
from batchspec.layout.packed import PackedStep
from batchspec.layout.transfer import to_device

Ints = TypeVar("Ints", int, NDArray[np.int64])

READ_COST, PART_COST = 8, 28
"""What reading a block once more costs, and a part of its own, counted in columns of a block: measured with
SmolLM2-135M on CPUs."""


@dataclass(frozen=True, slots=True)
class BlockPart:
    """The `B` blocks of some rows, in the pool's order, each met by as many queries."""

    blocks: slice | Tensor
    """A slice if they lie side by side, else `[B]` int64."""
    first_slots: Tensor
    """`[B]` int64: the slot in its row of each block's first place."""
    queries: Tensor
    """`[B, columns]` int64: the places on the line of each block's queries, its row's; empty places repeat the
    line's first."""
    positions: Tensor
    """`[B, columns]` int64: their positions; 0 at empty places."""

    @property
    def num_columns(self) -> int:
        return self.queries.shape[1]

    def read(self, pool: Tensor) -> Tensor:  # [blocks, kv heads, block, size]; [B, kv heads, block, size]
        return pool[self.blocks] if isinstance(self.blocks, slice) else torch.index_select(pool, 0, self.blocks)


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """A step in one part, or in two: the newest token of each row, and the draft tokens of those that have any."""

    step: PackedStep
    parts: tuple[BlockPart, ...]
    meetings: Tensor
    """`[3, T]` int64: part, place of the block in it, and column in which a token meets a block of its row: the
    first blocks of all tokens, then the second ones, and so on; tokens with the most blocks stand first ..."""
    counts: tuple[int, ...]
    """... so that there are so many, no more from one to the next: `T` in all, and `N` first ones."""
    tokens: Tensor
    """`[T]` int64: of each meeting, the token's place among the first ones."""
    order: Tensor | None
    """`[N]` int64: the place of each token of the line among the first ones; None: in the line's order."""


def lay_out_attention(step: PackedStep, table: BlockTable) -> AttentionLayout:
    """Derive it; the rows must have room for the step's tokens.

    Example: blocks of 4 slots; row 0 holds 2 tokens (block 0), row 1 holds 6 (blocks 1 and 2). They add 1 and 2
    tokens. Row 1 has more blocks, so its tokens 1 and 2 stand first.

    >>> from batchspec.layout.packed import pack
    >>> table = BlockTable(block_size=4)
    >>> table.give(table.missing([0, 1], [3, 8]))
    >>> layout = lay_out_attention(pack([2, 6], [1, 2]), table)
    >>> (part,) = layout.parts
    >>> part.blocks, part.first_slots.tolist()
    (slice(0, 3, None), [0, 0, 4])
    >>> part.queries.tolist(), part.positions.tolist()
    ([[0, 0], [1, 2], [1, 2]], [[2, 0], [6, 7], [6, 7]])
    >>> layout.counts, layout.order.tolist(), layout.tokens.tolist()
    ((3, 2), [2, 0, 1], [0, 1, 2, 0, 1])
    >>> layout.meetings[1:].tolist()  # blocks and columns: 1 of tokens 1 and 2, 0 of token 0, then 2
    [[1, 1, 0, 2, 2], [0, 1, 0, 0, 1]]

    Of 100 rows, one adds 5 tokens; its 4 draft tokens are a part of their own.

    >>> table = BlockTable(block_size=4)
    >>> table.give(table.missing(range(100), [6] * 100))
    >>> layout = lay_out_attention(pack([1] * 100, [5] + [1] * 99), table)
    >>> [part.queries.shape for part in layout.parts], layout.parts[1].queries[1].tolist()
    ([torch.Size([200, 1]), torch.Size([2, 4])], [1, 2, 3, 4])
    """
    new = np.array(step.num_new)
    owned = [table.rows.get(row, []) if count else [] for row, count in zip(step.rows, step.num_new, strict=True)]
    chosen = sorted((block, row, number) for row, own in enumerate(owned) for number, block in enumerate(own))
    blocks = np.array(chosen).T  # [3, blocks]: block, row, and its number there
    num_drafting = int((new[blocks[1]] > 1).sum())
    is_split = is_worth_two_parts(len(chosen), num_drafting, step.num_columns)
    cuts = [0, 1, step.num_columns] if is_split else [0, step.num_columns]
    of_parts = [blocks[:, new[blocks[1]] > first] for first in cuts[:-1]]
    parts = [
        _part(step, own, table.block_size, *columns) for own, columns in zip(of_parts, pairwise(cuts), strict=True)
    ]
    return AttentionLayout(step, tuple(parts), *_meetings(step, of_parts, cuts))


def _part(step: PackedStep, blocks: NDArray[np.int64], block_size: int, first: int, end: int) -> BlockPart:
    """The columns from `first` to `end` of these `[3, B]` blocks."""
    block, row, number = blocks
    new, held, columns = np.array(step.num_new), np.array(step.lengths), np.arange(first, end)
    is_there = columns < new[row, None]  # [B, columns]
    queries = np.where(is_there, (new.cumsum() - new)[row, None] + columns, 0)
    positions = np.where(is_there, held[row, None] + columns, 0)
    device, span = step.slots.device, slice(int(block[0]), int(block[-1]) + 1)
    return BlockPart(
        span if span.stop - span.start == len(block) else _send(block, device),
        _send(number * block_size, device),
        _send(queries, device),
        _send(positions, device),
    )


def _meetings(
    step: PackedStep, of_parts: Sequence[NDArray[np.int64]], cuts: Sequence[int]
) -> tuple[Tensor, tuple[int, ...], Tensor, Tensor | None]:
    """What an `AttentionLayout` says of them; `cuts` are the first columns of the parts, and the end."""
    new = np.array(step.num_new)
    num_owned = np.bincount(of_parts[0][1], minlength=len(new))  # all rows with new tokens are in the first part
    place_of = np.zeros((len(of_parts), len(new), num_owned.max()), dtype=np.int64)
    for part, (_, row, number) in enumerate(of_parts):
        place_of[part, row, number] = np.arange(len(row))
    row_of = np.repeat(np.arange(len(new)), new)  # [N]
    column_of = np.arange(len(row_of)) - (new.cumsum() - new)[row_of]
    order = np.argsort(-num_owned[row_of], kind="stable")
    counts = [int((num_owned[row_of] > number).sum()) for number in range(num_owned.max())]
    tokens = np.concatenate([np.arange(count) for count in counts])  # [T]
    met_row, met_column = row_of[order][tokens], column_of[order][tokens]
    met_part = np.searchsorted(cuts[1:-1], met_column, side="right")
    met_block = place_of[met_part, met_row, np.repeat(np.arange(len(counts)), counts)]
    sent = _send(np.stack([met_part, met_block, met_column - np.array(cuts)[met_part], tokens]), step.slots.device)
    is_in_order = bool((np.diff(order) > 0).all())
    return sent[:3], tuple(counts), sent[3], None if is_in_order else _send(np.argsort(order), sent.device)


def _send(values: NDArray[np.int64], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(values), device)


def is_worth_two_parts(num_blocks: int, num_drafting: int, num_columns: int) -> bool:
    """Is it cheaper to read the blocks of the rows that draft once more than to compute draft columns for all?"""
    return _two_parts(num_drafting, num_columns) < _one_part(num_blocks, num_columns)


def draft_columns(num_blocks: int, num_drafting: Ints, num_columns: Ints) -> Ints:
    """What drafts add to a step's attention, counted in columns of a block: of `num_blocks` in all, `num_drafting`
    are those of rows that draft.

    >>> draft_columns(100, np.array([30, 30]), np.array([2, 9])).tolist()  # all widened by one; two parts
    [100, 508]
    """
    return np.minimum(_one_part(num_blocks, num_columns), _two_parts(num_drafting, num_columns))


def _one_part(num_blocks: int, num_columns: Ints) -> Ints:
    return num_blocks * (num_columns - 1)


def _two_parts(num_drafting: Ints, num_columns: Ints) -> Ints:
    return num_drafting * (READ_COST + num_columns - 1) + PART_COST
