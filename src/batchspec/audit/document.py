"""Everything that an audit found, as one JSON document; tables and pages are made from it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from batchspec.audit.compare import OUTCOMES
from batchspec.audit.noise_floor import NoiseFloor
from batchspec.audit.run import Figure, Run, figures
from batchspec.audit.sampling import MOST, SamplingRun
from batchspec.audit.session import Found
from batchspec.audit.target import Target
from batchspec.documents import without_infinities
from batchspec.provenance import provenance

Document = dict[str, Any]

EXIT_VIOLATIONS = 1
EXIT_COULD_NOT_RUN = 2
EXIT_STOPPED = 130


def make_document(target: Target, settings: dict[str, Any], found: Found) -> Document:
    """The whole audit, or what there was of it when it ended early."""
    noise, rates = found.noise, [figures(run) for run in found.runs]
    return without_infinities(
        {
            "provenance": provenance(),
            "settings": {
                **settings,
                "dtype": target.dtype,
                "device": str(target.llm.model.device),
                "end_token_ids": sorted(target.ends),
                "prompt_lengths": [len(prompt) for prompt in target.prompts],
                "max_tokens": target.max_tokens,
            },
            "stopped": found.is_stopped,
            "crash": found.crash,
            "exit_code": exit_code(found),
            "verdict": _in_words(found),
            "remarks": _remarks(found, [own["divergences"] for own in rates]),
            "noise_floor": None if noise is None else _floor_as_json(noise),
            "references": target.references,
            "margins": [] if noise is None else noise.margins,
            "runs": [_run_as_json(*pair) for pair in zip(found.runs, rates, strict=True)],
            "sampling": [_sampling_as_json(run) for run in found.sampling],
        }
    )


def exit_code(found: Found) -> int:
    """0: no violation; 1: violations; 2: a candidate gave nothing but errors, or the audit broke off; 130: stopped
    by Ctrl-C."""
    if found.crash is not None:
        return EXIT_COULD_NOT_RUN
    if found.is_stopped:
        return EXIT_STOPPED
    judged = [run for run in found.runs if not run.is_null]
    if any(run.counts["violation"] for run in judged) or any(run.failed for run in found.sampling):
        return EXIT_VIOLATIONS
    is_silent = any(run.is_all_errors for run in judged) or any(run.num_compared == 0 for run in found.sampling)
    return EXIT_COULD_NOT_RUN if is_silent else 0


def _in_words(found: Found) -> str:
    if found.crash is not None:
        return f"Could not run: the audit broke off with {found.crash.rstrip('.')}. So far: {_counted(found)}."
    if found.is_stopped:
        return f"Stopped before the end. So far: {_counted(found)}."
    said = {
        0: "No violation: these outputs are the target's, up to rounding.",
        EXIT_VIOLATIONS: "Violation: these outputs are not the target's.",
        EXIT_COULD_NOT_RUN: "Could not run: a candidate gave nothing but errors.",
    }
    return f"{said[exit_code(found)]} {_counted(found)}."


def _counted(found: Found) -> str:
    counts = {kind: sum(run.counts[kind] for run in found.runs if not run.is_null) for kind in OUTCOMES}
    said = (
        f"{counts['identical']} identical, {counts['near-tie']} near-ties, {counts['violation']} violations "
        f"and {counts['error']} errors in {sum(counts.values())} outputs"
    )
    if found.sampling:
        num_failed = sum(len(run.failed) for run in found.sampling)
        num_tests = sum(len(run.tests) for run in found.sampling)
        said += f"; {num_failed} of {num_tests} sampling tests failed"
    return said


def _remarks(found: Found, rates: list[Figure]) -> list[str]:
    """`rates` are the divergences of each run."""
    remarks = [] if found.noise is None else found.noise.remarks
    pairs = list(zip(found.runs, rates, strict=True))
    usual = next((rate for run, rate in pairs if run.is_null and not run.counts["violation"]), None)
    for run, rate in pairs:
        if run.is_null and run.counts["violation"]:
            remarks.append(
                f"The null band itself has {run.counts['violation']} differences above the noise floor: padded "
                "batches of transformers may be wrong for this model, or the floor is too low. Judge with care."
            )
        if usual is not None and not run.is_null and rate.low > usual.high:
            remarks.append(
                f"{run.candidate} at batch size {run.batch_size} differs more often than batching alone explains: "
                f"{rate.value:.3g} against {usual.value:.3g} times in 1,000 tokens. If all are near-ties, it "
                "rounds more than the target does in this dtype."
            )
        if run.num_from_text:
            remarks.append(
                f"{run.candidate} at batch size {run.batch_size} gave text instead of token ids. "
                "Its text, and the reference's, was tokenised again, so differences that do not show in the text "
                "are not seen."
            )
    if any(run.has_only_pooled_tests for run in found.sampling):
        remarks.append(
            "There are so many prompts and sampling runs that no test of a single prompt can fail: "
            f"the least p-value of {MOST:,} shuffles is above its share of the level. "
            "Only the tests pooled over all prompts can."
        )
    return remarks


def _floor_as_json(noise: NoiseFloor) -> dict[str, Any]:
    margins = [margin for row in noise.margins for margin in row]
    below = sum(margin <= noise.floor for margin in margins) / max(1, len(margins))
    return {**{name: value for name, value in asdict(noise).items() if name != "margins"}, "share_below": below}


def _run_as_json(run: Run, rates: dict[str, Figure]) -> dict[str, Any]:
    return {
        "candidate": run.candidate,
        "batch_size": run.batch_size,
        "is_null": run.is_null,
        "from_text": run.num_from_text,
        "counts": run.counts,
        "figures": {name: asdict(figure) for name, figure in rates.items()},
        "outcomes": [asdict(outcome) for outcome in run.outcomes],
    }


def _sampling_as_json(run: SamplingRun) -> dict[str, Any]:
    return {**asdict(run), "num_failed": len(run.failed)}
