"""The audit: references, noise floor, null band, and every candidate at every batch size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from batchspec.audit.answers import Engine, Job
from batchspec.audit.compare import KINDS, Logits, Outcome, compare
from batchspec.audit.intervals import bootstrap_mean, poisson, wilson
from batchspec.audit.local_engines import open_assisted, open_batchspec, open_transformers
from batchspec.audit.server_engine import open_server
from batchspec.audit.spec import Spec
from batchspec.audit.target import Target
from batchspec.llm import LLM

NULL = "null band: transformers, batched, no speculation"
"""What batching alone does, in every report, for comparison. It does not count for the verdict."""


@dataclass(slots=True)
class Run:
    """One candidate at one batch size."""

    candidate: str
    batch_size: int
    outcomes: list[Outcome] = field(default_factory=list)
    is_null: bool = False
    num_from_text: int = 0
    """Prompts for which the engine gave text, which was tokenised again."""

    @property
    def counts(self) -> dict[str, int]:
        """Prompts of each kind; those that were not reached before Ctrl-C are missing."""
        found = Counter(outcome.kind for outcome in self.outcomes)
        return {kind: found[kind] for kind in KINDS}

    @property
    def compared(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.kind != "error"]

    @property
    def is_all_errors(self) -> bool:
        return bool(self.outcomes) and not self.compared


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


def figures(run: Run) -> dict[str, Figure]:
    """What a run comes to, over the prompts that were compared: errors are neither matches nor mismatches.

    `exact`: share of identical outputs (Wilson). `shared`: mean number of tokens before the first difference
    (bootstrap over the prompts). `divergences` and `violations`: per 1,000 tokens that were compared,
    that is, up to and with the first difference (exact Poisson).
    """
    compared = run.compared
    total = len(compared)
    num_exact = run.counts["identical"]
    shared = [float(outcome.num_shared) for outcome in compared]
    thousands = sum(outcome.num_compared for outcome in compared) / 1000
    result = {
        "exact": Figure(num_exact / total if total else math.nan, *wilson(num_exact, total)),
        "shared": Figure(sum(shared) / total if total else math.nan, *bootstrap_mean(shared)),
    }
    for name, count in (("divergences", total - num_exact), ("violations", run.counts["violation"])):
        result[name] = Figure(count / thousands if thousands else math.nan, *poisson(count, thousands))
    return result


def open_engine(target: LLM, spec: Spec) -> Engine:
    """The engine of a candidate.

    Raises:
        ValueError: its settings cannot be used, or its model not be loaded.
    """
    openers: dict[str, Callable[[LLM, Spec], Engine]] = {
        "batchspec": open_batchspec,
        "transformers": open_transformers,
        "transformers-assisted": open_assisted,
        "openai": open_server,
    }
    return openers[spec.kind](target, spec)


def run_engine(
    run: Run, engine: Engine, target: Target, logits: Logits, floor: float, done: Callable[[], Any]
) -> None:
    """Let an engine answer all prompts, and judge each answer as it comes; `run` holds them, also after Ctrl-C."""
    jobs = [Job(prompt, target.max_tokens) for prompt in target.prompts]
    try:
        for prompt, answer in engine(jobs, run.batch_size):
            run.num_from_text += answer.is_text
            run.outcomes.append(compare(target, prompt, answer, logits, floor))
            done()
    finally:
        run.outcomes.sort(key=lambda outcome: outcome.prompt)


def verdict(runs: Iterable[Run], num_failed_tests: int = 0) -> int:
    """Exit code: 1 if there is a violation, 2 if a candidate has given nothing but errors, else 0."""
    judged = [run for run in runs if not run.is_null]
    if num_failed_tests or any(run.counts["violation"] for run in judged):
        return 1
    return 2 if any(run.is_all_errors for run in judged) or not judged else 0
