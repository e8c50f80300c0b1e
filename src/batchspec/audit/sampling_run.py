"""Collects the samples that `sampling.py` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from batchspec.audit.answers import Answer, Engine, Job
from batchspec.audit.local_engines import open_batchspec, open_transformers
from batchspec.audit.sampling import SamplingRun, compare_samples
from batchspec.audit.spec import Spec
from batchspec.audit.target import Target, seen_as_text
from batchspec.config import SpeculativeConfig

MOST_COPIES = 64
"""Rows of one prompt that the target alone samples together."""

SEEDS_OF_A_SIDE = 1 << 24
"""The two sides must not share their noise: coupled sampling would make them equal, token by token."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Outputs by prompt; prompts that failed have fewer."""

    outputs: list[list[list[int]]]
    is_text: bool = False
    """Some were tokenised from a server's text."""
    num_errors: int = 0


@dataclass(frozen=True, slots=True)
class Undrafted:
    """Where the samples without speculation come from."""

    name: str
    """In words."""
    engine: Engine
    is_target: bool
    """It is the target itself, whose samples serve all candidates that are held against it."""


def without_speculation(target: Target, spec: Spec) -> Undrafted:
    """What a candidate's samples are held against; it gives token ids, never text."""
    if spec.kind != "batchspec":
        engine = _copies_together(open_transformers(target))
        return Undrafted("the target alone by transformers", engine, is_target=True)
    drafting = SpeculativeConfig.__dataclass_fields__
    plain = {name: value for name, value in spec.options.items() if name not in drafting}
    return Undrafted("the same engine without speculation", open_batchspec(target, **plain), is_target=False)


def _copies_together(engine: Engine) -> Engine:
    """Batches of one prompt only, so that there is no padding."""

    def run(jobs: list[Job], batch_size: int) -> Iterator[tuple[int, Answer]]:
        places = range(len(jobs))
        for _, group in groupby(places, key=lambda place: jobs[place].prompt_token_ids):
            same = list(group)
            for place, answer in engine([jobs[place] for place in same], MOST_COPIES):
                yield same[place], answer

    return run


def collect(
    engine: Engine,
    target: Target,
    batch_size: int,
    num_samples: int,
    temperature: float,
    side: int,
    done: Callable[[], Any],
) -> Samples:
    """Sample every prompt `num_samples` times."""
    first_seed = side * SEEDS_OF_A_SIDE
    prompts = [prompt for prompt in range(len(target.prompts)) for _ in range(num_samples)]
    jobs = [
        Job(target.prompts[prompt], target.max_tokens, temperature, first_seed + place)
        for place, prompt in enumerate(prompts)
    ]
    samples: list[list[list[int]]] = [[] for _ in target.prompts]
    is_text = False
    for place, answer in engine(jobs, batch_size):
        if answer.error is None:
            samples[prompts[place]].append(answer.token_ids)
            is_text = is_text or answer.is_text
        done()
    return Samples(samples, is_text, num_errors=len(jobs) - sum(map(len, samples)))


def compare_sides(run: SamplingRun, target: Target, with_drafts: Samples, without: Samples) -> None:
    """Fill in the tests of a run. If the candidate gave text, the samples without speculation are made text."""
    others = without.outputs
    if with_drafts.is_text:
        others = [[seen_as_text(target.llm, output, target.ends) for output in side] for side in others]
    run.num_errors = with_drafts.num_errors + without.num_errors
    run.num_compared = sum(bool(one and other) for one, other in zip(with_drafts.outputs, others, strict=True))
    run.tests = compare_samples(with_drafts.outputs, others, target.ends, run.level)
