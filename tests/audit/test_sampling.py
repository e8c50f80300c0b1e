import random

import pytest
import torch
from toy_target import make_target

from batchspec.audit import sampling_run, session
from batchspec.audit.answers import STOPPED
from batchspec.audit.document import exit_code, make_document
from batchspec.audit.sampling import SamplingRun, compare_samples, features_of, holm, permutation_test
from batchspec.audit.session import Found, Plan, audit_all, open_candidate
from batchspec.audit.spec import parse_spec
from batchspec.models.noise import noisy_copy
from batchspec.sampling import verification

ENDS = frozenset([9])


def outputs(draw, num_samples, weights=(5, 3, 1, 1), length=6):
    """Made-up samples: each token is drawn by itself, and so is the length."""
    return [
        draw.choices(range(len(weights)), weights, k=max(3, round(draw.gauss(length, 2))))
        for _ in range(num_samples)
    ]


def failures(tests, level):
    return [test for test in tests if test.adjusted <= level]


def test_it_does_not_cry_wolf():
    """A run's error: at level 20 %, of 60 faultless runs about 12 may fail, and 22 are too many."""
    draw = random.Random(0)
    failed = 0
    for seed in range(60):
        sides = [[outputs(draw, 16) for _ in range(2)] for _ in range(2)]
        failed += bool(failures(compare_samples(*sides, ENDS, level=0.2, seed=seed), 0.2))
    assert failed < 22  # one in 1,000


@pytest.mark.parametrize(
    "fault",
    [
        {"weights": (2, 3, 3, 2)},  # the first tokens
        {"length": 9},
    ],
)
def test_it_finds_another_distribution(fault):
    draw = random.Random(1)
    sides = [[outputs(draw, 64) for _ in range(4)], [outputs(draw, 64, **fault) for _ in range(4)]]
    found = {test.feature for test in failures(compare_samples(*sides, ENDS, level=0.01), 0.01)}
    assert found == ({"length"} if "length" in fault else {"token 1", "token 2", "token 3"})


def test_a_small_fault_in_every_prompt_shows_pooled():
    draw = random.Random(2)
    sides = [
        [outputs(draw, 48) for _ in range(16)],
        [outputs(draw, 48, weights=(3.6, 3.4, 1.6, 1.4)) for _ in range(16)],
    ]
    found = failures(compare_samples(*sides, ENDS, level=0.01), 0.01)
    assert any(test.prompt is None for test in found)


def test_features_are_first_tokens_and_length():
    assert features_of([4, 9], ENDS) == features_of([4, STOPPED], ENDS)
    assert features_of([4, 5, 6, 7], ENDS) == [4, 5, 6, 4]
    assert len(set(features_of([4], ENDS))) == 3  # a token, nothing, nothing, and the length


def test_holm_is_monotone_and_at_most_one():
    assert holm([0.5, 0.01, 0.02, 0.9]) == pytest.approx([1.0, 0.04, 0.06, 1.0])
    assert holm([]) == []


def test_equal_samples_have_p_of_one_and_other_ones_the_least():
    generator = torch.Generator().manual_seed(0)
    same = [1, 1, 2, 3] * 5
    assert permutation_test([(same, same)], 999, generator) == (pytest.approx(0.0, abs=1e-5), 1.0)
    assert permutation_test([([1] * 9, [1] * 9)], 999, generator)[1] == 1.0
    assert permutation_test([([1] * 20, [2] * 20)], 9999, generator)[1] == 1 / 10_000


def test_prompts_without_samples_are_left_out():
    side = [[[1, 2, 3]] * 8, []]
    tests = compare_samples(side, side, ENDS, 0.01)
    assert {test.prompt for test in tests} == {None, 0}
    assert compare_samples([[]], [[]], ENDS, 0.01) == []


@pytest.mark.parametrize(("level", "can_fail"), [(0.01, True), (1e-4, False)])
def test_a_report_says_when_no_test_of_a_single_prompt_can_fail(target, level, can_fail):
    """Two samples that have nothing in common, whose p-values are the least that there are: 4 tests of one prompt
    in half of the level, at 200,000 shuffles, reach 4e-5, and of three prompts 1.2e-4."""
    sides = [[[[token] * 3] * 40] * 3 for token in (1, 2)]
    run = SamplingRun("some engine", 1, 40, "another one", level)
    run.tests = compare_samples(*sides, ENDS, level)
    run.num_compared = 3
    assert any(test.prompt is not None for test in run.failed) == can_fail
    remarks = make_document(target, {}, Found(sampling=[run]))["remarks"]
    assert any("no test of a single prompt can fail" in remark for remark in remarks) != can_fail


def test_the_targets_own_samples_serve_all_that_are_held_against_it(target, monkeypatch):
    asked = []

    def counted(engine, *arguments):
        asked.append(engine)
        return sampling_run.collect(engine, *arguments)

    monkeypatch.setattr(session, "collect", counted)
    specs = [parse_spec(text) for text in ("transformers", "transformers-assisted", "batchspec:method=ngram")]
    candidates = [open_candidate(target, spec, is_sampled=True) for spec in specs]
    audit_all(target, candidates, Plan([6], 1), Found(), lambda name, total: lambda: None)
    assert len(asked) == 3 + 2
    assert [one.against.is_target for one in candidates] == [True, True, False]


@pytest.fixture(scope="module")
def sampled():
    return make_target(max_tokens=3, prompts=("The sea", "Once", "one two"))


def audit(target, method, draft):
    text = f"batchspec:method=draft_model,num_speculative_tokens=3,sampling_method={method}"
    spec = parse_spec(text)
    spec.options["model"] = draft
    candidate = open_candidate(target, spec, is_sampled=True)
    found = Found()
    audit_all(target, [candidate], Plan([32], 240, 1.0), found, lambda name, total: lambda: None)
    return found


@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_batchspec_samples_the_same_with_and_without_speculation(sampled, method):
    found = audit(sampled, method, noisy_copy(sampled.llm.model, 0.1))
    assert found.sampling[0].failed == []
    assert found.sampling[0].num_errors == 0
    assert min(test.p for test in found.sampling[0].tests) < 1.0, "the sides share no noise"
    assert exit_code(found) == 0


def test_a_wrong_residual_is_found(sampled, monkeypatch):
    """After a rejection the token is drawn from p instead of max(0, p - q): greedy outputs stay right."""
    monkeypatch.setattr(verification, "residual", lambda p, q: p)
    found = audit(sampled, "rejection", noisy_copy(sampled.llm.model, 0.1))
    assert found.sampling[0].failed
    assert all(run.counts["violation"] == 0 for run in found.runs)
    assert exit_code(found) == 1
