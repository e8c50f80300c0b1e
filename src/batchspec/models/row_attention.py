"""Attention of one row alone: of a prompt, and of a batch of one where not every bit counts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from batchspec.layout.block_step import BlockStep
from batchspec.models.block_attention import is_seen


def attend_row(
    query: Tensor,  # [N, heads, D]
    key: Tensor,  # [blocks, kv heads, block, D]
    value: Tensor,  # [blocks, kv heads, block, value size]
    layout: BlockStep,
    window: int | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [N, heads, value size]
    """With PyTorch's own attention, unless scores are capped or sinks take up weight."""
    num_slots, num_groups = layout.step.num_slots, query.shape[1] // key.shape[1]
    keys, values = (
        _in_one(layout.read(key), layout)[..., :num_slots, :],
        _in_one(layout.read(value), layout)[..., :num_slots, :],
    )
    heads = query.transpose(0, 1).unsqueeze(0)  # [1, heads, N, D]
    if softcap is None and sinks is None:
        is_plain = layout.step.lengths[0] == 0 and (window is None or window >= num_slots)
        mask = None if is_plain else _mask(layout, window, num_slots, query.dtype)
        out = F.scaled_dot_product_attention(
            heads, keys, values, attn_mask=mask, is_causal=is_plain, scale=scaling, enable_gqa=num_groups > 1
        )
    else:
        mask = _mask(layout, window, num_slots, query.dtype)
        keys, values = keys.repeat_interleave(num_groups, 1), values.repeat_interleave(num_groups, 1)
        out = torch.matmul(_weights(heads, keys, mask, scaling, softcap, sinks).to(values.dtype), values)
    return out[0].transpose(0, 1)


def _in_one(blocks: Tensor, layout: BlockStep) -> Tensor:  # [B, kv heads, block, D]; [1, kv heads, B * block, D]
    return blocks[layout.in_order].transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _mask(layout: BlockStep, window: int | None, num_slots: int, dtype: torch.dtype) -> Tensor:  # [N, slots]
    positions = layout.step.slots.unsqueeze(-1)
    visible = is_seen(torch.arange(num_slots, device=positions.device), positions, window)
    return torch.zeros(visible.shape, dtype=dtype, device=positions.device).masked_fill_(~visible, -torch.inf)


def _weights(
    query: Tensor, key: Tensor, mask: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:  # [1, heads, N, slots]
    """Softmax over the slots, in float32 at least."""
    scores = torch.matmul(query, key.transpose(-1, -2)).mul_(scaling)
    if softcap is not None:
        scores = torch.tanh(scores.div_(softcap)).mul_(softcap)
    scores = scores.add_(mask)
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.view(1, -1, 1, 1).to(scores).expand(-1, -1, scores.shape[2], -1)], dim=-1
        )
    precise = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=precise)
    return weights if sinks is None else weights[..., :-1]
