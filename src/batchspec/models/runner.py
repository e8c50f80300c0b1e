"""One model, its cache, and the forward pass over packed rows. Used for the target and for a draft model alike."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from batchspec.layout.packed import PackedStep, pack
from batchspec.layout.transfer import to_device
from batchspec.models.attention import packed_attention
from batchspec.models.slot_cache import SlotCache

PREFILL_CHUNK = 512
"""Prompt tokens per forward pass; bounds the attention mask of a prompt to query heads per kv head x chunk x
length."""


class PackedRunner:
    """Runs packed steps of one model. Row lengths are the caller's; this keeps keys and values only."""

    def __init__(self, model: PreTrainedModel, num_rows: int, max_length: int) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.max_length = max_length
        self.num_rows = num_rows
        self.cache = SlotCache(num_rows, max_length)
        # 5.24 renamed the argument; models with code of their own may still have the old name.
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    @torch.inference_mode()
    def forward(
        self,
        step: PackedStep,
        token_ids: Tensor,  # [N]
        keep: Tensor | None = None,  # [M], places on the line
    ) -> Tensor:  # [N or M, vocabulary]
        """Compute the step's tokens and write their keys and values; gives the logits at `keep`, or all."""
        if self.model.training:
            raise RuntimeError("the model is in train mode, where dropout makes outputs random; call model.eval()")
        self.cache.begin(step)
        with packed_attention(self.model, step):
            output = self.model(
                input_ids=token_ids.unsqueeze(0),
                position_ids=step.slots.unsqueeze(0),
                logits_to_keep=0 if keep is None else keep,
                use_cache=True,
                **{self._cache_argument: self.cache},
            )
        return output.logits[0]

    def prefill(self, row: int, token_ids: list[int], start: int = 0) -> None:
        """Compute `token_ids`, which lie from slot `start` on in `row`: one row alone, in chunks, no logits."""
        nothing = torch.empty(0, dtype=torch.long, device=self.device)
        for offset in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[offset : offset + PREFILL_CHUNK]
            step = pack([start + offset], [len(chunk)], self.device, first_row=row)
            self.forward(step, to_device(chunk, self.device), keep=nothing)

    @torch.inference_mode()
    def release_row(self, row: int, last: int, last_length: int) -> None:
        """Let the last row, of `last_length` cached tokens, take the place of `row`, and clear where it was."""
        if row != last:
            self.cache.move_row(last, row, last_length)
        self.cache.clear_row(last)
