"""Attention over blocks of the cache, in plain PyTorch.

Each block is attended to by itself, by the queries of the row that owns it: scores, weights and their weighted sum
have one shape, whatever the length of the row and of those beside it. Then each row adds up what its blocks gave,
the first one first. So a query's result depends neither on other rows nor on how much of the cache is read: what
lies behind its position has a weight of exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from batchspec.layout.block_step import BlockStep

HIDDEN = -1e30
"""Added to the score of a slot that a query does not see: finite, as a block may have no other, and yet so low
that its weight beside any other score is exactly 0."""


def attend_blocks(
    query: Tensor,  # [N, heads, D]
    key: Tensor,  # [B, kv heads, block, D]
    value: Tensor,  # [B, kv heads, block, value size]
    layout: BlockStep,
    mask: Tensor,  # [B, 1, queries, block], additive, float32 at least
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [N, heads, value size]
    """Query heads are folded into the query axis, so that keys and values are never repeated: a group of 3 heads
    over 2 columns is 6 queries of one kv head. `mask` may have more queries than that; they are computed for
    nothing, since fewer would be computed by other code."""
    num_kv_heads, num_columns = key.shape[1], layout.num_columns
    grid = spread(query, layout, num_kv_heads, mask.shape[2])
    weights, logs = weigh(scores(grid, key, mask, scaling, softcap))
    largest = logs[layout.row_blocks].amax(dim=1)  # [R, kv heads, queries]
    added = None if sinks is None else _spread_sinks(sinks.to(largest), num_kv_heads, num_columns, mask.shape[2])
    if added is not None:
        largest = torch.maximum(largest, added)
    shares = (logs - largest[layout.rows]).exp_().unsqueeze(-1)  # of each block in its row
    sums = weighted_sums(weights, value)
    total = add_up(torch.cat([sums * shares, shares], dim=-1), layout)
    values, weight = total[..., :-1], total[..., -1:]
    if added is not None:
        weight = weight + (added - largest).exp_().unsqueeze(-1)
    return gather((values / weight).to(value.dtype), layout, query.shape[1])


def spread(query: Tensor, layout: BlockStep, num_kv_heads: int, num_queries: int) -> Tensor:
    """`[N, heads, D]` to `[B, kv heads, queries, D]`: each block's queries."""
    size = query.shape[2]
    num_blocks, num_columns = layout.queries.shape
    chosen = query.index_select(0, layout.queries.flatten()).view(num_blocks, num_columns, num_kv_heads, -1, size)
    grid = chosen.permute(0, 2, 3, 1, 4).reshape(num_blocks, num_kv_heads, -1, size)
    missing = num_queries - grid.shape[2]
    return F.pad(grid, (0, 0, 0, missing)) if missing > 0 else grid


def scores(grid: Tensor, key: Tensor, mask: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """`[B, kv heads, queries, block]`, in the mask's dtype."""
    products = torch.matmul(grid, key.transpose(-1, -2))
    if softcap is not None:
        products = torch.tanh(products.mul_(scaling / softcap)).mul_(softcap / scaling)
    return torch.add(mask, products, alpha=scaling)


def weigh(scored: Tensor) -> tuple[Tensor, Tensor]:  # [B, kv heads, queries, block], [B, kv heads, queries]
    """Softmax over each block, and the logarithm of the sum that it divided by: where the score is largest, it
    leaves one over that sum. (`exp` by itself would round otherwise where threads or vectors end.)"""
    weights = torch.softmax(scored, dim=-1)
    return weights, scored.amax(dim=-1) - weights.amax(dim=-1).log_()


def weighted_sums(weights: Tensor, value: Tensor) -> Tensor:
    """`[B, kv heads, queries, value size]`, in the weights' dtype."""
    return torch.matmul(weights.to(value.dtype), value).to(weights.dtype)


def add_up(parts: Tensor, layout: BlockStep) -> Tensor:  # [B, ...]; [R, ...]
    """Each row's blocks, one after the other.

    Rows of 3, 1 and 1 blocks: the first blocks of all stand first, then the other two.

    >>> from types import SimpleNamespace
    >>> layout = SimpleNamespace(in_order=torch.tensor([0, 2, 1, 4, 3]), counts=(3, 1, 1))
    >>> add_up(torch.tensor([1., 20., 2., 100., 10.]), layout).tolist()
    [111.0, 2.0, 20.0]
    """
    total, *others = parts.index_select(0, layout.in_order).split(layout.counts)
    for part in others:
        total[: len(part)] += part
    return total


def gather(grid: Tensor, layout: BlockStep, num_heads: int) -> Tensor:
    """`[R, kv heads, queries, size]` to `[N, heads, size]`."""
    rows, kv_heads, _, size = grid.shape
    num_groups, columns = num_heads // kv_heads, layout.num_columns
    grid = grid[:, :, : num_groups * columns].unflatten(2, (num_groups, columns)).permute(0, 3, 1, 2, 4)
    return grid.reshape(rows * columns, num_heads, size).index_select(0, layout.grid_index)


def block_mask(
    layout: BlockStep, window: int | None, num_groups: int, num_queries: int, block: int, dtype: torch.dtype
) -> Tensor:  # [B, 1, queries, block]
    """`HIDDEN` at slots that a query does not see, else 0."""
    positions = layout.positions.unsqueeze(-1)  # [B, columns, 1]
    slots = layout.first_slots.view(-1, 1, 1) + torch.arange(block, device=positions.device)
    visible = is_seen(slots, positions, window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device).masked_fill_(~visible, HIDDEN)
    mask = mask.repeat(1, num_groups, 1)
    return F.pad(mask, (0, 0, 0, max(0, num_queries - mask.shape[1]))).unsqueeze(1)


def is_seen(slots: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """A query at position p sees slots 0 ... p; with a window w only the last w of them."""
    seen = slots <= positions
    return seen if window is None else seen & (slots > positions - window)


def _spread_sinks(sinks: Tensor, num_kv_heads: int, num_columns: int, num_queries: int) -> Tensor:
    """`[heads]` to `[kv heads, queries]`: a score beside those of the slots, for each query."""
    grid = sinks.view(num_kv_heads, -1, 1).expand(-1, -1, num_columns).reshape(num_kv_heads, -1)
    return F.pad(grid, (0, max(0, num_queries - grid.shape[1])))
