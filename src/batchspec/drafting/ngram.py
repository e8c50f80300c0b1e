"""Prompt lookup: what followed the same last tokens before, in the row's own prompt and output."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows

import torch

from batchspec.drafting.budget import Budget, FixedBudget
from batchspec.drafting.drafter import Draft
from batchspec.drafting.estimates import Mark, match_mark
from batchspec.request import Sequence

LONGEST_MATCH = 16
"""Tokens of a match that are counted."""


class NgramIndex:
    """Where each run of `shortest ... longest` tokens was last followed by another token. Grows with its text.

    >>> index = NgramIndex(longest=3, shortest=1)
    >>> text = [5, 6, 7, 8, 5, 6]
    >>> index.lookup(text, limit=3)  # "5 6" was followed by "7 8 5"
    [7, 8, 5]
    >>> text += [9, 5, 6]
    >>> index.lookup(text, limit=2)  # the newest match wins: "5 6" was last followed by "9 5"
    [9, 5]
    >>> NgramIndex(3, 1).lookup([1, 2, 1, 2, 1], limit=5)  # the copy may run on into itself
    [2, 1, 2, 1, 2]
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest = longest
        self.shortest = shortest
        self._followers: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def lookup(self, token_ids: list[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow `token_ids`: longest match first, newest match first."""
        start = self.find(token_ids)
        return [] if start is None else copy_from(token_ids, start, limit)

    def find(self, token_ids: list[int]) -> int | None:
        """The place behind the match.

        `token_ids` is the text of the last call with tokens added; only those are indexed now.
        """
        self._index(token_ids)
        end = len(token_ids)
        for size in range(min(self.longest, end), self.shortest - 1, -1):
            start = self._followers.get(tuple(token_ids[end - size :]))
            if start is not None:
                return start
        return None

    def _index(self, token_ids: list[int]) -> None:
        """Note for each run of tokens the place behind it, once a token stands there."""
        for follower in range(max(self._num_indexed, 1), len(token_ids)):
            for size in range(self.shortest, min(self.longest, follower) + 1):
                self._followers[tuple(token_ids[follower - size : follower])] = follower
        self._num_indexed = len(token_ids)


def copy_from(token_ids: list[int], start: int, limit: int) -> list[int]:
    """Copy `limit` tokens from `start` on; behind the last token the copy goes on with what it has copied."""
    period = len(token_ids) - start
    return [token_ids[start + offset % period] for offset in range(limit)]


def match_length(token_ids: list[int], start: int) -> int:
    """How many tokens before place `start` equal the last ones, up to `LONGEST_MATCH`.

    >>> match_length([1, 2, 3, 9, 2, 3], start=3)
    2
    """
    most = min(LONGEST_MATCH, start)
    return next((size for size in range(most) if token_ids[start - 1 - size] != token_ids[-1 - size]), most)


class NgramDrafter:
    """Drafts by prompt lookup. Costs no model and next to no time."""

    def __init__(
        self, num_rows: int, longest: int, shortest: int, device: torch.device, budget: Budget | None = None
    ) -> None:
        self.longest = longest
        self.shortest = shortest
        self.device = device
        self.budget = budget or FixedBudget()
        self._indexes: list[NgramIndex | None] = [None] * num_rows

    def propose(self, batch: Mapping[int, Sequence], limits: Rows[int]) -> Draft:
        drafts: list[list[int]] = []
        marks: list[list[Mark]] = []
        for (row, sequence), limit in zip(batch.items(), limits, strict=True):
            start = self._index(row).find(sequence.token_ids) if limit else None
            drafts.append([] if start is None else copy_from(sequence.token_ids, start, limit))
            length = 0 if start is None else match_length(sequence.token_ids, start)
            marks.append([match_mark("ngram", length + place) for place in range(len(drafts[-1]))])
        return Draft.from_lists(drafts, self.device, marks)

    def release_row(self, row: int, last: int) -> None:
        self._indexes[row] = self._indexes[last] if row != last else None
        self._indexes[last] = None

    def _index(self, row: int) -> NgramIndex:
        index = self._indexes[row]
        if index is None:
            index = self._indexes[row] = NgramIndex(self.longest, self.shortest)
        return index
