"""Everything that an audit found, as one JSON document; tables and pages are made from it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from batchspec.audit.noise_floor import NoiseFloor
from batchspec.audit.run import Run, figures, verdict
from batchspec.audit.sampling import SamplingRun
from batchspec.audit.target import Target
from batchspec.documents import without_infinities
from batchspec.provenance import provenance

Document = dict[str, Any]

EXIT_STOPPED = 130


def make_document(
    target: Target,
    settings: dict[str, Any],
    noise: NoiseFloor | None,
    runs: list[Run],
    sampling: list[SamplingRun],
    is_stopped: bool,
) -> Document:
    """The whole audit. `noise` is None if it was stopped before there was any."""
    code = exit_code(runs, sampling)
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
            "stopped": is_stopped,
            "exit_code": EXIT_STOPPED if is_stopped else code,
            "verdict": _in_words(target, code, runs, sampling, is_stopped),
            "remarks": _remarks(noise, runs),
            "noise_floor": None if noise is None else _floor_as_json(noise),
            "references": target.references,
            "margins": [] if noise is None else noise.margins,
            "runs": [_run_as_json(run) for run in runs],
            "sampling": [_sampling_as_json(run) for run in sampling],
        }
    )


def exit_code(runs: list[Run], sampling: list[SamplingRun]) -> int:
    """0: no violation; 1: violations; 2: a candidate gave nothing but errors."""
    code = verdict(runs, sum(len(run.failed) for run in sampling))
    return 2 if code == 0 and any(run.num_compared == 0 for run in sampling) else code


def _in_words(target: Target, code: int, runs: list[Run], sampling: list[SamplingRun], is_stopped: bool) -> str:
    judged = [run for run in runs if not run.is_null]
    counts = {
        kind: sum(run.counts[kind] for run in judged) for kind in ("identical", "near-tie", "violation", "error")
    }
    num_failed = sum(len(run.failed) for run in sampling)
    words = [
        f"{counts['identical']} identical",
        f"{counts['near-tie']} near-ties",
        f"{counts['violation']} violations",
    ]
    found = f"{', '.join(words)} and {counts['error']} errors in {sum(counts.values())} outputs"
    if sampling:
        found += f"; {num_failed} of {sum(len(run.tests) for run in sampling)} sampling tests failed"
    if is_stopped:
        return f"Stopped before the end. So far: {found}."
    said = {
        0: "No violation: these outputs are the target's, up to rounding.",
        1: "Violation: these outputs are not the target's.",
        2: "Could not run: a candidate gave nothing but errors.",
    }
    return f"{said[code]} {found[0].upper()}{found[1:]}."


def _remarks(noise: NoiseFloor | None, runs: list[Run]) -> list[str]:
    remarks = [] if noise is None else noise.remarks
    sound = (run for run in runs if run.is_null and not run.counts["violation"])
    usual = next((figures(run)["divergences"] for run in sound), None)
    for run in runs:
        if run.is_null and run.counts["violation"]:
            remarks.append(
                f"The null band itself has {run.counts['violation']} differences above the noise floor: padded "
                "batches of transformers may be wrong for this model, or the floor is too low. Judge with care."
            )
        rate = figures(run)["divergences"]
        if usual is not None and not run.is_null and rate.low > usual.high:
            remarks.append(
                f"{run.candidate} at batch size {run.batch_size} differs more often than batching alone explains: "
                f"{rate.value:.3g} against {usual.value:.3g} times in 1,000 tokens. If all are near-ties, it "
                "rounds more than the target does in this dtype."
            )
        if run.num_from_text:
            remarks.append(
                f"{run.candidate} at batch size {run.batch_size} gave text instead of token ids. Its text, and "
                f"the "
                "reference's, was tokenised again, so differences that do not show in the text are not seen."
            )
    return remarks


def _floor_as_json(noise: NoiseFloor) -> dict[str, Any]:
    margins = [margin for row in noise.margins for margin in row]
    below = sum(margin <= noise.floor for margin in margins) / max(1, len(margins))
    return {**{name: value for name, value in asdict(noise).items() if name != "margins"}, "share_below": below}


def _run_as_json(run: Run) -> dict[str, Any]:
    return {
        "candidate": run.candidate,
        "batch_size": run.batch_size,
        "is_null": run.is_null,
        "from_text": run.num_from_text,
        "counts": run.counts,
        "figures": {name: asdict(figure) for name, figure in figures(run).items()},
        "outcomes": [asdict(outcome) for outcome in run.outcomes],
    }


def _sampling_as_json(run: SamplingRun) -> dict[str, Any]:
    return {**asdict(run), "num_failed": len(run.failed)}
