"""Whatever a budget decides, from round to round and token to token, outputs stay the same, field by field."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same import assert_same
from toy_folders import text_llama
from toy_llm import DRAFTING, TOKENIZER, generate, make_llm, new_llm

from batchspec import LLM, SamplingParams
from batchspec.drafting.budget import AdaptiveBudget, FixedBudget, open_rows

MODELS = {
    "early exit": {"method": "early_exit", "num_layers": 1, "num_speculative_tokens": 3},
    "look-ups, then early exit": {
        "method": "early_exit",
        "num_layers": 1,
        "lookup": "suffix",
        "suffix_min_match": 1,
    },
    "look-ups, then itself": DRAFTING["itself"] | {"lookup": "ngram", "prompt_lookup_min": 1},
}
DRAFTERS = [*(name for name in DRAFTING if name != "none"), *MODELS]
texts = ["The sea", "A list: a b c a b c a b", "Once", "one two one two one", "Z", "What is a tree?"]


class WhimsicalBudget(FixedBudget):
    """Drafts and verifies at random."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.num_learned = 0

    def next_column(self, rows, marks, limits, beside=None, unread=None):
        return [place for place in open_rows(marks, limits) if self.random.random() < 0.7]

    def cut(self, rows, marks):
        return [self.random.randint(0, len(row)) for row in marks]

    def learn(self, rows, marks, num_accepted):
        for own, accepted in zip(marks, num_accepted, strict=True):
            assert 0 <= accepted <= len(own)
            self.num_learned += accepted


def llm_of(drafter, **settings):
    if drafter in DRAFTING:
        return new_llm(drafter, **settings)
    config = MODELS[drafter]
    return LLM(make_llm().model, tokenizer=TOKENIZER, speculative_config=config, max_num_seqs=4, **settings)


@pytest.mark.parametrize("drafter", DRAFTERS)
@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.sampled_from(texts), st.sampled_from([0.0, 1.0])), min_size=1, max_size=7),
    st.integers(0, 1000),
)
def test_no_output_depends_on_a_budget_s_whims(drafter, requests, seed):
    params = [
        SamplingParams(
            temperature=temperature, seed=place, max_tokens=5 + 4 * place, logprobs=1, n=2 if temperature else 1
        )
        for place, (_, temperature) in enumerate(requests)
    ]
    llm = llm_of(drafter)
    llm.engine.drafter.budget = WhimsicalBudget(seed)
    prompts = [text for text, _ in requests]
    assert_same(generate(llm, prompts, params), generate(make_llm(), prompts, params))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_adaptive_drafting_drafts_and_changes_nothing(drafter):
    llm = llm_of(drafter)
    budget = llm.engine.drafter.budget
    assert isinstance(budget, FixedBudget)
    config = (DRAFTING | MODELS)[drafter]
    adaptive = LLM(llm.model, tokenizer=TOKENIZER, speculative_config=config | {"adaptive": True}, max_num_seqs=4)
    assert isinstance(adaptive.engine.drafter.budget, AdaptiveBudget)
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    assert_same(generate(adaptive, texts, params), generate(make_llm(), texts, params))
    assert adaptive.engine.stats.num_draft_tokens > 0


def test_padded_strategies_and_rejection_draft_up_to_their_limits(monkeypatch):
    monkeypatch.setattr("batchspec.config.ADAPTIVE_BY_DEFAULT", True)
    for settings_ in ({"strategy": "eqspec"}, {"sampling_method": "rejection"}):
        assert type(new_llm("ngram", **settings_).engine.drafter.budget) is FixedBudget
    assert type(new_llm("ngram").engine.drafter.budget) is AdaptiveBudget


def test_bits_are_the_same_with_every_draft_length():
    """In bfloat16, where a step of another shape would show."""
    model = text_llama(seed=1).to(torch.bfloat16)
    alone = LLM(model, tokenizer=TOKENIZER, max_num_seqs=1)
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 6}
    drafting = LLM(model, tokenizer=TOKENIZER, max_num_seqs=3, speculative_config=config)
    drafting.engine.drafter.budget = WhimsicalBudget(3)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    got, wanted = generate(drafting, texts, params), generate(alone, texts, params)
    assert [one.outputs[0].token_ids for one in got] == [one.outputs[0].token_ids for one in wanted]
    assert drafting.engine.drafter.budget.num_learned > 0
