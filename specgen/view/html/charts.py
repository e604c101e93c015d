"""Draws charts as inline SVG: axes, and series of points, lines, bars and intervals, with a key of their meanings.

x is a share of the chart's width (0 to 1), so that a wider chart is not taller and its text keeps its size. y is a share between
the chart's bottom (0) and top (1), or in pixels from the upper edge where a name says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specgen.base.text import inline

if TYPE_CHECKING:
    from markupsafe import Markup

Label = tuple[float, str, str]  # below a chart: x, text, SVG text-anchor
_BEND = "M-4-4L4 4M-4 4L4-4"  # of a cross


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


@dataclass(slots=True)
class Series:
    """Shapes of one meaning; those with an empty `meaning` are not in the key. `kind` is a CSS class.

    The items of `points`, by shape: line, area: (x, y). dot, small dot, cross: (x, y, tooltip). stroke, speck: (x, y) of a mark
    without a tooltip. interval: (x, y, low, high, tooltip). vertical: x. horizontal: y in pixels. column: (x, width, empty share
    at each side, tooltip, bars), a bar being (CSS class, y of its top, y of its bottom). text: (x, text, other
    attributes). square: nothing, for the key of columns.
    """

    shape: Literal[
        "line",
        "area",
        "dot",
        "small dot",
        "cross",
        "stroke",
        "speck",
        "interval",
        "vertical",
        "horizontal",
        "column",
        "text",
        "square",
    ]
    kind: str
    points: Iterable[Any] = ()
    meaning: str = ""


@dataclass(slots=True)
class Figure:
    """A picture with a key, and notes below. `kind` is a CSS class, `words` names its title and caption in the template.

    A picture is drawn if there are `series`. `left` has labels of the left axis (y, text), with a grid line each, `below` those
    of the x axis. `height`, `top` and `bottom` are in pixels: of the whole, and the y of 1 and 0.
    """

    kind: str
    notes: Sequence[str] = ()
    series: Sequence[Series] = ()
    left: Iterable[tuple[float, str]] = ()
    below: Iterable[Label] = ()
    height: float = 240.0
    top: float = 8.0
    bottom: float = 216.0
    words: str = ""
    picture: Markup | str = ""  # instead of one of the series

    def y(self, share: float) -> float:
        """Returns the y in pixels of a share of the height between bottom and top."""
        return self.top + (1 - share) * (self.bottom - self.top)

    def drawn(self, label: str = "") -> Markup | str:
        """Returns the picture, which `label` describes to screen readers."""
        if self.picture or not self.series:
            return self.picture
        lines, labels = [], []
        for share, text in self.left:
            lines.append(_level("g", self.y(share)))
            labels += [element("text", text, x="0", dx="-8", y=f"{self.y(share) + 4:.1f}", text_anchor="end")] if text else []
        for x, text, anchor in self.below:
            labels.append(element("text", text, x=percent(x), y=f"{self.height - 6:.1f}", text_anchor=anchor))
        shapes = [shape for series in self.series for shape in self._shapes(series)]
        size = {"width": "100%", "height": f"{self.height:.1f}"}
        return element("svg", *lines, *shapes, *labels, class_=f"{self.kind} gutter", role="img", aria_label=label, **size)

    def keys(self) -> Iterator[Markup]:
        """Yields what each kind of shape means, beside one in a field of 22 x 14 pixels."""
        for series in self.series:
            if series.meaning:
                symbol = element("svg", *_symbol(series), class_=f"{self.kind} key", width=22, height=14, aria_hidden="true")
                yield element("span", symbol, series.meaning)

    def _shapes(self, series: Series) -> Iterator[Markup]:
        if series.shape in ("line", "area"):
            points = " ".join(f"{100 * x:.2f},{100 * self.y(share) / self.height:.2f}" for x, share in series.points)
            tag = "polyline" if series.shape == "line" else "polygon"
            yield self._stretched(element(tag, class_=series.kind, points=points))
        elif series.shape in ("stroke", "speck"):  # 5 pixels high, or of no length: round line caps show it as a dot
            up, mark = (250 / self.height, f"v{500 / self.height:.1f}") if series.shape == "stroke" else (0.0, "h0")
            places = ((100 * x, 100 * self.y(share) / self.height - up) for x, share in series.points)
            yield self._stretched(element("path", class_=series.kind, d="".join(f"M{x:.2f},{y:.1f}{mark}" for x, y in places)))
        else:
            yield from (self._shape(series, point) for point in series.points)

    def _stretched(self, shape: Markup) -> Markup:
        """Returns a field for a shape whose coordinates are in percent of the chart's width and height."""
        frame = {"viewBox": "0 0 100 100", "preserveAspectRatio": "none"}
        return element("svg", shape, x="0", y="0", width="100%", height=f"{self.height:g}", **frame)

    def _shape(self, series: Series, point: Any) -> Markup:
        if series.shape == "horizontal":
            return _level(series.kind, point)
        if series.shape == "vertical":
            at = percent(point)
            return element("line", class_=series.kind, x1=at, x2=at, y1=f"{self.top:.1f}", y2=f"{self.bottom:.1f}")
        at = percent(point[0])
        if series.shape == "text":
            return element("text", point[1], class_=series.kind, x=at, **point[2])
        title = element("title", point[3 if series.shape == "column" else -1])
        if series.shape == "column":
            x, width, margin, _, bars = point
            hit = element("rect", class_="hit", x=at, width=percent(width), y="0", height=f"{self.bottom:.1f}")
            place = {"x": percent(x + margin * width), "width": percent((1 - 2 * margin) * width)}
            edges = [(kind, self.y(top), self.y(bottom)) for kind, top, bottom in bars]
            drawn = (element("rect", class_=kind, **place, y=f"{top:.1f}", height=f"{end - top:.1f}") for kind, top, end in edges)
            return element("g", title, hit, *drawn, class_="col")
        y = f"{self.y(point[1]):.1f}"
        if series.shape == "interval":
            ends = {"y1": f"{self.y(point[3]):.1f}", "y2": f"{self.y(point[2]):.1f}"}
            line = element("line", class_="ci", x1=at, x2=at, **ends)
            return element("g", title, line, element("circle", class_="acc", cx=at, cy=y, r=5), class_="bin")
        if series.shape == "cross":
            return element("svg", element("path", class_=series.kind, d=_BEND), title, x=at, y=y, overflow="visible", class_="x")
        return element("circle", title, class_=series.kind, cx=at, cy=y, r=4 if series.shape == "dot" else 3)


