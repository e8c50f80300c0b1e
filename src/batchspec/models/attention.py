"""Attention over packed rows, as a function registered with transformers' `AttentionInterface`.

No mask function is registered under the same name, so transformers builds no mask: what a query may see follows
from its position alone and is decided here, per layer, by the arguments that the layer itself passes.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from batchspec.layout.packed import PackedStep

NAME = "batchspec_packed"
"""The name under which transformers finds this attention function."""

KNOWN_ARGUMENTS = frozenset(
    {"sliding_window", "is_causal", "dropout", "position_ids", "use_cache", "cache_position"}
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
)
"""What layers may pass besides the named parameters: heeded here, or without effect on a decoder in eval mode.
Anything else (position biases, chunks, indices of sparse attention) may change the result, and is refused."""


class StepContext:
    """What all layers of one forward pass share: the layout, and a mask for each window in use."""

    def __init__(self, step: PackedStep) -> None:
        self.step = step
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def mask(self, window: int | None, num_groups: int, dtype: torch.dtype) -> Tensor:
        """Additive mask `[rows, 1, groups * columns, slots]`: 0 where a query sees a slot, -inf elsewhere."""
        key = (window, num_groups, dtype)
        if key not in self._masks:
            self._masks[key] = _additive_mask(self.step, window, num_groups, dtype)
        return self._masks[key]


_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
"""By the identity of a model's config, whose attention implementation is switched for the time of a step."""

_context: ContextVar[StepContext] = ContextVar("batchspec_step_context")


@contextmanager
def packed_attention(model: PreTrainedModel, step: PackedStep) -> Iterator[None]:
    """Within this context `model` attends by `step`'s layout; outside of it the model is as it was.

    One at a time per model: engines that share a model in several threads take turns.
    """
    with _locks[id(model.config)]:
        before = [(config, config._attn_implementation) for config in _with_sub_configs(model.config)]
        token = _context.set(StepContext(step))
        model.config._attn_implementation = NAME  # passed on to all sub-configs
        try:
            yield
        finally:
            for config, name in before:  # outer configs first, as they pass theirs on
                config._attn_implementation = name
            _context.reset(token)


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within this context `model` attends by its own code: a packed engine that shares it has to wait."""
    with _locks[id(model.config)]:
        yield


def _with_sub_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            yield from _with_sub_configs(inner)


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,  # [1, heads, N, head size]
    key: Tensor,  # [rows, kv heads, slots, head size]
    value: Tensor,  # [rows, kv heads, slots, value head size]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [heads]
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from the packed queries to the rows of the cache. Returns `[1, N, heads, value head size]`.

    `key` and `value` are what `SlotCache.update` returned. Grouped query heads are folded into the query axis,
    so keys and values are never repeated: a group of 3 heads over 2 columns is 6 queries of one kv head.

    Raises:
        ValueError: the layer attends by a rule other than causal, windowed or not.
    """
    _refuse_other_rules(module, attention_mask, kwargs)
    context = _context.get()
    step = context.step
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    num_groups = num_heads // num_kv_heads
    grid = _to_grid(query, step, num_kv_heads)  # [rows, kv heads, groups * columns, head size]
    mask = context.mask(_window(module, kwargs), num_groups, query.dtype)
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(grid, key, value, attn_mask=mask, scale=scaling)
    else:
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        out = _explicit_attention(grid, key, value, mask, scale, softcap, s_aux)
    return _from_grid(out, step, num_heads), None


def _refuse_other_rules(module: nn.Module, attention_mask: Tensor | None, arguments: dict[str, Any]) -> None:
    name = type(module).__name__
    for argument, value in arguments.items():
        if value is not None and argument not in KNOWN_ARGUMENTS:
            raise ValueError(f"packed attention does not know {argument}, which {name} passes")
    if attention_mask is not None:
        raise ValueError(f"packed attention derives its own mask, and {name} passes one that the model built")
    is_causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"packed attention is causal, and {name} is not")


