"""Does speculation leave the distribution of sampled tokens as it is? Two-sample permutation tests.

For each prompt there are n outputs with and n without speculation. Compared are the first, second and third token
(each by itself) and the length of the output. With `a` and `b` the times that each side has a value, the
statistic:

    tokens:   sum (a - b)^2 / sqrt(a + b)
    lengths:  sum (A - B)^2 * (a + b)      with A and B the times that each side has at most that value

The first stands between chi-square, in which many rare tokens drown the few that matter, and the plain distance.
The second is Cramer's and von Mises': lengths are numbers, and hardly one comes twice. Their distributions are not
assumed: the sides are shuffled, so the p-values are exact for any number of samples.

Small faults show in no single prompt, so each of the four also has a *pooled* test, whose statistic is the sum
over the prompts (shuffled within each). Half of the level goes to the four pooled tests and half to all single
ones, each half corrected by Holm's method; several runs share the level evenly (Bonferroni). So a run that is free
of faults fails with a probability of at most the level, and all of an audit's runs together do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchspec.audit.answers import NOTHING, STOPPED

LEVEL = 0.01
"""Probability of calling any faultless engine of an audit faulty."""

FIRST_TOKENS = 3
FEATURES = (*(f"token {place + 1}" for place in range(FIRST_TOKENS)), "length")

FEW = 999
"""Shuffles that show that a test is not significant; only the others get more."""

MOST = 200_000

CHUNK = 1 << 22
"""Numbers that are shuffled at once."""


@dataclass(frozen=True, slots=True)
class SampleTest:
    """One comparison of two samples."""

    feature: str
    prompt: int | None
    """None: pooled over all prompts."""
    statistic: float
    p: float
    adjusted: float
    """Corrected for all tests of the run; significant at the run's level or below."""


@dataclass(slots=True)
class SamplingRun:
    """One candidate at one batch size."""

    candidate: str
    batch_size: int
    num_samples: int
    against: str
    """Where the samples without speculation are from."""
    level: float
    tests: list[SampleTest] = field(default_factory=list)
    num_errors: int = 0
    num_compared: int = 0
    """Prompts of which there are samples of both sides."""

    @property
    def has_only_pooled_tests(self) -> bool:
        """So many tests share the level that none of a single prompt can fail: `MOST` shuffles give no p-value
        that is small enough. (It takes 250 runs for the four pooled tests to get there.)"""
        num_single = sum(test.prompt is not None for test in self.tests)
        return 2 * num_single / (MOST + 1) > self.level

    @property
    def failed(self) -> list[SampleTest]:
        return [test for test in self.tests if test.adjusted <= self.level]


def features_of(output: list[int], ends: frozenset[int]) -> list[int]:
    """The values of `FEATURES`; every end token is the same one, as some servers do not tell which it was."""
    tokens = [STOPPED if token in ends else token for token in output]
    first = [tokens[place] if place < len(tokens) else NOTHING for place in range(FIRST_TOKENS)]
    return [*first, len(output)]


