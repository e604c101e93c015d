"""Reports how far the forward passes over long prompts are. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

PrefillObserver = Callable[[int, int, int], None]
"""Called with a number that identifies a model's pass over a prompt, the tokens that it has run, and those that it has to run."""


class PrefillReports:
    """Passes reports of prompts that are run in several forward passes on to an observer, if there is one.

    One for the process: a run's models report in the threads that run them, and heads and exit layers have caches of their own.
    """

    def __init__(self) -> None:
        self._observer: PrefillObserver | None = None

    @contextmanager
    def to(self, observer: PrefillObserver) -> Iterator[None]:
        """Calls `observer` for each report until the `with` block ends."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def report(self, source: int, done: int, total: int) -> None:
        """Reports that `done` of `total` tokens have been run. `source` identifies the KV cache that holds them."""
        observer = self._observer
        if observer is not None:
            observer(source, done, total)


prefill_reports = PrefillReports()
