"""Schedules: whatever comes and goes, every request gets the tokens that it gets alone."""

import pytest
import torch
from greedy import greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import VOCAB, ScriptedDrafter, ScriptedRunner, expected, hashed_script, make_engine, run_to_end

from batchspec.config import PoolConfig
from batchspec.drafting.draft_model import DraftModelDrafter
from batchspec.drafting.ngram import NgramDrafter
from batchspec.drafting.suffix import SuffixDrafter
from batchspec.drafting.suffix_store import SuffixStore
from batchspec.sampling.method import draw_coupled

ROWS = 3
LENGTH = 64

requests = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    st.builds(
        greedy,
        max_tokens=st.one_of(st.none(), st.integers(5, 30)),
        min_tokens=st.integers(0, 5),
        ignore_eos=st.booleans(),
        stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=1),
    ),
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 8)),
    ),
    max_size=40,
)
drafters = {
    "none": lambda: None,
    "ngram": lambda: NgramDrafter(ROWS, 3, 1, torch.device("cpu")),
    "suffix": lambda: SuffixDrafter(1, torch.device("cpu"), SuffixStore(max_tokens=80)),
    "scripted": lambda: ScriptedDrafter(hashed_script, lambda position: position % 3 != 0),
    "draft_model": lambda: DraftModelDrafter(
        ScriptedRunner(lambda context: hashed_script(context, depth=2), ROWS, 40), VOCAB, VOCAB, draw_coupled
    ),
}


def check_rows(engine):
    """Nothing is lost, nothing is shared, and what a row holds is what its sequence computed."""
    running = engine.scheduler.running
    assert len(running) <= engine.config.num_rows
    assert len({id(sequence) for sequence in running}) == len(running)
    assert not any(sequence.is_finished for sequence in running)
    for row, sequence in enumerate(running):
        if sequence.length:  # else admitted by a step that is still to come
            assert sequence.length == len(sequence.token_ids) - 1
        assert engine.runner.slots[row][: sequence.length] == sequence.token_ids[: sequence.length]


@pytest.mark.parametrize("strategy", ["packed", "exspec"])
@pytest.mark.parametrize("name", drafters)
@settings(max_examples=60, deadline=None)
@given(events=events)
def test_any_schedule_gives_each_request_what_it_gets_alone(name, strategy, events):
    """A pool of as many rows as the drafters have, from which batches of two are chosen."""
    pool = {"max_num_seqs": 2, "pool": PoolConfig(window=ROWS)} if strategy == "exspec" else {"max_num_seqs": ROWS}
    engine = make_engine(hashed_script, drafters[name](), max_model_len=LENGTH, strategy=strategy, **pool)
    asked, got, aborted = {}, {}, {}

    def step():
        for output in engine.step():
            prompt, params = asked[output.request_id]
            tokens = expected(hashed_script, prompt, params, LENGTH)[0]
            so_far = output.outputs[0].token_ids
            assert so_far == tokens[: len(so_far)]
            if output.finished:
                assert output.request_id not in got
                got[output.request_id] = output

    for kind, value in events:
        if kind == "add":
            name_ = str(len(asked))
            asked[name_] = value
            engine.add_request(name_, *value)
        elif kind == "abort":
            output = engine.abort_request(str(value))
            if output is not None:
                aborted[output.request_id] = output
        else:
            step()
        check_rows(engine)
    while engine.has_unfinished_requests():
        step()
        check_rows(engine)
    assert got.keys() | aborted.keys() == asked.keys()
    assert not got.keys() & aborted.keys()
    for request_id, output in got.items():
        tokens, reason, stop = expected(hashed_script, *asked[request_id], LENGTH)
        completion = output.outputs[0]
        assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == (tokens, reason, stop)
    assert engine.stats.num_output_tokens == sum(
        len(output.outputs[0].token_ids) for output in [*got.values(), *aborted.values()]
    )


def test_a_finished_row_is_taken_by_the_next_waiting_request_without_an_idle_round():
    engine = make_engine(lambda context: 1, max_num_seqs=2)
    for name, budget in (("a", 3), ("b", 6), ("c", 3)):
        engine.add_request(name, [5, 6], greedy(max_tokens=budget))
    run_to_end(engine)
    assert engine.stats.num_steps == 6
    assert engine.stats.occupancy == 1.0


