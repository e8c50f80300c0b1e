"""Attention over blocks of the cache, in plain PyTorch.

Each block is attended to by itself, by the queries of the row that owns it: scores, weights and their weighted sum
have one shape, whatever the length of the row and of those beside it. Then each token adds up what the blocks of
its row gave, the first one first. So a query's result depends neither on other rows nor on how much of the cache
is read: what lies behind its position has a weight of exactly 0.

A *vector* is one query of one block by one head, or a place where one is computed for nothing; a step has `V`.
Those of a block and kv head stand together, as do those of a part of the step. Where blocks are read, parts are
computed one by one; all else is done at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from batchspec.layout.block_step import AttentionLayout, BlockPart
from batchspec.layout.transfer import to_device

HIDDEN = -1e30
"""Added to the score of a slot that a query does not see: finite, as a block may have no other, and yet so low
that its weight beside any other score is exactly 0."""


def attend_blocks(
    grids: Sequence[Tensor],  # of each part [B * kv heads, queries, D]
    key: Tensor,  # [blocks, kv heads, block, D]
    value: Tensor,  # [blocks, kv heads, block, value size]
    layout: AttentionLayout,
    found: Tensor,  # [T, heads]
    masks: Sequence[Tensor],  # of each part [B, 1, queries, block], additive, float32 at least
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [N, heads, value size]
    """For queries that `query_places` has laid out; `result_places` has found where each token meets a block."""
    keys = [part.read(key).flatten(0, 1) for part in layout.parts]
    values = [part.read(value).flatten(0, 1) for part in layout.parts]
    scored = scores(grids, keys, masks, scaling, softcap)
    weights = torch.softmax(scored, dim=-1)
    index, shape = found.flatten(), (*found.shape, value.shape[-1])
    sizes = [grid.shape[0] * grid.shape[1] for grid in grids]
    sums = weighted_sums(weights, values, sizes).index_select(0, index).view(shape)
    if len(layout.counts) == 1 and sinks is None:
        return sums  # the share of a token's only block is exactly 1, so leaving it out changes no bit
    logs = logs_of_sums(scored, weights).index_select(0, index).view(found.shape)
    result = over_blocks(sums, logs, layout, sinks)
    return result if layout.order is None else result.index_select(0, layout.order)


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


def result_places(
    layout: AttentionLayout, num_heads: int, num_kv_heads: int, num_queries: Sequence[int]
) -> Tensor:  # [T, heads]
    """The vectors of each token that meets a block.

    Block 0 is met by the tokens 3 and 4, laid out as above:

    >>> from types import SimpleNamespace
    >>> part = SimpleNamespace(queries=torch.tensor([[3, 4]]), num_columns=2)
    >>> layout = SimpleNamespace(parts=(part,), meetings=torch.tensor([[0, 0], [0, 0], [0, 1]]))
    >>> result_places(layout, num_heads=4, num_kv_heads=2, num_queries=[5]).tolist()
    [[0, 2, 5, 7], [1, 3, 6, 8]]
    """
    sizes = [
        len(part.queries) * num_kv_heads * count for part, count in zip(layout.parts, num_queries, strict=True)
    ]
    starts = list(accumulate(sizes, initial=0))[:-1]
    part, block, column = layout.meetings
    device = part.device
    of_parts = to_device([starts, list(num_queries), [part.num_columns for part in layout.parts]], device)
    start, queries, columns = of_parts.index_select(1, part).unsqueeze(-1)  # [T, 1] each
    head, num_groups = torch.arange(num_heads, device=device), num_heads // num_kv_heads
    group = block.unsqueeze(1) * num_kv_heads + head // num_groups
    return start + group * queries + head % num_groups * columns + column.unsqueeze(1)


def scores(
    grids: Sequence[Tensor],  # of each part [B * kv heads, queries, D]
    keys: Sequence[Tensor],  # of each part [B * kv heads, block, D]
    masks: Sequence[Tensor],  # of each part [B, 1, queries, block]
    scaling: float,
    softcap: float | None,
) -> Tensor:  # [V, block]
    """In the masks' dtype."""
    sizes = [grid.shape[0] * grid.shape[1] for grid in grids]
    scored = masks[0].new_empty(sum(sizes), keys[0].shape[1])
    for out, grid, key, mask in zip(scored.split_with_sizes(sizes), grids, keys, masks, strict=True):
        products = torch.bmm(grid, key.transpose(1, 2)).view(mask.shape[0], -1, *mask.shape[2:])
        if softcap is not None:
            products = torch.tanh(products.mul_(scaling / softcap)).mul_(softcap / scaling)
        torch.add(mask, products, alpha=scaling, out=out.view(products.shape))
    return scored


