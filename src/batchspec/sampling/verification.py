"""Which draft tokens are kept, and which token comes next. Needs logits and drafts, no model and no drafter.

Words: a row's *draft tokens* were guessed; those up to the first wrong guess are *accepted*. The *next token* is
the target's own: the *recovered* token in place of a wrong guess, or the *bonus* token after a draft that was
accepted in full. So a row with K draft tokens gains 1 to K + 1 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round decided for each row."""

    num_accepted: Tensor  # [rows] int64
    next_token: Tensor  # [rows] int64


def verify_greedy(
    target_logits: Tensor,  # [N, vocabulary]
    draft_token_ids: Tensor,  # [rows, K] int64, what stands behind a row's draft is ignored
    num_draft_tokens: Tensor,  # [rows] int64, each 0 ... K
) -> Verdict:
    """Accept the draft tokens that equal the target's argmax, from the first on, until one does not.

    `target_logits` stand row by row: row `i` has `num_draft_tokens[i] + 1` lines, the first of which answers its
    newest committed token and each further one the draft token before it. N is the sum over the rows.

    Example: row 0 drafts 7 8 and the target says 7 9 4, so 7 is accepted and 9 recovered. Row 1 drafts nothing
    and the target says 5. Row 2 drafts 3 and the target says 3 6: accepted in full, 6 is the bonus token.

    >>> said = torch.tensor([7, 9, 4, 5, 3, 6])
    >>> logits = torch.nn.functional.one_hot(said, 10).float()
    >>> draft = torch.tensor([[7, 8], [0, 0], [3, 0]])
    >>> verdict = verify_greedy(logits, draft, torch.tensor([2, 0, 1]))
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
    ([1, 0, 1], [9, 5, 6])
    """
    said = target_logits.argmax(dim=-1)  # [N]
    num_lines = num_draft_tokens + 1
    first_line = num_lines.cumsum(0) - num_lines  # [rows]
    columns = torch.arange(draft_token_ids.shape[1], device=said.device)
    lines = (first_line.unsqueeze(1) + columns).clamp_(max=said.shape[0] - 1)
    agrees = (said[lines] == draft_token_ids) & (columns < num_draft_tokens.unsqueeze(1))  # [rows, K]
    num_accepted = agrees.cumprod(dim=1).sum(dim=1)
    return Verdict(num_accepted, said[first_line + num_accepted])
