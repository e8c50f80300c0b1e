"""Promise P1 for sampling: the same request gives the same output, field by field, whoever drafts and whoever is
in the batch; and what the classical rule (`rejection`) keeps of it."""

import random
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from greedy import greedy
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from same import assert_same, run
from toy_folders import VOCABULARY
from toy_llm import DRAFTERS, DRAFTING, PADDED, STRATEGIES, TOKENIZER, generate, make_llm, new_llm

from batchspec import SamplingParams


def lift_vowels(token_ids, logits):
    """In place, and not the same at every position."""
    logits[TOKENIZER("aeiou").input_ids] += 1.0 + len(token_ids) % 3
    return logits


def never_twice(token_ids, logits):
    """A tensor of its own."""
    return logits.index_fill(0, torch.tensor(token_ids[-1:], dtype=torch.long), -torch.inf)


READABLE = tuple(TOKENIZER("abcdefghijklmnopqrstuvwxyz .").input_ids)
letters = st.text("abe.", min_size=1, max_size=2)
tokens = st.integers(0, VOCABULARY - 1)


def usually(default, *others):
    """The default half of the time, so that not all fields are in use at once."""
    return st.one_of(st.just(default), *others)


fields = st.fixed_dictionaries(
    {
        "n": usually(1, st.integers(1, 3)),
        "temperature": usually(1.0, st.sampled_from([0.0, 0.4, 1.5])),
        "top_p": usually(1.0, st.sampled_from([0.3, 0.9])),
        "top_k": usually(0, st.sampled_from([-1, 1, 5, 300])),
        "min_p": usually(0.0, st.sampled_from([0.02, 0.3, 1.0])),
        "seed": st.one_of(st.none(), st.integers(0, 3)),
        "presence_penalty": usually(0.0, st.floats(-2, 2)),
        "frequency_penalty": usually(0.0, st.floats(-2, 2)),
        "repetition_penalty": usually(1.0, st.sampled_from([0.8, 1.3])),
        "logit_bias": usually(
            None, st.dictionaries(st.sampled_from(READABLE), st.sampled_from([-100.0, -1.5, 6]), min_size=1)
        ),
        "bad_words": usually(
            None, st.lists(st.one_of(letters, st.lists(tokens, min_size=1, max_size=2)), max_size=3)
        ),
        "allowed_token_ids": usually(None, st.just((*READABLE, 256))),
        "min_tokens": usually(0, st.integers(0, 6)),
        "max_tokens": st.integers(6, 14),
        "stop": usually(None, st.lists(letters, max_size=2)),
        "stop_token_ids": usually(None, st.lists(st.sampled_from(READABLE), max_size=2)),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "logprobs": usually(None, st.sampled_from([-1, 0, 2])),
        "prompt_logprobs": usually(None, st.sampled_from([-1, 0, 2])),
        "logits_processors": usually(None, st.lists(st.sampled_from([lift_vowels, never_twice]), max_size=2)),
    }
)


def as_params(values):
    return SamplingParams(**values | {"n": 1 if values["temperature"] == 0 else values["n"]})


request_lists = st.lists(
    st.tuples(st.text("ab <\n", min_size=1, max_size=12), fields.map(as_params)), min_size=2, max_size=6
)


no_shrinking = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
"""A failing case is told as it was found: making it smaller would run models for minutes."""
sizes, chances = st.sampled_from([1, 2, 3, 5, 16]), st.randoms(use_true_random=False)


@pytest.mark.parametrize("name", [*DRAFTING, *PADDED])
@settings(no_shrinking, max_examples=6)
@given(request_lists, st.sampled_from(STRATEGIES), sizes, chances)
def test_neither_drafter_nor_strategy_nor_batch_nor_order_changes_a_field(name, requests, strategy, size, chance):
    order = chance.sample(range(len(requests)), len(requests))
    wanted = run(make_llm(max_num_seqs=1), requests)
    assert_same(run(make_llm(name, max_num_seqs=size, strategy=strategy), requests, order), wanted)


ONE_FIELD = [
    {},
    {"temperature": 0.0},
    {"temperature": 2.5},
    {"top_p": 0.3},
    {"top_k": 2},
    {"min_p": 0.5},
    {"seed": 2},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -1.5},
    {"repetition_penalty": 5.0},
    {"logit_bias": dict.fromkeys(READABLE[::3], 9.0)},
    {"bad_words": ["x", "h", "Z"]},
    {"allowed_token_ids": READABLE[:9]},
    {"min_tokens": 9, "stop_token_ids": READABLE, "logit_bias": dict.fromkeys(READABLE[1::3], 9.0)},
    {"stop_token_ids": READABLE},
    {"logits_processors": [lift_vowels]},
    {"logits_processors": [never_twice, lift_vowels]},
    {"ignore_eos": False, "logit_bias": {256: 9.0}},
    {"max_tokens": 5},
]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, "packed") for name in (*DRAFTING, *PADDED)), ("itself", "eqspec"), ("itself", "exspec")],
)
def test_a_field_has_its_effect_in_its_own_row_only(name, strategy):
    """One prompt and one seed for all, so that a row that is read for another gives another text."""
    base = {"seed": 4, "temperature": 0.8, "max_tokens": 16, "ignore_eos": True}
    requests = [("the hat", SamplingParams(**base | field)) for field in ONE_FIELD]
    wanted = run(make_llm(max_num_seqs=1), requests)
    assert_same(run(make_llm(name, max_num_seqs=16, strategy=strategy), requests), wanted)
    assert len({tuple(output.outputs[0].token_ids) for output in wanted}) == len(ONE_FIELD)


