"""Ends a command with an exit code and at most one error message, whether it succeeds, fails or is interrupted."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import ParamSpec, TextIO

import typer

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.interrupts import interrupts
from specgen.base.text import one_line

INTERRUPTED = 130
_LONGEST = 1000  # characters of a message
_WRONG_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
P = ParamSpec("P")


def reported(command: Callable[P, int | None]) -> Callable[P, None]:
    """Decorates a command so that it ends the program with the exit code that it returns (None is 0).

    If it raises an error that users can cause, one message goes to stderr and the exit code is the error's.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with interrupts.watched():
                code = command(*args, **kwargs) or 0
            sys.stdout.flush()
        except SpecgenError as error:
            report(error, no_color=bool(kwargs.get("no_color")))
            code = error.exit_code
        except KeyboardInterrupt:
            code = INTERRUPTED
        except OSError as error:
            code = system_error(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            what = str(error) or "not enough memory"  # Python's own error has no text
            code = _failed(f"out of memory: {what.splitlines()[0]}", "Try a smaller model or --dtype bfloat16")
        raise typer.Exit(code)

    return run


def report(error: SpecgenError, *, no_color: bool = False) -> None:
    """Prints `error:`, the error's message and its hint on stderr: in wrapped lines on a terminal, else on one line.

    Of a message with thousands of characters, such as a long path, it shows the beginning and the end.
    """
    from rich.text import Text

    from specgen.view.theme import console, labelled

    out = console(stderr=True, no_color=no_color)
    if not out.is_terminal:
        try:
            print(f"error: {_brief(str(error))}", file=sys.stderr)
        except OSError:  # nothing can be reported; the exit code says that it failed
            _silence(sys.stderr)
        return
    label = Text("error:", "bad")
    for part in filter(None, (error.message, error.hint)):
        for line in labelled(label, Text(_brief(part)), min(out.width, 100), len("error: ")):
            out.print(line)
        label = Text()


def _brief(message: str) -> str:
    line = one_line(message)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"


def usage_error(error: Exception) -> int:
    """Prints an error of the command-line parser, such as an unknown option. Returns the exit code."""
    message: str = error.format_message()  # type: ignore[attr-defined]
    if message:  # it is empty where the parser has shown the help text instead
        report(_wrong_value(error) or SpecgenError(message.rstrip("."), "See --help"))
    return 2


def _wrong_value(error: Exception) -> SpecgenError | None:
    """Returns a parser's error about an option's value as an error whose message contains the value; the parser's does not.

    Returns None for any other error of the parser.
    """
    option, checks = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if option is None or checks is None:
        return None
    return SpecgenError(
        f"{option.opts[0]} is {checks()[0]['input']!r}", str(error).removeprefix("Value error, ").partition(",")[0]
    )


def system_error(error: OSError) -> int:
    """Reports an error of the operating system. Returns its exit code: 2 if it is about a path that cannot be right, 0 if the
    reader of the output has closed the pipe, which is no error, otherwise 1."""
    if error.filename is None:
        _silence(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return 0
        return _failed(f"cannot write the output: {error.strerror}")
    kind = SpecgenError if error.errno in _WRONG_PATH else RunError
    found = kind(f"{error.filename}: {error.strerror}", "Check the path")
    report(found)
    return found.exit_code


def _failed(message: str, hint: str = "") -> int:
    error = RunError(message, hint)
    report(error)
    return error.exit_code


def _silence(stream: TextIO) -> None:
    """Discards the text still in the stream's buffer, so that Python's flush at exit does not raise the same error again."""
    with suppress(OSError, ValueError):  # a stream without a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
