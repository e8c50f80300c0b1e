"""Many answers to one prompt (`n`): computed together, told together, each what it is alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same import assert_same, run
from scripted import VOCAB, ScriptedDrafter, ScriptedRunner, hashed_script, make_engine, run_to_end
from toy_llm import DRAFTING, STRATEGIES, generate, make_llm, new_llm

from batchspec import SamplingParams
from batchspec.config import PoolConfig
from batchspec.drafting.draft_model import DraftModelDrafter
from batchspec.drafting.ngram import NgramDrafter
from batchspec.drafting.suffix import SuffixDrafter
from batchspec.drafting.suffix_store import SuffixStore
from batchspec.sampling.method import draw_coupled

ROWS = 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 3
drafters = {
    "none": lambda: None,
    "ngram": lambda: NgramDrafter(ROWS, 3, 1, torch.device("cpu")),
    "suffix": lambda: SuffixDrafter(1, torch.device("cpu"), SuffixStore(max_tokens=80)),
    "scripted": lambda: ScriptedDrafter(hashed_script, lambda position: position % 3 != 0),
    "draft_model": lambda: DraftModelDrafter(ScriptedRunner(hashed_script, ROWS, 40), VOCAB, VOCAB, draw_coupled),
}


def sampled(n, **changes):
    """A logit of 1 for what the script says and 0 for the others is drawn from at a low temperature."""
    return SamplingParams(
        **{"n": n, "temperature": 0.4, "seed": 1, "max_tokens": 12, "ignore_eos": True} | changes
    )


def token_ids(output):
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize("n", [2, ROWS, 11])
@pytest.mark.parametrize("name", drafters)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_prompt_is_computed_once_for_all_candidates(strategy, name, n):
    pool = PoolConfig(window=ROWS) if strategy == "exspec" else None
    engine = make_engine(hashed_script, drafters[name](), max_num_seqs=ROWS, strategy=strategy, pool=pool)
    engine.add_request("a", PROMPT, sampled(n))
    output = run_to_end(engine)["a"]
    assert len(output.outputs) == n
    assert engine.runner.num_prefilled == engine.stats.num_prefilled_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("n", [2, ROWS])
def test_the_draft_model_computes_the_prompt_once_for_candidates_that_run_together(n):
    engine = make_engine(hashed_script, drafters["draft_model"](), max_num_seqs=ROWS)
    engine.add_request("a", PROMPT, sampled(n))
    output = run_to_end(engine)["a"]
    assert engine.drafter.runner.num_prefilled == len(PROMPT) - 1
    assert output.metrics.num_accepted_tokens > 0


def test_a_prompt_of_one_token_has_nothing_to_share():
    engine = make_engine(hashed_script, drafters["draft_model"](), max_num_seqs=2)
    engine.add_request("a", [5], sampled(5))
    assert len(run_to_end(engine)["a"].outputs) == 5
    assert engine.runner.num_prefilled == 0


@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_target_sees_each_prompt_token_once_and_gives_each_candidate_what_it_gives_alone(name, strategy):
    """On real keys and values: a candidate of n = 7 in two rows is the one of n = 2, which had its own row."""
    llm = new_llm(name, max_num_seqs=2, strategy=strategy)
    fields = {"seed": 4, "temperature": 1.5, "max_tokens": 14, "logprobs": 1, "prompt_logprobs": 1}
    many, two, one = (generate(llm, "the cat and the cat", SamplingParams(n=n, **fields))[0] for n in (7, 2, 1))
    assert llm.engine.stats.num_prefilled_tokens == 3 * 18
    assert [completion.index for completion in many.outputs] == list(range(7))
    assert len({tuple(ids) for ids in token_ids(many)}) == 7
    assert_same([one], [generate(make_llm(), "the cat and the cat", SamplingParams(**fields))[0]])
    for fewer in (two, one):
        many.outputs = many.outputs[: len(fewer.outputs)]
        assert_same([many], [fewer])


def test_candidates_differ_from_the_first_token_on_and_between_requests_without_a_seed():
    params = SamplingParams(n=8, temperature=1.5, max_tokens=3, ignore_eos=True)
    first, second = (generate(new_llm(seed=seed), "ab", params)[0] for seed in (1, 2))
    assert len({ids[0] for ids in token_ids(first)}) > 4
    assert not {tuple(ids) for ids in token_ids(first)} & {tuple(ids) for ids in token_ids(second)}


@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize(
    ("strategy", "refill"), [("packed", True), ("packed", False), ("eqspec", True), ("exspec", True)]
)
def test_requests_with_many_candidates_between_others_change_none_of_them(name, strategy, refill):
    requests = [
        (
            prompt,
            SamplingParams(n=n, temperature=1.2, max_tokens=4 + 2 * n, stop="e", include_stop_str_in_output=True),
        )
        for prompt, n in (("ab", 1), ("the the", 3), ("the the", 5), ("x", 2), ("once upon", 1), ("ab", 4))
    ]
    wanted = run(make_llm(max_num_seqs=1), requests)
    llm = make_llm(name, max_num_seqs=3, strategy=strategy, refill=refill)
    assert_same(run(llm, requests, [3, 0, 5, 2, 4, 1]), wanted)


@pytest.mark.parametrize("name", DRAFTING)
def test_each_snapshot_tells_of_all_candidates_and_is_finished_when_all_are(name):
    params = SamplingParams(n=5, seed=1, temperature=1.3, max_tokens=25)
    before, ended_early = [[]] * 5, 0
    for output in make_llm(name, max_num_seqs=2).stream("ab ab", params):
        assert [completion.index for completion in output.outputs] == list(range(5))
        assert output.finished == all(completion.finish_reason for completion in output.outputs)
        assert all(new[: len(old)] == old for new, old in zip(token_ids(output), before, strict=True))
        assert len(output.metrics.accepted) == output.metrics.num_output_tokens == sum(map(len, token_ids(output)))
        ended_early += not output.finished and any(completion.finish_reason for completion in output.outputs)
        before = token_ids(output)
    assert output.finished
    assert ended_early > 3
    assert_same([output], generate(make_llm(max_num_seqs=1), "ab ab", params))


def test_metrics_are_the_sum_over_candidates():
    engine = make_engine(hashed_script, drafters["scripted"](), max_num_seqs=2)
    engine.add_request("a", PROMPT, sampled(5))
    metrics = run_to_end(engine)["a"].metrics
    assert metrics.num_output_tokens == len(metrics.accepted) == 5 * 12
    assert metrics.num_accepted_tokens == sum(metrics.accepted) > 0
    stats = engine.stats
    assert (stats.num_rounds, stats.num_draft_tokens) == (metrics.num_rounds, metrics.num_draft_tokens)
    assert stats.num_output_tokens == metrics.num_output_tokens


@pytest.mark.parametrize("refill", [True, False])
def test_abort_ends_all_candidates_those_that_wait_too(refill):
    engine = make_engine(hashed_script, max_num_seqs=2, refill=refill)
    engine.add_request("a", PROMPT, sampled(5))
    engine.add_request("b", PROMPT, sampled(1, max_tokens=3))
    engine.step()
    output = engine.abort_request("a")
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 5
    assert [len(ids) for ids in token_ids(output)] == [1, 1, 0, 0, 0]
    assert output.finished
    assert not engine.scheduler.running
    assert run_to_end(engine).keys() == {"b"}
    assert engine.abort_request("a") is None


def test_abort_keeps_what_candidates_have_ended_with():
    engine = make_engine(hashed_script, max_num_seqs=2)
    engine.add_request("a", PROMPT, sampled(3, max_tokens=4))
    for _ in range(5):
        engine.step()
    output = engine.abort_request("a")
    assert [completion.finish_reason for completion in output.outputs] == ["length", "length", "abort"]
    assert [len(ids) for ids in token_ids(output)] == [4, 4, 1]
    assert not engine.has_unfinished_requests()


def test_abort_from_within_a_round_ends_all_candidates():
    engine = make_engine(hashed_script, drafters["scripted"](), max_num_seqs=ROWS)
    engine.add_request("a", [7], sampled(1), watch=lambda token: engine.abort_request("b") and None)
    engine.add_request("b", PROMPT, sampled(8))
    assert {output.request_id for output in engine.step()} == {"a"}
    assert run_to_end(engine).keys() == {"a"}


def test_a_stream_goes_on_after_a_request_of_many_candidates_was_aborted():
    llm, finished = new_llm("ngram", max_num_seqs=2), {}
    params = [SamplingParams(n=3, seed=1, max_tokens=9, ignore_eos=True), SamplingParams(seed=2, max_tokens=4)]
    for output in llm.stream(["ab ab", "cd"], params):
        if output.request_id == "0" and not output.finished:
            llm.engine.abort_request("0")
        if output.finished:
            finished[output.request_id] = output
    assert [one.finish_reason for one in finished["0"].outputs] == ["abort"] * 3
    assert finished["1"].outputs == generate(make_llm(), "cd", params[1])[0].outputs


@pytest.mark.parametrize("n", [2, 3])
def test_a_watch_is_for_one_candidate(n):
    engine = make_engine(hashed_script)
    with pytest.raises(ValueError, match=r"watch goes with n = 1; .* for each of `siblings`"):
        engine.add_request("a", PROMPT, sampled(n), watch=lambda token: None)
    assert not engine.has_unfinished_requests()
    seen = [[] for _ in range(n)]
    first = engine.intake.make_sequence("a", PROMPT, sampled(n))
    for sibling, tokens in zip(first.siblings, seen, strict=True):
        sibling.watch = tokens.append
    engine.add_sequence(first)
    assert token_ids(run_to_end(engine)["a"]) == seen


def test_a_row_that_a_candidate_leaves_is_taken_by_another_prompt():
    """Candidates end at different lengths; the other prompt does not wait for the last one."""
    llm = make_llm(max_num_seqs=2)
    params = SamplingParams(n=2, seed=0, temperature=1.5, max_tokens=40, stop="e")
    lengths = sorted(map(len, token_ids(generate(llm, "ab", params)[0])))
    assert lengths[0] + 4 < lengths[1]
    order = [(output.request_id, output.finished) for output in llm.stream(["ab", "x"], [params, sampled(1)])]
    assert order.index(("1", False)) < order.index(("0", True))


CALLS = (
    "runner.prefill",
    "runner.copy_row",
    "runner.forward",
    "runner.release_row",
    "drafter.release_row",
    "scheduler.release",
    "scheduler.hand_over",
    "scheduler.admit",
)


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("name", ["ngram", "suffix", "draft_model"])
@pytest.mark.parametrize("call", CALLS)
def test_a_step_that_is_cut_off_anywhere_loses_nothing(call, name, is_done):
    """As by Ctrl-C, each time before or each time behind what the call does; every other call goes through."""
    params = {"a": sampled(5), "b": sampled(1, max_tokens=5), "c": sampled(3, max_tokens=7), "d": sampled(6)}

    def run_cut_off(call):
        engine = make_engine(hashed_script, drafters[name](), max_num_seqs=3)
        for place, (request_id, one) in enumerate(params.items()):
            engine.add_request(request_id, PROMPT[place:], one)
        if call:
            cut_off(engine, *call.split("."), is_done)
        finished, num_cut_off = {}, 0
        while engine.has_unfinished_requests():
            try:
                finished |= {output.request_id: output for output in engine.step() if output.finished}
            except KeyboardInterrupt:
                num_cut_off += 1
        return {request_id: token_ids(output) for request_id, output in finished.items()}, num_cut_off

    got, num_cut_off = run_cut_off(call)
    assert num_cut_off >= 2
    assert got == run_cut_off(None)[0]


def cut_off(engine, part, method, is_done):
    owner = getattr(engine, part)
    real, calls = getattr(owner, method), []

    def interrupted(*args, **kwargs):
        calls.append(method)
        if len(calls) % 2 == 0:
            return real(*args, **kwargs)
        if is_done:
            real(*args, **kwargs)
        raise KeyboardInterrupt

    setattr(owner, method, interrupted)


events = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.tuples(
                st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
                st.builds(
                    sampled,
                    st.integers(1, 6),
                    seed=st.integers(0, 9),
                    max_tokens=st.integers(1, 20),
                    ignore_eos=st.booleans(),
                ),
            ),
        ),
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 5)),
    ),
    max_size=25,
)


def alone(prompt, params):
    engine = make_engine(hashed_script, max_num_seqs=1)
    engine.add_request("alone", prompt, params)
    return run_to_end(engine)["alone"].outputs


@pytest.mark.parametrize(("strategy", "refill"), [("packed", True), ("packed", False), ("exspec", True)])
@pytest.mark.parametrize("name", drafters)
@settings(max_examples=8)
@given(events=events)
def test_any_schedule_gives_each_candidate_what_it_gets_alone(name, strategy, refill, events):
    pool = {"max_num_seqs": 2, "pool": PoolConfig(window=ROWS)} if strategy == "exspec" else {"max_num_seqs": ROWS}
    engine = make_engine(hashed_script, drafters[name](), strategy=strategy, refill=refill, **pool)
    asked, got, aborted = {}, {}, {}

    def step():
        outputs = {}
        for output in engine.step():
            assert output.request_id not in got.keys() | outputs.keys()  # one snapshot of all candidates
            outputs[output.request_id] = output
        got.update({name: output for name, output in outputs.items() if output.finished})

    for kind, value in events:
        if kind == "add":
            asked[str(len(asked))] = value
            engine.add_request(str(len(asked) - 1), *value)
        elif kind == "abort":
            output = engine.abort_request(str(value))
            aborted |= {output.request_id: output} if output else {}
        else:
            step()
    while engine.has_unfinished_requests():
        step()
    assert got.keys() | aborted.keys() == asked.keys()
    assert not got.keys() & aborted.keys()
    for request_id, output in got.items():
        assert output.outputs == alone(*asked[request_id])
    for request_id, output in aborted.items():
        whole = [one.token_ids for one in alone(*asked[request_id])]
        assert all(ids == all_[: len(ids)] for ids, all_ in zip(token_ids(output), whole, strict=True))
    assert engine.stats.num_output_tokens == sum(
        len(ids) for output in (*got.values(), *aborted.values()) for ids in token_ids(output)
    )
