"""From a method to something that answers a workload and says when each answer came."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from batchspec.bench.acceptance import accept_by_coin
from batchspec.bench.methods import ASSISTED, BATCHED, Method
from batchspec.bench.run import Answer
from batchspec.bench.workload import Workload
from batchspec.drafting.budget import AdaptiveBudget, Budget
from batchspec.drafting.costs import StepCosts
from batchspec.engine import Engine as OurEngine
from batchspec.llm import LLM
from batchspec.models.pairing import check_can_assist, load_draft_model
from batchspec.models.prepacking import prepack, prepacked_copy, unpacked_copy
from batchspec.models.reference import forget_generation_settings, generate_assisted, generate_batch
from batchspec.stats import EngineStats


class Outcome(NamedTuple):
    answers: list[Answer]
    """In the order of the prompts."""
    stats: EngineStats | None = None
    """What the engine counted, if it is ours."""
    step_costs: Sequence[StepCosts] = ()
    """Of the target and of the draft model, as far as the choice of drafts hung on them."""


Engine = Callable[[Workload], Outcome]


@dataclass(frozen=True, slots=True)
class Models:
    """The weights, loaded once for all methods."""

    target: LLM
    """Holds the model as transformers' methods run it, if there are any; its tokenizer and its end tokens."""
    ours: Any
    """The model as `LLM` has it when it loads one itself: prepacked for the CPU."""
    drafts: dict[str | None, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.target.model.device

    def draft(self, source: str | None) -> Any:
        """A draft model for our methods, loaded once; None: the one that batchspec brings.

        Raises:
            ValueError: it cannot be loaded or has another tokenizer.
        """
        if source not in self.drafts:
            self.drafts[source] = load_draft_model(source, self.ours, self.target.tokenizer)
        return self.drafts[source]


def share_models(target: LLM, methods: list[Method]) -> Models:
    """The target for both sides. If no method wants its weights as they are, they are prepacked in place."""
    if not any(method.wants_plain_weights for method in methods):
        return Models(target, prepack(target.model))
    forget_generation_settings(target.model)  # greedy search is plain argmax, for all
    return Models(target, prepacked_copy(target.model))


def open_method(models: Models, method: Method, batch_size: int, acceptance: float | None = None) -> Engine:
    """What answers workloads by this method. With `acceptance`, drafts are accepted by a coin.

    Raises:
        ValueError: a setting is out of range, or the model cannot run so.
    """
    if method.kind == BATCHED:
        return partial(_answer_by_batches, models, batch_size)
    if method.kind == ASSISTED:
        settings = dict(method.options)
        source = settings.pop("model", None)
        if source is not None:
            check_can_assist(models.draft(source))
            settings["assistant"] = unpacked_copy(models.draft(source))
        return partial(_answer_one_by_one, models, settings)
    engine = make_llm(models, method, batch_size).engine
    if acceptance is not None:
        accept_by_coin(engine, acceptance)
    return partial(answer_by_engine, engine)


def make_llm(models: Models, method: Method, batch_size: int) -> LLM:
    """The target with the method's settings."""
    tokenizer = models.target.tokenizer
    settings: dict[str, Any] = {"max_model_len": models.target.engine.config.max_model_len, **method.settings}
    settings |= {"skip_tokenizer_init": True} if tokenizer is None else {"tokenizer": tokenizer}
    if method.kind == "draft_model":
        speculation = settings["speculative_config"]
        draft = models.draft(speculation.get("model"))
        settings["speculative_config"] = {**speculation, "model": draft}
    model = models.target.model if method.wants_plain_weights else models.ours
    return LLM(model, max_num_seqs=batch_size, **settings)


def answer_by_engine(engine: OurEngine, workload: Workload) -> Outcome:
    """Hand in as many prompts as the engine has rows, and the next one whenever an answer is there.

    Token ids only, as transformers' `generate` gives: no method pays for text.
    """
    engine.reset_stats()
    left = deque(range(len(workload.prompts)))
    begun: dict[int, float] = {}
    first: dict[int, float] = {}
    answers: dict[int, Answer] = {}
    while len(answers) < len(workload.prompts):
        while left and len(begun) - len(answers) < engine.config.num_rows:
            place = left.popleft()
            begun[place] = time.perf_counter()
            engine.add_request(str(place), workload.prompts[place], workload.params(place))
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            place = int(output.request_id)
            first.setdefault(place, now - begun[place])
            if output.finished:
                answers[place] = Answer(output.outputs[0].token_ids, first[place], now - begun[place])
    in_order = [answers[place] for place in range(len(answers))]
    return Outcome(in_order, engine.stats, _known_costs(engine.drafter.budget))


def _known_costs(budget: Budget) -> list[StepCosts]:
    """As they are now: they go on being corrected."""
    if not isinstance(budget, AdaptiveBudget):
        return []
    return [replace(costs) for costs in (budget.target_costs, budget.draft_costs) if costs is not None]


def _answer_by_batches(models: Models, batch_size: int, workload: Workload) -> Outcome:
    """transformers' `generate` over left-padded batches, in the order of the prompts."""
    answers: list[Answer] = []
    for start in range(0, len(workload.prompts), batch_size):
        batch = workload.prompts[start : start + batch_size]
        watch = _Watch(models.device)
        outputs = generate_batch(
            models.target.model,
            batch,
            workload.max_tokens,
            _ends(models, workload),
            workload.temperature,
            start,
            watch.note,
        )
        answers += watch.answers(outputs)
    return Outcome(answers)


def _answer_one_by_one(models: Models, settings: dict[str, Any], workload: Workload) -> Outcome:
    """transformers' assisted decoding, which takes one prompt at a time whatever the batch size."""
    answers: list[Answer] = []
    for place, prompt in enumerate(workload.prompts):
        watch = _Watch(models.device)
        output = generate_assisted(
            models.target.model,
            prompt,
            workload.max_tokens,
            _ends(models, workload),
            workload.temperature,
            place,
            on_tokens=watch.note,
            **settings,
        )
        answers += watch.answers([output])
    return Outcome(answers)


class _Watch:
    """The clock of one call of transformers' `generate`, whose requests all end with it."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.first: float | None = None
        self.begun = time.perf_counter()

    def note(self) -> None:
        """Called whenever there are new tokens."""
        if self.first is None:
            self.first = self._now()

    def answers(self, outputs: list[list[int]]) -> list[Answer]:
        end = self._now()
        first = end if self.first is None else self.first
        return [Answer(output, first - self.begun, end - self.begun) for output in outputs]

    def _now(self) -> float:
        if self.is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


def _ends(models: Models, workload: Workload) -> frozenset[int]:
    return frozenset() if workload.ignore_eos else models.target.engine.intake.eos_token_ids
