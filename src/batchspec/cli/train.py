"""`batchspec train-drafter`: a small drafter for a target that has no small sibling."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from batchspec.cli import options
from batchspec.cli.options import load_llm, notes

if TYPE_CHECKING:
    from batchspec.llm import LLM
    from batchspec.training.run import Data
    from batchspec.training.settings import TrainingSettings


def train_drafter(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the drafter, its data and its curve.")],
    target: options.Model = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSONL of prompts for the target to answer: turns (the first one counts), messages or prompt. "
            "Default: it draws the user's words itself.",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            help="layers: some layers between the target's embedding and head; feature: such as also read its "
            "last hidden states."
        ),
    ] = "layers",
    layers: Annotated[int, typer.Option(help="Layers, which start as the target's first, ..., last.")] = 2,
    minutes: Annotated[float, typer.Option(help="Data and training together.")] = 60.0,
    data_minutes: Annotated[
        float | None, typer.Option(help="Most minutes for data. Default: half.", show_default=False)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Answer tokens that are enough data.", show_default=False)
    ] = None,
    head_size: Annotated[
        int, typer.Option(help="Draft only so many tokens, the target's most frequent ones; 0: all.")
    ] = 8192,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    shard_size: Annotated[int, typer.Option(help="Answers that are made and saved together.")] = 96,
    window: Annotated[int, typer.Option(help="Tokens of a line in training.")] = 512,
    lines_per_step: Annotated[int, typer.Option(help="Lines of a training step.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="At its peak.")] = 1e-3,
    num_measurements: Annotated[int, typer.Option(help="Points of the curve; with each the state is saved.")] = 60,
    seed: Annotated[int, typer.Option(help="Of data and training.")] = 0,
    max_num_seqs: Annotated[int, typer.Option(help="Answers that are decoded together.")] = 48,
    strategy: options.Strategy = "packed",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Train a small drafter from the target alone, for targets that have no small sibling.

    The target answers prompts for a share of the minutes; then some of its layers are trained to say what it says.
    Shown on held-out answers as it runs: agreement with the target, and accepted drafts of 1 to 4 tokens. After
    Ctrl-C or a crash the same command goes on. Exit code: 0 trained, 2 bad options, 130 interrupted.

    Example: batchspec train-drafter --target my-model --out my-drafter --minutes 60; then
    batchspec generate --model my-model --draft-model my-drafter ...
    """
    from batchspec.training.settings import TrainingSettings

    settings = TrainingSettings(
        kind=kind,
        layers=layers,
        minutes=minutes,
        data_minutes=data_minutes,
        tokens=tokens,
        seed=seed,
        head_size=head_size,
        max_tokens=max_tokens,
        shard_size=shard_size,
        window=window,
        lines_per_step=lines_per_step,
        learning_rate=learning_rate,
        num_measurements=num_measurements,
    )
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('the learning curve needs matplotlib: pip install "batchspec[bench]"')
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {str(out)!r} must be a folder")
    llm = load_llm(target, dtype=dtype, device=device, strategy=strategy, max_num_seqs=max_num_seqs)
    try:
        _run(out, llm, settings, prompts)
    except KeyboardInterrupt:
        notes.print("interrupted; the same command goes on from the last saved state")
        sys.exit(130)


def _run(out: Path, llm: LLM, settings: TrainingSettings, prompts: Path | None) -> None:
    from batchspec.models.shallow import num_layers
    from batchspec.prompts import load_all_prompts
    from batchspec.training.run import make_data, open_folder

    if settings.layers > (most := num_layers(llm.model)):
        raise ValueError(f"--layers must be at most {most}, as many as the target has, got {settings.layers}")
    given = None
    if prompts is not None:
        given = load_all_prompts(prompts, llm, settings.max_prompt_tokens, "--prompts")
    work = open_folder(out, llm, settings, given)
    with _progress() as progress:
        task = progress.add_task("data", total=settings.tokens, note="")
        made = [0]

        def done(tokens: int) -> None:
            made[0] += tokens
            progress.update(task, completed=made[0], note=f"{made[0]:,} tokens of the target's answers")

        data = make_data(work, llm, settings, given, done)
        progress.update(task, total=made[0], completed=made[0])
        _train(out, work, llm, settings, data, progress)
    notes.print(f"written to {out}; draft with it: --draft-model {out}")


def _train(out: Path, work: Path, llm: LLM, settings: TrainingSettings, data: Data, progress: Progress) -> None:
    from batchspec.training.curve import PICTURE, draw_curve
    from batchspec.training.run import train

    task: TaskID = progress.add_task("training", total=settings.minutes * 60 - data.seconds, note="")
    num_drawn = -1
    for trainer in train(out, work, llm, settings, data):
        speed = f"{trainer.num_tokens / max(trainer.seconds, 1e-9):,.0f} tokens/s, epoch {trainer.epochs:.1f}"
        note = speed
        if trainer.points:
            point = trainer.points[-1]
            accepted = " / ".join(f"{share:.0%}" for share in point.acceptance)
            note = f"{speed}, agreement {point.agreement:.1%}, accepted {accepted}"
        progress.update(task, completed=trainer.seconds, note=note)
        if len(trainer.points) != num_drawn and trainer.points:
            num_drawn = len(trainer.points)
            draw_curve(work, trainer.points)
    notes.print(f"the learning curve is {work / PICTURE}")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=notes,
    )
