"""Changes to logits before verification, each for all packed positions of a step at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from batchspec.layout.transfer import to_device


def forbid_ends(
    logits: Tensor,  # [N, vocabulary], changed in place
    num_lines: Sequence[int],  # [rows]: lines of each row, which stand row by row
    num_forbidden: Sequence[int],  # [rows]: how many of its first lines must not choose an end token
    end_token_ids: Sequence[Iterable[int]],  # [rows]
) -> Tensor:  # [N, vocabulary]
    """`min_tokens`: give end tokens -inf at each position that is too early for them, drafts included.

    Example: row 0 has 3 lines and may not end in the first 2; row 1 may.

    >>> logits = forbid_ends(torch.zeros(4, 3), [3, 1], [2, 0], [{1}, {1}])
    >>> logits[:, 1].tolist()
    [-inf, -inf, 0.0, 0.0]
    """
    lines: list[int] = []
    tokens: list[int] = []
    first_line = 0
    for count, forbidden, ends in zip(num_lines, num_forbidden, end_token_ids, strict=True):
        for line in range(first_line, first_line + min(count, forbidden)):
            for token in ends:
                lines.append(line)
                tokens.append(token)
        first_line += count
    if lines:
        index = to_device([lines, tokens], logits.device)
        logits[index[0], index[1]] = -torch.inf
    return logits
