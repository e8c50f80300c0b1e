"""Which draft tokens are worth their place in a step: decided token by token, over the whole batch.

A step's time depends on its number of tokens, whichever rows they belong to, and a little on whose they are: rows
that draft attend with more queries to what they hold. So the draft tokens of all rows compete: those of highest
survival come first, and the cut is where output tokens per second are most,

    (rows + survivals taken) / (seconds of drafting + seconds of a step of rows + taken tokens).

A row may get none, and so may the whole batch; then speculation costs nothing. Who was left out is tried again now
and then, so that it can come back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from batchspec.drafting.costs import StepCosts
from batchspec.drafting.cut import WANTED, best_cut, blocks_of, doubling, expected_gain, step_seconds
from batchspec.drafting.estimates import Estimates, Mark, Marks, Trust
from batchspec.drafting.outlook import CONFIDENCE, LEVELS, Outlook
from batchspec.drafting.patience import Patience
from batchspec.request import Sequence

TRIED_TOGETHER = 0.25
"""Share of the rows with candidates that have to be due before a step is made dearer for a try."""


class Budget(Protocol):
    """Says how many tokens are drafted and verified."""

    def confidence(self, logits: Tensor) -> list[Mark]:  # [rows, vocabulary], processed
        """Marks of the tokens that a draft model chooses from these logits."""
        ...

    def next_column(
        self,
        rows: Rows[Sequence],
        marks: Marks,
        limits: Rows[int],
        beside: Marks | None = None,
        unread: Rows[int] | None = None,
    ) -> list[int]:
        """The rows (their places in the batch) for which a draft model computes one more token, in order; none
        ends the drafting. All of them have tokens in every column so far. `beside` are the marks of drafts that
        other rows, of limit 0, have from elsewhere; `unread` tokens of each row, its prompt at first, have to be
        read by the model before a draft's first one."""
        ...

    def begin_draft_step(self, num_tokens: int) -> None:
        """A step of the draft model begins, of so many tokens; it lasts until the next one does, or the `cut`."""
        ...

    def prefers(self, row: Sequence, mark: Mark) -> bool:
        """Is a token that was looked up at least as likely to be accepted as a draft model's?"""
        ...

    def cut(self, rows: Rows[Sequence], marks: Marks) -> list[int]:
        """How many of each row's candidates are verified, from the first on."""
        ...

    def learn(self, rows: Rows[Sequence], marks: Marks, num_accepted: Rows[int]) -> None:
        """Of the drafts that were verified in this round, so many tokens of each row were accepted."""
        ...


class FixedBudget:
    """Drafts up to the limits, and verifies all."""

    def confidence(self, logits: Tensor) -> list[Mark]:
        return [Mark("any", 0, 0.5)] * logits.shape[0]

    def next_column(
        self,
        rows: Rows[Sequence],
        marks: Marks,
        limits: Rows[int],
        beside: Marks | None = None,
        unread: Rows[int] | None = None,
    ) -> list[int]:
        return open_rows(marks, limits)

    def begin_draft_step(self, num_tokens: int) -> None:
        """Time does not matter."""

    def prefers(self, row: Sequence, mark: Mark) -> bool:
        return mark.prior >= 0.5

    def cut(self, rows: Rows[Sequence], marks: Marks) -> list[int]:
        return [len(row) for row in marks]

    def learn(self, rows: Rows[Sequence], marks: Marks, num_accepted: Rows[int]) -> None:
        """Nothing is learned."""


