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
from batchspec.layout.shapes import Shapes
from batchspec.models.attention_trial import AttentionKind
from batchspec.models.explicit_attention import attend, attend_invariantly, with_queries

NAME = "batchspec_packed"
"""The name under which transformers finds this attention function."""

EXPERTS = "batched_mm"
"""transformers' implementation of experts that gathers the weights of each token's experts."""

KNOWN_ARGUMENTS = frozenset(
    {"sliding_window", "is_causal", "dropout", "position_ids", "use_cache", "cache_position"}
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
)
"""What layers may pass besides the named parameters: heeded here, or without effect on a decoder in eval mode.
Anything else (position biases, chunks, indices of sparse attention) may change the result, and is refused."""


class StepContext:
    """What all layers of one forward pass share: the layout, the shapes that attention is padded to (None: as they
    come), and a mask for each window in use."""

    def __init__(self, step: PackedStep, shapes: Shapes | None) -> None:
        self.step = step
        self.shapes = shapes
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def mask(self, window: int | None, num_groups: int, like: Tensor) -> Tensor:
        """Additive mask `[rows, 1, queries, slots]` for keys `like`: 0 where a query sees a slot, else -inf."""
        key = (window, num_groups, like.dtype)
        if key not in self._masks:
            mask = _additive_mask(self.step, window, num_groups, like)
            self._masks[key] = with_queries(mask, self.shapes.num_queries(mask.shape[2])) if self.shapes else mask
        return self._masks[key]


_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
"""By the identity of a model's config, whose attention implementation is switched for the time of a step."""

_context: ContextVar[StepContext] = ContextVar("batchspec_step_context")

_observed: ContextVar[set[AttentionKind] | None] = ContextVar("batchspec_observed_attention", default=None)


@contextmanager
def packed_attention(model: PreTrainedModel, step: PackedStep, shapes: Shapes | None = None) -> Iterator[None]:
    """Within this context `model` attends by `step`'s layout; outside of it the model is as it was.

    With `shapes`, experts too are computed token by token, in shapes that do not depend on the routing.

    One at a time per model: engines that share a model in several threads take turns.
    """
    with _locks[id(model.config)]:
        configs = list(_with_sub_configs(model.config))
        before = [(config._attn_implementation, config._experts_implementation) for config in configs]
        token = _context.set(StepContext(step, shapes))
        model.config._attn_implementation = NAME  # passed on to all sub-configs
        if shapes is not None:
            model.config._experts_implementation = EXPERTS
        try:
            yield
        finally:
            # Outer configs first, as they pass theirs on.
            for config, (attention, experts) in zip(configs, before, strict=True):
                config._attn_implementation = attention
                config._experts_implementation = experts
            _context.reset(token)


@contextmanager
def observed_attention() -> Iterator[set[AttentionKind]]:
    """Within this context the kinds of the layers that attend are noted down."""
    kinds: set[AttentionKind] = set()
    token = _observed.set(kinds)
    try:
        yield kinds
    finally:
        _observed.reset(token)


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
    mask = context.mask(_window(module, kwargs), num_groups, key)
    if (kinds := _observed.get()) is not None:
        sizes = (num_kv_heads, num_groups, key.shape[3], value.shape[3])
        kinds.add(AttentionKind(*sizes, softcap is not None, s_aux is not None, key.dtype, key.device))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    sinks = None if s_aux is None else _sink_column(s_aux, num_kv_heads, step.num_columns)
    if context.shapes is not None:
        out = attend_invariantly(grid, key, value, mask, scale, softcap, sinks, context.shapes)
    elif softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(grid, key, value, attn_mask=mask, scale=scale)
    else:
        out = attend(grid, key, value, mask, scale, softcap, sinks)
    return _from_grid(out, step, num_heads, query.shape[2]), None


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
    line = query[0].transpose(0, 1)[: step.num_tokens]  # [N, heads, D]
    if not step.is_full:
        places = line.new_zeros(step.num_rows * step.num_columns, heads, head_size)
        line = places.index_copy_(0, step.grid_index, line)
    grid = line.reshape(step.num_rows, step.num_columns, num_kv_heads, -1, head_size)
    return grid.permute(0, 2, 3, 1, 4).reshape(step.num_rows, num_kv_heads, -1, head_size)


def _from_grid(out: Tensor, step: PackedStep, num_heads: int, num_places: int) -> Tensor:
    """[rows, kv heads, groups * columns, D] -> [1, N, heads, D], with zeros behind N up to `num_places`"""
    rows, _, _, head_size = out.shape
    grid = out.unflatten(2, (-1, step.num_columns)).permute(0, 3, 1, 2, 4)
    line = grid.reshape(rows * step.num_columns, num_heads, head_size)
    if not step.is_full:
        line = line.index_select(0, step.grid_index)
    if num_places > step.num_tokens:
        line = F.pad(line, (0, 0, 0, 0, 0, num_places - step.num_tokens))
    return line.unsqueeze(0).contiguous()  # some models view it


def _additive_mask(
    step: PackedStep, window: int | None, num_groups: int, like: Tensor
) -> Tensor:  # like: [rows, kv heads, slots, D]; [rows, 1, groups * columns, slots]
    """A query at position p sees slots 0 ... p; with a window w only the last w of them."""
    positions = step.grid_positions().unsqueeze(-1)  # [rows, columns, 1]
    slots = torch.arange(like.shape[2], device=positions.device)
    visible = slots <= positions
    if window is not None:
        visible &= slots > positions - window
    mask = torch.zeros(visible.shape, dtype=like.dtype, device=positions.device).masked_fill_(~visible, -torch.inf)
    return mask.repeat(1, num_groups, 1).unsqueeze(1)


def _sink_column(sinks: Tensor, num_kv_heads: int, num_columns: int) -> Tensor:
    """[heads] -> [1, kv heads, groups * columns, 1]: a score beside those of the slots, for each query."""
    return sinks.view(num_kv_heads, -1, 1).expand(-1, -1, num_columns).reshape(1, num_kv_heads, -1, 1)


AttentionInterface.register(NAME, packed_attention_forward)
