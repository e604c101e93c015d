"""Runs chat templates in a process of its own: a template is a stranger's program that may never end or take all memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Timer
from typing import Any

_PATIENCE = 2.0  # seconds to wait for the exit code of a killed process
_CHARACTER = 12  # bytes of JSON for a character outside Unicode's basic plane
_PIECE = 1 << 20  # bytes to read at once


class TemplateError(Exception):
    """The template refused its messages, or was cut off. The message says why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may take: seconds, bytes of memory, and characters of text. It usually takes less than a millisecond."""

    seconds: float = 10.0
    memory: int = 1 << 30
    characters: int = 16 << 20


LIMITS = Limits()


class TemplateProcess:
    """Renders chat templates, one after the other, in a process that the first rendering starts.

    A rendering that exceeds `limits` ends the process, and the next one starts another. The process also ends with `close`, when
    this object is deleted, and when the parent process ends for any reason. Several threads may use this object; in a forked
    process it starts a process of its own.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or LIMITS
        self._lock = Lock()  # held while the process is started, used or ended
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None  # ends the process
        _all.add(self)

    def render(self, template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, Any]) -> str:
        """Returns what `chat_template.render` does for these arguments.

        Raises TemplateError if it raises an exception, and for a rendering that exceeds the limits.
        """
        request = json.dumps([template, messages, special_tokens], default=str).encode() + b"\n"
        with self._lock:
            try:
                answer = json.loads(self._exchange(self._started(), request))
            except BaseException:  # also Ctrl-C
                self._stop()
                raise
            if answer["is_last"]:
                self._stop()
        if "text" not in answer:
            raise TemplateError(answer["error"])
        text: str = answer["text"]
        return text

    def start(self) -> None:
        """Starts the process, unless there is one, and does not wait until it is ready. `render` would start it, too."""
        with self._lock, suppress(OSError):  # `render` reports it
            self._started()

    def close(self) -> None:
        """Kills the process. A rendering in another thread fails; the next one starts another process."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._process is None:
            program = Path(__file__).with_name("chat_template.py")
            limits = self._limits.seconds, self._limits.memory, self._limits.characters
            self._process = subprocess.Popen(  # noqa: S603  this Python
                [sys.executable, "-P", str(program), *map(str, limits)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal does not reach it
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
        return self._process

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes) -> bytes:
        """Sends a line to the process and returns the line that it answers. Raises TemplateError if it does not in time."""
        is_late = Event()

        def stop() -> None:
            is_late.set()
            process.kill()

        timer = Timer(self._limits.seconds, stop)
        timer.daemon = True
        timer.start()
        try:
            return _line_after(process, request, _CHARACTER * self._limits.characters + _PIECE)
        except (EOFError, OSError) as error:
            if is_late.is_set():
                raise TemplateError(f"it takes more than {self._limits.seconds:g} seconds") from error
            process.kill()  # it may have closed its pipes
            raise TemplateError(f"its process ended with code {process.wait(_PATIENCE)}") from error
        finally:
            timer.cancel()

    def _after_fork(self) -> None:
        """Leaves the process to the parent. Closes its pipes here, because it ends when all their other ends are closed."""
        self._lock = Lock()  # a thread that does not exist here may have held it
        if self._process is not None:
            _close_pipes(self._process)
            self._process.returncode = 0  # so that it is neither killed nor waited for here
        self._process = self._finalizer = None


_all: weakref.WeakSet[TemplateProcess] = weakref.WeakSet()


def _forget_all() -> None:
    for process in _all:
        process._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _line_after(process: subprocess.Popen[bytes], request: bytes, longest: int) -> bytes:
    """Writes the request and returns the line that follows. Raises EOFError if there is none of at most `longest` bytes."""
    assert process.stdin is not None
    assert process.stdout is not None
    left = memoryview(request)
    while left:
        left = left[process.stdin.write(left) :]
    answer = bytearray()
    while not answer.endswith(b"\n"):
        piece = process.stdout.read(_PIECE)
        answer += piece
        if not piece or len(answer) > longest:
            raise EOFError
    return bytes(answer)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError, subprocess.TimeoutExpired):
        process.kill()
        _close_pipes(process)
        process.wait(_PATIENCE)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
