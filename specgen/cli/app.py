"""The `specgen` command: registers its subcommands, prepares stdout and stderr, and exits with the exit code.

It does not import torch or transformers, so that it starts quickly.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from typing import Annotated

import typer

from specgen.base.interrupts import interrupts
from specgen.base.machine import WAIT_PASSIVELY, __version__, launch
from specgen.cli.compare import compare
from specgen.cli.error_reporting import INTERRUPTED, system_error, usage_error
from specgen.cli.generate import generate
from specgen.cli.inspect import inspect
from specgen.cli.tune import tune

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


def program() -> None:
    """Runs `main` as a program of its own: sets what suits this process, and may not be called in another program's."""
    for name, value in WAIT_PASSIVELY.items():
        os.environ.setdefault(name, value)
    gc.disable()  # until the models are loaded: it would take a tenth of the time of the imports, and free nothing
    try:
        main()
    finally:
        gc.freeze()  # else Python searches torch's objects for garbage as it ends, which takes 0.4 seconds


def main() -> None:
    """Runs the `specgen` command. Errors of the command-line parser are printed in the same form as errors of subcommands.

    Of the processes that torchrun starts, the first one runs it, and the others do what it tells them.
    """
    if launch() is not None:
        sys.exit(_main_of_ranks())
    sys.exit(_main())


def _main_of_ranks() -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else torch reports each connection that ends
    end = None
    try:
        with interrupts.watched():
            from specgen.engine.spread import ranks  # imports torch, which takes seconds

            end = ranks.end
            ranks.follow_unless_first()
        return _main()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to this process, and torchrun passes it on again
        sys.stderr.flush()  # `end` may wait for processes that are still starting
        if end is not None:
            end()


def _main() -> int:
    """Runs the `specgen` command and returns its exit code."""
    _prepare_streams()
    try:
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:  # from help texts; commands report their own
        code = system_error(error)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        code = usage_error(error)
    return code if isinstance(code, int) else 0


def _prepare_streams() -> None:
    """Makes stdout and stderr safe to write to.

    If the shell closed one (`>&-`), its output is discarded. A character that the locale's encoding lacks is written as `?`.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open until the process ends
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):  # the latter in a C locale
            stream.reconfigure(errors="replace")
