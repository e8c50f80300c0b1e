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
from batchspec.drafting.estimates import Estimates, Mark, Trust
from batchspec.drafting.outlook import CONFIDENCE, LEVELS, Outlook
from batchspec.layout.block_step import draft_columns
from batchspec.layout.blocks import BLOCK
from batchspec.request import Sequence

PROBE_AFTER, PROBE_LAST = 32, 512
"""Rounds without a draft before one is tried all the same. In vain, the next try comes after twice as many."""

TRIED_TOGETHER = 0.25
"""Share of the rows with candidates that have to be due before a step is made dearer for a try."""

WANTED = 1.02
"""What drafts have to promise, of the rate without: the best of many estimates is never quite what comes."""


class Budget(Protocol):
    """Says how many tokens are drafted and verified."""

    def confidence(self, logits: Tensor) -> list[Mark]:  # [rows, vocabulary], processed
        """Marks of the tokens that a draft model chooses from these logits."""
        ...

    def next_column(self, rows: Rows[Sequence], marks: Rows[Rows[Mark]], limits: Rows[int]) -> list[int]:
        """The rows (their places in the batch) for which a draft model computes one more token, in order; none
        ends the drafting. All of them have tokens in every column so far."""
        ...

    def prefers(self, row: Sequence, mark: Mark) -> bool:
        """Is a token that was looked up at least as likely to be accepted as a draft model's?"""
        ...

    def cut(self, rows: Rows[Sequence], marks: Rows[Rows[Mark]]) -> list[int]:
        """How many of each row's candidates are verified, from the first on."""
        ...

    def learn(self, rows: Rows[Sequence], marks: Rows[Rows[Mark]], num_accepted: Rows[int]) -> None:
        """Of the drafts that were verified in this round, so many tokens of each row were accepted."""
        ...


class FixedBudget:
    """Drafts up to the limits, and verifies all."""

    def confidence(self, logits: Tensor) -> list[Mark]:
        return [Mark("any", 0, 0.5)] * logits.shape[0]

    def next_column(self, rows: Rows[Sequence], marks: Rows[Rows[Mark]], limits: Rows[int]) -> list[int]:
        return open_rows(marks, limits)

    def prefers(self, row: Sequence, mark: Mark) -> bool:
        return mark.prior >= 0.5

    def cut(self, rows: Rows[Sequence], marks: Rows[Rows[Mark]]) -> list[int]:
        return [len(row) for row in marks]

    def learn(self, rows: Rows[Sequence], marks: Rows[Rows[Mark]], num_accepted: Rows[int]) -> None:
        """Nothing is learned."""


