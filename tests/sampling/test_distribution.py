"""Drafts do not change the distribution: three tokens in a row against their joint distribution, computed exactly.

The target is a table of logits by position and previous token, so the probability of each of the 12 ** 3 outputs
is known in closed form. All seeds are fixed, so these tests say the same each time. Wrong rules show what they
notice.
"""

import os
from functools import cache
from itertools import product

import pytest
import torch

from batchspec import SamplingParams
from batchspec.config import EngineConfig
from batchspec.drafting.draft_model import DraftModelDrafter
from batchspec.engine import Engine
from batchspec.request import Sequence
from batchspec.sampling import method, noise, verification
from batchspec.sampling.choice import warp
from batchspec.sampling.lines import Lines
from batchspec.sampling.noise import ACCEPT, DRAFT, TOKEN
from batchspec.sampling.processors import process

VOCAB = 12
LENGTH = 3
"""Output tokens of each request."""
PROMPT = 5
"""The only token of each prompt."""
NUM_DRAFT_TOKENS = 2
MANY = 200_000
NUM_REQUESTS = 200_000 if os.environ.get("BATCHSPEC_FULL") else 20_000
CHANCE = 1e-3
"""Samples of the right distribution have a smaller p-value as rarely as this."""

PREFIXES = [prefix for length in range(LENGTH) for prefix in product(range(VOCAB), repeat=length)]
"""All outputs that another token may follow, in the order of `prefix_index`."""


def random_table(seed):  # [position, previous token, vocabulary]
    return torch.randn(LENGTH, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


TARGET = random_table(0)
DRAFTERS = {
    "agrees much": TARGET + 0.4 * random_table(1),
    "agrees little": 1.5 * random_table(2),
    "has other favourites": -1.5 * TARGET,
    "target": TARGET,
}
FILTERS = {"min_p": 0.05, "top_k": 8, "top_p": 0.9}
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": -0.7}
PARAMS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "filters": FILTERS,
    "repetition": {"repetition_penalty": 2.5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5},
    "everything": {"temperature": 1.3, **FILTERS, **PENALTIES},
}


def params_of(name):
    return SamplingParams(max_tokens=LENGTH, **PARAMS[name])


# --- the exact distribution, in plain Python ---


def next_probabilities(params, prefix):
    """Of the token behind a prefix, as the documentation of `SamplingParams` says."""
    before = [PROMPT, *prefix]
    scores = TARGET[len(prefix), before[-1]].double().tolist()
    for token in range(VOCAB):
        if token in before:
            scores[token] *= params.repetition_penalty ** (-1 if scores[token] > 0 else 1)
        scores[token] -= params.frequency_penalty * prefix.count(token)
        scores[token] -= params.presence_penalty * (token in prefix)
    weights = (torch.tensor(scores, dtype=torch.float64) / params.temperature).softmax(dim=0).tolist()
    falling = sorted(range(VOCAB), key=lambda token: -weights[token])
    falling = [token for token in falling if weights[token] >= params.min_p * weights[falling[0]]]
    falling = falling[: params.top_k or VOCAB]
    mass = sum(weights[token] for token in falling)
    probabilities, passed = [0.0] * VOCAB, 0.0
    for token in falling:
        if passed < params.top_p * mass:
            probabilities[token] = weights[token]
            passed += weights[token]
    return [probability / passed for probability in probabilities]


@cache
def joint_distribution(name):  # [12 ** 3] float64
    params = params_of(name)
    behind = {prefix: next_probabilities(params, prefix) for prefix in PREFIXES}
    return torch.tensor(
        [
            behind[()][first] * behind[(first,)][second] * behind[(first, second)][third]
            for first, second, third in product(range(VOCAB), repeat=LENGTH)
        ],
        dtype=torch.float64,
    )


# --- the test ---


def p_value(tokens, wanted):  # [draws, 3] int64; [12 ** 3]
    """Pearson's chi-square test. Cells of which fewer than 5 are expected are counted together."""
    cells = (tokens * torch.tensor([VOCAB**2, VOCAB, 1])).sum(dim=1)
    observed, expected = cells.bincount(minlength=VOCAB**LENGTH).double(), wanted * len(cells)
    if observed[expected == 0].any():
        return 0.0
    order = expected.argsort()
    observed, expected = observed[order], expected[order]
    num_merged = int((expected < 5).sum())
    while expected[:num_merged].sum() < 5:
        num_merged += 1
    observed, expected = (
        torch.cat([counts[:num_merged].sum().unsqueeze(0), counts[num_merged:]]) for counts in (observed, expected)
    )
    return chi_square_tail(((observed - expected) ** 2 / expected).sum(), len(expected) - 1)


