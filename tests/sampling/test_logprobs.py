"""Log-probabilities against torch's, and the judge's beside the tokens that were kept."""

import pytest
import torch
from greedy import greedy
from hypothesis import given
from hypothesis import strategies as st

from batchspec import SamplingParams
from batchspec.decoding.judge import Judge
from batchspec.drafting.drafter import Draft
from batchspec.request import Sequence
from batchspec.sampling.logprobs import log_softmax, token_logprobs

VOCAB = 7
INF = float("inf")
CPU = torch.device("cpu")

seeds = st.integers(0, 10_000)


def random_logits(num_lines, seed=0):
    """In float64, so that no two are equal."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num_lines, VOCAB, generator=generator, dtype=torch.float64)


def by_hand(logits, token, num_top):
    """The entry of one line, by sorting: (token, log-probability, rank), in its order."""
    logprobs = logits.double().log_softmax(dim=0).tolist()
    falling = sorted(range(VOCAB), key=lambda other: -logprobs[other])
    told = [token, *(other for other in falling[: VOCAB if num_top < 0 else num_top] if other != token)]
    return [(other, pytest.approx(logprobs[other], rel=1e-4), falling.index(other) + 1) for other in told]


def listed(entry):
    return [(token, one.logprob, one.rank) for token, one in entry.items()]


@given(st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(-1, VOCAB + 2)), min_size=1, max_size=6), seeds)
def test_the_token_comes_first_and_then_as_many_as_each_line_asks_for(wanted, seed):
    logits = random_logits(len(wanted), seed)
    tokens, num_top = zip(*wanted, strict=True)
    entries = token_logprobs(log_softmax(logits), torch.tensor(tokens), num_top)
    for line, entry in enumerate(entries):
        assert listed(entry) == by_hand(logits[line], tokens[line], num_top[line])


@pytest.mark.parametrize(
    ("num_top", "size"), [(0, 1), (1, 2), (3, 4), (VOCAB, VOCAB), (VOCAB + 9, VOCAB), (-1, VOCAB)]
)
def test_k_tells_of_the_token_and_of_the_k_most_probable_ones(num_top, size):
    logits = random_logits(1)
    least = logits.argmin(dim=1)
    (entry,) = token_logprobs(log_softmax(logits), least, [num_top])
    assert len(entry) == size
    assert next(iter(entry)) == least


def test_a_token_among_the_most_probable_ones_is_told_once():
    logits = random_logits(1)
    (entry,) = token_logprobs(log_softmax(logits), logits.argmax(dim=1), [3])
    assert [one.rank for one in entry.values()] == [1, 2, 3]


def test_the_token_s_rank_counts_those_as_probable_as_itself():
    logprobs = log_softmax(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]] * 3))
    entries = token_logprobs(logprobs, torch.tensor([0, 2, 4]), [0, 0, 0])
    assert [one.rank for entry in entries for one in entry.values()] == [4, 3, 5]


def test_impossible_tokens_are_told_with_minus_infinity():
    (entry,) = token_logprobs(log_softmax(torch.tensor([[0.0, -INF, 1.0]])), torch.tensor([2]), [-1])
    assert entry[1].logprob == -INF
    assert entry[1].rank == 3


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_log_probabilities_are_float32_or_wider(given, wanted):
    logits = random_logits(3).to(given)
    logprobs = log_softmax(logits)
    assert logprobs.dtype == wanted
    torch.testing.assert_close(logprobs, logits.to(wanted).log_softmax(dim=1))


def judged(rows, logits, method="coupled", mode="raw_logprobs", probs=None):
    """The gains of rows of (parameters, draft), prompt 1 2 and output 3."""
    sequences = [Sequence("a", params, [1, 2, 3], 2, 99, seed=row) for row, (params, _) in enumerate(rows)]
    draft = Draft.from_lists([draft for _, draft in rows], CPU)
    return Judge(method, mode)(logits.clone(), sequences, Draft(draft.token_ids, draft.num_tokens, probs))


def lines_of(rows):
    """The first line of each row, and the end."""
    starts = [0]
    for _, draft in rows:
        starts.append(starts[-1] + len(draft) + 1)
    return starts


asked = st.none() | st.integers(-1, VOCAB)
requests = st.lists(
    st.tuples(
        st.builds(SamplingParams, temperature=st.sampled_from([0.0, 1.0, 3.0]), logprobs=asked),
        st.lists(st.integers(0, VOCAB - 1), max_size=4),
    ),
    min_size=1,
    max_size=4,
)


@given(requests, seeds, st.sampled_from(["coupled", "rejection"]), st.booleans())
def test_each_kept_token_is_told_by_the_line_that_decided_it(rows, seed, method, is_sure):
    """Also with drafts that are mostly right: then many lines of a row are kept."""
    logits = random_logits(lines_of(rows)[-1], seed)
    if is_sure:
        for (_, draft), start in zip(rows, lines_of(rows), strict=False):
            for place, token in enumerate(draft):
                logits[start + place, token] += 3.0
    plain = [(SamplingParams(temperature=params.temperature), draft) for params, draft in rows]
    gains, without = judged(rows, logits, method), judged(plain, logits, method)
    assert [gain.token_ids for gain in gains] == [gain.token_ids for gain in without]
    for (params, _), gain, start in zip(rows, gains, lines_of(rows), strict=False):
        if params.logprobs is None:
            assert gain.logprobs == []
            continue
        assert len(gain.logprobs) == len(gain.token_ids)
        for place, (token, entry) in enumerate(zip(gain.token_ids, gain.logprobs, strict=True)):
            assert listed(entry) == by_hand(logits[start + place], token, params.logprobs)


def favour(*tokens):
    """Logits whose most probable tokens are these, line by line, and then the next ones up."""
    return torch.stack([-((torch.arange(VOCAB) - token) % VOCAB).float() for token in tokens])


@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_rows_with_rejected_accepted_and_no_drafts_are_told_in_line(method):
    rows = [
        (greedy(logprobs=1), [4, 5, 6]),  # the target says 4 0 ...: one accepted
        (greedy(), [1]),
        (greedy(logprobs=0), []),
        (greedy(logprobs=2), [2, 3]),  # accepted in full
    ]
    gains = judged(rows, favour(4, 0, 6, 1, 1, 2, 5, 2, 3, 6), method)
    assert [gain.token_ids for gain in gains] == [[4, 0], [1, 2], [5], [2, 3, 6]]
    assert [[list(entry) for entry in gain.logprobs] for gain in gains] == [
        [[4], [0]],
        [],
        [[5]],
        [[2, 3], [3, 4], [6, 0]],
    ]


def test_a_recovered_token_is_told_with_the_target_s_probability_not_the_residual_s():
    logits = favour(3, 0)
    probs = logits[:1].softmax(dim=1).roll(3, dims=1).unsqueeze(0)
    for seed in range(20):
        sequence = Sequence("a", SamplingParams(logprobs=-1), [1], 1, 99, seed=seed)
        (gain,) = Judge("rejection")(logits.clone(), [sequence], Draft(torch.tensor([[6]]), [1], probs))
        token = gain.token_ids[0]
        assert gain.logprobs[0][token].logprob == pytest.approx(logits[0].log_softmax(dim=0)[token].item())
        if token != 6:
            return
    pytest.fail("no draft token was rejected")


# All of which change the distribution: a token that was there, one that is wanted, the scale, and a cut.
CHANGED = {"presence_penalty": 1.5, "logit_bias": {5: 3.0}, "temperature": 0.5, "top_k": 3}


def changed_by_hand(line, before):
    """The logits of one line, processed as `CHANGED` says."""
    line = line.clone()
    line[5] += 3.0
    line[list(set(before))] -= 1.5
    line /= 0.5
    return line.masked_fill(line < line.sort(descending=True).values[2], -INF)


@pytest.mark.parametrize("method", ["coupled", "rejection"])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("seed", range(5))
def test_raw_is_before_all_changes_and_processed_after_all(method, mode, seed):
    """The last draft token changes the penalties of the line behind it only."""
    rows = [(SamplingParams(logprobs=-1, **CHANGED), [4, 5]), (greedy(), [1]), (greedy(logprobs=2), [2])]
    logits = random_logits(lines_of(rows)[-1], seed)
    logits[0, 4] = 15.0  # accepted
    gains = judged(rows, logits, method, mode)
    assert len(gains[0].token_ids) > 1
    for place, (token, entry) in enumerate(zip(gains[0].token_ids, gains[0].logprobs, strict=True)):
        before = [3, 4, 5][: place + 1]
        wanted = logits[place] if mode == "raw_logprobs" else changed_by_hand(logits[place], before)
        assert next(iter(entry)) == token
        told = torch.tensor([entry[other].logprob for other in range(VOCAB)], dtype=torch.float64)
        torch.testing.assert_close(told, wanted.log_softmax(dim=0))
    first = gains[2].token_ids[0]
    assert gains[1].logprobs == []
    assert listed(gains[2].logprobs[0]) == by_hand(logits[5], first, 2)  # greedy, nothing asked: the same in both


def test_processed_log_probabilities_of_a_greedy_request_know_penalties_but_no_temperature():
    logits = random_logits(1)
    penalised = logits.clone()
    penalised[0, 3] -= 2.0
    params = greedy(logprobs=-1, presence_penalty=2.0, top_k=1)
    (gain,) = judged([(params, [])], logits, mode="processed_logprobs")
    assert listed(gain.logprobs[0]) == by_hand(penalised[0], gain.token_ids[0], -1)


@given(requests, seeds, st.sampled_from(["coupled", "rejection"]))
def test_the_mode_changes_no_token(rows, seed, method):
    logits = random_logits(lines_of(rows)[-1], seed)
    raw, processed = (judged(rows, logits, method, f"{mode}_logprobs") for mode in ("raw", "processed"))
    assert [gain.token_ids for gain in raw] == [gain.token_ids for gain in processed]
