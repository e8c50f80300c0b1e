"""The filters against transformers' warpers, the fast path against the full sort, a line against the batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from batchspec import SamplingParams
from batchspec.sampling import filters
from batchspec.sampling.filters import Filters, has_filter, smallest_kept

INF = float("inf")
LARGE = 1500
"""A vocabulary of which the fast path sees a part."""

seeds = st.integers(0, 10_000)
scales = st.sampled_from([0.01, 0.3, 1.0, 3.0, 12.0])
"""From flat to peaked."""
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1.0, 1.0, 1.0, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 1.0]) | st.floats(0.0, 0.99),
    top_k=st.sampled_from([0, -1, 1]) | st.integers(1, 30),
    top_p=st.sampled_from([1.0, 1.0, 1e-6]) | st.floats(0.01, 0.99),
)


def random_logits(num_lines, vocab_size, scale, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(num_lines, vocab_size, generator=generator, dtype=dtype)


def keep_probable(logits, lines):
    """The filter under test, which may use up what it is given."""
    return filters.keep_probable(logits.clone(), lines)


def kept(logits, **fields):
    """Ids of the tokens of one line that may be drawn."""
    scaled = keep_probable(torch.tensor([logits], dtype=torch.float64), [SamplingParams(**fields)])
    return (scaled[0] > -INF).nonzero().flatten().tolist()


def warped_by_transformers(line, one):  # [vocabulary] twice
    """`min_p`, then `top_k`, then `top_p`, each on what the former left."""
    line = line.unsqueeze(0)
    if one.is_greedy:
        return line
    if one.min_p > 0:
        line = MinPLogitsWarper(one.min_p)(None, line)
    if one.top_k > 0:
        line = TopKLogitsWarper(one.top_k)(None, line)
    if one.top_p < 1:
        line = TopPLogitsWarper(one.top_p)(None, line)
    return line


@given(st.lists(params, min_size=1, max_size=6), st.sampled_from([2, 20, 600]), scales, seeds)
def test_filters_are_those_of_transformers_in_vllm_s_order(lines, vocab_size, scale, seed):
    logits = random_logits(len(lines), vocab_size, scale, seed, torch.float64)
    wanted = torch.cat([warped_by_transformers(*pair) for pair in zip(logits, lines, strict=True)])
    assert torch.equal(keep_probable(logits, lines), wanted)


def test_the_order_is_min_p_then_top_k_then_top_p():
    """Any other order would leave other tokens here."""
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log().tolist()
    assert kept(logits, top_k=3, top_p=0.9) == [0, 1, 2]  # 0.7 of 0.85 is less than 0.9
    assert kept(logits, top_k=3, top_p=0.8) == [0, 1]  # 0.7 of 1.0 is less than 0.8: all three, were top_p first
    assert kept(logits, min_p=0.3, top_p=0.8) == [0, 1]
    assert kept(logits, top_p=0.8) == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 2, 4]),
        ({"top_k": 3}, [1, 2, 4]),
        ({"top_k": 4}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.5}, [1, 2, 4]),
        ({"top_p": 0.81}, [0, 1, 2, 3, 4, 5]),
        ({"min_p": 0.49}, [1, 2, 4]),
        ({"min_p": 0.24}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2, "top_p": 0.4}, [1]),
        ({"top_k": 2, "top_p": 0.6}, [1, 2, 4]),
    ],
)
def test_of_tokens_as_probable_as_the_last_one_all_are_kept(fields, wanted):
    # Probabilities 1, 4, 2, 1, 2, 1 and 0.25 of 11.25.
    logits = torch.tensor([1.0, 4.0, 2.0, 1.0, 2.0, 1.0, 0.25]).log2() * torch.tensor(2.0).log()
    assert kept(logits.tolist(), **fields) == wanted


@given(params, st.sampled_from([2, 20, 600]), scales, seeds)
def test_the_most_probable_token_is_always_kept(one, vocab_size, scale, seed):
    logits = random_logits(1, vocab_size, scale, seed)
    assert keep_probable(logits, [one])[0, logits.argmax()] == logits.max()


@given(params, scales, seeds)
def test_no_forbidden_token_comes_back(one, scale, seed):
    logits = random_logits(1, 20, scale, seed)
    logits[0, ::2] = -INF
    assert (keep_probable(logits, [one])[0, ::2] == -INF).all()


def with_candidates(number, logits, lines):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "CANDIDATES", (number,))
        return keep_probable(logits, lines)


@given(st.lists(params, min_size=1, max_size=4), scales, st.booleans(), seeds)
def test_the_fast_path_gives_the_bits_of_the_full_sort(lines, scale, has_ties, seed):
    logits = random_logits(len(lines), LARGE, scale, seed)
    if has_ties:
        logits = (2 * logits).round() / 2
    full = with_candidates(LARGE, logits, lines)
    for number in (1, 2, 7, 256):
        assert torch.equal(with_candidates(number, logits, lines), full)


def test_equals_behind_the_fast_path_are_counted_where_top_k_ends_among_them():
    """Ten tokens of 100, and 1490 of 1: the latter are most of what `top_k` leaves, and `top_p` needs some."""
    logits = torch.zeros(1, LARGE)
    logits[0, :10] = torch.tensor(100.0).log()
    fields = SamplingParams(top_k=11, top_p=0.5)
    assert (keep_probable(logits, [fields]) > -INF).all()


def test_top_p_takes_no_more_tokens_once_it_has_its_share():
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]])
    for top_p, wanted in ((0.5, 0.5), (0.51, 0.25), (0.75, 0.25), (0.875, 0.125), (0.9, 0.0625)):
        one = Filters(torch.tensor([[0.0]]), torch.tensor([[5]]), torch.tensor([[top_p]]))
        assert smallest_kept(probs, 5, one)[0].item() == wanted


@pytest.mark.parametrize("number", [255, 256, 257, 1000, LARGE - 1, LARGE, LARGE + 1])
def test_a_top_k_about_as_large_as_the_fast_path_keeps_so_many(number):
    logits = random_logits(1, LARGE, 0.01, 0, torch.float64)
    for top_p in (1.0, 0.999):
        fields = SamplingParams(top_k=number, top_p=top_p)
        assert torch.equal(keep_probable(logits, [fields]), warped_by_transformers(logits[0], fields))


@given(st.lists(params, min_size=2, max_size=5), scales, seeds)
def test_a_line_s_result_does_not_depend_on_the_lines_beside_it(lines, scale, seed):
    logits = random_logits(len(lines), LARGE, scale, seed)
    logits[1] /= 100  # a flat one beside peaked ones: some need the full sort, some do not
    together = keep_probable(logits, lines)
    for line, one in enumerate(lines):
        assert torch.equal(keep_probable(logits[line : line + 1], [one]), together[line : line + 1])


@given(params, scales, seeds)
def test_logits_that_are_kept_keep_their_bits(one, scale, seed):
    logits = random_logits(1, 300, scale, seed)
    scaled = keep_probable(logits, [one])
    assert torch.equal(scaled.where(scaled > -INF, logits), logits)


def test_greedy_lines_have_no_filter():
    one = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)
    beside = SamplingParams(top_k=1)
    logits = random_logits(2, 20, 1.0, 0)
    assert not has_filter(one)
    assert torch.equal(keep_probable(logits, [one, beside])[0], logits[0])


@pytest.mark.parametrize("fields", [{}, {"top_k": -1}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}])
def test_neutral_values_are_no_filter(fields):
    assert not has_filter(SamplingParams(**fields))


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 0.99}, {"min_p": 0.01}])
def test_any_other_value_is_a_filter(fields):
    assert has_filter(SamplingParams(**fields))
