"""Log-probabilities of the tokens that were chosen, and of the most probable ones."""

from __future__ import annotations

from collections.abc import Sequence as Listed

import torch
from torch import Tensor

from batchspec.layout.transfer import to_device
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
    own = logprobs.gather(1, token_ids.unsqueeze(1))  # [M, 1]
    ranks = (logprobs >= own).sum(dim=1)
    columns = zip(token_ids.tolist(), own.squeeze(1).tolist(), ranks.tolist(), strict=True)
    entries = [{token: Logprob(logprob, rank)} for token, logprob, rank in columns]
    for count in set(num_top):  # each by itself: which of equal tokens are told must not depend on the neighbours
        lines = [line for line, wanted in enumerate(num_top) if wanted == count]
        size = logprobs.shape[1] if count < 0 else min(count, logprobs.shape[1])
        top = logprobs[to_device(lines, logprobs.device)].topk(size, dim=1)
        for line, tokens, values in zip(lines, top.indices.tolist(), top.values.tolist(), strict=True):
            for place, (token, value) in enumerate(zip(tokens, values, strict=True), start=1):
                entries[line].setdefault(token, Logprob(value, place))
    return entries


def log_softmax(logits: Tensor) -> Tensor:  # [M, vocabulary] twice; the result is float32 or wider
    """Logarithms of the probabilities."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
