"""One round over packed rows: draft, pack, forward, verify, commit, roll back."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from batchspec.decoding.commit import commit
from batchspec.drafting.drafter import Draft, Drafter
from batchspec.layout.packed import pack
from batchspec.layout.transfer import to_device
from batchspec.models.runner import PackedRunner
from batchspec.request import Sequence
from batchspec.sampling.processors import forbid_ends
from batchspec.sampling.verification import Verdict, verify_greedy


@torch.inference_mode()
def packed_round(
    rows: Rows[Sequence], runner: PackedRunner, drafter: Drafter, num_speculative_tokens: int
) -> None:
    """Advance every row by 1 to K + 1 tokens with one forward pass of the target.

    Row `i` of the cache is `rows[i]`; all its tokens but the newest are cached. Each row drafts as many tokens
    as it has use for, whatever the others do.
    """
    draft = drafter.propose(rows, [row.draft_limit(num_speculative_tokens) for row in rows])
    num_new = [1 + num_draft_tokens for num_draft_tokens in draft.num_tokens]
    step = pack([row.length for row in rows], num_new, runner.device)
    newest = to_device([row.token_ids[-1:] for row in rows], runner.device)
    grid = torch.cat([newest, draft.token_ids], dim=1)  # [rows, 1 + K]
    logits = runner.forward(step, grid.flatten()[step.grid_index])  # [N, vocabulary]
    logits = forbid_ends(
        logits, num_new, [row.num_tokens_before_end for row in rows], [row.end_token_ids for row in rows]
    )
    verdict = verify_greedy(logits, draft.token_ids, to_device(draft.num_tokens, runner.device))
    for row, gained, num_draft_tokens in zip(rows, _gained(draft, verdict), draft.num_tokens, strict=True):
        commit(row, gained, num_draft_tokens)
        row.length = len(row.token_ids) - 1  # roll back: what lies behind is stale, and will be overwritten


def _gained(draft: Draft, verdict: Verdict) -> list[list[int]]:
    """Accepted draft tokens and the next token of each row, on the host: the round's one synchronisation."""
    columns = [verdict.num_accepted.unsqueeze(1), verdict.next_token.unsqueeze(1), draft.token_ids]
    table = torch.cat(columns, dim=1).tolist()
    return [[*drafted[:accepted], following] for accepted, following, *drafted in table]
