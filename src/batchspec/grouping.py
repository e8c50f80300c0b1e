"""EXSPEC's choice: which sequences of the pool are decoded together in the next round. No tensors.

A batch of rows of equal length needs no padding and no realignment (Batch Speculative Decoding Done Right,
section 4). Length means content: tokens of the sequence, never columns of padding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as Rows

from batchspec.config import PoolConfig
from batchspec.request import Sequence

SMALLEST_SHARE = 0.92
"""Of a full batch: a smaller group of equal length pays if realigning a full one costs more than the rest."""


def choose_batch(pool: Rows[Sequence], batch_size: int, config: PoolConfig) -> list[int]:
    """Places in the pool of at most `batch_size` sequences, in ascending order.

    Those that have waited too long come first; the rest of the batch are rows of their length, if there are
    enough of them, else the rows nearest to them in length.
    """
    size = min(batch_size, len(pool))
    required = _overdue(pool, config.max_wait_rounds)[:size]
    smallest = min(size, config.min_group or math.ceil(SMALLEST_SHARE * size))
    group = _best_group(pool, required, size, smallest, config.group_by)
    return sorted(group or _closest_mix(pool, required, size))


def _overdue(pool: Rows[Sequence], max_wait_rounds: int) -> list[int]:
    """Those that have waited too long: longest waiting first, and among equals by length, to need less padding."""
    overdue = [place for place, sequence in enumerate(pool) if sequence.waited >= max_wait_rounds]
    return sorted(overdue, key=lambda place: (-pool[place].waited, -len(pool[place].token_ids)))


def _best_group(
    pool: Rows[Sequence], required: list[int], size: int, smallest: int, group_by: str
) -> list[int] | None:
    """Rows of one length that hold all that are required; None if there are not enough."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for place, sequence in enumerate(pool):
        by_length[len(sequence.token_ids)].append(place)
    candidates = [
        _most_alike(pool, places, required, size)
        if group_by == "acceptance"
        else _first(pool, places, required, size)
        for places in by_length.values()
        if len(places) >= smallest and set(required) <= set(places)
    ]
    if not candidates:
        return None
    if group_by == "acceptance":
        return min(candidates, key=lambda group: (-len(group), _spread(pool, group)))
    return max(candidates, key=lambda group: (len(group), sum(pool[place].waited for place in group)))


def _first(pool: Rows[Sequence], places: list[int], required: list[int], size: int) -> list[int]:
    """The required ones, then those that have waited longest."""
    return sorted(places, key=lambda place: (place not in required, -pool[place].waited))[:size]


def _most_alike(pool: Rows[Sequence], places: list[int], required: list[int], size: int) -> list[int]:
    """The `size` rows whose recent acceptance differs least, all required ones among them."""
    ordered = sorted(places, key=lambda place: pool[place].recent_acceptance)
    windows = [ordered[start : start + size] for start in range(max(1, len(ordered) - size + 1))]
    fitting = [window for window in windows if set(required) <= set(window)]
    if not fitting:  # the required ones are too far apart
        return _first(pool, places, required, size)
    return min(fitting, key=lambda window: _spread(pool, window))


def _spread(pool: Rows[Sequence], places: list[int]) -> float:
    rates = [pool[place].recent_acceptance for place in places]
    return max(rates) - min(rates)


def _closest_mix(pool: Rows[Sequence], required: list[int], size: int) -> list[int]:
    """The required rows and those that leave the least padding: neighbours in the order of lengths."""
    others = set(range(len(pool))) - set(required)
    ordered = sorted(others, key=lambda place: (len(pool[place].token_ids), -pool[place].waited))
    num_free = size - len(required)
    windows = [ordered[start : start + num_free] for start in range(len(ordered) - num_free + 1)]
    return min((required + window for window in windows), key=lambda batch: _padding(pool, batch))


def _padding(pool: Rows[Sequence], places: list[int]) -> int:
    lengths = [len(pool[place].token_ids) for place in places]
    return max(lengths) * len(lengths) - sum(lengths)
