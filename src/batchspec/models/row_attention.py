"""Attention of one row alone: of a prompt, and of a batch of one where not every bit counts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from batchspec.layout.block_step import AttentionLayout
from batchspec.models.block_attention import is_seen


def attend_row(
    query: Tensor,  # [N, heads, D]
    key: Tensor,  # [blocks, kv heads, block, D]
    value: Tensor,  # [blocks, kv heads, block, value size]
    layout: AttentionLayout,
    window: int | None,
    scaling: float,
) -> Tensor:  # [N, heads, value size]
    """With PyTorch's own attention, which knows neither capped scores nor sinks."""
    num_slots = layout.step.num_slots
    is_plain = layout.step.lengths[0] == 0 and (window is None or window >= num_slots)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),  # [1, heads, N, D]
        _slots(key, layout),
        _slots(value, layout),
        attn_mask=None if is_plain else _mask(layout, window, query.dtype),
        is_causal=is_plain,
        scale=scaling,
        enable_gqa=query.shape[1] > key.shape[1],
    )
    return out[0].transpose(0, 1)


def _slots(pool: Tensor, layout: AttentionLayout) -> Tensor:  # to [1, kv heads, slots, D]
    in_order = layout.meetings[1].view(len(layout.counts), -1)[:, 0]  # of any token: all meet the same blocks
    blocks = layout.parts[0].read(pool)[in_order]
    return blocks.transpose(0, 1).flatten(1, 2)[:, : layout.step.num_slots].unsqueeze(0)


def _mask(layout: AttentionLayout, window: int | None, dtype: torch.dtype) -> Tensor:  # [N, slots]
    positions = layout.step.slots.unsqueeze(-1)
    visible = is_seen(torch.arange(layout.step.num_slots, device=positions.device), positions, window)
    return torch.zeros(visible.shape, dtype=dtype, device=positions.device).masked_fill_(~visible, -torch.inf)
