"""What a training is asked for: frozen, validated, and written down beside its result."""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("layers", "feature")

MOST_SEEDS = 1 << 32
"""An epoch's seed is the training's and, above it, the epoch."""


@dataclass(frozen=True)
class TrainingSettings:
    """How a drafter is made.

    Raises:
        ValueError: a field is out of its range; the message names the field and what is allowed.
    """

    kind: str = "layers"
    """`layers`: a small independent model with the target's embedding and head. `feature`: the same, which feeds
    on the target's last hidden states, too, and in a draft on its own."""
    layers: int = 2
    """Layers of the drafter."""
    minutes: float = 60.0
    """Data and training together."""
    data_minutes: float | None = None
    """Most of them for making data; None: half."""
    tokens: int | None = None
    """Answer tokens after which there is enough data; None: as many as the minutes give."""
    seed: int = 0
    head_size: int = 8192
    """Tokens of the short head; 0, or no less than the vocabulary: the target's whole head."""
    max_prompt_tokens: int = 256
    max_tokens: int = 256
    """Tokens of an answer, at most."""
    shard_size: int = 96
    """Answers that are made, and written to disk, together."""
    window: int = 512
    """Tokens of a line, in which texts are packed."""
    lines_per_step: int = 4
    learning_rate: float = 1e-3
    """At its peak."""
    warm_up: float = 0.05
    """Share of the training time."""
    unroll: int = 2
    """For `feature`: how deep in a draft it is trained."""
    hard_share: float = 0.5
    """Weight of the target's most probable token in the loss; the rest is its distribution's."""
    num_measurements: int = 60
    """Points of the learning curve; with each the state is saved."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        lowest = {"layers": 1, "seed": 0, "head_size": 0, "max_prompt_tokens": 1, "max_tokens": 1, "shard_size": 2}
        lowest |= {"window": 8, "lines_per_step": 1, "num_measurements": 1, "unroll": 1}
        lowest |= {} if self.tokens is None else {"tokens": 1}
        for name, low in lowest.items():
            if (value := getattr(self, name)) < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        if self.seed >= MOST_SEEDS:
            raise ValueError(f"seed must be below 2**32, got {self.seed}")
        for name in ("minutes", "learning_rate"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {value}")
        for name in ("warm_up", "hard_share"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {value}")
        if self.data_minutes is not None and not 0 < self.data_minutes < self.minutes:
            raise ValueError(f"data_minutes must be above 0 and below minutes, got {self.data_minutes}")

    @property
    def data_seconds(self) -> float:
        return 60.0 * (self.minutes / 2 if self.data_minutes is None else self.data_minutes)


def spread(count: int, of: int) -> list[int]:
    """So many of the target's layers to start from, evenly spaced from the first to the last.

    >>> spread(1, 30), spread(2, 30), spread(3, 30)
    ([0], [0, 29], [0, 14, 29])
    """
    return [index * (of - 1) // max(count - 1, 1) for index in range(count)]
