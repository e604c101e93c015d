"""Ctrl-C between rounds or inside a pass, never while a round is being shown and recorded."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
