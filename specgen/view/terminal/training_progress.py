"""Shows on stderr how far a training is: bars on a terminal, else a line of text every 30 seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from specgen.train.training_task import TrainingProgress

_LINE_SECONDS = 30.0


class TrainingBars:
    """A TrainingObserver that shows a progress bar for text generation and one for training.

    It is a context manager: the bars are drawn inside the `with` block. The training stops early when `stop_requested` returns
    True.
    """

    def __init__(self, console: Console, stop_requested: Callable[[], bool], *, quiet: bool) -> None:
        self.stop_requested = stop_requested
        self._console, self._quiet = console, quiet
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._line_time = -math.inf

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

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def announce(self, message: str) -> None:
        if not self._quiet:
            self._console.print(Text(message, "quiet"), soft_wrap=True)

    def generating(self, batches: int, share: float, tokens: int) -> None:
        self._show("Generating text", share, f"{tokens:,} tokens")

    def training(self, progress: TrainingProgress) -> None:
        agreement = progress.greedy_agreement
        agrees = "" if agreement is None else f", greedy agreement {agreement:.0%}"
        self._show("Training", progress.share, f"step {progress.step}, loss {progress.loss:.3f}{agrees}")

    def _show(self, stage: str, share: float, figures: str) -> None:
        if self._quiet:
            return
        if self._bars is not None:
            if stage != self._stage or self._task is None:
                self._task = self._bars.add_task(stage, total=1.0, figures=figures)
            self._bars.update(self._task, completed=share, figures=figures, refresh=True)
        elif stage != self._stage or share >= 1 or time.monotonic() - self._line_time >= _LINE_SECONDS:
            self._line_time = time.monotonic()
            self._console.print(Text(f"{stage}: {share:.0%}, {figures}"), soft_wrap=True)
        self._stage = stage
