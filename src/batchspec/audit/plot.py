"""The margins of all reference tokens and the divergences among them, as SVG."""

from __future__ import annotations

import math
from html import escape
from typing import Any

WIDTH, HEIGHT = 960, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 44

COLOURS = {"violation": "#c62828", "near-tie": "#d98a00"}
"""Of the kinds of difference, the worst first."""

Judged = tuple[dict[str, Any], dict[str, Any]]
"""A run and one of its outcomes."""

MOST_POINTS = 20_000
"""Margins that are drawn; of more, every second, third, ... one is."""


def margins_svg(document: dict[str, Any]) -> str:
    """A page's plot: position in the output across, top-2 margin up (logarithmic); empty without margins."""
    floor = (document["noise_floor"] or {}).get("floor")
    margins = [(place, margin) for row in document["margins"] for place, margin in enumerate(row)]
    if not margins or floor is None:
        return ""
    margins = margins[:: -(-len(margins) // MOST_POINTS)]
    across, up, low, high = _scales(margins, floor)
    marks = [_mark(run, outcome, across, up) for run, outcome in reversed(divergences(document))]
    points = "".join(f"M{across(place):.1f} {up(margin):.1f}h0" for place, margin in margins)
    parts = [
        _axes(across, up, low, high, max(place for place, _ in margins)),
        f'<path d="{points}" stroke="#5b7a99" stroke-opacity="0.5" stroke-width="4" stroke-linecap="round"/>',
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(floor):.1f}" y2="{up(floor):.1f}" '
        'stroke="#333" stroke-dasharray="6 4"/>'
        f'<text fill="#57606a" x="{WIDTH - RIGHT - 4}" y="{up(floor) - 6:.1f}" text-anchor="end">'
        f"noise floor {floor:.3g}</text>",
        *marks,
    ]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Top-2 margins and divergences" '
        f'xmlns="http://www.w3.org/2000/svg" font-size="12" fill="none">{"".join(parts)}</svg>'
    )


def divergences(document: dict[str, Any]) -> list[Judged]:
    """Runs and outcomes that differ, the violations first."""
    return [pair for kind in COLOURS for pair in outcomes_of(document, kind)]


def outcomes_of(document: dict[str, Any], kind: str) -> list[Judged]:
    """Runs and outcomes of one kind, candidates before the null band."""
    runs = sorted(document["runs"], key=lambda run: run["is_null"])
    return [(run, outcome) for run in runs for outcome in run["outcomes"] if outcome["kind"] == kind]


def _scales(margins: list[tuple[int, float]], floor: float) -> tuple[Any, Any, float, float]:
    """Functions from values to places on the page, and the ends of the axis of margins."""
    high = max(max(margin for _, margin in margins), floor) * 1.5
    least = min((margin for _, margin in margins if margin > 0), default=floor)
    low = max(min(least, floor) / 2, high / 1e9)
    last = max(1, max(place for place, _ in margins))

    def across(place: float) -> float:
        return LEFT + 8 + (WIDTH - LEFT - RIGHT - 16) * place / last

    def up(margin: float) -> float:
        share = math.log(max(margin, low) / low) / math.log(high / low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, share)

    return across, up, low, high


def _axes(across: Any, up: Any, low: float, high: float, last: int) -> str:
    lines = [
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}" '
        'stroke="#ccc"/>'
    ]
    decades = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    for power in decades:
        y = up(10.0**power)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        lines.append(f'<text fill="#57606a" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for place in range(0, last + 1, max(1, -(-last // 8))):
        y = HEIGHT - BOTTOM + 16
        lines.append(f'<text fill="#57606a" x="{across(place):.1f}" y="{y}" text-anchor="middle">{place}</text>')
    below = f'x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}"'
    beside = f'transform="translate(14 {HEIGHT / 2}) rotate(-90)"'
    lines.append(f'<text fill="#57606a" {below} text-anchor="middle">position in the output</text>')
    lines.append(f'<text fill="#57606a" {beside} text-anchor="middle">top-2 margin (logits)</text>')
    return f'<g class="axes">{"".join(lines)}</g>'


def _mark(run: dict[str, Any], outcome: dict[str, Any], across: Any, up: Any) -> str:
    """A divergence; those of the null band are hollow."""
    found = outcome["divergence"]
    colour = COLOURS[outcome["kind"]]
    label = f"{outcome['kind']}: {run['candidate']}, batch {run['batch_size']}, prompt {outcome['prompt']}"
    fill = "none" if run["is_null"] else colour
    return (
        f'<circle class="{outcome["kind"]}" cx="{across(found["position"]):.1f}" cy="{up(found["margin"]):.1f}" '
        f'r="5" stroke="{colour}" stroke-width="1.5" fill="{fill}"><title>{escape(label)}</title></circle>'
    )
