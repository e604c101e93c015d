"""The `specgen` command: its subcommands, the streams it writes to, and its exit code. Imports nothing heavy."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from specgen.cli.compare import compare
from specgen.cli.error_reporting import INTERRUPTED, usage_error
from specgen.cli.generate import generate
from specgen.cli.inspect import inspect
from specgen.cli.tune import tune
from specgen.environment import __version__

app = typer.Typer(
    name="specgen",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
for command in (generate, compare, inspect, tune):
    app.command(command.__name__)(command)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"specgen {__version__}")
        raise typer.Exit


@app.callback()
def specgen(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version, then exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Speculative decoding on your own models: faster tokens, the target's own output, and a view of what happened."""


def main() -> None:
    """The console script. The parser's errors are reported as those of commands are."""
    _prepare_streams()
    try:
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        code = usage_error(error)
    sys.exit(code if isinstance(code, int) else 0)


def _prepare_streams() -> None:
    """Replace a stream that the shell closed (`>&-`), and write a question mark for a character that the locale lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open until the process ends
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
