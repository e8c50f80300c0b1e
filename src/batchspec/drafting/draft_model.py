"""A smaller model as the drafter: run by the same strategy as the target, and rolled back the same way."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows

import torch

from batchspec.drafting.drafter import Draft
from batchspec.layout.packed import pack
from batchspec.layout.transfer import to_device
from batchspec.models.runner import Runner
from batchspec.request import Sequence

CATCH_UP = 16
"""Missing tokens up to which a row catches up inside the packed step; more are prefilled for the row alone."""


class DraftModelDrafter:
    """Drafts greedily with a model of its own.

    `lengths` is the only state: how many tokens of each row are in the draft model's cache. A round leaves the
    drafts there too; those that were not accepted are forgotten when the next round sets the length back to
    what was committed. After full acceptance the last draft token was never computed, so that row is one token
    behind: it simply feeds two tokens in the first step of its next draft.
    """

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        self.runner = runner
        self.vocab_size = vocab_size
        self.lengths = [0] * runner.num_rows

    def propose(self, batch: Mapping[int, Sequence], limits: Rows[int]) -> Draft:
        rows = list(batch)
        limits = [self._limit(row, batch[row], limit) for row, limit in zip(rows, limits, strict=True)]
        drafts = torch.zeros(len(rows), max(limits), dtype=torch.long, device=self.runner.device)
        if max(limits) == 0:
            return Draft(drafts, limits)
        pending = [self._pending(r, batch[r]) if limit else [] for r, limit in zip(rows, limits, strict=True)]
        num_new = [len(tokens) for tokens in pending]
        inputs = to_device([token for tokens in pending for token in tokens], self.runner.device)
        for column in range(max(limits)):
            step = pack([self.lengths[row] for row in rows], num_new, self.runner.device, rows)
            logits = self.runner.forward(step, inputs, keep=step.last_index)  # [drafting rows, vocabulary]
            drafting = self._drafting(limits, column)
            drafts[drafting, column] = logits[:, : self.vocab_size].argmax(dim=-1)
            for row, new in zip(rows, num_new, strict=True):
                self.lengths[row] += new
            num_new = [int(limit > column + 1) for limit in limits]
            inputs = drafts[self._drafting(limits, column + 1), column]
        return Draft(drafts, limits)

    def release_row(self, row: int, last: int) -> None:
        self.runner.release_row(row, last, self.lengths[last])
        self.lengths[row] = self.lengths[last]
        self.lengths[last] = 0

    def _limit(self, row: int, sequence: Sequence, limit: int) -> int:
        """A row is drafted only as far as the draft model's own context window goes, and not at all once it holds
        a token that the draft model has no embedding for."""
        missing = sequence.token_ids[min(self.lengths[row], len(sequence.token_ids) - 1) :]
        if max(missing) >= self.vocab_size:
            return 0
        return max(0, min(limit, self.runner.max_length - len(sequence.token_ids)))

    def _pending(self, row: int, sequence: Sequence) -> list[int]:
        """Roll the row back to its committed tokens; give those that its next step has to compute."""
        self.lengths[row] = min(self.lengths[row], len(sequence.token_ids) - 1)
        missing = sequence.token_ids[self.lengths[row] :]
        if len(missing) > CATCH_UP:
            self.runner.prefill(row, missing[:-1], self.lengths[row])
            self.lengths[row] += len(missing) - 1
        return sequence.token_ids[self.lengths[row] :]

    def _drafting(self, limits: list[int], column: int) -> torch.Tensor:  # places in the batch
        return to_device([place for place, limit in enumerate(limits) if limit > column], self.runner.device)
