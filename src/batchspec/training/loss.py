"""How far the student is from the target, at each place of a line."""

from __future__ import annotations

from torch import Tensor


def distance(
    logits: Tensor,  # [M, H] float32
    top_ids: Tensor,  # [M, k]: the target's most probable tokens, the best first
    top_logprobs: Tensor,  # [M, k]
    places: Tensor,  # [vocabulary]: where in the logits a token stands, or -1
    hard_share: float,
) -> Tensor:
    """Cross-entropy with the target's most probable token, and Kullback-Leibler divergence from its distribution
    over its most probable ones; `hard_share` weighs the first. Tokens that the head cannot say teach nothing.

    The divergence is over k tokens and "all others", which keeps it zero only where the student agrees on both.

    Example: two tokens, of which the student gives the right one half and the target all of it: log 2.

    >>> import torch
    >>> top, sure = torch.tensor([[1]]), torch.tensor([[0.0]])
    >>> round(distance(torch.zeros(1, 2), top, sure, torch.arange(2), 0.5).item(), 3)
    0.693
    """
    columns = places[top_ids]  # [M, k]
    is_sayable = columns >= 0
    logprobs = logits.log_softmax(dim=-1).gather(1, columns.clamp(min=0))
    hard = -(logprobs[:, 0] * is_sayable[:, 0]).sum()
    wanted = top_logprobs.exp() * is_sayable  # [M, k]
    rest = (1 - wanted.sum(dim=1)).clamp(min=0)  # what the head cannot say is among the others
    given_rest = (1 - (logprobs.exp() * is_sayable).sum(dim=1)).clamp(min=1e-6)
    soft = (wanted * (top_logprobs - logprobs) * is_sayable).sum() + (
        rest * (rest.clamp(min=1e-6) / given_rest).log()
    ).sum()
    return (hard_share * hard + (1 - hard_share) * soft) / max(len(logits), 1)
