"""One run of one method over the whole workload: what was measured, and the figures that follow from it."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from batchspec.drafting.costs import StepCosts
from batchspec.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method gave to one prompt, and when: seconds from when the prompt was handed in."""

    token_ids: list[int]
    first_token_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Drafting:
    """What our engine counts and others do not tell."""

    num_steps: int
    num_draft_tokens: int
    acceptance_rate: float
    mean_acceptance_length: float
    occupancy: float
    mean_step_tokens: float
    """N: tokens of a target step, padding not counted."""
    num_drafted_at: list[int]
    num_accepted_at: list[int]

    @classmethod
    def of(cls, stats: EngineStats) -> Drafting:
        return cls(**{entry.name: getattr(stats, entry.name) for entry in fields(cls)})


@dataclass(frozen=True, slots=True)
class Run:
    """One run. Lists have one entry for each prompt, in the order of the workload."""

    method: str
    batch_size: int
    repeat: int
    seconds: float
    """Of the whole call: prompts, decoding, everything."""
    answers: list[str]
    """Digests of the answers' token ids: equal if and only if the tokens are."""
    num_tokens: list[int]
    """Output tokens, an end token included; counted alike for every method, from the token ids that it gave."""
    first_token_seconds: list[float]
    latencies: list[float]
    peak_memory: int | None
    """Bytes; None where the system does not tell."""
    drafting: Drafting | None
    step_costs: list[StepCosts]
    """What a step was held to cost at the run's end: of the target, and of the draft model if there is one; empty
    where drafts are not chosen by it."""

    @property
    def tokens_per_second(self) -> float:
        return sum(self.num_tokens) / self.seconds

    @property
    def first_token(self) -> float:
        """Seconds to the first token, median over the requests."""
        return statistics.median(self.first_token_seconds)

    @property
    def time_per_token(self) -> float:
        """Seconds for each token behind the first, median over the requests; 0 if no answer has a second one."""
        later = [
            (latency - first) / (count - 1)
            for latency, first, count in zip(
                self.latencies, self.first_token_seconds, self.num_tokens, strict=True
            )
            if count > 1
        ]
        return statistics.median(later) if later else 0.0

    @property
    def latency_p50(self) -> float:
        return percentile(sorted(self.latencies), 50)

    @property
    def latency_p99(self) -> float:
        return percentile(sorted(self.latencies), 99)

    def rates_by_category(self, categories: list[str]) -> dict[str, float]:
        """Tokens per second of a request of each category: its tokens by the time that its requests took."""
        tokens, seconds = dict.fromkeys(categories, 0), dict.fromkeys(categories, 0.0)
        for category, count, latency in zip(categories, self.num_tokens, self.latencies, strict=True):
            tokens[category] += count
            seconds[category] += latency
        return {category: tokens[category] / seconds[category] for category in tokens}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_run(
    method: str,
    batch_size: int,
    repeat: int,
    seconds: float,
    peak_memory: int | None,
    answers: list[Answer],
    stats: EngineStats | None = None,
    step_costs: Sequence[StepCosts] = (),
) -> Run:
    """The same for every method, so that all count tokens and time alike."""
    return Run(
        method=method,
        batch_size=batch_size,
        repeat=repeat,
        seconds=seconds,
        answers=[digest(answer.token_ids) for answer in answers],
        num_tokens=[len(answer.token_ids) for answer in answers],
        first_token_seconds=[answer.first_token_seconds for answer in answers],
        latencies=[answer.seconds for answer in answers],
        peak_memory=peak_memory,
        drafting=None if stats is None else Drafting.of(stats),
        step_costs=list(step_costs),
    )


def runs_of(document: dict[str, Any]) -> list[Run]:
    """The runs of a JSON document.

    Raises:
        KeyError or TypeError: it is none of `batchspec bench`.
    """
    runs = [{entry.name: row[entry.name] for entry in fields(Run)} for row in document["runs"]]
    return [
        Run(
            **row
            | {"drafting": row["drafting"] and Drafting(**row["drafting"])}
            | {"step_costs": [StepCosts(**costs) for costs in row["step_costs"]]}
        )
        for row in runs
    ]


def digest(token_ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:16]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed.

    >>> percentile([1, 2, 3, 4], 50), percentile([1, 2, 3, 4], 99)
    (2, 4)
    """
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]
