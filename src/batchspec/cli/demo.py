"""`batchspec demo`: eight prompts in one batch, with speculation and without, and whether the tokens are equal."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from batchspec.cli import options
from batchspec.cli.demo_prompts import choose_prompts
from batchspec.cli.options import load_llm, notes, speculative_config
from batchspec.outputs import RequestOutput
from batchspec.sampling_params import SamplingParams
from batchspec.stats import DecodingStats

if TYPE_CHECKING:
    from batchspec.detokenizer import Detokenizer
    from batchspec.llm import LLM

CAPTION = (
    "A batch takes as many rounds as its longest answer; mean acceptance length: tokens per round with drafts. "
    "Drafts pay most in small batches and where text repeats itself. The answers are those of a very small model."
)

ACCEPTED = "green"
"""Style of accepted draft tokens; the target's own tokens keep the terminal's."""


@dataclass(frozen=True)
class Run:
    """What one run over all prompts gave."""

    outputs: list[RequestOutput]
    seconds: float
    num_rounds: int

    @property
    def stats(self) -> DecodingStats:
        """The counters of all requests together."""
        total = DecodingStats()
        for output in self.outputs:
            total.add(output.metrics)
        return total

    @property
    def tokens_per_second(self) -> float:
        return self.stats.num_output_tokens / self.seconds


def demo(
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="ngram, suffix or draft_model. Default: draft_model with --draft-model; for the default --model "
            "the drafter that batchspec brings, after look-ups by ngram; else ngram.",
            show_default=False,
        ),
    ] = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    prompt_lookup_max: options.LookupMax = 3,
    prompt_lookup_min: options.LookupMin = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 96,
    temperature: Annotated[
        float, typer.Option(help="Above 0: draw tokens; the two runs must agree all the same.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Which of the built-in prompts; 0 are the first of each kind.")] = 0,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
) -> None:
    """Answer eight built-in prompts in one batch, with speculative decoding and without, and compare the tokens.

    On a terminal the answers appear as they are made: accepted draft tokens in [green]green[/green], the target's
    own in plain. Exit code 1 if a single token differs between the two runs.
    """
    console = Console()
    prompts = choose_prompts(seed)
    is_default = method is None and draft_model is None and model is None
    drafting = speculative_config(
        method or ("draft_model" if draft_model or is_default else "ngram"),
        draft_model,
        num_speculative_tokens,
        prompt_lookup_max,
        prompt_lookup_min,
        lookup="ngram" if is_default else None,
    )
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    speculative = load_llm(
        model, speculative_config=drafting, dtype=dtype, device=device, max_num_seqs=len(prompts)
    )
    from batchspec.llm import LLM

    alone = LLM(speculative.model, tokenizer=speculative.tokenizer, max_num_seqs=len(prompts))
    # The first steps of a process are slow, and would be charged to one of the two.
    for llm in (speculative, alone):
        list(llm.stream(["warm up"] * len(prompts), SamplingParams(temperature=0.0, max_tokens=4)))
    with_drafts = run_all(speculative, prompts, params, console if console.is_terminal else None)
    show_answers(console, speculative, prompts, with_drafts)
    with notes.status("once more without speculation"):
        without = run_all(alone, prompts, params, None)
    dtype_name = str(speculative.model.dtype).removeprefix("torch.")
    console.print(comparison(with_drafts, without, f"{len(prompts)} prompts in one batch, {dtype_name}"))
    num_identical = count_identical(with_drafts, without)
    is_identical = num_identical == len(prompts)
    console.print(f"{num_identical}/{len(prompts)} identical", style="bold green" if is_identical else "bold red")
    if not is_identical:
        raise typer.Exit(1)


def run_all(llm: LLM, prompts: dict[str, str], params: SamplingParams, screen: Console | None) -> Run:
    """Answer all prompts in one batch; on a screen, show the answers as they grow."""
    rendered = [llm.render_chat([{"role": "user", "content": prompt}]) for prompt in prompts.values()]
    pages = {str(index): ColouredText(llm) for index in range(len(prompts))}
    finished: dict[str, RequestOutput] = {}
    steps_before = llm.engine.stats.num_steps
    seconds = 0.0
    stream = llm.stream(rendered, params)
    with Live(console=screen, transient=True, refresh_per_second=8) if screen else nullcontext() as live:
        while True:
            start = time.perf_counter()  # the time of the model, not that of the screen
            output = next(stream, None)
            seconds += time.perf_counter() - start
            if output is None:
                break
            if output.finished:
                finished[output.request_id] = output
            if live is not None and screen is not None:
                pages[output.request_id].show(output)
                live.update(tiles(screen, list(prompts), list(pages.values())))
    return Run(
        outputs=[finished[str(index)] for index in range(len(prompts))],
        seconds=seconds,
        num_rounds=llm.engine.stats.num_steps - steps_before,
    )


class ColouredText:
    """An answer's text with its accepted draft tokens coloured."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._detokenizer: Detokenizer | None = None
        self._num_shown = 0
        self.text = Text()

    def show(self, output: RequestOutput) -> Text:
        """Append what a later snapshot has more."""
        if self._detokenizer is None:
            self._detokenizer = self._llm.make_detokenizer(output.prompt_token_ids, SamplingParams())
        tokens = zip(output.outputs[0].token_ids, output.metrics.accepted, strict=True)
        for token_id, is_accepted in list(tokens)[self._num_shown :]:
            num_characters = len(self._detokenizer.text)
            self._detokenizer.push(token_id)
            self.text.append(self._detokenizer.text[num_characters:], style=ACCEPTED if is_accepted else None)
        self._num_shown = len(output.outputs[0].token_ids)
        return self.text


