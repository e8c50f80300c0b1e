"""Log-probabilities against a plain forward pass over prompt and output, one request at a time."""

import math

import pytest
import torch
from greedy import greedy
from same import assert_same
from toy_folders import VOCABULARY
from toy_llm import DRAFTING, MODEL, STRATEGIES, TOKENIZER, generate, make_llm

from batchspec import LLM, SamplingParams
from batchspec.config import LOGPROBS_MODES
from batchspec.models import runner

PROMPTS = ["ab ab ab", "the cat", "x"]


@torch.inference_mode()
def plain_logits(token_ids):  # [tokens, vocabulary]: line i answers what follows token i
    return MODEL(torch.tensor([token_ids])).logits[0]


def check(entries, table, token_ids, num_top):
    """Entries against log-probabilities `[len(token_ids), vocabulary]` of the same positions."""
    for entry, line, token in zip(entries, table, token_ids, strict=True):
        top = line.topk(num_top)
        assert (top.values > line.median()).all()  # the toy's silent tokens, which are all alike, are not reached
        ranks = {token: int((line >= line[token]).sum())}
        for place, best in enumerate(top.indices.tolist()):
            ranks.setdefault(best, place + 1)
        assert [(one, told.rank) for one, told in entry.items()] == list(ranks.items())
        for one, told in entry.items():
            assert told.logprob == pytest.approx(line[one].item(), abs=1e-5)
            assert told.decoded_token == TOKENIZER.decode([one])


