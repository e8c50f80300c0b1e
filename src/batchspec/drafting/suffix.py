"""What followed the longest match before: in the row's own text, or in earlier outputs of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch

from batchspec.drafting.budget import Budget, FixedBudget
from batchspec.drafting.drafter import Draft
from batchspec.drafting.estimates import Mark, match_mark
from batchspec.drafting.suffix_automaton import DraftedToken, SuffixAutomaton
from batchspec.drafting.suffix_store import Cursor, SuffixStore
from batchspec.request import Sequence

OWN = "own"
STORE = "store"


@dataclass(slots=True)
class _Row:
    """What is remembered of a row: whose it is, its text, and where that stands in the store."""

    sequence: Sequence
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    cursors: list[Cursor] = field(default_factory=list)


class SuffixDrafter:
    """Drafts what followed the longest suffix of a row's text before. Costs no model: some microseconds per token.

    The row's own prompt and output are asked first, then the `store` of earlier outputs, if there is one and its
    match is longer. Only committed tokens are remembered, so there is nothing to roll back.
    """

    def __init__(
        self, min_match: int, device: torch.device, store: SuffixStore | None = None, budget: Budget | None = None
    ) -> None:
        """Matches of fewer than `min_match` tokens, which is at least 1, give no draft."""
        self.min_match = min_match
        self.device = device
        self.store = store
        self.budget = budget or FixedBudget()
        self._rows: dict[int, _Row] = {}

    def propose(self, batch: Mapping[int, Sequence], limits: Rows[int]) -> Draft:
        drafts: list[list[int]] = []
        marks: list[list[Mark]] = []
        for (row, sequence), limit in zip(batch.items(), limits, strict=True):
            source, drafted = self._draft(row, sequence, limit)
            drafts.append([token.token_id for token in drafted])
            marks.append([match_mark(source, token.match_length, token.share) for token in drafted])
        return Draft.from_lists(drafts, self.device, marks)

    def release_row(self, row: int, last: int) -> None:
        """Forget `row`, but for its output, if its sequence has ended and there is a store."""
        released, moved = self._rows.pop(row, None), self._rows.pop(last, None)
        if moved is not None:
            self._rows[row] = moved
        if self.store is not None and released is not None and released.sequence.is_finished:
            self.store.add(released.sequence.output_token_ids)

    def _draft(self, row: int, sequence: Sequence, limit: int) -> tuple[str, list[DraftedToken]]:
        memory = self._rows.pop(row, None)  # out of the way while it changes: if that is cut off, it is made anew
        if memory is None or memory.sequence is not sequence:
            memory = _Row(sequence)
        source, drafted = self._lookup(memory, limit) if limit else (OWN, [])
        self._rows[row] = memory
        return source, drafted

    def _lookup(self, memory: _Row, limit: int) -> tuple[str, list[DraftedToken]]:
        """Draft by the longest match that was followed by anything; the own text's of equally long ones."""
        token_ids = memory.sequence.token_ids
        memory.text.extend(token_ids[memory.text.num_tokens :])
        state, length = memory.text.repeated_suffix()
        if self.store is not None:
            memory.cursors = self.store.follow(memory.cursors, token_ids)
            needed = max(self.min_match, length + 1)
            longer = [cursor for cursor in memory.cursors if cursor.length >= needed]
            for cursor in sorted(longer, key=lambda cursor: cursor.length, reverse=True):
                if drafted := self.store.walk(cursor, limit):
                    return STORE, drafted
        return OWN, memory.text.walk(state, length, limit) if length >= self.min_match else []
