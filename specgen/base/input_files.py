"""Opens input files, and reports an input that the program has to wait for, such as a FIFO to which nothing is written."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Timer
from typing import Any

PATIENCE = 3.0  # seconds before a wait is reported
_BUFFER = 1 << 16  # bytes, as many as a pipe holds

_report: ContextVar[Callable[[str], None] | None] = ContextVar("report", default=None)


@contextmanager
def waits_reported(report: Callable[[str], None]) -> Iterator[None]:
    """Makes `waiting_for` and files of `open_input` call `report` in this block, from another thread, once with each text.
    Otherwise they report nothing."""
    reported: set[str] = set()

    def report_once(text: str) -> None:
        if text not in reported:
            reported.add(text)
            report(text)

    token = _report.set(report_once)
    try:
        yield
    finally:
        _report.reset(token)


@contextmanager
def waiting_for(name: str) -> Iterator[None]:
    """Reports the text `waiting for NAME` if the block takes longer than `PATIENCE`."""
    report = _report.get()
    if report is None:
        yield
        return
    timer = Timer(PATIENCE, report, [f"waiting for {name}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def open_input(path: Path) -> io.BufferedReader:
    """Opens a file to read bytes. What is not a regular file, such as a FIFO, a terminal or /dev/fd/63, is reported if opening it
    or reading from it takes long (see `waits_reported`). Raises OSError, and ValueError for a path that contains NUL."""
    return path.open("rb") if path.is_file() else io.BufferedReader(_Awaited(path), _BUFFER)


class _Awaited(io.RawIOBase):
    """A file that may make its reader wait."""

    def __init__(self, path: Path) -> None:
        self._name = f"a program that writes to {path}"
        with waiting_for(self._name):
            self._file = io.FileIO(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        with waiting_for(self._name):
            return self._file.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
