"""Ctrl-C between rounds or inside a pass, never while a round is being shown and recorded; and none that a library loses."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Noticed:
    """A context manager for a whole command. Not every KeyboardInterrupt gets through: a lazy import makes another error of it, a
    destructor only prints it. Here every Ctrl-C is noticed, and what failed behind one was interrupted."""

    def __init__(self) -> None:
        self._pressed = False
        self._told = sys.unraisablehook

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._pressed = False
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
            yield  # ignored, or somebody else's: no business of ours
            return
        signal.signal(signal.SIGINT, self._handle)
        self._told, sys.unraisablehook = sys.unraisablehook, self._tell
        try:
            yield
        except Exception as error:
            if self._pressed:
                raise KeyboardInterrupt from error
            raise
        finally:
            sys.unraisablehook = self._told
            signal.signal(signal.SIGINT, before)

    def check(self) -> None:
        """Raise what was lost."""
        if self._pressed:
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._pressed = True
        raise KeyboardInterrupt

    def _tell(self, lost: Any) -> None:
        """Python's traceback of what a destructor raised, but for a Ctrl-C, which is not lost here."""
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            self._told(lost)


noticed = Noticed()


class Interrupts:
    """A context manager that turns SIGINT into KeyboardInterrupt, except that the first one waits while `held`.

    So a trace's rounds, its summary and the text always tell of the same tokens. A second Ctrl-C does not wait: the reader of a
    pipe may be the one that is stuck.
    """

    def __init__(self) -> None:
        self._held = False
        self._waiting = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def held(self) -> Iterator[None]:
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._waiting:
            self._waiting = False
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._held and not self._waiting:
            self._waiting = True
        else:
            raise KeyboardInterrupt
