"""What an audit shows on the terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from batchspec.audit.compare import OUTCOMES
from batchspec.audit.plot import divergences
from batchspec.terminal import breakable, width_of_words

MOST_ROWS = 12
"""Divergences shown, the violations first."""


def interval(figure: dict[str, Any], unit: str = "") -> str:
    """A figure with its 95 % interval.

    >>> interval({"value": 0.9375, "low": 0.717, "high": 0.989}, "%")
    '94% (72-99)'
    """
    value, low, high = figure["value"], figure["low"], figure["high"]
    if value is None:
        return ""
    if unit == "%":
        return f"{100 * value:.0f}% ({100 * low:.0f}-{100 * high:.0f})"
    return f"{value:.3g} ({low:.2g}-{high:.3g})"


def shortfall_text(divergence: dict[str, Any]) -> str:
    """A shortfall without end is that of an output which is over too early or too late."""
    value = divergence["shortfall"]
    return "none" if value is None else f"{value:.3g}"


def tables(document: dict[str, Any]) -> list[Table]:
    """Candidates, the worst divergences, and the sampling tests if there are any."""
    shown = [_candidates(document)]
    if divergences(document):
        shown.append(_divergences(document))
    if document["sampling"]:
        shown.append(_sampling(document))
    return shown


def _table(title: str, caption: str, columns: list[str], num_texts: int) -> Table:
    result = Table(title=title, caption=caption, caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    result.collapse_padding = True
    for place, name in enumerate(columns):
        result.add_column(name, justify="left" if place < num_texts else "right", overflow="fold")
    return result


def _candidates(document: dict[str, Any]) -> Table:
    floor = document["noise_floor"]
    known = "" if floor is None else f"; noise floor {floor['floor']:.3g} logits ({floor['dtype']})"
    table = _table(
        "Outputs against the target alone",
        f"below: 95 % intervals; shared: tokens before a difference{known}",
        ["candidate", "batch", "same", "tie", "viol.", "error", "exact\nmatch", "shared", "diff./\n1,000"],
        1,
    )
    names = ["null band" if run["is_null"] else breakable(run["candidate"]) for run in document["runs"]]
    table.columns[0].min_width = width_of_words(names)
    for name, run in zip(names, document["runs"], strict=True):
        counts, figures = run["counts"], run["figures"]
        style = "dim" if run["is_null"] else "red" if counts["violation"] else None
        table.add_row(
            escape(name),
            str(run["batch_size"]),
            *(str(counts[kind]) for kind in OUTCOMES),
            interval(figures["exact"], "%").replace(" (", "\n").rstrip(")"),
            f"{figures['shared']['value'] or 0:.1f}",
            interval(figures["divergences"]).replace(" (", "\n").rstrip(")"),
            style=style,
        )
    return table


def _divergences(document: dict[str, Any]) -> Table:
    found = divergences(document)
    found = [(run, outcome) for run, outcome in found if not run["is_null"]] or found
    more = f"; {len(found) - MOST_ROWS} more are in the report" if len(found) > MOST_ROWS else ""
    table = _table(
        "First differences",
        f"margin: of the two largest logits; shortfall: of the lower of both tokens{more}",
        ["class", "the target", "the candidate", "batch", "prompt", "position", "margin", "shortfall"],
        3,
    )
    for run, outcome in found[:MOST_ROWS]:
        one = outcome["divergence"]
        table.add_row(
            outcome["kind"],
            escape(repr(one["expected_text"])),
            escape(repr(one["got_text"])),
            f"{run['batch_size']}",
            str(outcome["prompt"]),
            str(one["position"]),
            f"{one['margin']:.3g}",
            shortfall_text(one),
            style="dim" if run["is_null"] else "red" if outcome["kind"] == "violation" else None,
        )
    return table


def _sampling(document: dict[str, Any]) -> Table:
    table = _table(
        "Sampled tokens with and without speculation",
        "permutation tests of the first three tokens and the length, corrected by Holm's method",
        ["candidate", "against", "batch", "samples", "tests", "errors", "least p", "level", "failed"],
        2,
    )
    for run in document["sampling"]:
        least = min((test["adjusted"] for test in run["tests"]), default=None)
        table.add_row(
            escape(run["candidate"]),
            run["against"],
            str(run["batch_size"]),
            str(run["num_samples"]),
            str(len(run["tests"])),
            str(run["num_errors"]),
            "" if least is None else f"{least:.3g}",
            f"{run['level']:.3g}",
            str(run["num_failed"]),
            style="red" if run["num_failed"] else None,
        )
    return table
