"""Drafts accepted by a coin."""

import pytest
from toy_llm import new_llm

from batchspec.bench.acceptance import accept_by_coin, toss
from batchspec.bench.engines import answer_by_engine
from batchspec.bench.workload import Workload

WORKLOAD = Workload([[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]] * 3, [""] * 12, max_tokens=100)


def stats_at(acceptance: float, batch_size: int = 4):
    engine = new_llm("ngram", max_num_seqs=batch_size, numerics="fast").engine
    accept_by_coin(engine, acceptance)
    answers, stats, _ = answer_by_engine(engine, WORKLOAD)
    assert [len(answer.token_ids) for answer in answers] == [100] * 12
    return stats


@pytest.mark.parametrize("acceptance", [0.3, 0.7])
def test_drafts_are_accepted_about_as_often_as_asked(acceptance):
    stats = stats_at(acceptance)
    by_place = stats.acceptance_by_position
    drafted = stats.num_drafted_at[0]
    assert drafted > 200
    assert by_place[0] == pytest.approx(acceptance, abs=4 * (acceptance * (1 - acceptance) / drafted) ** 0.5)
    assert by_place[1] == pytest.approx(acceptance**2, abs=0.12)


def test_all_and_nothing():
    assert stats_at(1.0).acceptance_rate == 1.0
    assert stats_at(0.0).num_accepted_tokens == 0


def test_a_coin_belongs_to_its_request_whatever_the_batch_is():
    first, second = stats_at(0.5, batch_size=1), stats_at(0.5, batch_size=5)
    assert first.num_accepted_at == second.num_accepted_at
    assert first.num_steps > second.num_steps


def test_an_engine_without_drafts_stays_as_it_is():
    engine = new_llm("none").engine
    judge, drafter = engine.judge, engine.drafter
    accept_by_coin(engine, 0.5)
    assert (engine.judge, engine.drafter) == (judge, drafter)


def test_coins_fall_as_often_as_asked():
    assert sum(toss(0.7)) / len(toss(0.7)) == pytest.approx(0.7, abs=0.01)