@dataclass(slots=True)
class Patience:
    """Says now and then that it is time for a try."""

    num_idle: int = 0
    limit: int = PROBE_AFTER

    @property
    def is_over(self) -> bool:
        return self.num_idle >= self.limit

    def wait(self) -> None:
        """One more round without a draft."""
        self.num_idle += 1

    def try_now(self) -> None:
        self.num_idle, self.limit = 0, min(2 * self.limit, PROBE_LAST)

    def reset(self) -> None:
        self.num_idle, self.limit = 0, PROBE_AFTER


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
    """When the draft or the step began that is measured next."""

    def confidence(self, logits: Tensor) -> list[Mark]:
        best = (logits.amax(dim=-1) - logits.logsumexp(dim=-1)).exp()
        levels = (best * len(LEVELS)).long().clamp(max=len(LEVELS) - 1).tolist()
        return [LEVELS[level] for level in levels]

    def next_column(self, rows: Rows[Sequence], marks: Rows[Rows[Mark]], limits: Rows[int]) -> list[int]:
        column, candidates = max(map(len, marks)), open_rows(marks, limits)
        self._learn_of_draft(marks, column)
        chosen = self._worth_drafting(rows, marks, candidates, column)
        if column == 0 and candidates:
            if chosen:
                self._is_probing = False
                self._patience.reset()
            else:
                chosen = self._probe(candidates)
        self._since = time.perf_counter()
        return chosen

    def _probe(self, places: list[int]) -> list[int]:
        """The draft model does not pay: it is tried with all rows now and then."""
        self._patience.wait()
        self._is_probing = self._patience.is_over
        if self._is_probing:
            self._patience.try_now()
        return places if self._is_probing else []

    def prefers(self, row: Sequence, mark: Mark) -> bool:
        trust, _ = self._of(row)
        drafted = sum(share * self.estimates.chance(seen, trust) for seen, share in self.outlook.shares(0))
        return self.estimates.chance(mark, trust) >= drafted

    def cut(self, rows: Rows[Sequence], marks: Rows[Rows[Mark]]) -> list[int]:
        survivals = [self._survivals(row, own) for row, own in zip(rows, marks, strict=True)]
        taken = best_cut(survivals, self.target_costs, self._spent(marks), blocks_of(rows))
        for place in self._due(rows, marks, taken):
            taken[place] = 1
        self._is_probing = False
        self._since = time.perf_counter()
        return taken

    def _due(self, rows: Rows[Sequence], marks: Rows[Rows[Mark]], taken: Rows[int]) -> list[int]:
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

    def learn(self, rows: Rows[Sequence], marks: Rows[Rows[Mark]], num_accepted: Rows[int]) -> None:
        expected = step_seconds(self.target_costs, blocks_of(rows), [len(own) for own in marks])
        self.target_costs.correct(expected, time.perf_counter() - self._since)
        for row, own, accepted in zip(rows, marks, num_accepted, strict=True):
            if own:
                self.estimates.learn(own, accepted, self._of(row)[0])

    def _worth_drafting(
        self, rows: Rows[Sequence], marks: Rows[Rows[Mark]], candidates: list[int], column: int
    ) -> list[int]:
        """Those whose next tokens are worth more, in output tokens, than is lost in the time of drafting them.

        Of a token that turns out likelier than its `price`, which is what the time of verifying one would yield,
        the difference is gained; of others nothing, as they are not verified.
        """
        if self.draft_costs is None or not candidates:
            return []
        survivals = [self._survivals(row, own) for row, own in zip(rows, marks, strict=True)]
        blocks = blocks_of(rows)
        verified = best_cut(survivals, self.target_costs, blocks=blocks)
        gained = len(rows) + sum(sum(own[:count]) for own, count in zip(survivals, verified, strict=True))
        seconds = step_seconds(self.target_costs, blocks, verified)
        rate = gained / (self._spent(marks) + seconds)
        more = [count + (place in candidates) for place, count in enumerate(verified)]
        price = rate * (step_seconds(self.target_costs, blocks, more) - seconds) / len(candidates)
        ahead = [(self.estimates.chance(mark, Trust()), share) for mark, share in self.outlook.shares(column)]
        worth = {
            place: _worth(ahead, (survivals[place] or [1.0])[-1] * self._of(rows[place])[0].factor, price)
            for place in candidates
        }
        order = sorted(candidates, key=lambda place: -worth[place])
        best, num_chosen, total = 0.0, 0, 0.0
        for count, place in enumerate(order, start=1):
            total += worth[place]
            profit = total - rate * self.draft_costs.seconds(count)
            if profit > best:
                best, num_chosen = profit, count
        return sorted(order[:num_chosen])

    def _spent(self, marks: Rows[Rows[Mark]]) -> float:
        """Seconds of the draft model's steps for these candidates; those that were looked up cost nothing."""
        if self.draft_costs is None:
            return 0.0
        drafted = [len(own) for own in marks if own and own[0].source == CONFIDENCE]
        widths = [sum(count > column for count in drafted) for column in range(max(drafted, default=0))]
        return sum(self.draft_costs.seconds(width) for width in widths)

    def _learn_of_draft(self, marks: Rows[Rows[Mark]], column: int) -> None:
        """The last column has just been drafted. The time of the first one is not counted, as it may have read a
        prompt."""
        drafted = [own[-1] for own in marks if len(own) == column > 0]
        self.outlook.note(column - 1, drafted)
        if column > 1 and self.draft_costs is not None:
            expected = self.draft_costs.seconds(len(drafted))
            self.draft_costs.correct(expected, time.perf_counter() - self._since)

    def _survivals(self, row: Sequence, marks: Rows[Mark]) -> list[float]:
        return self.estimates.survivals(marks, self._of(row)[0])

    def _of(self, row: Sequence) -> tuple[Trust, Patience]:
        return self._trusts.setdefault(row, (Trust(), Patience()))