def test_each_prompt_is_prefilled_once_all_but_its_last_token():
    engine = make_engine(hashed_script, max_num_seqs=2)
    for name, length in (("a", 9), ("b", 1), ("c", 5), ("d", 7)):
        engine.add_request(name, [3] * length, greedy(max_tokens=8))
    run_to_end(engine)
    assert engine.runner.num_prefilled == engine.stats.num_prefilled_tokens == 8 + 0 + 4 + 6


def test_abort_frees_the_row_at_once_and_keeps_what_was_there():
    engine = make_engine(lambda context: 1, max_num_seqs=2)
    for name in "abc":
        engine.add_request(name, [5], greedy(max_tokens=10))
    engine.step()
    output = engine.abort_request("a")
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason, output.finished) == ([1], "abort", True)
    assert [sequence.request_id for sequence in engine.scheduler.running] == ["b"]
    assert {output.request_id for output in engine.step()} == {"b", "c"}


def test_abort_of_a_waiting_or_unknown_request():
    engine = make_engine(lambda context: 1, max_num_seqs=1)
    engine.add_request("a", [5], greedy(max_tokens=3))
    engine.add_request("b", [5], greedy(max_tokens=3))
    assert engine.abort_request("b").outputs[0].token_ids == []
    assert engine.abort_request("b") is None
    assert engine.abort_request("never seen") is None
    assert run_to_end(engine).keys() == {"a"}


def test_abort_from_within_a_round_ends_that_row_and_no_other():
    """The row is freed only when the round is over: what it computed for the last row has to move along."""
    engine = make_engine(hashed_script, ScriptedDrafter(hashed_script, lambda position: True), max_num_seqs=3)
    params = greedy(max_tokens=20, ignore_eos=True)
    engine.add_request("a", [5], params, watch=lambda token_id: engine.abort_request("b") and None)
    engine.add_request("b", [6], params)
    engine.add_request("c", [7], params)
    assert {output.request_id for output in engine.step()} == {"a", "c"}
    finished = run_to_end(engine)
    assert finished.keys() == {"a", "c"}
    for name, prompt in (("a", [5]), ("c", [7])):
        assert finished[name].outputs[0].token_ids == expected(hashed_script, prompt, params)[0]


def test_a_failed_step_loses_nothing():
    """The runner fails in a prefill and in a round; the next steps go on as if it had not."""
    engine = make_engine(hashed_script, NgramDrafter(ROWS, 3, 1, torch.device("cpu")), max_num_seqs=ROWS)
    for serial in range(4):
        engine.add_request(str(serial), [1, 2, serial], greedy(max_tokens=12, ignore_eos=True))
    prefill, forward = engine.runner.prefill, engine.runner.forward

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    engine.runner.prefill = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    engine.runner.prefill, engine.runner.forward = prefill, fail
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    engine.runner.forward = forward
    outputs = run_to_end(engine)
    for serial in range(4):
        params = greedy(max_tokens=12, ignore_eos=True)
        assert outputs[str(serial)].outputs[0].token_ids == expected(hashed_script, [1, 2, serial], params)[0]


def test_a_watch_that_raises_loses_neither_what_ended_before_nor_its_own_row():
    """Row a ends in the round whose row b raises; b's token was not committed and comes again."""
    engine = make_engine(hashed_script, max_num_seqs=3)
    raised = []

    def raise_once(token_id):
        if not raised:
            raised.append(token_id)
            raise RuntimeError("disk full")

    long = greedy(max_tokens=9, ignore_eos=True)
    engine.add_request("a", [5], greedy(max_tokens=1))
    engine.add_request("b", [6], long, watch=raise_once)
    engine.add_request("c", [7], long)
    with pytest.raises(RuntimeError, match="disk full"):
        engine.step()
    outputs = run_to_end(engine)
    assert outputs["a"].outputs[0].token_ids == expected(hashed_script, [5], greedy(max_tokens=1))[0]
    for name, prompt in (("b", [6]), ("c", [7])):
        assert outputs[name].outputs[0].token_ids == expected(hashed_script, prompt, long)[0]
    assert engine.stats.num_output_tokens == 1 + 9 + 9


def test_what_ended_in_a_failed_round_is_given_out_even_if_the_culprit_is_aborted():
    def always_raise(token_id):
        raise RuntimeError("disk full")

    engine = make_engine(lambda context: 1)
    engine.add_request("a", [5], greedy(max_tokens=1))
    engine.add_request("b", [5], greedy(max_tokens=5), watch=always_raise)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="disk full"):
            engine.step()
    engine.abort_request("b")
    assert engine.has_unfinished_requests()
    assert run_to_end(engine).keys() == {"a"}


