"""One round: draft, pack, forward, verify, commit, roll back. The same for every strategy, drafter and sampling
method."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from batchspec.decoding.commit import commit
from batchspec.decoding.judge import Judge
from batchspec.drafting.drafter import Drafter, cut_to_grammar
from batchspec.layout.packed import pack
from batchspec.layout.transfer import to_device
from batchspec.models.runner import Runner
from batchspec.request import Sequence
from batchspec.stats import StageTimer


@torch.inference_mode()
def decode_round(
    batch: Mapping[int, Sequence],
    runner: Runner,
    drafter: Drafter,
    judge: Judge,
    num_speculative_tokens: int,
    timer: StageTimer,
) -> None:
    """Advance every row by 1 to K + 1 tokens with one forward pass of the target.

    `batch` says which sequence each cache row holds; all its tokens but the newest are cached. Each row drafts as
    many tokens as it has use for, whatever the others do. How the tokens are laid out for the model is the
    runner's business: on one packed line, or as a padded rectangle that is realigned (EQSPEC, EXSPEC).
    """
    rows = list(batch.values())
    with timer.stage("draft"):
        draft = drafter.propose(batch, [row.draft_limit(num_speculative_tokens) for row in rows])
        draft = cut_to_grammar(draft, rows)
        if draft.marks:
            draft = draft.cut(drafter.budget.cut(rows, draft.marks))
    num_new = [1 + num_draft_tokens for num_draft_tokens in draft.num_tokens]
    step = pack([row.length for row in rows], num_new, runner.device, rows=list(batch))
    newest = to_device([row.token_ids[-1:] for row in rows], runner.device)
    grid = torch.cat([newest, draft.token_ids], dim=1)  # [rows, 1 + K]
    with timer.stage("verify"):
        logits = runner.forward(step, grid.flatten()[step.grid_index])  # [N, vocabulary]
    with timer.stage("sample"):
        gains = judge(logits, rows, draft)
    if draft.marks:
        drafter.budget.learn(rows, draft.marks, [len(gain.token_ids) - 1 for gain in gains])
    for row, gain, num_draft_tokens in zip(rows, gains, draft.num_tokens, strict=True):
        commit(row, gain, num_draft_tokens)
        row.length = len(row.token_ids) - 1  # roll back: what lies behind is stale, and will be overwritten
