"""`batchspec generate`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from batchspec.cli import options
from batchspec.cli.options import load_llm, notes, speculative_config
from batchspec.cli.records import RESERVED, ResultWriter, check_output, finished_rows, input_format
from batchspec.cli.work import Work
from batchspec.records import read_records
from batchspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from batchspec.llm import LLM

SAMPLING: dict[str, Any] = {"rich_help_panel": "Sampling"}


def generate(
    input: Annotated[str, typer.Option("--input", "-i", help="JSONL or .txt file of prompts; - reads stdin.")],
    output: Annotated[str, typer.Option("--output", "-o", help="JSONL file of answers; - writes to stdout.")],
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    method: options.Method = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    lookup: options.Lookup = None,
    prompt_lookup_max: options.LookupMax = 3,
    prompt_lookup_min: options.LookupMin = None,
    suffix_min_match: options.SuffixMinMatch = None,
    suffix_store_tokens: options.SuffixStoreTokens = 0,
    exit_layers: options.ExitLayers = None,
    adaptive: options.Adaptive = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    min_tokens: Annotated[int, typer.Option(help="Fewest tokens of an answer.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends an answer; may be repeated.")] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="Token id that ends an answer; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end tokens.")] = False,
    temperature: Annotated[
        float, typer.Option(help="0: the most probable token; above, tokens are drawn.", **SAMPLING)
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Draw among the most probable tokens that hold this much together.", **SAMPLING)
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Draw among so many most probable tokens; 0: among all.", **SAMPLING)
    ] = 0,
    min_p: Annotated[
        float, typer.Option(help="Draw among tokens of at least this share of the best one's.", **SAMPLING)
    ] = 0.0,
    n: Annotated[
        int,
        typer.Option(
            "-n", help="Answers to each line, as a list [bold]outputs[/bold] (not for turns).", **SAMPLING
        ),
    ] = 1,
    seed: Annotated[
        int,
        typer.Option(
            help="A line's draws depend on this and the line alone: not on batch size, drafter, or restarts.",
            **SAMPLING,
        ),
    ] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: prefer tokens that prompt and answer do not hold.", **SAMPLING)
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken from tokens that the answer holds.", **SAMPLING)
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Taken once for each time that the answer holds a token.", **SAMPLING)
    ] = 0.0,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Write each token's log-probability, and those of so many most probable ones; -1: of all.",
            show_default=False,
            **SAMPLING,
        ),
    ] = None,
    sampling_method: Annotated[
        str,
        typer.Option(
            help="How sampled drafts are judged: [bold]coupled[/bold] (the tokens are those without drafts) or "
            "[bold]rejection[/bold] (others of the same distribution).",
            **SAMPLING,
        ),
    ] = "coupled",
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the answers that --output already holds.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing --output.")] = False,
    format: Annotated[
        str | None,
        typer.Option("--format", help="jsonl or txt. Default: by the ending of --input; stdin is jsonl."),
    ] = None,
    tokenizer: options.Tokenizer = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_num_seqs: options.MaxNumSeqs = 8,
    strategy: options.Strategy = "packed",
    numerics: options.Numerics = "invariant",
    max_model_len: options.MaxModelLen = None,
) -> None:
    """Answer a file of prompts in batches, with speculative decoding that does not change the answers.

    A line of JSONL has one of the fields [bold]prompt[/bold] (text to go on with, or token ids),
    [bold]messages[/bold] (a conversation for the chat template) or [bold]turns[/bold] (the user's side of a
    conversation, answered turn by turn); a line of a .txt file is one prompt. All other fields are carried over.
    Each answer is written as soon as it is there, with the [bold]index[/bold] of its input line; after Ctrl-C or a
    crash, --resume goes on where it ended. Exit code: 0 all answered, 1 some lines could not be, 2 bad options.

    Example: batchspec generate -i prompts.jsonl -o answers.jsonl --method ngram --max-tokens 200
    """
    file_format = input_format(input, format)
    check_output(output, resume, overwrite, input)
    params = SamplingParams(
        n=n,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logprobs=logprobs,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        stop_token_ids=stop_token_id,
        ignore_eos=ignore_eos,
    )
    if params.is_greedy and (top_p, top_k, min_p) != (1.0, 0, 0.0):
        notes.print("[yellow]--top-p, --top-k and --min-p do nothing at --temperature 0, the default[/yellow]")
    drafting = speculative_config(
        method,
        draft_model,
        num_speculative_tokens,
        prompt_lookup_max,
        prompt_lookup_min,
        sampling_method,
        suffix_min_match=suffix_min_match,
        suffix_store_tokens=suffix_store_tokens,
        num_layers=exit_layers,
        lookup=lookup,
        adaptive=adaptive,
    )
    work = Work(list(read_records(input, file_format, reserved=RESERVED)), params)
    if resume and Path(output).exists():
        finished, size = finished_rows(Path(output))
        work.skip(finished, output)
        if size < Path(output).stat().st_size:  # a torn last line is written anew
            os.truncate(output, size)
    llm = load_llm(
        model,
        tokenizer=tokenizer,
        speculative_config=drafting,
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs,
        strategy=strategy,
        numerics=numerics,
        max_model_len=max_model_len,
        seed=seed,
    )
    with ResultWriter(output, append=resume) as writer, stop_on_signal() as signals:
        answer_all(llm, work, writer, signals)
    if signals and work.num_left:
        notes.print(f"stopped with {work.num_left} of {work.num_records} lines left; --resume goes on")
        raise typer.Exit(130)
    if work.num_failed:
        notes.print(f"[red]{work.num_failed} of {work.num_records} lines could not be answered[/red]")
        raise typer.Exit(1)


def answer_all(llm: LLM, work: Work, writer: ResultWriter, signals: list[int]) -> None:
    """Run all lines and write each as it ends, with a progress bar."""
    with _progress() as progress:
        task = progress.add_task("", total=work.num_records, completed=work.num_done, figures="")
        start = time.monotonic()
        for answer in llm.run(lambda: work.next_request(llm)):
            if answer.finished:
                work.finish(answer, writer)
            stats = llm.engine.stats
            figures = f"{stats.num_output_tokens / (time.monotonic() - start):.1f} tokens/s"
            if stats.num_draft_tokens:
                figures += f", {stats.acceptance_rate:.0%} of drafts accepted"
            progress.update(task, completed=work.num_done + work.num_failed, figures=figures)
            if signals:
                work.stop(llm)
        progress.update(task, completed=work.num_done + work.num_failed)


def _progress() -> Progress:
    return Progress(
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        console=notes,
    )


@contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM in a list instead of dying in the middle of a line; a second Ctrl-C does."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
