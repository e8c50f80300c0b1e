"""The measurement as one HTML page that needs nothing else: no network, no scripts; plots are part of it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from html import escape
from typing import Any

from batchspec.bench import cells
from batchspec.bench.cells import DRAFTING, LATENCY, SPEED, Row, category_table
from batchspec.bench.tables import caption
from batchspec.html import made_with, page, table


def html_page(document: dict[str, Any], plots: dict[str, bytes]) -> str:
    """The whole page. All text from options and files is escaped."""
    heads, lines = category_table(document["summary"], document["settings"]["baseline"])
    categories = [[escape(cell) for cell in line] for line in lines]
    sections = [
        f'<p class="verdict code{document["exit_code"]}">{escape(document["verdict"])}</p>',
        *(f"<p>{escape(remark)}</p>" for remark in document["remarks"]),
        _settings(document),
        *(_plot(name, image) for name, image in plots.items()),
        _figures(document, "Speed", SPEED, cells.speed_cells),
        _figures(document, "Latency", LATENCY, cells.latency_cells),
        _figures(document, "Drafting", DRAFTING, cells.drafting_cells),
        _section(document, "By category", [escape(head) for head in heads], categories) if lines else "",
        made_with(document["provenance"]),
    ]
    return page("batchspec bench", "How fast, and is it the same text?", sections)


def _settings(document: dict[str, Any]) -> str:
    settings = document["settings"]
    lengths = settings["prompt_lengths"]
    answers = "of exactly" if settings["ignore_eos"] else "of up to"
    return (
        f"<p>Model: <code>{escape(settings['model'])}</code> in {escape(settings['dtype'])} on "
        f"{escape(settings['device'])}; {len(lengths)} prompts of <code>{escape(settings['dataset'])}</code> with "
        f"{min(lengths)} to {max(lengths)} tokens, answers {answers} {settings['max_tokens']} tokens, temperature "
        f"{settings['temperature']:g}, {settings['repeats']} repeats in which the methods take turns. Tokens are "
        "counted alike for all: the ids that a method gave.</p>"
    )


def _plot(name: str, image: bytes) -> str:
    data = base64.b64encode(image).decode()
    return f'<p><img alt="{escape(name.removesuffix(".png"))}" src="data:image/png;base64,{data}"></p>'


def _figures(
    document: dict[str, Any], title: str, heads: tuple[str, ...], make_cells: Callable[[Row], list[str]]
) -> str:
    lines = []
    for row in document["summary"]:
        texts = [escape(cell) for cell in make_cells(row)]
        marked = [f'<span class="violation">{text}</span>' if text == "differs" else text for text in texts]
        lines.append([f"<code>{escape(row['method'])}</code>", str(row["batch_size"]), *marked])
    return _section(document, title, ["method", "batch", *heads], lines)


def _section(document: dict[str, Any], title: str, heads: list[str], lines: list[list[str]]) -> str:
    note = escape(caption(document, title))
    return f'<h2>{title}</h2>{table(heads, lines, 1)}<p class="small">{note}</p>'
