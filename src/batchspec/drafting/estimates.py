"""How likely is a draft token to be accepted? Learned from those that were and were not.

Every draft token has a *mark*: what its drafter knew about it beforehand (how long the match was that it comes
from; how sure the draft model was). For each mark the *chance* is the share of such tokens that were accepted,
once all before them were. The *survival* of a draft token is the product of the chances along its row, up to its
own: the probability that it becomes output.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_TRIED = 256
"""Trials of a mark that are remembered; with more, old ones fade."""

PRIOR_TRIALS = 4
"""What a mark's prior counts for, in trials."""

TRUST_TRIALS = 3.0
"""What a row's own record is held against, in accepted tokens."""

FADING = 0.9
"""What is left of a row's record after each round that adds to it, so that it follows the text."""

BEST = 0.98
"""No chance is above this."""


class Mark(NamedTuple):
    """What a drafter knew of a draft token."""

    source: str
    level: int
    prior: float
    """Its chance, before anything was seen."""


@dataclass(slots=True)
class Trust:
    """A row's own record: is it accepted more or less often than its marks say?"""

    accepted: float = 0.0
    expected: float = 0.0
    num_idle: int = 0
    """Rounds since it last had a draft verified."""

    @property
    def factor(self) -> float:
        return (self.accepted + TRUST_TRIALS) / (self.expected + TRUST_TRIALS)

    def add(self, num_accepted: int, expected: float) -> None:
        self.accepted = FADING * self.accepted + num_accepted
        self.expected = FADING * self.expected + expected


@dataclass(slots=True)
class Estimates:
    """Chances of all marks.

    >>> sure, unsure = Mark("ngram", 3, 0.8), Mark("ngram", 1, 0.2)
    >>> estimates = Estimates()
    >>> [round(one, 3) for one in estimates.survivals([sure, unsure], Trust())]
    [0.8, 0.16]
    >>> for _ in range(100):
    ...     estimates.learn([sure, unsure], 1, Trust())
    >>> [round(one, 2) for one in estimates.survivals([sure, unsure], Trust())]
    [0.98, 0.01]
    """

    _tried: dict[Mark, float] = field(default_factory=dict)
    _accepted: dict[Mark, float] = field(default_factory=dict)

    def chance(self, mark: Mark, trust: Trust) -> float:
        tried = self._tried.get(mark, 0.0) + PRIOR_TRIALS
        accepted = self._accepted.get(mark, 0.0) + PRIOR_TRIALS * mark.prior
        return min(BEST, trust.factor * accepted / tried)

    def survivals(self, marks: Rows[Mark], trust: Trust) -> list[float]:
        """Of each draft token of a row; falling."""
        survivals, survival = [], 1.0
        for mark in marks:
            survival *= self.chance(mark, trust)
            survivals.append(survival)
        return survivals

    def learn(self, marks: Rows[Mark], num_accepted: int, trust: Trust) -> None:
        """A row's draft was verified, and so many of its tokens were accepted: those, and the next one, which was
        not, were tried; the others were never met."""
        tried = marks[: num_accepted + 1]
        neutral = Trust()
        trust.add(num_accepted, sum(self.chance(mark, neutral) for mark in tried))
        for place, mark in enumerate(tried):
            fading = min(1.0, MOST_TRIED / (self._tried.get(mark, 0.0) + 1))
            self._tried[mark] = fading * (self._tried.get(mark, 0.0) + 1)
            self._accepted[mark] = fading * (self._accepted.get(mark, 0.0) + (place < num_accepted))
