"""Candidates that run in this process, on the loaded target: batchspec, and transformers' two ways."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from batchspec.audit.answers import Answer, Engine, Job, failure
from batchspec.audit.target import Target
from batchspec.llm import LLM
from batchspec.models.pairing import check_can_assist, load_draft_model
from batchspec.models.reference import generate_assisted, generate_batch
from batchspec.sampling_params import SamplingParams
from batchspec.settings import llm_settings


def open_batchspec(target: Target, **options: Any) -> Engine:
    """The target in batchspec, with options by `LLM_KEYS`; a draft model is loaded once for all batch sizes.

    Raises:
        ValueError: a setting is out of range or a draft model cannot be loaded.
    """
    settings = llm_settings(options)
    speculation = settings.get("speculative_config", {})
    if speculation.get("model") is not None:
        draft = load_draft_model(speculation["model"], target.llm.model, target.llm.tokenizer)
        settings["speculative_config"] = {**speculation, "model": draft}
    make_llm(target, 1, settings)  # refuses now what it would refuse later
    return partial(_answer_by_batchspec, target, settings)


def make_llm(target: Target, batch_size: int, settings: dict[str, Any]) -> LLM:
    """An `LLM` of its own for the target, which it is given loaded: so `prepack` is heeded here."""
    tokenizer = target.llm.tokenizer
    own = {"tokenizer": tokenizer} if tokenizer is not None else {"skip_tokenizer_init": True}
    window = {"max_model_len": target.llm.engine.config.max_model_len}
    model = target.prepacked_model if settings.get("prepack", True) else target.llm.model
    return LLM(model, max_num_seqs=batch_size, **own, **(window | settings))


def _answer_by_batchspec(
    target: Target, settings: dict[str, Any], jobs: list[Job], batch_size: int
) -> Iterator[tuple[int, Answer]]:
    try:
        llm = make_llm(target, batch_size, settings)
    except Exception as error:  # noqa: BLE001 - whatever an engine raises is its failure, and part of the report
        yield from ((place, failure(error)) for place in range(len(jobs)))
        return
    yield from answer_by_llm(llm, jobs)


def answer_by_llm(llm: LLM, jobs: list[Job]) -> Iterator[tuple[int, Answer]]:
    """Run jobs in their order. If the engine fails, those in its batch have failed, and the rest runs anew."""
    left = list(range(len(jobs)))
    while left:
        seen: set[int] = set()
        finished: set[int] = set()
        params = [
            SamplingParams(temperature=job.temperature, max_tokens=job.max_tokens, seed=job.seed)
            for job in (jobs[place] for place in left)
        ]
        try:
            for output in llm.stream([jobs[place].prompt_token_ids for place in left], params):
                place = left[int(output.request_id)]
                seen.add(place)
                if output.finished:
                    finished.add(place)
                    yield place, Answer(output.outputs[0].token_ids)
            return
        except Exception as error:  # noqa: BLE001 - as above
            unfinished = [place for place in left if place not in finished]
            failed = [place for place in unfinished if place in seen] or unfinished[: llm.engine.config.num_rows]
            yield from ((place, failure(error)) for place in failed)
            left = [place for place in unfinished if place not in failed]


def open_transformers(target: Target) -> Engine:
    """transformers' own `generate` over left-padded batches."""
    return partial(_answer_by_transformers, target)


def _answer_by_transformers(target: Target, jobs: list[Job], batch_size: int) -> Iterator[tuple[int, Answer]]:
    for start in range(0, len(jobs), batch_size):
        places = range(start, min(start + batch_size, len(jobs)))
        batch = [jobs[place] for place in places]
        try:
            prompts, first = [job.prompt_token_ids for job in batch], batch[0]
            outputs = generate_batch(
                target.llm.model, prompts, first.max_tokens, target.ends, first.temperature, first.seed
            )
        except Exception as error:  # noqa: BLE001 - as above
            yield from ((place, failure(error)) for place in places)
            continue
        yield from ((place, Answer(output)) for place, output in zip(places, outputs, strict=True))


def open_assisted(target: Target, *, model: Any = None, **settings: Any) -> Engine:
    """transformers' assisted decoding, by prompt look-up or with a draft model. It takes one prompt at a time
    whatever the batch size.

    Raises:
        ValueError: the draft model cannot be loaded, has another tokenizer, or is one that only batchspec can use.
    """
    if model is not None:
        settings["assistant"] = load_draft_model(model, target.llm.model, target.llm.tokenizer)
        check_can_assist(settings["assistant"])
    return partial(_answer_assisted, target, settings)


def _answer_assisted(
    target: Target, settings: dict[str, Any], jobs: list[Job], batch_size: int
) -> Iterator[tuple[int, Answer]]:
    for place, job in enumerate(jobs):
        try:
            tokens = generate_assisted(
                target.llm.model,
                job.prompt_token_ids,
                job.max_tokens,
                target.ends,
                job.temperature,
                job.seed,
                **settings,
            )
            yield place, Answer(tokens)
        except Exception as error:  # noqa: BLE001 - as above
            yield place, failure(error)