def check_completion(output, completion, num_top, process=lambda logits: logits):
    """Against the raw logits of the whole text, or what `process` makes of them."""
    start = len(output.prompt_token_ids)
    logits = plain_logits([*output.prompt_token_ids, *completion.token_ids])[start - 1 : -1]
    check(completion.logprobs, process(logits).log_softmax(dim=-1), completion.token_ids, num_top)
    total = sum(
        entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize("num_top", [0, 3])
def test_raw_logprobs_are_those_of_the_model_whatever_the_parameters(name, strategy, num_top):
    """Of greedy and sampled requests in one batch, which want one, several, or none at all."""
    shaped = SamplingParams(
        seed=3,
        n=2,
        temperature=0.7,
        top_k=40,
        max_tokens=17,
        presence_penalty=0.5,
        logit_bias={65: 2.0},
        bad_words=["e"],
        logprobs=num_top,
        ignore_eos=True,
    )
    params = [shaped, SamplingParams(seed=4, max_tokens=9), greedy(max_tokens=14, logprobs=num_top + 1)]
    shaped_output, without, cold = generate(make_llm(name, strategy=strategy), PROMPTS, params)
    for completion in shaped_output.outputs:
        check_completion(shaped_output, completion, num_top)
    check_completion(cold, cold.outputs[0], num_top + 1)
    assert (without.outputs[0].logprobs, without.outputs[0].cumulative_logprob) == (None, None)


def hide_all_but(logits, size):
    return logits.masked_fill(logits < logits.topk(size).values[:, -1:], -torch.inf)


def with_bias(logits):
    return logits.index_add(1, torch.tensor([65]), torch.full((len(logits), 1), 2.5).double())


PROCESSED = {
    "temperature and top_k": ({"temperature": 0.5, "top_k": 8}, lambda logits: hide_all_but(logits, 8) / 0.5),
    "temperature alone": ({"temperature": 1.6}, lambda logits: logits / 1.6),
    "bias": ({"temperature": 1.0, "logit_bias": {65: 2.5}}, with_bias),
    "greedy, bias": ({"temperature": 0.0, "logit_bias": {65: 2.5}}, with_bias),
}


@pytest.mark.parametrize("kind", PROCESSED)
@pytest.mark.parametrize("name", DRAFTING)
def test_processed_logprobs_are_those_of_the_distribution_that_was_drawn_from(name, kind):
    fields, process = PROCESSED[kind]
    params = SamplingParams(seed=6, max_tokens=15, logprobs=4, prompt_logprobs=1, ignore_eos=True, **fields)
    llm = make_llm(name, logprobs_mode="processed_logprobs")
    for output in generate(llm, PROMPTS, params):
        check_completion(output, output.outputs[0], 4, process)
        check_prompt(output, 1)  # raw as ever


@pytest.mark.parametrize("name", DRAFTING)
def test_the_mode_changes_log_probabilities_and_nothing_else(name):
    params = SamplingParams(seed=6, max_tokens=15, top_p=0.8, logprobs=0)
    raw, processed = (generate(make_llm(name, logprobs_mode=mode), PROMPTS, params) for mode in LOGPROBS_MODES)
    for one, other in zip(raw, processed, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].cumulative_logprob < other.outputs[0].cumulative_logprob


def test_each_greedy_token_is_the_most_probable_one_and_a_drawn_one_need_not_be():
    params = [
        greedy(max_tokens=20, logprobs=1),
        SamplingParams(temperature=1.5, seed=1, max_tokens=20, logprobs=1),
    ]
    cold, hot = (output.outputs[0] for output in generate(make_llm(), ["ab", "ab"], params))
    assert [len(entry) for entry in cold.logprobs] == [1] * len(cold.token_ids)
    assert {entry[token].rank for token, entry in zip(cold.token_ids, cold.logprobs, strict=True)} == {1}
    assert {len(entry) for entry in hot.logprobs} == {1, 2}


def test_all_of_the_vocabulary_can_be_had_and_is_a_distribution():
    output = generate(
        make_llm("itself"), "ab", SamplingParams(max_tokens=7, seed=1, logprobs=-1, prompt_logprobs=-1)
    )[0]
    for entry in (*output.outputs[0].logprobs, *output.prompt_logprobs[1:]):
        assert entry.keys() == set(range(VOCABULARY))
        assert sum(math.exp(told.logprob) for told in entry.values()) == pytest.approx(1.0)


ENDS = {
    "max_tokens": lambda text, ids, place: {"max_tokens": place},
    "stop string": lambda text, ids, place: {"stop": TOKENIZER.decode(ids[place - 2 : place])},
    "stop token": lambda text, ids, place: {"stop_token_ids": [ids[place]]},
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", DRAFTING)
def test_they_end_with_the_tokens_wherever_that_is_in_a_block(name, end):
    base = {"seed": 9, "max_tokens": 24, "ignore_eos": True, "logprobs": 2, "allowed_token_ids": range(64, 90)}
    whole = generate(make_llm(), "once", SamplingParams(**base))[0].outputs[0]
    for place in range(3, 12):
        params = SamplingParams(**base | ENDS[end](whole.text, whole.token_ids, place))
        output = generate(make_llm(name), "once", params)[0]
        completion = output.outputs[0]
        assert 1 <= len(completion.token_ids) < 24
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        assert completion.finish_reason == ("length" if end == "max_tokens" else "stop")
        check_completion(output, completion, 2)


@pytest.mark.parametrize("name", DRAFTING)
def test_every_snapshot_has_one_entry_for_each_token_with_its_text(name):
    params = SamplingParams(seed=2, n=2, max_tokens=12, logprobs=1, prompt_logprobs=1, temperature=1.3, stop="zq")
    num_unfinished = 0
    for output in make_llm(name).stream(["ab ab", "c"], params):
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for completion in output.outputs:
            assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
            assert all(one.decoded_token is not None for entry in completion.logprobs for one in entry.values())
            check_completion(output, completion, 1)
        num_unfinished += not output.finished
    assert num_unfinished > 1


def check_prompt(output, num_top):
    assert output.prompt_logprobs[0] is None
    table = plain_logits(output.prompt_token_ids).log_softmax(dim=-1)[:-1]
    check(output.prompt_logprobs[1:], table, output.prompt_token_ids[1:], num_top)


@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["none", "itself"])
def test_prompt_logprobs_are_those_of_the_model(monkeypatch, name, strategy, chunk):
    """In chunks that end inside, at the end of, and behind prompts; with requests that do not ask beside them."""
    monkeypatch.setattr(runner, "PREFILL_CHUNK", chunk)
    prompts = ["once upon a time", "abc", "abcd", "xy", "the the the"]
    params = [SamplingParams(seed=1, max_tokens=6, n=2, prompt_logprobs=2) for _ in prompts]
    params[2] = SamplingParams(seed=1, max_tokens=6)
    outputs = generate(make_llm(name, strategy=strategy), prompts, params)
    assert outputs.pop(2).prompt_logprobs is None
    for output in outputs:
        check_prompt(output, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_a_prompt_of_one_token_has_one_entry_which_is_none(name, strategy, max_num_seqs):
    """Beside, before and after longer ones."""
    params = SamplingParams(seed=1, max_tokens=5, prompt_logprobs=1, logprobs=1)
    outputs = generate(make_llm(name, strategy=strategy, max_num_seqs=max_num_seqs), ["a", "bcd efg", "h"], params)
    assert [output.prompt_logprobs for output in (outputs[0], outputs[2])] == [[None], [None]]
    check_prompt(outputs[1], 1)
    for output in outputs:
        check_completion(output, output.outputs[0], 1)


@pytest.mark.parametrize("name", DRAFTING)
def test_who_asks_for_log_probabilities_gets_the_same_tokens(name):
    without, asking = (
        {"seed": 8, "max_tokens": 15, "top_p": 0.9} | more for more in ({}, {"logprobs": 5, "prompt_logprobs": 5})
    )
    outputs = generate(make_llm(name), PROMPTS, SamplingParams(**asking))
    for output in outputs:
        output.prompt_logprobs = output.outputs[0].logprobs = output.outputs[0].cumulative_logprob = None
    assert_same(outputs, generate(make_llm(name), PROMPTS, SamplingParams(**without)))


def test_without_a_tokenizer_tokens_have_no_text():
    llm = LLM(MODEL, skip_tokenizer_init=True)
    output = generate(
        llm, [[5, 6, 7]], SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    )[0]
    entries = output.outputs[0].logprobs + output.prompt_logprobs[1:]
    assert len(entries) == 3 + 2
    assert all(one.decoded_token is None for entry in entries for one in entry.values())


@pytest.mark.parametrize("asked", ["logprobs", "prompt_logprobs"])
def test_which_of_equally_probable_tokens_are_told_does_not_depend_on_the_neighbours(asked):
    """Most of the toy's bytes have a logit of exactly 0, so that of 60 tokens some are chosen among equals. In
    bfloat16 equal logits are common among the first ten."""
    llm = make_llm()
    one, many = (SamplingParams(seed=1, max_tokens=2, ignore_eos=True, **{asked: count}) for count in (60, 200))
    alone = generate(llm, ["ab"], one)
    assert_same(generate(llm, ["ab", "cd"], [one, many])[:1], alone)
    assert_same(generate(llm, ["ab", "cd", "efg"], [one, one, many])[:1], alone)


def test_tokens_that_cannot_be_drawn_are_told_alike_with_and_without_speculation():
    """All of them have a log-probability of minus infinity, and so no order."""
    params = [
        SamplingParams(seed=1, max_tokens=12, top_k=3, logprobs=count, ignore_eos=True) for count in (6, 2, 100)
    ]
    wanted = [
        generate(make_llm(logprobs_mode="processed_logprobs"), *one)[0]
        for one in zip(PROMPTS, params, strict=True)
    ]
    for name in DRAFTING:
        outputs = generate(make_llm(name, logprobs_mode="processed_logprobs"), PROMPTS, params)
        for output, other in zip(outputs, wanted, strict=True):
            other.request_id = output.request_id
        assert_same(outputs, wanted)
