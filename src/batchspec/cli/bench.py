"""`batchspec bench`: how fast methods are, and whether they give the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from batchspec.cli import options
from batchspec.cli.bench_main import Request, run_bench
from batchspec.cli.bench_paper import paper
from batchspec.cli.bench_step import step

bench = typer.Typer(no_args_is_help=True)
bench.command()(paper)
bench.command()(step)

SYNTHETIC: dict[str, Any] = {"rich_help_panel": "Without weights", "show_default": False}
OUTPUT: dict[str, Any] = {"rich_help_panel": "Results"}


@bench.callback(invoke_without_command=True)
def main_benchmark(
    context: typer.Context,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="JSONL of prompts (turns, of which the first counts, messages or prompt; category if there are "
            "any), or [bold]synthetic:in=128,out=128[/bold]: random prompts and answers of so many tokens.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        list[str],
        typer.Option(
            help="What to compare, with commas: [bold]none[/bold], any method of speculative_config, "
            "[bold]transformers[/bold] (its generate over padded batches), [bold]transformers-assisted[/bold] "
            "(one by one; by look-up, or with --draft-model). key=value is a setting of the method before it: "
            "none,ngram,num_speculative_tokens=8. May be repeated."
        ),
    ] = ["none,ngram,transformers"],  # noqa: B006 - typer reads it
    baseline: Annotated[
        str | None,
        typer.Option(help="Method that speedups are against. Default: the first one.", show_default=False),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,8,32",
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Prompts, from all categories in turn. Default: 32, or all.", show_default=False),
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 1024,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 128,
    ignore_eos: Annotated[
        bool, typer.Option(help="Go on behind end tokens, so that all methods give the same number of tokens.")
    ] = True,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    repeats: Annotated[int, typer.Option(help="Runs of each method at each batch size, in turns.")] = 3,
    random_weights: Annotated[
        Path | None,
        typer.Option(
            help="A config.json or its folder: a model of that shape, random weights, for a synthetic dataset.",
            **SYNTHETIC,
        ),
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            help="Synthetic acceptance: draft random tokens, and accept each with this probability. Answers are "
            "then not compared, and speeds say nothing of a real drafter.",
            **SYNTHETIC,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for bench.json, the plots, and bench.html.",
            show_default=False,
            **OUTPUT,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the runs that --output already holds.", **OUTPUT)
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Measure all of --output anew.", **OUTPUT)
    ] = False,
    json: Annotated[
        str | None,
        typer.Option(
            "--json",
            help="File to write everything to as one line of JSON; - prints it last.",
            show_default=False,
            **OUTPUT,
        ),
    ] = None,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
) -> None:
    """Measure how fast methods are, side by side, and whether they give the same text.

    Methods take turns within each repeat, after a warm-up; shown are medians, and speedups repeat by repeat. A
    method of ours that has to give the tokens of none, bit for bit, and does not, gets no speedup but "differs".
    Exit code: 0 measured, 1 answers differ that must not, 2 bad options, 130 stopped (--resume goes on).

    Example: batchspec bench --dataset question.jsonl --methods none,ngram,transformers --batch-sizes 1,8 -o out
    """
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if _is_given(context, name)]
        if given:
            option = given[0].replace("_", "-")
            raise ValueError(f"--{option} goes without the command {context.invoked_subcommand}, or behind it")
        return
    if dataset is None:
        raise ValueError("--dataset must be given: a JSONL file or synthetic:in=128,out=128")
    raise typer.Exit(run_bench(Request(**context.params)))


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
