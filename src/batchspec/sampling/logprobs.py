"""Log-probabilities of the tokens that were chosen, and of the most probable ones."""

from __future__ import annotations

from collections.abc import Sequence as Listed

import torch
from torch import Tensor

from batchspec.outputs import Logprob, TokenLogprobs


def token_logprobs(
    logprobs: Tensor,  # [M, vocabulary]
    token_ids: Tensor,  # [M] int64: the token that stands at each line
    num_top: Listed[int],  # [M]: how many of the most probable ones are wanted; -1: all
) -> list[TokenLogprobs]:
    """What is told of each line: the token that stands there, then the most probable ones, falling.

    >>> entry = token_logprobs(torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([2]), [1])[0]
    >>> {token: (round(one.logprob, 3), one.rank) for token, one in entry.items()}
    {2: (-1.386, 3), 0: (-0.693, 1)}
    """
    sizes = [logprobs.shape[1] if count < 0 else min(count, logprobs.shape[1]) for count in num_top]
    own = logprobs.gather(1, token_ids.unsqueeze(1))  # [M, 1]
    ranks = (logprobs >= own).sum(dim=1)
    top = logprobs.topk(max(sizes), dim=1)
    columns = (token_ids, own.squeeze(1), ranks, top.indices, top.values)
    table = zip(*(column.tolist() for column in columns), sizes, strict=True)
    return [_entry(*line) for line in table]


def _entry(
    token: int, logprob: float, rank: int, top_tokens: list[int], top_logprobs: list[float], size: int
) -> TokenLogprobs:
    entry = {token: Logprob(logprob, rank)}
    for place in range(size):
        entry.setdefault(top_tokens[place], Logprob(top_logprobs[place], place + 1))
    return entry


def log_softmax(logits: Tensor) -> Tensor:  # [M, vocabulary] twice; the result is float32 or wider
    """Logarithms of the probabilities."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
