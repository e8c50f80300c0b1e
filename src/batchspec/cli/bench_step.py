"""`batchspec bench step`: a target step against its floor."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from batchspec.cli import options
from batchspec.cli.options import load_llm, notes, numbers, progress_bar
from batchspec.config import NUMERICS
from batchspec.documents import as_json, write_whole

FILE, PLOT = "step.json", "step.png"


def step(
    model: options.Model = None,
    sizes: Annotated[
        str, typer.Option(help="Tokens of a step, N, with commas; multiples of --columns.")
    ] = "1,2,4,8,16,24,32,40",
    columns: Annotated[int, typer.Option(help="Tokens that each row adds: 1 and its drafts.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens that each row holds already.")] = 200,
    repeats: Annotated[int, typer.Option(help="Times that each step is run, in turns.")] = 7,
    numerics: Annotated[str, typer.Option(help="invariant or fast.")] = "invariant",
    random_weights: Annotated[
        Path | None,
        typer.Option(help="A config.json or its folder: a model of that shape.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for step.json and step.png.", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --output holds.")] = False,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
) -> None:
    """Time steps of the target against what they cost at least.

    The floor is the longer one of two times: reading the weights and the rows' keys and values, and doing the
    operations, at the bandwidth and the matrix rate that are measured in the same run. Exit code: 0 measured,
    2 bad options.

    Example: batchspec bench step --sizes 1,8,32 --context 200
    """
    counts = {"--columns": columns, "--context": context, "--repeats": repeats}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if numerics not in NUMERICS:
        raise ValueError(f"--numerics must be one of {', '.join(NUMERICS)}, got {numerics!r}")
    if random_weights is not None and model is not None:
        raise ValueError("--random-weights goes without --model")
    wanted = numbers("--sizes", sizes)
    with notes.status("loading PyTorch and transformers"):
        from batchspec.bench.results import check_folder
        from batchspec.bench.roofline import measure_machine
        from batchspec.bench.step import StepPlan, measure_steps, step_plot, step_table
        from batchspec.provenance import provenance
    plan = StepPlan(wanted, columns, context, repeats, numerics)
    if output is not None:
        check_folder(output / FILE, resume=False, overwrite=overwrite)
    target, window = _load(model, random_weights, dtype, device)
    with notes.status("measuring the machine"):
        machine = measure_machine(target.device, target.dtype)
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=len(wanted) * repeats)
        steps = measure_steps(target, plan, window, machine, lambda: progress.advance(task))
    document = {
        "provenance": provenance(),
        "settings": {
            "model": str(random_weights or model or "the bundled SmolLM2-135M-Instruct"),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            **asdict(plan),
        },
        "machine": machine.as_json(),
        "steps": steps,
    }
    Console().print(step_table(document))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_whole(output / PLOT, step_plot(document))
        write_whole(output / FILE, as_json(document))
        notes.print(f"written to {output}: {FILE}, {PLOT}")


def _load(model: str | None, random_weights: Path | None, dtype: str, device: str) -> tuple[Any, int]:
    """The model as our engine runs it, and its context window."""
    if random_weights is None:
        llm = load_llm(model, dtype=dtype, device=device, max_num_seqs=1, numerics="fast")
        return llm.model, llm.engine.config.max_model_len
    from batchspec.models.loader import resolve_max_model_len
    from batchspec.models.prepacking import prepack
    from batchspec.models.random_weights import random_model

    with notes.status("making random weights"):
        made = prepack(random_model(random_weights, dtype, device))
    return made, resolve_max_model_len(None, made)
