"""Charts as data, drawn twice: as bars of characters in a terminal, and by `templates/charts.html.j2` as inline SVG on a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from specgen.pair.figures import Figures
from specgen.view.theme import table, wrapped

LEAD = 10  # cells for a label in a terminal
_EIGHTHS = "▁▂▃▄▅▆▇█"
_PHASES = {
    "prefill": "prompt",
    "draft": "drafting",
    "policy": "policy",
    "verify": "verifying",
    "sample": "sampling",
    "other": "other",
}
_QUARTERS = ((0.0, "0"), (0.25, ""), (0.5, "0.5"), (0.75, ""), (1.0, "1"))
Label = tuple[float, str]
Bar = tuple[str, str, float, str]
"""A row in a terminal: the label, the number as text, the bar as a share of its room, its style."""


@dataclass(slots=True)
class Series:
    """Shapes of one meaning; those with an empty `meaning` are not in the key. `kind` is a CSS class.

    The items of `points`, by shape: line, area: (x, y). dot, small dot, cross: (x, y, tooltip). stroke, speck: (x, y) of a mark
    without a tooltip. interval: (x, y, low, high, tooltip). vertical: x. horizontal: y. column: (x, width, tooltip, bars), a bar
    being (CSS class, its low end, its high end). text: (x, text). square: nothing, for the key of columns.
    """

    shape: str
    kind: str
    points: Iterable[Any] = ()
    meaning: str = ""


@dataclass(slots=True)
class Chart:
    """A chart with a title above and notes below. `kind` is a CSS class and names its caption in the template.

    In a terminal it has `heading` behind the title, `bars`, `sparks` (label, values from 0 to `top`, style) and a table of
    `rows`. On a page it has `series`, `left` and `below` (the labels of the axes at their values; those on the left have a grid
    line each) and `thinned`, a sentence on what was left out. x goes from `start` to `end`, y from `low` to `high`; `height` is
    in pixels.
    """

    kind: str
    title: str
    heading: str = ""
    notes: Sequence[str] = ()
    bars: Sequence[Bar] = ()
    sparks: Sequence[tuple[str, Sequence[float], str]] = ()
    top: float = 1.0
    rows: Sequence[Sequence[str | Text]] = ()
    series: Sequence[Series] = ()
    left: Sequence[Label] = _QUARTERS
    below: Sequence[Label] = ()
    thinned: str = ""
    start: float = 0.0
    end: float = 1.0
    low: float = 0.0
    high: float = 1.0
    height: float = 240.0

    def x(self, value: float) -> float:
        """Returns a place on the x axis in percent of the chart's width."""
        return 100 * (value - self.start) / (self.end - self.start)

    def y(self, value: float) -> float:
        """Returns a place on the y axis in pixels from the upper edge."""
        return 8 + (self.high - value) / (self.high - self.low) * (self.height - 32)

    def lines(self, width: int) -> list[Text]:
        """Returns the chart for a terminal, in lines of at most `width` cells.

        If there are more values than cells in a spark, a character stands for the mean of several neighbours.
        """
        lines = wrapped(Text().append(self.title, "strong").append(f"  {self.heading}", "quiet"), width)
        for label, number, share, style in self.bars:
            room = min(width - LEAD - len(number) - 6, 40)
            halves = round(2 * room * share) or (1 if share else 0)
            lines.append(Text(f"  {label:<{LEAD}}{number}  ").append("━" * (halves // 2) + "╸" * (halves % 2), style))
        for label, values, style in self.sparks:
            size = math.ceil(len(values) / max(1, width - LEAD - 2)) or 1
            means = [sum(part) / len(part) for part in (values[at : at + size] for at in range(0, len(values), size))]
            drawn = "".join(" " if mean <= 0 else _EIGHTHS[min(7, int(8 * mean / self.top))] for mean in means)
            lines.append(Text(f"  {label:<{LEAD}}").append(drawn, style))
        lines += table(self.rows, gap=1)
        return [*lines, *(line for note in self.notes for line in wrapped(Text(note, "quiet"), width))]


def ticks(high: float, most: int, form: str = "{:g}", *, whole: bool = False) -> list[Label]:
    """Returns labels of an axis from 0 to `high`: multiples of 1, 2 or 5 times a power of ten, in at most `most` steps.

    With `whole` the steps are whole numbers.
    """
    high = max(high, 1e-9)
    power = 10.0 ** math.floor(math.log10(high / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if high / (power * factor) <= most + 1e-9)
    step = max(1, round(step)) if whole else step
    return [(step * index, form.format(step * index)) for index in range(int(high / step + 1e-9) + 1)]


def time_shares(summary: Figures) -> list[tuple[str, str, float]]:
    """Returns where the time went: the key of each phase that took any, its name, and its share of the whole time."""
    return [(phase, name, share) for phase, name in _PHASES.items() if (share := summary.share_of_time(phase))]
