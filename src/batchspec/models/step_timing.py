"""How long steps of a model take, by their number of tokens: measured at load, in a second or so."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from batchspec.layout.packed import PackedStep, pack
from batchspec.models.products import circumstances, remembered
from batchspec.models.runner import FeatureRunner, Runner

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)
"""Numbers of tokens that are measured, as far as steps of so many come up; beyond, time grows evenly."""

REPEATS = 3
"""Of which the fastest counts: what slows a step down here is not the step's."""

LENGTH = 64
"""Tokens that rows hold before the step, if there is room."""

Forward = Callable[[PackedStep, Tensor], Tensor]


def measure_steps(runner: Runner, most_tokens: int) -> list[tuple[int, float]]:
    """Seconds of a step of the target, or of a draft model, by its number of tokens; answers are remembered by
    device, dtype and shape. What the runner's rows hold is overwritten."""
    return _measure(runner, most_tokens, lambda step, tokens: runner.forward(step, tokens))


def measure_draft_steps(runner: Runner, most_tokens: int) -> list[tuple[int, float]]:
    """The same for a draft model, of which only each row's last logits are wanted."""
    return _measure(runner, most_tokens, _draft_forward(runner))


def _draft_forward(runner: Runner) -> Forward:
    if not isinstance(runner, FeatureRunner):
        return lambda step, tokens: runner.forward(step, tokens, keep=step.last_index)
    hidden = runner.model.config.get_text_config(decoder=True).hidden_size
    features = torch.zeros(1, hidden, dtype=runner.model.dtype, device=runner.device)
    return lambda step, tokens: runner.forward_features(
        step, tokens, features.expand(step.num_tokens, -1), step.last_index
    )


def _measure(runner: Runner, most_tokens: int, forward: Forward) -> list[tuple[int, float]]:
    model = runner.model
    layers = frozenset(type(module) for module in model.modules())
    like = torch.empty(0, dtype=model.dtype, device=runner.device)
    key = (type(runner), *circumstances(like), layers, model.config.to_json_string(), runner.num_rows, most_tokens)
    sizes = sorted({*(size for size in SIZES if size < most_tokens), min(most_tokens, SIZES[-1])})
    return remembered(key, lambda: [(size, _seconds(runner, size, forward)) for size in sizes])


def _seconds(runner: Runner, size: int, forward: Forward) -> float:
    num_rows = min(runner.num_rows, size)
    num_new = [size // num_rows + (row < size % num_rows) for row in range(num_rows)]
    length = max(0, min(LENGTH, runner.max_length - num_new[0]))
    step = pack([length] * num_rows, num_new, runner.device)
    tokens = torch.zeros(size, dtype=torch.long, device=runner.device)
    forward(step, tokens)[-1, -1].item()
    return min(_timed(lambda: forward(step, tokens)[-1, -1].item()) for _ in range(REPEATS))


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
