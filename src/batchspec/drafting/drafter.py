"""What a drafter is, and the one that never drafts."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchspec.drafting.budget import Budget, FixedBudget
from batchspec.drafting.estimates import Mark
from batchspec.layout.transfer import to_device
from batchspec.request import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft tokens of one round."""

    token_ids: Tensor  # [rows, K] int64 on the target's device, K the longest draft; 0 behind a row's draft
    num_tokens: list[int]  # [rows], each 0 ... K
    probs: Tensor | None = None
    """`[rows, K, vocabulary]`: the distributions that the tokens were drawn from, for sampling method `rejection`;
    None if there are none, since each was certain (or nobody asks)."""
    marks: Rows[Rows[Mark]] = ()
    """`[rows]`, of each of its tokens: what the drafter knew of it. None at all: nobody asks."""

    def __post_init__(self) -> None:
        width, longest = self.token_ids.shape[1], max(self.num_tokens, default=0)
        if width != longest:
            raise ValueError(f"token_ids must be as wide as the longest draft ({longest}), got {width}")

    @classmethod
    def from_lists(cls, drafts: list[list[int]], device: torch.device, marks: Rows[Rows[Mark]] = ()) -> Draft:
        """Lay ragged lists out in a rectangle.

        >>> Draft.from_lists([[7, 8], [], [9]], torch.device("cpu")).token_ids.tolist()
        [[7, 8], [0, 0], [9, 0]]
        """
        num_tokens = [len(draft) for draft in drafts]
        longest = max(num_tokens, default=0)
        padded = [draft + [0] * (longest - len(draft)) for draft in drafts]
        return cls(to_device(padded, device).view(len(drafts), longest), num_tokens, marks=marks)

    def cut(self, num_tokens: list[int]) -> Draft:
        """The first `num_tokens[i]` tokens of each row, which are not more than it has."""
        if num_tokens == self.num_tokens:
            return self
        longest = max(num_tokens)
        probs = None if self.probs is None else self.probs[:, :longest]
        marks = [own[:count] for own, count in zip(self.marks, num_tokens, strict=True)] if self.marks else ()
        return Draft(self.token_ids[:, :longest], num_tokens, probs, marks)


def cut_to_grammar(draft: Draft, rows: list[Sequence]) -> Draft:
    """Cut drafts where they break the form that a request's output has to follow (`structured_outputs`).

    A token that was drawn by chance stays if it is the first that breaks the form: the rejection rule is exact
    only if such a token is seen and rejected.
    """
    if all(sequence.grammar is None for sequence in rows):
        return draft
    num_tokens = list(draft.num_tokens)
    for row, (sequence, drafted) in enumerate(zip(rows, draft.token_ids.tolist(), strict=True)):
        if sequence.grammar is not None:
            own = drafted[: num_tokens[row]]
            valid = sequence.grammar.num_valid(sequence.output_token_ids, own)
            num_tokens[row] = min(len(own), valid + (draft.probs is not None))
    return draft.cut(num_tokens)


class Drafter(Protocol):
    """Proposes draft tokens for rows. What it remembers of a row it rolls back by itself: a row's committed
    tokens are all it needs to know, and only ever grow at their end."""

    budget: Budget
    """Says how many of the proposed tokens are verified, and is told what became of them."""

    def propose(self, batch: Mapping[int, Sequence], limits: Rows[int]) -> Draft:
        """Draft tokens for a batch: cache rows and the sequences that own them.

        At most `limits[i]` tokens for the batch's `i`-th row; fewer or none are welcome.
        """
        ...

    def release_row(self, row: int, last: int) -> None:
        """Forget `row`; row `last` takes its place (nothing moves if they are the same)."""
        ...


class NoDrafter:
    """Drafts nothing: the loop then is plain autoregressive decoding, one token per row and round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.budget: Budget = FixedBudget()

    def propose(self, batch: Mapping[int, Sequence], limits: Rows[int]) -> Draft:
        return Draft.from_lists([[] for _ in batch], self.device)

    def release_row(self, row: int, last: int) -> None:
        """Nothing is remembered."""
