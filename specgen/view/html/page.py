"""Renders HTML pages, and holds what both kinds of pages have: the table of methods.

The pages contain no script and load no other file. Their colours follow the mode of the system, light or dark. They are jinja2
templates in `templates/`. Every value that a template prints has its control characters replaced by `_visible` and is then
escaped, so text from a model or a file cannot become HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from specgen.base.text import inline, streamed
from specgen.view.html.charts import percent, tick_step

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render(template: str, **values: Any) -> Iterator[str]:
    """Yields the HTML of a template, filled with `values`, in pieces. Strings in `values` are escaped."""
    stream = _environment().get_template(template).stream(values)
    stream.enable_buffering(500)
    return stream


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("specgen.view.html"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["marked"] = _marked
    return environment


def _visible(value: object) -> object:
    """Returns a value that a template prints as one line of text without control characters (↵ for a line feed).

    HTML that a macro has made is returned unchanged.
    """
    return value if hasattr(value, "__html__") else inline(str(value))


@lru_cache(1 << 16)  # a long text has few different tokens
def _marked(token: str, kind: str = "") -> Markup:
    """The template filter `marked`: puts a token's text into an `<i>` element with the CSS class `kind`.

    White space around the text stays outside the element. Line feeds and tabs are kept.
    """
    from markupsafe import Markup

    text = streamed(token)
    core = text.strip(" \n\t")
    before, _, after = text.partition(core) if core else (text, "", "")
    html = Markup('{}<i class="{}">{}</i>{}') if kind else Markup("{}<i{}>{}</i>{}")
    return html.format(before, kind, core, after)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table of methods: a method with a dot at its speed and a line over its interval, or why it was not run.

    `kind` holds CSS classes. `why` is the reason, empty for a method that ran. `entry` is the object that the table's columns
    read their cells from. `speed` is a speedup or tokens per second, `low` to `high` its interval. `output` says in words whether
    the method's text equals the target's.
    """

    kind: str
    name: str
    why: str = ""
    entry: Any = None
    speed: float = 0.0
    low: float = 0.0
    high: float = 0.0
    output: str = ""


class Scale:
    """The horizontal axis of the dots in the table, with a few grid lines at `ticks`. It contains all `values` and `reference`.

    `unit` follows each number. A thin line joins each dot with the value `reference`, or with `low` (0) where it is None.
    """

    def __init__(self, values: Iterable[float], unit: str = "", reference: float | None = None) -> None:
        self.unit, self.reference = unit, reference
        start = 0.0 if reference is None else reference
        held = [start, *values]
        low, high = min(held), max(held)
        high = high if high > low else low + 1
        step, margin = tick_step(high - low, 4), 0.04 * (high - low)
        self.ticks = [step * index for index in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)]
        self.low, self.high = low - margin if low < start else low, high + margin

    def at(self, value: float) -> str:
        """Returns the horizontal position of a value as a percentage of the axis, limited to 0% to 100%."""
        return percent(min(max((value - self.low) / (self.high - self.low), 0.0), 1.0))
