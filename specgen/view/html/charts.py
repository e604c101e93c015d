"""Computes positions for the charts of the HTML pages. The macros in `templates/charts.html.j2` draw them as SVG.

x is a share of the chart's width (0 to 1) and y is in pixels from the chart's top. A wider chart is therefore not taller, and its
text keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_PHASES = (  # CSS class, name on the page, the phases whose seconds are added up
    ("p", "processing the prompt", ("prefill",)),
    ("d", "drafting", ("draft",)),
    ("l", "length policy", ("policy",)),
    ("v", "verifying", ("verify",)),
    ("o", "other", ("sample", "other")),
)


def time_shares(phase_seconds: Mapping[str, float]) -> list[tuple[str, str, float, float]]:
    """Returns the parts of the bar that shows where the time went; an empty list where no time was measured.

    Each part is (CSS class, text, start, width); start and width are shares of the bar. `phase_seconds` has the seconds spent in
    each phase (`types.PHASES`).
    """
    total, start, shares = sum(phase_seconds.values()), 0.0, []
    for kind, name, phases in _PHASES if total else ():
        width = sum(phase_seconds.get(phase, 0.0) for phase in phases) / total
        shares.append((kind, f"{name} {width:.0%}", start, width))
        start += width
    return shares


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a chart: its height in pixels, the y of each horizontal grid line, and the labels.

    A label in `left` is (y, text). A label in `below` is (x, text, SVG text-anchor).
    """

    height: float
    gridlines: Sequence[float]
    left: Sequence[tuple[float, str]]
    below: Sequence[tuple[float, str, str]]


def tick_step(span: float, most: int) -> float:
    """Returns the distance between axis ticks: the smallest 1, 2 or 5 times a power of ten that cuts `span` into at most `most`
    parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most + 1e-9)


def polyline(points: Iterable[tuple[float, float]], height: float) -> str:
    """Returns the `points` attribute of an SVG polyline, in percent of the chart's width and height.

    Each point is (x as a share of the width, y in pixels); `height` is the chart's height in pixels.
    """
    return " ".join(f"{100 * x:.2f},{100 * y / height:.2f}" for x, y in points)
