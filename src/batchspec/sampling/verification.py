"""Which draft tokens are kept, and which token comes next. Needs logits and drafts, no model and no drafter.

Words: a row's *draft tokens* were guessed; those up to the first wrong guess are *accepted*. The *next token* is
the target's own: the *recovered* token in place of a wrong guess, or the *bonus* token after a draft that was
accepted in full. So a row with K draft tokens gains 1 to K + 1 tokens.

Lines of the target stand row by row: row `i` has `num_draft_tokens[i] + 1`, the first of which answers its newest
committed token and each further one the draft token before it. N is the sum over the rows. What stands behind a
row's draft is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.sampling.noise import draw


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round decided for each row."""

    num_accepted: Tensor  # [rows] int64
    next_token: Tensor  # [rows] int64


def verify_equal(
    said: Tensor,  # [N] int64: the target's token at each line
    draft_token_ids: Tensor,  # [rows, K] int64
    num_draft_tokens: Tensor,  # [rows] int64, each 0 ... K
) -> Verdict:
    """Accept the draft tokens that equal the target's, from the first on, until one does not.

    Example: row 0 drafts 7 8 and the target says 7 9 4, so 7 is accepted and 9 recovered. Row 1 drafts nothing
    and the target says 5. Row 2 drafts 3 and the target says 3 6: accepted in full, 6 is the bonus token.

    >>> draft = torch.tensor([[7, 8], [0, 0], [3, 0]])
    >>> verdict = verify_equal(torch.tensor([7, 9, 4, 5, 3, 6]), draft, torch.tensor([2, 0, 1]))
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
    ([1, 0, 1], [9, 5, 6])
    """
    first_line, lines, is_draft = _layout(draft_token_ids, num_draft_tokens)
    num_accepted = _leading((said[lines] == draft_token_ids) & is_draft)
    return Verdict(num_accepted, said[first_line + num_accepted])


def verify_by_rejection(
    target_probs: Tensor,  # [N, vocabulary], p
    draft_token_ids: Tensor,  # [rows, K] int64
    num_draft_tokens: Tensor,  # [rows] int64, each 0 ... K
    draft_probs: Tensor | None,  # [rows, K, vocabulary], q; None: each draft token was certain (a point mass)
    accept_noise: Tensor,  # [N], uniform
    token_keys: Tensor,  # [N] int64, of the noise that draws the next token
) -> Verdict:
    """Accept a draft token with probability min(1, p / q); recover a rejected one from max(0, p - q), normalised.

    So the token has distribution p, whatever q is (Leviathan et al. 2023, appendix A.1; Chen et al. 2023).
    """
    first_line, lines, is_draft = _layout(draft_token_ids, num_draft_tokens)
    p = target_probs[lines, draft_token_ids]  # [rows, K]
    q = (
        torch.ones_like(p)
        if draft_probs is None
        else draft_probs.gather(2, draft_token_ids.unsqueeze(2)).squeeze(2)
    )
    num_accepted = _leading((accept_noise[lines] * q < p) & is_draft)
    line = first_line + num_accepted
    wanted = target_probs[line]  # [rows, vocabulary]
    if draft_token_ids.shape[1]:
        is_rejected = (num_accepted < num_draft_tokens).unsqueeze(1)
        column = num_accepted.clamp(max=draft_token_ids.shape[1] - 1)
        if draft_probs is None:
            recovered = residual_of_certain(wanted, draft_token_ids.gather(1, column.unsqueeze(1)))
        else:
            q = draft_probs[torch.arange(len(column), device=column.device), column]
            recovered = residual(wanted, q.to(wanted))
        wanted = torch.where(is_rejected, recovered, wanted)
    return Verdict(num_accepted, draw(wanted.log(), token_keys[line]))


def residual(p: Tensor, q: Tensor) -> Tensor:  # [rows, vocabulary] three times
    """max(0, p - q), not normalised, which a draw does not need; p itself where nothing is left.

    Nothing is left if q is p: then no draft token is rejected, but by rounding.

    >>> p = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    >>> residual(p, torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]])).tolist()
    [[0.25, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """
    left = (p - q).clamp_(min=0)
    return torch.where((left > 0).any(dim=1, keepdim=True), left, p)


def residual_of_certain(p: Tensor, token_ids: Tensor) -> Tensor:  # [rows, vocabulary], [rows, 1]
    """The same for a draft token of which q was certain: p without it. It was rejected, so p has others."""
    return p.scatter(1, token_ids, 0.0)


def _layout(draft_token_ids: Tensor, num_draft_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's first line `[rows]`; the line that judges each draft token, and whether it is one `[rows, K]`."""
    num_lines = num_draft_tokens + 1
    first_line = num_lines.cumsum(0) - num_lines
    columns = torch.arange(draft_token_ids.shape[1], device=draft_token_ids.device)
    is_draft = columns < num_draft_tokens.unsqueeze(1)
    return first_line, (first_line.unsqueeze(1) + columns).where(is_draft, 0), is_draft


def _leading(is_good: Tensor) -> Tensor:  # [rows, K] bool; [rows] int64
    """How many are good before the first that is not."""
    return is_good.cumprod(dim=1).sum(dim=1)
