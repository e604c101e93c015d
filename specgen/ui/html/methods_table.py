"""The table of methods of both pages; `templates/methods_table.html.j2` draws it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specgen.ui.html.charts import Interval


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of each method. `key` is its CSS class, `title` has its line breaks, and `label` follows the figure on narrow
    screens, which have no room for titles. An optional column is shown only where a method has the figure."""

    key: str
    title: str
    label: str
    text: Callable[[Any], str]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A method with its figures, or with the reason `why` it has none. `entry` is what the columns read."""

    kind: str
    name: str
    entry: Any = None
    interval: Interval | None = None
    speed: str = ""
    output: str = ""
    range: str = ""
    why: str = ""


def number(value: float | None, form: str) -> str:
    """The formatted value, empty for None."""
    return "" if value is None else format(value, form)
