"""Says on standard error what a command waits for, if it reads from a program that does not write yet."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

from specgen.sanitize import one_line

PATIENCE = 3.0  # seconds before the note about standard input, which usually ends sooner


@contextmanager
def waiting_note(text: str) -> Iterator[None]:
    """Prints `text` on standard error if the block takes longer than `PATIENCE`."""
    timer = Timer(PATIENCE, _print, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def note_fifos(inputs: Iterable[tuple[str, Path | None]]) -> None:
    """Prints a line for each input file that is a FIFO, as opening it waits until another program writes to it.

    `inputs` are pairs of the file's name for messages and its path; None: not given.
    """
    for name, path in inputs:
        with suppress(OSError, ValueError):
            if path is not None and path.resolve().is_fifo():  # not a pipe that the shell has opened, such as /dev/fd/63
                _print(f"{name}: waiting for a program that writes to the FIFO {path}")


def _print(text: str) -> None:
    with suppress(OSError):
        print(one_line(text), file=sys.stderr, flush=True)