def chi_square_tail(statistic, freedom):
    half = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
    return torch.special.gammaincc(half[0], half[1]).item()


@pytest.mark.parametrize(("freedom", "statistic"), [(1, 10.828), (10, 29.588), (100, 149.449), (1000, 1143.917)])
def test_the_tail_of_chi_square_is_that_of_the_printed_tables(freedom, statistic):
    assert chi_square_tail(statistic, freedom) == pytest.approx(0.001, rel=2e-3)


def test_samples_of_a_distribution_pass_as_often_as_they_should():
    wanted = joint_distribution("everything")
    generator = torch.Generator().manual_seed(0)
    passed = 0
    for _ in range(100):
        cells = torch.multinomial(wanted, 20_000, replacement=True, generator=generator)
        tokens = torch.stack([cells // VOCAB**2, cells // VOCAB % VOCAB, cells % VOCAB], dim=1)
        passed += p_value(tokens, wanted) > 0.1
    assert 80 <= passed <= 98


# --- tensors only: all rows at once ---


@cache
def noise_keys():
    """By stream, `[MANY, LENGTH]`."""
    places = [(seed, 0, position) for seed in range(MANY) for position in range(LENGTH)]
    return {stream: noise.keys(places, stream).view(MANY, LENGTH) for stream in (TOKEN, DRAFT, ACCEPT)}


def warped(table, name):  # [prefixes, vocabulary]
    """Logits behind each prefix by the package's processors, temperature and filters. Each prefix is a draft."""
    sequences = [Sequence("a", params_of(name), [PROMPT], 1, 99)] * len(PREFIXES)
    drafts = torch.tensor([[*prefix, 0, 0][: LENGTH - 1] for prefix in PREFIXES])
    lines = Lines(sequences, drafts, list(range(len(PREFIXES))), list(map(len, PREFIXES)))
    logits = torch.stack([table[len(prefix), (PROMPT, *prefix)[-1]] for prefix in PREFIXES])
    return warp(process(logits, lines), lines)


def prefix_index(text, length):  # [rows, LENGTH], [rows] int64; [rows] int64
    index = torch.zeros_like(length)
    for place in range(LENGTH - 1):
        index = torch.where(length > place, VOCAB * index + text[:, place] + 1, index)
    return index


class Rounds:
    """Rows that draft and are verified until each has its three tokens."""

    def __init__(self, sampling_method, name, drafter, is_certain=False):
        self.is_coupled = sampling_method == "coupled"
        self.target, self.drafter = warped(TARGET, name), warped(DRAFTERS[drafter], name)  # [prefixes, vocabulary]
        self.target_probs, self.drafter_probs = self.target.softmax(dim=1), self.drafter.softmax(dim=1)
        self.is_certain = is_certain
        """Drafts are the drafter's favourites, and no distribution is told."""

    def run(self, num_rows=MANY):  # [num_rows, LENGTH]
        tokens = torch.zeros(num_rows, LENGTH, dtype=torch.long)
        done = torch.zeros(num_rows, dtype=torch.long)
        while (rows := (done < LENGTH).nonzero().squeeze(1)).numel():
            text, start = tokens[rows], done[rows]
            num_drafts = (LENGTH - 1 - start).clamp(max=NUM_DRAFT_TOKENS)
            drafts, probs = self._draft(rows, text, start, num_drafts)
            verdict = self._verify(rows, text, start, num_drafts, drafts, probs)
            end = start + verdict.num_accepted
            tokens[rows] = text.scatter_(1, end.unsqueeze(1), verdict.next_token.unsqueeze(1))
            done[rows] = end + 1
        return tokens

    def _draft(self, rows, text, start, num_drafts):
        """Notes the drafts in `text` too."""
        drafts = torch.zeros(len(rows), int(num_drafts.max()), dtype=torch.long)
        probs = torch.zeros(*drafts.shape, VOCAB)
        for column in range(drafts.shape[1]):
            places = (num_drafts > column).nonzero().squeeze(1)
            position = start[places] + column
            prefix = prefix_index(text[places], position)
            if self.is_certain:
                token = self.drafter[prefix].argmax(dim=1)
            else:
                stream = TOKEN if self.is_coupled else DRAFT
                token = noise.draw(self.drafter[prefix], noise_keys()[stream][rows[places], position])
            drafts[places, column] = text[places, position] = token
            probs[places, column] = self.drafter_probs[prefix]
        return drafts, None if self.is_certain else probs

    def _verify(self, rows, text, start, num_drafts, drafts, probs):
        num_lines = num_drafts + 1
        owner = torch.repeat_interleave(torch.arange(len(rows)), num_lines)
        offset = torch.arange(len(owner)) - (num_lines.cumsum(0) - num_lines)[owner]
        position = start[owner] + offset
        prefix = prefix_index(text[owner], position)
        token_keys, accept_keys = (noise_keys()[stream][rows[owner], position] for stream in (TOKEN, ACCEPT))
        if self.is_coupled:
            return verification.verify_equal(noise.draw(self.target[prefix], token_keys), drafts, num_drafts)
        accept_noise = noise.uniform(accept_keys)
        return verification.verify_by_rejection(
            self.target_probs[prefix], drafts, num_drafts, probs, accept_noise, token_keys
        )


def rounds_p_value(sampling_method, name, drafter, is_certain=False):
    return p_value(Rounds(sampling_method, name, drafter, is_certain).run(), joint_distribution(name))


@pytest.mark.parametrize("name", ["plain", "filters", "everything"])
def test_coupled_drafts_leave_the_target_s_distribution(name):
    assert rounds_p_value("coupled", name, "agrees little") > CHANCE


@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("is_certain", [False, True])
def test_coupled_drafts_leave_every_token_whoever_drafts(name, drafter, is_certain):
    """So the distribution with one drafter is that with all, and that without."""
    num_rows = MANY // 20
    without_drafts = Rounds("coupled", name, "target").run(num_rows)
    assert torch.equal(Rounds("coupled", name, drafter, is_certain).run(num_rows), without_drafts)


@pytest.mark.parametrize("name", PARAMS)
def test_rejection_leaves_the_target_s_distribution(name):
    assert rounds_p_value("rejection", name, "agrees little") > CHANCE


@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("drafter", ["agrees much", "has other favourites"])
def test_rejection_leaves_it_whoever_drafts(name, drafter):
    assert rounds_p_value("rejection", name, drafter) > CHANCE


@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("drafter", ["agrees little", "has other favourites"])
def test_rejection_leaves_it_with_drafts_that_are_certain(name, drafter):
    assert rounds_p_value("rejection", name, drafter, is_certain=True) > CHANCE


# --- the whole engine ---


class TableRunner:
    """A model that is a table. The token in slot 0 is the prompt; what a token's line says needs no cache."""

    device = torch.device("cpu")
    max_length = 1 + LENGTH

    def __init__(self, table, num_rows):
        self.table = table
        self.num_rows = num_rows

    def forward(self, step, token_ids, keep=None):
        logits = self.table[step.slots, token_ids]
        return logits if keep is None else logits[keep]

    def release_row(self, row, last, last_length):
        pass


def engine_tokens(sampling_method, names, drafter, num_requests):
    """By name of the parameters, `[requests, LENGTH]`; requests of all names are in work together."""
    config = EngineConfig(
        max_model_len=TableRunner.max_length,
        max_num_seqs=512,
        num_speculative_tokens=NUM_DRAFT_TOKENS,
        sampling_method=sampling_method,
        seed=1,
    )
    draft_runner = TableRunner(DRAFTERS[drafter], config.num_rows)
    draw = method.SAMPLING_METHODS[sampling_method].draw
    engine = Engine(
        TableRunner(TARGET, config.num_rows),
        DraftModelDrafter(draft_runner, VOCAB, VOCAB, draw),
        config,
        vocab_size=VOCAB,
    )
    requests = {str(serial): names[serial % len(names)] for serial in range(num_requests)}
    waiting, tokens = list(requests), {name: [] for name in names}
    while waiting or engine.has_unfinished_requests():
        while waiting and len(engine.scheduler.waiting) < config.max_num_seqs:
            request_id = waiting.pop()
            engine.add_request(request_id, [PROMPT], params_of(requests[request_id]))
        for output in engine.step():
            if output.finished:
                tokens[requests[output.request_id]].append(output.outputs[0].token_ids)
    return {name: torch.tensor(outputs) for name, outputs in tokens.items()}


def engine_p_values(sampling_method, names, drafter, num_requests=NUM_REQUESTS):
    tokens = engine_tokens(sampling_method, names, drafter, num_requests)
    return [p_value(tokens[name], joint_distribution(name)) for name in names]


@pytest.mark.parametrize("sampling_method", ["coupled", "rejection"])
def test_the_engine_leaves_the_target_s_distribution(sampling_method):
    """Of two kinds of requests that are in each batch together."""
    assert min(engine_p_values(sampling_method, ["plain", "everything"], "agrees little")) > CHANCE


# --- rules that are wrong: each in the package and in the tensors above ---


def the_rule_as_it_is(patch):
    pass


def one_hot(token_ids, like):
    return torch.zeros_like(like).scatter(1, token_ids, 1.0)


def recover_from_the_target(patch):
    patch.setattr(verification, "residual", lambda p, q: p)
    patch.setattr(verification, "residual_of_certain", lambda p, token_ids: p)


def recover_from_the_distance(patch):
    patch.setattr(verification, "residual", lambda p, q: (p - q).abs())
    patch.setattr(verification, "residual_of_certain", lambda p, token_ids: (p - one_hot(token_ids, p)).abs())


def accept_always(patch):
    for module in (noise, method):
        patch.setattr(module, "uniform", lambda keys: torch.zeros(keys.shape))


def recover_with_the_noise_of_the_draft(patch):
    patch.setattr(method, "DRAFT", TOKEN)
    patch.setitem(noise_keys(), DRAFT, noise_keys()[TOKEN])


def accept_with_the_noise_of_a_token(patch):
    patch.setattr(method, "ACCEPT", TOKEN)
    patch.setitem(noise_keys(), ACCEPT, noise_keys()[TOKEN])


def draw_all_positions_with_the_same_noise(patch):
    patch.setitem(noise_keys(), TOKEN, noise_keys()[TOKEN][:, :1].expand(-1, LENGTH))


RULES = {
    "rejection": [
        the_rule_as_it_is,
        recover_from_the_target,
        recover_from_the_distance,
        accept_always,
        recover_with_the_noise_of_the_draft,
        accept_with_the_noise_of_a_token,
        draw_all_positions_with_the_same_noise,
    ],
    "coupled": [the_rule_as_it_is, draw_all_positions_with_the_same_noise],
}


@pytest.mark.parametrize(
    ("sampling_method", "rule"), [(name, rule) for name, rules in RULES.items() for rule in rules]
)
def test_wrong_rules_are_told_from_the_right_one(sampling_method, rule, monkeypatch):
    rule(monkeypatch)
    is_right = rounds_p_value(sampling_method, "plain", "agrees little") > CHANCE
    assert is_right == (rule is the_rule_as_it_is)


@pytest.mark.parametrize("rule", [recover_from_the_target, recover_from_the_distance, accept_always])
def test_wrong_rules_with_drafts_that_are_certain_are_told_from_the_right_one(rule, monkeypatch):
    rule(monkeypatch)
    assert rounds_p_value("rejection", "plain", "agrees little", is_certain=True) < CHANCE


@pytest.mark.parametrize(
    ("rule", "share"),
    [
        (recover_from_the_target, 1 / 4),
        (recover_from_the_distance, 1 / 4),
        (accept_always, 1 / 4),
        (accept_with_the_noise_of_a_token, 1 / 2),
        (recover_with_the_noise_of_the_draft, 1),
    ],
)
def test_wrong_rules_in_the_engine_are_told_from_the_right_one(rule, share, monkeypatch):
    """By a share of the requests that the right one passes with: most of them are far off."""
    rule(monkeypatch)
    (p,) = engine_p_values("rejection", ["plain"], "agrees little", int(share * NUM_REQUESTS))
    assert p < CHANCE
