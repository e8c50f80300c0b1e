"""What runs a model over rows of a cache; the packed runner. Used for the target and for a draft model alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from batchspec.layout.packed import PackedStep, pack
from batchspec.layout.shapes import Shapes
from batchspec.layout.transfer import to_device
from batchspec.models.attention import packed_attention
from batchspec.models.block_cache import BlockCache
from batchspec.models.features import FeatureStore, fuse

PREFILL_CHUNK = 512
"""Prompt tokens per forward pass; bounds the attention mask of a prompt to chunk x length (with capped scores or
sinks: query heads per kv head x chunk x length)."""


ReadLogits = Callable[[Tensor], None]
"""Is shown logits `[tokens, vocabulary]`."""


class Runner(Protocol):
    """One model and its cache. Row lengths are the caller's, and each step says them; a runner keeps keys and
    values only, and what lies behind a row's length is forgotten."""

    model: PreTrainedModel
    device: torch.device
    num_rows: int
    max_length: int

    def forward(
        self,
        step: PackedStep,
        token_ids: Tensor,  # [N]
        keep: Tensor | None = None,  # [M], places on the line
    ) -> Tensor:  # [N or M, vocabulary]
        """Compute the step's tokens and cache their keys and values; gives the logits at `keep`, or all."""
        ...

    def prefill(self, row: int, token_ids: list[int], start: int = 0, read: ReadLogits | None = None) -> None:
        """Compute `token_ids`, which follow the first `start` tokens of `row`: one row alone. Their logits are
        shown to `read`, chunk by chunk; without it none are computed."""
        ...

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Let row `target` hold the first `length` tokens of row `source`, and nothing else."""
        ...

    def release_row(self, row: int, last: int, last_length: int) -> None:
        """Let the last row, of `last_length` cached tokens, take the place of `row`, and clear where it was."""
        ...


class PackedRunner:
    """Runs packed steps: one flat line of tokens, without padding (with `shapes`: next to none, so that a token's
    bits do not depend on what else a step holds)."""

    def __init__(
        self, model: PreTrainedModel, num_rows: int, max_length: int, shapes: Shapes | None = None
    ) -> None:
        self.model = model
        self.shapes = shapes
        self.device: torch.device = model.device
        self.max_length = max_length
        self.num_rows = num_rows
        self.cache = BlockCache(num_rows, max_length)
        self.features: FeatureStore | None = None
        """Where the last hidden states are kept, if a drafter wants them."""
        self._cache_argument = cache_argument(model)

    def forward(
        self,
        step: PackedStep,
        token_ids: Tensor,  # [N]
        keep: Tensor | None = None,  # [M], places on the line
    ) -> Tensor:  # [N or M, vocabulary]
        return self._run(step, token_ids, keep, self.shapes)

    def _run(self, step: PackedStep, token_ids: Tensor, keep: Tensor | None, shapes: Shapes | None) -> Tensor:
        return self._compute(step, {"input_ids": token_ids}, keep, shapes)

    @torch.inference_mode()
    def _compute(
        self,
        step: PackedStep,
        inputs: dict[str, Tensor],  # input_ids [N] or inputs_embeds [N, hidden]
        keep: Tensor | None,
        shapes: Shapes | None,
    ) -> Tensor:
        check_eval_mode(self.model)
        layout = self.cache.begin(step)
        num_added = shapes.num_tokens(step.num_tokens) - step.num_tokens if shapes else 0
        # Of [N] the last axis is padded, of [N, hidden] the one before.
        padded = {name: F.pad(value, (0, 0) * (value.ndim - 1) + (0, num_added)) for name, value in inputs.items()}
        no_capture: AbstractContextManager[list[Tensor]] = nullcontext([])
        capture = no_capture if self.features is None else self.features.capture()
        with packed_attention(self.model, layout, shapes), capture as captured:
            output = self.model(
                **{name: value.unsqueeze(0) for name, value in padded.items()},
                position_ids=F.pad(step.slots, (0, num_added)).unsqueeze(0),
                logits_to_keep=0 if keep is None else keep,
                use_cache=True,
                **{self._cache_argument: self.cache},
            )
        if self.features is not None:
            self.features.write(step, captured[0][0])
        logits: Tensor = output.logits[0]
        return logits[: step.num_tokens] if keep is None else logits

    def prefill(self, row: int, token_ids: list[int], start: int = 0, read: ReadLogits | None = None) -> None:
        for offset, chunk in prompt_chunks(token_ids):
            step = pack([start + offset], [len(chunk)], self.device, rows=[row])
            # A prompt is alone and comes in fixed chunks: its shapes are its own, whatever else is running.
            logits = self._run(step, to_device(chunk, self.device), what_to_keep(read, self.device), shapes=None)
            if read is not None:
                read(logits)

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> None:
        self.cache.copy_row(source, target, length)
        if self.features is not None:
            self.features.copy_row(source, target, length)

    @torch.inference_mode()
    def release_row(self, row: int, last: int, last_length: int) -> None:
        self.cache.release_row(row, last, last_length)
        if row != last and self.features is not None:
            self.features.copy_row(last, row, last_length)


class FeatureRunner(PackedRunner):
    """Runs a feature draft: the model's input is fused from a token and the features of the token before it."""

    def __init__(self, model: PreTrainedModel, num_rows: int, max_length: int) -> None:
        super().__init__(model, num_rows, max_length)
        self.features = FeatureStore(model)

    @torch.inference_mode()  # outside of it, prepacked weights are unpacked for each product
    def forward_features(
        self,
        step: PackedStep,
        token_ids: Tensor,  # [N]
        features: Tensor,  # [N, hidden]
        keep: Tensor,  # [M], places on the line
    ) -> Tensor:  # [M, vocabulary]
        """Compute the step's tokens; `features` belong to the token before each."""
        return self._compute(step, {"inputs_embeds": fuse(self.model, token_ids, features)}, keep, None)


def prompt_chunks(token_ids: list[int]) -> list[tuple[int, list[int]]]:
    """Offsets and tokens of a prompt's chunks."""
    offsets = range(0, len(token_ids), PREFILL_CHUNK)
    return [(offset, token_ids[offset : offset + PREFILL_CHUNK]) for offset in offsets]


def what_to_keep(read: ReadLogits | None, device: torch.device) -> Tensor | None:
    """The places whose logits a prompt has to give: all if somebody reads them, else none."""
    return torch.empty(0, dtype=torch.long, device=device) if read is None else None


def check_eval_mode(model: PreTrainedModel) -> None:
    """Raises RuntimeError for a model in train mode."""
    if model.training:
        raise RuntimeError("the model is in train mode, where dropout makes outputs random; call model.eval()")


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model takes its cache: 5.24 renamed it; models with code of their own may still
    have the old one."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
