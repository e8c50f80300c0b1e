"""A head that speaks only the most frequent tokens of a vocabulary: a draft step's dearest product, made small."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from batchspec.models.prepacking import PrepackedLinear, prepack


class ShortHead(nn.Module):
    """Some rows of a model's head; `ids` says which tokens they stand for."""

    ids: Tensor  # [H] int64, rising

    def __init__(self, head: Any, ids: Tensor) -> None:
        """Copies the rows `ids` of `head`, a linear layer, in its dtype; prepacked if it is."""
        super().__init__()
        weight, bias = head.weight.detach()[ids], head.bias
        linear = nn.Linear(weight.shape[1], len(ids), device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        own_bias = None if bias is None else nn.Parameter(bias.detach()[ids], requires_grad=False)
        linear.register_parameter("bias", own_bias)
        self.linear = linear
        if isinstance(head, PrepackedLinear):
            prepack(self)
        self.register_buffer("ids", ids)

    def forward(self, hidden: Tensor) -> Tensor:  # [..., hidden]; [..., H]
        logits: Tensor = self.linear(hidden)
        return logits


def shorten_head(model: PreTrainedModel, ids: Tensor) -> None:
    """Let the model, which must not be another's target, give logits `[..., H]` for the tokens `ids` alone.

    Raises:
        ValueError: `ids` do not rise or lie outside of the vocabulary.
    """
    size = int(model.get_input_embeddings().num_embeddings)
    if ids.ndim != 1 or not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= size or bool((ids.diff() <= 0).any()):
        raise ValueError(f"head_ids must be rising token ids from 0 to {size - 1}")
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"model type {model.config.model_type!r} has no head that can be shortened")
    name = next(name for name, module in model.named_modules() if module is head)
    model.set_submodule(name, ShortHead(head, ids.to(model.device, torch.int64)))


def head_ids(model: PreTrainedModel) -> Tensor | None:  # [H] int64
    """The tokens that the model's logits stand for; None: all of its vocabulary, as usual."""
    return next((module.ids for module in model.modules() if isinstance(module, ShortHead)), None)
