"""Steps over the texts, and all that is needed to go on after a kill as if nothing had been."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from batchspec.models.draft_checkpoint import own_weights
from batchspec.training.curve import Point
from batchspec.training.hidden import HiddenStates
from batchspec.training.lines import Line, lines_of
from batchspec.training.loss import distance
from batchspec.training.settings import MOST_SEEDS, TrainingSettings
from batchspec.training.shards import Text
from batchspec.training.student import logits_by_depth, logits_of, texts_per_line, vocabulary_places

STATE = "state.pt"
FINAL_RATE = 0.1
"""The learning rate at the end, as a share of its peak."""


class Trainer:
    """Trains the student on texts in an order that depends on the seed and the epoch alone."""

    def __init__(
        self, student: Any, texts: list[Text], settings: TrainingSettings, hidden: HiddenStates | None = None
    ) -> None:
        """`hidden` for a student of kind `feature`."""
        self.student = student
        self.hidden = hidden
        self.texts = texts
        self.settings = settings
        self.weights = own_weights(student)
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
        embedding: nn.Embedding = student.get_input_embeddings()
        self.device = embedding.weight.device
        self.places = vocabulary_places(student, embedding.num_embeddings, self.device)
        self.most_per_line = texts_per_line(student)
        self.points: list[Point] = []
        self.seconds = 0.0
        """Spent on training so far."""
        self.num_steps = 0
        self.num_tokens = 0
        self.loss_sum, self.loss_steps = 0.0, 0
        """Since the last point."""
        self._epoch, self._next_line = 0, 0
        self._lines = self._lines_of_epoch()

    @property
    def epochs(self) -> float:
        return self._epoch + self._next_line / len(self._lines)

    def step(self, progress: float) -> None:
        """One step of the optimizer; `progress`, from 0 to 1, is the share of the training time that is over."""
        rate = self.settings.learning_rate * rate_at(progress, self.settings.warm_up)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.settings.lines_per_step):
            line = self._take_line().to(self.device)
            loss = self._loss(line)
            (loss / self.settings.lines_per_step).backward()
            self.loss_sum += loss.item() / self.settings.lines_per_step
            self.num_tokens += len(line.places)
        nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimizer.step()
        self.num_steps += 1
        self.loss_steps += 1

    def _loss(self, line: Line) -> Tensor:
        """Deeper in a draft it counts less, as fewer drafts come there."""
        if self.hidden is None:
            each = [logits_of(self.student, line)]
        else:
            each = logits_by_depth(self.student, line, self.hidden.before(line), self.settings.unroll)
        weights = [0.5**depth for depth in range(len(each))]
        losses = [
            weight * distance(logits, line.top_ids, line.top_logprobs, self.places, self.settings.hard_share)
            for weight, logits in zip(weights, each, strict=True)
        ]
        return torch.stack(losses).sum() / sum(weights)

    def mean_loss(self) -> float | None:
        """Since it was asked for last; None if there was no step."""
        mean = self.loss_sum / self.loss_steps if self.loss_steps else None
        self.loss_sum, self.loss_steps = 0.0, 0
        return mean

    def save(self, folder: Path) -> None:
        """Write whole or not at all."""
        state = {
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimizer": self.optimizer.state_dict(),
            "points": [asdict(point) for point in self.points],
            "counters": {name: getattr(self, name) for name in COUNTERS},
        }
        torch.save(state, folder / f".{STATE}")
        (folder / f".{STATE}").replace(folder / STATE)

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote.

        Raises:
            ValueError: it is broken, or was written with other layers.
        """
        try:
            state = torch.load(folder / STATE, map_location=self.device, weights_only=True)
            for name, weight in self.weights.items():
                weight.data.copy_(state["weights"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.points = [Point(**point) for point in state["points"]]
            for name in COUNTERS:
                setattr(self, name, state["counters"][name])
        except (OSError, RuntimeError, KeyError, TypeError, ValueError, EOFError, UnpicklingError) as error:
            raise ValueError(f"{str(folder / STATE)!r} is no state of this training: {error}") from error
        self._lines = self._lines_of_epoch()

    def _take_line(self) -> Line:
        if self._next_line == len(self._lines):
            self._epoch, self._next_line = self._epoch + 1, 0
            self._lines = self._lines_of_epoch()
        self._next_line += 1
        return self._lines[self._next_line - 1]

    def _lines_of_epoch(self) -> list[Line]:
        generator = torch.Generator().manual_seed(self.settings.seed + self._epoch * MOST_SEEDS)
        order = torch.randperm(len(self.texts), generator=generator).tolist()
        shuffled = [self.texts[place] for place in order]
        lines = lines_of(shuffled, self.settings.window, self.most_per_line)
        return [line for line in lines if len(line.places)]


COUNTERS = ("seconds", "num_steps", "num_tokens", "loss_sum", "loss_steps", "_epoch", "_next_line")
"""The plain part of a trainer's state."""


def rate_at(progress: float, warm_up: float) -> float:
    """Share of the peak rate: rises in a line during the warm-up, then falls along a cosine to FINAL_RATE.

    >>> [round(rate_at(progress, 0.1), 2) for progress in (0.0, 0.05, 0.1, 0.55, 1.0)]
    [0.0, 0.5, 1.0, 0.55, 0.1]
    """
    if progress < warm_up:
        return progress / warm_up
    along = min(1.0, (progress - warm_up) / max(1 - warm_up, 1e-9))
    return FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * along)) / 2
