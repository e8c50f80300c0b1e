"""What a step of a model costs, by its number of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

SMOOTHING = 0.05
"""What one more measurement counts for in the correction."""

MOST_OFF = 4.0
"""Measurements that are off by more than this factor are accidents (prompts, pauses), and count as this."""


@dataclass(slots=True)
class StepCosts:
    """Seconds of a step: straight lines between measured sizes, corrected by the steps that are seen.

    >>> costs = StepCosts([(1, 0.010), (8, 0.024), (16, 0.022)])
    >>> round(costs.seconds(3), 4), round(costs.seconds(16), 4)  # never falling
    (0.014, 0.024)
    >>> StepCosts([(1, 1.0), (3, 3.0)]).seconds(5)  # beyond, the last line goes on
    5.0
    """

    points: list[tuple[int, float]]
    """Tokens and seconds."""
    correction: float = 1.0

    def __post_init__(self) -> None:
        self.points = list(_never_falling(sorted(self.points)))

    def seconds(self, num_tokens: int) -> float:
        if len(self.points) == 1:
            return self.correction * self.points[0][1]
        place = bisect_right(self.points, num_tokens, key=lambda point: point[0])
        place = min(max(place, 1), len(self.points) - 1)
        (left, low), (right, high) = self.points[place - 1 : place + 1]
        return self.correction * (low + (high - low) * (num_tokens - left) / (right - left))

    def correct(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens was seen to take so long."""
        ratio = seconds / self.seconds(num_tokens)
        self.correction *= min(MOST_OFF, max(1 / MOST_OFF, ratio)) ** SMOOTHING


def _never_falling(points: Iterable[tuple[int, float]]) -> Iterable[tuple[int, float]]:
    """More tokens never cost less; what says otherwise is noise."""
    most = 0.0
    for size, seconds in points:
        most = max(most, seconds)
        yield size, most
