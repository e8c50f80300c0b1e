"""From the target's logits to the tokens that each row gains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from batchspec.drafting.drafter import Draft
from batchspec.layout.transfer import to_device
from batchspec.outputs import TokenLogprobs
from batchspec.request import Sequence
from batchspec.sampling.choice import warp
from batchspec.sampling.grammar import forbid_by_grammar
from batchspec.sampling.lines import Lines, step_lines
from batchspec.sampling.logprobs import log_softmax, token_logprobs
from batchspec.sampling.method import SAMPLING_METHODS
from batchspec.sampling.processors import process
from batchspec.sampling.verification import Verdict


class Gain(NamedTuple):
    """What a row gains in a round."""

    token_ids: list[int]
    """Accepted draft tokens, then the next token."""
    logprobs: list[TokenLogprobs]
    """Of each of them, or none at all."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Processes the target's logits, verifies the drafts with them, and tells log-probabilities."""

    sampling_method: str = "coupled"
    logprobs_mode: str = "raw_logprobs"

    def __call__(self, logits: Tensor, rows: list[Sequence], draft: Draft) -> list[Gain]:
        """`logits` `[N, vocabulary]` may be changed."""
        lines = step_lines(rows, draft.token_ids, draft.num_tokens)
        told = [line for line, params in enumerate(lines.params) if params.logprobs is not None]
        raw = log_softmax(logits[to_device(told, logits.device)]) if told else None
        logits = process(logits, lines)
        forbid_by_grammar(logits, lines)
        logprobs = self._logprobs(raw, logits, lines, told)
        verdict = SAMPLING_METHODS[self.sampling_method].verify(logits, lines, draft.num_tokens, draft.probs)
        gained = _gained(draft, verdict)
        if logprobs is None:
            return [Gain(tokens, []) for tokens in gained]
        return _with_logprobs(gained, lines, told, logprobs)

    def _logprobs(self, raw: Tensor | None, logits: Tensor, lines: Lines, told: list[int]) -> Tensor | None:
        if raw is None or self.logprobs_mode == "raw_logprobs":
            return raw
        return log_softmax(warp(logits.clone(), lines)[to_device(told, logits.device)])


def _gained(draft: Draft, verdict: Verdict) -> list[list[int]]:
    """Accepted draft tokens and the next token of each row, on the host: the round's one synchronisation."""
    columns = [verdict.num_accepted.unsqueeze(1), verdict.next_token.unsqueeze(1), draft.token_ids]
    table = torch.cat(columns, dim=1).tolist()
    return [[*drafted[:accepted], following] for accepted, following, *drafted in table]


def _with_logprobs(
    gained: list[list[int]],  # [rows]
    lines: Lines,
    told: list[int],  # [M]: lines of rows that want log-probabilities
    logprobs: Tensor,  # [M, vocabulary]
) -> list[Gain]:
    """Only lines whose tokens were gained are told; those behind are thrown away with their drafts."""
    gains = [Gain(tokens, []) for tokens in gained]
    places = [place for place, line in enumerate(told) if lines.offsets[line] < len(gained[lines.rows[line]])]
    kept = [told[place] for place in places]
    tokens = [gained[lines.rows[line]][lines.offsets[line]] for line in kept]
    index = to_device(places, logprobs.device)
    wanted = [lines.params[line].logprobs or 0 for line in kept]
    entries = token_logprobs(logprobs[index], to_device(tokens, logprobs.device), wanted)
    for line, entry in zip(kept, entries, strict=True):
        gains[lines.rows[line]].logprobs.append(entry)
    return gains
