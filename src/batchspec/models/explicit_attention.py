"""Attention written out in plain PyTorch: for what SDPA has no argument for, and where every bit counts.

Invariantly computed, a query's result depends on neither the other queries and rows nor the width of the cache.
What lies behind a row's end has a weight of exactly 0, so it changes a sum only by the *order* in which the sum is
taken; and that libraries choose by the sum's length. So no sum is longer than a length that was found to be safe
(`Shapes.sum_slots`), and such sums are added up one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from batchspec.layout.shapes import SLOT_BLOCK, Shapes


def attend(
    query: Tensor,  # [rows, kv heads, queries, D]
    key: Tensor,  # [rows, kv heads, slots, D]
    value: Tensor,  # [rows, kv heads, slots, value size]
    mask: Tensor,  # [rows, 1, queries, slots], additive
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,  # [1, kv heads, queries, 1]
) -> Tensor:  # [rows, kv heads, queries, value size]
    """Scores may be capped, and sinks take up weight."""
    return torch.matmul(weigh(scores(query, key, mask, scaling, softcap), sinks).to(value.dtype), value)


def attend_invariantly(
    query: Tensor,  # [rows, kv heads, queries, D]
    key: Tensor,  # [rows, kv heads, slots, D], slots a multiple of SLOT_BLOCK
    value: Tensor,  # [rows, kv heads, slots, value size]
    mask: Tensor,  # [rows, 1, padded queries, slots], additive
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,  # [1, kv heads, queries, 1]
    shapes: Shapes,
) -> Tensor:  # [rows, kv heads, queries, value size]
    """The same, whatever else is in the step."""
    num_queries = shapes.num_queries(query.shape[2])
    padded = with_queries(query, num_queries)
    sinks = None if sinks is None else with_queries(sinks, num_queries)
    weigh_slots = weigh_in_blocks if shapes.weighs_in_blocks else weigh
    weights = weigh_slots(scores(padded, key, mask, scaling, softcap), sinks)
    return weighted_sum(weights.to(value.dtype), value, shapes.sum_slots)[:, :, : query.shape[2]]


def scores(query: Tensor, key: Tensor, mask: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """`[rows, kv heads, queries, slots]`, -inf where the mask is."""
    products = torch.matmul(query, key.transpose(-1, -2)).mul_(scaling)
    if softcap is not None:
        products = torch.tanh(products.div_(softcap)).mul_(softcap)
    return products.add_(mask)


def weigh(scored: Tensor, sinks: Tensor | None) -> Tensor:  # [rows, kv heads, queries, slots] twice
    """Softmax over the slots, in float32 at least."""
    if sinks is None:
        return torch.softmax(scored, dim=-1, dtype=_precise(scored))
    sink = sinks.to(scored).expand(scored.shape[0], -1, -1, -1)
    weights = torch.softmax(torch.cat([sink, scored], dim=-1), dim=-1, dtype=_precise(scored))
    return weights[..., 1:].contiguous()  # as without sinks, so that the next product is the same one


def weigh_in_blocks(scored: Tensor, sinks: Tensor | None) -> Tensor:
    """The same; the exponentials are summed over each block of slots, and then block after block."""
    scored = scored.to(_precise(scored))
    largest = scored.amax(dim=-1, keepdim=True)
    if sinks is not None:
        largest = torch.maximum(largest, sinks.to(scored))
    exponentials = (scored - largest).exp_()
    sums = exponentials.unflatten(-1, (-1, SLOT_BLOCK)).sum(dim=-1)
    total = torch.zeros_like(largest) if sinks is None else (sinks.to(scored) - largest).exp_()
    for block in sums.split(1, dim=-1):
        total = total + block
    return exponentials.div_(total)


def weighted_sum(weights: Tensor, value: Tensor, sum_slots: int) -> Tensor:
    """`weights @ value`, over `sum_slots` slots at a time, counted from slot 0."""
    if value.shape[2] <= sum_slots:
        return torch.matmul(weights, value)
    total = torch.zeros((), dtype=_precise(value), device=value.device)
    for start in range(0, value.shape[2], sum_slots):
        some = slice(start, start + sum_slots)
        total = total + torch.matmul(weights[..., some], value[:, :, some])
    return total.to(value.dtype)


def with_queries(grid: Tensor, num_queries: int) -> Tensor:  # [rows, heads, queries, size] twice
    """At least so many queries; those that are added are zeros."""
    missing = num_queries - grid.shape[2]
    return F.pad(grid, (0, 0, 0, missing)) if missing > 0 else grid


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
