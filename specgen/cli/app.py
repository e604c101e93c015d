"""`specgen`: one command line, its commands in files of their own. Nothing heavy is imported before a command runs."""

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
app.command("generate")(generate)
app.command("compare")(compare)
app.command("inspect")(inspect)
app.command("tune")(tune)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specgen {__version__}")
        raise typer.Exit


@app.callback()
def specgen(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Speculative decoding on your own models: faster tokens, the target's own output, and a view of what happened."""


def main() -> None:
    """The console script. The parser's own errors get one line too."""
    _prepare_streams()
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except typer.Abort:
        code = INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        code = usage_error(error)
    sys.exit(code if isinstance(code, int) else 0)


def _prepare_streams() -> None:
    """A stream that the shell closed (`>&-`) leads nowhere; a character that the locale lacks becomes a question mark."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open until the process ends
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
