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
    grid: Tensor,  # [B, kv heads, queries, D]
    key: Tensor,  # [B, kv heads, block, D]
    value: Tensor,  # [B, kv heads, block, value size]
    layout: BlockStep,
    mask: Tensor,  # [B, 1, queries, block], additive, float32 at least
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [R, kv heads, queries, value size]
    """For queries that `query_places` has laid out; `result_places` finds each token's results."""
    scored = scores(grid, key, mask, scaling, softcap)
    if len(layout.counts) == 1 and sinks is None:
        # The share of a row's only block is exactly 1, so leaving it out changes no bit.
        return weighted_sums(torch.softmax(scored, dim=-1), value).index_select(0, layout.in_order)
    weights, logs = weigh(scored)
    largest = logs[layout.row_blocks].amax(dim=1)  # [R, kv heads, queries]
    added = None if sinks is None else _spread_sinks(sinks.to(largest), layout.num_columns, *grid.shape[1:3])
    if added is not None:
        largest = torch.maximum(largest, added)
    shares = share(logs, largest[layout.rows]).unsqueeze(-1)  # of each block in its row
    sums = weighted_sums(weights, value).to(weights.dtype)
    total = add_up(torch.cat([sums * shares, shares], dim=-1), layout)
    values, weight = total[..., :-1], total[..., -1:]
    if added is not None:
        weight = weight + share(added, largest).unsqueeze(-1)
    return (values / weight).to(value.dtype)


def query_places(queries: Tensor, num_heads: int, num_kv_heads: int, num_queries: int) -> Tensor:
    """Where the queries of each block are among the `N * heads` of a line: `[B, columns]` to
    `[B, kv heads, queries]`.

    Query heads are folded into the query axis, so that keys and values are never repeated: a group of 3 heads over
    2 columns is 6 queries of one kv head. If `num_queries` is more than that, the rest is computed for nothing,
    since fewer would be computed by other code.

    A block that the tokens 3 and 4 attend to, with 4 heads in groups of 2:

    >>> query_places(torch.tensor([[3, 4]]), num_heads=4, num_kv_heads=2, num_queries=5).tolist()
    [[[12, 16, 13, 17, 0], [14, 18, 15, 19, 0]]]
    """
    heads = torch.arange(num_heads, device=queries.device).view(num_kv_heads, -1, 1)
    places = (queries.view(len(queries), 1, 1, -1) * num_heads + heads).flatten(2)
    return F.pad(places, (0, num_queries - places.shape[2]))


def result_places(layout: BlockStep, num_heads: int, num_kv_heads: int, num_queries: int) -> Tensor:
    """Where the results of each token are among the `R * kv heads * queries` of a grid: `[N, heads]`.

    Tokens 0 and 1 of the second row, otherwise as above:

    >>> from types import SimpleNamespace
    >>> layout = SimpleNamespace(grid_index=torch.tensor([2, 3]), num_columns=2)
    >>> result_places(layout, num_heads=4, num_kv_heads=2, num_queries=5).tolist()
    [[10, 12, 15, 17], [11, 13, 16, 18]]
    """
    row, column = layout.grid_index // layout.num_columns, layout.grid_index % layout.num_columns
    head = torch.arange(num_heads, device=row.device)
    num_groups = num_heads // num_kv_heads
    heads = head // num_groups * num_queries + head % num_groups * layout.num_columns
    return (row * num_kv_heads * num_queries + column).unsqueeze(1) + heads


def scores(grid: Tensor, key: Tensor, mask: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """`[B, kv heads, queries, block]`, in the mask's dtype."""
    products = torch.matmul(grid, key.transpose(-1, -2))
    if softcap is not None:
        products = torch.tanh(products.mul_(scaling / softcap)).mul_(softcap / scaling)
    return torch.add(mask, products, alpha=scaling)


def weigh(scored: Tensor) -> tuple[Tensor, Tensor]:  # [B, kv heads, queries, block], [B, kv heads, queries]
    """Softmax over each block, and the logarithm of the sum that it divided by: where the score is largest, it
    leaves one over that sum."""
    weights = torch.softmax(scored, dim=-1)
    return weights, scored.amax(dim=-1) - weights.amax(dim=-1).log_()


def share(logs: Tensor, largest: Tensor) -> Tensor:  # of one shape
    """Weights from their logarithms, over the largest one of the row."""
    return (logs - largest).exp_()


def weighted_sums(weights: Tensor, value: Tensor) -> Tensor:
    """`[B, kv heads, queries, value size]`."""
    return torch.matmul(weights.to(value.dtype), value)


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


def _spread_sinks(sinks: Tensor, num_columns: int, num_kv_heads: int, num_queries: int) -> Tensor:
    """`[heads]` to `[kv heads, queries]`: a score beside those of the slots, for each query."""
    grid = sinks.view(num_kv_heads, -1, 1).expand(-1, -1, num_columns).reshape(num_kv_heads, -1)
    return F.pad(grid, (0, max(0, num_queries - grid.shape[1])))
