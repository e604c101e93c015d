"""A time limit on an injected clock, so that tests can count steps where a tuning counts seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

ClockFunction = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment `at` on `clock`, which returns seconds."""

    at: float
    clock: ClockFunction = time.perf_counter

    @classmethod
    def after(cls, seconds: float, clock: ClockFunction = time.perf_counter) -> Deadline:
        """The deadline that is `seconds` from now."""
        return cls(clock() + seconds, clock)

    @property
    def left(self) -> float:
        """Seconds until the deadline, negative after it."""
        return self.at - self.clock()

    @property
    def passed(self) -> bool:
        return self.left < 0

    def share(self, fraction: float) -> Deadline:
        """The deadline after this fraction of the time that is left."""
        now = self.clock()
        return Deadline(now + fraction * (self.at - now), self.clock)
