"""Figures as short texts, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def spread(figure: dict[str, float] | None, form: str, scale: float = 1.0, unit: str = "") -> str:
    """Median, least and most over the repeats; one number where they look the same.

    >>> spread({"median": 1.5, "low": 1.25, "high": 2.0}, ".2f", unit="x")
    '1.50x (1.25-2.00)'
    """
    if figure is None:
        return ""
    median, low, high = (format(scale * figure[name], form) for name in ("median", "low", "high"))
    return f"{median}{unit}" if low == high else f"{median}{unit} ({low}-{high})"


def middle(figure: dict[str, float] | None, form: str, scale: float = 1.0, unit: str = "") -> str:
    """The median alone, for narrow places."""
    return "" if figure is None else format(scale * figure["median"], form) + unit


def speedup(row: Row) -> str:
    """A speedup, or why there is none."""
    return "differs" if row["is_speedup_refused"] else spread(row["speedup"], ".2f", unit="x")


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def positions(row: Row) -> str:
    """Acceptance at each place of a draft, in per cent.

    >>> positions({"acceptance_by_position": [0.625, 0.4]})
    '62 40'
    """
    return " ".join(f"{100 * share:.0f}" for share in row["acceptance_by_position"] or ())


def mebibytes(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.0f}"


def speed_cells(row: Row) -> list[str]:
    return [spread(row["tokens_per_second"], ".1f"), speedup(row), percent(row["exact_match"])]


Show = Callable[..., str]
"""`spread` or `middle`."""


def latency_cells(row: Row, show: Show = spread) -> list[str]:
    return [
        show(row["first_token"], ".0f", 1000),
        show(row["time_per_token"], ".1f", 1000),
        show(row["latency_p50"], ".2f", 1),
        show(row["latency_p99"], ".2f", 1),
        mebibytes(row["peak_memory"]),
    ]


def drafting_cells(row: Row) -> list[str]:
    return [
        percent(row["acceptance_rate"]),
        positions(row),
        number(row["mean_acceptance_length"], ".2f"),
        percent(row["occupancy"]),
        number(row["mean_step_tokens"], ".1f"),
    ]


SPEED = ("tokens/s", "speedup", "exact")
LATENCY = ("first token ms", "ms/token", "P50 s", "P99 s", "peak MiB")
PLACES = "by place %"
DRAFTING = ("accepted", PLACES, "tokens/draft", "occupancy", "N")

CAPTIONS = {
    "Speed": "Output tokens per second of the whole call; median (least-most) over the repeats. Speedup against "
    "{baseline}, repeat by repeat. Exact: answers with the tokens of {reference}.",
    "Latency": "From when a prompt is handed in: to its first token, for each token behind it (medians of the "
    "requests), to its end (median and 99 % of the requests). Memory is the process's, or the GPU's tensors.",
    "Drafting": "Accepted draft tokens, in all and by their place in the draft; tokens gained by a drafted round; "
    "share of the batch's places in use; N: tokens of a target step.",
    "By category": "Tokens per second of {baseline}'s requests; of the others the speedup.",
}


def category_table(rows: list[Row], baseline: str, show: Show = spread) -> tuple[list[str], list[list[str]]]:
    """Heads and cells: a line for each batch size and category, a column for each method; none without
    categories."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    by_size: dict[int, dict[str, Row]] = {}
    for row in rows:
        by_size.setdefault(row["batch_size"], {})[row["method"]] = row
    lines = []
    for size, by_method in by_size.items():
        for category in next(iter(by_method.values()))["categories"]:
            cells = [_category_cell(by_method.get(method), category, baseline, show) for method in methods]
            lines.append([category, str(size), *cells])
    return ["category", "batch", *methods], lines


def _category_cell(row: Row | None, category: str, baseline: str, show: Show) -> str:
    if row is None:
        return ""
    figures = row["categories"][category]
    if row["method"] == baseline:
        return show(figures["tokens_per_second"], ".1f")
    return "differs" if row["is_speedup_refused"] else show(figures["speedup"], ".2f", unit="x")
