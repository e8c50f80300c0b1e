"""What steps cost, as it is measured at load."""

from __future__ import annotations

import pytest
from toy_folders import text_llama

from batchspec.models import step_timing
from batchspec.models.runner import PackedRunner
from batchspec.models.step_timing import fastest, measure_target


def test_runs_take_turns_and_the_fastest_repeat_of_each_counts(monkeypatch):
    clock = 0.0
    durations = {"a": iter([9.0, 3.0, 2.0, 4.0]), "b": iter([9.0, 7.0, 8.0, 5.0])}  # the first of each warms up
    order = []

    def run(name):
        nonlocal clock
        order.append(name)
        clock += next(durations[name])

    monkeypatch.setattr(step_timing.time, "perf_counter", lambda: clock)
    assert fastest([lambda: run("a"), lambda: run("b")], repeats=3) == [2.0, 5.0]
    assert "".join(order) == "abababab"


@pytest.mark.parametrize("most_tokens", [1, 6, 12])
def test_a_target_is_measured_up_to_the_most_tokens_of_a_step(most_tokens):
    runner = PackedRunner(text_llama(), num_rows=4, max_length=64)
    points, block_seconds, column_seconds = measure_target(runner, most_tokens)
    assert (points[0][0], points[-1][0]) == (1, most_tokens)
    assert all(seconds > 0 for _, seconds in points)
    assert min(block_seconds, column_seconds) >= 0
    assert measure_target(runner, most_tokens)[0] is points  # remembered
