"""The `batchspec` command."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from batchspec.cli.demo import demo
from batchspec.cli.generate import generate

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


@app.callback()
def _commands() -> None:
    """Batched speculative decoding for Hugging Face models that cannot change the output.

    Start with [bold]batchspec demo[/bold]; then [bold]batchspec generate --help[/bold].
    """


def main(arguments: list[str] | None = None) -> None:
    """Run a command; bad input ends with one line on stderr and exit code 2."""
    try:
        app(args=arguments)
    except ValueError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