def test_an_id_whose_request_ended_in_a_failed_round_names_the_new_request():
    def always_raise(token_id):
        raise RuntimeError("disk full")

    engine = make_engine(lambda context: 1)
    engine.add_request("a", [5], greedy(max_tokens=1))
    engine.add_request("b", [5], greedy(max_tokens=5), watch=always_raise)
    with pytest.raises(RuntimeError, match="disk full"):
        engine.step()
    engine.add_request("a", [5], greedy(max_tokens=9))
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("a", [5])
    assert engine.abort_request("a").outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("cut_off", ["drafter.release_row", "runner.release_row", "scheduler.release"])
@pytest.mark.parametrize("name", ["ngram", "suffix", "draft_model"])
def test_a_release_that_is_cut_off_leaves_no_row_with_another_s_cache(name, cut_off):
    """As by Ctrl-C between any two of the moves that releasing a row takes."""
    engine = make_engine(hashed_script, drafters[name](), max_num_seqs=ROWS, max_model_len=LENGTH)
    params = [greedy(max_tokens=n, ignore_eos=True) for n in (2, 9, 12, 15)]
    for serial, param in enumerate(params):
        engine.add_request(str(serial), [5, 6, serial], param)
    part, method = cut_off.split(".")
    owner = getattr(engine, part)
    real, calls = getattr(owner, method), []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments)

    setattr(owner, method, interrupted)
    finished = {}
    while engine.has_unfinished_requests():
        try:
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        except KeyboardInterrupt:
            continue
    for serial, param in enumerate(params):
        wanted = expected(hashed_script, [5, 6, serial], param)[0]
        assert finished[str(serial)].outputs[0].token_ids == wanted


def test_an_abort_that_comes_too_late_changes_nothing():
    engine = make_engine(lambda context: 1, max_num_seqs=2)
    engine.add_request("a", [5], greedy(max_tokens=1))
    too_late = lambda token_id: engine.abort_request("a") and None  # noqa: E731
    engine.add_request("b", [5], greedy(max_tokens=1), watch=too_late)
    reasons = {output.request_id: output.outputs[0].finish_reason for output in engine.step()}
    assert reasons == {"a": "length", "b": "length"}


def test_a_watch_may_abort_its_own_request():
    engine = make_engine(lambda context: 1)
    engine.add_request("a", [5], greedy(max_tokens=1), watch=lambda token: engine.abort_request("a") and None)
    sequence = engine.scheduler.waiting[0]
    assert engine.step() == []
    assert sequence.finish_reason == "abort"
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(), "prompt must not be empty"),
        ([1, VOCAB], greedy(), f"prompt must hold token ids from 0 to {VOCAB - 1}"),
        ([1, -1], greedy(), "prompt must hold token ids"),
        ([1, "2"], greedy(), "prompt must hold token ids"),
        ([1, True], greedy(), "prompt must hold token ids"),
        ([1] * LENGTH, greedy(), f"prompt must have at most {LENGTH - 1} tokens"),
        ([1], greedy(stop_token_ids=[VOCAB]), "stop_token_ids must hold token ids"),
    ],
)
def test_requests_that_cannot_run_are_refused_and_leave_nothing_behind(prompt, params, message):
    engine = make_engine(hashed_script, max_model_len=LENGTH)
    with pytest.raises(ValueError, match=message):
        engine.add_request("a", prompt, params)
    assert not engine.has_unfinished_requests()


def test_an_id_in_use_is_refused_and_free_again_when_its_request_has_ended():
    engine = make_engine(lambda context: 1)
    engine.add_request("a", [1], greedy(max_tokens=1))
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("a", [1])
    run_to_end(engine)
    engine.add_request("a", [1], greedy(max_tokens=1))


def test_an_empty_prompt_starts_from_the_bos_token_if_there_is_one():
    engine = make_engine(hashed_script)
    engine.intake.bos_token_id = 4
    engine.add_request("a", [], greedy(max_tokens=5))
    output = run_to_end(engine)["a"]
    assert output.prompt_token_ids == [4]
    assert output.outputs[0].token_ids == expected(hashed_script, [4], greedy(max_tokens=5))[0]


def test_a_step_with_nothing_to_do_does_nothing():
    engine = make_engine(hashed_script)
    assert engine.step() == []
    assert engine.stats.num_steps == 0
