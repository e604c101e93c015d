"""How a command ends: one clear line and an exit code for whatever goes wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import typer

from specgen.cli.interrupts import noticed
from specgen.errors import RunError, SpecgenError, is_out_of_memory

INTERRUPTED = 130
P = ParamSpec("P")


def reported(command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn what a command returns or raises into an exit code, with one line on stderr where there is something to say."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with noticed():
                code = command(*args, **kwargs) or 0
            sys.stdout.flush()
        except SpecgenError as error:
            report(error, no_color=bool(kwargs.get("no_color")))
            code = error.exit_code
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BrokenPipeError:
            code = _reader_has_gone()
        except OSError as error:
            _silence_stdout()
            code = _failed(f"cannot write the output: {error.strerror}" if error.filename is None else str(error))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            code = _failed(f"out of memory: {str(error).splitlines()[0]}", "Try a smaller model or --dtype bfloat16")
        raise typer.Exit(code)

    return run


def report(error: SpecgenError, *, no_color: bool = False) -> None:
    """`error:` and what is wrong; the cure below it, indented, on a terminal, and on the same line in a pipe."""
    from rich.text import Text

    from specgen.ui.sanitize import inline
    from specgen.ui.theme import console

    out = console(stderr=True, no_color=no_color)
    if not out.is_terminal:
        print(f"error: {inline(str(error))}", file=sys.stderr)
        return
    lead = "error: "
    for part in filter(None, (error.message, error.hint)):
        for line in Text(inline(part)).wrap(out, max(20, min(out.width, 100) - len(lead))):
            line.rstrip()
            out.print(Text().append(lead, "bad" if lead.strip() else "none").append_text(line))
            lead = " " * len(lead)


def usage_error(error: Exception) -> int:
    """Report what the command-line parser refused. Returns the exit code."""
    message: str = error.format_message()  # type: ignore[attr-defined]
    if message:  # without one, the parser has shown the help instead
        report(_wrong_value(error) or SpecgenError(message.rstrip("."), "See --help"))
    return 2


def _wrong_value(error: Exception) -> SpecgenError | None:
    """The parser's complaint about an option's value, with the value, which the parser itself does not name."""
    option, checks = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if option is None or checks is None:
        return None
    return SpecgenError(f"{option.opts[0]} is {checks()[0]['input']!r}", str(error).partition(",")[0])


def _failed(message: str, hint: str = "") -> int:
    error = RunError(message, hint)
    report(error)
    return error.exit_code


def _reader_has_gone() -> int:
    _silence_stdout()
    return 0


def _silence_stdout() -> None:
    """What is still buffered cannot be written: let the interpreter's last flush go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
