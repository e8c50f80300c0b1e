"""How sure will a draft model be of a token that it has not computed yet? As it was of the others in that column.

Before a token is computed, its chance is known as a distribution only. That matters for its worth: computed, it is
verified if it turns out likely enough, and else it is left, having cost the draft model's step alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from batchspec.drafting.estimates import MOST_TRIED, Mark

CONFIDENCE = "confidence"
"""The source of a draft model's marks."""

LEVELS = tuple(Mark(CONFIDENCE, level, (level + 0.5) / 10) for level in range(10))
"""Its marks, by tenths of the probability that it gives its likeliest token; before anything is seen, all are as
likely."""

PRIOR_SEEN = 1.0
"""What each of them counts for at first."""


def _as_likely() -> list[float]:
    return [PRIOR_SEEN] * len(LEVELS)


@dataclass(slots=True)
class Outlook:
    """How often each mark came, by column; old ones fade.

    >>> outlook = Outlook()
    >>> for _ in range(30):
    ...     outlook.note(0, [LEVELS[9]])
    >>> [(mark.level, round(share, 3)) for mark, share in outlook.shares(0)[-2:]]
    [(8, 0.025), (9, 0.775)]
    """

    _seen: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(_as_likely))

    def note(self, column: int, marks: Iterable[Mark]) -> None:
        """The draft model has computed tokens of these marks."""
        seen = self._seen[column]
        for mark in marks:
            seen[mark.level] += 1
        fading = min(1.0, MOST_TRIED / sum(seen))
        self._seen[column] = [fading * count for count in seen]

    def shares(self, column: int) -> list[tuple[Mark, float]]:
        """The marks, and how likely the next token is to get each; sums to 1."""
        seen = self._seen[column]
        return [(mark, count / sum(seen)) for mark, count in zip(LEVELS, seen, strict=True)]
