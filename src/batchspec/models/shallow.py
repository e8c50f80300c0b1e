"""A model of fewer layers that shares the weights of a whole one: what early exit drafts with, and what a draft
checkpoint's layers are put into."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from copy import deepcopy
from itertools import chain
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from batchspec.models.prepacking import PrepackedLinear, unpack


def with_layers(model: PreTrainedModel, layers: Listed[int]) -> PreTrainedModel:
    """A model of the same class that has only these layers of `model`, in this order, and all else of it.

    Every weight is shared with `model`; modules and config are the new model's own, so that its attention can be
    switched and its layers be replaced without effect on `model`.

    Raises:
        ValueError: a layer does not exist or comes twice, or the model's layers cannot be found.
    """
    count = num_layers(model)
    if unknown := [layer for layer in layers if not 0 <= layer < count]:
        raise ValueError(f"layers must be from 0 to {count - 1}, which the target has, got {unknown[0]}")
    if len(set(layers)) < len(layers):
        raise ValueError(f"layers must be different ones, got {list(layers)}")
    shared: dict[int, Any] = {id(weight): weight for weight in chain(model.parameters(), model.buffers())}
    shared |= {id(module): module for module in model.modules() if isinstance(module, PrepackedLinear)}
    shallow = deepcopy(model, shared)
    name = stack_name(shallow)
    whole = shallow.get_submodule(name)
    chosen = nn.ModuleList([whole[layer] for layer in layers])
    shallow.set_submodule(name, chosen)
    for place, layer in enumerate(chosen):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place  # type: ignore[assignment]
    _describe(shallow, layers, count)
    return shallow


def _describe(model: PreTrainedModel, layers: Listed[int], count: int) -> None:
    """Let the config say what the model now is: number of layers, and what it lists layer by layer."""
    config = model.config.get_text_config(decoder=True)
    listed = {
        name: [value[layer] for layer in layers]
        for name, value in vars(config).items()
        if "layer" in name and isinstance(value, list) and len(value) == count
    }
    config.num_hidden_layers = len(layers)
    for name, values in listed.items():
        setattr(config, name, values)


def num_layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def stack_name(model: PreTrainedModel) -> str:
    """The name of the module list that holds the model's layers.

    Raises:
        ValueError: there is none.
    """
    for name, module in model.named_modules():
        is_stack = isinstance(module, nn.ModuleList) and len(module) == num_layers(model)
        if is_stack and all(any(hasattr(part, "layer_idx") for part in layer.modules()) for layer in module):
            return name
    raise ValueError(f"model type {model.config.model_type!r} keeps its layers in a way that is not known here")


def stack_parts(model: PreTrainedModel) -> list[str]:
    """The names of the layers and of the norms beside them, the final one: all that a drafter has of its own."""
    stack = stack_name(model)
    parent = stack.rpartition(".")[0]
    beside = [f"{parent}.{name}".lstrip(".") for name, _ in model.get_submodule(parent).named_children()]
    return [stack, *(name for name in beside if _is_norm(model.get_submodule(name)))]


def _is_norm(module: nn.Module) -> bool:
    weights = list(module.parameters())
    return bool(weights) and all(weight.ndim == 1 for weight in weights)


def make_plain(module: nn.Module) -> None:
    """Give all linear layers within `module` one form, `nn.Linear`: whether they were prepacked, or GPT-2's."""
    unpack(module)
    for name, layer in list(module.named_modules()):
        if isinstance(layer, Conv1D):
            plain = nn.Linear(layer.weight.shape[0], layer.nf, device="meta")
            plain.weight = nn.Parameter(layer.weight.detach().t().contiguous())
            plain.bias = nn.Parameter(layer.bias.detach())
            module.set_submodule(name, plain)
