"""The prompt of `generate`: its argument, the file of --file and standard input, joined in this
order.

Text from files and pipes is UTF-8. A byte order mark and the line feed at the end are left out, and
CRLF becomes LF, so that the same text gives the same tokens whatever wrote it and however it is
passed.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from select import select
from threading import Thread

from specgen.base.errors import SpecgenError
from specgen.base.schema import decoded, read_text

LONGEST = 16 << 20  # bytes of a file or of standard input: more than any model's context
FIRST_BYTE_SECONDS = 1.0  # in which a pipe has to deliver something, to be joined to the prompt
BETWEEN = "\n\n"  # a blank line
_LATE = (
    "Nothing came from standard input within a second: the prompt is taken alone. "
    "For text that comes later, write it to a file and name it with -f FILE; --no-stdin "
    "leaves out this wait and this note."
)
_EMPTY = "Standard input was empty: the prompt is taken alone."


class PromptInput:
    """A prompt; what is piped in may still have to come.

    `argument` is the one on the command line, None if it is missing; `-` stands for standard input.
    Once `text` has returned, `note` says why nothing was joined from a pipe, else it is empty.
    Raises SpecgenError for a text that is empty or not UTF-8, and if there is no prompt.
    """

    def __init__(self, argument: str | None, file: Path | None, *, reads_stdin: bool) -> None:
        self.note = ""
        self._parts: list[str] = []
        self._pipe: _Pipe | None = None
        if argument == "-" or (argument is None and file is None):
            self._parts.append(_whole_stdin(requested=argument == "-", is_allowed=reads_stdin))
        elif argument is not None:
            self._parts.append(check_text(argument, "the prompt"))
        if file is not None:
            text = plain(read_text(file, "prompt", largest=LONGEST))
            if argument is not None and not text.strip():
                raise SpecgenError(f"the prompt {file} is empty", "Name a file with text in it")
            self._parts.append(text)
        if not any(part.strip() for part in self._parts):
            raise SpecgenError("the prompt is empty", "Give the model a text to continue")
        if reads_stdin and argument not in (None, "-"):
            self._join_stdin()

    def text(self) -> str:
        """Returns the whole prompt. Waits for a pipe's first byte, and if it comes in time for the
        pipe's end. Raises SpecgenError if the pipe's text is too long or not UTF-8."""
        if self._pipe is not None:
            is_joined = self._add(self._pipe.read())
            if not is_joined:
                self.note = _LATE if self._pipe.is_late else _EMPTY
            self._pipe = None
        return BETWEEN.join(self._parts)

    def _join_stdin(self) -> None:
        """Reads standard input if it is a regular file; if it is a pipe, begins to wait for it.
        Nothing else is joined."""
        try:
            descriptor = sys.stdin.fileno()
            mode = os.fstat(descriptor).st_mode
        except (AttributeError, OSError, ValueError):  # closed, or no file of the system's
            return
        if stat.S_ISREG(mode):
            self._add(_read_stdin())
        elif stat.S_ISFIFO(mode):
            self._pipe = _Pipe(descriptor)

    def _add(self, data: bytes) -> bool:
        """Joins the text, unless it is blank, and returns whether it was joined."""
        text = _stdin_text(data)
        if text.strip():
            self._parts.append(text)
        return bool(text.strip())


class _Pipe:
    """Standard input as a pipe. A thread waits for its first byte, so that the models can be loaded
    meanwhile.

    `is_late`: neither a byte nor the pipe's end has come yet.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._begin = b""
        self.is_late = True
        self._deadline = time.monotonic() + FIRST_BYTE_SECONDS
        self._waiting = Thread(target=self._wait, daemon=True)
        self._waiting.start()

    def read(self) -> bytes:
        """Returns everything that the pipe delivers, nothing if its first byte did not come in
        time."""
        left = max(0.0, self._deadline - time.monotonic())
        # but on Windows the thread itself ends in time
        self._waiting.join(left if sys.platform == "win32" else None)
        return self._begin + _read_stdin(len(self._begin)) if self._begin else b""

    def _wait(self) -> None:
        is_ready = True
        if sys.platform != "win32":  # which can only wait for sockets
            is_ready = bool(select([self._descriptor], [], [], FIRST_BYTE_SECONDS)[0])
        if is_ready:
            with suppress(OSError):
                self._begin = os.read(self._descriptor, LONGEST)
            self.is_late = False


def plain(text: str) -> str:
    """Returns a file's text as a prompt: with LF for CRLF, and without the line feed at its end."""
    return text.replace("\r\n", "\n").removesuffix("\n")


def check_text(text: str, name: str) -> str:
    """Returns the text. Raises SpecgenError if it has surrogates, which stand for bytes that are
    not UTF-8 in an argument."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise SpecgenError(f"{name} is not UTF-8", "Convert it first, for instance with iconv")
    return text


def _whole_stdin(*, requested: bool, is_allowed: bool) -> str:
    """Returns all of standard input. A terminal is read only if `requested` (the prompt was given
    as `-`)."""
    if requested and not is_allowed:
        raise SpecgenError("the prompt is - and --no-stdin is given", "Leave one of them out")
    if not is_allowed or sys.stdin is None or (sys.stdin.isatty() and not requested):
        raise SpecgenError(
            "there is no prompt",
            (
                'Give one: specgen generate "def fibonacci(n):", pipe it in, or chat: '
                "specgen generate --chat"
            ),
        )
    return _stdin_text(_read_stdin())


def _read_stdin(already: int = 0) -> bytes:
    """Returns what is left of standard input, of which `already` bytes were read."""
    data = sys.stdin.buffer.read(LONGEST + 1 - already)
    if already + len(data) > LONGEST:
        raise SpecgenError(
            f"the prompt on standard input is longer than {LONGEST >> 20} MiB", "Give a part of it"
        )
    return data


def _stdin_text(data: bytes) -> str:
    return plain(decoded(data, "the prompt on standard input"))
