"""Plots of `batchspec bench`, as PNG."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c", "#f0e442")

Rows = list[dict[str, Any]]


def draw_plots(document: dict[str, Any]) -> dict[str, bytes]:
    """PNG files by their names; of acceptance only if something was drafted.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = document["summary"]
    plots = {"throughput.png": png(lambda axes: _draw_throughput(axes, rows))}
    if any(row["acceptance_by_position"] for row in rows):
        plots["acceptance.png"] = png(lambda axes: _draw_acceptance(axes, rows))
    return plots


def png(draw: Callable[[Axes], None]) -> bytes:
    """Draw on one pair of axes; gives the file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _by_method(rows: Rows) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


def _draw_throughput(axes: Axes, rows: Rows) -> None:
    """Medians with the spread over the repeats."""
    for place, (method, own) in enumerate(_by_method(rows).items()):
        sizes = [row["batch_size"] for row in own]
        figures = [row["tokens_per_second"] for row in own]
        medians = [figure["median"] for figure in figures]
        spread = [
            [figure["median"] - figure["low"] for figure in figures],
            [figure["high"] - figure["median"] for figure in figures],
        ]
        colour = COLOURS[place % len(COLOURS)]
        axes.errorbar(sizes, medians, yerr=spread, marker="o", capsize=3, color=colour, label=_plain(method))
    sizes = sorted({row["batch_size"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="batch size", ylabel="output tokens per second", title="Throughput")
    axes.set_ylim(bottom=0)


def _draw_acceptance(axes: Axes, rows: Rows) -> None:
    """One line for each method, at its largest batch size."""
    for place, (method, own) in enumerate(_by_method(rows).items()):
        shares = own[-1]["acceptance_by_position"]
        if shares:
            colour = COLOURS[place % len(COLOURS)]
            label = f"{_plain(method)}, batch {own[-1]['batch_size']}"
            axes.plot(range(1, len(shares) + 1), shares, marker="o", color=colour, label=label)
    longest = max(len(row["acceptance_by_position"] or ()) for row in rows)
    axes.set_xticks(range(1, longest + 1))
    axes.set(xlabel="place in the draft", ylabel="accepted share", title="Acceptance by place", ylim=(-0.03, 1.03))


def _plain(text: str) -> str:
    """matplotlib reads dollars as formulas, and a leading underscore as "leave out"."""
    return text.replace("$", r"\$").lstrip("_")
