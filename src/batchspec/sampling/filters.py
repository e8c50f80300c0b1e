"""Which tokens may be drawn: `min_p`, then `top_k`, then `top_p`, each among those that the one before left.

All three keep the most probable tokens, so together they are one number for each line: the smallest probability
that is kept. Tokens of exactly that probability are all kept, so that no order among equals matters.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.layout.transfer import to_device
from batchspec.sampling_params import SamplingParams

CANDIDATES = (64, 1024)
"""Most probable tokens that are looked at first, and then where more may pass; at last all are sorted."""

NO_FILTER = SamplingParams()


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of M lines."""

    min_p: Tensor  # [M, 1]
    top_k: Tensor  # [M, 1] int64, the vocabulary's size for none
    top_p: Tensor  # [M, 1]

    def __getitem__(self, lines: Tensor) -> Filters:
        return Filters(self.min_p[lines], self.top_k[lines], self.top_p[lines])


def has_filter(params: SamplingParams) -> bool:
    return not params.is_greedy and (params.min_p > 0 or params.top_k > 0 or params.top_p < 1)


def filters_of(params: Listed[SamplingParams], scaled: Tensor) -> Filters:
    """The filters that requests ask for, one request for each line of `scaled`."""
    used = [one if has_filter(one) else NO_FILTER for one in params]
    shares = torch.tensor([[[one.min_p] for one in used], [[one.top_p] for one in used]], dtype=scaled.dtype)
    shares = shares.to(scaled.device)
    top_k = [[one.top_k if 0 < one.top_k < scaled.shape[1] else scaled.shape[1]] for one in used]
    return Filters(shares[0], to_device(top_k, scaled.device), shares[1])


def smallest_kept(
    values: Tensor,  # [M, C]: the C largest probabilities of each line, in falling order
    vocab_size: int,
    filters: Filters,
) -> tuple[Tensor, Tensor]:  # [M, 1], [M] bool
    """The smallest probability that is kept, and whether that can be told from these C.

    It can if the smallest of the C is not kept; otherwise there may be more behind it.

    Example: five tokens, of which a `top_p` of 0.8 keeps three, as the first two hold less than that.

    >>> one = Filters(torch.tensor([[0.0]]), torch.tensor([[5]]), torch.tensor([[0.8]]))
    >>> smallest_kept(torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]), 5, one)
    (tensor([[0.1250]]), tensor([True]))
    """
    size = values.shape[1]
    at_k = values.gather(1, filters.top_k.clamp(max=size) - 1).where(filters.top_k < vocab_size, 0.0)
    smallest = torch.maximum(filters.min_p * values[:, :1], at_k)
    mass = values.cumsum(dim=1)
    num_left = (values >= smallest).sum(dim=1, keepdim=True).clamp_(min=1)
    # If nothing was cut yet, what is left is everything. If something was, all that is left is among the C.
    left = mass.gather(1, num_left - 1).where(smallest > 0, 1.0)
    is_told = (smallest == 0) | (values[:, -1:] < smallest)
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=1)
    num_kept = (before < filters.top_p * left).sum(dim=1, keepdim=True).clamp_(min=1)
    at_p = values.gather(1, num_kept - 1).where(filters.top_p < 1, 0.0)
    smallest = torch.maximum(smallest, at_p)
    is_told &= (filters.top_p == 1) | (values[:, -1:] < smallest)
    return smallest, is_told.squeeze(1) | (size == vocab_size)


def keep_probable(scaled: Tensor, params: Listed[SamplingParams]) -> Tensor:  # [M, vocabulary], changed in place
    """-inf for all that may not be drawn. `scaled` are logits divided by the temperature."""
    if not any(map(has_filter, params)):
        return scaled
    filters = filters_of(params, scaled)
    probs = scaled.softmax(dim=-1)
    smallest = torch.empty_like(probs[:, :1])
    vocab_size = scaled.shape[1]
    rest = torch.arange(len(params), device=scaled.device)
    for size in (*CANDIDATES, vocab_size):  # a matter of speed: all sizes give the same bits
        left = probs if len(rest) == len(params) else probs[rest]
        is_all = size >= vocab_size
        values = left.sort(dim=1, descending=True).values if is_all else left.topk(size).values
        smallest[rest], is_told = smallest_kept(values, vocab_size, filters[rest])
        rest = rest[~is_told]
        if not rest.numel():
            break
    return scaled.masked_fill_(probs < smallest, -torch.inf)
