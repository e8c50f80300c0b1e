"""Weights reordered once, at load, into the order that this CPU's matrix kernels read them in.

PyTorch hands matrix products to oneDNN, which reorders a weight on each call. With that done once, a product of
few tokens takes about half the time. PyTorch's functions for it have private names, so a trial decides whether
they are there and right; without them a model stays as it is.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from batchspec.models.products import LEAST_TRIED, as_conv1d, as_linear, sizes_like_anchor, sizes_to_try

NUM_TOKENS = 32
"""Tokens in a step that the order is chosen for. It serves other numbers as well."""


INSTEAD = "load the model with prepack=False, or by yourself"


class PrepackedLinear(nn.Module):
    """A linear layer without gradients, whose weight is kept in the order of the CPU's kernels."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:  # [outputs, inputs], [outputs]
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = _reordered(weight.detach().contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.eval()

    @property
    def weight(self) -> Tensor:  # [outputs, inputs]
        """A copy in the usual order; what is written to it has no effect."""
        return self._packed.to_dense()

    @property
    def dtype(self) -> torch.dtype:
        return self._packed.dtype

    def forward(self, inputs: Tensor) -> Tensor:  # [..., inputs]; [..., outputs]
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], ""))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise RuntimeError(f"a prepacked weight cannot be changed; {INSTEAD}")
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:  # for copies and files, which know nothing of the CPU's order
        return {**self.__dict__, "_packed": self.weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._packed = _reordered(self._packed)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        raise RuntimeError(f"{prefix}weight is prepacked and cannot be changed; {INSTEAD}")

    def _apply(self, function: Any, recurse: bool = True) -> PrepackedLinear:
        changed = function(self.weight)
        if (changed.dtype, changed.device) != (self._packed.dtype, self._packed.device):
            raise RuntimeError(f"a prepacked model keeps its dtype and device; {INSTEAD}")
        super()._apply(function, recurse)
        return self


Model = TypeVar("Model", bound=nn.Module)


def _reordered(weight: Tensor) -> Tensor:  # [outputs, inputs]
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight, NUM_TOKENS))


def prepack(model: Model) -> Model:
    """Reorder the weights of the model's linear layers, in place, if this CPU and dtype allow it; gives the model.

    It computes, saves and copies as before (a head that was tied to the embedding is saved by itself), but does
    not train, move or take other weights. Layers stay as they are if prepacked products would give a token other
    bits in more steps than plain ones do.
    """
    # By name, so that each weight is let go as soon as it is reordered.
    for name in [name for name, layer in model.named_modules(remove_duplicate=False) if is_packable(layer)]:
        layer: Any = model.get_submodule(name)
        if _is_as_even(layer):
            weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
            model.set_submodule(name, PrepackedLinear(weight, layer.bias))
    return model


def _is_as_even(layer: nn.Linear | Conv1D) -> bool:
    shape, has_bias, like = description(layer)
    uneven = frozenset(sizes_to_try(LEAST_TRIED)) - sizes_like_anchor(
        as_prepacked, shape, has_bias, like, LEAST_TRIED
    )
    if uneven <= {1}:  # one token alone is often computed by other code, and can be avoided
        return True
    way = as_conv1d if isinstance(layer, Conv1D) else as_linear
    return not (uneven - {1}) & sizes_like_anchor(way, shape, has_bias, like, LEAST_TRIED)


def as_prepacked(weights: Tensor, bias: Tensor | None) -> PrepackedLinear:
    """The way of a prepacked layer."""
    return PrepackedLinear(weights, bias)


def description(layer: Any) -> tuple[tuple[int, int], bool, Tensor]:
    """Of a linear layer: the shape of its weight as `[outputs, inputs]`, whether it has a bias, and a tensor of
    its dtype and device."""
    has_bias = getattr(layer, "bias", None) is not None
    if isinstance(layer, PrepackedLinear):  # whose weight would be a copy
        return (layer.out_features, layer.in_features), has_bias, torch.empty(0, dtype=layer.dtype)
    weight = layer.weight
    shape = tuple(reversed(weight.shape)) if isinstance(layer, Conv1D) else tuple(weight.shape)
    return shape, has_bias, weight


def prepacked_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A prepacked model beside this one, which stays as it is; weights other than linear layers' are shared."""
    return prepack(deepcopy(model, {id(parameter): parameter for parameter in model.parameters()}))


def unpacked_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with ordinary linear layers and weights of its own, which may be changed."""
    copy = deepcopy(model)
    unpack(copy)
    copy.tie_weights()
    return copy


def unpack(model: nn.Module) -> None:
    """Give the model ordinary linear layers again, in place, with weights that it shares with no other."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, PrepackedLinear):
            plain = nn.Linear(layer.in_features, layer.out_features, device="meta")
            plain.weight = nn.Parameter(layer.weight)
            plain.register_parameter("bias", None if layer.bias is None else nn.Parameter(layer.bias.clone()))
            model.set_submodule(name, plain)


def is_packable(layer: Any) -> bool:
    """Is this a plain linear layer of a kind and in a place that can be packed? Layers of other libraries
    (quantised ones, adapters, layers that are loaded on use) are left as they are."""
    if type(layer) not in (nn.Linear, Conv1D) or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    weight = layer.weight
    is_here = "forward" not in layer.__dict__ and type(weight) is nn.Parameter and weight.device.type == "cpu"
    return is_here and weight.numel() > 0 and can_prepack(weight.dtype)


@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Are the functions there for this dtype, and right?"""
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        product = PrepackedLinear(weight, None)(torch.eye(16, dtype=dtype))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.equal(product, F.linear(torch.eye(16, dtype=dtype), weight))
