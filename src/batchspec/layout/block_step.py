"""How the queries of a step meet the blocks of their rows.

All rows of one call have as many queries computed as the widest of them. So where few rows draft and many do not,
the newest token of every row and the draft tokens of those few attend in calls of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchspec.layout.blocks import BlockTable
from batchspec.layout.packed import PackedStep, pack
from batchspec.layout.transfer import to_device

Ints = TypeVar("Ints", int, NDArray[np.int64])

READ_COST, CALL_COST = 8, 55
"""What reading a block once more costs, and a call of its own, counted in columns of a block: measured with
SmolLM2-135M on CPUs."""


@dataclass(frozen=True, slots=True)
class BlockStep:
    """What attention over blocks needs to know of a step, or of a part of one. `B` blocks of `R` rows take part;
    rows are numbered here from those with the most blocks to those with the fewest."""

    step: PackedStep
    blocks: Tensor | None
    """`[B]` int64: the pool's blocks that are read, in their order; None: the first `num_blocks`."""
    num_blocks: int
    rows: Tensor
    """`[B]` int64: the row that each block belongs to."""
    first_slots: Tensor
    """`[B]` int64: the slot in that row of each block's first place."""
    row_blocks: Tensor
    """`[R, most blocks of a row]` int64: the places of each row's blocks among the `B`; short rows repeat their
    first."""
    in_order: Tensor
    """`[B]` int64: places of the first blocks of all rows, then of the second blocks, and so on ..."""
    counts: tuple[int, ...]
    """... of which there are so many: `R` first ones, and no more from one to the next."""
    queries: Tensor
    """`[B, columns]` int64: the places on the line of each block's queries, its row's; empty places repeat some
    other."""
    positions: Tensor
    """`[B, columns]` int64: their positions; 0 at empty places, which then see slot 0 (never nothing)."""
    grid_index: Tensor
    """`[N]` int64: place of each token in the flattened grid of `R` rows."""

    @property
    def num_rows(self) -> int:
        return len(self.row_blocks)

    @property
    def num_columns(self) -> int:
        return self.step.num_columns

    def read(self, pool: Tensor) -> Tensor:  # [blocks, kv heads, block, size]; [B, kv heads, block, size]
        return pool[: self.num_blocks] if self.blocks is None else torch.index_select(pool, 0, self.blocks)


def lay_out_blocks(step: PackedStep, table: BlockTable) -> BlockStep:
    """Derive a step's layout over the blocks of its rows, which must have room for it.

    Example: blocks of 4 slots; row 0 holds 2 tokens (block 0), row 1 holds 6 (blocks 1 and 2). They add 1 and 2
    tokens. Row 1 has more blocks and is number 0 here; so the blocks 0, 1, 2 belong to the rows 1, 0, 0.

    >>> from batchspec.layout.packed import pack
    >>> table = BlockTable(block_size=4)
    >>> table.give(table.missing([0, 1], [3, 8]))
    >>> layout = lay_out_blocks(pack([2, 6], [1, 2]), table)
    >>> layout.rows.tolist(), layout.first_slots.tolist()
    ([1, 0, 0], [0, 0, 4])
    >>> layout.row_blocks.tolist(), layout.in_order.tolist(), layout.counts
    ([[1, 2], [0, 0]], [1, 0, 2], (2, 1))
    >>> layout.queries.tolist(), layout.positions.tolist(), layout.grid_index.tolist()
    ([[0, 0], [1, 2], [1, 2]], [[2, 0], [6, 7], [6, 7]], [2, 0, 1])
    """
    device = step.slots.device
    owned = [table.rows.get(row, []) for row in step.rows]
    order = sorted((place for place, blocks in enumerate(owned) if blocks), key=lambda place: -len(owned[place]))
    ranks = {place: rank for rank, place in enumerate(order)}
    chosen = sorted((block, ranks[place], number) for place in order for number, block in enumerate(owned[place]))
    place_of = {block: place for place, (block, _, _) in enumerate(chosen)}
    counts = [sum(len(owned[place]) > number for place in order) for number in range(len(owned[order[0]]))]
    row_blocks = [
        [place_of[block] for block in owned[place]]
        + [place_of[owned[place][0]]] * (len(counts) - len(owned[place]))
        for place in order
    ]
    in_order = [row_blocks[rank][number] for number, count in enumerate(counts) for rank in range(count)]
    grid_places = [
        ranks[place] * step.num_columns + column for place, new in enumerate(step.num_new) for column in range(new)
    ]
    blocks, rows, numbers = zip(*chosen, strict=True)
    is_all = blocks == tuple(range(len(blocks)))
    per_block = to_device([blocks, rows, [number * table.block_size for number in numbers], in_order], device)
    grid_index = to_device(grid_places, device)
    queries, positions = torch.zeros(2, len(order) * step.num_columns, dtype=torch.long, device=device).unbind()
    queries[grid_index] = torch.arange(step.num_tokens, device=device)
    positions[grid_index] = step.slots
    return BlockStep(
        step=step,
        blocks=None if is_all else per_block[0],
        num_blocks=len(blocks),
        rows=per_block[1],
        first_slots=per_block[2],
        row_blocks=to_device(row_blocks, device),
        in_order=per_block[3],
        counts=tuple(counts),
        queries=queries.view(len(order), step.num_columns)[per_block[1]],
        positions=positions.view(len(order), step.num_columns)[per_block[1]],
        grid_index=grid_index,
    )


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """A step in one part, or in two: the newest token of each row, and the draft tokens of those that have any."""

    step: PackedStep
    parts: tuple[BlockStep, ...]
    lines: tuple[Tensor, ...]
    """Of two parts: `[N of the part]` int64, the places on the line of its tokens."""
    order: Tensor | None
    """Of two parts: `[N]` int64, the place of each token of the line among those of the parts."""


