"""The padded layout of EQSPEC and EXSPEC: a rectangle of left-padded rows.

Here too lengths are the only state. With `L` the longest row's length, row `i` has `L - lengths[i]` columns of
padding and then its tokens, so that all rows end at column `L`; the tokens of a step stand behind that, in the
columns `L ... L + T - 1`. Mask, positions and the realignment after a round follow from the lengths. (Batch
Speculative Decoding Done Right, section 3: unpad, append, repad, for tokens, mask and KV by the same offset.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.layout.packed import PackedStep
from batchspec.layout.transfer import to_device


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """A step's tokens as a rectangle of `T` columns, behind a past of `L` columns."""

    mask: Tensor
    """`[rows, L + T]` int64: 0 for padding on the left, else 1."""
    position_ids: Tensor
    """`[rows, T]` int64."""


def left_padding(lengths: Sequence[int]) -> list[int]:
    """Columns of padding before each row: padding + content is the same for all.

    >>> left_padding([5, 2, 9])
    [4, 7, 0]
    """
    longest = max(lengths, default=0)
    return [longest - length for length in lengths]


def lay_out(step: PackedStep) -> PaddedStep:
    """Lay a step out as a rectangle. A row with fewer tokens than others has empty places behind them.

    No token sees an empty place, as those come later. The mask shows them all the same, so that each sees at
    least itself: softmax over nothing is no number, and a weight of 0 does not make it one. They share the
    position of the token before them, which keeps them within the context window.

    Example: rows of 3 and 1 tokens add 1 and 2. The second has two columns of padding, the first an empty place.

    >>> from batchspec.layout.packed import pack
    >>> padded = lay_out(pack([3, 1], [1, 2]))
    >>> padded.mask.tolist()
    [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    >>> padded.position_ids.tolist()
    [[3, 3], [1, 2]]
    """
    device = step.slots.device
    last = [max(0, held + new - 1) for held, new in zip(step.lengths, step.num_new, strict=True)]
    index = to_device([left_padding(step.lengths), list(step.lengths), last], device)
    padding, held, last_position = index.unsqueeze(-1)  # [rows, 1] each
    columns = torch.arange(max(step.lengths) + step.num_columns, device=device)
    places = torch.arange(step.num_columns, device=device)
    return PaddedStep(mask=(columns >= padding).long(), position_ids=torch.minimum(held + places, last_position))


def source_columns(
    starts: Sequence[int],  # [rows]: column of each row's first token in the source
    lengths: Sequence[int],  # [rows]: tokens of it to take
    num_more: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:  # [rows, L + num_more]
    """From which column of a source each column of the left-padded rectangle comes.

    Padding repeats the row's first token: masked, it meets a weight of 0, and it must be a number for that.
    `num_more` columns behind the longest row go on counting.

    If a round appended `a[i]` tokens to row `i`, the row moves by `L' - L - a[i]` columns: new padding less old.
    Example: rows of 5, 2 and 9 tokens (L = 9, paddings 4, 7, 0) gain 3, 3 and 1 and are 8, 5 and 10 long, so
    L' = 10. The first two move by 10 - 9 - 3 = -2, which is two columns to the left; the last one stays.

    >>> left_padding([8, 5, 10])
    [2, 5, 0]
    >>> source_columns([4, 7, 0], [8, 5, 10]).tolist()
    [[4, 4, 4, 5, 6, 7, 8, 9, 10, 11], [7, 7, 7, 7, 7, 7, 8, 9, 10, 11], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
    """
    first, padding = to_device([list(starts), left_padding(lengths)], device).unsqueeze(-1)  # [rows, 1] each
    columns = torch.arange(max(lengths) + num_more, device=device)
    return first + (columns - padding).clamp_(min=0)


class Gather:
    """Copies chosen columns of chosen rows, all heads, in one gather per tensor.

    The index is made once for all tensors of one shape, which those of a model's layers mostly are.

    >>> gather = Gather(torch.tensor([1, 0]), torch.tensor([[1, 2], [0, 0]]))
    >>> gather(torch.arange(6).view(2, 1, 3, 1)).flatten(1).tolist()
    [[4, 5], [0, 0]]
    """

    def __init__(
        self,
        rows: Tensor,  # [rows]
        columns: Tensor,  # [rows, columns]
    ) -> None:
        self.rows = rows
        self.columns = columns
        self._indices: dict[tuple[int, int], Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """[source rows, heads, source columns, size], contiguous -> [rows, heads, columns, size]"""
        _, heads, width, size = tensor.shape
        if (heads, width) not in self._indices:
            self._indices[heads, width] = self._index(heads, width)
        line = tensor.reshape(-1, size).index_select(0, self._indices[heads, width])
        return line.view(len(self.rows), heads, self.columns.shape[1], size)

    def _index(self, heads: int, width: int) -> Tensor:  # [rows * heads * columns]
        head = torch.arange(heads, device=self.rows.device)
        lines = self.rows.unsqueeze(1) * heads + head  # [rows, heads]
        return (lines.unsqueeze(2) * width + self.columns.unsqueeze(1)).flatten()
