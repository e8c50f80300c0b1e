"""The paper's own measurements: equivalence, overhead, grouping and throughput of its two methods and of ours.

*Batch Speculative Decoding Done Right* (arXiv 2510.22876), sections 5 and 6. Every strategy runs the same prompts
with the same drafter; strategies take turns within a repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from batchspec.bench.run import percentile
from batchspec.config import PoolConfig, SpeculativeConfig
from batchspec.llm import LLM
from batchspec.models.reference import generate_alone
from batchspec.outputs import RequestOutput, common_prefix
from batchspec.sampling_params import SamplingParams

ARMS: Mapping[str, Mapping[str, Any]] = {
    "none": {"strategy": "packed", "speculative_config": None},
    "packed": {"strategy": "packed"},
    "eqspec": {"strategy": "eqspec", "refill": False},
    "eqspec-refilled": {"strategy": "eqspec"},
    "exspec-fixed": {"strategy": "exspec", "refill": False},
    "exspec": {"strategy": "exspec"},
}
"""What is compared, as settings of `LLM`. EQSPEC as in the paper decodes fixed batches. EXSPEC adds refilling of
finished rows and grouping: `eqspec-refilled` has the first alone, `exspec-fixed` the second alone."""

STAGES = ("draft", "verify", "sample", "append", "realign", "grouping", "rest")
"""Of a round. A padded batch's keys and values are copied in every forward pass of the target and of the draft
model: `append` joins old and new ones as they lie, `realign` moves rows to another padding (EQSPEC between two
passes, EXSPEC in the same copy). Packed rows do without both."""

OVERHEAD = ("append", "realign", "grouping", "rest")
"""What is neither drafting nor verifying."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts, and what the target alone says to them."""

    prompts: list[list[int]]
    references: list[list[int]]
    max_tokens: int
    by_length: bool = False
    """Run like `LLM.generate`, longest prompts first, instead of in their order."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one arm over the whole workload."""

    arm: str
    batch_size: int
    repeat: int
    seconds: float
    num_tokens: int
    exact: float
    """Share of the outputs that equal the target's, token by token."""
    partial: float
    """Mean share of the target's tokens that an output agrees with from the start on."""
    num_steps: int
    """Rounds of the batch, and so calls of the target to verify."""
    occupancy: float
    grouping_rate: float
    acceptance_rate: float
    mean_acceptance_length: float
    waited_p50: float
    """Rounds that a request sat out in the pool, median over the requests."""
    waited_p99: float
    stage_seconds: dict[str, float]
    """By path, such as `verify/append`; they add up to the time spent in the engine."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def stage(self, name: str) -> float:
        """Seconds of a stage of the rounds, or of `prefill`, which has no parts."""
        return sum(seconds for path, seconds in self.stage_seconds.items() if _stage_of(path) == name)

    def share(self, *stages: str) -> float:
        """Share of the rounds' time."""
        return sum(map(self.stage, stages)) / sum(map(self.stage, STAGES))

    @property
    def prefill_share(self) -> float:
        """Share of the engine's time in which the target read prompts (the draft model reads them in `draft`)."""
        return self.stage("prefill") / sum(self.stage_seconds.values())

    @property
    def milliseconds_per_verification(self) -> float:
        """Of the target's forward pass and the comparison, moving keys and values included."""
        paths = ("verify", "verify/append", "verify/realign", "sample")
        return 1000 * sum(self.stage_seconds.get(path, 0.0) for path in paths) / self.num_steps

    @property
    def overhead_per_token(self) -> float:
        """Milliseconds of overhead for each output token."""
        return 1000 * sum(map(self.stage, OVERHEAD)) / self.num_tokens

    def as_json(self) -> dict[str, Any]:
        derived = ("tokens_per_second", "milliseconds_per_verification", "overhead_per_token", "prefill_share")
        shares = {name: self.share(name) for name in STAGES}
        return {**asdict(self), **{name: getattr(self, name) for name in derived}, "shares": shares}


def runs_of(document: dict[str, Any]) -> list[Run]:
    """The runs of a JSON document."""
    names = [field.name for field in fields(Run)]
    return [Run(**{name: row[name] for name in names}) for row in document["runs"]]


