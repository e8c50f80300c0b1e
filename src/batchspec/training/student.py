"""The model that is trained: copies of some of the target's layers between its frozen embedding and head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from batchspec.models.draft_checkpoint import make_draft, own_weights
from batchspec.models.features import captured_features, fuse
from batchspec.models.shallow import make_plain
from batchspec.models.short_head import head_ids
from batchspec.training.lines import Line
from batchspec.training.shards import Text

PACKED_TOLERANCE = 1e-2
"""Largest relative distance of logits in a packed line from those of a text alone."""


def make_student(target: Any, layers: list[int], ids: Tensor | None, kind: str = "layers") -> Any:
    """Its own weights (layers and final norm) may be trained, all others are frozen; none is shared with `target`.
    `ids` `[H]` are those of its short head."""
    draft = make_draft(target, layers, ids, kind)
    make_plain(draft)  # a prepacked head lets no gradient through
    student = deepcopy(draft).float().eval()
    student.requires_grad_(False)
    for weight in own_weights(student).values():
        weight.requires_grad_(True)
    return student


def frequent_ids(texts: Iterable[Text], size: int, vocab_size: int) -> Tensor | None:  # [H] int64, rising
    """The tokens that the target is most likely to say in these texts, by the sum of their probabilities; None if
    `size` is 0 or no less than the vocabulary. Tokens that never come fill up what is left, lowest ids first."""
    if not 0 < size < vocab_size:
        return None
    weight = torch.zeros(vocab_size, dtype=torch.float64)
    for text in texts:
        weight.index_add_(0, text.top_ids.flatten().long(), text.top_logprobs.flatten().double().exp())
    return weight.sort(descending=True, stable=True).indices[:size].sort().values


def logits_of(student: Any, line: Line) -> Tensor:  # [M, H]
    """The student's logits at the places of a line."""
    with half_precision(student):
        output = student(
            input_ids=line.token_ids,
            position_ids=line.position_ids,
            logits_to_keep=line.places,
            use_cache=False,
        )
    logits: Tensor = output.logits[0]
    return logits.float()


def logits_by_depth(student: Any, line: Line, hidden: Tensor, depths: int) -> list[Tensor]:  # [M, H] each
    """The logits of a feature draft at the places of a line: fed with the target's states `hidden`
    (`[1, W, hidden]`) of the tokens before, then with its own, as deeper and deeper in a draft.

    Positions are those of the pairs in a draft's cache, one less than the token's. So the first token of a text,
    which no pair has, stands apart from it.
    """
    own, each = hidden, []
    positions = (line.position_ids - 1).clamp(min=0)
    for _ in range(depths):
        with half_precision(student), captured_features(student) as captured:
            output = student(
                inputs_embeds=fuse(student, line.token_ids, own),
                position_ids=positions,
                logits_to_keep=line.places,
                use_cache=False,
            )
        each.append(output.logits[0].float())
        moved = torch.nn.functional.pad(captured[0].float(), (0, 0, 1, 0))[:, :-1]
        own = torch.where((line.position_ids <= 1).unsqueeze(-1), hidden, moved)
    return each


@contextmanager
def half_precision(student: nn.Module) -> Iterator[None]:
    """bfloat16 products where the device has instructions for them."""
    device = next(student.parameters()).device
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        tests = [
            getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        ]
        is_fast = device.type == "cpu" and any(test is not None and test() for test in tests)
    with torch.autocast(device.type, torch.bfloat16, enabled=is_fast):
        yield


@torch.no_grad()
def texts_per_line(student: Any) -> int:
    """How many texts a line may hold: many if the model keeps texts apart whose positions begin anew, as most do,
    else one."""
    size = int(student.get_input_embeddings().num_embeddings)
    device = student.get_input_embeddings().weight.device
    parts = [torch.arange(3, 8, device=device) % size, torch.arange(40, 44, device=device) % size]
    positions = torch.cat([torch.arange(len(part), device=device) for part in parts])
    packed = student(
        input_ids=torch.cat(parts).unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
    ).logits[0]
    alone = torch.cat([student(input_ids=part.unsqueeze(0), use_cache=False).logits[0] for part in parts])
    return 1 << 20 if (packed - alone).norm() <= PACKED_TOLERANCE * alone.norm() else 1


def vocabulary_places(student: Any, vocab_size: int, device: torch.device) -> Tensor:  # [vocabulary] int64
    """Where in the student's logits each token stands; -1 for those that its head does not say."""
    ids = head_ids(student)
    if ids is None:
        return torch.arange(vocab_size, device=device)
    places = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
    places[ids] = torch.arange(len(ids), device=device)
    return places
