import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.drafting.costs import StepCosts

points = st.dictionaries(st.integers(1, 100), st.floats(0.001, 1.0), min_size=1, max_size=8)


@given(points)
def test_more_tokens_never_cost_less(found):
    costs = StepCosts(list(found.items()))
    seconds = [costs.seconds(size) for size in range(max(found) + 20)]
    rises = [
        later - sooner for sooner, later in zip(seconds[min(found) :], seconds[min(found) + 1 :], strict=False)
    ]
    assert all(rise >= -1e-12 for rise in rises)


def test_steps_that_are_seen_correct_all_sizes():
    costs = StepCosts([(1, 0.01), (11, 0.02)])
    for _ in range(200):
        costs.correct(costs.seconds(6), 0.03)
    assert costs.seconds(6) == pytest.approx(0.03, rel=0.01)
    assert costs.seconds(1) == pytest.approx(0.02, rel=0.01)


def test_an_accident_counts_little():
    costs = StepCosts([(1, 0.01), (11, 0.02)])
    costs.correct(costs.seconds(1), 60.0)
    assert costs.seconds(1) < 0.011


def test_slow_steps_count_as_long_as_they_take():
    costs = StepCosts([(1, 0.01)])
    for _ in range(200):
        for seconds in (0.01, 0.01, 0.01, 0.03):
            costs.correct(costs.seconds(1), seconds)
    assert costs.seconds(1) == pytest.approx(0.015, rel=0.06)
