"""A progress bar on stderr while a long prompt is run. It begins at the cursor, so an answer that has begun is not disturbed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from rich.console import Console

from specgen.base.prefill_progress import prefill_reports
from specgen.view.terminal.live_table import running_line

DELAY = 2.0  # seconds; the prompt of a small model is over before
_SAVE, _RESTORE, _ERASE_TO_END = "\x1b7", "\x1b8", "\x1b[K"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"  # a line that began after other text is cut at the terminal's edge


class PrefillLine:
    """Shows how many of the prompt's tokens the models have run, once that has taken `DELAY` seconds.

    It counts the tokens of all models that are running the prompt: the target's, then the draft's; in PEARL both at once. It
    shows nothing if `console` is not a terminal or `quiet` is True. `clock` returns seconds. No thread redraws the line, because
    it would disturb the models: it changes when a chunk of the prompt is done.
    """

    def __init__(self, console: Console, *, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._is_silent = quiet or not console.is_terminal
        self._begin: float | None = None
        self._passes: dict[int, tuple[int, int]] = {}  # for each KV cache: tokens done, tokens in all
        self._is_shown = False
        self._lock = Lock()  # PEARL's draft model may report from a thread of its own

    @contextmanager
    def watching(self) -> Iterator[PrefillLine]:
        """Shows the reports of this process until the `with` block ends, and then erases the line."""
        if self._is_silent:
            yield self
            return
        with prefill_reports.to(self.report):
            try:
                yield self
            finally:
                self.clear()

    def report(self, source: int, done: int, total: int) -> None:
        """Takes a report: see `PrefillObserver`."""
        with self._lock:
            now = self._clock()
            self._begin = now if self._begin is None else self._begin
            self._passes[source] = done, total
            all_done, all_total = (sum(counts) for counts in zip(*self._passes.values(), strict=True))
            if all_done >= all_total:
                self._passes.clear()
                self._erase()
            elif now - self._begin >= DELAY:
                self._draw(all_done, all_total)

    def clear(self) -> None:
        """Erases the line, before something else is written where it begins."""
        with self._lock:
            self._erase()

    def _draw(self, done: int, total: int) -> None:
        line = running_line("reading the prompt", done / total, f"{done:,} of {total:,} tokens", self._console.width - 1)
        with self._console.capture() as drawn:
            self._console.print(line, end="", soft_wrap=True)
        self._write(_SAVE + _NO_WRAP + _ERASE_TO_END + drawn.get() + _WRAP + _RESTORE)
        self._is_shown = True

    def _erase(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._write(_ERASE_TO_END)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
