"""A draft model on disk that has only its layers: embedding and head are those of the target that it was made for.

A folder with `config.json` (what it is, and for which target) and `model.safetensors` (layers and final norm in
bfloat16; `head_ids` if it has a short head). Linear layers are kept in one form, `[outputs, inputs]`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from batchspec.models.features import FUSE, add_fuse, is_feature_draft
from batchspec.models.prepacking import PrepackedLinear, prepack
from batchspec.models.shallow import make_plain, num_layers, stack_parts, with_layers
from batchspec.models.short_head import head_ids, shorten_head

FORMAT = "batchspec-draft"
VERSION = 2
KINDS = ("layers", "feature")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
HEAD_IDS = "head_ids"

NUM_ROWS_COMPARED = 64
"""Rows of the embedding, evenly spaced, that tell one target from another."""


@dataclass(frozen=True)
class TargetIdentity:
    """What a draft checkpoint remembers of its target, to refuse another one."""

    model_type: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    embedding_digest: str

    @classmethod
    def of(cls, target: PreTrainedModel) -> TargetIdentity:
        embedding = target.get_input_embeddings()
        return cls(
            target.config.model_type,
            int(embedding.embedding_dim),
            int(embedding.num_embeddings),
            num_layers(target),
            _digest(embedding.weight),
        )


def _digest(embedding: Tensor) -> str:  # [vocabulary, hidden]
    """Of signs, which rounding keeps: a target is the same one in whatever dtype it is loaded."""
    rows = torch.linspace(0, len(embedding) - 1, NUM_ROWS_COMPARED).long().to(embedding.device)
    signs = torch.signbit(embedding.detach()[rows]).to(torch.uint8).cpu()
    return hashlib.sha256(signs.numpy().tobytes()).hexdigest()[:16]


def is_draft_checkpoint(source: Any) -> bool:
    """Is this the path of a folder that `save_draft` wrote?"""
    try:
        return json.loads((Path(source).expanduser() / CONFIG).read_text()).get("format") == FORMAT
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def make_draft(
    target: PreTrainedModel, layers: list[int], ids: Tensor | None = None, kind: str = "layers"
) -> PreTrainedModel:
    """A model with copies of these layers of `target` and of its final norm, as ordinary layers that may be
    changed. Embedding and head are the target's own; with `ids` (`[H]`, rising) the head has only their rows. One
    of kind `feature` feeds on the target's last hidden states, too."""
    draft = with_layers(target, layers)
    for name in stack_parts(draft):
        part = draft.get_submodule(name)
        make_plain(part)
        for module in part.modules():
            for key, weight in list(module.named_parameters(recurse=False)):
                module.register_parameter(key, nn.Parameter(weight.detach().clone()))
    if ids is not None:
        shorten_head(draft, ids)
    if kind == "feature":
        add_fuse(draft)
    return draft.eval()


def own_weights(draft: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The weights of a draft that `make_draft` made which are not the target's, by name."""
    return {
        f"{name}.{key}": weight
        for name in _own_parts(draft)
        for key, weight in draft.get_submodule(name).named_parameters()
    }


def _own_parts(draft: PreTrainedModel) -> list[str]:
    return [*stack_parts(draft), *([FUSE] if is_feature_draft(draft) else [])]


def save_draft(folder: Path, draft: PreTrainedModel, target: PreTrainedModel, layers: list[int]) -> None:
    """Write a draft that `make_draft` made of these layers, file by file whole or not at all; the config, which
    makes the folder a checkpoint, comes last."""
    tensors = {name: weight.detach().to(torch.bfloat16).cpu() for name, weight in own_weights(draft).items()}
    if (ids := head_ids(draft)) is not None:
        tensors[HEAD_IDS] = ids.to(torch.int32).cpu()
    config = {"format": FORMAT, "version": VERSION, "kind": KINDS[is_feature_draft(draft)], "layers": layers}
    config |= {"target": asdict(TargetIdentity.of(target))}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f".{WEIGHTS}").write_bytes(save(tensors))  # save_file would make it readable for its owner only
    (folder / f".{WEIGHTS}").replace(folder / WEIGHTS)
    (folder / f".{CONFIG}").write_text(json.dumps(config, indent=1) + "\n")
    (folder / f".{CONFIG}").replace(folder / CONFIG)


def load_draft(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    """A draft model of the target's class, dtype and device, whose embedding and head are the target's; its layers
    are prepacked if the target's are.

    Raises:
        ValueError: the folder was made for another target or by another version, or its weights do not fit.
    """
    layers, kind = _read_config(folder, target)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{WEIGHTS} in {str(folder)!r} cannot be read: {error}") from error
    draft = make_draft(target, layers, tensors.pop(HEAD_IDS, None), kind)
    own = own_weights(draft)
    if mismatch := _mismatch(own, tensors):
        raise ValueError(f"{WEIGHTS} in {str(folder)!r} does not fit its layers: {mismatch}")
    for name, weight in own.items():
        weight.data.copy_(tensors[name])
        weight.requires_grad_(False)
    if any(isinstance(module, PrepackedLinear) for module in target.modules()):
        for name in stack_parts(draft):
            prepack(draft.get_submodule(name))
        if is_feature_draft(draft):
            draft.set_submodule(FUSE, prepack(nn.ModuleList([draft.get_submodule(FUSE)]))[0])
    return draft


def _read_config(folder: Path, target: PreTrainedModel) -> tuple[list[int], str]:
    """The target's layers after which the draft's are shaped, and the draft's kind."""
    config = json.loads((folder / CONFIG).read_text())
    if config.get("version") != VERSION or config.get("kind") not in KINDS:
        raise ValueError(
            f"{str(folder)!r} must be of kind {' or '.join(KINDS)} and version {VERSION}, "
            f"it is of kind {config.get('kind')!r} and version {config.get('version')!r}"
        )
    known = config.get("target")
    for name, own in asdict(TargetIdentity.of(target)).items():
        if (wanted := known.get(name) if isinstance(known, dict) else None) != own:
            raise ValueError(
                f"{str(folder)!r} drafts for another target: its {name} is {wanted!r}, this one's is {own!r}"
            )
    layers = config.get("layers")
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, int) for layer in layers):
        raise ValueError(f"layers in {str(folder / CONFIG)!r} must be a list of layer numbers, got {layers!r}")
    return layers, config["kind"]


def _mismatch(own: dict[str, nn.Parameter], tensors: dict[str, Tensor]) -> str | None:
    if different := sorted(own.keys() ^ tensors.keys()):
        return f"{different[0]} is {'missing' if different[0] in own else 'unknown'}"
    for name, weight in own.items():
        if weight.shape != tensors[name].shape:
            return f"{name} is {list(tensors[name].shape)} and must be {list(weight.shape)}"
    return None
