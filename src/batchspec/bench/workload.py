"""The prompts of a measurement, and what is asked of every method alike."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

from batchspec.llm import LLM
from batchspec.prompts import MOST, load_by_category, longest_prompt
from batchspec.sampling_params import SamplingParams

SYNTHETIC = "synthetic"
SEED = 0
"""Of random prompts."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and how they are to be answered."""

    prompts: list[list[int]]
    categories: list[str]
    """Of each prompt; empty texts if the data set has none."""
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = True
    """Every answer has exactly `max_tokens` tokens, so that all methods are paid for the same work."""

    def params(self, place: int) -> SamplingParams:
        """Of the prompt at a place: a seed of its own, the same for every method and in every repeat."""
        return SamplingParams(
            temperature=self.temperature, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, seed=place
        )

    def start(self, num_prompts: int, max_tokens: int) -> Workload:
        """The first prompts, with shorter answers: to warm up with."""
        prompts, categories = self.prompts[:num_prompts], self.categories[:num_prompts]
        return replace(self, prompts=prompts, categories=categories, max_tokens=min(max_tokens, self.max_tokens))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of random prompts and of their answers, in tokens."""

    prompt: int
    answer: int


def parse_synthetic(dataset: str) -> Lengths | None:
    """Read `synthetic:in=128,out=128`; None if the data set is a file.

    >>> parse_synthetic("synthetic:in=16,out=8"), parse_synthetic("question.jsonl")
    (Lengths(prompt=16, answer=8), None)

    Raises:
        ValueError: it begins like one and does not go on like one.
    """
    if dataset.partition(":")[0] != SYNTHETIC:
        return None
    found = re.fullmatch(r"synthetic:in=(\d+),out=(\d+)", dataset)
    if found is None or 0 in (lengths := [int(number) for number in found.groups()]):
        raise ValueError(f"--dataset must be a file or synthetic:in=128,out=128, got {dataset!r}")
    return Lengths(*lengths)


def random_workload(lengths: Lengths, llm: LLM, num_prompts: int | None) -> Workload:
    """Prompts of random tokens, the same each time.

    Raises:
        ValueError: the context window has no room for prompt and answer.
    """
    window = llm.engine.config.max_model_len
    if lengths.prompt + lengths.answer > window:
        raise ValueError(
            f"--dataset synthetic: in and out must be at most {window} together, the context window, got "
            f"{lengths.prompt} and {lengths.answer}"
        )
    draw, tokens = random.Random(SEED), range(llm.engine.intake.vocab_size)
    prompts = [draw.choices(tokens, k=lengths.prompt) for _ in range(num_prompts or MOST)]
    return Workload(prompts, [""] * len(prompts), lengths.answer)


def workload_of_file(
    path: Path, llm: LLM, num_prompts: int | None, max_prompt_tokens: int, max_tokens: int
) -> Workload:
    """The prompts of a JSONL file, from all categories in turn, each with room for its whole answer.

    Raises:
        ValueError: the file or a line cannot be read or run, there are too few prompts, or there is no room.
    """
    found = load_by_category(path, llm, num_prompts, longest_prompt(llm, max_tokens, max_prompt_tokens))
    return Workload([tokens for _, tokens in found], [category for category, _ in found], max_tokens)
