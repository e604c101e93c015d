"""The `specgen` command: registers its subcommands, prepares stdout and stderr, and ends with an
exit code and at most one error message, whether a command succeeds, fails or is interrupted.

It does not import torch or transformers, so that it starts quickly.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.interrupts import ReportedInterrupt, interrupts
from specgen.base.machine import WAIT_PASSIVELY, __version__, launch
from specgen.base.text import one_line
from specgen.cli.commands import command
from specgen.cli.options import COMMANDS

INTERRUPTED = 130
# names that options and commands have in other programs
_OTHER_NAMES = {"--temp": "--temperature", "--max-tokens": "--max-new-tokens"}
_OTHER_COMMANDS = {"chat": "specgen generate --chat", "run": "specgen generate --chat"}
_LONGEST = 1000  # characters of a message
_WRONG_PATH = (
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
)


def program() -> None:
    """Runs `main` as the whole process: sets environment variables and switches garbage collection
    off until the models are loaded. So another program should call `main` instead."""
    for name, value in WAIT_PASSIVELY.items():
        os.environ.setdefault(name, value)
    # it would take a tenth of the time of the imports, and free nothing; `open_pair` starts it
    gc.disable()
    try:
        main()
    finally:
        # As it ends, Python does not search frozen objects for garbage, which would take 0.4
        # seconds. But triton prints what is left.
        if "triton" in sys.modules:
            gc.unfreeze()
        else:
            gc.freeze()


def main() -> None:
    """Runs the `specgen` command and exits with its code. Errors of the command-line parser are
    printed in the same form as errors of subcommands.

    Of the processes that torchrun starts, the first one runs the command, and the others compute
    their shares of its passes.
    """
    sys.exit(_main() if launch() is None else _main_of_ranks())


def _main_of_ranks() -> int:
    # without it, torch reports each connection that ends
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
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
        # a terminal sends Ctrl-C to this process, and torchrun passes it on again
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.flush()  # `end` may wait for processes that are still starting
        if end is not None:
            end()


def _main() -> int:
    """Runs the `specgen` command and returns its exit code."""
    _prepare_streams()
    _drop_sizes_that_are_none()
    try:
        code = app(standalone_mode=False, prog_name="specgen")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except OSError as error:  # from help texts; commands report their own
        return _system_error(error)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return 0  # the reader of a help text has closed the pipe
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _usage_error(error)
    return code if isinstance(code, int) else 0


def _prepare_streams() -> None:
    """Makes stdout and stderr safe to write to.

    If the shell closed one (`>&-`), its output is discarded. A character that the locale's encoding
    lacks is written as `?`.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open until the process ends
            continue
        # in a C locale it is surrogateescape
        can_fail = getattr(stream, "errors", None) in ("strict", "surrogateescape")
        if can_fail and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_sizes_that_are_none() -> None:
    """Removes variables for the terminal's size that hold no positive number: Rich and typer would
    fail with some of them."""
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        if re.fullmatch("[1-9][0-9]{0,4}", os.environ.get(name, "1")) is None:
            del os.environ[name]


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that runs `command` and then raises typer.Exit with the exit code.

    If the command raises an error that users can cause, one message goes to stderr and the exit
    code is the error's. Other errors are not caught.
    """

    @wraps(command)
    def run(**options: Any) -> None:
        code = 0
        try:
            with interrupts.watched():
                command(**options)
            sys.stdout.flush()
        except SpecgenError as error:
            code = _report(error, no_color=bool(options.get("no_color")))
        except KeyboardInterrupt as error:
            code = INTERRUPTED
            if not isinstance(error, ReportedInterrupt) and not options.get("quiet"):
                print("interrupted", file=sys.stderr)
        except OSError as error:
            code = _system_error(error)
        except Exception as error:
            known = _known_failure(error)
            if known is None:
                raise
            code = _report(known)
        raise typer.Exit(code)

    return run


def _known_failure(error: Exception) -> RunError | None:
    """Returns the error to report for lack of memory, and for one that a method from outside has
    raised; None for any other."""
    from specgen.methods import failure_outside  # not for --help

    if is_out_of_memory(error):
        reason = str(error) or "not enough memory"  # Python's own error has no text
        problem = f"out of memory: {reason.splitlines()[0]}"
        return RunError(problem, "Try a smaller model or --dtype bfloat16")
    return failure_outside(error)


def _report(error: SpecgenError, *, no_color: bool = False) -> int:
    """Prints `error:`, the error's message and its hint on stderr: in wrapped lines on a terminal,
    else on one line. Of a very long message it prints the beginning and the end. Returns the exit
    code.
    """
    from rich.text import Text

    from specgen.view.theme import console, labelled

    out = console(stderr=True, no_color=no_color)
    if not out.is_terminal:
        try:
            print(f"error: {_brief(str(error))}", file=sys.stderr)
        except OSError:  # nothing can be reported; the exit code says that it failed
            _silence(sys.stderr)
        return error.exit_code
    label = Text("error:", "bad")
    for part in filter(None, (error.message, error.hint)):
        for line in labelled(label, Text(_brief(part)), min(out.width, 100), len("error: ")):
            out.print(line, soft_wrap=True)
        label = Text()
    return error.exit_code


def _brief(message: str) -> str:
    line = one_line(message)
    if len(line) <= _LONGEST:
        return line
    return f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"


def _usage_error(error: Exception) -> int:
    """Prints an error of the command-line parser, such as an unknown option or a wrong value.
    Returns the exit code."""
    message: str = error.format_message()  # type: ignore[attr-defined]
    option = getattr(error, "param", None)
    checks = getattr(error.__cause__, "errors", None)
    if option is not None and checks is not None:
        # the parser's message about a wrong value does not contain the value
        problem = f"{option.opts[0]} is {checks()[0]['input']!r}"
        rule = str(error).removeprefix("Value error, ").partition(",")[0]
        return _report(SpecgenError(problem, rule.replace("Input should", "It has to")))
    if message:  # it is empty where the parser has shown the help text instead
        _report(SpecgenError(message.rstrip("."), _usage_hint(error)))
    return SpecgenError.exit_code


def _usage_hint(error: Exception) -> str:
    """Returns the way out of a parser's error. A prompt that begins with a dash, such as `-5 + 3
    =`, is read as options."""
    context = getattr(error, "ctx", None)
    option = str(getattr(error, "option_name", ""))
    is_prompt = option.startswith("-") and not option.startswith("--")
    if is_prompt and context is not None and context.info_name == "generate":
        return (
            "See --help. A prompt that begins with a dash goes after --: specgen "
            'generate -- "-5 + 3 ="'
        )
    return "See --help"


def _system_error(error: OSError) -> int:
    """Reports an error of the operating system on stderr. Returns the exit code: 2 if a path cannot
    be right, otherwise 1.

    If the reader of the output has closed the pipe, nothing is reported and the code is 0.
    """
    if error.filename is not None:
        error_type = SpecgenError if error.errno in _WRONG_PATH else RunError
        return _report(error_type(f"{error.filename}: {error.strerror}", "Check the path"))
    _silence(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 0
    return _report(RunError(f"cannot write the output: {error.strerror}"))


def _silence(stream: TextIO) -> None:
    """Discards the text still in the stream's buffer, so that Python's flush at exit does not raise
    the same error again."""
    with suppress(OSError, ValueError):  # a stream without a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


_SHARED: dict[str, Any] = {"rich_markup_mode": "rich", "pretty_exceptions_enable": False}
_SHARED["context_settings"] = {"help_option_names": ["--help", "-h"]}


class _PlainFlags:
    """Shows no type for flags, such as --help, in the help: they take no value."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """One of the commands."""


class CommandGroup(_PlainFlags, TyperGroup):
    """The group of the commands. It makes a command's options only when that command is
    called, because making the options of all would take a third of the time of --help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in _OTHER_COMMANDS:
            ctx.fail(
                f"there is no command {args[0]!r}; for a conversation take "
                f"{_OTHER_COMMANDS[args[0]]}"
            )
        args = with_our_names(args)
        if args and args[0] in COMMANDS:
            shows_all = "--help-all" in args or "_SPECGEN_COMPLETE" in os.environ
            self.commands[args[0]] = with_options(args[0], shows_all=shows_all)
        return super().resolve_command(ctx, args)


def with_our_names(args: list[str]) -> list[str]:
    """Returns arguments with our names for options that other programs call otherwise, up to an
    argument `--`."""
    ours: list[str] = []
    for position, arg in enumerate(args):
        if arg == "--":
            return [*ours, *args[position:]]
        name, equals, value = arg.partition("=")
        ours.append(_OTHER_NAMES.get(name, name) + equals + value)
    return ours


def with_options(name: str, *, shows_all: bool = True) -> Any:
    """Returns the typer command `name` with all its options. Unless `shows_all`, its help shows
    only those in `SHOWN`."""
    single = typer.Typer(add_completion=False, **_SHARED)
    register = single.command(name, cls=Command, help=COMMANDS[name][0])
    register(reported(command(name, shows_all=shows_all)))
    return typer.main.get_command(single)


app = typer.Typer(name="specgen", cls=CommandGroup, no_args_is_help=True, **_SHARED)


for _name, _parts in COMMANDS.items():
    app.command(_name, help=_parts[0])(lambda: None)  # listed by the help; `CommandGroup` runs it


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"specgen {__version__}")
        raise typer.Exit


@app.callback()
def specgen(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            help="Show the version, then exit.",
            callback=_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Speculative decoding on your own models: faster tokens, the target's own output, and a view
    of what happened."""
