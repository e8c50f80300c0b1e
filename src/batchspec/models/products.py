"""At which numbers of tokens does a matrix product give a token the same bits, wherever it stands?

Libraries choose the order of a sum by the shape of the product. So each weight shape is tried, with random inputs
whose sums cancel, and the results are compared bit by bit. Answers are remembered for the life of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

ANCHOR = 32
"""Tokens of the step that all others have to agree with. It is the same for every engine, so that a request gets
the same tokens in batches of any size."""

LEAST_TRIED = 128
"""Numbers of tokens are tried up to this at least: engines of many sizes then share one answer."""

Answer = TypeVar("Answer")
_answers: dict[Hashable, Any] = {}

Product = Callable[[Tensor], Tensor]
"""From rows `[N, inputs]` to `[N, outputs]`."""

Way = Callable[[Tensor], Product]
"""A way to multiply by weights `[outputs, inputs]`."""


def sizes_to_try(largest: int) -> list[int]:
    """Each number up to 16, then in steps of at most a quarter, up to one that is large enough.

    >>> sizes_to_try(30)
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 24, 28, 32]
    """
    sizes = list(range(1, 17))
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 3)))
    return sizes


@torch.inference_mode()
def sizes_like_anchor(way: Way, shape: tuple[int, int], like: Tensor, largest: int) -> frozenset[int]:
    """The numbers of tokens whose results equal those of ANCHOR, row by row, in any order of the rows.

    `shape` is that of the weights, `[outputs, inputs]`; `like` has their dtype and device.
    """
    sizes = sizes_to_try(max(largest, LEAST_TRIED))
    key = (way, shape, sizes[-1], *where(like))
    return remembered(key, lambda: _sizes_like_anchor(way, shape, like, sizes))


def _sizes_like_anchor(way: Way, shape: tuple[int, int], like: Tensor, sizes: list[int]) -> frozenset[int]:
    inputs, weights = cancelling((sizes[-1], shape[1]), shape, like)
    multiply = way(weights)
    anchors = multiply(inputs[:ANCHOR])
    alike = set()
    for size in sizes:
        result, other_way = multiply(inputs[:size]), multiply(inputs[:size].flip(0)).flip(0)
        shared = min(size, ANCHOR)
        if torch.equal(result, other_way) and torch.equal(result[:shared], anchors[:shared]):
            alike.add(size)
    return frozenset(alike)


def as_linear(weights: Tensor) -> Product:
    """The way of `nn.Linear`."""
    return lambda rows: F.linear(rows, weights)


def as_conv1d(weights: Tensor) -> Product:
    """The way of transformers' `Conv1D`, whose weight is `[inputs, outputs]`."""
    return lambda rows: torch.addmm(weights[:, 0], rows, weights.t())


def cancelling(left: tuple[int, ...], right: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    """Random tensors `[..., K]` whose products over K are sums of pairs a and -a, far apart.

    So the result is what rounding leaves, and shows in every bit whether two sums were taken in the same order. Of
    ordinary sums, whose last bits are rounded away in half precision, one in 65,000 would show it.
    """
    half, odd = left[-1] // 2, left[-1] % 2
    order = torch.randperm(left[-1], generator=torch.Generator().manual_seed(1))
    first, second = noise((*left[:-1], half), like), noise((*right[:-1], half), like)
    rest = [tensor.new_zeros(*tensor.shape[:-1], odd) for tensor in (first, second)]
    order = order.to(like.device)
    pairs = torch.cat([first, -first, rest[0]], dim=-1), torch.cat([second, second, rest[1]], dim=-1)
    return pairs[0][..., order], pairs[1][..., order]


def noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Random numbers of the type and on the device of `like`; the global generator stays as it is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)


def where(tensor: Tensor) -> tuple[Hashable, ...]:
    """What decides how a library computes, but for shapes."""
    name = torch.cuda.get_device_name(tensor.device) if tensor.device.type == "cuda" else "cpu"
    return str(tensor.device), name, tensor.dtype, torch.get_num_threads()


def remembered(key: Hashable, ask: Callable[[], Answer]) -> Answer:
    if key not in _answers:
        _answers[key] = ask()
    answer: Answer = _answers[key]
    return answer
