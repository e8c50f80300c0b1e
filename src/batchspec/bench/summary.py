"""Figures of a measurement: medians and spread over the repeats, and speedups taken repeat by repeat."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from batchspec.bench.equality import find_reference, prompts_that_differ
from batchspec.bench.methods import Method
from batchspec.bench.run import Run
from batchspec.stats import DecodingStats

TIMINGS = ("tokens_per_second", "first_token", "time_per_token", "latency_p50", "latency_p99")
COUNTS = ("acceptance_rate", "mean_acceptance_length")
ENGINE_COUNTS = ("occupancy", "mean_step_tokens")

Row = dict[str, Any]
"""The figures of one method at one batch size; what a method does not tell is None."""


def summarise(
    runs: Iterable[Run], methods: list[Method], categories: list[str], baseline: str, is_checked: bool = True
) -> list[Row]:
    """One row for each batch size and method. Without `is_checked` nothing is compared (synthetic acceptance)."""
    runs = list(runs)
    reference = find_reference(runs, methods) if is_checked else None
    differing = prompts_that_differ(runs, methods, reference)
    groups: dict[int, dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: (run.batch_size, run.repeat)):
        groups.setdefault(run.batch_size, {}).setdefault(run.method, []).append(run)
    rows = []
    for size, by_method in groups.items():
        against = by_method.get(baseline, [])
        for method in methods:
            own = by_method.get(method.name, [])
            if not own:
                continue
            differs = differing.get((method.name, size), [])
            is_refused = bool(differs or differing.get((baseline, size)))
            exact = statistics.median(map(reference.exact_match, own)) if reference else None
            rows.append(
                {
                    "batch_size": size,
                    "method": method.name,
                    "num_runs": len(own),
                    "differs": differs,
                    "speedup": None if is_refused else _ratios(own, against, lambda run: run.tokens_per_second),
                    "is_speedup_refused": is_refused,
                    "exact_match": exact,
                    **{name: _spread([getattr(run, name) for run in own]) for name in TIMINGS},
                    **_drafting(own),
                    "peak_memory": max((run.peak_memory for run in own if run.peak_memory), default=None),
                    "categories": _by_category(own, [] if is_refused else against, categories),
                }
            )
    return rows


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _ratios(own: list[Run], against: list[Run], figure: Callable[[Run], float]) -> dict[str, float] | None:
    """Against the baseline's run of the same repeat, which had the same machine at about the same time."""
    base = {run.repeat: run for run in against}
    ratios = [figure(run) / figure(base[run.repeat]) for run in own if run.repeat in base]
    return _spread(ratios) if ratios else None


def _drafting(own: list[Run]) -> Row:
    told = [run.drafting for run in own if run.drafting is not None]
    row: Row = dict.fromkeys((*COUNTS, *ENGINE_COUNTS, "acceptance_by_position"))
    if told:
        row |= {name: statistics.median(getattr(one, name) for one in told) for name in ENGINE_COUNTS}
    if any(one.num_draft_tokens for one in told):
        total = DecodingStats()
        for one in told:
            total.add(DecodingStats(num_drafted_at=one.num_drafted_at, num_accepted_at=one.num_accepted_at))
        row |= {name: statistics.median(getattr(one, name) for one in told) for name in COUNTS}
        row["acceptance_by_position"] = total.acceptance_by_position
    return row


def _by_category(own: list[Run], against: list[Run], categories: list[str]) -> dict[str, Row]:
    """Of each category: tokens per second of a request, and speedups; empty if there is one category only."""
    names = sorted(set(categories))
    if len(names) < 2:
        return {}

    def rate(name: str) -> Callable[[Run], float]:
        return lambda run: run.rates_by_category(categories)[name]

    return {
        name: {
            "tokens_per_second": _spread([rate(name)(run) for run in own]),
            "speedup": _ratios(own, against, rate(name)),
        }
        for name in names
    }