@pytest.mark.parametrize(("name", "strategy"), list(zip(DRAFTERS, cycle(STRATEGIES), strict=False)))
@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_a_seeded_request_gives_alone_what_it_gives_among_others(method, name, strategy):
    """With `rejection` too: its tokens depend on the drafter, which sees its own row only."""
    llm = make_llm(name, method, strategy=strategy)
    seeded = (
        "the cat and the",
        SamplingParams(seed=7, n=2, top_p=0.95, presence_penalty=0.3, max_tokens=20, logprobs=1),
    )
    others = [
        (text, SamplingParams(temperature=1.3, max_tokens=8 + len(text))) for text in ("a", "bb b", "the " * 9)
    ]
    alone = generate(llm, *seeded)[0]
    prompts, params = zip(*others, seeded, *others, strict=True)
    amongst = generate(llm, list(prompts), list(params))[len(others)]
    assert_same([alone], [replace(amongst, request_id="0")])


def test_requests_without_a_seed_never_share_their_noise():
    """Twenty equal prompts in two calls, with more than one candidate: twenty-four different texts."""
    llm = new_llm(seed=3)
    hot = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    outputs = [output for _ in range(2) for output in generate(llm, ["ab"] * 8, hot)]
    outputs += generate(llm, ["ab"] * 4, SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, n=2))
    texts = [tuple(completion.token_ids) for output in outputs for completion in output.outputs]
    assert len(set(texts)) == len(texts) == 24
    first = [text[0] for text in texts]
    assert len(set(first)) > 8  # not only by what came before


def test_the_seed_of_an_llm_reproduces_its_whole_run_and_another_one_does_not():
    def whole_run(seed, name="none"):
        llm = new_llm(name, seed=seed)
        calls = [generate(llm, prompts, SamplingParams(max_tokens=10, n=2)) for prompts in (["ab", "c"], ["ab"])]
        return [output for outputs in calls for output in outputs]

    reference = whole_run(11)
    assert_same(whole_run(11), reference)
    assert_same(whole_run(11, "ngram"), reference)
    for output, other in zip(reference, whole_run(12), strict=True):
        assert all(one.token_ids != two.token_ids for one, two in zip(output.outputs, other.outputs, strict=True))


def test_seeds_name_streams_and_the_same_seed_gives_the_same_text():
    params = [
        SamplingParams(seed=seed, temperature=1.5, max_tokens=12, ignore_eos=True) for seed in (1, 2, 1, -2, 2**63)
    ]
    ids = [output.outputs[0].token_ids for output in generate(make_llm(), ["ab"] * 5, params)]
    assert ids[0] == ids[2]
    assert len({tuple(one) for one in ids}) == 4


@pytest.mark.parametrize("name", DRAFTING)
def test_greedy_rows_among_sampled_ones_are_greedy_alone(name):
    prompts = ["once upon a", "ab", "the the the", "x"]
    cold = [(prompt, greedy(max_tokens=16, frequency_penalty=0.4, logprobs=1)) for prompt in prompts]
    hot = [(prompt, SamplingParams(top_k=9, temperature=1.4, max_tokens=11)) for prompt in prompts]
    mixed = [request for pair in zip(cold, hot, strict=True) for request in pair]
    got = run(make_llm(name), mixed)[::2]
    wanted = [generate(make_llm(), *request)[0] for request in cold]
    assert_same(got, [replace(one, request_id=str(2 * place)) for place, one in enumerate(wanted)])


