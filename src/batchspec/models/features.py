"""The last hidden states of a model, which its head turns into logits: kept by row and slot, as keys are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from batchspec.layout.packed import PackedStep
from batchspec.models.shallow import stack_name
from batchspec.models.slot_cache import GROWTH


class FeatureStore:
    """Features `[rows, slots, hidden]`, grown when a step needs more. It holds no lengths, as the cache does not:
    slot `j` of a row is true as long as token `j` of it is committed, and overwritten by the next token there."""

    def __init__(self, model: PreTrainedModel) -> None:
        """For the features of this model."""
        self.features: Tensor | None = None
        self._body = _body(model)

    def capture(self) -> AbstractContextManager[list[Tensor]]:
        """Within this context each forward pass of the model adds its last hidden states `[1, N, hidden]`."""
        return _captured(self._body)

    def write(self, step: PackedStep, hidden: Tensor) -> None:  # [N or more, hidden]
        """Keep what the step's tokens gave."""
        rows, slots = step.end_row, step.num_slots
        old = self.features
        if old is None or old.shape[0] < rows or old.shape[1] < slots:
            before = (0, 0) if old is None else old.shape[:2]
            size = max(rows, before[0]), max(-(-slots // GROWTH) * GROWTH, before[1])
            self.features = hidden.new_zeros(*size, hidden.shape[-1])
            if old is not None:
                self.features[: before[0], : before[1]] = old
        self.features[step.cache_rows, step.slots] = hidden[: step.num_tokens]  # type: ignore[index]

    def read(self, rows: Tensor, slots: Tensor) -> Tensor:  # [N], [N]; [N, hidden]
        """Raises RuntimeError if no step has written any."""
        if self.features is None:
            raise RuntimeError("features are read before a step has written them")
        return self.features[rows, slots]

    def copy_row(self, source: int, target: int, length: int) -> None:
        if self.features is None or source >= len(self.features):
            return
        if target >= len(self.features):
            missing = target + 1 - len(self.features)
            self.features = nn.functional.pad(self.features, (0, 0, 0, 0, 0, missing))
        self.features[target, :length] = self.features[source, :length]


def _body(model: PreTrainedModel) -> nn.Module:
    """What runs the layers and the final norm."""
    return model.get_submodule(stack_name(model).rpartition(".")[0])


def captured_features(model: PreTrainedModel) -> AbstractContextManager[list[Tensor]]:
    """Within this context each forward pass of the model adds its last hidden states `[1, N, hidden]`."""
    return _captured(_body(model))


@contextmanager
def _captured(body: nn.Module) -> Iterator[list[Tensor]]:
    captured: list[Tensor] = []
    hook = body.register_forward_hook(lambda module, inputs, output: captured.append(output[0]))
    try:
        yield captured
    finally:
        hook.remove()


def features_of(model: PreTrainedModel, token_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Of texts `[1, W]` in one pass without a cache; gives `[1, W, hidden]`."""
    with torch.no_grad(), captured_features(model) as captured:
        nothing = torch.empty(0, dtype=torch.long, device=token_ids.device)
        model(input_ids=token_ids, position_ids=position_ids, logits_to_keep=nothing, use_cache=False)
    return captured[0]


FUSE = "fuse"
"""The name of a feature draft's own module, which makes one input of an embedding and features."""


def add_fuse(model: PreTrainedModel) -> None:
    """Make the model a feature draft. It starts as one that takes no notice of the features, since its layers know
    embeddings only."""
    embedding = model.get_input_embeddings().weight
    identity = torch.eye(embedding.shape[1], dtype=embedding.dtype, device=embedding.device)
    linear = nn.Linear(2 * embedding.shape[1], embedding.shape[1], bias=False, device="meta")
    linear.weight = nn.Parameter(torch.cat([identity, torch.zeros_like(identity)], dim=1))
    model.add_module(FUSE, linear)


def is_feature_draft(model: nn.Module) -> bool:
    return hasattr(model, FUSE)


def fuse(model: PreTrainedModel, token_ids: Tensor, features: Tensor) -> Tensor:  # [..., N], [..., N, hidden]
    """The model's input `[..., N, hidden]`."""
    embedded = model.get_input_embeddings()(token_ids)
    fused: Tensor = model.get_submodule(FUSE)(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
    return fused
