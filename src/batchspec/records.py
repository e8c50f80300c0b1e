"""Prompts from a file: JSONL or plain text, line by line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KINDS = ("prompt", "messages", "turns")
"""Fields that say what to answer; a line has exactly one of them."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of input. `error` says what is wrong with it, or is None."""

    index: int
    """Place of the line in the input, from 0."""
    fields: dict[str, Any]
    error: str | None = None

    @property
    def line(self) -> int:
        """Line number, as editors count."""
        return self.index + 1


def read_records(
    path: str, file_format: str, option: str = "--input", reserved: tuple[str, ...] = ()
) -> Iterator[Record]:
    """Read prompts line by line; `-` is standard input. Blank lines are skipped, but counted.

    `option` is what errors call the file; no line may have one of the `reserved` fields.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
            for index, line in enumerate(file):
                if line.strip():
                    line = line.removeprefix(b"\xef\xbb\xbf") if index == 0 else line
                    yield _parse(index, line.rstrip(b"\r\n"), file_format, reserved)
    except OSError as error:
        raise ValueError(f"{option} {path!r} cannot be read: {error.strerror}") from error


def _parse(index: int, line: bytes, file_format: str, reserved: tuple[str, ...]) -> Record:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return Record(index, {}, "not UTF-8")
    if file_format == "txt":
        return Record(index, {"prompt": text})
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Record(index, {}, f"not JSON ({error})")
    if not isinstance(fields, dict):
        return Record(index, {}, f"must be a JSON object with one of the fields {', '.join(KINDS)}")
    taken = [f"field {name!r} is where results go; give it another name" for name in reserved if name in fields]
    return Record(index, fields, _error(fields) or next(iter(taken), None))


def _error(fields: dict[str, Any]) -> str | None:
    kinds = [kind for kind in KINDS if kind in fields]
    if len(kinds) != 1:
        return f"must have exactly one of the fields {', '.join(KINDS)}, has {', '.join(kinds) or 'none'}"
    value = fields[kinds[0]]
    if kinds[0] == "prompt" and not isinstance(value, str) and not _is_list_of(value, int):
        return "prompt must be text or a list of token ids"
    if kinds[0] == "messages" and not (_is_list_of(value, dict) and value):
        return 'messages must be a list of {"role": ..., "content": ...}'
    if kinds[0] == "turns" and not (_is_list_of(value, str) and value):
        return "turns must be a list of texts, the user's side of a conversation"
    return None


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
