"""What is drafted and verified on scripted rows: nearly the best there is, and never much worse than no drafts."""

import random
from itertools import product

import pytest
import torch
from greedy import greedy
from scripted_costs import costs_of, rate

from batchspec.drafting.budget import AdaptiveBudget, FixedBudget
from batchspec.drafting.costs import StepCosts
from batchspec.drafting.estimates import Mark
from batchspec.drafting.outlook import CONFIDENCE, LEVELS
from batchspec.drafting.patience import PROBE_AFTER, PROBE_LAST
from batchspec.request import Sequence


def rows_of(count):
    return [Sequence("r", greedy(), [1], 1, 10_000) for _ in range(count)]


def simulate(budget, true_chances, num_rounds, seconds):
    """Rows whose every draft token is accepted with its row's chance; gives tokens and seconds."""
    rows, coin = rows_of(len(true_chances)), random.Random(1)
    marks = [[Mark("ngram", place, 0.5)] * 4 for place in range(len(rows))]
    gained = spent = 0.0
    for _ in range(num_rounds):
        cut = budget.cut(rows, marks)
        accepted = [
            next((place for place in range(count) if coin.random() >= chance), count)
            for count, chance in zip(cut, true_chances, strict=True)
        ]
        verified = [own[:count] for own, count in zip(marks, cut, strict=True)]
        budget.learn(rows, verified, accepted)
        gained += len(rows) + sum(accepted)
        spent += seconds(len(rows) + sum(cut))
    return gained / spent


@pytest.fixture
def adaptive(monkeypatch):
    """Costs stay as they were measured: a simulation takes no time."""
    monkeypatch.setattr(StepCosts, "correct", lambda *_: None)
    return AdaptiveBudget


@pytest.mark.parametrize("num_rows", [1, 8])
def test_where_nothing_is_accepted_speculation_costs_next_to_nothing(adaptive, num_rows):
    costs = costs_of(0.5)
    found = simulate(adaptive(costs), [0.0] * num_rows, 2000, costs.seconds)
    assert found >= 0.98 * num_rows / costs.seconds(num_rows)


def test_the_rows_that_pay_are_found_among_those_that_do_not(adaptive):
    costs = costs_of(0.3)
    true = [0.9, 0.02, 0.9, 0.02]
    found = simulate(adaptive(costs), true, 1000, costs.seconds)
    survivals = [[chance ** (place + 1) for place in range(4)] for chance in true]
    best = max(rate(survivals, cut, costs) for cut in product(range(5), repeat=4))
    assert found >= 0.95 * best
    assert found > 1.1 * simulate(FixedBudget(), true, 1000, costs.seconds)


def test_a_row_that_was_left_out_is_tried_again_ever_more_rarely(adaptive):
    budget, rows = adaptive(costs_of(5.0)), rows_of(1)
    marks = [[Mark("ngram", 0, 0.01)] * 3]
    tries = []
    for number in range(4 * PROBE_LAST):
        cut = budget.cut(rows, marks)
        if cut[0]:
            assert cut == [1]
            tries.append(number)
        budget.learn(rows, [marks[0][: cut[0]]], [0])
    gaps = [later - sooner for sooner, later in zip([-1, *tries], tries, strict=False)]
    assert gaps[:5] == [PROBE_AFTER, 2 * PROBE_AFTER, 4 * PROBE_AFTER, 8 * PROBE_AFTER, 16 * PROBE_AFTER]
    assert max(gaps) == PROBE_LAST


def test_rows_that_were_left_out_are_tried_together(adaptive):
    """The first draft of a step makes it dear, so tries of single rows would cost as much as those of many."""
    budget, rows = adaptive(costs_of(5.0)), rows_of(12)
    marks = [[Mark("ngram", 0, 0.01)] * 3] * 12
    sizes = []
    for number in range(4 * PROBE_LAST):
        shown = [own if (number + place) % 3 else [] for place, own in enumerate(marks)]  # not all the time
        cut = budget.cut(rows, shown)
        budget.learn(rows, [own[:count] for own, count in zip(shown, cut, strict=True)], [0] * 12)
        if any(cut):
            sizes.append(sum(cut))
    assert sizes
    assert min(sizes) >= 2
    assert len(sizes) < 60


