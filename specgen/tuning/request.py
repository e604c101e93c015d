"""The request for a tuning, its deadline, and the interface for reporting its progress. Imports no torch."""

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
    """A time limit: the moment when `clock`, which returns seconds, reads `at`.

    Tests pass a clock that counts how often it is read.
    """

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
        """Returns an earlier deadline: the moment when `fraction` of the time that is left now has passed."""
        now = self.clock()
        return Deadline(now + fraction * (self.at - now), self.clock)


@dataclass(frozen=True, slots=True)
class TuningRequest:
    """What to tune, on which prompts and until when.

    `names` are the methods, None for all. `chat` puts each prompt into the model's chat template.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    deadline: Deadline
    names: Sequence[str] | None = None
    chat: bool = False

    @property
    def seeded_sampling(self) -> SamplingParams:
        """`sampling` with seed 0 if it has no seed."""
        return replace(self.sampling, seed=self.sampling.seed or 0)


class TuningObserver(Protocol):
    """Receives a text when a step begins (`doing`) and when it ends (`done`). It is not called while something is timed."""

    def doing(self, what: str) -> None: ...

    def done(self, what: str) -> None: ...
