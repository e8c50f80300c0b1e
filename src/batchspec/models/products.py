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

Way = Callable[[Tensor, Tensor | None], Product]
"""A way to multiply by weights `[outputs, inputs]` and add a bias `[outputs]`, if there is one."""


def sizes_to_try(largest: int) -> list[int]:
    """Each number up to 16, then in steps of at most a quarter, up to one that is large enough.

    >>> sizes_to_try(30)
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 24, 28, 32]
    """
    sizes = list(range(1, 17))
    while sizes[-1] < largest:  # multiples of ANCHOR from 128 on
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 3)))
    return sizes


@torch.inference_mode()
def sizes_like_anchor(
    way: Way, shape: tuple[int, int], has_bias: bool, like: Tensor, largest: int
) -> frozenset[int]:
    """The numbers of tokens at which each gets the bits that it gets in a step of ANCHOR, wherever it stands.

    `shape` is that of the weights, `[outputs, inputs]`; `like` has their dtype and device.
    """
    sizes = sizes_to_try(max(largest, LEAST_TRIED))
    key = (way, shape, has_bias, sizes[-1], *circumstances(like))
    return remembered(key, lambda: _sizes_like_anchor(way, shape, has_bias, like, sizes))


def _sizes_like_anchor(
    way: Way, shape: tuple[int, int], has_bias: bool, like: Tensor, sizes: list[int]
) -> frozenset[int]:
    inputs, weights = cancelling((sizes[-1], shape[1]), shape, like)
    multiply = way(weights, weights.new_zeros(shape[0]) if has_bias else None)
    wanted = torch.cat([multiply(part) for part in inputs.split(ANCHOR)])
    return frozenset(
        size
        for size in sizes
        if torch.equal(multiply(inputs[:size]), wanted[:size])
        and torch.equal(multiply(inputs[:size].flip(0)).flip(0), wanted[:size])
    )


def as_linear(weights: Tensor, bias: Tensor | None) -> Product:
    """The way of `nn.Linear`."""
    return lambda rows: F.linear(rows, weights, bias)


def as_conv1d(weights: Tensor, bias: Tensor | None) -> Product:
    """The way of transformers' `Conv1D`, whose weight is `[inputs, outputs]`, and which has a bias."""
    added, right = weights.new_zeros(len(weights)) if bias is None else bias, weights.t().contiguous()
    return lambda rows: torch.addmm(added, rows, right)


def cancelling(left: tuple[int, ...], right: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    """Random tensors `[..., K]` whose products over K are sums of pairs a and -a, far apart.

    So the result is what rounding leaves, and shows in every bit whether two sums were taken in the same order. Of
    ordinary sums, whose last bits are rounded away in half precision, one in 65,000 would show it.
    """
    half, odd = left[-1] // 2, left[-1] % 2
    order = torch.randperm(left[-1], generator=torch.Generator().manual_seed(1))
    first, second = random_like((*left[:-1], half), like), random_like((*right[:-1], half), like)
    rest = [tensor.new_zeros(*tensor.shape[:-1], odd) for tensor in (first, second)]
    order = order.to(like.device)
    pairs = torch.cat([first, -first, rest[0]], dim=-1), torch.cat([second, second, rest[1]], dim=-1)
    return pairs[0][..., order], pairs[1][..., order]


def random_like(shape: tuple[int, ...], like: Tensor, seed: int = 0) -> Tensor:
    """Random numbers of the type and on the device of `like`; the global generator stays as it is."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)


def circumstances(tensor: Tensor) -> tuple[Hashable, ...]:
    """What decides how a library computes with such a tensor, but for shapes."""
    name = torch.cuda.get_device_name(tensor.device) if tensor.device.type == "cuda" else "cpu"
    settings = torch.get_num_threads(), torch.get_float32_matmul_precision()
    return str(tensor.device), name, tensor.dtype, *settings


def remembered(key: Hashable, ask: Callable[[], Answer]) -> Answer:
    """The answer to a question that was asked before in this process, else a new one."""
    if key not in _answers:
        _answers[key] = ask()
    answer: Answer = _answers[key]
    return answer
