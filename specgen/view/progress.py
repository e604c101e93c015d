"""The progress line of all commands: lines at the cursor on stderr, redrawn in place, and erased at
the end.

No thread redraws them, because it would disturb measured times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from specgen.base.measuring import prefill_reports
from specgen.base.text import one_line

PREFILL_DELAY = 1.0  # seconds; the prompt of a small model is over before
_BAR = 20  # cells
_REDRAW_SECONDS = 0.2  # the least time between two drawings of a tuning's bar
_LINE_SECONDS = 30.0  # between two lines of a training where there is no terminal
_SAVE = "\x1b7"
_RESTORE = "\x1b8"
_ERASE_BELOW = "\x1b[J"
_NO_WRAP = "\x1b[?7l"  # a line is cut at the terminal's edge
_WRAP = "\x1b[?7h"


class Progress:
    """Lines on a terminal that say what a command is doing. Nothing is shown with `quiet`, or where
    `console` is no terminal or one that obeys no cursor movements (`TERM=dumb`).

    The lines begin at the cursor, which stays there, so that text before it is not disturbed. As a
    context manager it erases them at the end.
    """

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self.console = console
        self.quiet = quiet
        self.is_silent = quiet or not console.is_terminal or console.is_dumb_terminal
        self._is_shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, *lines: Text) -> None:
        """Replaces the lines that are shown by `lines`. If there are several, they begin at the
        terminal's left edge, and must not be more than its height."""
        if self.is_silent:
            return
        with self.console.capture() as drawn:
            for line in lines[:-1]:
                self.console.print(line, soft_wrap=True)
            self.console.print(lines[-1], end="", soft_wrap=True)
        below = len(lines) - 1
        # it scrolls first: the saved position would not scroll along
        room = "\n" * below + f"\x1b[{below}A" if below else ""
        self._write(room + _SAVE + _NO_WRAP + _ERASE_BELOW + drawn.get() + _WRAP + _RESTORE)
        self._is_shown = True

    def announce(self, what: str) -> None:
        """Shows what is being loaded; nothing during downloads, which have progress bars of their
        own. A text that begins with `note: ` stays, as in `keep`."""
        if what.startswith("note: "):
            self.keep(Text(one_line(what)))
        elif what.startswith("downloading"):
            self.clear()
        else:
            self.show(Text("▸ ").append(one_line(what)))

    def bar(
        self,
        what: str,
        share: float,
        rest: str,
        left: float | None = None,
        above: Sequence[Text] = (),
    ) -> None:
        """Shows one line below the lines `above`: a bar filled to `share` (0 to 1), the figures
        `rest`, the seconds `left` (None: unknown) and the text `what`."""
        filled = min(_BAR, round(_BAR * share))
        line = Text("▸ ").append("━" * filled, "bar").append("─" * (_BAR - filled), "quiet")
        figures = [rest, "" if left is None else f"~{duration(left)} left", one_line(what)]
        self.show(*above, line.append("".join(f"  {text}" for text in figures if text), "none"))

    def clear(self) -> None:
        """Erases the lines that are shown. To be called before other text is written at the
        cursor."""
        if self._is_shown:
            self._is_shown = False
            self._write(_ERASE_BELOW)

    def keep(self, line: Text) -> None:
        """Prints a line that stays, on a terminal or not, unless `quiet`."""
        self.clear()
        if not self.quiet:
            self.console.print(line, soft_wrap=True)

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()


def duration(seconds: float) -> str:
    """Returns a number of seconds in words, such as `9 s`, `3 min` or `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def reading_prompt(
    progress: Progress, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """While the block runs, shows how many of the prompt's tokens the models have run, once that
    has taken `PREFILL_DELAY` seconds: the target's, then the draft's; in PEARL both at once.
    `clock` returns seconds."""
    passes: dict[int, tuple[int, int]] = {}  # for each KV cache: tokens done, tokens in all
    begin: float | None = None
    drawn = -math.inf

    def report(source: int, done: int, total: int) -> None:
        nonlocal begin, drawn
        now = clock()
        begin = now if begin is None else begin
        passes[source] = done, total
        counts = list(passes.values())  # a copy: in PEARL two threads report
        all_done = sum(tokens for tokens, _ in counts)
        all_total = sum(tokens for _, tokens in counts)
        if all_done >= all_total:
            passes.clear()
            progress.clear()
            drawn = -math.inf
        elif now - begin >= PREFILL_DELAY and now - drawn >= _REDRAW_SECONDS:
            drawn = now
            rest = f"{all_done:,} of {all_total:,} tokens"
            progress.bar("reading the prompt", all_done / all_total, rest)

    if progress.is_silent:
        yield
        return
    with progress, prefill_reports.to(report):
        yield


class TuneProgress:
    """A `TuningObserver` that prints a line with ✓ for each finished step, and shows a bar with the
    time left.

    `begin` is when the tuning began, on the clock of `time.perf_counter`. `budget` is how many
    seconds it may take.
    """

    def __init__(self, progress: Progress, begin: float, budget: float) -> None:
        self._progress = progress
        self._begin = begin
        self._budget = budget
        self._finished = begin  # when the last step ended
        self._drawn = 0.0

    def done(self, what: str) -> None:
        seconds = time.perf_counter() - self._finished
        self._finished = time.perf_counter()
        line = Text.assemble(("✓ ", "good"), what, (f"  {duration(seconds)}", "quiet"))
        self._progress.keep(line)

    def doing(self, what: str) -> None:
        now = time.perf_counter()
        if now - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            spent = now - self._begin
            self._progress.bar(what, spent / self._budget, "", max(0.0, self._budget - spent))


class TrainingLine:
    """Shows how far text generation and training are: in a bar on a terminal, otherwise in a line
    every 30 seconds."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._stage = ""
        self._begin = 0.0  # when the stage began
        self._first = 0.0  # with which share: a run may be resumed
        self._printed = 0.0

    def announce(self, message: str) -> None:
        self._progress.keep(Text(message, "quiet"))

    def show(self, stage: str, share: float, figures: str) -> None:
        now = time.monotonic()
        is_new = stage != self._stage
        if is_new:
            self._stage = stage
            self._begin = now
            self._first = share
        gained = share - self._first
        left = (now - self._begin) * (1 - share) / gained if gained > 0 else None
        self._progress.bar(stage, share, figures, left)
        is_due = now - self._printed >= _LINE_SECONDS and self._progress.is_silent
        if share >= 1 or ((is_new or is_due) and self._progress.is_silent):
            self._printed = now
            self._progress.keep(Text(f"{stage}: {share:.0%}, {figures}"))
