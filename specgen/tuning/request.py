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
    """Is notified of the progress, never while something is timed."""

    def done(self, what: str, seconds: float) -> None: ...

    def doing(self, what: str, seconds_left: float) -> None: ...


class Progress:
    """Reports steps to the observer, each with the seconds since the one before."""

    def __init__(self, observer: TuningObserver, deadline: Deadline) -> None:
        self._observer, self._deadline, self._begin = observer, deadline, deadline.clock()

    def announce(self, what: str) -> None:
        self._observer.doing(what, self._deadline.left)

    def done(self, what: str) -> None:
        now = self._deadline.clock()
        self._observer.done(what, now - self._begin)
        self._begin = now
