"""Where a row's slots lie: in blocks of one pool that all rows share.

Slot `j` of a row is place `j % BLOCK` of the row's block number `j // BLOCK`. So a row takes what it holds,
rounded up to a block, and attention reads that and no more, however long its neighbours are. Which blocks a row
owns is the table's state; what a step needs to know of it is derived here for the step, and forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from batchspec.layout.packed import PackedStep
from batchspec.layout.transfer import to_device

BLOCK = 256
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


def homes(step: PackedStep, table: BlockTable) -> tuple[Tensor, Tensor]:  # [N], [N]
    """The block of each of the step's tokens, and its place in there.

    >>> from batchspec.layout.packed import pack
    >>> table = BlockTable(block_size=4)
    >>> table.give(table.missing([0, 1], [3, 8]))  # block 0, blocks 1 and 2
    >>> [places.tolist() for places in homes(pack([2, 6], [1, 2]), table)]
    [[0, 2, 2], [2, 2, 3]]
    """
    size = table.block_size
    found = [
        (table.rows[row][slot // size], slot % size)
        for row, length, new in zip(step.rows, step.lengths, step.num_new, strict=True)
        for slot in range(length, length + new)
    ]
    blocks, places = to_device(list(zip(*found, strict=True)), step.slots.device)
    return blocks, places