def open_rows(marks: Rows[Rows[Mark]], limits: Rows[int]) -> list[int]:
    """Places of the rows that were drafted in every column so far and have a limit above.

    >>> mark = Mark("any", 0, 0.5)
    >>> open_rows([[mark], [], [mark]], [3, 3, 1])
    [0]
    """
    column = max(map(len, marks), default=0)
    return [place for place, limit in enumerate(limits) if len(marks[place]) == column < limit]


def best_cut(
    survivals: Rows[Rows[float]],
    costs: StepCosts,
    seconds_before: float = 0.0,
    blocks: Rows[int] | None = None,
) -> list[int]:
    """How many candidates of each row to verify, so that tokens per second are most; none, unless that promises a
    little more than the rate without.

    `survivals` fall along each row, so those of highest survival are always the first ones of their rows. As wide
    rows cost more, each limit of the columns is tried. `blocks` are those that each row holds; None: one each.

    Two rows, the second of which has good candidates; each token of the step costs 0.2 of a step of one:

    >>> costs = StepCosts([(1, 1.0), (11, 3.0)])
    >>> best_cut([[0.3, 0.1], [0.9, 0.8, 0.3]], costs)  # (2 + 0.9 + 0.8) / 1.6 is more than with a third
    [0, 2]
    """
    num_rows = len(survivals)
    blocks = blocks or [1] * num_rows
    num_blocks, more_blocks = sum(blocks), sum(blocks) - num_rows
    ranked = sorted(
        (-survival, column, place) for place, row in enumerate(survivals) for column, survival in enumerate(row)
    )
    best = WANTED * num_rows / (seconds_before + costs.seconds(num_rows, more_blocks))
    chosen: list[tuple[float, int, int]] = []
    for most_columns in range(1, 1 + max(map(len, survivals), default=0)):
        candidates = [candidate for candidate in ranked if candidate[1] < most_columns]
        gained, num_drafting, widest = float(num_rows), 0, 0
        for count, (negative, column, place) in enumerate(candidates, start=1):
            gained -= negative
            num_drafting += 0 if column else blocks[place]
            widest = max(widest, column + 1)
            added = draft_columns(num_blocks, num_drafting, 1 + widest)
            rate = gained / (seconds_before + costs.seconds(num_rows + count, more_blocks, added))
            if rate > best:
                best, chosen = rate, candidates[:count]
    taken = [0] * num_rows
    for *_, place in chosen:
        taken[place] += 1
    return taken


def blocks_of(rows: Rows[Sequence]) -> list[int]:
    """Blocks of the cache that each row needs for its newest token."""
    return [1 + row.length // BLOCK for row in rows]


def _worth(ahead: Rows[tuple[float, float]], survival: float, price: float) -> float:
    """Of a token that will have one of these chances, each with its share.

    >>> round(_worth([(0.2, 0.5), (0.8, 0.5)], survival=1.0, price=0.6), 6)
    0.1
    """
    return sum(share * max(0.0, survival * chance - price) for chance, share in ahead)


def step_seconds(costs: StepCosts, blocks: Rows[int], num_draft_tokens: Rows[int]) -> float:
    """Of a step in which each row has its newest token and so many drafts."""
    num_drafting = sum(own for own, count in zip(blocks, num_draft_tokens, strict=True) if count)
    added = draft_columns(sum(blocks), num_drafting, 1 + max(num_draft_tokens))
    return costs.seconds(len(blocks) + sum(num_draft_tokens), sum(blocks) - len(blocks), added)
