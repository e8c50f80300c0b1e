"""How long steps of a model take, by their number of tokens and by what they attend to: measured at load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchspec.layout.block_step import lay_out_attention
from batchspec.layout.blocks import BLOCK, BlockTable
from batchspec.layout.packed import PackedStep, pack
from batchspec.models.attention import StepContext, attend_in_blocks
from batchspec.models.attention_trial import AttentionKind
from batchspec.models.invariance import attention_kinds
from batchspec.models.products import circumstances, random_like, remembered
from batchspec.models.runner import FeatureRunner, Runner
from batchspec.models.shallow import num_layers

SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)
"""Numbers of tokens that are measured, as far as steps of so many come up; beyond, time grows evenly."""

REPEATS = 4
"""Of which the fastest counts: what slows a step down here is not the step's."""

AS_OFTEN = 10
"""Times as many repeats of what takes a few milliseconds only."""

LENGTH = 64
"""Tokens that rows hold before the step, if there is room."""

ROWS, MANY_BLOCKS, MANY_COLUMNS, CACHES = 8, 4, 4, 6
"""Over what attention is measured: rows, blocks of each, columns added, and layers."""

Forward = Callable[[PackedStep, Tensor], Tensor]


Points = list[tuple[int, float]]
"""Tokens of a step, and its seconds."""


def measure_target(runner: Runner, most_tokens: int) -> tuple[Points, float, float]:
    """Seconds of a step of the target by its number of tokens; those that all its layers take to attend to one
    more block; and for one more column of queries of a block. Answers are remembered by device, dtype and shape.
    What the runner's rows hold is overwritten."""
    key = ("target", *_circumstances(runner, most_tokens))
    return remembered(key, lambda: _measure_target(runner, _sizes(most_tokens)))


def measure_draft(runner: Runner, most_tokens: int) -> Points:
    """Seconds of a step of a draft model by its number of tokens, of which each row's last logits are wanted."""
    key = ("draft", *_circumstances(runner, most_tokens))
    return remembered(key, lambda: _measure_draft(runner, _sizes(most_tokens)))


@torch.inference_mode()
def _measure_target(runner: Runner, sizes: list[int]) -> tuple[Points, float, float]:
    """Steps and attention take turns, too."""
    steps = [_step(runner, size, runner.forward) for size in sizes]
    (kind, *_) = attention_kinds(runner.model)
    shapes = (1, 1), (MANY_BLOCKS, 1), (MANY_BLOCKS, 1 + MANY_COLUMNS)
    pools = _pools(kind)
    attention = [_attention(kind, pools, num_blocks, num_columns) for num_blocks, num_columns in shapes]
    seconds = fastest([*steps, *attention * AS_OFTEN], REPEATS)
    few, many, wide = (min(seconds[len(steps) + place :: len(shapes)]) for place in range(len(shapes)))
    times = num_layers(runner.model) / CACHES
    block = times * max(0.0, many - few) / (ROWS * (MANY_BLOCKS - 1))
    column = times * max(0.0, wide - many) / (ROWS * MANY_BLOCKS * MANY_COLUMNS)
    return list(zip(sizes, seconds, strict=False)), block, column


def _measure_draft(runner: Runner, sizes: list[int]) -> Points:
    forward = _draft_forward(runner)
    runs = [_step(runner, size, forward) for size in sizes]
    return list(zip(sizes, fastest(runs, REPEATS * AS_OFTEN), strict=True))


def _pools(kind: AttentionKind) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of several layers: attention takes turns over them, as a model's layers do."""
    like = torch.empty(0, dtype=kind.dtype, device=kind.device)
    shape = ROWS * MANY_BLOCKS, kind.num_kv_heads, BLOCK
    return [
        (random_like((*shape, kind.head_size), like), random_like((*shape, kind.value_size), like))
        for _ in range(CACHES)
    ]


def _attention(
    kind: AttentionKind, pools: list[tuple[Tensor, Tensor]], num_blocks: int, num_columns: int
) -> Callable[[], object]:
    """Over rows of so many blocks, of which each adds so many tokens."""
    table = BlockTable()
    step = pack([num_blocks * BLOCK - num_columns] * ROWS, [num_columns] * ROWS, kind.device)
    table.give(table.missing(step.rows, [num_blocks * BLOCK] * ROWS))
    context = StepContext(lay_out_attention(step, table), None)
    like = torch.empty(0, dtype=kind.dtype, device=kind.device)
    line = random_like((step.num_tokens, kind.num_kv_heads * kind.num_groups, kind.head_size), like)

    def attend() -> None:
        for key, value in pools:
            out = attend_in_blocks(context, line, key, value, None, 0.1, None, None)
        out[-1, -1, -1].item()

    return attend


def _draft_forward(runner: Runner) -> Forward:
    if not isinstance(runner, FeatureRunner):
        return lambda step, tokens: runner.forward(step, tokens, keep=step.last_index)
    hidden = runner.model.config.get_text_config(decoder=True).hidden_size
    features = torch.zeros(1, hidden, dtype=runner.model.dtype, device=runner.device)
    return lambda step, tokens: runner.forward_features(
        step, tokens, features.expand(step.num_tokens, -1), step.last_index
    )


def _sizes(most_tokens: int) -> list[int]:
    return sorted({*(size for size in SIZES if size < most_tokens), min(most_tokens, SIZES[-1])})


def _circumstances(runner: Runner, most_tokens: int) -> tuple[object, ...]:
    """What measurements hold for."""
    model = runner.model
    layers = frozenset(type(module) for module in model.modules())
    like = torch.empty(0, dtype=model.dtype, device=runner.device)
    size = runner.num_rows, runner.max_length, most_tokens, getattr(runner, "shapes", None)
    return type(runner), *circumstances(like), layers, model.config.to_json_string(), *size


def _step(runner: Runner, size: int, forward: Forward) -> Callable[[], object]:
    num_rows = min(runner.num_rows, size)
    num_new = [size // num_rows + (row < size % num_rows) for row in range(num_rows)]
    length = max(0, min(LENGTH, runner.max_length - num_new[0]))
    step = pack([length] * num_rows, num_new, runner.device)
    tokens = torch.zeros(size, dtype=torch.long, device=runner.device)
    return lambda: forward(step, tokens)[-1, -1].item()


def fastest(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of each run, after a warm-up the least of so many. They take turns, so that a slow moment of the
    machine strikes all of them and not one's every repeat: what counts are the differences."""
    for run in runs:
        run()
    turns = [[_timed(run) for run in runs] for _ in range(repeats)]
    return [min(own) for own in zip(*turns, strict=True)]


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
