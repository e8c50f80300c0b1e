"""Target steps of several sizes, timed against their floor."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from batchspec.bench.plots import png
from batchspec.bench.roofline import Machine, StepCost, Work, cost_of, timed
from batchspec.layout.packed import pack
from batchspec.layout.transfer import to_device
from batchspec.models.capability import make_invariant_runner, make_runner
from batchspec.models.invariance import Limits
from batchspec.models.loader import vocabulary_size
from batchspec.models.runner import PackedRunner
from batchspec.stats import StageTimer

WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which steps to time."""

    sizes: list[int]
    """Tokens of a step, N; multiples of `num_columns`."""
    num_columns: int
    """Tokens that each row adds."""
    context: int
    """Tokens that each row holds before the step."""
    repeats: int
    numerics: str = "invariant"

    def __post_init__(self) -> None:
        if odd := [size for size in self.sizes if size % self.num_columns]:
            raise ValueError(f"--sizes must be multiples of --columns ({self.num_columns}), got {odd[0]}")

    @property
    def num_rows(self) -> int:
        return max(self.sizes) // self.num_columns


def open_runner(model: Any, plan: StepPlan, window: int) -> PackedRunner:
    """A packed runner whose rows hold random tokens.

    Raises:
        ValueError: the model cannot run packed, or the rows do not fit into its context window.
    """
    length = plan.context + plan.num_columns
    if length > window:
        raise ValueError(
            f"--context and --columns must be at most {window} together, the context window, got {length}"
        )
    if plan.numerics == "invariant":
        runner = make_invariant_runner(model, Limits(plan.num_rows, plan.num_columns, length))
    else:
        runner = make_runner("packed", model, plan.num_rows, length, StageTimer())
    assert isinstance(runner, PackedRunner)
    draw, tokens = random.Random(0), range(vocabulary_size(model))
    for row in range(plan.num_rows):
        runner.prefill(row, draw.choices(tokens, k=plan.context))
    return runner


def time_steps(runner: PackedRunner, plan: StepPlan, done: Callable[[], object]) -> dict[int, list[float]]:
    """Seconds of each step size in each repeat; sizes take turns. `done` is called after each step."""
    works = {size: _step(runner, plan, size) for size in plan.sizes}
    for work in works.values():
        for _ in range(WARM_UPS):
            work()
    seconds: dict[int, list[float]] = {size: [] for size in plan.sizes}
    for _ in range(plan.repeats):
        for size, work in works.items():
            seconds[size].append(timed(work, runner.device))
            done()
    return seconds


def _step(runner: PackedRunner, plan: StepPlan, size: int) -> Callable[[], object]:
    """A step of so many tokens, which may be run again and again: the rows' lengths stay as they are."""
    num_rows = size // plan.num_columns
    step = pack([plan.context] * num_rows, [plan.num_columns] * num_rows, runner.device)
    draw = random.Random(size)
    tokens = draw.choices(range(vocabulary_size(runner.model)), k=size)
    return partial(runner.forward, step, to_device(tokens, runner.device))


def step_rows(
    seconds: dict[int, list[float]], plan: StepPlan, cost: StepCost, machine: Machine
) -> list[dict[str, Any]]:
    """The figures of each step size; times in seconds."""
    rows = []
    for size, times in seconds.items():
        work: Work = cost.work(size // plan.num_columns, plan.num_columns, plan.context)
        floor, median = machine.floor(work), statistics.median(times)
        is_memory = machine.memory_seconds(work) >= machine.matrix_seconds(work)
        rows.append(
            {
                "num_tokens": size,
                "num_rows": size // plan.num_columns,
                "seconds": {"median": median, "low": min(times), "high": max(times)},
                "floor": floor,
                "bound_by": "memory" if is_memory else "arithmetic",
                "ratio": median / floor,
                **asdict(work),
            }
        )
    return rows


def step_table(document: dict[str, Any]) -> Table:
    machine, settings = document["machine"], document["settings"]
    result = Table(
        title="A target step against its floor",
        caption=f"Measured here: {machine['bandwidth'] / 1e9:.1f} GB/s of memory, {machine['rate'] / 1e9:.0f} "
        f"billion operations per second in matrix products ({settings['dtype']}). Rows of {settings['context']} "
        "tokens; median (least-most).",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for head in ("N", "rows", "ms", "floor ms", "ratio", "bound by"):
        result.add_column(head, justify="left" if head == "bound by" else "right")
    for row in document["steps"]:
        low, median, high = (1000 * row["seconds"][name] for name in ("low", "median", "high"))
        cells = [f"{median:.2f} ({low:.2f}-{high:.2f})", f"{1000 * row['floor']:.2f}", f"{row['ratio']:.2f}"]
        result.add_row(str(row["num_tokens"]), str(row["num_rows"]), *cells, row["bound_by"])
    return result


def step_plot(document: dict[str, Any]) -> bytes:
    """Measured time and floor by N, as PNG."""
    rows = document["steps"]
    sizes = [row["num_tokens"] for row in rows]

    def draw(axes: Any) -> None:
        measured = [1000 * row["seconds"]["median"] for row in rows]
        axes.plot(sizes, measured, marker="o", color="#0072b2", label="measured")
        axes.plot(sizes, [1000 * row["floor"] for row in rows], marker="o", color="#8c8c8c", label="floor")
        axes.set(xlabel="tokens of the step, N", ylabel="milliseconds", title="A target step", ylim=(0, None))

    return png(draw)


def measure_steps(
    model: Any, plan: StepPlan, window: int, machine: Machine, done: Callable[[], object]
) -> list[dict[str, Any]]:
    """Time the plan's steps, and hold them against the floor."""
    with torch.inference_mode():
        runner = open_runner(model, plan, window)
        return step_rows(time_steps(runner, plan, done), plan, cost_of(runner), machine)
