"""How training goes, on stderr: a bar on a terminal, a line now and then in a pipe."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from specgen.ui.sanitize import inline

_EVERY = 30.0  # seconds between two lines where there is no bar


class TrainingBars:
    """A context manager. A bar a stage: the target's own text, then the training."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console, self._quiet = console, quiet
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._said = 0.0

    def __enter__(self) -> TrainingBars:
        if self._console.is_terminal and not self._quiet:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f} %"),
                TextColumn("{task.fields[figures]}", style="quiet"),
                TimeRemainingColumn(compact=True),
            )
            self._bars = Progress(*columns, console=self._console, auto_refresh=False)
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, what: str) -> None:
        if not self._quiet:
            self._console.print(Text(inline(what), "quiet"), soft_wrap=True)

    def show(self, stage: str, share: float, figures: str) -> None:
        """How far a stage is: `share` from 0 to 1, and figures in words."""
        if self._quiet:
            return
        if self._bars is not None:
            if stage != self._stage or self._task is None:
                self._task = self._bars.add_task(stage, total=1.0, figures=figures)
            self._bars.update(self._task, completed=share, figures=figures, refresh=True)
        elif stage != self._stage or share >= 1 or time.monotonic() - self._said >= _EVERY:
            self._said = time.monotonic()
            self._console.print(Text(f"{stage}: {share:.0%}, {figures}"), soft_wrap=True)
        self._stage = stage
