"""A smaller model as the drafter: run by the same strategy as the target, and rolled back the same way."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
from torch import Tensor

from batchspec.drafting.budget import Budget, FixedBudget
from batchspec.drafting.drafter import Draft
from batchspec.drafting.estimates import Mark, Marks
from batchspec.layout.packed import PackedStep, pack
from batchspec.layout.transfer import to_device
from batchspec.models.runner import Runner
from batchspec.request import Sequence
from batchspec.sampling.lines import Lines, column_lines
from batchspec.sampling.method import Draw, draw_coupled
from batchspec.sampling.processors import are_plain, process

CATCH_UP = 16
"""Missing tokens up to which a row catches up inside the packed step; more are prefilled for the row alone."""


class _Drawn(NamedTuple):
    """What a column draws for its rows."""

    token_ids: Tensor  # [rows] int64
    probs: Tensor | None  # [rows, target's vocabulary], if anybody asks
    marks: list[Mark]


class DraftModelDrafter:
    """Drafts with a model of its own, which draws as the target does: with the same processors, temperature and
    filters.

    `lengths` is the only state: how many tokens of each row are in the draft model's cache. A round leaves the
    drafts there too; those that were not accepted are forgotten when the next round sets the length back to
    what was committed. After full acceptance the last draft token was never computed, so that row is one token
    behind: it simply feeds two tokens in the first step of its next draft.
    """

    def __init__(
        self,
        runner: Runner,
        draft_vocab_size: int,
        target_vocab_size: int,
        draw: Draw,
        head_ids: Tensor | None = None,  # [H] int64, rising
        budget: Budget | None = None,
    ) -> None:
        """`draw` is the drafter's half of the sampling method. With `head_ids` the model's logits `[..., H]` stand
        for those tokens, and all others are never drafted."""
        self.runner = runner
        self.draft_vocab_size = draft_vocab_size
        self.target_vocab_size = target_vocab_size
        self.draw = draw
        self.head_ids = head_ids
        self.budget = budget or FixedBudget()
        sayable = torch.arange(draft_vocab_size, device=runner.device) if head_ids is None else head_ids
        self._is_silent = torch.ones(target_vocab_size, dtype=torch.bool, device=runner.device)
        self._is_silent[sayable[sayable < target_vocab_size]] = False
        self.lengths = [0] * runner.num_rows

    def propose(self, batch: Mapping[int, Sequence], limits: Rows[int], beside: Marks | None = None) -> Draft:
        """`beside` are the marks of drafts that other rows, of limit 0, have from elsewhere."""
        rows, sequences = list(batch), list(batch.values())
        for row, sequence in batch.items():  # also those that are not drafted now: their last draft is stale
            self.lengths[row] = min(self.lengths[row], len(sequence.token_ids) - 1)
        limits = [self._limit(row, batch[row], limit) for row, limit in zip(rows, limits, strict=True)]
        drafts = torch.zeros(len(rows), 0, dtype=torch.long, device=self.runner.device)
        marks: list[list[Mark]] = [[] for _ in rows]
        probs: list[Tensor] = []
        unread = [self._num_unread(row, sequence) for row, sequence in batch.items()]
        drafting = self.budget.next_column(sequences, marks, limits, beside, unread)
        pending = [self._pending(row, batch) if place in drafting else [] for place, row in enumerate(rows)]
        num_new = [len(tokens) for tokens in pending]
        inputs = to_device([token for tokens in pending for token in tokens], self.runner.device)
        while drafting:
            step = pack([self.lengths[row] for row in rows], num_new, self.runner.device, rows)
            self.budget.begin_draft_step(step.num_tokens)
            logits = self._forward(step, inputs, column=drafts.shape[1])  # [drafting rows, vocabulary]
            lines = column_lines(sequences, drafts, drafting, drafts.shape[1])
            drawn = self._draw(logits, lines)
            column = drafts.new_zeros(len(rows), 1).index_copy_(0, lines.row_index, drawn.token_ids.unsqueeze(1))
            drafts = torch.cat([drafts, column], dim=1)
            if drawn.probs is not None:
                all_rows = drawn.probs.new_zeros(len(rows), self.target_vocab_size)
                probs.append(all_rows.index_copy_(0, lines.row_index, drawn.probs))
            for row, new in zip(rows, num_new, strict=True):
                self.lengths[row] += new
            for place, mark in zip(drafting, drawn.marks, strict=True):
                marks[place].append(mark)
            drafting = self.budget.next_column(sequences, marks, limits, beside)
            num_new = [int(place in drafting) for place in range(len(rows))]
            inputs = drafts[to_device(drafting, drafts.device), -1]
        return Draft(drafts, [len(own) for own in marks], torch.stack(probs, dim=1) if probs else None, marks)

    def release_row(self, row: int, last: int) -> None:
        self.runner.release_row(row, last, self.lengths[last])
        self.lengths[row] = self.lengths[last]
        self.lengths[last] = 0

    def _limit(self, row: int, sequence: Sequence, limit: int) -> int:
        """A row is drafted only as far as the draft model's own context window goes, and not at all once it holds
        a token that the draft model has no embedding for."""
        missing = sequence.token_ids[min(self.lengths[row], len(sequence.token_ids) - 1) :]
        if max(missing) >= self.draft_vocab_size:
            return 0
        return max(0, min(limit, self.runner.max_length - len(sequence.token_ids)))

    def _num_unread(self, row: int, sequence: Sequence) -> int:
        """Tokens that are prefilled before the row can be drafted."""
        missing = len(sequence.token_ids) - self.lengths[row]
        return missing if missing > CATCH_UP else 0

    def _pending(self, row: int, batch: Mapping[int, Sequence]) -> list[int]:
        """The tokens that the row's next step has to compute."""
        sequence = batch[row]
        missing = sequence.token_ids[self.lengths[row] :]
        if len(missing) > CATCH_UP:
            self._copy_prompt(row, batch)
            missing = sequence.token_ids[self.lengths[row] : -1]
            if missing:
                self.runner.prefill(row, missing, self.lengths[row])
                self.lengths[row] += len(missing)
        return sequence.token_ids[self.lengths[row] :]

    def _copy_prompt(self, row: int, batch: Mapping[int, Sequence]) -> None:
        """Take the prompt from another candidate of the request, if one has computed it (`n` above 1)."""
        shared = batch[row].num_prompt_tokens - 1
        for other, sequence in batch.items():
            if sequence.siblings is batch[row].siblings and self.lengths[row] < shared <= self.lengths[other]:
                self.runner.copy_row(other, row, shared)
                self.lengths[row] = shared

    def _forward(self, step: PackedStep, inputs: Tensor, column: int) -> Tensor:
        return self.runner.forward(step, inputs, keep=step.last_index)

    def _draw(self, logits: Tensor, lines: Lines) -> _Drawn:
        if self.head_ids is not None and self.draw is draw_coupled and are_plain(lines):
            # The short head's argmax is that of the whole line.
            return _Drawn(self.head_ids[logits.argmax(dim=-1)], None, self.budget.confidence(logits))
        logits = process(self._fitted(logits), lines)
        logits.masked_fill_(self._is_silent, -torch.inf)  # whatever a request's own functions say
        marks = self.budget.confidence(logits)
        return _Drawn(*self.draw(logits, lines), marks)

    def _fitted(self, logits: Tensor) -> Tensor:  # [rows, draft's vocabulary]; [rows, target's vocabulary]
        """Ids that only one of the two models has are padding of its vocabulary, and never drafted."""
        if self.head_ids is not None:
            fitted = logits.new_full((len(logits), self.target_vocab_size), -torch.inf)
            return fitted.index_copy_(1, self.head_ids, logits)
        missing = max(0, self.target_vocab_size - self.draft_vocab_size)
        return torch.nn.functional.pad(
            logits[:, : min(self.draft_vocab_size, self.target_vocab_size)], (0, missing), value=-torch.inf
        )
