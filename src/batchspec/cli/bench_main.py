"""The work behind `batchspec bench`: check, load, measure, report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from batchspec.cli.options import load_llm, notes, numbers, progress_bar
from batchspec.documents import as_json, check_writable, write_whole
from batchspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from batchspec.bench.methods import Method
    from batchspec.bench.workload import Lengths, Workload
    from batchspec.llm import LLM

FILE = "bench.json"
PAGE = "bench.html"
VERDICT_STYLES = {0: "bold green", 1: "bold red", 130: "bold yellow"}


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `batchspec bench`, by their names."""

    dataset: str
    methods: list[str]
    baseline: str | None
    batch_sizes: str
    model: str | None
    draft_model: str | None
    num_prompts: int | None
    max_prompt_tokens: int
    max_tokens: int
    ignore_eos: bool
    temperature: float
    repeats: int
    random_weights: Path | None
    acceptance: float | None
    output: Path | None
    resume: bool
    overwrite: bool
    json: str | None
    max_model_len: int | None
    dtype: str
    device: str


def run_bench(request: Request) -> int:
    """Measure what was asked for, show it and write it; gives the exit code.

    Raises:
        ValueError: an option is out of range or contradicts another; nothing was written then.
    """
    sizes = numbers("--batch-sizes", request.batch_sizes)
    check_numbers(request)
    check_outputs(request)
    with notes.status("loading PyTorch and transformers"):
        from batchspec.bench.engines import share_models
        from batchspec.bench.methods import parse_methods
        from batchspec.bench.workload import parse_synthetic
    methods = parse_methods(request.methods, request.draft_model)
    synthetic = parse_synthetic(request.dataset)
    check_methods(request, methods, synthetic)
    target = load_target(request, methods)
    workload = make_workload(request, target, synthetic)
    models = share_models(target, methods)
    document = measure(request, sizes, methods, models, workload)
    return show(request, document)


def check_numbers(request: Request) -> None:
    """Raises ValueError for a number that is out of its range."""
    counts = {"--max-tokens": request.max_tokens, "--repeats": request.repeats}
    counts |= {"--max-prompt-tokens": request.max_prompt_tokens}
    counts |= {} if request.num_prompts is None else {"--num-prompts": request.num_prompts}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    SamplingParams(temperature=request.temperature)
    if request.acceptance is not None:
        if not 0 <= request.acceptance <= 1:
            raise ValueError(f"--acceptance must be a number from 0 to 1, got {request.acceptance}")
        if not request.ignore_eos:
            raise ValueError("--acceptance goes with --ignore-eos: its answers are random tokens")


def check_outputs(request: Request) -> None:
    """Raises ValueError for results that could not be written or would be lost."""
    if request.output is None:
        if request.resume or request.overwrite:
            raise ValueError("--resume and --overwrite go with --output")
    else:
        from batchspec.bench.results import check_folder

        check_folder(request.output / FILE, request.resume, request.overwrite)
    if request.json not in (None, "-"):
        check_writable("--json", Path(request.json), {"--dataset": Path(request.dataset)})


def check_methods(request: Request, methods: list[Method], synthetic: Lengths | None) -> None:
    """Raises ValueError for options that contradict each other."""
    names = [method.name for method in methods]
    if request.baseline is not None and request.baseline not in names:
        raise ValueError(f"--baseline must be one of the methods {', '.join(names)}, got {request.baseline!r}")
    if request.acceptance is not None:
        for method in methods:
            if not method.is_ours or "model" in method.options:
                raise ValueError(
                    f"--acceptance goes with our methods that draft without a model, not with {method.name}"
                )
    if request.random_weights is not None:
        if synthetic is None:
            raise ValueError("--random-weights has no tokenizer: --dataset must be synthetic:in=128,out=128")
        if request.model is not None or request.draft_model is not None:
            raise ValueError("--random-weights goes without --model and --draft-model")


