"""Handles Ctrl-C. None is lost while a command runs, and none breaks off a round before it is both recorded and shown."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class InterruptWatch:
    """Notices every Ctrl-C while a command runs: `with interrupt_watch(): ...`.

    Python can lose a KeyboardInterrupt: if it stops an import, the import may raise another error instead, and if it is raised in
    a destructor, Python only prints it. Any error after a Ctrl-C is therefore raised as a KeyboardInterrupt, and `check` raises a
    KeyboardInterrupt that was lost without an error.
    """

    _pressed = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._pressed = False
        before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
        if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
            yield  # SIGINT is ignored or handled by the caller
            return

        def handle(signum: int, frame: FrameType | None) -> None:
            self._pressed = True
            raise KeyboardInterrupt

        def print_unraisable(unraisable: Any) -> None:
            if not isinstance(unraisable.exc_value, KeyboardInterrupt):  # `check` raises that one
                hook(unraisable)

        signal.signal(signal.SIGINT, handle)
        sys.unraisablehook = print_unraisable
        try:
            yield
        except Exception as error:
            self.check(error)
            raise
        finally:
            sys.unraisablehook = hook
            signal.signal(signal.SIGINT, before)

    def check(self, cause: Exception | None = None) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed since the `with` block began. `cause` is an error it may have caused."""
        if self._pressed:
            raise KeyboardInterrupt from cause


interrupt_watch = InterruptWatch()


class Interrupts:
    """A context manager that raises KeyboardInterrupt on Ctrl-C, but inside `with held():` only at the end of that block.

    A round can thus be written completely: the shown text and the trace file contain the same tokens. A second Ctrl-C is raised
    at once, because writing to a pipe may block forever.
    """

    def __init__(self) -> None:
        self._held = False
        self._pending = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delays a first Ctrl-C to the end of the `with` block. A second one is raised at once."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._held and not self._pending:
            self._pending = True
        else:
            raise KeyboardInterrupt
