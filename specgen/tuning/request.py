"""What to tune, until when, and how progress is reported. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from specgen.types import SamplingParams

if TYPE_CHECKING:
    from specgen.compare.prompts import Prompt

ClockFunction = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment `at` on `clock`, which returns seconds. Tests inject a clock that counts its readings."""

    at: float
    clock: ClockFunction = time.perf_counter

    @classmethod
    def after(cls, seconds: float, clock: ClockFunction = time.perf_counter) -> Deadline:
        return cls(clock() + seconds, clock)

    @property
    def left(self) -> float:
        """Seconds until the deadline, negative after it."""
        return self.at - self.clock()

    def share(self, fraction: float) -> Deadline:
        """The deadline after this fraction of the time that is left."""
        now = self.clock()
        return Deadline(now + fraction * (self.at - now), self.clock)


@dataclass(frozen=True, slots=True)
class TuningRequest:
    """What to tune: on which prompts, how to sample (without a seed: 0), until when, and which methods (None: all)."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    deadline: Deadline
    names: Sequence[str] | None = None
    chat: bool = False

    @property
    def seeded_sampling(self) -> SamplingParams:
        return replace(self.sampling, seed=self.sampling.seed or 0)


class TuningObserver(Protocol):
    """Is notified of each step when it begins (`doing`) and when it is finished (`done`), never while something is timed."""

    def doing(self, what: str) -> None: ...

    def done(self, what: str) -> None: ...
