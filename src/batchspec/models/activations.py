"""At which numbers of tokens does an activation function give each the same bits?

It computes number by number, and yet the last ones of a tensor, which fill no vector, may be computed by other
code and rounded otherwise; and so may those where the part of a thread ends. That shows in few numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchspec.models.products import ANCHOR, circumstances, random_like, remembered

DRAWS = 16
"""Sets of random numbers that are tried: of those at the end, one in 20 shows a difference."""

Activation: TypeAlias = Callable[[Tensor], Tensor]


def sizes_of_even_activations(run: Callable[[], object], sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of `sizes` at which the activations of a model give a token what they give it in a step of ANCHOR.
    `run` runs a step of one token."""
    with _Recorder() as recorder, torch.inference_mode():
        run()
    even = set(sizes)
    for (name, width, *_), (activation, like) in recorder.found.items():
        key = (name, width, tuple(sizes), *circumstances(like))
        even &= remembered(key, partial(_even_sizes, activation, width, sizes, like))
    return tuple(sorted(even))


class _Recorder(TorchDispatchMode):
    """Notes the operations that compute number by number, modules' or functions', and the width of what they are
    given. Those of two tensors, sums and products, are rounded exactly and need not be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[Hashable, ...], tuple[Activation, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        is_first = len(tensors) == 1 and args and args[0] is tensors[0]
        if torch.Tag.pointwise in func.tags and is_first and args[0].is_floating_point():
            key = (f"{func} {args[1:]} {kwargs}", args[0].numel(), args[0].dtype)
            self.found[key] = partial(_apply, func, args[1:], kwargs), args[0].new_empty(0)
        return func(*args, **kwargs)


def _apply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor) -> Tensor:
    result: Tensor = func(rows, *args, **kwargs)
    return result


@torch.inference_mode()
def _even_sizes(activation: Activation, width: int, sizes: Sequence[int], like: Tensor) -> frozenset[int]:
    even = set(sizes)
    for seed in range(DRAWS):
        rows = random_like((max((*sizes, ANCHOR)), width), like, seed)
        if activation(rows.clone()).isnan().any():  # a root or a logarithm
            rows = rows.abs() + torch.finfo(like.dtype).tiny
        wanted = torch.cat([activation(part.clone()) for part in rows.split(ANCHOR)])
        even = {
            size
            for size in even
            if torch.equal(activation(rows[:size].clone()), wanted[:size])
            and torch.equal(activation(rows[:size].flip(0)).flip(0), wanted[:size])
        }
    return frozenset(even)
