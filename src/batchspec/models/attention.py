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

from batchspec.layout.block_step import AttentionLayout
from batchspec.layout.shapes import Shapes
from batchspec.models.attention_trial import AttentionKind
from batchspec.models.block_attention import attend_blocks, block_mask, query_places, result_places
from batchspec.models.row_attention import attend_row

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
    come), masks for each window in use, and where queries and results lie."""

    def __init__(self, layout: AttentionLayout, shapes: Shapes | None) -> None:
        self.layout = layout
        self.shapes = shapes
        self._masks: dict[tuple[int | None, tuple[int, int], torch.dtype], list[Tensor]] = {}
        self._places: dict[tuple[int, int], tuple[list[Tensor], Tensor]] = {}

    @property
    def is_row_alone(self) -> bool:
        return self.shapes is None and self.layout.step.num_rows == 1

    def masks(self, window: int | None, num_heads: int, key: Tensor) -> list[Tensor]:
        """Additive masks of the parts, `[B, 1, queries, block]`: 0 where a query sees a slot."""
        heads, dtype = (num_heads, key.shape[1]), torch.promote_types(key.dtype, torch.float32)
        kind = window, heads, dtype
        if kind not in self._masks:
            num_groups = num_heads // key.shape[1]
            parts = zip(self.layout.parts, self.num_queries(*heads), strict=True)
            self._masks[kind] = [
                block_mask(part, window, num_groups, count, key.shape[2], dtype) for part, count in parts
            ]
        return self._masks[kind]

    def places(self, num_heads: int, num_kv_heads: int) -> tuple[list[Tensor], Tensor]:
        """Where each part's queries `[B, kv heads, queries]` are among the `N * heads` of the line; and in which
        vectors each token meets its blocks, `[T, heads]`."""
        heads = num_heads, num_kv_heads
        if heads not in self._places:
            counts = self.num_queries(*heads)
            parts = zip(self.layout.parts, counts, strict=True)
            queries = [query_places(part.queries, *heads, count) for part, count in parts]
            self._places[heads] = queries, result_places(self.layout, *heads, counts)
        return self._places[heads]

    def num_queries(self, num_heads: int, num_kv_heads: int) -> list[int]:
        """Of each part: queries that are computed for a block and kv head."""
        counts = [num_heads // num_kv_heads * part.num_columns for part in self.layout.parts]
        return [self.shapes.num_queries(count) for count in counts] if self.shapes else counts


_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
"""By the identity of a model's config, whose attention implementation is switched for the time of a step."""

_context: ContextVar[StepContext] = ContextVar("batchspec_step_context")

_observed: ContextVar[set[AttentionKind] | None] = ContextVar("batchspec_observed_attention", default=None)


@contextmanager
def packed_attention(
    model: PreTrainedModel, layout: AttentionLayout, shapes: Shapes | None = None
) -> Iterator[None]:
    """Within this context `model` attends by this layout; outside of it the model is as it was.

    With `shapes`, experts too are computed token by token, in shapes that do not depend on the routing.

    One at a time per model: engines that share a model in several threads take turns.
    """
    with _locks[id(model.config)]:
        configs = list(_with_sub_configs(model.config))
        before = [(config._attn_implementation, config._experts_implementation) for config in configs]
        token = _context.set(StepContext(layout, shapes))
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
    key: Tensor,  # [blocks, kv heads, block, head size]
    value: Tensor,  # [blocks, kv heads, block, value head size]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [heads]
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from the packed queries to the blocks of their rows. Returns `[1, N, heads, value head size]`.

    `key` and `value` are what `BlockCache.update` returned.

    Raises:
        ValueError: the layer attends by a rule other than causal, windowed or not.
    """
    _refuse_other_rules(module, attention_mask, kwargs)
    context = _context.get()
    num_places = query.shape[2]
    if (kinds := _observed.get()) is not None:
        sizes = (key.shape[1], query.shape[1] // key.shape[1], key.shape[3], value.shape[3])
        kinds.add(AttentionKind(*sizes, softcap is not None, key.dtype, key.device))
    window = _window(module, kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    line = query[0].transpose(0, 1)[: context.layout.step.num_tokens]  # [N, heads, D]
    if context.is_row_alone and softcap is None and s_aux is None:
        out = attend_row(line, key, value, context.layout, window, scale)
    else:
        out = attend_in_blocks(context, line, key, value, window, scale, softcap, s_aux)
    if num_places > len(out):
        out = F.pad(out, (0, 0, 0, 0, 0, num_places - len(out)))
    return out.unsqueeze(0).contiguous(), None  # some models view it


def attend_in_blocks(
    context: StepContext, query: Tensor, key: Tensor, value: Tensor, window: int | None, *rules: Any
) -> Tensor:  # [N, heads, D], pools; [N, heads, value size]
    """From the queries of a line, whichever rows they belong to; `rules` as in `attend_blocks`."""
    queries, found = context.places(query.shape[1], key.shape[1])
    line = query.reshape(-1, query.shape[2])  # [N * heads, D]
    grids = [line.index_select(0, own.flatten()).view(-1, own.shape[2], line.shape[1]) for own in queries]
    masks = context.masks(window, query.shape[1], key)
    return attend_blocks(grids, key, value, context.layout, found, masks, *rules)


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


AttentionInterface.register(NAME, packed_attention_forward)
