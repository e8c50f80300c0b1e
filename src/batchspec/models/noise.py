"""Draft models of a wished-for acceptance, where no small sibling of the target is to be had."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from batchspec.models.prepacking import unpacked_copy


@torch.no_grad()
def noisy_copy(model: PreTrainedModel, scale: float = 0.05, seed: int = 1) -> PreTrainedModel:
    """A draft model that agrees with `model` sometimes: its matrices with noise of `scale` times their spread.

    It costs as much as its target, so it shows how rounds go, not how fast. The same seed gives the same copy;
    the global random state stays as it is.
    """
    copy = unpacked_copy(model)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for parameter in copy.parameters():
            if parameter.ndim >= 2:
                parameter.add_(torch.randn_like(parameter), alpha=scale * float(parameter.std()))
    return copy
