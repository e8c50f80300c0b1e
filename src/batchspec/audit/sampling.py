"""Does speculation leave the distribution of sampled tokens as it is? Two-sample permutation tests.

For each prompt there are n outputs with and n without speculation. Compared are the first, second and third token (each
by itself) and the length of the output. The statistic is that of chi-square for two samples,
`sum (a - b)^2 / (a + b)` over the values seen, with `a` and `b` the times that each side has a value. Its
distribution is not assumed: the sides are shuffled, so the p-values are exact for any number of samples.

Small faults show in no single prompt, so each of the four also has a *pooled* test, whose statistic is the sum over
the prompts (shuffled within each). Half of the level goes to the four pooled tests and half to all single ones,
each half corrected by Holm's method; several runs share the level evenly (Bonferroni). So a run that is free of
faults fails with a probability of at most the level, and all of an audit's runs together do.
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
    pooled: list[tuple[str, int | None, float, float]] = []
    single: list[tuple[str, int | None, float, float]] = []
    for place, feature in enumerate(FEATURES):
        columns = []
        for prompt, one, other in pairs:
            first, second = ([features_of(output, ends)[place] for output in side] for side in (one, other))
            columns.append((first, second))
            single.append((feature, prompt, *permutation_test([(first, second)], num_shuffles, generator)))
        pooled.append((feature, None, *permutation_test(columns, int(40 / level) + FEW, generator)))
    return [*_adjusted(pooled), *_adjusted(single)]


def _adjusted(family: list[tuple[str, int | None, float, float]]) -> Iterator[SampleTest]:
    corrected = holm([p for *_, p in family])
    for (feature, prompt, statistic, p), adjusted in zip(family, corrected, strict=True):
        yield SampleTest(feature, prompt, statistic, p, min(1.0, 2 * adjusted))


def permutation_test(
    strata: list[tuple[list[int], list[int]]], num_shuffles: int, generator: torch.Generator
) -> tuple[float, float]:
    """Statistic and p-value of two samples, or of several pairs of them together, shuffled within each pair.

    After `FEW` shuffles a p-value above 1 % is final; the others are computed anew with `num_shuffles`.
    """
    tables = [_one_hot(*pair) for pair in strata]
    observed = sum(float(_statistic(table, _kept(sizes).unsqueeze(0))) for table, sizes in tables)
    p = 1.0
    for count in (FEW, num_shuffles):
        shuffled = torch.zeros(count)
        for table, sizes in tables:
            shuffled += _shuffled_statistics(table, sizes, count, generator)
        # A hair below: sums in another order must not turn what is equal into less.
        p = (1 + int((shuffled >= observed * (1 - 1e-5) - 1e-6).sum())) / (count + 1)
        if p > 0.01:
            break
    return observed, p


def _one_hot(first: list[int], second: list[int]) -> tuple[Tensor, tuple[int, int]]:
    """Which of the values that were seen each sample has: `[samples of both, values]`; and the numbers of both."""
    values = {value: place for place, value in enumerate(dict.fromkeys(first + second))}
    places = torch.tensor([values[value] for value in first + second])
    return torch.nn.functional.one_hot(places, len(values)).float(), (len(first), len(second))


def _kept(sizes: tuple[int, int]) -> Tensor:
    """1 where a sample is of the first side, `[samples]`."""
    return torch.cat([torch.ones(sizes[0]), torch.zeros(sizes[1])])


def _statistic(table: Tensor, side: Tensor) -> Tensor:
    """`sum (a - b)^2 / (a + b)` with shares for unequal sizes: `table` `[N, values]`, `side` `[R, N]`; gives `[R]`."""
    total = table.sum(0)
    first = side @ table
    num_first = side.sum(1, keepdim=True)
    num_second = side.shape[1] - num_first
    difference = first * (num_second / num_first).sqrt() - (total - first) * (num_first / num_second).sqrt()
    return (difference**2 / total).sum(1)


def _shuffled_statistics(
    table: Tensor, sizes: tuple[int, int], count: int, generator: torch.Generator
) -> Tensor:
    """The statistic of `count` random divisions into two sides of the same sizes, `[count]`."""
    if table.shape[1] == 1:  # one value only: nothing to tell apart
        return torch.zeros(count)
    num_samples = sum(sizes)
    parts = []
    for start in range(0, count, max(1, CHUNK // num_samples)):
        rows = min(count - start, max(1, CHUNK // num_samples))
        order = torch.rand(rows, num_samples, generator=generator).argsort(1)
        side = torch.zeros(rows, num_samples).scatter_(1, order[:, : sizes[0]], 1.0)
        parts.append(_statistic(table, side))
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
