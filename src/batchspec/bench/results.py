"""A folder of results that is written as they come, and can be gone on with."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from batchspec.bench.paper import Run
from batchspec.provenance import provenance

FILE = "paper.json"


def check_folder(folder: Path, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that cannot be written to or whose results would be lost; before anything is loaded.

    Raises:
        ValueError: says what is wrong and what is allowed.
    """
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('the plots need matplotlib: pip install "batchspec[bench]"')
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output {str(folder)!r} must be a folder")
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise ValueError(f"--output {str(folder)!r} cannot be written: {str(existing)!r} is no folder of yours")
    if (folder / FILE).exists() and not resume and not overwrite:
        raise ValueError(
            f"--output {str(folder)!r} holds a measurement; give --resume to go on with it or --overwrite"
        )


def open_document(folder: Path, settings: dict[str, Any], resume: bool) -> dict[str, Any]:
    """The document to add runs to: with `resume` the folder's, if there is one, else a new one.

    Raises:
        ValueError: it was measured with other settings, or is no document of ours.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not resume or not (folder / FILE).exists():
        return {"provenance": provenance(), "settings": settings, "runs": []}
    try:
        document = json.loads((folder / FILE).read_text())
        known, _ = document["settings"], runs_of(document)
        references = document["references"]
        if not isinstance(references, list) or len(references) != len(known["prompt_lengths"]):
            raise ValueError("references")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(folder / FILE)!r} is no measurement of this batchspec bench paper") from error
    if changed := [name for name in settings | known if known.get(name) != settings.get(name)]:
        raise ValueError(f"{str(folder / FILE)!r} was measured with another {', '.join(changed)}")
    document["resumed"] = [*document.get("resumed", []), provenance()]
    return document


def runs_of(document: dict[str, Any]) -> list[Run]:
    names = [field.name for field in fields(Run)]
    return [Run(**{name: row[name] for name in names}) for row in document["runs"]]


def write_document(folder: Path, document: dict[str, Any]) -> None:
    """Write whole or not at all."""
    partial = folder / f".{FILE}"
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(folder / FILE)
