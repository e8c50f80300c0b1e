"""Promise P1 on SmolLM2: bit for bit the same tokens, in half precision too, whatever is beside a request."""

from __future__ import annotations

import os
import random
from functools import cache
from itertools import product

import pytest
from test_real_model import first_turns

from batchspec import LLM, SamplingParams
from batchspec.models.noise import noisy_copy
from batchspec.models.prepacking import prepacked_copy

IS_FULL = bool(os.environ.get("BATCHSPEC_FULL"))
DTYPES = ("bfloat16", "float16", "float32") if IS_FULL else ("bfloat16",)
PER_CATEGORY, NUM_TOKENS = (8, 64) if IS_FULL else (1, 12)
BATCH_SIZES = (1, 4, 8, 16)
DRAFTERS = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "draft model": {"method": "draft_model"},
    "noisy copy": {"method": "draft_model"},
    "suffix": {"method": "suffix", "adaptive": True},
    "early exit": {"method": "early_exit", "num_layers": 3, "lookup": "ngram"},
    "adaptive": {"method": "draft_model", "lookup": "suffix", "adaptive": True},
}
FULL = list(product(("none", "ngram", "draft model"), BATCH_SIZES)) + list(product(DRAFTERS, (8,)))
RUNS = sorted(set(FULL) - {("none", 1)}) if IS_FULL else [("ngram", 8), ("adaptive", 8)]
"""`make test` runs a small cut; tiny models of all dtypes are in `models/test_invariance.py`."""


@cache
def target(folder: str, dtype: str) -> LLM:
    return LLM(folder, dtype=dtype, max_num_seqs=1)


@cache
def copy_with_noise(folder: str, dtype: str):
    return prepacked_copy(noisy_copy(target(folder, dtype).model, 0.04))


def make_llm(folder: str, dtype: str, drafter: str, batch_size: int, **settings) -> LLM:
    speculation = DRAFTERS[drafter]
    if drafter == "noisy copy":
        speculation = {**speculation, "model": copy_with_noise(folder, dtype)}
    llm = target(folder, dtype)
    return LLM(
        llm.model,
        tokenizer=llm.tokenizer,
        max_num_seqs=batch_size,
        speculative_config=speculation,
        **settings,
    )


def generate(llm: LLM, order: list[int] | None = None) -> list[list[int]]:
    """Half of the requests are greedy, half are drawn with seeds of their own; `order` is that of arrival."""
    turns = first_turns(PER_CATEGORY)
    order = list(range(len(turns))) if order is None else order
    requests = iter(
        llm.prepare(llm.render_chat([{"role": "user", "content": turns[serial]}]), params(serial), str(serial))
        for serial in order
    )
    outputs = {output.request_id: output for output in llm.run(lambda: next(requests, None)) if output.finished}
    return [outputs[str(serial)].outputs[0].token_ids for serial in range(len(turns))]


def params(serial: int) -> SamplingParams:
    return SamplingParams(temperature=0.9 * (serial % 2), top_p=0.95, seed=serial, max_tokens=NUM_TOKENS)


@cache
def reference(folder: str, dtype: str) -> list[list[int]]:
    """Each request by itself, one token at a time."""
    return generate(target(folder, dtype))


@pytest.mark.real_model
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("drafter", "batch_size"), RUNS)
def test_no_token_depends_on_drafts_batch_or_order(smollm, dtype, batch_size, drafter):
    order = list(range(len(first_turns(PER_CATEGORY))))
    random.Random(batch_size).shuffle(order)
    assert generate(make_llm(smollm, dtype, drafter, batch_size), order) == reference(smollm, dtype)


@pytest.mark.real_model
@pytest.mark.timeout(7200)
def test_fast_numerics_do_differ_in_half_precision(smollm):
    """The control: a comparison of bits can fail. It does for steps of one token, which fast numerics do not pad.
    (In steps of more tokens, products and attention are even on this CPU whatever the numerics.)"""
    alone, beside = (make_llm(smollm, "bfloat16", "none", batch_size) for batch_size in (1, 4))
    assert logprobs(alone) == logprobs(beside)
    assert logprobs(alone) != logprobs(make_llm(smollm, "bfloat16", "none", 1, numerics="fast"))


def logprobs(llm: LLM) -> list[float]:
    """Log-probabilities, to the last bit, of greedy answers."""
    prompts = [llm.render_chat([{"role": "user", "content": turn}]) for turn in first_turns(1)[:4]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, logprobs=0), use_tqdm=False)
    return [output.outputs[0].cumulative_logprob for output in outputs]
