"""`batchspec audit`: are an engine's outputs the target model's?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from batchspec.cli import options
from batchspec.cli.options import load_llm, notes, numbers, progress_bar
from batchspec.documents import as_json, check_writable, write_whole
from batchspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from batchspec.audit.session import Candidate, Found, Plan
    from batchspec.audit.target import Target

VERDICT_STYLES = {0: "bold green", 1: "bold red", 2: "bold yellow", 130: "bold yellow"}

SAMPLING: dict[str, Any] = {"rich_help_panel": "Sampling"}


def audit(
    candidate: Annotated[
        list[str],
        typer.Option(
            help="Engine to audit; may be repeated. [bold]batchspec:strategy=packed,method=ngram[/bold] (keys of "
            "LLM and speculative_config), [bold]transformers[/bold], [bold]transformers-assisted[/bold] (prompt "
            "look-up, or :model=PATH), [bold]openai:URL,model=NAME[/bold] (any OpenAI-compatible server).",
        ),
    ],
    dataset: Annotated[
        Path, typer.Option(help="JSONL of prompts: turns (the first one counts), messages or prompt.")
    ],
    model: options.Model = None,
    batch_sizes: Annotated[
        str, typer.Option(help="Batch sizes, with commas; with a server, requests at once.")
    ] = "1,8",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Prompts, from all categories in turn. Default: 32, or all.", show_default=False),
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 1024,
    report: Annotated[
        Path | None, typer.Option(help="HTML page to write; it needs no network.", show_default=False)
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="JSON document to write, with everything.", show_default=False)
    ] = None,
    sampling: Annotated[
        bool,
        typer.Option("--sampling", help="Compare sampled tokens, too, with and without speculation.", **SAMPLING),
    ] = False,
    samples: Annotated[int, typer.Option(help="Samples of each prompt and side.", **SAMPLING)] = 64,
    temperature: Annotated[float, typer.Option(help="Of the samples.", **SAMPLING)] = 1.0,
    tokenizer: options.Tokenizer = None,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Prove or disprove that an engine's outputs are the target model's.

    The reference is the target alone, one prompt at a time, greedy. Each output is identical, a near-tie (two
    logits are so close that rounding decides; how close is measured), a violation, or an error. Run servers with
    the target's weights in the same --dtype. After Ctrl-C or an error the reports hold what is there. Exit
    code: 0 no violation, 1 violations, 2 could not run or broke off, 130 stopped.

    Example: batchspec audit --candidate batchspec:method=ngram --candidate transformers --dataset prompts.jsonl
    --report audit.html
    """
    sizes = numbers("--batch-sizes", batch_sizes)
    counts = {"--max-tokens": max_tokens, "--num-prompts": num_prompts}
    counts |= {"--samples": samples, "--max-prompt-tokens": max_prompt_tokens}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if sampling and SamplingParams(temperature=temperature).is_greedy:
        raise ValueError(f"--temperature must be above 0 with --sampling, got {temperature}")
    check_writable("--report", report, {"--dataset": dataset})
    check_writable("--json", json, {"--dataset": dataset, "--report": report})
    with notes.status("loading PyTorch and transformers"):
        from batchspec.audit.session import Found, Plan, open_candidate
        from batchspec.audit.spec import parse_spec
        from batchspec.audit.target import Target
        from batchspec.prompts import digest, load_prompts, longest_prompt
    specs = [parse_spec(text) for text in dict.fromkeys(candidate)]
    # Loaded as transformers loads it, and as EQSPEC, which runs whatever one of the strategies can.
    llm = load_llm(
        model,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        strategy="eqspec",
        prepack=False,
    )
    prompts = load_prompts(dataset, llm, num_prompts, longest_prompt(llm, max_tokens, max_prompt_tokens))
    target = Target(llm, prompts, max_tokens)
    plan = Plan(sizes, samples if sampling else 0, temperature)
    with notes.status("opening the candidates"):
        opened = [open_candidate(target, spec, sampling) for spec in specs]
    settings = {
        "model": model or "the bundled SmolLM2-135M-Instruct",
        "candidates": [one.name for one in opened],
        "batch_sizes": sizes,
        "dataset": dataset.name,
        "prompts": digest(prompts),
        "num_samples": plan.num_samples,
        "temperature": temperature,
    }
    found = Found()
    run_with_progress(target, opened, plan, found)
    raise typer.Exit(show(target, settings, found, report, json))


def run_with_progress(target: Target, candidates: list[Candidate], plan: Plan, found: Found) -> None:
    """Run the audit with a bar for each stage. If Ctrl-C or an error ends it, `found` says so beside what is
    there."""
    from batchspec.audit.answers import in_one_line
    from batchspec.audit.session import audit_all

    with progress_bar() as progress:

        def start(name: str, total: int) -> Callable[[], None]:
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        try:
            audit_all(target, candidates, plan, found, start)
        except KeyboardInterrupt:
            found.is_stopped = True
        except Exception as error:  # noqa: BLE001 - exit code 1 means violations, and what was found is kept
            found.crash = in_one_line(error)


def show(
    target: Target,
    settings: dict[str, Any],
    found: Found,
    report: Path | None,
    json: Path | None,
) -> int:
    """Write the reports, print the tables, and give the exit code."""
    from batchspec.audit.document import make_document
    from batchspec.audit.page import html_page
    from batchspec.audit.tables import tables

    document = make_document(target, settings, found)
    console = Console()
    for table in tables(document):
        console.print(table)
    for remark in document["remarks"]:
        console.print(remark, style="yellow", markup=False, highlight=False)
    console.print(document["verdict"], style=VERDICT_STYLES[document["exit_code"]], markup=False, highlight=False)
    for path, in_words in ((json, as_json), (report, html_page)):
        if path is not None:
            write_whole(path, in_words(document))
            notes.print(f"written: {path}", markup=False, highlight=False)
    return int(document["exit_code"])
