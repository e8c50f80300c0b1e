"""Results to a file: JSONL that survives being killed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

RESERVED = ("index", "output", "outputs")
"""Fields that results are written to."""

LINE_START = b'{"index": '
"""What every line of results begins with."""

FORMATS = ("jsonl", "txt")


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
