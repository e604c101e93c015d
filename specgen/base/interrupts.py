"""Handles Ctrl-C for the whole process: each one is noticed, and work that must not be interrupted
delays it. Work that can be resumed handles a request to end (SIGTERM) in the same way."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class ReportedInterrupt(KeyboardInterrupt):
    """A KeyboardInterrupt for which the command has printed its message; nothing more is printed
    for it."""


class Interrupts:
    """Handles SIGINT (Ctrl-C) by raising KeyboardInterrupt, and remembers that it was raised.

    Does nothing outside of the main thread, and nothing if the program that called specgen ignores
    SIGINT or has a handler of its own.
    """

    def __init__(self) -> None:
        self._is_installed = self._is_raised = self._is_pending = False
        self._held = 0  # blocks of `held` around the running code

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Makes sure that no Ctrl-C during this block, such as a command, is lost.

        Python can lose a KeyboardInterrupt: an import that is interrupted may raise another error
        instead, and an interrupt in a destructor is only printed. So if an error leaves the block
        after a Ctrl-C, KeyboardInterrupt is raised in its place. `check` raises a KeyboardInterrupt
        that was lost without an error.
        """
        hook = sys.unraisablehook
        is_free = not self._is_installed and threading.current_thread() is threading.main_thread()
        if not is_free or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def print_unraisable(unraisable: Any) -> None:
            if not isinstance(unraisable.exc_value, KeyboardInterrupt):  # `check` raises that one
                hook(unraisable)

        self._is_installed = True
        self._is_raised = False
        self._is_pending = False
        signal.signal(signal.SIGINT, self._handle)
        sys.unraisablehook = print_unraisable
        try:
            yield
        except Exception as error:
            self.check(error)
            raise
        finally:
            sys.unraisablehook = hook
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_installed = False

    def check(self, cause: Exception | None = None) -> None:
        """Raises KeyboardInterrupt if one was raised since `watched` began. `cause` is the error
        that it may have led to."""
        if self._is_raised:
            raise KeyboardInterrupt from cause

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Like `watched`, for a block that handles Ctrl-C itself: errors that leave the block stay
        as they are, even after a Ctrl-C."""
        with self.watched():
            try:
                yield
            finally:
                self._is_raised = False

    @contextmanager
    def held(
        self, *, raises: bool = True, terminations: bool = False
    ) -> Iterator[Callable[[], bool]]:
        """Delays the first Ctrl-C during this block: KeyboardInterrupt is raised at its end, or not
        at all if `raises` is False.

        Yields a function that returns whether a Ctrl-C is being delayed. A second Ctrl-C raises
        KeyboardInterrupt at once, because the work of the block, such as writing to a pipe, may
        take forever. With `terminations`, SIGTERM counts as Ctrl-C.
        """
        with self.watched():
            self._held += 1
            is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            replaces = terminations and self._is_installed and is_default
            if replaces:
                signal.signal(signal.SIGTERM, self._handle)
            try:
                yield lambda: self._is_pending
            finally:
                if replaces:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._held -= 1
                is_due = self._is_pending and not self._held
                self._is_pending = self._is_pending and not is_due
            if is_due and raises:
                self._is_raised = True
                raise KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._held and not self._is_pending:
            self._is_pending = True
            return
        self._is_raised = True
        raise KeyboardInterrupt


interrupts = Interrupts()
