"""The table of methods of both pages, with a dot and an interval per method; `templates/methods_table.html.j2` draws it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specgen.ui.html.charts import tick_step


@dataclass(frozen=True, slots=True)
class Line:
    """A method with its speed, the interval of it and an `entry` for the columns to read; or with the reason `why` it has none.

    `kind` are its CSS classes and `output` is how its text compares with the target's.
    """

    kind: str
    name: str
    why: str = ""
    entry: Any = None
    speed: float = 0.0
    low: float = 0.0
    high: float = 0.0
    output: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """The x axis of a table's dots, with lines at `ticks`. A stem joins each dot with `reference`, or with `low` without one."""

    low: float
    high: float
    ticks: tuple[float, ...]
    unit: str
    reference: float | None

    @classmethod
    def over(cls, values: Iterable[float], unit: str = "", reference: float | None = None) -> Scale:
        """A scale with two to four ticks that holds all `values` and the reference, which is 0 by default."""
        start = 0.0 if reference is None else reference
        held = [start, *values]
        low, high = min(held), max(held)
        high = high if high > low else low + 1
        step = tick_step(high - low, 4)
        ticks = tuple(step * index for index in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1))
        margin = 0.04 * (high - low)
        return cls(low - margin if low < start else low, high + margin, ticks, unit, reference)

    def at(self, value: float) -> str:
        """The x of a value in percent, within the scale."""
        return f"{min(max((value - self.low) / (self.high - self.low), 0.0), 1.0):.2%}"