def lay_out_attention(step: PackedStep, table: BlockTable) -> AttentionLayout:
    """Derive it; the rows must have room for the step's tokens.

    Example: 100 rows of which one adds 5 tokens; its 4 draft tokens attend by themselves.

    >>> table = BlockTable(block_size=4)
    >>> table.give(table.missing(range(100), [6] * 100))
    >>> layout = lay_out_attention(pack([1] * 100, [5] + [1] * 99), table)
    >>> [part.step.num_tokens for part in layout.parts], layout.lines[1].tolist()
    ([100, 4], [1, 2, 3, 4])
    >>> layout.order[:7].tolist()
    [0, 100, 101, 102, 103, 1, 2]
    """
    num_blocks = [len(table.rows.get(row, ())) for row in step.rows]
    drafting = [place for place, new in enumerate(step.num_new) if new > 1]
    if not is_worth_two_calls(sum(num_blocks), sum(num_blocks[place] for place in drafting), step.num_columns):
        return AttentionLayout(step, (lay_out_blocks(step, table),), (), None)
    device = step.slots.device
    newest = pack(step.lengths, [min(1, new) for new in step.num_new], device, rows=step.rows)
    drafts = pack(
        [step.lengths[place] + 1 for place in drafting],
        [step.num_new[place] - 1 for place in drafting],
        device,
        rows=[step.rows[place] for place in drafting],
    )
    columns = [column for new in step.num_new for column in range(new)]
    lines = (
        [place for place, column in enumerate(columns) if not column],
        [place for place, column in enumerate(columns) if column],
    )
    order = sorted(range(len(columns)), key=[*lines[0], *lines[1]].__getitem__)
    parts = lay_out_blocks(newest, table), lay_out_blocks(drafts, table)
    return AttentionLayout(step, parts, tuple(to_device(line, device) for line in lines), to_device(order, device))


def is_worth_two_calls(num_blocks: int, num_drafting: int, num_columns: int) -> bool:
    """Is it cheaper to read the blocks of the rows that draft once more than to compute draft columns for all?"""
    return _two_calls(num_drafting, num_columns) < _one_call(num_blocks, num_columns)


def draft_columns(num_blocks: int, num_drafting: Ints, num_columns: Ints) -> Ints:
    """What drafts add to a step's attention, counted in columns of a block: of `num_blocks` in all, `num_drafting`
    are those of rows that draft.

    >>> draft_columns(100, np.array([30, 30]), np.array([2, 9])).tolist()  # all widened by one; two calls
    [100, 535]
    """
    return np.minimum(_one_call(num_blocks, num_columns), _two_calls(num_drafting, num_columns))


def _one_call(num_blocks: int, num_columns: Ints) -> Ints:
    return num_blocks * (num_columns - 1)


def _two_calls(num_drafting: Ints, num_columns: Ints) -> Ints:
    return num_drafting * (READ_COST + num_columns - 1) + CALL_COST