def test_what_was_looked_up_is_not_charged_for_a_draft_model(adaptive):
    marks = [[Mark("ngram", 0, chance) for chance in (0.9, 0.7, 0.5)]] * 2
    alone = adaptive(costs_of(0.3)).cut(rows_of(2), marks)
    beside_a_model = adaptive(costs_of(0.3), costs_of(0.1)).cut(rows_of(2), marks)
    drafted = [[mark._replace(source=CONFIDENCE) for mark in own] for own in marks]
    assert beside_a_model == alone
    assert sum(adaptive(costs_of(0.3), costs_of(0.1)).cut(rows_of(2), drafted)) > sum(alone)  # paid for already


def test_beside_good_look_ups_a_draft_model_must_promise_more(adaptive):
    """They make output faster, so that the time of drafting yields more."""
    rows, found = rows_of(8), [[]] + [[Mark("ngram", 5, 0.98)] * 3] * 7
    asked = []
    for beside in (None, found):
        budget = adaptive(costs_of(0.01), StepCosts([(1, 0.02)]))
        asked.append(budget.next_column(rows, [[]] * 8, [1] + [0] * 7, beside))
    assert asked == [[0], []]


def test_a_draft_model_that_is_not_asked_does_not_lose_its_tries(adaptive):
    """While all rows are looked up, there is nothing to try."""
    budget, rows = adaptive(costs_of(5.0), costs_of(1.0)), rows_of(1)
    for _ in range(10 * PROBE_AFTER):
        assert budget.next_column(rows, [[]], [0]) == []
    rounds = next(number for number in range(1, 1000) if budget.next_column(rows, [[]], [3]))
    assert rounds == PROBE_AFTER


def test_a_row_comes_back_when_its_text_becomes_predictable(adaptive):
    costs = costs_of(0.3)
    budget, rows = adaptive(costs), rows_of(1)
    marks = [[Mark("ngram", 3, 0.5)] * 3]
    for accepts in [0] * 300 + [3] * 3000:
        cut = budget.cut(rows, marks)
        budget.learn(rows, [marks[0][: cut[0]]], [min(accepts, cut[0])])
    assert cut == [3]


def columns(budget, rows, limits, confidences):
    """A draft model's columns: the marks that rows end up with."""
    marks = [[] for _ in rows]
    while chosen := budget.next_column(rows, marks, limits):
        for place in chosen:
            marks[place].append(LEVELS[int(10 * confidences[place])])
    return marks


def run_model(budget, limits, true, num_rounds):
    rows, coin = rows_of(len(limits)), random.Random(2)
    drafted = []
    for _ in range(num_rounds):
        marks = columns(budget, rows, limits, true)
        cut = budget.cut(rows, marks)
        accepted = [
            next((place for place in range(count) if coin.random() >= chance), count)
            for count, chance in zip(cut, true, strict=True)
        ]
        budget.learn(rows, [own[:count] for own, count in zip(marks, cut, strict=True)], accepted)
        drafted.append([len(own) for own in marks])
    return drafted


def test_a_draft_model_drafts_on_for_the_rows_it_is_sure_of(adaptive):
    budget = adaptive(costs_of(0.1), StepCosts([(1, 0.05), (8, 0.06)]))
    last = run_model(budget, [4, 4, 4], [0.95, 0.15, 0.9], 300)[-50:]
    means = [sum(one[row] for one in last) / len(last) for row in range(3)]
    assert means[0] >= 3
    assert means[2] > 2.5
    assert means[1] < 2


def test_a_draft_model_to_which_no_token_is_left_is_sure_of_none(adaptive):
    """All that it may say is outside of its short head."""
    logits = torch.tensor([[-torch.inf] * 4, [9.0, 0.0, 0.0, 0.0], [0.0] * 4])
    assert [mark.level for mark in adaptive(costs_of(1.0)).confidence(logits)] == [0, 9, 2]


