"""Everything that `batchspec bench` found, as one JSON document; tables, plots and the page are made from it."""

from __future__ import annotations

from typing import Any

from batchspec.bench.methods import Method, parse_methods
from batchspec.bench.run import Run, runs_of
from batchspec.bench.summary import summarise
from batchspec.documents import without_infinities

Document = dict[str, Any]

MEASURED, DIFFERING, STOPPED = 0, 1, 130
"""Exit codes."""

SYNTHETIC_REMARK = (
    "Synthetic acceptance: drafts were random tokens that cost nothing, and a coin accepted each with probability "
    "{acceptance:g}. These speeds say nothing of a real drafter, only what one would bring that is free and right "
    "so often. Answers are of no sense and were not compared."
)


def methods_of(document: Document) -> list[Method]:
    return parse_methods(document["settings"]["methods"], document["settings"]["draft_model"])


def check_document(document: Document) -> None:
    """Raises one of `results.NOT_READ` for what is no document of `batchspec bench`."""
    names = {method.name for method in methods_of(document)}
    for run in runs_of(document):
        if run.method not in names or run.batch_size < 1 or run.repeat < 0:
            raise ValueError("a run must be of a method that was asked for, in a batch, of a repeat")
        if len(run.answers) != len(document["settings"]["categories"]):
            raise ValueError("there must be as many answers as prompts")
    finish(document, is_stopped=False)


def add_runs(document: Document, runs: list[Run]) -> None:
    document["runs"] += [run.as_json() for run in runs]


def finish(document: Document, is_stopped: bool) -> Document:
    """The document with the figures that follow from its runs, a verdict and an exit code."""
    settings = document["settings"]
    acceptance = settings["acceptance"]
    rows = summarise(
        runs_of(document),
        methods_of(document),
        settings["categories"],
        settings["baseline"],
        is_checked=acceptance is None,
    )
    differing = [row for row in rows if row["differs"]]
    code = STOPPED if is_stopped else DIFFERING if differing else MEASURED
    remarks = [] if acceptance is None else [SYNTHETIC_REMARK.format(acceptance=acceptance)]
    remarks += [_remark(row) for row in differing]
    finished = {
        **document,
        "stopped": is_stopped,
        "exit_code": code,
        "verdict": _in_words(bool(differing), is_stopped, acceptance is None),
        "remarks": remarks,
        "summary": rows,
    }
    return without_infinities(finished)


def _in_words(has_differing: bool, is_stopped: bool, is_checked: bool) -> str:
    words = ["Stopped before the end."] if is_stopped else []
    if has_differing:
        words.append("Answers differ that have to be equal: no speedup is shown for those methods.")
    elif is_checked:
        words.append("All answers are equal, token for token, where they have to be.")
    else:
        words.append("Measured with synthetic acceptance.")
    return " ".join(words)


def _remark(row: dict[str, Any]) -> str:
    named = ", ".join(map(str, row["differs"]))
    return (
        f"{row['method']} at batch size {row['batch_size']} differs on prompts {named} (from 0). It has to give "
        "the tokens of the reference bit for bit; batchspec audit shows where they part."
    )
