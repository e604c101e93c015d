"""Lines at the end of the terminal that are redrawn in place: a progress bar, and the table of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from specgen.view.theme import one_line_text

if TYPE_CHECKING:
    from specgen.compare.runner import BenchmarkStep

_BAR = 20  # cells


@contextmanager
def live_lines(console: Console, *, quiet: bool) -> Iterator[Callable[[Sequence[Text]], None] | None]:
    """Yields a function that replaces the lines shown at the end of the terminal. They are erased when the `with` block ends.

    Yields None if `quiet` is True or `console` is not a terminal. No background thread redraws the lines, because it would
    disturb measured times.
    """
    if quiet or not console.is_terminal:
        yield None
        return
    with Live(
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        vertical_overflow="crop",
    ) as live:
        try:
            yield lambda lines: live.update(Group(*map(one_line_text, lines)), refresh=True)
        finally:
            live.update(Text(), refresh=True)


def live_table(table: Sequence[Text], step: BenchmarkStep, console: Console) -> list[Text]:
    """Returns the table of a comparison that is still running, cut to the console's height, with a line of progress below it."""
    room = max(console.height - 3, 2)
    return [*table[:room], Text(), progress_line(step, console.width)]


def progress_line(step: BenchmarkStep, width: int) -> Text:
    """Returns how far a comparison is, such as `▸ svip, prompt 3 (code-retry)  ━━━━━━  5 of 48 runs  ~9 s left`."""
    left = f"  ~{duration(step.seconds_left)} left" if step.seconds_left is not None and step.done < step.total else ""
    name = "" if step.spec is None else step.spec.written
    if step.prompt is not None:
        name = f"warming up {name}" if step.warming_up else f"{name}, {step.prompt.label}"
    share = step.done / step.total if step.total else 1.0
    return running_line(name, share, f"{step.done} of {step.total} runs{left}", width)


def running_line(what: str, share: float, rest: str, width: int) -> Text:
    """Returns a line of at most `width` cells with the text `what`, a bar filled to `share` (0 to 1), and the text `rest`.

    If the line is too long, `what` is cut. If there is no room for the bar either, the line is `rest` alone.
    """
    filled = min(_BAR, round(_BAR * share))
    tail = Text("  ").append("━" * filled, "bar").append("─" * (_BAR - filled), "quiet").append(f"  {rest}", "none")
    if tail.cell_len + 2 > width:
        return Text(rest)
    line = Text("▸ ").append(what)
    line.truncate(width - tail.cell_len, overflow="ellipsis", pad=True)
    return line.append_text(tail)


def duration(seconds: float) -> str:
    """Returns a number of seconds in words, such as `9 s`, `3 min` or `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
