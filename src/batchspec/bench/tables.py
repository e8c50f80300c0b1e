"""What `batchspec bench` shows on the terminal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from batchspec.bench import cells
from batchspec.bench.cells import CAPTIONS, DRAFTING, LATENCY, PLACES, SPEED, Row, category_table
from batchspec.terminal import breakable, width_of_words


def caption(document: dict[str, Any], title: str) -> str:
    return CAPTIONS[title].format(baseline=document["settings"]["baseline"], reference=reference_name(document))


def reference_name(document: dict[str, Any]) -> str:
    """In words: whose tokens others are held against."""
    return "none" if "none" in document["settings"]["methods"] else "our first method that has to be exact"


def tables(document: dict[str, Any]) -> list[Table]:
    """Speed, latency, drafting if anything tells of it, categories if there are several."""
    rows = document["summary"]
    shown = [
        _figures(document, "Speed", SPEED, cells.speed_cells),
        _figures(document, "Latency", LATENCY, partial(cells.latency_cells, show=cells.middle)),
    ]
    if any(row["occupancy"] is not None for row in rows):
        shown.append(_figures(document, "Drafting", DRAFTING, cells.drafting_cells))
    heads, lines = category_table(rows, document["settings"]["baseline"], show=cells.middle)
    if lines:
        shown.append(_table("By category", caption(document, "By category"), heads, lines, num_texts=len(heads)))
    return shown


def _figures(
    document: dict[str, Any], title: str, heads: tuple[str, ...], make_cells: Callable[[Row], list[str]]
) -> Table:
    lines = [[row["method"], str(row["batch_size"]), *make_cells(row)] for row in document["summary"]]
    return _table(title, caption(document, title), ["method", "batch", *heads], lines, num_texts=1)


def _table(title: str, note: str, heads: list[str], lines: list[list[str]], num_texts: int) -> Table:
    result = Table(title=title, caption=escape(note), caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    result.collapse_padding = True
    heads, lines = [breakable(head) for head in heads], [[breakable(line[0]), *line[1:]] for line in lines]
    for place, head in enumerate(heads):
        is_text = place < num_texts
        result.add_column(
            escape(head),
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=not (is_text or head == PLACES),
            min_width=width_of_words([head, *(line[place] for line in lines)]),
        )
    for line in lines:
        style = "red" if "differs" in line else None
        result.add_row(*map(escape, line), style=style)
    return result
