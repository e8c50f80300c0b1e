"""Where a row's slots lie: in blocks of one pool that all rows share.

Slot `j` of a row is place `j % BLOCK` of the row's block number `j // BLOCK`. So a row takes what it holds,
rounded up to a block, and attention reads that and no more, however long its neighbours are. Which blocks a row
owns is the table's state; what a step needs to know of it is derived here for the step, and forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.layout.packed import PackedStep
from batchspec.layout.transfer import to_device

BLOCK = 128
"""Slots of a block."""


class BlockTable:
    """Which blocks each row owns, in the order of its slots. The blocks in use are always the first ones: a hole
    is filled with what lies at the end, so that a step over all rows reads one piece of the pool.

    >>> table = BlockTable(block_size=4)
    >>> table.give(table.missing([0, 1], [6, 3]))  # slots that they need
    >>> table.missing([0, 1], [9, 4])
    {0: [3]}
    >>> table.give({0: [3]})
    >>> table.rows
    {0: [0, 1, 3], 1: [2]}

    Row 0 ends: of the blocks that it frees, 0 is filled with 2, the last one in use, and the others are the end.

    >>> moves = table.moves_without(0)
    >>> moves
    {2: 0}
    >>> table.drop(0, moves)
    >>> table.rows
    {1: [0]}
    """

    def __init__(self, block_size: int = BLOCK) -> None:
        self.block_size = block_size
        self.rows: dict[int, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.rows.values()))

    def missing(self, rows: Sequence[int], num_slots: Sequence[int]) -> dict[int, list[int]]:
        """The blocks that rows have to be given before they have room for so many slots each."""
        blocks, end = {}, self.num_blocks
        for row, slots in zip(rows, num_slots, strict=True):
            count = -(-slots // self.block_size) - len(self.rows.get(row, ()))
            if count > 0:
                blocks[row] = list(range(end, end := end + count))
        return blocks

    def give(self, blocks: dict[int, list[int]]) -> None:
        self.rows |= {row: self.rows.get(row, []) + more for row, more in blocks.items()}

    def moves_without(self, row: int) -> dict[int, int]:
        """Which blocks have to be copied where, source to target, before the row can be dropped."""
        freed = set(self.rows.get(row, ()))
        tail = set(range(self.num_blocks - len(freed), self.num_blocks))
        return dict(zip(sorted(tail - freed), sorted(freed - tail), strict=True))

    def drop(self, row: int, moves: dict[int, int]) -> None:
        """Forget the row, after those blocks were copied."""
        self.rows = {
            other: [moves.get(block, block) for block in blocks]
            for other, blocks in self.rows.items()
            if other != row
        }

    def rename(self, row: int, name: int) -> None:
        if row in self.rows:
            self.rows[name] = self.rows.pop(row)


@dataclass(frozen=True, slots=True)
class BlockStep:
    """What attention over blocks needs to know of a step. `B` blocks of `R` rows take part; rows are numbered here
    from those with the most blocks to those with the fewest."""

    step: PackedStep
    blocks: Tensor | None
    """`[B]` int64: the pool's blocks that are read, in their order; None: the first `num_blocks`."""
    num_blocks: int
    write_blocks: Tensor
    """`[N]` int64: the pool's block of each token, and ..."""
    write_places: Tensor
    """... `[N]` int64: its place in there."""
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
    """`[R, columns]` int64: the places on the line of each row's queries; empty places repeat some other."""
    positions: Tensor
    """`[R, columns]` int64: their positions; 0 at empty places, which then see slot 0 (never nothing)."""
    grid_index: Tensor
    """`[N]` int64: place of each token in the flattened grid of `R` rows."""

    @property
    def num_columns(self) -> int:
        return self.step.num_columns


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
    >>> layout.write_blocks.tolist(), layout.write_places.tolist()
    ([0, 2, 2], [2, 2, 3])
    >>> layout.row_blocks.tolist(), layout.in_order.tolist(), layout.counts
    ([[1, 2], [0, 0]], [1, 0, 2], (2, 1))
    >>> layout.queries.tolist(), layout.positions.tolist(), layout.grid_index.tolist()
    ([[1, 2], [0, 0]], [[6, 7], [2, 0]], [2, 0, 1])
    """
    size, device = table.block_size, step.slots.device
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
    writes = [
        (owned[place][slot // size], slot % size, ranks[place] * step.num_columns + column)
        for place, (length, new) in enumerate(zip(step.lengths, step.num_new, strict=True))
        for column, slot in enumerate(range(length, length + new))
    ]
    blocks, rows, numbers = zip(*chosen, strict=True)
    is_all = blocks == tuple(range(len(blocks)))
    per_block = to_device([blocks, rows, [number * size for number in numbers], in_order], device)
    per_token = to_device(list(zip(*writes, strict=True)), device)
    queries, positions = torch.zeros(2, len(order) * step.num_columns, dtype=torch.long, device=device).unbind()
    queries[per_token[2]] = torch.arange(step.num_tokens, device=device)
    positions[per_token[2]] = step.slots
    return BlockStep(
        step=step,
        blocks=None if is_all else per_block[0],
        num_blocks=len(blocks),
        write_blocks=per_token[0],
        write_places=per_token[1],
        rows=per_block[1],
        first_slots=per_block[2],
        row_blocks=to_device(row_blocks, device),
        in_order=per_block[3],
        counts=tuple(counts),
        queries=queries.view(len(order), step.num_columns),
        positions=positions.view(len(order), step.num_columns),
        grid_index=per_token[2],
    )
