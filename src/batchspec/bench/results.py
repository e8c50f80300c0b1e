"""A folder of results that is written as they come, and can be gone on with."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchspec.documents import write_whole
from batchspec.provenance import provenance

Document = dict[str, Any]

NOT_READ = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)
"""What reading a document ends with that is none, or is damaged."""


def check_plots() -> None:
    """Raises ValueError if what draws plots is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('the plots need matplotlib: pip install "batchspec[bench]"')


def check_folder(file: Path, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that cannot be written to or whose results would be lost; before anything is loaded.

    `file` is where in the folder the results go.

    Raises:
        ValueError: says what is wrong and what is allowed.
    """
    folder = file.parent
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other")
    check_plots()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {str(folder)!r} must be a folder")
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ValueError(f"--output {str(folder)!r} cannot be written: {str(existing)!r} is no folder of yours")
    if file.exists() and not resume and not overwrite:
        raise ValueError(
            f"--output {str(folder)!r} holds a measurement; give --resume to go on with it or --overwrite"
        )


def new_document(settings: dict[str, Any]) -> Document:
    return {"provenance": provenance(), "settings": settings, "runs": []}


def open_document(
    file: Path, settings: dict[str, Any], resume: bool, command: str, check: Callable[[Document], object]
) -> Document:
    """The document to add runs to: with `resume` the folder's, if there is one, else a new one.

    `check` raises one of NOT_READ for what is no document of the `command`.

    Raises:
        ValueError: it was measured with other settings, or is no document of the command.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if not resume or not file.exists():
        return new_document(settings)
    try:
        document: Document = json.loads(file.read_text())
        known = dict(document["settings"])
        before = list(document.get("resumed", []))
        if not isinstance(document["runs"], list):
            raise TypeError("runs must be a list")
        check(document)
    except NOT_READ as error:
        raise ValueError(f"{str(file)!r} is no measurement of this {command}") from error
    settings = json.loads(json.dumps(settings))  # as they are read back
    if changed := [name for name in settings | known if known.get(name) != settings.get(name)]:
        raise ValueError(f"{str(file)!r} was measured with another {', '.join(changed)}")
    document["resumed"] = [*before, provenance()]
    return document


def write_document(file: Path, document: Document) -> None:
    """Write whole or not at all."""
    write_whole(file, json.dumps(document, indent=1) + "\n")
