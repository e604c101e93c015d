"""Shows a running comparison: the table so far, a progress bar and the time left, drawn only between runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from specgen.compare.runner import BenchmarkStep
from specgen.ui.sanitize import inline

BAR = 20  # cells


class LiveTable:
    """A context manager that shows the lines that `table` gives for a width, and erases them at the end.

    It shows nothing unless `console` is a terminal. No thread redraws it, since that would disturb the timing.
    """

    def __init__(self, console: Console, table: Callable[[int], Sequence[Text]], *, quiet: bool) -> None:
        self._console, self._table = console, table
        self._live: Live | None = None
        if not quiet and console.is_terminal:
            self._live = Live(
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )

    def show(self, step: BenchmarkStep) -> None:
        if self._live is None:
            return
        width = self._console.width
        lines = [*self._table(width), Text(), progress_line(step, width)]
        room = max(self._console.height - 1, 4)
        if len(lines) > room:  # cut the table, not the progress line
            lines = [*lines[: room - 2], *lines[-2:]]
        self._live.update(Group(*lines), refresh=True)

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.update(Text(), refresh=True)
            self._live.stop()


def progress_line(step: BenchmarkStep, width: int) -> Text:
    """`▸ svip on prompt 3 (code-retry)  ━━━━━━  5 of 48 runs  ~9 s left`, of which narrow terminals keep the end."""
    filled = round(BAR * step.done / step.total) if step.total else BAR
    count = f"{step.done} of {step.total} runs"
    left = f"  ~{duration(step.seconds_left)} left" if step.seconds_left is not None and step.done < step.total else ""
    bar = Text("━" * filled, "bar").append("─" * (BAR - filled), "quiet")
    tail = Text("  ").append_text(bar).append(f"  {count}{left}", "none")
    if tail.cell_len + 2 > width:
        return Text(f"{count}{left}")
    name = "" if step.spec is None else inline(step.spec.written)
    if step.prompt is not None:
        name = f"warming up {name}" if step.warming_up else f"{name}, {inline(step.prompt.label)}"
    line = Text("▸ ").append(name)
    line.truncate(max(width - tail.cell_len, 2), overflow="ellipsis", pad=True)
    return line.append_text(tail)


def duration(seconds: float) -> str:
    """`9 s`, `3 min`, `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
