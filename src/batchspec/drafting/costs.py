"""What a step of a model costs, by its number of tokens, and by the blocks of the cache that they attend to."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

SMOOTHING = 0.05
"""What one more measurement counts for in the correction."""

MOST_OFF = 2.5
"""A step that took longer by more than this factor was stopped by something else, and counts as this."""


@dataclass(slots=True)
class StepCosts:
    """Seconds of a step: straight lines between measured sizes, corrected by the steps that are seen.

    >>> costs = StepCosts([(1, 0.010), (8, 0.024), (16, 0.022)])
    >>> round(costs.seconds(3), 4), round(costs.seconds(16), 4)  # never falling: 8 tokens take 0.022, too
    (0.0134, 0.022)
    >>> StepCosts([(1, 1.0), (3, 3.0)]).seconds(5)  # beyond, the last line goes on
    5.0
    >>> StepCosts([(1, 1.0)], block_seconds=0.1, column_seconds=0.01).seconds(1, more_blocks=2, draft_columns=5)
    1.25
    """

    points: list[tuple[int, float]]
    """Tokens and seconds."""
    block_seconds: float = 0.0
    """Of attention to one more block of the cache than one for each row, ..."""
    column_seconds: float = 0.0
    """... and of one more column of queries of a block."""
    correction: float = 1.0

    def __post_init__(self) -> None:
        self.points = _never_falling(sorted(self.points))

    def seconds(self, num_tokens: int, more_blocks: int = 0, draft_columns: int = 0) -> float:
        blocks = self.correction * (self._at(num_tokens) + more_blocks * self.block_seconds)
        return blocks + draft_columns * self.seconds_per_column

    @property
    def seconds_per_column(self) -> float:
        """Of one more column of queries of a block."""
        return self.correction * self.column_seconds

    def correct(self, expected: float, seconds: float) -> None:
        """A step that was to take `expected` seconds was seen to take so long. Seconds are averaged, not their
        logarithms: a slow step now and then is paid for, too."""
        self.correction *= 1 + SMOOTHING * (min(MOST_OFF, seconds / expected) - 1)

    def _at(self, num_tokens: int) -> float:
        if len(self.points) == 1:
            return self.points[0][1]
        place = bisect_right(self.points, num_tokens, key=lambda point: point[0])
        place = min(max(place, 1), len(self.points) - 1)
        (left, low), (right, high) = self.points[place - 1 : place + 1]
        return low + (high - low) * (num_tokens - left) / (right - left)


def _never_falling(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Fewer tokens never cost more: what says otherwise was disturbed, and disturbances only slow down."""
    least, kept = math.inf, []
    for size, seconds in reversed(points):
        least = min(least, seconds)
        kept.append((size, least))
    return kept[::-1]
