"""Noise is a function of its place, and looks like chance."""

import math
import random
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.sampling import noise
from batchspec.sampling.noise import ACCEPT, DRAFT, TOKEN, draw, gumbel, gumbel_table, keys, request_seed, uniform

MANY = 100_000
VOCAB = 50
FAR = 4 / MANY**0.5
"""Four standard errors of a correlation of independent values."""

seeds = st.integers(-(2**63), 2**64 - 1)
places = st.tuples(seeds, st.integers(0, 5), st.integers(0, 2**20))
streams = st.sampled_from([TOKEN, DRAFT, ACCEPT])


@cache
def many_keys(stream=TOKEN, seed=0, index=0, start=0):
    return keys([(seed, index, start + place) for place in range(MANY)], stream)


def numbers(values):
    """As 64 unsigned bits each."""
    return [value % 2**64 for value in values.tolist()]


def distance(values, distribution):
    """Kolmogorov's and Smirnov's, times the root of the number of values; above 1.95 once in a thousand times."""
    wanted = distribution(values.double().sort().values)
    steps = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    return max((wanted - steps[:-1]).max(), (steps[1:] - wanted).max()).item() * len(values) ** 0.5


def correlation(first, second):
    return torch.corrcoef(torch.stack([first.double(), second.double()]))[0, 1].item()


def key_that_mixes_to(bits):
    """A key whose noise is made of these 64 bits: SplitMix64's mixing, backwards."""
    for places, factor in ((31, noise.SECOND), (27, noise.FIRST), (30, 1)):
        unshifted = bits
        for _ in range(64 // places):
            unshifted = bits ^ (unshifted >> places)
        bits = unshifted * pow(factor, -1, 2**64) % 2**64
    return keys([], TOKEN).new_tensor([bits - 2**64 if bits >> 63 else bits])


@given(st.lists(places, min_size=1, max_size=5), streams)
def test_the_same_place_has_the_same_noise(some, stream):
    first, again = keys(some, stream), keys(some[::-1], stream).flip(0)
    assert torch.equal(first, again)
    assert torch.equal(gumbel_table(first, VOCAB), gumbel_table(again, VOCAB))
    assert torch.equal(uniform(first), uniform(again))


@given(st.lists(places, min_size=1, max_size=5), st.lists(st.integers(0, 9999), min_size=1, max_size=5))
def test_the_noise_of_some_tokens_is_that_of_the_table(some, token_ids):
    table = gumbel_table(keys(some, TOKEN), 10_000)
    for row, key in enumerate(keys(some, TOKEN)):
        assert torch.equal(gumbel(key, torch.tensor(token_ids)), table[row, token_ids])


@pytest.mark.parametrize("block", [1, 100, 10**6])
def test_tables_are_the_same_however_they_are_cut(block, monkeypatch):
    some = many_keys()[:37]
    whole = gumbel_table(some, VOCAB)
    monkeypatch.setattr(noise, "BLOCK", block)
    assert torch.equal(gumbel_table(some, VOCAB), whole)
    assert torch.equal(gumbel_table(some, VOCAB + 9)[:, :VOCAB], whole)


def test_no_generator_is_asked_or_moved():
    def all_noise():
        return gumbel_table(keys([(1, 2, 3)], DRAFT), VOCAB), uniform(keys([(1, 2, 3)], ACCEPT))

    torch.manual_seed(0)
    random.seed(0)
    states = torch.get_rng_state(), random.getstate()
    first = all_noise()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    torch.manual_seed(1)
    random.seed(1)
    assert all(map(torch.equal, first, all_noise()))


@given(places, st.integers(0, 2), st.integers(1, 1000), streams)
def test_another_seed_index_or_position_has_other_noise(place, changed, by, stream):
    other = list(place)
    other[changed] = other[changed] - by if other[changed] >= by else other[changed] + by
    some = keys([place, tuple(other)], stream)
    assert some[0] != some[1]
    table = gumbel_table(some, VOCAB)
    assert (table[0] == table[1]).sum() < 3  # by chance, two may be equal in float32


def test_seed_index_position_and_stream_do_not_stand_for_each_other():
    """No two places of a small neighbourhood share a key."""
    some = [(seed, index, position) for seed in range(20) for index in range(20) for position in range(20)]
    all_keys = torch.cat([keys(some, stream) for stream in (TOKEN, DRAFT, ACCEPT)])
    assert len(all_keys.unique()) == len(all_keys) == 3 * 20**3


def test_tokens_have_different_noise():
    table = gumbel_table(keys([(0, 0, 0)], TOKEN), 5000)
    assert len(table.unique()) > 4990  # float32 has some equals


def test_requests_without_a_seed_get_different_ones():
    given = {request_seed(engine_seed, serial) for engine_seed in range(100) for serial in range(100)}
    assert len(given) == 100**2
    assert all(0 <= seed < 2**64 for seed in given)


def test_the_mixing_is_splitmix64():
    """Published outputs: of seed 0 (Vigna's splitmix64.c) and of seed 1234567 (Rosetta Code)."""
    published = {
        0: (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F),
        1234567: (6457827717110365317, 3203168211198807973, 9817491932198370423),
    }
    for seed, outputs in published.items():
        wanted = torch.tensor([output / 2**64 for output in outputs], dtype=torch.float64)
        said = gumbel(torch.tensor([seed]), torch.tensor([1, 2, 3])).double()
        torch.testing.assert_close(said, -(-(-wanted).log1p()).log(), rtol=1e-5, atol=1e-6)


def test_the_noise_is_the_one_that_was_released():
    """Another function would give other tokens for the same seeds: that must not happen unnoticed."""
    some = keys([(0, 0, 0), (42, 1, 7), (2**64 - 1, 0, 1000)], TOKEN)
    assert numbers(some) == [0x2130748AAAC80268, 0xA77430859DA35BF5, 0x82A5EFF15EA1CD14]
    assert numbers(keys([(42, 1, 7)], DRAFT)) == [0xDF52209A9646E845]
    assert uniform(some).tolist() == pytest.approx([0.16619372, 0.44519368, 0.47351962], rel=1e-6)
    assert gumbel_table(some[1:2], 3)[0].tolist() == pytest.approx(
        [0.52909791, -0.62722278, -0.02376896], rel=1e-5
    )
    assert request_seed(0, 1) == 0x64DAFFFE9B0D8C1C


def test_the_noise_of_a_token_is_gumbel_over_positions():
    values = gumbel(many_keys(), torch.tensor(7))
    assert distance(values, lambda x: (-(-x).exp()).exp()) < 1.95
    assert values.mean().item() == pytest.approx(0.5772, abs=4 * (math.pi**2 / 6 / MANY) ** 0.5)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)


