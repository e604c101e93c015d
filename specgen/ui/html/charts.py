"""Geometry that the charts share. The macros in `templates/charts.html.j2` draw it as SVG.

x is a share of the chart's width and y is in pixels from its top, so that type keeps its size at any width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_PHASES = (  # CSS class, name on the page, phases of a round's seconds
    ("p", "processing the prompt", ("prefill",)),
    ("d", "drafting", ("draft",)),
    ("v", "verifying", ("verify",)),
    ("o", "other", ("sample", "other")),
)


def time_shares(phase_seconds: Mapping[str, float]) -> list[tuple[str, str, float, float]]:
    """The parts of the time bar: CSS class, meaning, start and width as shares of the bar. Empty where nothing was timed."""
    total, start, shares = sum(phase_seconds.values()), 0.0, []
    for kind, name, phases in _PHASES if total else ():
        width = sum(phase_seconds.get(phase, 0.0) for phase in phases) / total
        shares.append((kind, f"{name} {width:.0%}", start, width))
        start += width
    return shares


@dataclass(frozen=True, slots=True)
class Axes:
    """A chart's height, the y of its grid lines, (y, text) of the labels at its left and (x, text, anchor) of those below it."""

    height: float
    gridlines: Sequence[float]
    left: Sequence[tuple[float, str]]
    below: Sequence[tuple[float, str, str]]


def tick_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that divides `span` into at most `most` parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most + 1e-9)


def polyline(points: Iterable[tuple[float, float]], height: float) -> str:
    """The `points` attribute of a line through (x, y), in percent of the width and of `height`."""
    return " ".join(f"{100 * x:.2f},{100 * y / height:.2f}" for x, y in points)
