"""The ragged tensor problem, one fault at a time.

Each mutant breaks one thing that published batch implementations break, in EQSPEC's path through the package.
They show what the equality tests are worth: `test_mutants.py` asserts that each one is killed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from batchspec import engine
from batchspec.decoding import judge
from batchspec.decoding import round as round_
from batchspec.layout import padded
from batchspec.models import padded_cache, padded_runner
from batchspec.sampling import method
from batchspec.sampling.verification import Verdict, verify_equal

END = 0
"""The end token, the padding token, and what stands behind a short draft: one and the same, as in many models."""


def stale_position_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have moved, and positions are still counted from the padding of the step before."""

    def lay_out(step, stale):
        layout = padded.lay_out(step)
        moved = torch.tensor(padded.left_padding(step.lengths)) - torch.tensor(stale)
        return replace(layout, position_ids=(layout.position_ids + moved.unsqueeze(1)).clamp(0, 63))

    _with_padding_of_the_step_before(monkeypatch, lay_out)


def mask_not_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have moved, and the mask still hides the padding of the step before."""

    def lay_out(step, stale):
        layout = padded.lay_out(step)
        hidden = torch.tensor(stale).unsqueeze(1).clamp(max=max(step.lengths))
        return replace(layout, mask=(torch.arange(layout.mask.shape[1]) >= hidden).long())

    _with_padding_of_the_step_before(monkeypatch, lay_out)


def _with_padding_of_the_step_before(monkeypatch, lay_out) -> None:
    """Let each model lay out a step with the padding that the same rows had in its step before."""
    before: dict[tuple, list[int]] = {}
    call = padded_runner.PaddedModel.__call__

    def remember(model, step, token_ids, cache, keep):
        key = (id(model), tuple(step.rows))
        stale = before.get(key, padded.left_padding(step.lengths))
        before[key] = padded.left_padding(step.lengths)
        monkeypatch.setattr(padded_runner, "lay_out", lambda step: lay_out(step, stale))
        return call(model, step, token_ids, cache, keep)

    monkeypatch.setattr(padded_runner.PaddedModel, "__call__", remember)


def kv_not_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is cut to its new width from the right, and its rows stay where they were."""

    def gather(batch, places, lengths):
        columns = torch.arange(max(lengths)).expand(len(places), -1)
        return padded.Gather(torch.tensor(places), columns)

    monkeypatch.setattr(padded_cache.RealignedBatch, "_gather", gather)


def rejected_kv_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is cut to its new width from the left: rows keep their newest keys, rejected ones among them."""

    def gather(batch, places, lengths):
        first = batch.cache.get_seq_length() - max(lengths)  # of a round's columns, how many are to go
        columns = (first + torch.arange(max(lengths))).expand(len(places), -1)
        return padded.Gather(torch.tensor(places), columns)

    monkeypatch.setattr(padded_cache.RealignedBatch, "_gather", gather)


def last_logit_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is accepted in full gives its K tokens and no bonus token."""
    gained = judge._gained

    def without_bonus(draft, verdict):
        rows = zip(gained(draft, verdict), draft.num_tokens, strict=True)
        return [tokens[:-1] if 0 < num == len(tokens) - 1 else tokens for tokens, num in rows]

    monkeypatch.setattr(judge, "_gained", without_bonus)


def bonus_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bonus token is taken from the row below."""

    def verify(said, draft_token_ids, num_draft_tokens):
        verdict = verify_equal(said, draft_token_ids, num_draft_tokens)
        is_full = (verdict.num_accepted == num_draft_tokens) & (num_draft_tokens > 0)
        return Verdict(verdict.num_accepted, torch.where(is_full, verdict.next_token.roll(-1), verdict.next_token))

    monkeypatch.setattr(method, "verify_equal", verify)


def end_looked_for_in_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is over when its block of tokens holds an end token, be it behind the tokens that it gained."""
    commit = round_.commit

    def commit_block(sequence, gain, num_draft_tokens):
        commit(sequence, gain, num_draft_tokens)
        tokens = gain.token_ids
        block = tokens + [END] * (1 + num_draft_tokens - len(tokens))
        if not sequence.is_finished and not sequence.eos_token_ids.isdisjoint(block):
            sequence.finish_reason = "stop"

    monkeypatch.setattr(round_, "commit", commit_block)


def mask_from_pad_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is `ids != pad`, and the padding token is the end token, which also stands in prompts."""
    decode_round, texts = engine.decode_round, []

    def remember(batch, *arguments):
        texts[:] = [sequence.token_ids for sequence in batch.values()]
        decode_round(batch, *arguments)

    def lay_out(step):
        layout = padded.lay_out(step)
        mask = layout.mask.clone()
        if len(texts) == step.num_rows:
            for place, padding in enumerate(padded.left_padding(step.lengths)):
                for slot, token in enumerate(texts[place][: step.lengths[place]]):
                    if token == END:
                        mask[place, padding + slot] = 0
        return replace(layout, mask=mask)

    monkeypatch.setattr(engine, "decode_round", remember)
    monkeypatch.setattr(padded_runner, "lay_out", lay_out)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "stale position ids after realignment": stale_position_ids,
    "mask not shifted": mask_not_shifted,
    "KV not shifted": kv_not_shifted,
    "KV of rejected tokens kept": rejected_kv_kept,
    "last logit dropped": last_logit_dropped,
    "bonus token taken from the wrong row": bonus_of_another_row,
    "EOS searched in padding": end_looked_for_in_padding,
    "mask from pad ids with pad == eos": mask_from_pad_ids,
}
"""By name: a function that breaks the package until the test is over."""