def compare_samples(
    with_drafts: list[list[list[int]]],  # prompts x samples: outputs
    without: list[list[list[int]]],
    ends: frozenset[int],
    level: float,
    seed: int = 0,
) -> list[SampleTest]:
    """All tests of a run, pooled ones first. A prompt without samples on one side is left out."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [
        (prompt, *sides)
        for prompt, sides in enumerate(zip(with_drafts, without, strict=True))
        if all(len(side) > 0 for side in sides)
    ]
    if not pairs:
        return []
    num_shuffles = min(MOST, int(4 * len(FEATURES) * len(pairs) / level) + FEW)
    num_pooled = min(MOST, int(8 * len(FEATURES) / level) + FEW)
    pooled: list[tuple[str, int | None, float, float]] = []
    single: list[tuple[str, int | None, float, float]] = []
    for place, feature in enumerate(FEATURES):
        is_ordered = feature == "length"
        columns = []
        for prompt, one, other in pairs:
            first, second = ([features_of(output, ends)[place] for output in side] for side in (one, other))
            columns.append((first, second))
            single.append(
                (feature, prompt, *permutation_test([(first, second)], num_shuffles, generator, is_ordered))
            )
        pooled.append((feature, None, *permutation_test(columns, num_pooled, generator, is_ordered)))
    return [*_adjusted(pooled), *_adjusted(single)]


def _adjusted(family: list[tuple[str, int | None, float, float]]) -> Iterator[SampleTest]:
    corrected = holm([p for *_, p in family])
    for (feature, prompt, statistic, p), adjusted in zip(family, corrected, strict=True):
        # Each family has half of the level.
        yield SampleTest(feature, prompt, statistic, p, min(1.0, 2 * adjusted))


def permutation_test(
    strata: list[tuple[list[int], list[int]]],
    num_shuffles: int,
    generator: torch.Generator,
    is_ordered: bool = False,
) -> tuple[float, float]:
    """Statistic and p-value of two samples, or of several pairs of them together, shuffled within each pair.

    `is_ordered`: values are numbers, of which near ones are alike; else they are names.
    After `FEW` shuffles a p-value above 1 % is final; the others are computed anew with `num_shuffles`.
    """
    tables = [_tabulate(*pair, is_ordered) for pair in strata]
    observed = sum(float(_statistic(table, _sides(table))) for table in tables)
    p = 1.0
    for count in (FEW, num_shuffles):
        shuffled = torch.zeros(count)
        for table in tables:
            shuffled += _shuffled_statistics(table, count, generator)
        # A hair below: sums in another order must not turn what is equal into less.
        p = (1 + int((shuffled >= observed * (1 - 1e-5) - 1e-6).sum())) / (count + 1)
        if p > 0.01:
            break
    return observed, p


@dataclass(frozen=True, slots=True)
class _Table:
    """Two samples of values, side by side."""

    has: Tensor
    """1 where a sample has a value, or for ordered values at most that one, `[samples of both, values]`."""
    weights: Tensor
    """Of each value in the statistic, `[values]`."""
    num_first: int


def _tabulate(first: list[int], second: list[int], is_ordered: bool) -> _Table:
    values = torch.tensor(first + second)
    distinct, counts = values.unique(return_counts=True)  # sorted
    if is_ordered:
        has, weights = values.unsqueeze(1) <= distinct, counts / len(values) ** 3
    else:
        has, weights = values.unsqueeze(1) == distinct, counts**-0.5
    return _Table(has.float(), weights.float(), len(first))


def _sides(table: _Table) -> Tensor:
    """1 where a sample is of the first side, as observed, `[1, samples]`."""
    return (torch.arange(len(table.has)) < table.num_first).float().unsqueeze(0)


def _statistic(table: _Table, sides: Tensor) -> Tensor:
    """`sum weight * (a sqrt(m/n) - b sqrt(n/m))^2` for sides of n and m: `sides` `[R, samples]`, gives `[R]`."""
    num_first, num_second = table.num_first, len(table.has) - table.num_first
    scale = (num_second / num_first) ** 0.5
    first = sides @ table.has
    difference = first * scale - (table.has.sum(0) - first) / scale
    return (difference**2 * table.weights).sum(1)


def _shuffled_statistics(table: _Table, count: int, generator: torch.Generator) -> Tensor:
    """The statistic of `count` random divisions into two sides of the same sizes, `[count]`."""
    num_samples, num_values = table.has.shape
    if num_values == 1:  # nothing to tell apart
        return torch.zeros(count)
    parts = []
    step = max(1, CHUNK // (num_samples + num_values))
    for start in range(0, count, step):
        rows = min(count - start, step)
        order = torch.rand(rows, num_samples, generator=generator).argsort(1)
        sides = torch.zeros(rows, num_samples).scatter_(1, order[:, : table.num_first], 1.0)
        parts.append(_statistic(table, sides))
    return torch.cat(parts)


def holm(p_values: list[float]) -> list[float]:
    """Holm's adjusted p-values.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted
