"""HTML pages that need nothing else: no network, no scripts."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; }
body { max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #e3e6ea; vertical-align: top; }
th { color: #57606a; font-weight: 600; } td.number, th.number { text-align: right; }
td.number { white-space: nowrap; } td:first-child { min-width: 11rem; }
code { font: .85rem ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; background: #f3f4f6; }
.verdict { padding: .8rem 1rem; border-left: 6px solid; margin: 1rem 0; font-size: 1.05rem; }
.verdict.code0 { border-color: #2e7d32; background: #edf7ed; }
.verdict.code1 { border-color: #c62828; background: #fdecea; }
.verdict.code2, .verdict.code130 { border-color: #d98a00; background: #fff6e5; }
.violation { color: #c62828; font-weight: 600; } .near-tie { color: #9a6200; } .null { color: #57606a; }
.small { color: #57606a; font-size: .88rem; }
svg, img { width: 100%; height: auto; }
"""


def page(title: str, heading: str, sections: Iterable[str]) -> str:
    """A whole page. `sections` are HTML; empty ones are left out."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n<h1>{escape(heading)}</h1>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


def table(heads: list[str], rows: list[list[str]], num_texts: int) -> str:
    """Cells are HTML; the first `num_texts` columns are texts, the others numbers.

    >>> table(["name", "count"], [["a", "1"]], 1).partition("<tbody>")[2]
    '<tr><td>a</td><td class=number>1</td></tr></tbody></table>'
    """

    def cells(tag: str, values: list[str]) -> str:
        return "".join(
            f"<{tag}{'' if place < num_texts else ' class=number'}>{value}</{tag}>"
            for place, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', heads)}</tr></thead><tbody>{body}</tbody></table>"


def made_with(provenance: dict[str, Any]) -> str:
    """The section that says how to make the page again."""
    machine = provenance["machine"]
    return (
        f"<h2>Made with</h2><p class=small><code>{escape(' '.join(provenance['command']))}</code><br>batchspec "
        f"{escape(provenance['batchspec'])} ({escape(str(provenance['commit']))}), "
        f"torch {escape(provenance['torch'])}, transformers {escape(provenance['transformers'])}, "
        f"Python {escape(provenance['python'])}, {escape(machine['processor'])}, "
        f"{escape(str(machine['gpu'] or 'no GPU'))}, {escape(provenance['time'])}</p>"
    )