def check_document(document: dict[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError for what is no document of `batchspec bench paper`."""
    runs_of(document)
    references = document["references"]
    if not isinstance(references, list) or len(references) != len(document["settings"]["prompt_lengths"]):
        raise ValueError("there must be as many references as prompts")


def _stage_of(path: str) -> str:
    """`verify/realign` is realigning, wherever it happens; the parts of `prefill` are not told apart."""
    first, *inner = path.split("/")
    return inner[-1] if inner and first != "prefill" else first


def answer_alone(llm: LLM, prompts: list[list[int]], max_tokens: int, done: Callable[[], None]) -> list[list[int]]:
    """Let the target answer each prompt by itself, by transformers' own `generate`."""
    references = []
    for prompt in prompts:
        budget = min(max_tokens, llm.engine.config.max_model_len - len(prompt))
        references.append(generate_alone(llm.model, prompt, budget, llm.engine.intake.eos_token_ids))
        done()
    return references


def measure(
    target: LLM,
    workload: Workload,
    first_repeats: Mapping[str, int],
    batch_size: int,
    repeats: int,
    speculative_config: SpeculativeConfig,
    pool_config: PoolConfig,
) -> Iterator[Run]:
    """Run every arm at one batch size, in turns, after a warm-up of each, from the first repeat that it lacks."""
    engines = {arm: make_llm(target, arm, batch_size, speculative_config, pool_config) for arm in first_repeats}
    warm_up = replace(workload, prompts=workload.prompts[:batch_size], max_tokens=8)
    for llm in engines.values():
        _generate(llm, warm_up)
    for repeat in range(repeats):
        for arm, llm in engines.items():
            if repeat >= first_repeats[arm]:
                yield _run(arm, llm, workload, repeat)


def make_llm(
    target: LLM, arm: str, batch_size: int, speculative_config: SpeculativeConfig, pool_config: PoolConfig
) -> LLM:
    """The target, with the arm's strategy."""
    settings: dict[str, Any] = {"speculative_config": speculative_config, **ARMS[arm]}
    if settings["strategy"] == "exspec":
        settings["pool_config"] = pool_config
    return LLM(
        target.model,
        tokenizer=target.tokenizer,
        max_num_seqs=batch_size,
        max_model_len=target.engine.config.max_model_len,
        **settings,
    )


def _generate(llm: LLM, workload: Workload) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=workload.max_tokens)
    if workload.by_length:
        return llm.generate(workload.prompts, params, use_tqdm=False)
    stream = llm.stream(workload.prompts, params)  # which takes the prompts in their order
    outputs = {output.request_id: output for output in stream if output.finished}
    return [outputs[str(index)] for index in range(len(workload.prompts))]


def _run(arm: str, llm: LLM, workload: Workload, repeat: int) -> Run:
    timer = llm.engine.timer
    llm.engine.reset_stats()
    timer.start()
    start = time.perf_counter()
    outputs = _generate(llm, workload)
    seconds = time.perf_counter() - start
    timer.stop()
    stats = llm.engine.stats
    answers = [output.outputs[0].token_ids for output in outputs]
    pairs = list(zip(answers, workload.references, strict=True))
    waited = sorted(output.metrics.num_waited_rounds for output in outputs)
    if timer.synchronize is not None:  # the timer waits for the GPU at every stage, so once more without it
        start = time.perf_counter()
        _generate(llm, workload)
        seconds = time.perf_counter() - start
    return Run(
        arm=arm,
        batch_size=llm.engine.config.max_num_seqs,
        repeat=repeat,
        seconds=seconds,
        num_tokens=stats.num_output_tokens,
        exact=sum(answer == reference for answer, reference in pairs) / len(pairs),
        partial=sum(common_prefix(*pair) / max(1, len(pair[1])) for pair in pairs) / len(pairs),
        num_steps=stats.num_steps,
        occupancy=stats.occupancy,
        grouping_rate=stats.grouping_rate,
        acceptance_rate=stats.acceptance_rate,
        mean_acceptance_length=stats.mean_acceptance_length,
        waited_p50=percentile(waited, 50),
        waited_p99=percentile(waited, 99),
        stage_seconds=dict(timer.seconds),
    )