def weighted_sums(
    weights: Tensor,  # [V, block]
    values: Sequence[Tensor],  # of each part [B * kv heads, block, value size]
    sizes: Sequence[int],  # of each part, its share of V
) -> Tensor:  # [V, value size]
    parts = weights.to(values[0].dtype).split_with_sizes(sizes)
    sums = [
        torch.bmm(part.view(value.shape[0], -1, part.shape[1]), value).flatten(0, 1)
        for part, value in zip(parts, values, strict=True)
    ]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def logs_of_sums(scored: Tensor, weights: Tensor) -> Tensor:  # [V, block] each; [V]
    """Logarithm of the sum that softmax divided by: where the score is largest, it leaves one over that sum."""
    return scored.amax(dim=-1) - weights.amax(dim=-1).log_()


def over_blocks(
    sums: Tensor,  # [T, heads, value size]
    logs: Tensor,  # [T, heads]
    layout: AttentionLayout,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [first ones of T, heads, value size]
    """The mean of what each token's blocks gave, weighted by the sums over their slots."""
    first, *others = logs.split(layout.counts)
    largest = first.clone() if sinks is None else torch.maximum(first, sinks.to(first))
    for other in others:
        head = largest[: len(other)]
        torch.maximum(head, other, out=head)
    shares = share(logs, largest.index_select(0, layout.tokens))
    total = add_up(sums * shares.unsqueeze(-1), layout.counts)
    weight = add_up(shares, layout.counts)
    if sinks is not None:
        weight = weight + share(sinks.to(largest), largest)
    return (total / weight.unsqueeze(-1)).to(sums.dtype)


def share(logs: Tensor, largest: Tensor) -> Tensor:  # of one shape
    """Weights from their logarithms, over the largest one of the token."""
    return (logs - largest).exp_()


def add_up(parts: Tensor, counts: Sequence[int]) -> Tensor:  # [T, ...]; [first ones of T, ...]
    """Each token's blocks, one after the other. What is added to is the first of `parts`.

    Tokens of 3, 1 and 1 blocks: the first blocks of all stand first, then the other two.

    >>> add_up(torch.tensor([1., 2., 20., 10., 100.]), (3, 1, 1)).tolist()
    [111.0, 2.0, 20.0]
    """
    total, *others = parts.split(counts)
    for part in others:
        total[: len(part)] += part
    return total


def block_mask(
    part: BlockPart, window: int | None, num_groups: int, num_queries: int, block: int, dtype: torch.dtype
) -> Tensor:  # [B, 1, queries, block]
    """`HIDDEN` at slots that a query does not see, else 0."""
    positions = part.positions.unsqueeze(-1)  # [B, columns, 1]
    slots = part.first_slots.view(-1, 1, 1) + torch.arange(block, device=positions.device)
    visible = is_seen(slots, positions, window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device).masked_fill_(~visible, HIDDEN)
    mask = mask.repeat(1, num_groups, 1)
    return F.pad(mask, (0, 0, 0, num_queries - mask.shape[1])).unsqueeze(1)


def is_seen(slots: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """A query at position p sees slots 0 ... p; with a window w only the last w of them."""
    seen = slots <= positions
    return seen if window is None else seen & (slots > positions - window)
