"""Token ids equal those of `transformers.generate` on each prompt alone, family by family (promise P2)."""

from __future__ import annotations

import os
import random
from functools import cache
from math import ceil

import pytest
import torch
from greedy import greedy
from toy_models import (
    FAMILIES,
    MAX_LENGTH,
    PADDED_FAMILIES,
    VOCAB_SIZE,
    make_model,
    make_model_of,
)
from transformers import PreTrainedModel

from batchspec import LLM, RequestOutput
from batchspec.models.noise import noisy_copy

DRAFT_LENGTH = 4
LENGTHS = (1, 2, 4, 6, 9, 13, 19, 25)
"""Of the prompts. Some lie below the window, some above it, and some cross it while they are continued."""
BUDGETS = (12, 9, 13, 5, 12, 6, 10, 13)
"""Output tokens of each prompt. They differ, so that rows end in other rounds and others move to their places."""

DRAFTERS = ("none", "ngram", "noisy copy", "target itself", "unrelated")
IS_FULL = bool(os.environ.get("BATCHSPEC_FULL"))
BATCH_SIZES = (1, 3, 8) if IS_FULL else (1, 3)
ALL_FAMILIES = (*FAMILIES, *PADDED_FAMILIES)
CASES = [(family, "packed") for family in FAMILIES]
CASES += [(family, strategy) for strategy in ("eqspec", "exspec") for family in ALL_FAMILIES]
PADDED_DRAFTERS = DRAFTERS if IS_FULL else ("none", "noisy copy", "target itself")
"""`make exact` runs the padded strategies with all drafters, and batches of 8; `make test` has not the time."""
COMBINATIONS = [
    (family, strategy, drafter)
    for family, strategy in CASES
    for drafter in (DRAFTERS if strategy == "packed" else PADDED_DRAFTERS)
]


def batch_sizes(strategy: str) -> tuple[int, ...]:
    """The padded strategies run alone in `make exact` only: then nothing is padded."""
    return BATCH_SIZES if strategy == "packed" or IS_FULL else BATCH_SIZES[1:]


WINDOWED = [name for name, family in FAMILIES.items() if "sliding_window" in family.overrides]