def load_target(request: Request, methods: list[Method]) -> LLM:
    """The model as it is, or prepacked if no method wants it as it is."""
    # As EQSPEC, which runs whatever one of the strategies can.
    settings: dict[str, Any] = {"max_model_len": request.max_model_len, "strategy": "eqspec", "max_num_seqs": 1}
    if request.random_weights is None:
        packed = not any(method.wants_plain_weights for method in methods)
        return load_llm(request.model, dtype=request.dtype, device=request.device, prepack=packed, **settings)
    from batchspec.llm import LLM
    from batchspec.models.random_weights import random_model

    with notes.status("making random weights"):
        model = random_model(request.random_weights, request.dtype, request.device)
        return LLM(model, skip_tokenizer_init=True, **settings)


def make_workload(request: Request, target: LLM, synthetic: Lengths | None) -> Workload:
    from batchspec.bench.workload import random_workload, workload_of_file

    if synthetic is None:
        made = workload_of_file(
            Path(request.dataset), target, request.num_prompts, request.max_prompt_tokens, request.max_tokens
        )
    else:
        made = random_workload(synthetic, target, request.num_prompts)
    return replace(made, temperature=request.temperature, ignore_eos=request.ignore_eos)


def measure(
    request: Request, sizes: list[int], methods: list[Method], models: Any, workload: Workload
) -> dict[str, Any]:
    """Make the runs that are missing, each written as soon as it is there; gives the finished document."""
    from batchspec.bench import session
    from batchspec.bench.document import add_runs, check_document, finish
    from batchspec.bench.engines import open_method
    from batchspec.bench.results import new_document, open_document, write_document
    from batchspec.bench.run import runs_of

    settings = settings_of(request, methods, models.target, workload)
    file = None if request.output is None else request.output / FILE
    document = (
        new_document(settings)
        if file is None
        else open_document(file, settings, request.resume, "batchspec bench", check_document)
    )
    by_name = {method.name: method for method in methods}
    done = {session.key_of(run) for run in runs_of(document)}
    is_stopped = False
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=len(sizes) * len(methods) * request.repeats)
        try:
            for run in session.measure(
                list(by_name),
                sizes,
                request.repeats,
                workload,
                done,
                lambda name, size: open_method(models, by_name[name], size, request.acceptance),
                models.device,
            ):
                if run is not None:
                    add_runs(document, [run])
                    if file is not None:
                        write_document(file, document)
                progress.advance(task)
        except KeyboardInterrupt:
            is_stopped = True
    return finish(document, is_stopped)


def settings_of(request: Request, methods: list[Method], target: LLM, workload: Workload) -> dict[str, Any]:
    """What makes a measurement what it is: another one cannot go on with it."""
    from batchspec.prompts import digest

    names = [method.name for method in methods]
    return {
        "model": str(request.random_weights or request.model or "the bundled SmolLM2-135M-Instruct"),
        "has_random_weights": request.random_weights is not None,
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "device": str(target.model.device),
        "draft_model": request.draft_model,
        "methods": names,
        "baseline": request.baseline or names[0],
        "acceptance": request.acceptance,
        "dataset": Path(request.dataset).name,
        "prompts": digest(workload.prompts),
        "prompt_lengths": [len(prompt) for prompt in workload.prompts],
        "categories": workload.categories,
        "max_tokens": workload.max_tokens,
        "temperature": workload.temperature,
        "ignore_eos": workload.ignore_eos,
        "repeats": request.repeats,
    }


def show(request: Request, document: dict[str, Any]) -> int:
    """Write the reports and print the tables; gives the exit code."""
    from batchspec.bench.page import html_page
    from batchspec.bench.plots import draw_plots
    from batchspec.bench.tables import tables

    console = Console()
    for table in tables(document):
        console.print(table)
    for remark in document["remarks"]:
        console.print(remark, style="yellow", markup=False, highlight=False)
    code: int = document["exit_code"]
    console.print(document["verdict"], style=VERDICT_STYLES[code], markup=False, highlight=False)
    if request.output is not None:
        plots = draw_plots(document)
        for name, image in plots.items():
            write_whole(request.output / name, image)
        write_whole(request.output / PAGE, html_page(document, plots))
        write_whole(request.output / FILE, as_json(document))
        notes.print(f"written to {request.output}: {FILE}, {PAGE}, {', '.join(plots)}")
    if request.json == "-":
        print(as_json(document, indent=None), end="")
    elif request.json is not None:
        write_whole(Path(request.json), as_json(document, indent=None))
        notes.print(f"written: {request.json}", markup=False, highlight=False)
    return code
