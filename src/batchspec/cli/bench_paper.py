"""`batchspec bench paper`: the figures of the paper, measured here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from batchspec.cli import options
from batchspec.cli.options import load_llm, notes, numbers, progress_bar
from batchspec.config import PoolConfig, SpeculativeConfig

if TYPE_CHECKING:
    from rich.progress import Progress

    from batchspec.bench.paper import Run
    from batchspec.llm import LLM

FILE = "paper.json"

DEFAULT_ARMS = "none,packed,eqspec,exspec"


def paper(
    dataset: Annotated[
        Path, typer.Option(help="JSONL of prompts: turns (the first one counts), messages or prompt.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for paper.json and the plots.")],
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    draft_noise: Annotated[
        float | None,
        typer.Option(
            help="Draft with a copy of the target whose weights have this much noise (about 0.05 to 0.15). It "
            "shows rounds, grouping and overhead; it is as slow as the target, so its speedups mean nothing.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="ngram: draft by looking the last tokens up in the text. Not needed with the other two.",
            show_default=False,
        ),
    ] = None,
    num_speculative_tokens: Annotated[int, typer.Option(help="Draft tokens per row and round.")] = 4,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,2,4,8,16,32",
    arms: Annotated[
        str,
        typer.Option(
            help="What to compare, with commas: none, packed, eqspec (fixed batches, as in the paper), exspec; "
            "and, with only refilling of finished rows or only grouping, eqspec-refilled and exspec-fixed."
        ),
    ] = DEFAULT_ARMS,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Prompts, from all categories in turn. Default: 32, or all.", show_default=False),
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 1024,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Cut all prompts to this length, leave out shorter ones.", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 64,
    by_length: Annotated[
        bool, typer.Option("--by-length", help="Run the longest prompts first, not in their order.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Runs of each arm at each batch size, in turns.")] = 3,
    window: Annotated[
        int | None, typer.Option(help="exspec: sequences in the pool. Default: 4 x batch.", show_default=False)
    ] = None,
    group_by: Annotated[str, typer.Option(help="exspec: length or acceptance.")] = "length",
    min_group: Annotated[
        int | None, typer.Option(help="exspec: smallest group. Default: 92 % of a batch.", show_default=False)
    ] = None,
    max_wait_rounds: Annotated[int, typer.Option(help="exspec: rounds that a sequence may sit out.")] = 16,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the runs that --output already holds.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure all of --output anew.")] = False,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
) -> None:
    """Measure EQSPEC, EXSPEC and packed rows as the paper does (arXiv 2510.22876).

    All arms answer the same prompts with the same drafts. Shown are the equality with the target alone (token by
    token, by transformers' own generate), throughput, rounds, and where the time goes. Runs are written to
    paper.json as they end; after Ctrl-C, --resume goes on. Exit code: 0 measured, 2 bad options.

    Example: batchspec bench paper --dataset question.jsonl --draft-noise 0.05 --batch-sizes 1,8 -o bench-paper
    """
    pool = PoolConfig(window, group_by, min_group, max_wait_rounds)
    sizes, names = numbers("--batch-sizes", batch_sizes), _arms(arms)
    counts = {"--num-prompts": num_prompts or 1, "--repeats": repeats, "--max-tokens": max_tokens}
    counts |= {"--max-prompt-tokens": max_prompt_tokens, "--prompt-tokens": prompt_tokens or 1}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if window is not None and window < sizes[-1]:
        raise ValueError(f"--window must be at least the largest batch size ({sizes[-1]}), got {window}")
    drafter = _drafter(method, draft_model, draft_noise, num_speculative_tokens)
    with notes.status("loading PyTorch and transformers"):
        from batchspec.bench.paper import Workload, check_document, measure, runs_of
        from batchspec.bench.paper_report import PLOTS, tables, write_plots
        from batchspec.bench.results import check_folder, open_document, write_document
        from batchspec.prompts import digest, load_prompts
    file = output / FILE
    check_folder(file, resume, overwrite)
    # Loaded as EQSPEC, which runs whatever one of the arms can.
    target = load_llm(model, dtype=dtype, device=device, max_model_len=max_model_len, strategy="eqspec")
    prompts = load_prompts(dataset, target, num_prompts, max_prompt_tokens, prompt_tokens)
    settings = {
        "model": model or "the bundled SmolLM2-135M-Instruct",
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "drafter": {**drafter, "num_speculative_tokens": num_speculative_tokens},
        "max_tokens": max_tokens,
        "repeats": repeats,
        "prompt_lengths": [len(prompt) for prompt in prompts],
        "prompts": digest(prompts),
        "dataset": dataset.name,
        "by_length": by_length,
        "device": str(target.model.device),
        "pool": asdict(pool),
    }
    speculation = _speculative_config(drafter, num_speculative_tokens, target)
    document = open_document(file, settings, resume, "batchspec bench paper", check_document)
    with progress_bar() as progress:
        references = _references(document, target, prompts, max_tokens, progress)
        write_document(file, document)
        workload = Workload(prompts, references, max_tokens, by_length)
        task = progress.add_task("measuring", total=len(sizes) * len(names) * repeats)
        for run in _missing_runs(
            runs_of(document),
            sizes,
            names,
            repeats,
            lambda first, size: measure(target, workload, first, size, repeats, speculation, pool),
        ):
            if run is not None:
                document["runs"].append(run.as_json())
                write_document(file, document)
            progress.advance(task)
    for table in tables(runs_of(document)):
        Console().print(table)
    write_plots(output, runs_of(document))
    notes.print(f"written to {output}: {FILE}, {', '.join(PLOTS)}")


def _missing_runs(
    done: list[Run],
    sizes: list[int],
    names: list[str],
    repeats: int,
    measure: Callable[[dict[str, int], int], Iterator[Run]],
) -> Iterator[Run | None]:
    """Measure what is not done yet; None for each run that is. An arm that was cut off goes on where it was."""
    counts = Counter((run.batch_size, run.arm) for run in done)
    for size in sizes:
        for name in names:
            yield from [None] * min(repeats, counts[size, name])
        first = {name: counts[size, name] for name in names if counts[size, name] < repeats}
        yield from measure(first, size)


def _references(
    document: dict[str, Any], target: LLM, prompts: list[list[int]], max_tokens: int, progress: Progress
) -> list[list[int]]:
    """The target's answers, which are made once and kept in the document."""
    from batchspec.bench.paper import answer_alone

    if "references" not in document:
        task = progress.add_task("the target alone", total=len(prompts))
        done = partial(progress.advance, task)
        document["references"] = answer_alone(target, prompts, max_tokens, done)
    return document["references"]


def _drafter(
    method: str | None, draft_model: str | None, draft_noise: float | None, num_speculative_tokens: int
) -> dict[str, Any]:
    """What the drafting options say, in the words of the JSON document."""
    if method not in (None, "ngram"):
        raise ValueError(f"--method must be ngram, got {method!r}; for a draft model give --draft-model alone")
    given = {"--draft-model": draft_model, "--draft-noise": draft_noise, "--method ngram": method}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ValueError(f"give one drafter of {', '.join(given)}; given are {' and '.join(names) or 'none'}")
    if draft_noise is not None and not 0 <= draft_noise < math.inf:
        raise ValueError(f"--draft-noise must be a number of at least 0, got {draft_noise}")
    SpeculativeConfig("ngram", num_speculative_tokens=num_speculative_tokens)  # checked before anything is loaded
    if method == "ngram":
        return {"method": "ngram"}
    if draft_noise is not None:
        return {"method": "draft_model", "noise": draft_noise, "seed": 1}
    return {"method": "draft_model", "model": draft_model}


def _speculative_config(drafter: dict[str, Any], num_speculative_tokens: int, target: LLM) -> SpeculativeConfig:
    if drafter["method"] == "ngram":
        return SpeculativeConfig("ngram", num_speculative_tokens=num_speculative_tokens)
    if "noise" in drafter:
        from batchspec.models.noise import noisy_copy

        draft = noisy_copy(target.model, drafter["noise"], drafter["seed"])
    else:
        from batchspec.models.pairing import load_draft_model

        draft = load_draft_model(drafter["model"], target.model, target.tokenizer)
    return SpeculativeConfig("draft_model", model=draft, num_speculative_tokens=num_speculative_tokens)


def _arms(text: str) -> list[str]:
    from batchspec.bench.paper import ARMS

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ARMS:
            raise ValueError(f"--arms must be of {', '.join(ARMS)}, got {name!r}")
    return list(dict.fromkeys(names))
