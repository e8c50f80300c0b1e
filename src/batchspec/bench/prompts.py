"""Prompts to measure with."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from batchspec.llm import LLM


def load_prompts(
    path: Path,
    llm: LLM,
    num_prompts: int,
    max_prompt_tokens: int,
    prompt_tokens: int | None = None,
) -> list[list[int]]:
    """The first prompts of each category in turn, as token ids.

    A line of JSONL has `turns` (of which the first is asked), `messages` or `prompt`, and may have a `category`.
    Prompts of more than `max_prompt_tokens` are left out. With `prompt_tokens` all are cut to that many tokens,
    and shorter ones left out: prompts of equal length.

    Raises:
        ValueError: the file cannot be read, a line has none of these fields, or there are too few prompts.
    """
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in _read(path):
        by_category[str(row.get("category", ""))].append(row)
    in_turn = [row for row in chain.from_iterable(zip_longest(*by_category.values())) if row is not None]
    prompts: list[list[int]] = []
    for row in in_turn:
        token_ids = _token_ids(row, llm)
        if prompt_tokens is not None and len(token_ids) < prompt_tokens:
            continue
        token_ids = token_ids[:prompt_tokens]
        if 0 < len(token_ids) <= max_prompt_tokens:
            prompts.append(token_ids)
        if len(prompts) == num_prompts:
            return prompts
    raise ValueError(f"--num-prompts must be at most {len(prompts)}: {str(path)!r} has no more that fit")


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--dataset {str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"--dataset {str(path)!r}, line {number} is not JSON") from error
        if not isinstance(row, dict) or not any(row.get(kind) for kind in ("turns", "messages", "prompt")):
            raise ValueError(f"--dataset {str(path)!r}, line {number} must have turns, messages or prompt")
        yield row


def _token_ids(row: dict[str, Any], llm: LLM) -> list[int]:
    prompt: Any = row.get("prompt")
    if not prompt:
        prompt = llm.render_chat(row.get("messages") or [{"role": "user", "content": row["turns"][0]}])
    return list(llm.tokenize(prompt)[1])
