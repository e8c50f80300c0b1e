"""One candidate at one batch size: its answers are judged, counted, and come to a verdict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from batchspec.audit.answers import Engine, Job
from batchspec.audit.compare import OUTCOMES, Logits, Outcome, compare
from batchspec.audit.intervals import bootstrap_mean, poisson, wilson
from batchspec.audit.target import Target

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
        return {kind: found[kind] for kind in OUTCOMES}

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
    (bootstrap over the prompts). `divergences`: per 1,000 tokens that were compared, that is, up to and with the
    first difference (exact Poisson).
    """
    compared = run.compared
    total = len(compared)
    num_exact = run.counts["identical"]
    shared = [float(outcome.num_shared) for outcome in compared]
    thousands = sum(outcome.num_compared for outcome in compared) / 1000
    rate = (total - num_exact) / thousands if thousands else math.nan
    return {
        "exact": Figure(num_exact / total if total else math.nan, *wilson(num_exact, total)),
        "shared": Figure(sum(shared) / total if total else math.nan, *bootstrap_mean(shared)),
        "divergences": Figure(rate, *poisson(total - num_exact, thousands)),
    }


def run_engine(
    run: Run, engine: Engine, target: Target, logits: Logits, floor: float, done: Callable[[], Any]
) -> None:
    """Let an engine answer all prompts, and judge each answer as it comes; `run` holds them, also after Ctrl-C.

    An engine that ends without having answered all has failed on the others.
    """
    jobs = [Job(prompt, target.max_tokens) for prompt in target.prompts]
    try:
        for prompt, answer in engine(jobs, run.batch_size):
            run.num_from_text += answer.is_text
            run.outcomes.append(compare(target, prompt, answer, logits, floor))
            done()
        answered = {outcome.prompt for outcome in run.outcomes}
        for prompt in range(len(jobs)):
            if prompt not in answered:
                run.outcomes.append(Outcome(prompt, "error", error="the engine gave no answer"))
                done()
    finally:
        run.outcomes.sort(key=lambda outcome: outcome.prompt)
