"""The model whose word counts, its prompts, and what it says to them alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from batchspec.audit.answers import STOPPED
from batchspec.llm import LLM
from batchspec.models.prepacking import prepacked_copy
from batchspec.models.reference import forget_generation_settings, generate_alone


@dataclass(frozen=True)
class Target:
    """The target, loaded once for all candidates, and the references."""

    llm: LLM
    prompts: list[list[int]]
    max_tokens: int
    references: list[list[int]] = field(default_factory=list)
    """Output tokens of the target alone, one prompt at a time, the end token included."""

    @property
    def ends(self) -> frozenset[int]:
        """End tokens: one set for all."""
        return self.llm.engine.intake.eos_token_ids

    @cached_property
    def prepacked_model(self) -> Any:
        """The model as `LLM` has it when it loads one itself: one copy for all candidates."""
        return prepacked_copy(self.llm.model)

    @property
    def dtype(self) -> str:
        return str(self.llm.model.dtype).removeprefix("torch.")


def answer_alone(target: Target, done: Callable[[], None]) -> None:
    """Fill in the references: plain greedy search, whatever the model's generation config asks for."""
    forget_generation_settings(target.llm.model)
    for prompt in target.prompts[len(target.references) :]:
        target.references.append(generate_alone(target.llm.model, prompt, target.max_tokens, target.ends))
        done()


def text_of(llm: LLM, token_ids: list[int]) -> str:
    """The text of an output, as servers give it: without special tokens and half characters at its end."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ValueError("text needs a tokenizer")
    text = str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return text.rstrip("\ufffd")


def retokenised(llm: LLM, text: str, is_stopped: bool) -> list[int]:
    """Tokens of a text, with `STOPPED` behind it if an end token ended it."""
    ids = list(llm.tokenizer(text.rstrip("\ufffd"), add_special_tokens=False).input_ids) if llm.tokenizer else []
    return [*ids, STOPPED] if is_stopped else ids


def seen_as_text(llm: LLM, token_ids: list[int], ends: frozenset[int]) -> list[int]:
    """An output as it would come from a server that gives text only."""
    is_stopped = bool(token_ids) and token_ids[-1] in ends
    return retokenised(llm, text_of(llm, token_ids[:-1] if is_stopped else token_ids), is_stopped)
