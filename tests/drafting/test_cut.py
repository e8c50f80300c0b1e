"""The cut on scripted rows: the best there is."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_costs import costs_of, rate, survivals_of

from batchspec.drafting.costs import StepCosts
from batchspec.drafting.cut import WANTED, best_cut

chances = st.lists(st.floats(0.01, 0.98), max_size=3)


@given(st.lists(chances, min_size=1, max_size=4), st.floats(0, 0.6), st.floats(0, 0.5))
def test_the_cut_is_the_best_of_all(rows, slope, step):
    survivals, costs = [survivals_of(row) for row in rows], costs_of(slope, step)
    best = max(rate(survivals, cut, costs) for cut in product(*(range(len(row) + 1) for row in survivals)))
    found, without = best_cut(survivals, costs), rate(survivals, [0] * len(rows), costs)
    if any(found) or best > WANTED * without * (1 + 1e-9):
        assert rate(survivals, found, costs) == pytest.approx(best)
    else:
        assert best <= WANTED * without * (1 + 1e-9)


def test_a_row_of_many_blocks_must_promise_more():
    """Both rows offer the same; the second one holds 40 blocks, which draft columns make dear."""
    costs = StepCosts([(1, 1.0), (11, 1.5)], column_seconds=0.01)
    survivals = [[0.4], [0.4]]
    assert best_cut(survivals, costs) == [1, 1]
    assert best_cut(survivals, costs, blocks=[1, 40]) == [0, 0]  # all queries would be widened


def test_a_wide_draft_is_narrowed_where_width_is_dear():
    costs = StepCosts([(1, 1.0), (20, 1.02)], column_seconds=0.004)
    survivals = [[0.9, 0.8, 0.5, 0.4], *([[0.5]] * 4)]
    assert best_cut(survivals, costs, blocks=[1] * 5) == [4, 1, 1, 1, 1]
    assert best_cut(survivals, costs, blocks=[10] * 5) == [1] * 5
