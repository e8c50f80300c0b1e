"""Look it up first, and ask the draft model only for the rows where nothing good was found."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.drafting.draft_model import DraftModelDrafter
from batchspec.drafting.drafter import Draft, Drafter
from batchspec.request import Sequence


class CombinedDrafter:
    """Drafts each row by a look-up, which is free, if its first token is at least as likely to be accepted as the
    draft model's would be; else with the model."""

    def __init__(self, lookup: Drafter, model: DraftModelDrafter) -> None:
        self.lookup = lookup
        self.model = model
        self.budget = model.budget

    def propose(self, batch: Mapping[int, Sequence], limits: Rows[int]) -> Draft:
        found = self.lookup.propose(batch, limits)
        rows = list(batch.values())
        is_found = [
            bool(own) and self.budget.prefers(row, own[0]) for row, own in zip(rows, found.marks, strict=True)
        ]
        left = [0 if good else limit for good, limit in zip(is_found, limits, strict=True)]
        beside = [own if good else [] for good, own in zip(is_found, found.marks, strict=True)]
        return _merged(is_found, found, self.model.propose(batch, left, beside))

    def release_row(self, row: int, last: int) -> None:
        self.lookup.release_row(row, last)
        self.model.release_row(row, last)


def _merged(is_first: list[bool], first: Draft, second: Draft) -> Draft:
    """Row by row the one draft or the other.

    >>> one, two = Draft.from_lists([[7, 8], [9, 9]], "cpu", [["a", "b"], ["c", "d"]]), Draft.from_lists(
    ...     [[], [4]], "cpu", [[], ["e"]])
    >>> merged = _merged([True, False], one, two)
    >>> merged.token_ids.tolist(), merged.num_tokens, merged.marks
    ([[7, 8], [4, 0]], [2, 1], [['a', 'b'], ['e']])
    """
    drafts = [(first if good else second, place) for place, good in enumerate(is_first)]
    num_tokens = [draft.num_tokens[place] for draft, place in drafts]
    marks = [draft.marks[place] for draft, place in drafts]
    chosen = torch.tensor(is_first, device=first.token_ids.device).unsqueeze(1)
    width = max(num_tokens)
    tokens = torch.where(chosen, _as_wide_as(first.token_ids, width), _as_wide_as(second.token_ids, width))
    return Draft(tokens, num_tokens, marks=marks)


def _as_wide_as(token_ids: Tensor, width: int) -> Tensor:  # [rows, K]; [rows, width]
    return F.pad(token_ids[:, :width], (0, max(0, width - token_ids.shape[1])))
