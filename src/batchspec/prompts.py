"""Prompts to measure with."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from batchspec.llm import LLM
from batchspec.records import Record, read_records
from batchspec.sampling_params import SamplingParams

MOST = 32
"""Prompts that are taken if no number is given."""


def load_prompts(
    path: Path,
    llm: LLM,
    num_prompts: int | None,
    max_prompt_tokens: int,
    prompt_tokens: int | None = None,
) -> list[list[int]]:
    """The prompts of `load_by_category` without their categories."""
    found = load_by_category(path, llm, num_prompts, max_prompt_tokens, prompt_tokens)
    return [token_ids for _, token_ids in found]


def load_by_category(
    path: Path,
    llm: LLM,
    num_prompts: int | None,
    max_prompt_tokens: int,
    prompt_tokens: int | None = None,
) -> list[tuple[str, list[int]]]:
    """Categories and token ids of the first prompts of each category in turn: so many, or up to `MOST` if no
    number is given.

    A line of JSONL has `turns` (of which the first is asked), `messages` or `prompt`, and may have a `category`.
    Prompts of more than `max_prompt_tokens` are left out. With `prompt_tokens` all are cut to that many tokens,
    and shorter ones left out: prompts of equal length.

    Raises:
        ValueError: the file or a line cannot be read or run, or there are too few prompts.
    """
    prompts: list[tuple[str, list[int]]] = []
    for category, token_ids in _fitting(path, llm, max_prompt_tokens, "--dataset"):
        if len(token_ids) >= (prompt_tokens or 1):
            prompts.append((category, token_ids[:prompt_tokens]))
        if len(prompts) == (num_prompts or MOST):
            return prompts
    if not prompts:
        raise ValueError(f"--dataset {str(path)!r} has no prompt that fits")
    if num_prompts is not None:
        raise ValueError(f"--num-prompts must be at most {len(prompts)}: {str(path)!r} has no more that fit")
    return prompts


def load_all_prompts(path: Path, llm: LLM, max_prompt_tokens: int, option: str) -> list[list[int]]:
    """All prompts of a file such as `load_prompts` reads that have at most so many tokens; `option` is what errors
    call the file.

    Raises:
        ValueError: the file or a line cannot be read or run, or no prompt fits.
    """
    prompts = [token_ids for _, token_ids in _fitting(path, llm, max_prompt_tokens, option)]
    if not prompts:
        raise ValueError(f"{option} {str(path)!r} has no prompt that fits")
    return prompts


def longest_prompt(llm: LLM, max_tokens: int, max_prompt_tokens: int) -> int:
    """Tokens that a prompt may have, so that every answer has its whole budget.

    Raises:
        ValueError: the context window has no room for the budget.
    """
    window = llm.engine.config.max_model_len
    if max_tokens >= window:
        raise ValueError(f"--max-tokens must be less than the context window ({window}), got {max_tokens}")
    return min(max_prompt_tokens, window - max_tokens)


def digest(prompts: list[list[int]]) -> str:
    """What tells one list of prompts from another."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


def _fitting(path: Path, llm: LLM, max_prompt_tokens: int, option: str) -> Iterator[tuple[str, list[int]]]:
    """Categories and prompts of at most so many tokens, one of each category in turn."""
    by_category: dict[str, list[Record]] = defaultdict(list)
    for record in read_records(str(path), "jsonl", option):
        if record.error is not None:
            raise ValueError(f"{option} {str(path)!r}, line {record.line}: {record.error}")
        by_category[str(record.fields.get("category", ""))].append(record)
    for record in chain.from_iterable(zip_longest(*by_category.values())):
        if record is None:
            continue
        try:
            token_ids = _token_ids(record.fields, llm, max_prompt_tokens)
        except ValueError as error:
            raise ValueError(f"{option} {str(path)!r}, line {record.line}: {error}") from error
        if len(token_ids) <= max_prompt_tokens:
            yield str(record.fields.get("category", "")), token_ids


def _token_ids(fields: dict[str, Any], llm: LLM, max_prompt_tokens: int) -> list[int]:
    if "prompt" in fields:
        prompt: Any = fields["prompt"]
    else:
        prompt = llm.render_chat(fields.get("messages") or [{"role": "user", "content": fields["turns"][0]}])
    token_ids = list(llm.tokenize(prompt)[1])
    if len(token_ids) <= max_prompt_tokens:  # the others are left out anyway
        llm.prepare(token_ids, SamplingParams(max_tokens=1), "prompt")
    return token_ids
