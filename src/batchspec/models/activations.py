"""At which numbers of tokens does an activation function give each the same bits?

It computes number by number, and yet the last ones of a tensor, which fill no vector, may be computed by other
code and rounded otherwise; and so may those where the part of a thread ends. That shows in few numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from batchspec.models.products import ANCHOR, circumstances, random_like, remembered

DRAWS = 16
"""Sets of random numbers that are tried: of those at the end, one in 20 shows a difference."""


def sizes_of_even_activations(
    model: nn.Module, run: Callable[[], object], sizes: Sequence[int], like: Tensor
) -> tuple[int, ...]:
    """Those of `sizes` at which the activations of the model give a token what they give it in a step of ANCHOR.
    `run` runs a step of one token; `like` has the model's dtype and device."""
    even = set(sizes)
    for function, width in _activations(model, run):
        key = (repr(function), width, tuple(sizes), *circumstances(like))
        even &= remembered(key, partial(_even_sizes, function, width, sizes, like))
    return tuple(sorted(even))


def _activations(model: nn.Module, run: Callable[[], object]) -> list[tuple[nn.Module, int]]:
    """Modules that have no weights and no parts, and the width of what they are given; one of each kind."""
    found: dict[tuple[str, int], nn.Module] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if len(inputs) == 1 and isinstance(output, Tensor) and output.shape == inputs[0].shape:
            found[repr(module), output.shape[-1]] = module

    hooks = [module.register_forward_hook(note) for module in model.modules() if not _has_parts(module)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [(module, width) for (_, width), module in found.items()]


def _has_parts(module: nn.Module) -> bool:
    return any(True for part in (module.children(), module.parameters(), module.buffers()) for _ in part)


@torch.inference_mode()
def _even_sizes(function: nn.Module, width: int, sizes: Sequence[int], like: Tensor) -> frozenset[int]:
    even = set(sizes)
    for seed in range(DRAWS):
        rows = random_like((max((*sizes, ANCHOR)), width), like, seed)
        wanted = torch.cat([function(part) for part in rows.split(ANCHOR)])
        even = {size for size in even if torch.equal(function(rows[:size].clone()), wanted[:size])}
    return frozenset(even)