def _window(module: nn.Module, arguments: dict[str, Any]) -> int | None:
    """How many slots, its own the last, a query of this layer sees; None: all before it.

    Most layers pass their window, or None for no window. Those of qwen2_moe and phimoe pass nothing and leave it
    to the mask that transformers builds from the config. Only such models' configs count: others may carry a
    `sliding_window` that their code never reads.
    """
    if "sliding_window" in arguments:
        window = arguments["sliding_window"]
    elif builds_window_masks(type(module)):
        config: Any = module.config
        layer_types = getattr(config, "layer_types", None)
        is_sliding = not layer_types or layer_types[module.layer_idx] == "sliding_attention"
        window = getattr(config, "sliding_window", None) if is_sliding else None
    else:
        window = None
    return window or None  # configs write 0 for no window, too


def builds_window_masks(kind: type[nn.Module]) -> bool:
    """Does the file that defines this class, or one that it inherits from, use transformers' window masks?"""
    files = (sys.modules.get(parent.__module__) for parent in kind.__mro__)
    return any(hasattr(file, "create_sliding_window_causal_mask") for file in files)


def _to_grid(query: Tensor, step: PackedStep, num_kv_heads: int) -> Tensor:
    """[1, heads, N, D] -> [rows, kv heads, groups * columns, D]"""
    _, heads, _, head_size = query.shape
    line = query[0].transpose(0, 1)  # [N, heads, D]
    if not step.is_full:
        places = line.new_zeros(step.num_rows * step.num_columns, heads, head_size)
        line = places.index_copy_(0, step.grid_index, line)
    grid = line.reshape(step.num_rows, step.num_columns, num_kv_heads, -1, head_size)
    return grid.permute(0, 2, 3, 1, 4).reshape(step.num_rows, num_kv_heads, -1, head_size)


def _from_grid(out: Tensor, step: PackedStep, num_heads: int) -> Tensor:
    """[rows, kv heads, groups * columns, D] -> [1, N, heads, D]"""
    rows, num_kv_heads, _, head_size = out.shape
    grid = out.view(rows, num_kv_heads, -1, step.num_columns, head_size).permute(0, 3, 1, 2, 4)
    line = grid.reshape(rows * step.num_columns, num_heads, head_size)
    if not step.is_full:
        line = line.index_select(0, step.grid_index)
    return line.unsqueeze(0).contiguous()  # some models view it


def _additive_mask(step: PackedStep, window: int | None, num_groups: int, dtype: torch.dtype) -> Tensor:
    """A query at position p sees slots 0 ... p; with a window w only the last w of them."""
    positions = step.grid_positions().unsqueeze(-1)  # [rows, columns, 1]
    slots = torch.arange(step.num_slots, device=positions.device)
    visible = slots <= positions
    if window is not None:
        visible &= slots > positions - window
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device).masked_fill_(~visible, -torch.inf)
    return mask.repeat(1, num_groups, 1).unsqueeze(1)


def _explicit_attention(
    query: Tensor,  # [rows, kv heads, groups * columns, D]
    key: Tensor,
    value: Tensor,
    mask: Tensor,  # [rows, 1, groups * columns, slots]
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:
    """Attention written out, for what SDPA has no argument for: capped scores, and sinks that take up weight."""
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is None:
        weights = torch.softmax(scores, dim=-1, dtype=_softmax_dtype(query))
    else:
        rows, kv_heads, num_queries, _ = scores.shape
        groups = sinks.numel() // kv_heads
        sink = sinks.view(1, kv_heads, groups, 1).expand(rows, -1, -1, num_queries // groups)
        with_sink = torch.cat([scores, sink.reshape(rows, kv_heads, num_queries, 1).to(scores)], dim=-1)
        weights = torch.softmax(with_sink, dim=-1, dtype=_softmax_dtype(query))[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)


def _softmax_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


AttentionInterface.register(NAME, packed_attention_forward)
