"""Each processor against transformers' of the same name, line by line, over ragged rows packed together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from batchspec import SamplingParams
from batchspec.request import Sequence
from batchspec.sampling.lines import column_lines, step_lines
from batchspec.sampling.processors import (
    add_bias,
    allow_only,
    apply_penalties,
    call_functions,
    forbid_bad_words,
    forbid_ends,
    process,
)

VOCAB = 9
END, STOP = 0, 3
INF = float("inf")


class Batch:
    """Rows of (prompt, output, draft, parameters), packed. Chance stands behind each draft."""

    def __init__(self, rows, seed=0, spare_columns=0):
        generator = torch.Generator().manual_seed(seed)
        longest = max(len(draft) for _, _, draft, _ in rows) + spare_columns
        self.rows = rows
        self.sequences = [
            Sequence("a", params, prompt + output, len(prompt), 99, eos_token_ids=frozenset({END}))
            for prompt, output, _, params in rows
        ]
        self.drafts = torch.randint(VOCAB, (len(rows), longest), generator=generator)
        for row, (_, _, draft, _) in enumerate(rows):
            self.drafts[row, : len(draft)] = torch.tensor(draft, dtype=torch.long)
        self.lines = step_lines(self.sequences, self.drafts, [len(draft) for _, _, draft, _ in rows])
        self.places = [
            (prompt, output + draft[:offset], params)
            for prompt, output, draft, params in rows
            for offset in range(len(draft) + 1)
        ]
        """For each line what it may see: the prompt, the output and draft tokens before it, the parameters."""
        self.logits = torch.randn(len(self.places), VOCAB, generator=generator, dtype=torch.float64)

    def __repr__(self):
        return f"Batch({self.rows}, drafts={self.drafts.tolist()})"


tokens = st.integers(0, VOCAB - 1)
texts = st.lists(tokens, max_size=6)
penalties = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 4.0]),
        "frequency_penalty": st.sampled_from([-1.5, 0.0, 0.3]),
        "presence_penalty": st.sampled_from([-0.4, 0.0, 2.0]),
    }
)
allowed = st.none() | st.lists(tokens, min_size=1, max_size=5)
bad_words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4)
biases = st.none() | st.dictionaries(tokens, st.integers(-400, 400).map(lambda quarters: quarters / 4), max_size=4)


def params_of(**fields):
    return st.builds(SamplingParams, max_tokens=st.none(), **fields)


def batches(params):
    row = st.tuples(texts.filter(bool), texts, st.lists(tokens, max_size=4), params)
    return st.builds(Batch, st.lists(row, min_size=1, max_size=5), st.integers(0, 99), st.integers(0, 2))


def processed(batch, processor=process):
    """A processor changes logits in place; `process` gives them back, perhaps in another type."""
    logits = batch.logits.clone()
    changed = processor(logits, batch.lines)
    return logits if changed is None else changed


def assert_is_line_by_line(batch, processor, reference):
    """`reference(prompt, output before, parameters, logits [1, vocabulary])` for each line alone."""
    places = zip(batch.places, batch.logits.split(1), strict=True)
    wanted = torch.cat([reference(*place, logits.clone()) for place, logits in places])
    torch.testing.assert_close(processed(batch, processor), wanted, rtol=1e-12, atol=1e-12)


@given(batches(params_of(repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 4.0]))))
def test_repetition_penalty_is_that_of_transformers(batch):
    def reference(prompt, before, params, logits):
        processor = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        return processor(torch.tensor([prompt + before]), logits)

    assert_is_line_by_line(batch, apply_penalties, reference)


@given(batches(params_of(min_tokens=st.integers(0, 9), stop_token_ids=st.sampled_from([(), (STOP,)]))))
def test_min_tokens_is_that_of_transformers(batch):
    def reference(prompt, before, params, logits):
        ends = [END, *params.stop_ids]
        processor = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ends)
        return processor(torch.tensor([prompt + before]), logits)

    assert_is_line_by_line(batch, forbid_ends, reference)


@given(batches(params_of(bad_words=bad_words)))
def test_bad_words_are_those_of_transformers_in_the_output(batch):
    def reference(prompt, before, params, logits):
        if not params.bad_words:
            return logits
        return NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(
            torch.tensor([before], dtype=torch.long), logits
        )

    assert_is_line_by_line(batch, forbid_bad_words, reference)


@given(batches(params_of(logit_bias=biases)))
def test_logit_bias_is_that_of_transformers(batch):
    def reference(prompt, before, params, logits):
        if not params.logit_bias:
            return logits
        processor = SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()})
        return processor(torch.tensor([prompt + before]), logits)

    assert_is_line_by_line(batch, add_bias, reference)


@given(batches(params_of(allowed_token_ids=allowed)))
def test_allowed_tokens_are_those_of_transformers(batch):
    def reference(prompt, before, params, logits):
        if not params.allowed_ids:
            return logits
        processor = PrefixConstrainedLogitsProcessor(lambda batch, text: list(params.allowed_ids), num_beams=1)
        return processor(torch.tensor([prompt + before]), logits)

    assert_is_line_by_line(batch, allow_only, reference)


def penalise(prompt, before, params, logits):
    """All three penalties, in plain Python."""
    values = logits[0].tolist()
    for token in range(VOCAB):
        if token in prompt + before:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= params.frequency_penalty * before.count(token)
        values[token] -= params.presence_penalty * (token in before)
    return torch.tensor([values], dtype=logits.dtype)


@given(batches(st.builds(lambda fields: SamplingParams(**fields), penalties)))
def test_penalties_are_those_of_a_plain_loop(batch):
    assert_is_line_by_line(batch, apply_penalties, penalise)


def add_in_place(before, logits):
    return logits.add_(torch.arange(VOCAB) * (0.5 + len(before)))


def scale_anew(before, logits):
    return logits * (2.0 + sum(before))


def praise(before, logits):
    logits[STOP] = logits[END] = 10.0
    return logits


def everything(prompt, before, params, logits):
    """All processors for one line, in the documented order."""
    for function in params.logits_processors:
        logits = function(list(before), logits[0]).unsqueeze(0)

    def is_forbidden(token):
        is_bad = any(
            word[-1] == token and before[len(before) - len(word) + 1 :] == list(word[:-1])
            for word in params.bad_words
            if len(word) <= len(before) + 1
        )
        is_early = len(before) < params.min_tokens and token in (END, *params.stop_ids)
        return is_bad or is_early or (params.allowed_ids and token not in params.allowed_ids)

    for token in range(VOCAB):
        logits[0, token] = -INF if is_forbidden(token) else logits[0, token]
        logits[0, token] += (params.logit_bias or {}).get(token, 0.0)
    return penalise(prompt, before, params, logits)


anything = st.builds(
    lambda fields, more: SamplingParams(max_tokens=None, **fields, **more),
    penalties,
    st.fixed_dictionaries(
        {
            "allowed_token_ids": allowed,
            "bad_words": bad_words,
            "logit_bias": biases,
            "min_tokens": st.integers(0, 9),
            "stop_token_ids": st.sampled_from([(), (STOP,)]),
            "logits_processors": st.lists(st.sampled_from([add_in_place, scale_anew, praise]), max_size=2),
        }
    ),
)


@given(batches(anything))
def test_all_together_are_a_plain_loop_in_the_documented_order(batch):
    assert_is_line_by_line(batch, process, everything)


@given(batches(anything))
def test_a_row_alone_gets_the_same_bits(batch):
    together = processed(batch).split([len(draft) + 1 for _, _, draft, _ in batch.rows])
    start = 0
    for row, rows_lines in zip(batch.rows, together, strict=True):
        alone = Batch([row])
        alone.logits = batch.logits[start : start + len(rows_lines)]
        start += len(rows_lines)
        assert torch.equal(processed(alone), rows_lines)


@given(batches(anything))
def test_what_stands_behind_a_draft_makes_no_difference(batch):
    other = Batch(batch.rows, seed=1000, spare_columns=3)
    other.logits = batch.logits
    assert torch.equal(processed(other), processed(batch))


@given(batches(anything))
def test_a_drafter_s_lines_of_one_column_get_the_bits_of_the_whole_step(batch):
    """As a draft model asks: only some rows, each at the same offset."""
    whole = processed(batch)
    for column in range(batch.drafts.shape[1] + 1):
        chosen = [line for line, offset in enumerate(batch.lines.offsets) if offset == column]
        if chosen:
            rows = [batch.lines.rows[line] for line in chosen]
            lines = column_lines(batch.sequences, batch.drafts, rows, column)
            assert torch.equal(process(batch.logits[chosen], lines), whole[chosen])


def one_row(draft=(5, 6), **fields):
    return Batch([([1, 2], [4, 2], list(draft), SamplingParams(**fields))])


def test_functions_get_the_output_before_each_position_and_its_logits():
    seen = []

    def watch(token_ids, logits):
        seen.append((token_ids, logits.clone()))
        return logits

    batch = one_row(logits_processors=[watch])
    process(batch.logits.clone(), batch.lines)
    assert [token_ids for token_ids, _ in seen] == [[4, 2], [4, 2, 5], [4, 2, 5, 6]]
    assert torch.equal(torch.stack([logits for _, logits in seen]), batch.logits)


def test_functions_are_called_in_their_order_each_with_what_the_former_left():
    forward, backward = (
        processed(one_row(logits_processors=functions))
        for functions in ([add_in_place, scale_anew], [scale_anew, add_in_place])
    )
    logits = one_row().logits[0]
    ramp = torch.arange(VOCAB)
    assert torch.equal(forward[0], (logits + ramp * 2.5) * 8.0)
    assert torch.equal(backward[0], logits * 8.0 + ramp * 2.5)


def test_functions_may_not_change_tokens():
    def swallow(token_ids, logits):
        token_ids.clear()
        return logits

    batch = one_row(logits_processors=[swallow, add_in_place])
    process(batch.logits, batch.lines)
    assert batch.sequences[0].token_ids == [1, 2, 4, 2]
    assert batch.drafts.tolist() == [[5, 6]]


@pytest.mark.parametrize("fields", [{"allowed_token_ids": [1]}, {"bad_words": [[END]]}, {"min_tokens": 9}])
def test_what_a_function_praises_may_still_be_forbidden(fields):
    batch = one_row(logits_processors=[praise], max_tokens=None, **fields)
    assert (processed(batch)[:, END] == -INF).all()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda token_ids, logits: None,
        lambda token_ids, logits: logits.tolist(),
        lambda token_ids, logits: logits.unsqueeze(0),
        lambda token_ids, logits: logits[:-1],
        lambda token_ids, logits: logits[:1],
        lambda token_ids, logits: logits.sum(),
    ],
    ids=["nothing", "list", "two dimensions", "too short", "one token", "number"],
)
def test_a_function_that_gives_back_no_logits_is_refused(wrong):
    batch = one_row(logits_processors=[wrong])
    with pytest.raises(ValueError, match="logits_processors must return logits of shape"):
        call_functions(batch.logits, batch.lines)


def test_bad_words_do_not_begin_in_the_prompt():
    batch = one_row(draft=(), bad_words=[[2, 4, 2, 7], [4, 2, 8]])
    assert (processed(batch)[0] == -INF).nonzero().flatten().tolist() == [8]


def test_a_bias_does_not_bring_a_forbidden_token_back():
    batch = one_row(allowed_token_ids=[1], logit_bias={2: 100.0}, frequency_penalty=-2.0)
    assert (processed(batch)[:, 2] == -INF).all()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_logits_are_widened_to_float32_before_anything_is_changed(given, wanted):
    """In bfloat16 the penalty would be rounded away."""
    batch = one_row(presence_penalty=0.001)
    batch.logits = torch.full_like(batch.logits, 8.0).to(given)
    changed = processed(batch)
    assert changed.dtype == wanted
    assert changed[0, 4].item() == pytest.approx(7.999, abs=1e-5)


def test_requests_that_ask_for_nothing_keep_their_bits():
    batch = one_row()
    assert torch.equal(processed(batch), batch.logits)
