"""What `batchspec bench paper` shows: a table, a JSON document, and three plots."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from batchspec.bench.paper import ARMS, OVERHEAD, STAGES, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOTS = ("throughput.png", "time.png", "grouping.png")

COLOURS = {
    "none": "#8c8c8c",
    "packed": "#0072b2",
    "eqspec": "#d55e00",
    "eqspec-refilled": "#e69f00",
    "exspec-fixed": "#56b4e9",
    "exspec": "#009e73",
}
STAGE_COLOURS = ("#56b4e9", "#0072b2", "#009e73", "#cc79a7", "#d55e00", "#f0e442", "#8c8c8c")


def groups(runs: Iterable[Run]) -> dict[int, dict[str, list[Run]]]:
    """The repeats of each arm at each batch size."""
    grouped: dict[int, dict[str, list[Run]]] = {}
    for run in runs:
        grouped.setdefault(run.batch_size, {}).setdefault(run.arm, []).append(run)
    return {size: {arm: arms[arm] for arm in ARMS if arm in arms} for size, arms in sorted(grouped.items())}


def median(runs: list[Run], figure: str) -> float:
    return statistics.median(getattr(run, figure) for run in runs)


def median_share(runs: list[Run], *stages: str) -> float:
    return statistics.median(run.share(*stages) for run in runs)


def speedup(arms: dict[str, list[Run]], arm: str) -> float:
    """Tokens per second against `none`, repeat by repeat, the median."""
    pairs = zip(arms[arm], arms["none"], strict=True)
    return statistics.median(run.tokens_per_second / none.tokens_per_second for run, none in pairs)


def tables(runs: Iterable[Run]) -> list[Table]:
    """Medians over the repeats, in three tables of one line for each batch size and arm."""
    sizes = groups(runs)
    return [
        _table(
            "Equality with the target alone, and speed",
            "exact: outputs that are equal, token by token; partial: share of the target's tokens that outputs "
            "agree with from the start on; accepted: share of the draft tokens; x none: throughput by that "
            "without drafts",
            sizes,
            {
                "exact": lambda runs, arms: f"{median(runs, 'exact'):.0%}",
                "partial": lambda runs, arms: f"{median(runs, 'partial'):.1%}",
                "accepted": lambda runs, arms: f"{median(runs, 'acceptance_rate'):.0%}",
                "tokens/s": lambda runs, arms: f"{median(runs, 'tokens_per_second'):.1f}",
                "x none": lambda runs, arms: "" if "none" not in arms else f"{speedup(arms, runs[0].arm):.2f}",
            },
        ),
        _table(
            "Rounds",
            "rounds: calls of the target; occupancy: places of the batch that were taken; grouped: rounds with "
            "rows of equal length; waited: rounds that a request sat out in all, P50/P99",
            sizes,
            {
                "rounds": lambda runs, arms: f"{median(runs, 'num_steps'):.0f}",
                "ms/verify": lambda runs, arms: f"{median(runs, 'milliseconds_per_verification'):.0f}",
                "occupancy": lambda runs, arms: f"{median(runs, 'occupancy'):.0%}",
                "grouped": lambda runs, arms: f"{median(runs, 'grouping_rate'):.0%}",
                "waited": lambda runs, arms: f"{median(runs, 'waited_p50'):.0f}/{median(runs, 'waited_p99'):.0f}",
            },
        ),
        _table(
            "Shares of the rounds' time",
            "append, realign: copying a padded batch's keys and values, without and with a shift; overhead: all "
            "but draft and verify; prefill: reading prompts, as a share of the whole",
            sizes,
            {
                "draft": lambda runs, arms: f"{median_share(runs, 'draft'):.1%}",
                "verify": lambda runs, arms: f"{median_share(runs, 'verify', 'sample'):.1%}",
                "append": lambda runs, arms: f"{median_share(runs, 'append'):.1%}",
                "realign": lambda runs, arms: f"{median_share(runs, 'realign'):.1%}",
                "overhead": lambda runs, arms: f"{median_share(runs, *OVERHEAD):.1%}",
                "prefill": lambda runs, arms: f"{median(runs, 'prefill_share'):.0%}",
            },
        ),
    ]


def _table(
    title: str,
    caption: str,
    sizes: dict[int, dict[str, list[Run]]],
    columns: dict[str, Callable[[list[Run], dict[str, list[Run]]], str]],
) -> Table:
    result = Table(
        title=title,
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("batch", "arm", *columns):
        result.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for size, arms in sizes.items():
        for arm, runs in arms.items():
            cells = [cell(runs, arms) for cell in columns.values()]
            result.add_row(str(size), arm, *cells, end_section=arm == list(arms)[-1])
    return result


def write_plots(folder: Path, runs: Iterable[Run]) -> None:
    """Throughput, time shares and grouping rate against the batch size, as PNG files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = groups(runs)
    for name, draw in zip(PLOTS, (_draw_throughput, _draw_shares, _draw_grouping), strict=True):
        figure = Figure(figsize=(9 if draw is _draw_shares else 6.5, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot(), sizes)
        figure.savefig(folder / name, dpi=150)


def _draw_throughput(axes: Axes, sizes: dict[int, dict[str, list[Run]]]) -> None:
    _draw_lines(axes, sizes, "tokens_per_second", list(ARMS))
    axes.set(ylabel="output tokens per second", title="Throughput", ylim=(0, 1.1 * axes.get_ylim()[1]))


def _draw_grouping(axes: Axes, sizes: dict[int, dict[str, list[Run]]]) -> None:
    _draw_lines(axes, sizes, "grouping_rate", [arm for arm, kind in ARMS.items() if kind["strategy"] != "packed"])
    axes.set(ylabel="share of rounds with rows of equal length", title="Grouping rate", ylim=(-0.03, 1.03))


def _draw_lines(axes: Axes, sizes: dict[int, dict[str, list[Run]]], figure: str, names: list[str]) -> None:
    for arm in names:
        points = [(size, median(arms[arm], figure)) for size, arms in sizes.items() if arm in arms]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=COLOURS[arm], label=arm)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)


def _draw_shares(axes: Axes, sizes: dict[int, dict[str, list[Run]]]) -> None:
    """One bar for each arm at each batch size, stacked by stage; arms stand together by batch size."""
    labels: list[str] = []
    places: list[float] = []
    bars: list[list[Run]] = []
    for index, (size, arms) in enumerate(sizes.items()):
        for arm, runs in arms.items():
            places.append(len(bars) + index)
            labels.append(f"{size}  {arm}")
            bars.append(runs)
    bottom = [0.0] * len(bars)
    for stage, colour in zip(STAGES, STAGE_COLOURS, strict=True):
        heights = [statistics.mean(run.share(stage) for run in runs) for runs in bars]
        axes.bar(places, heights, bottom=bottom, color=colour, label=stage, width=0.9)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(places, labels, rotation=90, fontsize=7)
    axes.set(ylabel="share of the rounds' time", title="Where the time goes (batch size, arm)", ylim=(0, 1))
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