def tiles(screen: Console, kinds: list[str], pages: list[ColouredText]) -> Table:
    """All answers at once in two columns, each showing the end of its text."""
    height = max(3, (screen.height - 1) // -(-len(pages) // 2))
    width = screen.width // 2 - 4
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    panels = [
        Panel(
            Text("\n").join(page.text.wrap(screen, max(width, 8))[-(height - 2) :]),
            title=kind,
            height=height,
            border_style="dim",
        )
        for kind, page in zip(kinds, pages, strict=True)
    ]
    for left in range(0, len(panels), 2):
        grid.add_row(*panels[left : left + 2])
    return grid


def show_answers(console: Console, llm: LLM, prompts: dict[str, str], run: Run) -> None:
    """All prompts and answers in full."""
    console.print(Text("Accepted draft tokens are ") + Text("green", style=ACCEPTED) + Text("."), style="dim")
    for (kind, prompt), output in zip(prompts.items(), run.outputs, strict=True):
        console.print(Rule(kind, style="dim"))
        console.print(Text(prompt, style="dim"))
        console.print(ColouredText(llm).show(output))
    console.print(Rule(style="dim"))


def comparison(with_drafts: Run, without: Run, title: str) -> Table:
    """The figures of both runs side by side."""
    table = Table(title=title, caption=CAPTION, caption_justify="left")
    for column in ("", "tokens", "rounds", "drafts accepted", "mean acceptance length", "tokens/s", "speedup"):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    stats = with_drafts.stats
    speedup = with_drafts.tokens_per_second / without.tokens_per_second
    table.add_row(
        "speculation",
        str(stats.num_output_tokens),
        str(with_drafts.num_rounds),
        f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} ({stats.acceptance_rate:.0%})",
        f"{stats.mean_acceptance_length:.2f}",
        f"{with_drafts.tokens_per_second:.1f}",
        f"{speedup:.2f}x",
    )
    table.add_row(
        "none",
        str(without.stats.num_output_tokens),
        str(without.num_rounds),
        "",
        "",
        f"{without.tokens_per_second:.1f}",
        "1.00x",
    )
    return table


def count_identical(with_drafts: Run, without: Run) -> int:
    """Prompts whose output tokens, all of them, are the same in both runs."""
    pairs = zip(with_drafts.outputs, without.outputs, strict=True)
    return sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs)