def _level(kind: str, pixels: float) -> Markup:
    return element("line", class_=kind, x1="0", x2="100%", y1=f"{pixels:.1f}", y2=f"{pixels:.1f}")


def _symbol(series: Series) -> list[Markup]:
    """Returns the shapes that stand for a series in the key."""
    kind = series.kind
    if series.shape in ("stroke", "speck"):
        mark = "4.5v5" if series.shape == "stroke" else "7h0"
        return [element("path", class_=kind, d="".join(f"M{x},{mark}" for x in (5, 11, 17)))]
    if series.shape == "interval":
        return [element("line", class_="ci", x1=11, x2=11, y1=0, y2=14), element("circle", class_="acc", cx=11, cy=7, r=4)]
    if series.shape in ("dot", "small dot"):
        return [element("circle", class_=kind, cx=11, cy=7, r=4 if series.shape == "dot" else 3)]
    if series.shape == "cross":
        return [element("path", class_=kind, d="M7 3L15 11M7 11L15 3")]
    if series.shape in ("square", "area"):
        return [element("rect", class_=kind, x=5, width=12, y=1, height=12)]
    return [element("line", class_=kind, x1=0, x2=22, y1=7, y2=7)]


_PHASES = {  # of the time bar: CSS class, name on the page, the phases whose seconds are added up
    "p": ("processing the prompt", ("prefill",)),
    "d": ("drafting", ("draft",)),
    "l": ("length policy", ("policy",)),
    "v": ("verifying", ("verify",)),
    "o": ("other", ("sample", "other")),
}


def time_bar(phase_seconds: Mapping[str, float]) -> Figure:
    """Returns the bar that shows where the time went, with its key; an empty figure where no time was measured.

    `phase_seconds` has the seconds spent in each phase (`types.PHASES`).
    """
    total, start, parts, keys = sum(phase_seconds.values()), 0.0, [], []
    for kind, (name, phases) in _PHASES.items() if total else ():
        width = sum(phase_seconds.get(phase, 0.0) for phase in phases) / total
        parts.append(element("rect", class_=kind, x=percent(start), width=percent(width), y=0, height=14))
        keys.append(Series("square", kind, (), f"{name} {width:.0%}"))
        start += width
    label = f"Where the time went: {', '.join(each.meaning for each in keys)}"
    bar = element("svg", *parts, class_="shares bar", role="img", aria_label=label, width="100%", height=14)
    return Figure("shares", series=keys, picture=bar if parts else "")
