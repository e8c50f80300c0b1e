"""From a target to a drafter: make data for a share of the minutes, then train for the rest."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from batchspec.llm import LLM
from batchspec.models.draft_checkpoint import TargetIdentity, save_draft
from batchspec.models.loader import vocabulary_size
from batchspec.models.shallow import num_layers
from batchspec.prompts import digest
from batchspec.provenance import provenance
from batchspec.training.answers import Done, make_texts
from batchspec.training.curve import Point, write_curve
from batchspec.training.hidden import HiddenStates
from batchspec.training.lines import lines_of
from batchspec.training.measure import acceptance, agreement
from batchspec.training.settings import TrainingSettings, spread
from batchspec.training.shards import Clock, Shard, Text, read_shard, write_shard
from batchspec.training.student import frequent_ids, make_student
from batchspec.training.trainer import STATE, Trainer

WORK = "training"
"""Subfolder of the result for all that is not the drafter itself."""

RECIPE = "recipe.json"
HELD_OUT = 16
MOST_HELD_OUT = 64
"""Held-out texts that are measured with."""


@dataclass(frozen=True)
class Data:
    """Texts to train on and texts to measure with."""

    texts: list[Text]
    held_out: list[Text]
    seconds: float
    """What it took to make all of them."""
    hidden: HiddenStates | None = None
    """For drafters of kind `feature`."""


def open_folder(folder: Path, llm: LLM, settings: TrainingSettings, prompts: list[list[int]] | None) -> Path:
    """The folder to work in: a new one, or one where the same training was begun.

    Raises:
        ValueError: another training was, or of the given prompts none could be held out.
    """
    if prompts is not None and len({tuple(prompt) for prompt in prompts}) < 2:
        raise ValueError("prompts must be two different ones at least: answers to one are held out")
    recipe: dict[str, Any] = {
        "settings": asdict(settings),
        "target": asdict(TargetIdentity.of(llm.model)),
        "prompts": None if prompts is None else digest(prompts),
    }
    work = folder / WORK
    work.mkdir(parents=True, exist_ok=True)
    path = work / RECIPE
    if not path.exists():
        partial = work / f".{RECIPE}"
        partial.write_text(json.dumps(recipe | {"provenance": provenance()}, indent=1) + "\n")
        partial.replace(path)
        return work
    try:
        known = json.loads(path.read_text())
        before = {**known["settings"], "target": known["target"], "prompts": known["prompts"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is no recipe of batchspec train-drafter") from error
    now = {**recipe["settings"], "target": recipe["target"], "prompts": recipe["prompts"]}
    if changed := [name for name in now | before if now.get(name) != before.get(name)]:
        raise ValueError(f"{str(folder)!r} holds a training with another {', '.join(changed)}; give another --out")
    return work


def make_data(
    work: Path,
    llm: LLM,
    settings: TrainingSettings,
    prompts: list[list[int]] | None,
    done: Done,
    clock: Clock = time.monotonic,
) -> Data:
    """Read the shards that are there and make more until the data's share of the minutes is used up, or there are
    enough tokens. `done` is told of tokens as they are made, those of the shards that are there at once.

    Raises:
        ValueError: there is too little time for a text to train on and one to measure with.
    """
    folder = work / "data"
    folder.mkdir(exist_ok=True)
    hidden = HiddenStates(llm.model) if settings.kind == "feature" else None
    shards: list[Shard] = []
    seconds, tokens = 0.0, 0
    while seconds < settings.data_seconds and (settings.tokens is None or tokens < settings.tokens):
        path = folder / f"{len(shards):05}.safetensors"
        if path.exists():
            shard = read_shard(path)
            done(shard.num_answer_tokens)
        else:
            start = clock()
            texts = make_texts(llm, settings, prompts, len(shards), done)
            shard = Shard(texts, clock() - start)
            write_shard(path, shard)
        shards.append(shard)
        seconds, tokens = seconds + shard.seconds, tokens + shard.num_answer_tokens
        if hidden is not None:
            seconds += hidden.keep(folder / f"hidden-{path.name}", shard.texts, clock)
    texts = [text for shard in shards for text in shard.texts if text.num_answer_tokens]
    kept, held_out = split(texts)
    data = Data(kept, held_out, seconds, hidden)
    if not data.texts or not data.held_out:
        raise ValueError(
            f"data_minutes must give texts to train on and to hold out; they gave {len(texts)} in all"
        )
    return data


def split(texts: list[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to train on and texts to measure with. All answers to a prompt are on one side, which its tokens
    decide; one prompt of HELD_OUT is held out, and one at least."""
    digests = [hashlib.sha256(repr(text.prompt).encode()).digest() for text in texts]
    least = min(digests, default=b"")
    sides = [digest == least or digest[0] % HELD_OUT == 0 for digest in digests]
    return (
        [text for text, side in zip(texts, sides, strict=True) if not side],
        [text for text, side in zip(texts, sides, strict=True) if side],
    )


def train(
    folder: Path, work: Path, llm: LLM, settings: TrainingSettings, data: Data, clock: Clock = time.monotonic
) -> Iterator[Trainer]:
    """Train for the minutes that the data has left; gives the trainer before the first step and after each, for
    those who watch.

    At each point of the curve the state is saved, and the drafter, if it is the best so far. Ending the iteration
    early, or being killed, loses the steps since the last one; the next call goes on from there.
    """
    layers = spread(settings.layers, num_layers(llm.model))
    ids = frequent_ids(data.texts, settings.head_size, vocabulary_size(llm.model))
    trainer = Trainer(make_student(llm.model, layers, ids, settings.kind), data.texts, settings, data.hidden)
    if (work / STATE).exists():
        trainer.restore(work)
    budget = max(1.0, 60 * settings.minutes - data.seconds)
    interval = budget / settings.num_measurements
    measure = _measuring(trainer, llm.engine.config.strategy, data)
    yield trainer
    start = clock()

    def count() -> None:
        nonlocal start
        now = clock()
        trainer.seconds, start = trainer.seconds + now - start, now

    while not trainer.points or trainer.seconds < budget:
        before = trainer.seconds
        if trainer.points:  # the first point shows what the student can before it has learnt
            trainer.step(trainer.seconds / budget)
            count()
        if not trainer.points or trainer.seconds // interval > before // interval or trainer.seconds >= budget:
            trainer.points.append(replace(measure(), minutes=(data.seconds + trainer.seconds) / 60))
            if trainer.points[-1].agreement >= max(point.agreement for point in trainer.points):
                save_draft(folder, trainer.student, llm.model, layers)
            count()
            trainer.save(work)
            write_curve(work, trainer.points)
        yield trainer


def _measuring(trainer: Trainer, strategy: str, data: Data) -> Callable[[], Point]:
    held_out = data.held_out[:MOST_HELD_OUT]
    lines = [
        line.to(trainer.device)
        for line in lines_of(held_out, trainer.settings.window, trainer.most_per_line)
        if len(line.places)
    ]
    if not lines:
        raise ValueError(f"window must leave room for answers behind their prompts, got {trainer.settings.window}")

    def measure() -> Point:
        return Point(
            minutes=0.0,
            steps=trainer.num_steps,
            tokens=trainer.num_tokens,
            epochs=round(trainer.epochs, 4),
            loss=trainer.mean_loss(),
            agreement=agreement(trainer.student, lines, trainer.hidden),
            acceptance=acceptance(trainer.student, held_out, strategy, trainer.hidden),
        )

    return measure
