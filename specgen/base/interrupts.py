"""Handles Ctrl-C for the whole process: none is lost while a command runs, and none breaks off what has to be a whole."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class ReportedInterrupt(KeyboardInterrupt):
    """A Ctrl-C that a command has already told the user about."""


class Interrupts:
    """The handler of SIGINT, which raises KeyboardInterrupt. Where the caller ignores or handles SIGINT, it does nothing."""

    def __init__(self) -> None:
        self._is_installed = self._is_raised = self._is_pending = False
        self._held = 0  # blocks of `held` around the running code

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notices every Ctrl-C in this block, such as a command.

        Python can lose a KeyboardInterrupt: if it stops an import, the import may raise another error instead, and if it is
        raised in a destructor, Python only prints it. Any error after a Ctrl-C is therefore raised as a KeyboardInterrupt, and
        `check` raises a KeyboardInterrupt that was lost without an error.
        """
        hook = sys.unraisablehook
        is_free = not self._is_installed and threading.current_thread() is threading.main_thread()
        if not is_free or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def print_unraisable(unraisable: Any) -> None:
            if not isinstance(unraisable.exc_value, KeyboardInterrupt):  # `check` raises that one
                hook(unraisable)

        self._is_installed, self._is_raised, self._is_pending = True, False, False
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
        """Raises KeyboardInterrupt if one was raised since `watched` began. `cause` is an error it may have caused."""
        if self._is_raised:
            raise KeyboardInterrupt from cause

    @contextmanager
    def caught(self) -> Iterator[None]:
        """For a block that handles Ctrl-C itself: no error after one becomes a KeyboardInterrupt."""
        with self.watched():
            try:
                yield
            finally:
                self._is_raised = False

    @contextmanager
    def held(self, *, raises: bool = True) -> Iterator[Callable[[], bool]]:
        """Delays a first Ctrl-C to the end of the block; unless `raises`, nothing is raised there either.

        Yields a function that tells whether there was one. A second Ctrl-C is raised at once, because what the block does, such
        as writing to a pipe, may take forever.
        """
        with self.watched():
            self._held += 1
            try:
                yield lambda: self._is_pending
            finally:
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