SHAPED = {
    "nothing": {},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": -0.5, "repetition_penalty": 1.3},
    "filters": {"top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "words": {"bad_words": ["a", "th", [3, 4], "e "], "logit_bias": {5: 3.0, 70: -4.0}},
    "functions": {"logits_processors": [lift_vowels, never_twice]},
    "allowed": {"allowed_token_ids": READABLE, "temperature": 1.7},
}
SHAPED["all"] = {name: value for values in SHAPED.values() for name, value in values.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", SHAPED)
def test_what_the_target_drafts_for_itself_is_accepted_in_full(shape, strategy):
    """So drafting applies parameters as the target does, and each place in a block sees the tokens before it."""
    params = SamplingParams(
        **{"seed": 5, "max_tokens": 23, "ignore_eos": True, "n": 2, "logprobs": 2} | SHAPED[shape]
    )
    prompts = ["ab ab", "the cat sat on the mat and the", "once upon a time there was"]
    outputs = generate(make_llm("itself", strategy=strategy), prompts, params)
    assert [output.metrics.acceptance_rate for output in outputs] == [1.0] * 3
    assert all(output.metrics.num_draft_tokens >= 2 * 16 for output in outputs)
    assert_same(outputs, generate(make_llm(), prompts, params))


@pytest.mark.parametrize("min_tokens", range(1, 10))
def test_an_end_token_comes_as_soon_as_it_may_wherever_that_is_in_a_block(min_tokens):
    params = SamplingParams(seed=2, min_tokens=min_tokens, max_tokens=20, logit_bias={256: 100.0})
    output, wanted = (generate(make_llm(name), "ab", params)[0] for name in ("itself", "none"))
    assert_same([output], [wanted])
    assert output.outputs[0].token_ids.index(256) == min_tokens
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (min_tokens + 1, "stop")
    assert output.metrics.accepted.count(False) == (min_tokens + 1) // 4  # in blocks of four


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_word_that_is_bad_is_never_said_not_even_across_blocks(name):
    prompts, allowed = ["abababababab", "ba"], TOKENIZER("ab").input_ids
    free = SamplingParams(seed=1, temperature=5.0, max_tokens=30, allowed_token_ids=allowed)
    bound = replace(free, bad_words=["bab"])
    assert any("bab" in output.outputs[0].text for output in generate(make_llm(name), prompts, free))
    outputs = generate(make_llm(name), prompts, bound)
    assert not any("bab" in output.outputs[0].text for output in outputs)
    assert_same(outputs, generate(make_llm(), prompts, bound))


@pytest.mark.parametrize("name", [*DRAFTERS, *PADDED])
def test_rejection_at_temperature_zero_is_greedy_decoding(name):
    prompts, params = ["ab ab ab", "once", "x y x y"], greedy(max_tokens=24, logprobs=1, presence_penalty=0.2)
    assert_same(generate(make_llm(name, "rejection"), prompts, params), generate(make_llm(), prompts, params))


@pytest.mark.parametrize("shape", SHAPED)
def test_rejection_accepts_what_the_target_drafts_for_itself(shape):
    params = SamplingParams(**{"seed": 5, "max_tokens": 40, "ignore_eos": True} | SHAPED[shape])
    for output in generate(make_llm("itself", "rejection"), ["ab ab", "x", "once upon a time"], params):
        assert output.metrics.num_draft_tokens >= 30
        assert output.metrics.acceptance_rate == 1.0


@pytest.mark.parametrize("name", [*DRAFTERS, *PADDED])
@settings(no_shrinking, max_examples=4)
@given(request_lists, st.sampled_from(STRATEGIES), sizes, chances)
def test_rejection_keeps_to_all_parameters_and_to_its_seed(name, requests, strategy, size, chance):
    order = chance.sample(range(len(requests)), len(requests))
    outputs = run(make_llm(name, "rejection", size, strategy=strategy), requests, order)
    assert_same(run(make_llm(name, "rejection"), requests), outputs)
    for output, (_, params) in zip(outputs, requests, strict=True):
        assert output.finished
        assert len(output.outputs) == params.n
        for completion in output.outputs:
            check_parameters_are_kept(completion, params)


def check_parameters_are_kept(completion, params):
    ids, ends = completion.token_ids, {*params.stop_ids} | (set() if params.ignore_eos else {256})
    assert 1 <= len(ids) <= params.max_tokens
    assert completion.finish_reason in ("stop", "length")
    assert not ends & set(ids[: params.min_tokens]) or params.allowed_ids  # nothing but end tokens may be allowed
    assert not ends & set(ids[:-1])
    assert set(ids) <= set(params.allowed_ids or ids)
    assert not any(word[0] in ids for word in params.bad_words if not isinstance(word, str) and len(word) == 1)
    if params.logprobs is not None:
        assert len(completion.logprobs) == len(ids)


@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_no_generator_is_read_or_advanced(method):
    llm, params = make_llm("unrelated", method), SamplingParams(seed=1, max_tokens=20, n=2)

    def run_after(seed):
        torch.manual_seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), random.getstate()
        outputs = generate(llm, ["ab", "cd"], params)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        return outputs

    with torch.random.fork_rng():
        assert_same(run_after(1), run_after(2))


def test_a_function_that_raises_a_token_unknown_to_the_draft_model_changes_nothing_but_its_drafts():
    def boost(token_ids, logits):
        logits[257] = 100.0
        return logits

    params = SamplingParams(seed=1, max_tokens=4, logits_processors=[boost])
    for name in DRAFTING:
        assert generate(make_llm(name), "ab", params)[0].outputs[0].token_ids == [257] * 4


@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_a_token_may_be_forced_with_infinity_but_nan_is_refused(method):
    def force(token_ids, logits):
        logits[65] = float("inf")
        return logits

    llm = new_llm("ngram", method)
    params = SamplingParams(seed=1, max_tokens=6, logits_processors=[force])
    assert generate(llm, "abab ab", params)[0].outputs[0].token_ids == [65] * 6
    with pytest.raises(ValueError, match="logits_processors must not return NaN"):
        generate(llm, "ab", SamplingParams(logits_processors=[lambda token_ids, logits: logits * float("nan")]))
