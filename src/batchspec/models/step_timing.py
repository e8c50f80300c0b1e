"""How long steps of a model take, by their number of tokens and by what they attend to: measured at load."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from batchspec.layout.block_step import lay_out_blocks
from batchspec.layout.blocks import BLOCK, BlockTable
from batchspec.layout.packed import PackedStep, pack
from batchspec.models.attention_trial import AttentionKind
from batchspec.models.block_attention import attend_blocks, block_mask
from batchspec.models.invariance import attention_kinds
from batchspec.models.products import circumstances, random_like, remembered
from batchspec.models.runner import FeatureRunner, Runner
from batchspec.models.shallow import num_layers

SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)
"""Numbers of tokens that are measured, as far as steps of so many come up; beyond, time grows evenly."""

REPEATS = 3
"""Of which the fastest counts: what slows a step down here is not the step's."""

LENGTH = 64
"""Tokens that rows hold before the step, if there is room."""

ROWS, MANY_BLOCKS, MANY_COLUMNS, CACHES = 8, 8, 4, 6
"""Over what attention is measured: rows, blocks of each, columns added, and layers."""

Forward = Callable[[PackedStep, Tensor], Tensor]


def measure_steps(runner: Runner, most_tokens: int) -> list[tuple[int, float]]:
    """Seconds of a step of the target, or of a draft model, by its number of tokens; answers are remembered by
    device, dtype and shape. What the runner's rows hold is overwritten."""
    return _measure("target", runner, most_tokens, lambda step, tokens: runner.forward(step, tokens))


def measure_draft_steps(runner: Runner, most_tokens: int) -> list[tuple[int, float]]:
    """The same for a draft model, of which only each row's last logits are wanted."""
    return _measure("draft", runner, most_tokens, _draft_forward(runner))


def measure_attention(model: PreTrainedModel) -> tuple[float, float]:
    """Seconds that all layers of the model take to attend to one more block, and for one more column of queries of
    a block; answers are remembered as well."""
    (kind, *_) = attention_kinds(model)
    like = torch.empty(0, dtype=kind.dtype, device=kind.device)
    count = num_layers(model)
    return remembered((kind, count, *circumstances(like)), lambda: _attention_costs(kind, count))


@torch.inference_mode()
def _attention_costs(kind: AttentionKind, num_layers: int) -> tuple[float, float]:
    few = _attention_seconds(kind, 1, 1)
    many, wide = (_attention_seconds(kind, MANY_BLOCKS, columns) for columns in (1, 1 + MANY_COLUMNS))
    block = (many - few) / (ROWS * (MANY_BLOCKS - 1))
    column = (wide - many) / (ROWS * MANY_BLOCKS * MANY_COLUMNS)
    return num_layers * max(0.0, block), num_layers * max(0.0, column)


def _attention_seconds(kind: AttentionKind, num_blocks: int, num_columns: int) -> float:
    """Of one layer, over rows of so many blocks; in turns over several caches, as layers have one each."""
    table = BlockTable()
    step = pack([num_blocks * BLOCK - num_columns] * ROWS, [num_columns] * ROWS, kind.device)
    table.give(table.missing(step.rows, [num_blocks * BLOCK] * ROWS))
    layout = lay_out_blocks(step, table)
    like = torch.empty(0, dtype=kind.dtype, device=kind.device)
    shape = ROWS * num_blocks, kind.num_kv_heads, BLOCK
    keys = [random_like((*shape, kind.head_size), like) for _ in range(CACHES)]
    values = [random_like((*shape, kind.value_size), like) for _ in range(CACHES)]
    grid = random_like((shape[0], kind.num_kv_heads, kind.num_groups * num_columns, kind.head_size), like)
    precise = torch.promote_types(kind.dtype, torch.float32)
    mask = block_mask(layout, None, kind.num_groups, kind.num_groups * num_columns, BLOCK, precise)

    def attend() -> None:
        for key, value in zip(keys, values, strict=True):
            out = attend_blocks(grid, key, value, layout, mask, 0.1, None, None)
        out[-1, -1, -1, -1].item()

    attend()
    return min(_timed(attend) for _ in range(REPEATS)) / CACHES


def _draft_forward(runner: Runner) -> Forward:
    if not isinstance(runner, FeatureRunner):
        return lambda step, tokens: runner.forward(step, tokens, keep=step.last_index)
    hidden = runner.model.config.get_text_config(decoder=True).hidden_size
    features = torch.zeros(1, hidden, dtype=runner.model.dtype, device=runner.device)
    return lambda step, tokens: runner.forward_features(
        step, tokens, features.expand(step.num_tokens, -1), step.last_index
    )


def _measure(role: str, runner: Runner, most_tokens: int, forward: Forward) -> list[tuple[int, float]]:
    model = runner.model
    layers = frozenset(type(module) for module in model.modules())
    like = torch.empty(0, dtype=model.dtype, device=runner.device)
    size = runner.num_rows, runner.max_length, most_tokens, getattr(runner, "shapes", None)
    key = (role, type(runner), *circumstances(like), layers, model.config.to_json_string(), *size)
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
