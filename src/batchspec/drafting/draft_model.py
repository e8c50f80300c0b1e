"""A smaller model as the drafter: run by the same strategy as the target, and rolled back the same way."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from batchspec.drafting.drafter import Draft
from batchspec.layout.packed import PackedStep, pack
from batchspec.layout.transfer import to_device
from batchspec.models.runner import Runner
from batchspec.request import Sequence
from batchspec.sampling.lines import Lines, column_lines
from batchspec.sampling.method import Draw, draw_coupled
from batchspec.sampling.processors import are_plain, process

CATCH_UP = 16
"""Missing tokens up to which a row catches up inside the packed step; more are prefilled for the row alone."""


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
    ) -> None:
        """`draw` is the drafter's half of the sampling method. With `head_ids` the model's logits `[..., H]` stand
        for those tokens, and all others are never drafted."""
        self.runner = runner
        self.draft_vocab_size = draft_vocab_size
        self.target_vocab_size = target_vocab_size
        self.draw = draw
        self.head_ids = head_ids
        sayable = torch.arange(draft_vocab_size, device=runner.device) if head_ids is None else head_ids
        self._is_silent = torch.ones(target_vocab_size, dtype=torch.bool, device=runner.device)
        self._is_silent[sayable[sayable < target_vocab_size]] = False
        self.lengths = [0] * runner.num_rows

    def propose(self, batch: Mapping[int, Sequence], limits: Rows[int]) -> Draft:
        rows = list(batch)
        limits = [self._limit(row, batch[row], limit) for row, limit in zip(rows, limits, strict=True)]
        drafts = torch.zeros(len(rows), max(limits), dtype=torch.long, device=self.runner.device)
        if max(limits) == 0:
            return Draft(drafts, limits)
        pending = [self._pending(row, batch) if limit else [] for row, limit in zip(rows, limits, strict=True)]
        num_new = [len(tokens) for tokens in pending]
        inputs = to_device([token for tokens in pending for token in tokens], self.runner.device)
        probs: list[Tensor] = []
        for column in range(max(limits)):
            step = pack([self.lengths[row] for row in rows], num_new, self.runner.device, rows)
            logits = self._forward(step, inputs, column)  # [drafting rows, vocabulary]
            drafting = [place for place, limit in enumerate(limits) if limit > column]
            lines = column_lines(list(batch.values()), drafts, drafting, column)
            tokens, drawn_from = self._draw(logits, lines)
            drafts[lines.row_index, column] = tokens
            if drawn_from is not None:
                all_rows = drawn_from.new_zeros(len(rows), self.target_vocab_size)
                probs.append(all_rows.index_copy_(0, lines.row_index, drawn_from))
            for row, new in zip(rows, num_new, strict=True):
                self.lengths[row] += new
            num_new = [int(limit > column + 1) for limit in limits]
            inputs = drafts[to_device(num_new, drafts.device).bool(), column]
        return Draft(drafts, limits, torch.stack(probs, dim=1) if probs else None)

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

    def _pending(self, row: int, batch: Mapping[int, Sequence]) -> list[int]:
        """Roll the row back to its committed tokens; give those that its next step has to compute."""
        sequence = batch[row]
        self.lengths[row] = min(self.lengths[row], len(sequence.token_ids) - 1)
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

    def _draw(self, logits: Tensor, lines: Lines) -> tuple[Tensor, Tensor | None]:
        """Tokens `[rows]`, and what they were drawn from `[rows, target's vocabulary]` if anybody asks."""
        if self.head_ids is not None and self.draw is draw_coupled and are_plain(lines):
            return self.head_ids[logits.argmax(dim=-1)], None  # the short head's argmax is that of the whole line
        logits = process(self._fitted(logits), lines)
        logits.masked_fill_(self._is_silent, -torch.inf)  # whatever a request's own functions say
        return self.draw(logits, lines)

    def _fitted(self, logits: Tensor) -> Tensor:  # [rows, draft's vocabulary]; [rows, target's vocabulary]
        """Ids that only one of the two models has are padding of its vocabulary, and never drafted."""
        if self.head_ids is not None:
            fitted = logits.new_full((len(logits), self.target_vocab_size), -torch.inf)
            return fitted.index_copy_(1, self.head_ids, logits)
        missing = max(0, self.target_vocab_size - self.draft_vocab_size)
        return torch.nn.functional.pad(
            logits[:, : min(self.draft_vocab_size, self.target_vocab_size)], (0, missing), value=-torch.inf
        )
