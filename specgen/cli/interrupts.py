"""Handling of Ctrl-C: noticing every one during a command, and deferring one until a round is shown and recorded."""

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

    A KeyboardInterrupt can get lost: an import that it breaks off raises another error instead, and one in a destructor is only
    printed. Any error after a Ctrl-C therefore becomes a KeyboardInterrupt, and `check` raises one that was lost silently.
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
        """Raise KeyboardInterrupt if there was a Ctrl-C, whether or not its exception got lost."""
        if self._pressed:
            raise KeyboardInterrupt from cause


interrupt_watch = InterruptWatch()


class Interrupts:
    """A context manager that turns SIGINT into KeyboardInterrupt, but defers the first one while `held`.

    The text, a trace's rounds and its summary therefore always contain the same tokens. A second Ctrl-C is not deferred, because
    writing to a pipe may block.
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
        """Defer a first Ctrl-C to the end of the block."""
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
