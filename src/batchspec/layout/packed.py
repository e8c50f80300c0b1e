"""The packed layout: one flat line of tokens, derived from one integer per row.

A row is left-packed: token `j` of a sequence lives in slot `j` of its row, so position and slot are the same
number and there is no padding. How many tokens of a row are cached is the only state; all that a step needs is
derived here from those lengths, used for the step, and forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.layout.transfer import to_device


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Index tensors of one forward pass over `N` tokens in some rows of a cache.

    The tokens stand row by row on one line `[1, N]`. What has a place for every row and column, such as drafts and
    padded rows, is a grid `[num_rows, num_columns]`; rows with fewer tokens leave places of it empty.
    """

    rows: Sequence[int]
    """`[num_rows]`: the cache rows that take part, in the order of the batch."""
    lengths: Sequence[int]
    """`[num_rows]`: tokens that each of them holds before the step."""
    num_new: Sequence[int]
    """`[num_rows]`: tokens that each of them adds."""
    num_columns: int
    """Most tokens of any row: the width of the grid."""
    num_slots: int
    """The length of the longest row after the step."""
    cache_rows: Tensor
    """`[N]` int64: cache row of each token."""
    slots: Tensor
    """`[N]` int64: slot of each token in its row, which is also its position."""
    grid_index: Tensor
    """`[N]` int64: place of each token in the flattened grid."""
    last_index: Tensor
    """`[rows with tokens]` int64: place on the line of each row's last token."""

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def end_row(self) -> int:
        """The row behind the highest one."""
        return max(self.rows) + 1

    @property
    def are_neighbours(self) -> bool:
        """True if the rows lie side by side in the cache, in this order."""
        return all(row == self.rows[0] + place for place, row in enumerate(self.rows))

    @property
    def num_tokens(self) -> int:
        return self.slots.shape[0]

    @property
    def is_full(self) -> bool:
        """True when no grid place is empty: the line is the grid, and nothing has to be scattered."""
        return self.num_tokens == self.num_rows * self.num_columns


def pack(
    lengths: Sequence[int],  # [num_rows]
    num_new: Sequence[int],  # [num_rows]
    device: torch.device | str = "cpu",
    rows: Sequence[int] | None = None,  # [num_rows]
) -> PackedStep:
    """Derive a step's layout: row `i` holds `lengths[i]` tokens and adds `num_new[i]` (0 is allowed).

    `rows` names the cache rows that these are; by default they are the first ones.

    Raises:
        ValueError: the lists differ in length, or no row adds a token.

    Example: three rows hold 5, 2 and 9 tokens and add 3, 1 and 2. Their new tokens a, b, c | d | e, f stand on
    one line of 6; each goes to the slot behind those that its row holds. The grid is 3 x 3 (a b c / d . . /
    e f .), and the longest row then holds 11 slots.

    >>> step = pack([5, 2, 9], [3, 1, 2])
    >>> step.cache_rows.tolist()
    [0, 0, 0, 1, 2, 2]
    >>> step.slots.tolist()
    [5, 6, 7, 2, 9, 10]
    >>> step.grid_index.tolist()
    [0, 1, 2, 3, 6, 7]
    >>> step.last_index.tolist()
    [2, 3, 5]
    >>> step.num_columns, step.num_slots, step.is_full
    (3, 11, False)

    Suppose that row 0 keeps one of its three tokens and row 2 both. Rolling back is setting the lengths to 6, 3
    and 11: the next step derives everything else anew, and its tokens overwrite what was rejected.

    >>> pack([6, 3, 11], [1, 1, 1]).slots.tolist()
    [6, 3, 11]
    """
    rows = range(len(lengths)) if rows is None else rows
    if not len(lengths) == len(num_new) == len(rows):
        raise ValueError(
            f"lengths, num_new and rows must be equally long, got {len(lengths)}, {len(num_new)} and {len(rows)}"
        )
    num_tokens, num_columns = sum(num_new), max(num_new, default=0)
    if num_columns == 0:
        raise ValueError("at least one row must add a token")
    held = torch.tensor(lengths, device="cpu")  # index arithmetic happens on the host; its results are copied once
    new = torch.tensor(num_new, device="cpu")
    ends = new.cumsum(0)
    places = torch.repeat_interleave(torch.arange(len(num_new), device="cpu"), new)
    columns = torch.arange(num_tokens, device="cpu") - (ends - new)[places]
    cache_rows = torch.tensor(rows, device="cpu")[places]
    index = torch.stack([cache_rows, held[places] + columns, places * num_columns + columns])
    index = to_device(index, device)
    return PackedStep(
        rows=rows,
        lengths=lengths,
        num_new=num_new,
        num_columns=num_columns,
        num_slots=max(length + n for length, n in zip(lengths, num_new, strict=True)),
        cache_rows=index[0],
        slots=index[1],
        grid_index=index[2],
        last_index=to_device(ends[new > 0] - 1, device),
    )
