"""At which numbers of tokens does an activation function give each the same bits?

It computes number by number, and yet the last ones of a tensor, which fill no vector, may be computed by other
code and rounded otherwise; and so may those where the part of a thread ends. That shows in few numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchspec.models.products import ANCHOR, circumstances, random_like, remembered

MOST_DRAWS, MOST_NUMBERS = 64, 1 << 25
"""Sets of random numbers that are tried, and numbers in all: of those at the end of a tensor, one in 20 shows a
difference, and a narrow one ends with few."""

SOME = 3
"""Tokens of the step that is held against one of a single token."""

FAR = 1000.0
"""Every other set is so much larger: angles of positions are."""

EXACT = frozenset({"abs", "add", "clamp", "div", "mul", "neg", "relu", "sub", "_to_copy"})
"""Operations whose results are rounded in one way only."""


@dataclass(frozen=True)
class Operation:
    """One that computes number by number, on one tensor, which stands at some place among its arguments."""

    func: Any
    arguments: tuple[Any, ...]
    place: int
    keywords: tuple[tuple[str, Any], ...]
    width: int
    """Numbers for each token."""
    dtype: torch.dtype
    device: torch.device

    def __call__(self, rows: Tensor) -> Tensor:
        arguments = list(self.arguments)
        arguments.insert(self.place, rows.clone())  # it may work in place
        result: Tensor = self.func(*arguments, **dict(self.keywords))
        return result


def sizes_of_even_activations(run: Callable[[int], object], sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of `sizes` at which the activations of a model give a token what they give it in a step of ANCHOR.
    `run` runs a step of so many tokens."""
    even = set(sizes)
    for operation in _operations(run):
        like = torch.empty(0, dtype=operation.dtype, device=operation.device)
        key = (repr(operation), tuple(sizes), *circumstances(like))
        even &= remembered(key, partial(_even_sizes, operation, sizes, like))
    return tuple(sorted(even))


@torch.inference_mode()
def _operations(run: Callable[[int], object]) -> list[Operation]:
    """Those that are given more numbers if there are more tokens. Others, of frequencies, say, are the same in all
    steps."""
    found: list[set[str]] = []
    for count in (1, SOME):
        with _Recorder(count) as recorder:
            run(count)
        found.append(set(recorder.found))
    return [operation for name, operation in recorder.found.items() if name in found[0]]


class _Recorder(TorchDispatchMode):
    """Notes the operations of one tensor, modules' or functions', that compute number by number."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.found: dict[str, Operation] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if torch.Tag.pointwise in func.tags and name not in EXACT:
            places = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
            if len(places) == 1 and args[places[0]].is_floating_point():
                (place,) = places
                others = args[:place] + args[place + 1 :]
                given, keywords = args[place], tuple((kwargs or {}).items())
                width = given.numel() // self.num_tokens
                operation = Operation(func, others, place, keywords, width, given.dtype, given.device)
                self.found[repr(operation)] = operation
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def _even_sizes(operation: Operation, sizes: Sequence[int], like: Tensor) -> frozenset[int]:
    even = set(sizes)
    num_rows = -(-max((*sizes, ANCHOR)) // ANCHOR) * ANCHOR
    num_draws = max(2, min(MOST_DRAWS, MOST_NUMBERS // (operation.width * (num_rows + sum(sizes)))))
    for seed in range(num_draws):
        rows = random_like((num_rows, operation.width), like, seed) * (FAR if seed % 2 else 1.0)
        if operation(rows).isnan().any():  # a root or a logarithm
            rows = rows.abs() + torch.finfo(like.dtype).tiny
        wanted = torch.cat([operation(part) for part in rows.split(ANCHOR)])
        even = {
            size
            for size in even
            if _is_same(operation(rows[:size]), wanted[:size])
            and _is_same(operation(rows[:size].flip(0)).flip(0), wanted[:size])
        }
    return frozenset(even)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
