"""The `batchspec` command."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer
from rich.console import Console

from batchspec.cli.audit import audit
from batchspec.cli.bench import bench
from batchspec.cli.demo import demo
from batchspec.cli.generate import generate
from batchspec.cli.train import train_drafter

app = typer.Typer(
    name="batchspec",
    help="Batched speculative decoding for Hugging Face models that cannot change the output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(demo)
app.command()(generate)
app.command()(audit)
app.command("train-drafter")(train_drafter)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        from batchspec import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Batched speculative decoding for Hugging Face models that cannot change the output.

    Start with [bold]batchspec demo[/bold]; then [bold]batchspec generate --help[/bold].
    """


def main(arguments: list[str] | None = None) -> None:
    """Run a command; bad input ends with one line on stderr and exit code 2, and so does what could not be run, as
    for want of memory, behind a traceback."""
    try:
        app(args=arguments)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError | MemoryError):
            traceback.print_exc()
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
