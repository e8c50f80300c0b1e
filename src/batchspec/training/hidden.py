"""The target's last hidden states of the texts, computed once, for drafters that feed on them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchspec.models.features import features_of
from batchspec.training.lines import Line
from batchspec.training.shards import Clock, Text, read_states, write_states


class HiddenStates:
    """Each text alone and in bfloat16, so that a text's states depend on nothing else, and a resumed training gets
    the same ones."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self._of_text: dict[int, Tensor] = {}

    def keep(self, path: Path, texts: list[Text], clock: Clock = time.monotonic) -> float:
        """Have the states of a shard's texts: from the file, or computed and written to it. Gives the seconds that
        computing them took, now or then.

        Raises:
            ValueError: the file is not one that was written for these texts.
        """
        if not path.exists():
            start = clock()
            states = [self.of(text).cpu() for text in texts]
            write_states(path, states, clock() - start)
        states, seconds = read_states(path, [len(text.token_ids) for text in texts])
        self._of_text |= {id(text): own for text, own in zip(texts, states, strict=True)}
        return seconds

    def of(self, text: Text) -> Tensor:  # [L, hidden]
        """The text must live as long as this object."""
        if id(text) not in self._of_text:
            token_ids = text.token_ids.long().unsqueeze(0).to(self.target.device)
            positions = torch.arange(token_ids.shape[1], device=token_ids.device).unsqueeze(0)
            self._of_text[id(text)] = features_of(self.target, token_ids, positions)[0].to(torch.bfloat16)
        return self._of_text[id(text)]

    def before(self, line: Line) -> Tensor:  # [1, W, hidden] float32
        """At each place of a line the states of the token before it; zeros at the first token of a text."""
        starts = (line.position_ids[0] == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], line.position_ids.shape[1]]
        parts = []
        for text, start, end in zip(line.texts, starts, ends, strict=True):
            states = self.of(text)[: end - start - 1].to(line.token_ids.device).float()
            parts.append(torch.nn.functional.pad(states, (0, 0, 1, 0)))
        return torch.cat(parts).unsqueeze(0)
