"""Who runs when."""

import torch

from batchspec.bench.run import Answer
from batchspec.bench.session import key_of, measure
from batchspec.bench.workload import Workload

WORKLOAD = Workload([[1], [2], [3]], [""] * 3, max_tokens=20)


def run_all(done=frozenset()):
    """What was called, as (method, batch size, prompts, tokens), and the keys of the runs."""
    calls = []

    def open_method(name, size):
        def engine(workload):
            calls.append((name, size, len(workload.prompts), workload.max_tokens))
            return [Answer([7], 0.1, 0.2) for _ in workload.prompts], None

        return engine

    runs = list(measure(["x", "y"], [1, 2], 2, WORKLOAD, done, open_method, torch.device("cpu")))
    return calls, [run and key_of(run) for run in runs]


def test_methods_take_turns_within_each_repeat_after_a_warm_up_of_each():
    calls, keys = run_all()
    expected = [(name, size, repeat) for size in (1, 2) for repeat in (0, 1) for name in ("x", "y")]
    assert keys == expected
    assert calls[:6] == [
        ("x", 1, 1, 8), ("y", 1, 1, 8), ("x", 1, 3, 20), ("y", 1, 3, 20), ("x", 1, 3, 20), ("y", 1, 3, 20),
    ]  # fmt: skip
    assert calls[6:8] == [("x", 2, 2, 8), ("y", 2, 2, 8)]


def test_what_is_done_is_not_run_again_and_not_warmed_up():
    done = {("x", 1, 0), ("x", 1, 1), ("y", 1, 0)}
    calls, keys = run_all(done)
    assert keys[:4] == [None, None, None, ("y", 1, 1)]
    assert calls[:2] == [("y", 1, 1, 8), ("y", 1, 3, 20)]
