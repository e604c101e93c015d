"""Draws charts as inline SVG: axes, lines, points, bars, intervals, and a key of their meanings.

x is a share of the chart's width (0 to 1), so that a wider chart is not taller and its text keeps its size. y is a share between
the chart's bottom (0) and top (1), or in pixels from the upper edge where a name says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from specgen.base.sanitize import inline

if TYPE_CHECKING:
    from markupsafe import Markup

Label = tuple[float, str, str]  # below a chart: x, text, SVG text-anchor


def element(tag: str, *inside: Markup | str, **attributes: object) -> Markup:
    """Returns an SVG element. Text in it loses its control characters and is escaped.

    In the names of attributes `_` stands for `-`, and one at the end is left out (`class_`).
    """
    from markupsafe import Markup

    written = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items()
    )
    content = Markup("").join(each if hasattr(each, "__html__") else inline(each) for each in inside)
    return Markup("<{0}{1}>{2}</{0}>").format(tag, written, content)  # type: ignore[no-any-return, unused-ignore]


def percent(share: float) -> str:
    return f"{share:.2%}"


def tick_step(span: float, most: int) -> float:
    """Returns the distance between axis ticks: the smallest 1, 2 or 5 times a power of ten that cuts `span` into at most `most`
    parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most + 1e-9)


def entropy_ticks(right: float) -> list[Label]:
    """Returns the labels of an axis of entropies from 0 to `right` nats."""
    step = tick_step(right, 4)
    ticks = [step * index for index in range(1, int(right / step - 0.5) + 1)]
    return [(0.0, "0", "middle"), *((tick / right, f"{tick:g}", "middle") for tick in ticks), (1.0, "nats", "end")]


class Figure:
    """A part of a page with a title, a caption, a picture, a key of its shapes, and notes below. `kind` is a CSS class."""

    def __init__(self, kind: str, title: str = "", caption: str = "", notes: Sequence[str] = ()) -> None:
        self.kind, self.title, self.caption, self.notes = kind, title, caption, list(notes)
        self.keys: list[Markup] = []
        self.picture: Markup | str = ""

    def drawn(self) -> Markup | str:
        return self.picture

    def key(self, meaning: str, *shapes: Markup) -> None:
        """Adds to the key what shapes in a field of 22 x 14 pixels mean."""
        symbol = element("svg", *shapes, class_=f"{self.kind} key", width=22, height=14, aria_hidden="true")
        self.keys.append(element("span", symbol, meaning))

    def line_key(self, kind: str, meaning: str) -> None:
        self.key(meaning, element("line", class_=kind, x1=0, x2=22, y1=7, y2=7))

    def dot_key(self, kind: str, meaning: str, radius: int = 4) -> None:
        self.key(meaning, element("circle", class_=kind, cx=11, cy=7, r=radius))

    def square_key(self, kind: str, meaning: str) -> None:
        self.key(meaning, element("rect", class_=kind, x=5, width=12, y=1, height=12))

    def interval_key(self, meaning: str) -> None:
        line = element("line", class_="ci", x1=11, x2=11, y1=0, y2=14)
        self.key(meaning, line, element("circle", class_="acc", cx=11, cy=7, r=4))


