"""The floor of a target step: what it has to read and to compute, and how fast this machine can do either."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from batchspec.models.prepacking import PrepackedLinear
from batchspec.models.runner import PackedRunner

COPIED_BYTES = 1 << 29
"""Far more than a cache holds."""
MATRIX_SIZE = {"cpu": 2048, "cuda": 8192}
TRIES = 5
"""The best of them counts, as a floor is what is possible."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What any step of a model costs, in parts."""

    weight_bytes: int
    """Read once by a step, whatever its tokens."""
    cache_bytes: int
    """Keys and values of one token, of all layers."""
    token_operations: int
    """Of all matrix products with weights, for one token; a multiplication and an addition are two."""
    pair_operations: int
    """Of attention, for one query token and one key token, all layers and heads."""

    def work(self, num_rows: int, num_columns: int, context: int) -> Work:
        """A step of rows that hold `context` tokens and add `num_columns` each.

        The second of two new tokens sees the first one: with 10 tokens held, two new ones see 11 and 12.

        >>> StepCost(100, 4, 50, 3).work(num_rows=2, num_columns=2, context=10)
        Work(bytes=196, operations=338)
        """
        pairs = num_columns * context + num_columns * (num_columns + 1) // 2
        return Work(
            bytes=self.weight_bytes + num_rows * (context + num_columns) * self.cache_bytes,
            operations=num_rows * (num_columns * self.token_operations + pairs * self.pair_operations),
        )


@dataclass(frozen=True, slots=True)
class Work:
    bytes: int
    operations: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of the machine, in the same run."""

    bandwidth: float
    """Bytes per second."""
    rate: float
    """Operations of matrix products per second, in the model's dtype."""

    def floor(self, work: Work) -> float:
        """Seconds that the work takes at least.

        >>> Machine(bandwidth=10.0, rate=100.0).floor(Work(bytes=20, operations=100))
        2.0
        """
        return max(self.memory_seconds(work), self.matrix_seconds(work))

    def memory_seconds(self, work: Work) -> float:
        return work.bytes / self.bandwidth

    def matrix_seconds(self, work: Work) -> float:
        return work.operations / self.rate

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cost_of(runner: PackedRunner) -> StepCost:
    """What a step of the runner's model costs. The runner must have run once, as its cache tells the heads.

    Embeddings are left out: a step reads a row of them for each token, next to nothing. A head that shares them
    is a matrix product, and counts. A sliding window is not heeded.

    Raises:
        ValueError: the model is a mixture of experts, of which a step reads some.
    """
    model = runner.model
    if any(name.endswith("experts") for name, _ in model.named_modules()):
        raise ValueError("bench step counts what every step reads; of a mixture of experts it reads some only")
    keys, values = runner.cache.keys, runner.cache.values
    heads = int(model.config.get_text_config(decoder=True).num_attention_heads)
    sizes = [keys[layer].shape[3] + values[layer].shape[3] for layer in keys]
    stored = [store[layer] for store in (keys, values) for layer in store]
    return StepCost(
        weight_bytes=weight_bytes(model),
        cache_bytes=sum(tensor.shape[1] * tensor.shape[3] * tensor.itemsize for tensor in stored),
        token_operations=sum(2 * numel for numel in _matrices(model)),
        pair_operations=sum(2 * heads * size for size in sizes),
    )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights but embeddings, each tensor once; prepacked ones as if they were not."""
    products = {id(module.weight) for module in _plain_products(model)}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - products
    plain = [parameter for parameter in model.parameters() if id(parameter) not in tables]
    return sum(parameter.numel() * parameter.itemsize for parameter in plain) + sum(
        (module.out_features * module.in_features + (0 if module.bias is None else module.out_features))
        * module.dtype.itemsize
        for module in _packed_products(model)
    )


def _matrices(model: nn.Module) -> list[int]:
    """Elements of each matrix that tokens are multiplied with; one that is used twice counts twice."""
    packed = [module.out_features * module.in_features for module in _packed_products(model)]
    return packed + [module.weight.numel() for module in _plain_products(model)]


def _packed_products(model: nn.Module) -> list[PrepackedLinear]:
    return [module for module in model.modules() if isinstance(module, PrepackedLinear)]


def _plain_products(model: nn.Module) -> list[Any]:
    """Linear layers, and GPT-2's, which transformers calls Conv1D."""
    return [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Memory bandwidth by a large sum and a large copy, the better one; matrix rate by a large product."""
    block = torch.ones(COPIED_BYTES // 4, dtype=torch.float32, device=device)
    other = torch.empty_like(block)
    read = COPIED_BYTES / best_seconds(lambda: block.sum(), device)
    copied = 2 * COPIED_BYTES / best_seconds(lambda: other.copy_(block), device)
    size = MATRIX_SIZE.get(device.type, MATRIX_SIZE["cpu"])
    matrix = torch.randn(size, size, device=device).to(dtype)
    rate = 2 * size**3 / best_seconds(lambda: matrix @ matrix, device)
    return Machine(max(read, copied), rate)


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    work()  # warm up
    return min(timed(work, device) for _ in range(TRIES))


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the work took, a GPU's included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
