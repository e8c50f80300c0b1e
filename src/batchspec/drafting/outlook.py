"""How sure will a draft model be of a token that it has not computed yet? As it was of others behind such tokens.

Before a token is computed, its chance is known as a distribution only. That matters for its worth: computed, it is
verified if it turns out likely enough, and else it is left, having cost the draft model's step alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from batchspec.drafting.estimates import Mark

CONFIDENCE = "confidence"
"""The source of a draft model's marks."""

LEVELS = tuple(Mark(CONFIDENCE, level, (level + 0.5) / 10) for level in range(10))
"""Its marks, by tenths of the probability that it gives its likeliest token."""

MOST_SEEN = 256
"""Tokens that are remembered behind each kind of token; with more, old ones fade."""


@dataclass(slots=True)
class Outlook:
    """How often each mark came, by the mark of the token before it: none, for the first token of a draft. At first
    all are as likely.

    >>> outlook = Outlook()
    >>> for _ in range(30):
    ...     outlook.note(None, LEVELS[9])
    >>> [(mark.level, round(share, 3)) for mark, share in outlook.shares(None)[-2:]]
    [(8, 0.025), (9, 0.775)]
    """

    _seen: dict[Mark | None, list[float]] = field(default_factory=dict)

    def note(self, before: Mark | None, mark: Mark) -> None:
        """The draft model has computed a token of this mark."""
        seen = self._counts(before)
        fading = min(1.0, MOST_SEEN / (sum(seen) + 1))
        self._seen[before] = [
            fading * (count + (mark == other)) for count, other in zip(seen, LEVELS, strict=True)
        ]

    def shares(self, before: Mark | None) -> list[tuple[Mark, float]]:
        """The marks, and how likely the next token is to get each; sums to 1."""
        seen = self._counts(before)
        total = sum(seen)
        return [(mark, count / total) for mark, count in zip(LEVELS, seen, strict=True)]

    def _counts(self, before: Mark | None) -> list[float]:
        return self._seen.get(before) or [1.0] * len(LEVELS)
