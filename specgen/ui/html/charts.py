"""Charts as inline SVG: x in percent, so that type keeps its size at any width; shapes differ as well as colours. No script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specgen.ui.html.page import text

_TIME = (("p", "reading the prompt", ("prefill",)), ("d", "drafting", ("draft",)), ("v", "verifying", ("verify",)))
_REST = ("o", "the rest", ("sample", "other"))


def figure(title: str, keys: str, chart: str, caption: str = "", lead: str = "") -> str:
    """A chart with its heading and keys (HTML); `lead` and `caption` are text above and below it."""
    above = f"<figcaption>{text(lead)}</figcaption>\n" if lead else ""
    below = f'<p class="note">{text(caption)}</p>' if caption else ""
    return f"<figure><h3>{text(title)}</h3>\n{above}{keys}\n{chart}{below}</figure>\n"


def keys(kind: str, entries: Iterable[tuple[str, str]], width: int = 22, height: int = 14) -> str:
    """The marks of a chart of the class `kind`, each with its meaning: pairs of SVG and text."""
    spans = (
        f'<span><svg class="{kind} key" width="{width}" height="{height}" aria-hidden="true">{mark}</svg>{text(meaning)}</span>'
        for mark, meaning in entries
    )
    return f'<p class="keys">{"".join(spans)}</p>'


# ------------------------------------------------------------------ where the time went


def time_bar(phase_seconds: Mapping[str, float]) -> str:
    """One bar, a part for each phase, and its key; empty where nothing was timed."""
    total = sum(phase_seconds.values())
    if not total:
        return ""
    bars, entries, start = [], [], 0.0
    for kind, meaning, phases in (*_TIME, _REST):
        share = sum(phase_seconds.get(phase, 0.0) for phase in phases) / total
        bars.append(f'<rect class="{kind}" x="{start:.2%}" width="{share:.2%}" y="0" height="14"/>')
        entries.append((f'<rect class="{kind}" width="12" height="12"/>', f"{meaning} {share:.0%}"))
        start += share
    label = ", ".join(meaning for _, meaning in entries)
    bar = f'<svg class="shares bar" role="img" aria-label="Where the time went: {label}" width="100%" height="14">'
    return f"{bar}{''.join(bars)}</svg>{keys('shares', entries, 14, 12)}\n"


# ------------------------------------------------------------------ an interval on a scale, for tables


@dataclass(frozen=True, slots=True)
class Scale:
    """From `low` to `high` across a cell, with lines at `ticks`; `unit` stands behind their labels."""

    low: float
    high: float
    ticks: tuple[float, ...]
    unit: str = ""

    def at(self, value: float) -> str:
        return f"{min(max((value - self.low) / (self.high - self.low), 0.0), 1.0):.2%}"

    @classmethod
    def over(cls, values: Iterable[float], unit: str = "", start: float = 0.0) -> Scale:
        """A scale that holds all values, with two to four lines, from `start` or a little below the lowest value."""
        found = [start, *values]
        low, high = min(found), max(found)
        high = high if high > low else low + 1
        step = tick_step(high - low, 4)
        first = math.ceil(low / step - 1e-9)
        ticks = tuple(step * position for position in range(first, int(high / step + 1e-9) + 1))
        margin = 0.04 * (high - low)
        return cls(low - margin if low < start else low, high + margin, ticks, unit)

    def axis(self) -> str:
        """The labels, for the head of the column."""
        labels = "".join(
            f'<text x="{self.at(tick)}" y="12" text-anchor="{_anchor(tick, self.low)}">{self._label(tick)}</text>'
            for tick in self.ticks
        )
        return f'<svg width="100%" height="16" aria-hidden="true">{labels}</svg>'

    def dot(self, value: float, low: float, high: float, label: str, *, reference: float | None = None) -> str:
        """A dot with its interval; a stem to it from `reference`, the value that others are measured by."""
        lines = "".join(
            f'<line class="g{" one" if tick == reference else ""}" x1="{self.at(tick)}" x2="{self.at(tick)}" y1="0" y2="100%"/>'
            for tick in self.ticks
        )
        start = self.low if reference is None else reference
        small = "".join(f'<text class="tick" x="{self.at(tick)}" dx="5" y="11">{self._label(tick)}</text>' for tick in self.ticks)
        return (
            f'<svg role="img" aria-label="{text(label)}" width="100%" height="30">{lines}'
            f'<line class="stem" x1="{self.at(start)}" x2="{self.at(value)}" y1="50%" y2="50%"/>'
            f'<line class="ci" x1="{self.at(low)}" x2="{self.at(high)}" y1="50%" y2="50%"/>'
            f'<circle class="dot" cx="{self.at(value)}" cy="50%" r="5"/>{small}</svg>'
        )

    def _label(self, tick: float) -> str:
        return f"{tick:g}{self.unit}"


def _anchor(tick: float, low: float) -> str:
    return "start" if tick == low else "middle"


def tick_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, ... (and their like below 1) that parts `span` into at most `most`."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most + 1e-9)


# ------------------------------------------------------------------ lines and labels


def gridline(y: float) -> str:
    """Across the whole chart, at `y` pixels."""
    return f'<line class="g" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'


def left_label(y: float, label: str) -> str:
    """Left of the chart, in its gutter."""
    return f'<text x="0" dx="-8" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