class Chart(Figure):
    """A chart, whose shapes are drawn in the order in which they are added.

    `label` describes it to screen readers. `height`, `top` and `bottom` are in pixels: of the whole, and the y of 1 and 0.
    """

    def __init__(
        self,
        kind: str,
        title: str,
        label: str,
        caption: str = "",
        *,
        height: float = 240.0,
        top: float = 8.0,
        bottom: float = 216.0,
    ) -> None:
        super().__init__(kind, title, caption)
        self.label, self.height, self.top, self.bottom = label, height, top, bottom
        self._shapes: list[Markup] = []
        self._lines: list[Markup] = []
        self._labels: list[Markup] = []

    def y(self, share: float) -> float:
        """Returns the y in pixels of a share of the height between bottom and top."""
        return self.top + (1 - share) * (self.bottom - self.top)

    def axes(self, left: Iterable[tuple[float, str]], below: Iterable[Label]) -> None:
        """Adds the labels of both axes and a horizontal line at each label (y as a share, text) of `left`, which may be empty."""
        for share, text in left:
            y = self.y(share)
            self._lines.append(self._horizontal("g", y))
            if text:
                self._labels.append(element("text", text, x="0", dx="-8", y=f"{y + 4:.1f}", text_anchor="end"))
        for x, text, anchor in below:
            self._labels.append(element("text", text, x=percent(x), y=f"{self.height - 6:.1f}", text_anchor=anchor))

    def add(self, *shapes: Markup) -> None:
        self._shapes += shapes

    def line(self, kind: str, points: Iterable[tuple[float, float]], tag: str = "polyline") -> None:
        """Adds a line through points, or with the tag `polygon` the area that they enclose."""
        written = " ".join(f"{100 * x:.2f},{100 * self.y(share) / self.height:.2f}" for x, share in points)
        self.stretched(element(tag, class_=kind, points=written))

    def stretched(self, shape: Markup) -> None:
        """Adds a shape whose coordinates are in percent of the chart's width and height."""
        frame = {"viewBox": "0 0 100 100", "preserveAspectRatio": "none"}
        self.add(element("svg", shape, x="0", y="0", width="100%", height=f"{self.height:g}", **frame))

    def point(self, kind: str, x: float, share: float, title: str, radius: int = 4) -> None:
        place = {"cx": percent(x), "cy": f"{self.y(share):.1f}", "r": radius}
        self.add(element("circle", element("title", title), class_=kind, **place))

    def cross(self, kind: str, x: float, share: float, title: str) -> None:
        mark = element("path", class_=kind, d="M-4-4L4 4M-4 4L4-4")
        place = {"x": percent(x), "y": f"{self.y(share):.1f}", "overflow": "visible", "class_": "x"}
        self.add(element("svg", mark, element("title", title), **place))

    def interval(self, x: float, share: float, low: float, high: float, title: str) -> None:
        """Adds a point with the interval around it."""
        at = percent(x)
        bar = element("line", class_="ci", x1=at, x2=at, y1=f"{self.y(high):.1f}", y2=f"{self.y(low):.1f}")
        dot = element("circle", class_="acc", cx=at, cy=f"{self.y(share):.1f}", r=5)
        self.add(element("g", element("title", title), bar, dot, class_="bin"))

    def column(self, title: str, x: float, width: float, bars: Iterable[tuple[str, float, float]], margin: float) -> None:
        """Adds bars with a common tooltip. A bar is (CSS class, y of its top in pixels, height in pixels).

        `margin` is the empty share of the column's width on either side.
        """
        hit = element("rect", class_="hit", x=percent(x), width=percent(width), y="0", height=f"{self.bottom:.1f}")
        place = {"x": percent(x + margin * width), "width": percent((1 - 2 * margin) * width)}
        drawn = (element("rect", class_=kind, **place, y=f"{top:.1f}", height=f"{height:.1f}") for kind, top, height in bars)
        self.add(element("g", element("title", title), hit, *drawn, class_="col"))

    def vertical(self, kind: str, x: float) -> None:
        at = percent(x)
        self.add(element("line", class_=kind, x1=at, x2=at, y1=f"{self.top:.1f}", y2=f"{self.bottom:.1f}"))

    def horizontal(self, kind: str, pixels: float) -> None:
        self.add(self._horizontal(kind, pixels))

    def _horizontal(self, kind: str, pixels: float) -> Markup:
        return element("line", class_=kind, x1="0", x2="100%", y1=f"{pixels:.1f}", y2=f"{pixels:.1f}")

    def drawn(self) -> Markup | str:
        size = {"width": "100%", "height": f"{self.height:.1f}"}
        content = (*self._lines, *self._shapes, *self._labels)
        return element("svg", *content, class_=f"{self.kind} gutter", role="img", aria_label=self.label, **size)


_PHASES = {  # of the time bar: CSS class, name on the page, the phases whose seconds are added up
    "p": ("processing the prompt", ("prefill",)),
    "d": ("drafting", ("draft",)),
    "l": ("length policy", ("policy",)),
    "v": ("verifying", ("verify",)),
    "o": ("other", ("sample", "other")),
}


def time_bar(phase_seconds: Mapping[str, float]) -> Figure:
    """Returns the bar that shows where the time went; empty where no time was measured.

    `phase_seconds` has the seconds spent in each phase (`types.PHASES`).
    """
    bar, total, start = Figure("shares"), sum(phase_seconds.values()), 0.0
    parts, texts = [], []
    for kind, (name, phases) in _PHASES.items() if total else ():
        width = sum(phase_seconds.get(phase, 0.0) for phase in phases) / total
        parts.append(element("rect", class_=kind, x=percent(start), width=percent(width), y=0, height=14))
        texts.append(f"{name} {width:.0%}")
        bar.square_key(kind, texts[-1])
        start += width
    label = f"Where the time went: {', '.join(texts)}"
    if parts:
        bar.picture = element("svg", *parts, class_="shares bar", role="img", aria_label=label, width="100%", height=14)
    return bar
