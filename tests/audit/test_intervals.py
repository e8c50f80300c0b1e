import math
import random

import pytest

from batchspec.audit.intervals import bootstrap_mean, poisson, wilson


def test_wilson_is_the_textbooks():
    assert wilson(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert wilson(10, 10) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    assert wilson(50, 100) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert wilson(0, 0) == (0.0, 1.0)


def test_poisson_is_the_tables():
    """Garwood's bounds as they stand in tables of the Poisson distribution."""
    for count, low, high in [(0, 0.0, 3.689), (1, 0.0253, 5.572), (10, 4.795, 18.391), (100, 81.36, 121.63)]:
        assert poisson(count, 1.0) == (pytest.approx(low, abs=6e-3), pytest.approx(high, abs=6e-3))
    assert poisson(3, 2.0) == (pytest.approx(0.309, abs=1e-3), pytest.approx(4.384, abs=1e-3))
    assert poisson(0, 0.0) == (0.0, math.inf)


def test_a_bootstrap_holds_the_mean_and_is_reproducible():
    draw = random.Random(1)
    inside = 0
    for _ in range(20):
        values = [draw.gauss(5, 2) for _ in range(50)]
        low, high = bootstrap_mean(values)
        inside += low <= 5 <= high
    assert inside >= 16
    assert bootstrap_mean(values) == (low, high)
    assert bootstrap_mean([]) == (0.0, math.inf)
