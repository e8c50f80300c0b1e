import random

import pytest

from batchspec.drafting.estimates import BEST, MATCH_LENGTHS, MOST_TRIED, Estimates, Mark, Trust, match_mark

MARK = Mark("ngram", 1, 0.5)


def test_a_chance_goes_from_its_prior_to_what_is_seen():
    estimates, coin = Estimates(), random.Random(0)
    assert estimates.chance(MARK, Trust()) == 0.5
    for _ in range(400):
        estimates.learn([MARK], int(coin.random() < 0.2), Trust())
    assert estimates.chance(MARK, Trust()) == pytest.approx(0.2, abs=0.08)


def test_a_chance_follows_a_change_however_much_was_seen_before():
    estimates = Estimates()
    for _ in range(50 * MOST_TRIED):
        estimates.learn([MARK], 0, Trust())
    for _ in range(2 * MOST_TRIED):
        estimates.learn([MARK], 1, Trust())
    assert estimates.chance(MARK, Trust()) > 0.8


def test_tokens_behind_the_first_wrong_one_were_not_tried():
    estimates, behind = Estimates(), Mark("ngram", 2, 0.5)
    estimates.learn([MARK, behind], 0, Trust())
    assert estimates.chance(MARK, Trust()) < 0.5
    assert estimates.chance(behind, Trust()) == 0.5
    estimates.learn([MARK, behind], 1, Trust())
    assert estimates.chance(behind, Trust()) < 0.5


def test_survivals_fall_and_no_chance_is_certain():
    estimates, trust = Estimates(), Trust()
    for _ in range(100):
        estimates.learn([MARK] * 5, 5, trust)
    survivals = estimates.survivals([MARK] * 5, trust)
    assert survivals == sorted(survivals, reverse=True)
    assert survivals[0] == BEST


def test_a_row_s_own_record_moves_its_chances_and_no_other_row_s():
    estimates, lucky, unlucky = Estimates(), Trust(), Trust()
    for _ in range(30):
        estimates.learn([MARK], 1, lucky)
        estimates.learn([MARK], 0, unlucky)
    assert estimates.chance(MARK, Trust()) == pytest.approx(0.5, abs=0.1)
    assert estimates.chance(MARK, lucky) > 0.7
    assert estimates.chance(MARK, unlucky) < 0.35


def test_match_marks_tell_lengths_and_shares_apart_and_are_few():
    found = {match_mark("own", length, share / 100) for length in range(500) for share in range(1, 101)}
    assert len(found) == 3 * len(MATCH_LENGTHS)
    assert match_mark("own", 3) != match_mark("store", 3)
    assert match_mark("own", 9, 1.0).prior > match_mark("own", 9, 0.3).prior > match_mark("own", 1, 0.3).prior
