"""Prompts from a file, results to a file: JSONL that survives being killed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

RESERVED = ("index", "output", "outputs")
"""Fields that results are written to."""

KINDS = ("prompt", "messages", "turns")
"""Fields that say what to answer; a line has exactly one of them."""

LINE_START = b'{"index": '
"""What every line of results begins with."""

FORMATS = ("jsonl", "txt")


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


def input_format(path: str, named: str | None) -> str:
    """The format that was named, or what the file's ending says; standard input is JSONL.

    Raises:
        ValueError: not a known format.
    """
    if named is not None:
        if named not in FORMATS:
            raise ValueError(f"--format must be one of {', '.join(FORMATS)}, got {named!r}")
        return named
    return "txt" if path.endswith(".txt") else "jsonl"


def read_records(path: str, file_format: str) -> Iterator[Record]:
    """Read prompts line by line; `-` is standard input. Blank lines are skipped, but counted.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        with sys.stdin.buffer if path == "-" else open(path, "rb") as file:
            for index, line in enumerate(file):
                if line.strip():
                    line = line.removeprefix(b"\xef\xbb\xbf") if index == 0 else line
                    yield _parse(index, line.rstrip(b"\r\n"), file_format)
    except OSError as error:
        raise ValueError(f"--input {path!r} cannot be read: {error.strerror}") from error


def _parse(index: int, line: bytes, file_format: str) -> Record:
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
    return Record(index, *_check(fields))


def _check(fields: Any) -> tuple[dict[str, Any], str | None]:
    if not isinstance(fields, dict):
        return {}, f"must be a JSON object with one of the fields {', '.join(KINDS)}"
    kinds = [kind for kind in KINDS if kind in fields]
    if len(kinds) != 1:
        return (
            fields,
            f"must have exactly one of the fields {', '.join(KINDS)}, has {', '.join(kinds) or 'none'}",
        )
    for name in RESERVED:
        if name in fields:
            return fields, f"field {name!r} is where results go; give it another name"
    value = fields[kinds[0]]
    if kinds[0] == "prompt" and not isinstance(value, str) and not _is_list_of(value, int):
        return fields, "prompt must be text or a list of token ids"
    if kinds[0] == "messages" and not (_is_list_of(value, dict) and value):
        return fields, 'messages must be a list of {"role": ..., "content": ...}'
    if kinds[0] == "turns" and not (_is_list_of(value, str) and value):
        return fields, "turns must be a list of texts, the user's side of a conversation"
    return fields, None


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)


def check_output(path: str, resume: bool, overwrite: bool, input_path: str = "-") -> None:
    """Refuse an output that cannot be written or would be lost.

    Raises:
        ValueError: says which option is wrong and what is allowed.
    """
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other")
    if path == "-":
        if resume:
            raise ValueError("--resume needs an --output file, not standard output")
        return
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise ValueError(f"--output {path!r} must be in a folder that exists; {str(target.parent)!r} does not")
    if target.is_dir():
        raise ValueError(f"--output {path!r} must be a file, not a folder")
    if target.exists() and Path(input_path).exists() and target.samefile(input_path):
        raise ValueError(f"--output {path!r} must not be the --input")
    if target.exists() and not os.access(target, os.W_OK):
        raise ValueError(f"--output {path!r} cannot be written: no permission")
    if target.exists() and not resume and not overwrite:
        raise ValueError(f"--output {path!r} exists; give --resume to go on with it or --overwrite to replace it")


def finished_rows(path: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """The results that an output file holds, by input index, and the size of the file without a torn last line.

    Raises:
        ValueError: a line is no result of ours, and not the torn end of one either.
    """
    rows: dict[int, dict[str, Any]] = {}
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            row = _result(line)
            if row is not None:
                rows[row["index"]] = row
                size += len(line)
            elif line.endswith(b"\n") or not line.startswith(LINE_START[: len(line)]):
                raise ValueError(f"--output {str(path)!r}, line {number} is not a result of batchspec generate")
    return rows, size


def _result(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("index"), int) else None


class ResultWriter:
    """Appends results as lines, each handed to the system whole and at once."""

    def __init__(self, path: str, append: bool) -> None:
        self._file: IO[bytes] = sys.stdout.buffer if path == "-" else open(path, "ab" if append else "wb")  # noqa: SIM115

    def write(self, index: int, fields: dict[str, Any], result: dict[str, Any]) -> None:
        row = {"index": index, **fields, **result}
        try:
            line = json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can escape and UTF-8 cannot hold
            line = json.dumps(row).encode()
        self._file.write(line + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not sys.stdout.buffer:
            self._file.close()
