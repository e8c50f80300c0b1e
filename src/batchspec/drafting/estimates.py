"""How likely is a draft token to be accepted? Learned from those that were and were not.

Every draft token has a *mark*: what its drafter knew about it beforehand (how long the match was that it comes
from; how sure the draft model was). For each mark the *chance* is the share of such tokens that were accepted,
once all before them were. The *survival* of a draft token is the product of the chances along its row, up to its
own: the probability that it becomes output.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

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


MATCH_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Match lengths from which on chances are told apart."""

SHARES = (0.5, 1.0)
"""Shares from which on they are: at least half of the followers; all of them."""


class Mark(NamedTuple):
    """What a drafter knew of a draft token."""

    source: str
    level: int
    prior: float
    """Its chance, before anything was seen."""


Marks: TypeAlias = Rows[Rows[Mark]]
"""Of each row's draft, from its first token on."""


def match_mark(source: str, length: int, share: float = 1.0) -> Mark:
    """The mark of a token that followed a match of `length` tokens before, in `share` of all cases.

    Drafted tokens lengthen the match for those behind them: that they were right is what survival asks.

    >>> match_mark("ngram", 1), match_mark("ngram", 30)
    (Mark(source='ngram', level=5, prior=0.4), Mark(source='ngram', level=29, prior=0.91))
    """
    place = bisect_right(MATCH_LENGTHS, length) - 1
    length, share_level = MATCH_LENGTHS[place], bisect_right(SHARES, share)
    prior = length / (length + 1.5) * (0.5 + 0.25 * share_level)
    return Mark(source, place * (len(SHARES) + 1) + share_level, round(prior, 2))


@dataclass(slots=True)
class Trust:
    """A row's own record: is it accepted more or less often than its marks say?"""

    accepted: float = 0.0
    expected: float = 0.0

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