def test_the_noise_of_a_position_is_gumbel_over_tokens():
    values = gumbel_table(keys([(0, 0, 0)], TOKEN), MANY)[0]
    assert distance(values, lambda x: (-(-x).exp()).exp()) < 1.95


@pytest.mark.parametrize("stream", [TOKEN, DRAFT, ACCEPT])
def test_uniform_noise_is_uniform_and_never_0_or_1(stream):
    values = uniform(many_keys(stream))
    assert distance(values, lambda x: x) < 1.95
    assert values.min() > 0
    assert values.max() < 1


def test_uniform_noise_over_seeds_is_uniform():
    """As of many requests at the same position: what decides about a batch."""
    assert distance(uniform(keys([(seed, 0, 5) for seed in range(MANY)], ACCEPT)), lambda x: x) < 1.95


@pytest.mark.parametrize("lag", [1, 2, 3, 16])
def test_neighbouring_positions_and_tokens_are_independent(lag):
    over_positions = gumbel(many_keys(), torch.tensor(7))
    over_tokens = gumbel_table(keys([(0, 0, 0)], TOKEN), MANY)[0]
    assert abs(correlation(over_positions[lag:], over_positions[:-lag])) < FAR
    assert abs(correlation(over_tokens[lag:], over_tokens[:-lag])) < FAR


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"seed": 2**32}, {"index": 1}, {"start": 1}, {"stream": DRAFT}, {"stream": ACCEPT}],
    ids=str,
)
def test_neighbouring_seeds_indices_positions_and_streams_are_independent(other):
    here, there = many_keys(), many_keys(**other)
    assert abs(correlation(uniform(here), uniform(there))) < FAR
    for token in range(3):
        noises = [gumbel(some, torch.tensor(token)) for some in (here, there)]
        assert abs(correlation(*noises)) < FAR


def test_uniform_and_gumbel_noise_of_different_streams_are_independent():
    accept = uniform(many_keys(ACCEPT))
    for token in range(4):
        for stream in (TOKEN, DRAFT):
            assert abs(correlation(accept, gumbel(many_keys(stream), torch.tensor(token)))) < FAR


def test_the_largest_noise_is_at_each_token_equally_often():
    wins = gumbel_table(many_keys(), VOCAB).argmax(dim=1).bincount(minlength=VOCAB).double()
    wanted = MANY / VOCAB
    assert (
        (wins - wanted) ** 2 / wanted
    ).sum() < 86  # chi-square of 49 degrees of freedom: once in a thousand times


@pytest.mark.parametrize("bits", [0, 1, 2, 2**64 - 1, 2**64 - 2, 2**64 - 2**39, 2**63, 2**63 - 1])
def test_noise_is_finite_and_uniform_noise_inside_at_the_ends_of_the_range(bits):
    key = key_that_mixes_to(bits)
    assert 0 < uniform(key).item() < 1
    assert uniform(key).item() == pytest.approx(bits / 2**64, abs=1e-7)
    assert torch.isfinite(gumbel(key, torch.tensor([0]))).all()


@given(places, streams)
def test_all_noise_is_finite(place, stream):
    assert torch.isfinite(gumbel_table(keys([place], stream), VOCAB)).all()


def test_a_short_key_list_is_no_special_case():
    assert gumbel_table(keys([], TOKEN), VOCAB).shape == (0, VOCAB)
    assert uniform(keys([], TOKEN)).shape == (0,)


@given(st.lists(places, min_size=1, max_size=4), st.integers(0, 9999), st.sampled_from([0.0, 0.5, 0.9, 0.98]))
def test_draws_add_the_table_however_many_tokens_are_possible(some, seed, hidden):
    """Where few are possible, only their noise is computed."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(some), VOCAB, generator=generator)
    is_hidden = torch.rand(scores.shape, generator=generator) < hidden
    is_hidden[:, seed % VOCAB] = False
    scores.masked_fill_(is_hidden, -torch.inf)
    wanted = (scores + gumbel_table(keys(some, TOKEN), VOCAB)).argmax(dim=1)
    assert torch.equal(draw(scores, keys(some, TOKEN)), wanted)


def test_the_default_dtype_of_the_process_changes_no_noise():
    places = keys([(1, 0, 5)], 0)
    wanted = gumbel_table(places, 50)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(gumbel_table(places, 50), wanted)
    finally:
        torch.set_default_dtype(torch.float32)
