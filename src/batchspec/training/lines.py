"""Texts packed into lines for training. Each text keeps its own positions, and sees no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.training.shards import Text


@dataclass(frozen=True)
class Line:
    """Texts one after the other, with what the target says at some of their places."""

    token_ids: Tensor  # [1, W] int64
    position_ids: Tensor  # [1, W] int64, from 0 in each text
    places: Tensor  # [M] int64: where on the line a token of an answer is predicted
    top_ids: Tensor  # [M, k] int64
    top_logprobs: Tensor  # [M, k] float32
    texts: list[Text]

    def to(self, device: torch.device) -> Line:
        return Line(
            self.token_ids.to(device),
            self.position_ids.to(device),
            self.places.to(device),
            self.top_ids.to(device),
            self.top_logprobs.to(device),
            self.texts,
        )


def fill_lines(lengths: list[int], width: int, most_per_line: int) -> Iterator[list[int]]:
    """Which texts share a line: as they come, until the next one does not fit. A longer one has a line of its own.

    >>> list(fill_lines([3, 2, 4, 9, 1], width=6, most_per_line=8))
    [[0, 1], [2], [3], [4]]
    >>> list(fill_lines([3, 2, 1], width=6, most_per_line=1))
    [[0], [1], [2]]
    """
    line: list[int] = []
    room = width
    for place, length in enumerate(lengths):
        if line and (length > room or len(line) == most_per_line):
            yield line
            line, room = [], width
        line.append(place)
        room -= length
    if line:
        yield line


def make_line(texts: list[Text], width: int) -> Line:
    """A line of these texts; of one that is longer than `width` the first tokens.

    The last token of a text predicts nothing: a text of L tokens takes L - 1 places. Example: a prompt of two
    tokens and an answer of two, so that the second and the third place predict.

    >>> top = torch.zeros(2, 1)
    >>> text = Text(torch.tensor([5, 6, 7, 8]), 2, top + 7, top, is_greedy=True)
    >>> line = make_line([text, text], width=6)
    >>> line.token_ids.tolist(), line.position_ids.tolist(), line.places.tolist()
    ([[5, 6, 7, 5, 6, 7]], [[0, 1, 2, 0, 1, 2]], [1, 2, 4, 5])
    """
    tokens, positions, places, ids, logprobs = [], [], [], [], []
    start = 0
    for text in texts:
        length = min(len(text.token_ids) - 1, width)
        first = text.num_prompt_tokens - 1
        labelled = max(0, length - first)
        tokens.append(text.token_ids[:length].long())
        positions.append(torch.arange(length))
        places.append(torch.arange(first, first + labelled) + start)
        ids.append(text.top_ids[:labelled].long())
        logprobs.append(text.top_logprobs[:labelled].float())
        start += length
    return Line(
        torch.cat(tokens).unsqueeze(0),
        torch.cat(positions).unsqueeze(0),
        torch.cat(places),
        torch.cat(ids),
        torch.cat(logprobs),
        texts,
    )


def lines_of(texts: list[Text], width: int, most_per_line: int) -> list[Line]:
    """All texts, in their order."""
    lengths = [min(len(text.token_ids) - 1, width) for text in texts]
    chosen = fill_lines(lengths, width, most_per_line)
    return [make_line([texts[place] for place in line], width) for line in chosen]
