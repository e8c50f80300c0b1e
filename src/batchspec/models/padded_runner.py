"""Runners of the padded strategies. They leave a model its own attention: it gets a 2D mask and positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from batchspec.layout.packed import PackedStep, pack
from batchspec.layout.padded import lay_out
from batchspec.layout.shapes import Shapes
from batchspec.layout.transfer import to_device
from batchspec.models.attention import own_attention
from batchspec.models.padded_cache import PoolCache, RealignedBatch
from batchspec.models.runner import (
    PackedRunner,
    ReadLogits,
    cache_argument,
    check_eval_mode,
    prompt_chunks,
    what_to_keep,
)
from batchspec.stats import StageTimer


class PaddedModel:
    """Calls a model with a step laid out as a left-padded rectangle."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._arguments = set(inspect.signature(model.forward).parameters)
        self._cache_argument = cache_argument(model)

    def __call__(
        self,
        step: PackedStep,
        token_ids: Tensor,  # [N]
        cache: Cache,
        keep: Tensor | None,  # [M], places on the line
    ) -> Tensor:  # [N or M, vocabulary]
        check_eval_mode(self.model)
        padded = lay_out(step)
        grid = token_ids.new_zeros(step.num_rows * step.num_columns).index_copy_(0, step.grid_index, token_ids)
        arguments: dict[str, Any] = {"position_ids": padded.position_ids}
        if keep is not None and keep.numel() == 0:
            arguments["logits_to_keep"] = keep
        with own_attention(self.model):
            output = self.model(
                input_ids=grid.view(step.num_rows, step.num_columns),
                attention_mask=padded.mask,
                use_cache=True,
                **{self._cache_argument: cache},
                **{name: value for name, value in arguments.items() if name in self._arguments},
            )
        lines = output.logits.flatten(0, 1)  # [rows * T, vocabulary]
        if keep is not None:
            return lines[step.grid_index[keep]] if keep.numel() else lines[:0]
        return lines if step.is_full else lines[step.grid_index]


def is_too_wide(step: PackedStep, max_length: int) -> bool:
    """A rectangle may be wider than any of its rows may be long, and some models have masks of a fixed size: when
    the longest row is near the end of the context window and another one has drafts."""
    return step.num_rows > 1 and max(step.lengths) + step.num_columns > max_length


def row_by_row(
    step: PackedStep,
    token_ids: Tensor,  # [N]
    keep: Tensor | None,  # [M], places on the line
    run_row: Callable[[PackedStep, Tensor], Tensor],  # a step of one row and its tokens to its logits
) -> Tensor:  # [N or M, vocabulary]
    """Run a step as one step for each row that adds tokens."""
    rows = zip(step.rows, step.lengths, step.num_new, token_ids.split(list(step.num_new)), strict=True)
    logits = torch.cat(
        [run_row(pack([held], [new], token_ids.device, [row]), tokens) for row, held, new, tokens in rows if new]
    )
    return logits if keep is None else logits[keep]


class RealigningRunner:
    """EQSPEC's: the batch is realigned before a step whose rows gained unequally in the one before.

    A step takes all rows, in order; a row that it leaves out is forgotten.
    """

    def __init__(self, model: PreTrainedModel, num_rows: int, max_length: int, timer: StageTimer) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.num_rows = num_rows
        self.max_length = max_length
        self.timer = timer
        self.batch = RealignedBatch(timer)
        self._call = PaddedModel(model)

    @torch.inference_mode()
    def forward(
        self,
        step: PackedStep,
        token_ids: Tensor,  # [N]
        keep: Tensor | None = None,  # [M], places on the line
    ) -> Tensor:  # [N or M, vocabulary]
        if is_too_wide(step, self.max_length):
            return row_by_row(step, token_ids, keep, self._run_row)
        with self.timer.stage("realign"):
            cache = self.batch.align(step.lengths)
        return self._call(step, token_ids, cache, keep)

    def _run_row(self, step: PackedStep, token_ids: Tensor) -> Tensor:
        cache = self.batch.take_row(step.rows[0], step.lengths[0])
        logits = self._call(step, token_ids, cache, keep=None)
        self.batch.put_row(step.rows[0], cache)
        return logits

    @torch.inference_mode()
    def prefill(self, row: int, token_ids: list[int], start: int = 0, read: ReadLogits | None = None) -> None:
        cache = self.batch.take_row(row, start)
        for offset, chunk in prompt_chunks(token_ids):
            step = pack([start + offset], [len(chunk)], self.device)
            logits = self._call(step, to_device(chunk, self.device), cache, what_to_keep(read, self.device))
            if read is not None:
                read(logits)
        self.batch.put_row(row, cache)

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> None:
        self.batch.put_row(target, self.batch.take_row(source, length))

    def release_row(self, row: int, last: int, last_length: int) -> None:
        self.batch.release_row(row, last)


class PoolRunner(PackedRunner):
    """EXSPEC's: a step takes any rows of a pool, whose keys and values stay where they are."""

    cache: PoolCache

    def __init__(self, model: PreTrainedModel, num_rows: int, max_length: int, timer: StageTimer) -> None:
        super().__init__(model, num_rows, max_length)
        self.cache = PoolCache(num_rows, max_length, timer)
        self._call = PaddedModel(model)

    @torch.inference_mode()
    def _run(self, step: PackedStep, token_ids: Tensor, keep: Tensor | None, shapes: Shapes | None) -> Tensor:
        if is_too_wide(step, self.max_length):
            return row_by_row(step, token_ids, keep, self.forward)
        self.cache.begin(step)
        return self._call(step, token_ids, self.cache, keep)
