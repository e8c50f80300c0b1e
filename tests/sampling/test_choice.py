"""The token of a line: its own, whatever stands beside it, and one that may be drawn."""

import pytest
import torch
from greedy import greedy
from hypothesis import given
from hypothesis import strategies as st

from batchspec import SamplingParams
from batchspec.request import Sequence
from batchspec.sampling import choice
from batchspec.sampling.filters import keep_probable
from batchspec.sampling.lines import step_lines
from batchspec.sampling.noise import ACCEPT, DRAFT, TOKEN, gumbel_table, keys

VOCAB = 40
INF = float("inf")

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 1e-4, 0.7, 1.0, 3.0, 100.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    top_k=st.sampled_from([0, 0, 1, 4, 30]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9]),
)
requests = st.lists(st.tuples(params, st.integers(0, 3)), min_size=1, max_size=5)
"""Of each its parameters and the number of its draft tokens."""
seeds = st.integers(0, 10_000)
streams = st.sampled_from([TOKEN, DRAFT, ACCEPT])


class Batch:
    """Requests with logits by chance, some of them -inf. Seeds, indices and lengths of all rows differ."""

    def __init__(self, requests, seed):
        self.counts = [count for _, count in requests]
        self.sequences = []
        for row, (one, _) in enumerate(requests):
            sequence = Sequence("a", one, [1] * (3 + row), 2, 99, seed=seed + 7 * row)
            sequence.index = row % 3
            self.sequences.append(sequence)
        drafts = torch.zeros(len(requests), max(self.counts), dtype=torch.long)
        self.lines = step_lines(self.sequences, drafts, self.counts)
        generator = torch.Generator().manual_seed(seed)
        size = len(self.lines.rows), VOCAB
        self.logits = 3 * torch.randn(size, generator=generator)
        self.logits.masked_fill_(torch.rand(size, generator=generator) < 0.2, -INF)
        self.logits[:, 0] = 0.0  # never all of a line

    def each_line(self):
        return enumerate(self.lines.params)


# What is given may be used up.
def choose(logits, lines, stream=TOKEN):
    return choice.choose(logits.clone(), lines, stream)


def warp(logits, lines):
    return choice.warp(logits.clone(), lines)


def probabilities(logits, lines):
    return choice.probabilities(logits.clone(), lines)


batches = st.builds(Batch, requests, seeds)


@given(batches, streams)
def test_greedy_lines_get_the_most_probable_token_whatever_is_beside_them(batch, stream):
    tokens = choose(batch.logits, batch.lines, stream)
    greedy_lines = [line for line, one in batch.each_line() if one.is_greedy]
    assert torch.equal(tokens[greedy_lines], batch.logits[greedy_lines].argmax(dim=1))


@given(batches, streams)
def test_a_draw_is_the_largest_logit_with_the_noise_of_its_place(batch, stream):
    """In the plainest words: all tokens' noise, a line at a time."""
    tokens = choose(batch.logits, batch.lines, stream)
    for line, one in batch.each_line():
        if not one.is_greedy:
            sequence = batch.sequences[batch.lines.rows[line]]
            place = (sequence.seed, sequence.index, len(sequence.token_ids) + batch.lines.offsets[line])
            scores = warp(batch.logits, batch.lines)[line] + gumbel_table(keys([place], stream), VOCAB)[0]
            assert tokens[line] == scores.argmax()


@given(batches, streams)
def test_a_row_alone_gets_the_same_tokens_and_bits(batch, stream):
    tokens, probs = choose(batch.logits, batch.lines, stream), probabilities(batch.logits, batch.lines)
    start = 0
    for row, count in enumerate(batch.counts):
        own = slice(start, start := start + count + 1)
        alone = step_lines([batch.sequences[row]], batch.lines.draft_token_ids[row : row + 1], [count])
        assert torch.equal(choose(batch.logits[own], alone, stream), tokens[own])
        assert torch.equal(probabilities(batch.logits[own], alone), probs[own])


