"""The whole audit, step by step; what is found is kept as it comes, so that Ctrl-C loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from batchspec.audit.answers import Engine, in_one_line
from batchspec.audit.compare import precise_logits
from batchspec.audit.local_engines import open_transformers
from batchspec.audit.noise_floor import NoiseFloor, measure_noise
from batchspec.audit.run import NULL, Run, run_engine
from batchspec.audit.sampling import LEVEL, SamplingRun
from batchspec.audit.sampling_run import Samples, Undrafted, collect, compare_sides, without_speculation
from batchspec.audit.spec import Spec, open_engine
from batchspec.audit.target import Target, answer_alone
from batchspec.models.reference import forced_logits, in_float32

StartStage = Callable[[str, int], Callable[[], None]]
"""Takes a stage's name and number of steps; gives what is called after each step."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that is ready to be audited."""

    name: str
    engine: Engine
    against: Undrafted | None = None
    """What its samples are held against; None: no sampling audit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How every candidate is audited."""

    batch_sizes: list[int]
    num_samples: int = 0
    """For each prompt and side; 0: no sampling audit."""
    temperature: float = 1.0


@dataclass(slots=True)
class Found:
    """What is known so far."""

    noise: NoiseFloor | None = None
    runs: list[Run] = field(default_factory=list)
    sampling: list[SamplingRun] = field(default_factory=list)
    is_stopped: bool = False
    """Ctrl-C ended the audit."""
    crash: str | None = None
    """The error that ended the audit, in one line."""


def open_candidate(target: Target, spec: Spec, is_sampled: bool) -> Candidate:
    """The candidate's engine and, for a sampling audit, that of the other side.

    Raises:
        ValueError: its settings cannot be used, its model not be loaded, or it broke down on the way.
    """
    try:
        engine = open_engine(target, spec)
        against = without_speculation(target, spec) if is_sampled else None
    except ValueError as error:
        raise ValueError(f"--candidate {spec.text!r}: {error}") from error
    except Exception as error:  # left alone it would end with exit code 1, which means violations
        raise ValueError(f"--candidate {spec.text!r}: {in_one_line(error)}") from error
    return Candidate(spec.text, engine, against)


def audit_all(target: Target, candidates: list[Candidate], plan: Plan, found: Found, start: StartStage) -> None:
    """Fill `found`: references, noise floor, null band, all candidates at all batch sizes, then the samples."""
    num_prompts = len(target.prompts)
    largest = max(plan.batch_sizes)
    answer_alone(target, start("the target alone", num_prompts))
    own = partial(forced_logits, target.llm.model)
    precise = in_float32(target.llm.model)
    exact = own if precise is target.llm.model else partial(forced_logits, precise)
    size = min(largest, num_prompts)
    found.noise = measure_noise(target, own, exact, size, start("noise floor", num_prompts))
    logits = precise_logits(exact)
    null = [(NULL, open_transformers(target), max(2, largest), True)] if num_prompts > 1 else []
    rows = [(one.name, one.engine, size, False) for one in candidates for size in plan.batch_sizes]
    for name, engine, batch_size, is_null in null + rows:
        run = Run(name, batch_size, is_null=is_null)
        found.runs.append(run)
        label = "null band" if is_null else f"{name}, batch {batch_size}"
        run_engine(run, engine, target, logits, found.noise.floor, start(label, num_prompts))
    if plan.num_samples:
        _sample_all(target, candidates, plan, found, start)


def _sample_all(target: Target, candidates: list[Candidate], plan: Plan, found: Found, start: StartStage) -> None:
    level = LEVEL / (len(candidates) * len(plan.batch_sizes))
    others: dict[str, Samples] = {}
    for number, one in enumerate(candidates):
        if one.against is None:
            continue
        num_steps = len(target.prompts) * plan.num_samples
        how = (plan.num_samples, plan.temperature)
        key = one.against.name if one.against.is_target else one.name
        if key not in others:
            done = start(f"sampling: {one.against.name}", num_steps)
            others[key] = collect(one.against.engine, target, max(plan.batch_sizes), *how, 2 * number, done)
        for batch_size in plan.batch_sizes:
            done = start(f"sampling: {one.name}, batch {batch_size}", num_steps)
            samples = collect(one.engine, target, batch_size, *how, 2 * number + 1, done)
            run = SamplingRun(one.name, batch_size, plan.num_samples, one.against.name, level)
            compare_sides(run, target, samples, others[key])
            found.sampling.append(run)