def _make_prompts() -> list[list[int]]:
    """Random token ids; the longer prompts say things twice, so that prompt lookup finds something."""
    source = random.Random(0)
    prompts = []
    for length in LENGTHS:
        prompt = [source.randrange(VOCAB_SIZE) for _ in range(length)]
        if length >= 9:
            prompt[length // 2 :] = prompt[: length - length // 2]
        prompts.append(prompt)
    return prompts


PROMPTS = _make_prompts()


@cache
def target(family: str) -> PreTrainedModel:
    return make_model(family)


@cache
def unrelated_model() -> PreTrainedModel:
    return make_model_of("llama", {"num_hidden_layers": 1}, seed=9)


def continue_alone(model: PreTrainedModel, number: int) -> list[int]:
    """What transformers gives for a prompt by itself."""
    prompt = torch.tensor([PROMPTS[number]])
    tokens = model.generate(prompt, do_sample=False, max_new_tokens=BUDGETS[number])
    return tokens[0, prompt.shape[1] :].tolist()


@cache
def reference(family: str) -> list[list[int]]:
    return [continue_alone(target(family), number) for number in range(len(PROMPTS))]


def prompt_numbers(batch_size: int) -> list[int]:
    """All prompts, so that rows are freed and taken again; alone, for the sake of time, a short and a long one."""
    return [2, 6] if batch_size == 1 else list(range(len(PROMPTS)))


def make_llm(model: PreTrainedModel, drafter: str, batch_size: int, strategy: str = "packed") -> LLM:
    if drafter == "none":
        speculation = None
    elif drafter == "ngram":
        speculation = {"method": "ngram", "num_speculative_tokens": DRAFT_LENGTH}
    else:
        draft = {
            "noisy copy": lambda: noisy_copy(model),
            "target itself": lambda: model,
            "unrelated": unrelated_model,
        }
        speculation = {
            "method": "draft_model",
            "model": draft[drafter](),
            "num_speculative_tokens": DRAFT_LENGTH,
        }
    return LLM(
        model,
        skip_tokenizer_init=True,
        max_num_seqs=batch_size,
        max_model_len=MAX_LENGTH,
        speculative_config=speculation,
        strategy=strategy,
    )


@cache
def run(family: str, strategy: str, drafter: str, batch_size: int) -> list[RequestOutput]:
    return generate(make_llm(target(family), drafter, batch_size, strategy), prompt_numbers(batch_size))


def generate(llm: LLM, numbers: list[int]) -> list[RequestOutput]:
    budgets = [greedy(max_tokens=BUDGETS[number]) for number in numbers]
    return llm.generate([PROMPTS[number] for number in numbers], budgets, use_tqdm=False)


@pytest.mark.parametrize(
    ("family", "strategy", "drafter", "batch_size"),
    [(*combination, size) for combination in COMBINATIONS for size in batch_sizes(combination[1])],
)
def test_tokens_equal_those_of_transformers(family: str, strategy: str, drafter: str, batch_size: int):
    outputs = run(family, strategy, drafter, batch_size)
    expected = [reference(family)[number] for number in prompt_numbers(batch_size)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(expected)


@pytest.mark.parametrize(
    ("family", "strategy", "batch_size"), [(*case, size) for case in CASES for size in batch_sizes(case[1])]
)
def test_target_as_its_own_draft_model_gains_one_token_more_than_it_drafts(
    family: str, strategy: str, batch_size: int
):
    for output in run(family, strategy, "target itself", batch_size):
        budget = len(output.outputs[0].token_ids)
        accepted = [place % (DRAFT_LENGTH + 1) != DRAFT_LENGTH for place in range(budget)]
        accepted[-1] = False  # the last round is cut to what the budget leaves
        assert output.metrics.accepted == accepted
        assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens
        assert output.metrics.num_rounds == ceil(budget / (DRAFT_LENGTH + 1))


@pytest.mark.parametrize("batch_size", BATCH_SIZES[1:])
@pytest.mark.parametrize(("family", "strategy"), [case for case in CASES if case[1] != "eqspec"])
def test_all_strategies_do_the_same_rounds_for_each_request(family: str, strategy: str, batch_size: int):
    """Who shares a batch with whom changes nothing for a request: neither its tokens nor which were accepted."""
    mine = [output.metrics.accepted for output in run(family, strategy, "noisy copy", batch_size)]
    assert mine == [output.metrics.accepted for output in run(family, "eqspec", "noisy copy", batch_size)]


@pytest.mark.parametrize("family", FAMILIES)
def test_noisy_copy_is_accepted_in_part(family: str):
    metrics = [output.metrics for output in run(family, "packed", "noisy copy", 8)]
    accepted = sum(metric.num_accepted_tokens for metric in metrics)
    assert 0 < accepted < sum(metric.num_draft_tokens for metric in metrics)


@pytest.mark.parametrize("family", FAMILIES)
def test_unrelated_draft_model_is_hardly_ever_accepted(family: str):
    metrics = [output.metrics for output in run(family, "packed", "unrelated", 8)]
    accepted = sum(metric.num_accepted_tokens for metric in metrics)
    assert accepted <= 0.1 * sum(metric.num_draft_tokens for metric in metrics)


def test_prompt_lookup_is_accepted_in_part():
    metrics = [output.metrics for family in FAMILIES for output in run(family, "packed", "ngram", 8)]
    accepted = sum(metric.num_accepted_tokens for metric in metrics)
    assert 0 < accepted < sum(metric.num_draft_tokens for metric in metrics)


@pytest.mark.parametrize(("family", "strategy"), CASES)
def test_model_is_left_as_it_was(family: str, strategy: str):
    expected, model, fresh = reference(family)[6], target(family), make_model(family)
    run(family, strategy, "target itself", 8)
    assert model.config._attn_implementation == fresh.config._attn_implementation
    for mine, other in ((model.parameters(), fresh.parameters()), (model.buffers(), fresh.buffers())):
        assert all(torch.equal(*pair) for pair in zip(mine, other, strict=True))
    assert continue_alone(model, 6) == expected


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("drafter", ["none", "noisy copy", "target itself"])
@pytest.mark.parametrize("strategy", ["packed", "eqspec", "exspec"])
def test_end_token_ends_the_output_where_transformers_ends_it(family: str, strategy: str, drafter: str):
    model = make_model(family)
    model.generation_config.eos_token_id = [reference(family)[number][2] for number in (3, 5, 7)]
    model.generation_config.pad_token_id = 0
    numbers = list(range(len(PROMPTS)))
    expected = [continue_alone(model, number) for number in numbers]
    assert any(len(expected[number]) < BUDGETS[number] for number in numbers)
    outputs = generate(make_llm(model, drafter, 3, strategy), numbers)
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_references_are_varied_enough_to_tell_a_fault(family: str):
    tokens = [token for output in reference(family) for token in output]
    assert len(set(tokens)) > len(tokens) / 6
    assert len({tuple(output) for output in reference(family)}) == len(PROMPTS)


@pytest.mark.parametrize("family", WINDOWED)
def test_references_depend_on_the_window(family: str):
    entry = FAMILIES[family]
    for window in (entry.overrides["sliding_window"] - 1, MAX_LENGTH):
        other = make_model_of(entry.model_type, {**entry.overrides, "sliding_window": window}, entry.dtype)
        assert continue_alone(other, 7) != reference(family)[7]