@given(batches, streams)
def test_draws_are_among_the_tokens_that_the_filters_leave(batch, stream):
    tokens = choose(batch.logits, batch.lines, stream)
    assert (warp(batch.logits, batch.lines).gather(1, tokens.unsqueeze(1)) > -INF).all()
    assert (probabilities(batch.logits, batch.lines).gather(1, tokens.unsqueeze(1)) > 0).all()


@given(batches)
def test_probabilities_are_those_of_the_scaled_and_filtered_logits(batch):
    probs = probabilities(batch.logits, batch.lines)
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(len(probs)))
    assert (probs[batch.logits == -INF] == 0).all()
    for line, one in batch.each_line():
        if one.is_greedy:
            assert probs[line].nonzero().tolist() == [[batch.logits[line].argmax()]]
        else:
            scaled = keep_probable(batch.logits[line : line + 1] / one.temperature, [one])
            torch.testing.assert_close(probs[line], scaled[0].softmax(dim=0))


@given(batches)
def test_greedy_lines_are_neither_scaled_nor_filtered(batch):
    greedy_lines = [line for line, one in batch.each_line() if one.is_greedy]
    assert torch.equal(warp(batch.logits, batch.lines)[greedy_lines], batch.logits[greedy_lines])


def many_draws(logits, number=20_000, **fields):
    """How often each token is drawn, over the positions of one row."""
    sequence = Sequence("a", SamplingParams(**fields), [1], 1, 99, seed=5)
    lines = step_lines([sequence], torch.zeros(1, number - 1, dtype=torch.long), [number - 1])
    tokens = choose(torch.tensor(logits).expand(number, -1), lines)
    return tokens.bincount(minlength=len(logits)) / number


def test_draws_have_the_distribution_that_probabilities_tells():
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1]).log().tolist()
    for temperature in (0.5, 1.0, 2.0):
        wanted = (torch.tensor(logits) / temperature).softmax(dim=0)
        torch.testing.assert_close(many_draws(logits, temperature=temperature), wanted, atol=0.015, rtol=0)


def test_a_very_low_temperature_leaves_the_most_probable_token():
    assert many_draws([1.0, 1.01, 0.5, -INF], 1000, temperature=1e-4).tolist() == [0, 1, 0, 0]


def test_equals_are_drawn_equally_often_at_a_very_low_temperature():
    shares = many_draws([1.0, 1.0, 0.9, 1.0], temperature=1e-4)
    torch.testing.assert_close(shares, torch.tensor([1, 1, 0, 1]) / 3, atol=0.015, rtol=0)


def test_a_very_high_temperature_makes_all_possible_tokens_alike():
    shares = many_draws([5.0, -3.0, -INF, 1.0, 0.0], temperature=100.0)
    torch.testing.assert_close(shares, torch.tensor([0.25, 0.25, 0.0, 0.25, 0.25]), atol=0.025, rtol=0)


@pytest.mark.parametrize("fields", [{}, {"temperature": 100.0}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 1e-9}])
def test_what_is_impossible_is_never_drawn(fields):
    assert many_draws([-INF, 0.0, -INF, -1.0, -INF], **fields)[[0, 2, 4]].sum() == 0


def test_temperatures_that_are_taken_for_0_are_greedy():
    assert many_draws([1.0, 1.0 + 1e-6], 500, temperature=9e-6).tolist() == [0, 1]


def test_a_batch_of_greedy_lines_is_left_alone():
    batch = Batch([(greedy(), 2), (greedy(top_k=1), 0)], seed=0)
    assert torch.equal(choose(batch.logits, batch.lines), batch.logits.argmax(dim=1))
    assert torch.equal(warp(batch.logits, batch.lines), batch.logits)


@given(seeds)
def test_candidates_positions_and_streams_draw_differently_from_the_same_logits(seed):
    """A hundred draws from a flat distribution: all equal only if the noise is."""
    batch = Batch([(SamplingParams(), 99)], seed)
    flat = torch.zeros_like(batch.logits)
    first = choose(flat, batch.lines)
    assert len(first.unique()) > 20
    assert (first != choose(flat, batch.lines, DRAFT)).sum() > 50
    batch.sequences[0].index += 1
    assert (first != choose(flat, batch.lines)).sum() > 50
