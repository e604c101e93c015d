"""The table of methods on the pages of `compare --html` and `inspect --html`.

Each method has a dot at its speed and a line over the interval of its speed. `templates/methods_table.html.j2` draws the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specgen.view.html.charts import tick_step


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table of methods: one method with its speed, or with the reason why it was not run.

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


@dataclass(frozen=True, slots=True)
class Scale:
    """The horizontal axis of the dots in the table: values from `low` to `high`, with grid lines at `ticks`.

    `unit` follows each number. A thin line joins each dot with the value `reference`, or with `low` where `reference` is None.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    unit: str
    reference: float | None

    @classmethod
    def over(cls, values: Iterable[float], unit: str = "", reference: float | None = None) -> Scale:
        """Returns a scale with a few ticks that contains all `values` and `reference` (0 where `reference` is None)."""
        start = 0.0 if reference is None else reference
        held = [start, *values]
        low, high = min(held), max(held)
        high = high if high > low else low + 1
        step = tick_step(high - low, 4)
        ticks = tuple(step * index for index in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1))
        margin = 0.04 * (high - low)
        return cls(low - margin if low < start else low, high + margin, ticks, unit, reference)

    def at(self, value: float) -> str:
        """Returns the horizontal position of a value as a percentage of the axis, limited to 0% to 100%."""
        return f"{min(max((value - self.low) / (self.high - self.low), 0.0), 1.0):.2%}"
