"""SmolLM2-135M-Instruct on Spec-Bench prompts: a batch with drafts equals `transformers.generate` one by one."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest
import torch
from greedy import greedy

from batchspec import LLM
from batchspec.models.reference import generate_alone

QUESTIONS = Path(__file__).parents[2] / "shared/data/spec_bench/question.jsonl"
PER_CATEGORY = int(os.environ.get("BATCHSPEC_PER_CATEGORY", "1"))  # `make exact` takes more
MAX_TOKENS = 32 if PER_CATEGORY > 1 else 16
TIE = 1e-4
"""Top-2 logit margin under which two ways of rounding may disagree on the argmax."""


def first_turns(per_category: int) -> list[str]:
    if not QUESTIONS.exists():
        pytest.skip(f"the Spec-Bench prompts are not there: {QUESTIONS}")
    taken: dict[str, list[str]] = {}
    for line in QUESTIONS.read_text().splitlines():
        row = json.loads(line)
        turns = taken.setdefault(row["category"], [])
        if len(turns) < per_category:
            turns.append(row["turns"][0])
    assert [len(turns) for turns in taken.values()] == [per_category] * 13
    return [turn for turns in taken.values() for turn in turns]


@pytest.mark.real_model
@pytest.mark.timeout(900 if PER_CATEGORY == 1 else 7200)
@pytest.mark.parametrize("strategy", ["packed", "eqspec", "exspec"])
def test_a_batch_with_ngram_drafts_equals_generate_one_by_one(smollm, strategy):
    turns = first_turns(PER_CATEGORY)
    if strategy != "packed":
        turns = turns[:: 3 if PER_CATEGORY == 1 else 2]  # padded to the longest, they take long
    llm = LLM(smollm, dtype="float32", max_num_seqs=8, speculative_config={"method": "ngram"}, strategy=strategy)
    conversations = [[{"role": "user", "content": turn}] for turn in turns]
    outputs = llm.chat(conversations, greedy(max_tokens=MAX_TOKENS), use_tqdm=False)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
    ties = []
    for serial, output in enumerate(outputs):
        tokens = output.outputs[0].token_ids
        reference = alone(smollm, tuple(output.prompt_token_ids))
        if tokens != reference:
            place = next(i for i, pair in enumerate(zip(tokens, reference, strict=False)) if pair[0] != pair[1])
            margin = top_two_margin(llm, output.prompt_token_ids + reference[:place])
            print(f"prompt {serial} differs at token {place}: the reference's top-2 margin there is {margin:.2e}")
            assert margin < TIE
            ties.append(serial)
    assert len(ties) <= 1


@cache
def load(folder: str) -> LLM:
    return LLM(folder, dtype="float32", prepack=False)


@cache
def alone(folder: str, prompt: tuple[int, ...]) -> list[int]:
    """transformers' own greedy search on one prompt."""
    llm = load(folder)
    return generate_alone(llm.model, list(prompt), MAX_TOKENS, llm.engine.intake.eos_token_ids)


@torch.inference_mode()
def top_two_margin(llm: LLM, token_ids: list[int]) -> float:
    first, second = llm.model(torch.tensor([token_ids])).logits[0, -1].topk(2).values.tolist()
    return first - second