@dataclass(slots=True)
class AdaptiveBudget:
    """Drafts and verifies what makes output fastest, by what it has learned of chances and costs."""

    target_costs: StepCosts
    draft_costs: StepCosts | None = None
    """Of a step of the draft model; None: drafts cost nothing."""
    estimates: Estimates = field(default_factory=Estimates)
    outlook: Outlook = field(default_factory=Outlook)
    _trusts: WeakKeyDictionary[Sequence, tuple[Trust, Patience]] = field(default_factory=WeakKeyDictionary)
    _patience: Patience = field(default_factory=Patience)
    """Of the whole batch, with a draft model."""
    _is_probing: bool = False
    _since: float = 0.0
    """When the step began that is measured next: of the draft model or of the target."""
    _expected: float | None = None
    """Seconds that a step of the draft model should take; None: none is measured."""

    def confidence(self, logits: Tensor) -> list[Mark]:
        best = (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()
        best = best.nan_to_num(0.0)  # where no token is allowed
        levels = (best * len(LEVELS)).long().clamp(max=len(LEVELS) - 1).tolist()
        return [LEVELS[level] for level in levels]

    def next_column(
        self,
        rows: Rows[Sequence],
        marks: Marks,
        limits: Rows[int],
        beside: Marks | None = None,
        unread: Rows[int] | None = None,
    ) -> list[int]:
        column, candidates = max(map(len, marks)), open_rows(marks, limits)
        if column:
            self._note_outlook(marks, column)
        else:
            self._expected = None  # a draft that was cut off
        nothing, none_unread = [()] * len(rows), [0] * len(rows)
        chosen = self._worth_drafting(rows, marks, candidates, column, beside or nothing, unread or none_unread)
        if column == 0 and candidates:
            if chosen:
                self._is_probing = False
                self._patience.reset()
            else:
                chosen = self._probe(candidates)
        return chosen

    def begin_draft_step(self, num_tokens: int) -> None:
        # What rows have to read before is not in it: that is paid for once, whatever is drafted later. All else
        # is, these decisions too.
        self._end_draft_step()
        if self.draft_costs is not None:
            self._expected = self.draft_costs.seconds(num_tokens)
        self._since = time.perf_counter()

    def _probe(self, places: list[int]) -> list[int]:
        """The draft model does not pay: it is tried with all rows now and then."""
        self._patience.wait()
        self._is_probing = self._patience.is_over
        if self._is_probing:
            self._patience.try_now()
        return places if self._is_probing else []

    def prefers(self, row: Sequence, mark: Mark) -> bool:
        drafted = sum(chance * share for chance, share in self._ahead(row, [], []))
        return self.estimates.chance(mark, self._of(row)[0]) >= drafted

    def cut(self, rows: Rows[Sequence], marks: Marks) -> list[int]:
        survivals = [self._survivals(row, own) for row, own in zip(rows, marks, strict=True)]
        taken = best_cut(survivals, self.target_costs, self._spent(marks), blocks_of(rows))
        for place in self._due(rows, marks, taken):
            taken[place] = 1
        self._is_probing = False
        self._end_draft_step()
        self._since = time.perf_counter()
        return taken

    def _due(self, rows: Rows[Sequence], marks: Marks, taken: Rows[int]) -> list[int]:
        """Rows that were left out for long and are tried again: beside others that draft, or many at once, as the
        first draft of a step costs most."""
        left_out = [place for place, own in enumerate(marks) if own and not taken[place]]
        patience = [self._of(row)[1] for row in rows]
        for place, count in enumerate(taken):
            if count:
                patience[place].reset()
        for place in left_out:
            patience[place].wait()
        due = [place for place in left_out if self._is_probing or patience[place].is_over]
        if not (self._is_probing or any(taken)) and len(due) < TRIED_TOGETHER * len(left_out):
            return []
        for place in due:
            patience[place].try_now()
        return due

    def learn(self, rows: Rows[Sequence], marks: Marks, num_accepted: Rows[int]) -> None:
        expected = step_seconds(self.target_costs, blocks_of(rows), [len(own) for own in marks])
        self.target_costs.correct(expected, time.perf_counter() - self._since)
        for row, own, accepted in zip(rows, marks, num_accepted, strict=True):
            if own:
                self.estimates.learn(own, accepted, self._of(row)[0])

    def _worth_drafting(
        self,
        rows: Rows[Sequence],
        marks: Marks,
        candidates: list[int],
        column: int,
        beside: Marks,
        unread: Rows[int],
    ) -> list[int]:
        """Those whose next tokens promise more output tokens than are lost in the time of drafting them.

        A token that turns out likelier than its `price`, which is what the time of verifying it would yield, gains
        the difference; others gain nothing, as they are not verified. What a row has to read first is spread over
        the rounds that it has left.
        """
        if self.draft_costs is None or not candidates:
            return []
        survivals = [
            self._survivals(row, own or other) for row, own, other in zip(rows, marks, beside, strict=True)
        ]
        blocks, spent = blocks_of(rows), self._spent(marks)
        verified = best_cut(survivals, self.target_costs, spent, blocks)
        gained = len(rows) + sum(sum(own[:count]) for own, count in zip(survivals, verified, strict=True))
        seconds = step_seconds(self.target_costs, blocks, verified)
        rate = gained / (spent + seconds)
        ahead = {place: self._ahead(rows[place], marks[place], survivals[place]) for place in candidates}
        lost = {
            place: rate * self._reading(rows[place], unread[place], gained / len(rows)) for place in candidates
        }
        order = sorted(candidates, key=lambda place: lost[place] - expected_gain(ahead[place], 0.0))
        most, chosen = (0.0 if column else (WANTED - 1) * gained), order[:0]
        for count in doubling(len(order)):
            first = order[:count]
            more = [own + (place in first) for place, own in enumerate(verified)]
            price = rate * (step_seconds(self.target_costs, blocks, more) - seconds) / count
            worth = sum(expected_gain(ahead[place], price) - lost[place] for place in first)
            profit = worth - rate * self.draft_costs.seconds(count)
            if profit > most:
                most, chosen = profit, first
        return sorted(chosen)

    def _reading(self, row: Sequence, num_unread: int, tokens_per_round: float) -> float:
        """Seconds for each round that the row has left."""
        if not num_unread or self.draft_costs is None:
            return 0.0
        rounds_left = max(1.0, (row.max_length - len(row.token_ids)) / tokens_per_round)
        return self.draft_costs.seconds(num_unread) / rounds_left

    def _ahead(self, row: Sequence, marks: Rows[Mark], survivals: Rows[float]) -> list[tuple[float, float]]:
        """The survivals that the token behind these may turn out to have, and how likely each is."""
        trust, survival = self._of(row)[0], survivals[-1] if survivals else 1.0
        shares = self.outlook.shares(marks[-1] if marks else None)
        return [(survival * self.estimates.chance(mark, trust), share) for mark, share in shares]

    def _spent(self, marks: Marks) -> float:
        """Seconds of the draft model's steps for these candidates; those that were looked up cost nothing."""
        if self.draft_costs is None:
            return 0.0
        drafted = [len(own) for own in marks if own and own[0].source == CONFIDENCE]
        widths = [sum(count > column for count in drafted) for column in range(max(drafted, default=0))]
        return sum(map(self.draft_costs.seconds, widths))

    def _note_outlook(self, marks: Marks, column: int) -> None:
        """The last column has just been drafted."""
        for own in marks:
            if len(own) == column:
                self.outlook.note(own[-2] if column > 1 else None, own[-1])

    def _end_draft_step(self) -> None:
        if self.draft_costs is not None and self._expected is not None:
            self.draft_costs.correct(self._expected, time.perf_counter() - self._since)
            self._expected = None

    def _survivals(self, row: Sequence, marks: Rows[Mark]) -> list[float]:
        return self.estimates.survivals(marks, self._of(row)[0])

    def _of(self, row: Sequence) -> tuple[Trust, Patience]:
        return self._trusts.setdefault(row, (Trust(), Patience()))


def open_rows(marks: Marks, limits: Rows[int]) -> list[int]:
    """Places of the rows that were drafted in every column so far and have a limit above.

    >>> mark = Mark("any", 0, 0.5)
    >>> open_rows([[mark], [], [mark]], [3, 3, 1])
    [0]
    """
    column = max(map(len, marks), default=0)
    return [place for place, limit in enumerate(limits) if len(marks[place]) == column < limit]
