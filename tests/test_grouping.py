"""EXSPEC's choice of a batch from its pool."""

import math

import pytest
from greedy import greedy
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedDrafter, expected, hashed_script, make_engine, run_to_end

from batchspec.config import PoolConfig
from batchspec.grouping import choose_batch
from batchspec.request import Sequence


def pool(*rows):
    """Sequences of some length that have waited some rounds, whose last tokens were accepted drafts or not."""
    sequences = []
    for serial, (length, waited, accepted) in enumerate(rows):
        sequence = Sequence(str(serial), greedy(), [1] * length, 1, 100, waited=waited)
        sequence.accepted = [place < accepted for place in range(10)]
        sequences.append(sequence)
    return sequences


def lengths(*values):
    return pool(*((value, 0, 5) for value in values))


def test_the_largest_group_of_equal_length_is_taken():
    assert choose_batch(lengths(5, 7, 7, 5, 7, 9), 3, PoolConfig()) == [1, 2, 4]


def test_of_a_group_larger_than_the_batch_those_that_waited_longest_are_taken():
    assert choose_batch(pool((7, 0, 0), (7, 3, 0), (7, 1, 0), (7, 2, 0)), 2, PoolConfig()) == [1, 3]


def test_without_a_group_the_rows_of_least_padding_are_taken():
    assert choose_batch(lengths(90, 10, 50, 11, 52, 12), 3, PoolConfig()) == [1, 3, 5]


def test_a_smaller_group_is_taken_if_it_is_said_to_pay():
    rows = lengths(7, 7, 8, 20)
    assert choose_batch(rows, 3, PoolConfig()) == [0, 1, 2]
    assert choose_batch(rows, 3, PoolConfig(min_group=2)) == [0, 1]


@pytest.mark.parametrize(("batch_size", "smallest"), [(2, 2), (4, 4), (8, 8), (16, 15), (32, 30)])
def test_by_default_a_group_pays_from_92_percent_of_a_batch_on(batch_size, smallest):
    for size in (smallest - 1, smallest):
        rows = lengths(*[7] * size, *range(20, 20 + 2 * batch_size))
        chosen = choose_batch(rows, batch_size, PoolConfig())
        assert (len({len(rows[place].token_ids) for place in chosen}) == 1) == (size >= smallest)


def test_grouping_by_acceptance_takes_those_that_are_accepted_alike():
    rows = pool((7, 0, 9), (7, 0, 1), (7, 0, 2), (7, 0, 8), (7, 0, 1))
    assert choose_batch(rows, 3, PoolConfig(group_by="acceptance")) == [1, 2, 4]
    assert choose_batch(rows, 3, PoolConfig(group_by="length")) == [0, 1, 2]


def test_a_sequence_that_has_waited_too_long_is_taken_with_whom_it_may():
    rows = pool((90, 16, 5), (7, 0, 5), (7, 0, 5), (7, 0, 5), (80, 0, 5))
    assert choose_batch(rows, 3, PoolConfig(max_wait_rounds=16)) != [1, 2, 3]
    assert 0 in choose_batch(rows, 3, PoolConfig(max_wait_rounds=16))
    assert choose_batch(rows, 3, PoolConfig(max_wait_rounds=17)) == [1, 2, 3]


rows = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20), st.integers(0, 10)), min_size=1, max_size=20)
configs = st.builds(
    PoolConfig,
    group_by=st.sampled_from(["length", "acceptance"]),
    min_group=st.one_of(st.none(), st.integers(1, 8)),
    max_wait_rounds=st.integers(1, 20),
)


@given(rows, st.integers(1, 8), configs)
def test_a_batch_is_distinct_rows_and_holds_the_overdue_ones(rows, batch_size, config):
    sequences = pool(*rows)
    chosen = choose_batch(sequences, batch_size, config)
    assert chosen == sorted(set(chosen))
    assert 1 <= len(chosen) <= batch_size
    overdue = sorted((s.waited for s in sequences if s.waited >= config.max_wait_rounds), reverse=True)
    taken = sorted(
        (sequences[p].waited for p in chosen if sequences[p].waited >= config.max_wait_rounds), reverse=True
    )
    assert taken[: len(overdue[:batch_size])] == overdue[:batch_size]
    is_level = len({len(sequences[place].token_ids) for place in chosen}) == 1
    assert is_level or len(chosen) == min(batch_size, len(sequences)), "a mix is as large as it can be"


requests = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 25)), min_size=1, max_size=24)


@given(requests, st.integers(1, 4), st.integers(1, 3), configs, st.booleans())
def test_nobody_waits_without_bound_and_everybody_gets_what_he_gets_alone(asked, batch, factor, config, refill):
    config = PoolConfig(batch * factor, config.group_by, config.min_group, config.max_wait_rounds)
    engine = make_engine(
        hashed_script,
        ScriptedDrafter(hashed_script, lambda position: position % 3 != 0),
        max_num_seqs=batch,
        strategy="exspec",
        pool=config,
        refill=refill,
    )
    params = [greedy(max_tokens=budget, ignore_eos=True) for _, budget in asked]
    for serial, (length, _) in enumerate(asked):
        engine.add_request(str(serial), [serial % 11 + 1] * length, params[serial])
    bound = config.max_wait_rounds + math.ceil(config.window / batch)
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        assert len(engine.scheduler.running) <= config.window
        assert all(sequence.waited < bound for sequence in engine.scheduler.running)
    for serial, (length, _) in enumerate(asked):
        wanted = expected(hashed_script, [serial % 11 + 1] * length, params[serial])[0]
        assert finished[str(serial)].outputs[0].token_ids == wanted
    assert engine.runner.num_prefilled == sum(length - 1 for length, _ in asked), "each prompt once"
    waited = sum(output.metrics.num_waited_rounds for output in finished.values())
    assert waited == engine.stats.num_waited_rounds


def test_equal_prompts_that_are_accepted_alike_are_always_grouped():
    engine = make_engine(lambda context: 1, max_num_seqs=4, strategy="exspec")
    for serial in range(16):
        engine.add_request(str(serial), [2, 3], greedy(max_tokens=10))
    run_to_end(engine)
    assert engine.stats.grouping_rate == engine.stats.occupancy == 1.0
