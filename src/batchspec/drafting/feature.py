"""A drafter that feeds on the target's last hidden states, and deeper in a draft on its own."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from batchspec.drafting.budget import Budget
from batchspec.drafting.draft_model import CATCH_UP, DraftModelDrafter
from batchspec.drafting.drafter import Draft
from batchspec.drafting.estimates import Marks
from batchspec.layout.packed import PackedStep, pack
from batchspec.layout.transfer import to_device
from batchspec.models.features import FeatureStore
from batchspec.models.runner import PREFILL_CHUNK, FeatureRunner
from batchspec.request import Sequence
from batchspec.sampling.method import Draw


class FeatureDrafter(DraftModelDrafter):
    """Drafts with one layer over pairs: slot `j` of its cache holds token `j + 1` with the features of token `j`.

    Features are there for all committed tokens but the newest, from the target's own steps; so a row of L tokens
    has L - 1 true pairs, and `lengths` counts those. The pairs of a draft are made with the drafter's own
    features, and are computed anew, with the target's, once their tokens are committed.
    """

    runner: FeatureRunner

    def __init__(
        self,
        runner: FeatureRunner,
        features: FeatureStore,
        vocab_size: int,
        draw: Draw,
        head_ids: Tensor | None,
        budget: Budget | None = None,
    ) -> None:
        """`features` are those that the target's runner keeps."""
        super().__init__(runner, vocab_size, vocab_size, draw, head_ids, budget)
        self.features = features

    def propose(self, batch: Mapping[int, Sequence], limits: Rows[int], beside: Marks | None = None) -> Draft:
        draft = super().propose(batch, limits, beside)
        for row, sequence in batch.items():
            self.lengths[row] = min(self.lengths[row], len(sequence.token_ids) - 1)
        return draft

    def _limit(self, row: int, sequence: Sequence, limit: int) -> int:
        return super()._limit(row, sequence, limit) if len(sequence.token_ids) > 1 else 0

    def _pending(self, row: int, batch: Mapping[int, Sequence]) -> list[int]:
        token_ids = batch[row].token_ids
        self.lengths[row] = min(self.lengths[row], len(token_ids) - 2)
        end = len(token_ids) - 1 - CATCH_UP
        while self.lengths[row] < end:  # a prompt, alone
            start = self.lengths[row]
            count = min(PREFILL_CHUNK, end - start)
            step = pack([start], [count], self.runner.device, [row])
            tokens = to_device(token_ids[start + 1 : start + 1 + count], self.runner.device)
            nothing = torch.empty(0, dtype=torch.long, device=self.runner.device)
            self.runner.forward_features(step, tokens, self.features.read(step.cache_rows, step.slots), nothing)
            self.lengths[row] += count
        return token_ids[self.lengths[row] + 1 :]

    def _forward(self, step: PackedStep, inputs: Tensor, column: int) -> Tensor:
        """The first column's pairs are true ones; those behind it take the features that the last one gave."""
        if column == 0:
            features = self.features.read(step.cache_rows, step.slots)
        else:
            features = self.runner.features.read(step.cache_rows, step.slots - 1)  # type: ignore[union-attr]
        return self.runner.forward_features(step, inputs, features, step.last_index)