@pytest.mark.parametrize(("draft_seconds", "drafts"), [(0.01, True), (1.0, False)])
def test_a_token_is_drafted_for_the_chance_that_it_is_a_sure_one(adaptive, draft_seconds, drafts):
    """One in four is worth its place in a step, so the average one is not; the others are not verified."""
    budget, rows, coin = adaptive(costs_of(2.0), StepCosts([(1, draft_seconds)])), rows_of(1), random.Random(3)
    num_drafted = num_verified = 0
    for _ in range(400):
        is_sure = coin.random() < 0.25
        marks = columns(budget, rows, [1], [0.95 if is_sure else 0.05])
        cut = budget.cut(rows, marks)
        budget.learn(rows, [marks[0][: cut[0]]], [int(is_sure) if cut[0] else 0])
        num_drafted, num_verified = num_drafted + len(marks[0]), num_verified + cut[0]
    assert (num_drafted > 300) == drafts
    assert (50 < num_verified < 150) == drafts


def test_what_rows_catch_up_on_is_not_charged_to_the_next_draft(monkeypatch):
    """Else a draft model that rested looks dear at each try, and never comes back. Steps take half of what was
    measured: those of many tokens, in which rows catch up, and those behind them; prompts take long."""
    clock = [0.0]
    monkeypatch.setattr("batchspec.drafting.budget.time.perf_counter", lambda: clock[0])
    draft_costs = StepCosts([(1, 0.02), (2, 0.02), (34, 0.34)])
    budget, rows = AdaptiveBudget(costs_of(0.01), draft_costs), rows_of(2)
    for _ in range(200):
        marks = [[], []]
        while chosen := budget.next_column(rows, marks, [2, 2]):
            is_first = not marks[chosen[0]]
            clock[0] += 5.0 if is_first else 0.0
            budget.begin_draft_step(34 if is_first else 2)
            clock[0] += 0.17 if is_first else 0.01
            for place in chosen:
                marks[place].append(LEVELS[9])
    assert len(marks[0]) == 2
    assert draft_costs.seconds(2) == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("limit", [1, 2])
def test_all_that_drafting_takes_is_charged_to_it_up_to_the_cut(monkeypatch, limit):
    """Steps take what was measured; deciding what comes next, and what is kept, takes as long again."""
    clock = [0.0]
    monkeypatch.setattr("batchspec.drafting.budget.time.perf_counter", lambda: clock[0])
    draft_costs = StepCosts([(1, 0.02), (2, 0.02)])
    budget, rows = AdaptiveBudget(costs_of(0.01), draft_costs), rows_of(2)
    for _ in range(200):
        marks = [[], []]
        while chosen := budget.next_column(rows, marks, [limit, limit]):
            clock[0] += 0.02 if marks[0] else 7.0
            budget.begin_draft_step(2)
            clock[0] += 0.02
            for place in chosen:
                marks[place].append(LEVELS[9])
        clock[0] += 0.02
        cut = budget.cut(rows, marks)
        clock[0] += 1.0
        budget.learn(rows, [own[:count] for own, count in zip(marks, cut, strict=True)], cut)
    assert draft_costs.seconds(2) == pytest.approx(0.04, rel=0.01)


@pytest.mark.parametrize(("num_left", "drafts"), [(1000, True), (5, False)])
def test_a_long_prompt_is_not_read_for_the_few_tokens_that_are_left(adaptive, num_left, drafts):
    """Reading 400 tokens takes 4 s here, and a round 1 s or more, of which a draft saves half at most."""
    budget = adaptive(costs_of(0.01), StepCosts([(1, 0.01), (101, 1.01)]))
    rows = [Sequence("r", greedy(), [1], 1, 1 + num_left)]
    assert budget.next_column(rows, [[]], [1], unread=[400]) == [0] * drafts
    assert budget.next_column(rows, [[]], [1], unread=[0]) == [0]


def test_a_draft_model_that_does_not_pay_rests_and_is_tried_now_and_then(adaptive):
    budget = adaptive(costs_of(0.1), StepCosts([(1, 0.9), (8, 1.0)]))
    drafted = run_model(budget, [4, 4], [0.1, 0.1], 1000)
    share = sum(any(one) for one in drafted[100:]) / 900
    assert 0 < share < 0.02


def test_limits_are_kept_and_rows_without_one_are_not_drafted(adaptive):
    for budget in (FixedBudget(), adaptive(costs_of(0.01), StepCosts([(1, 0.001), (8, 0.001)]))):
        marks = columns(budget, rows_of(3), [2, 0, 1], [0.95, 0.95, 0.95])
        assert [len(own) for own in marks] == [2, 0, 1]
