"""Which position of which sequence each line of logits answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from batchspec.layout.transfer import to_device
from batchspec.request import Sequence
from batchspec.sampling_params import SamplingParams


@dataclass(frozen=True)
class Lines:
    """N lines of logits. Line `i` answers what follows the committed tokens of `sequences[rows[i]]` and the first
    `offsets[i]` of its draft tokens, and may depend on nothing else."""

    sequences: list[Sequence]  # [rows]
    draft_token_ids: Tensor  # [rows, K] int64, those that a line does not name are not looked at
    rows: list[int]  # [N], row by row
    offsets: list[int]  # [N], rising within a row

    @property
    def device(self) -> torch.device:
        return self.draft_token_ids.device

    @cached_property
    def params(self) -> list[SamplingParams]:  # [N]
        return [self.sequences[row].params for row in self.rows]

    @cached_property
    def sampled(self) -> list[int]:
        """Lines whose token is drawn. The others are greedy."""
        return [line for line, params in enumerate(self.params) if not params.is_greedy]

    @cached_property
    def row_index(self) -> Tensor:  # [N] int64
        return to_device(self.rows, self.device)

    @cached_property
    def offset_index(self) -> Tensor:  # [N] int64
        return to_device(self.offsets, self.device)

    @cached_property
    def drafts(self) -> list[list[int]]:
        """The draft tokens on the host: a synchronisation, for what cannot do without."""
        return self.draft_token_ids.tolist() if max(self.offsets) else [[] for _ in self.sequences]

    def position(self, line: int) -> int:
        """Where in its sequence the token stands that this line decides."""
        return len(self.sequences[self.rows[line]].token_ids) + self.offsets[line]

    def output_before(self, line: int) -> list[int]:
        """Output and draft tokens before that position, on the host."""
        row = self.rows[line]
        return self.sequences[row].output_token_ids + self.drafts[row][: self.offsets[line]]


def step_lines(sequences: list[Sequence], draft_token_ids: Tensor, num_draft_tokens: list[int]) -> Lines:
    """The lines of a target step: each row's newest token, then its draft tokens.

    >>> lines = step_lines(["a", "b"], torch.zeros(2, 2, dtype=torch.long), [2, 0])
    >>> lines.rows, lines.offsets
    ([0, 0, 0, 1], [0, 1, 2, 0])
    """
    rows = [row for row, count in enumerate(num_draft_tokens) for _ in range(count + 1)]
    offsets = [offset for count in num_draft_tokens for offset in range(count + 1)]
    return Lines(sequences, draft_token_ids, rows, offsets)


def column_lines(sequences: list[Sequence], draft_token_ids: Tensor, rows: list[int], column: int) -> Lines:
    """The lines from which some rows draw draft token `column`, given those before it."""
    return Lines(sequences, draft_token_ids, rows, [column] * len(rows))
