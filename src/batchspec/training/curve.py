"""The learning curve: lines of JSON as the training goes on, and a picture of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

CURVE, PICTURE = "curve.jsonl", "curve.png"


@dataclass(frozen=True)
class Point:
    """What was measured at one time of the training."""

    minutes: float
    """Data and training so far."""
    steps: int
    tokens: int
    """Trained on so far, each time that it came."""
    epochs: float
    loss: float | None
    """Mean since the point before; None at the first point, before anything is learnt."""
    agreement: float
    """Of the most probable token with the target's, on held-out texts."""
    acceptance: list[float]
    """Share of drafts whose first 1, 2, ... tokens are the target's, on held-out greedy texts."""


def write_curve(folder: Path, points: list[Point]) -> None:
    """All lines anew: after a kill, those behind the state that the training goes on from are no longer true."""
    partial = folder / f".{CURVE}"
    partial.write_text("".join(json.dumps(asdict(point)) + "\n" for point in points))
    partial.replace(folder / CURVE)


def draw_curve(folder: Path, points: list[Point]) -> None:
    """Draw the points; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left = figure.add_subplot()
    minutes = [point.minutes for point in points]
    left.plot(minutes, [point.agreement for point in points], color="black", label="agreement")
    for depth in range(len(points[-1].acceptance) if points else 0):
        accepted = [point.acceptance[depth] for point in points]
        left.plot(minutes, accepted, color="tab:blue", alpha=1 - 0.2 * depth, label=f"first {depth + 1} accepted")
    left.set(xlabel="minutes", ylabel="share of held-out places", ylim=(0, None))
    left.grid(alpha=0.3)
    left.legend(frameon=False, loc="upper left")
    right = left.twinx()
    losses = [(point.minutes, point.loss) for point in points if point.loss is not None]
    if losses:
        right.plot(*zip(*losses, strict=True), color="tab:red", alpha=0.5)
    right.set_ylabel("training loss", color="tab:red")
    partial = folder / f".{PICTURE}"
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(folder / PICTURE)
