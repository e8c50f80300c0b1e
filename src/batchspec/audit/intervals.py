"""95 % intervals for what an audit counts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

Z = 1.959963984540054
"""Of a normal distribution, 95 % lie within so many standard deviations."""

RESAMPLES = 2000


def wilson(count: int, total: int) -> tuple[float, float]:
    """Wilson's score interval of a share; (0, 1) if there is nothing to count.

    >>> [round(bound, 3) for bound in wilson(8, 10)]
    [0.49, 0.943]
    """
    if total == 0:
        return 0.0, 1.0
    share = count / total
    centre = share + Z**2 / (2 * total)
    spread = Z * math.sqrt(share * (1 - share) / total + Z**2 / (4 * total**2))
    low, high = ((centre + sign * spread) / (1 + Z**2 / total) for sign in (-1, 1))
    return (0.0 if count == 0 else low), (1.0 if count == total else high)


def poisson(count: int, exposure: float) -> tuple[float, float]:
    """Garwood's exact interval of a rate: of `count` events in so much exposure.

    >>> [round(bound, 3) for bound in poisson(3, 1.0)]
    [0.619, 8.767]
    """
    if exposure <= 0:
        return 0.0, math.inf
    low = 0.0 if count == 0 else _root(lambda mean: 1 - _poisson_below(count, mean) - 0.025, 0.0, float(count))
    high = _root(lambda mean: 0.025 - _poisson_below(count + 1, mean), float(count), 2 * count + 20.0)
    return low / exposure, high / exposure


def bootstrap_mean(values: list[float]) -> tuple[float, float]:
    """Percentile interval of a mean, by drawing the values again with replacement; reproducible."""
    if not values:
        return 0.0, math.inf
    draw = random.Random(0)
    means = sorted(math.fsum(draw.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def _poisson_below(count: int, mean: float) -> float:
    """Probability of fewer than `count` events where `mean` are expected."""
    if mean == 0:
        return 1.0
    return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that grows from below 0 crosses it, by bisection."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2
