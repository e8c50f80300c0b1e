"""Texts with what the target says at each place of them, in files that are written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

SECONDS = "seconds"
STATES = "states"

Clock = Callable[[], float]
"""Seconds, from whenever."""


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer, with the target's most probable tokens for each token of the answer."""

    token_ids: Tensor  # [L] int32
    num_prompt_tokens: int
    top_ids: Tensor  # [answer tokens, k] int32, the most probable first
    top_logprobs: Tensor  # [answer tokens, k] float16
    is_greedy: bool
    """Did the target answer with its most probable tokens? Then a drafter's rollout can be judged by the text."""

    @property
    def prompt(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def num_answer_tokens(self) -> int:
        return len(self.top_ids)


@dataclass(frozen=True)
class Shard:
    texts: list[Text]
    seconds: float
    """What it took to make."""

    @property
    def num_answer_tokens(self) -> int:
        return sum(text.num_answer_tokens for text in self.texts)


def write_shard(path: Path, shard: Shard) -> None:
    texts = shard.texts
    tensors = {
        "token_ids": torch.cat([text.token_ids for text in texts]),
        "lengths": torch.tensor([len(text.token_ids) for text in texts], dtype=torch.int32),
        "prompt_lengths": torch.tensor([text.num_prompt_tokens for text in texts], dtype=torch.int32),
        "top_ids": torch.cat([text.top_ids for text in texts]),
        "top_logprobs": torch.cat([text.top_logprobs for text in texts]),
        "is_greedy": torch.tensor([text.is_greedy for text in texts]),
    }
    _write(path, tensors, shard.seconds)


def read_shard(path: Path) -> Shard:
    """Raises ValueError if the file is not one that `write_shard` wrote."""
    tensors, seconds = _read(path)
    try:
        return Shard(list(_texts(tensors)), seconds)
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{str(path)!r} is no shard of training texts: {error}") from error


def write_states(path: Path, states: list[Tensor], seconds: float) -> None:
    """The target's last hidden states `[L, hidden]` of each text, which took so long to compute."""
    _write(path, {STATES: torch.cat(states)}, seconds)


def read_states(path: Path, lengths: list[int]) -> tuple[list[Tensor], float]:
    """The states of texts of these lengths, and the seconds that they took.

    Raises:
        ValueError: the file is not one that `write_states` wrote for such texts.
    """
    tensors, seconds = _read(path)
    try:
        return list(tensors[STATES].split(lengths)), seconds
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{str(path)!r} does not hold the hidden states of these texts: {error}") from error


def _write(path: Path, tensors: dict[str, Tensor], seconds: float) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(save(tensors, metadata={SECONDS: repr(seconds)}))
    partial.replace(path)


def _read(path: Path) -> tuple[dict[str, Tensor], float]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, float(file.metadata()[SECONDS])
    except (OSError, SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{str(path)!r} is no file of this training: {error}") from error


def _texts(tensors: dict[str, Tensor]) -> Iterator[Text]:
    lengths, prompts = tensors["lengths"].tolist(), tensors["prompt_lengths"].tolist()
    answers = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    columns = zip(
        tensors["token_ids"].split(lengths),
        prompts,
        tensors["top_ids"].split(answers),
        tensors["top_logprobs"].split(answers),
        tensors["is_greedy"].tolist(),
        strict=True,
    )
    for column in columns:
        yield Text(*column)
