"""Reports on the disk: JSON that every reader takes, and files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    data = content.encode("utf-8", errors="replace") if isinstance(content, str) else content
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.absolute().parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(partial, 0o666 & ~_umask())  # mkstemp's are for their owner only
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def as_json(document: Any, indent: int | None = 1) -> str:
    """Without an indent: one line. Infinities and NaN have to be taken out before (`without_infinities`)."""
    return json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def without_infinities(value: Any) -> Any:
    """JSON has neither infinity nor NaN; both become null: a figure without end, or of nothing.

    >>> without_infinities({"a": [1.5, float("inf")], "b": (float("nan"),)})
    {'a': [1.5, None], 'b': [None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(item) for item in value]
    return value


def check_writable(option: str, path: Path | None, others: Mapping[str, Path | None] | None = None) -> None:
    """Refuse a file that cannot be written, or is one of the `others`, by option; before anything is loaded.

    Raises:
        ValueError: says which option is wrong and what is allowed.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir() or (path.exists() and not path.is_file()):
        raise ValueError(f"{option} {str(path)!r} must be a file in a folder that exists")
    for name, other in (others or {}).items():
        if other is not None and path.resolve() == other.resolve():
            raise ValueError(f"{option} must not be the {name}, {str(path)!r}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
