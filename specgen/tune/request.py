"""The request for a tuning, its deadline, and the interface for reporting its progress. Imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams

if TYPE_CHECKING:
    from specgen.compare.prompts import Prompt

LEAST_PERCENTAGE = 100  # from here on, a bound of the perplexity is taken for a percentage without its sign
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
class Objective:
    """How the settings of lossy methods are chosen, by their output's perplexity under the target and by their speed.

    With `lowest_perplexity` the settings of the lowest perplexity are chosen (MTAD, Appendix F). Otherwise the fastest of those
    whose perplexity is at most `bound`, or `bound` times plain decoding's if `is_relative`.
    """

    lowest_perplexity: bool = False
    bound: float = 1.0
    is_relative: bool = True

    @classmethod
    def parse(cls, objective: str, max_perplexity: str | None) -> Objective:
        """Reads the options `--objective` and `--max-perplexity` (None: not given). Raises SpecgenError if one is wrong."""
        if objective not in ("speed", "perplexity"):
            raise SpecgenError(f"--objective is {objective!r}", "It has to be speed or perplexity")
        if max_perplexity is None:
            return cls(objective == "perplexity")
        if objective == "perplexity":
            hint = "It bounds the perplexity where --objective is speed"
            raise SpecgenError("--max-perplexity cannot be combined with --objective perplexity", hint)
        number = max_perplexity.strip().removesuffix("%")
        is_relative = number != max_perplexity.strip()
        try:
            bound = float(number) / (100 if is_relative else 1)
        except ValueError:
            bound = math.nan
        if not (0 if is_relative else 1) < bound < math.inf:
            hint = "Give a number above 1, or a percentage of plain decoding's such as 105%"
            raise SpecgenError(f"--max-perplexity is {max_perplexity!r}", hint)
        if not is_relative and bound >= LEAST_PERCENTAGE:
            hint = f"A perplexity has to be below {LEAST_PERCENTAGE}; write {number}% for a percentage of plain decoding's"
            raise SpecgenError(f"--max-perplexity is {max_perplexity}", hint)
        return cls(bound=bound, is_relative=is_relative)

    def limit(self, plain_perplexity: float) -> float:
        """Returns the largest perplexity that is accepted, from plain decoding's."""
        if self.lowest_perplexity:
            return math.inf
        return self.bound * plain_perplexity if self.is_relative else self.bound

    def in_words(self, plain_perplexity: float) -> str:
        return (
            "lowest perplexity" if self.lowest_perplexity else f"speed at a perplexity up to {self.limit(plain_perplexity):.3f}"
        )


BY_SPEED = Objective()


@dataclass(frozen=True, slots=True)
class TuningRequest:
    """What to tune, on which prompts and until when.

    `names` are the methods, None for all. `chat` puts each prompt into the model's chat template. `objective` says how the
    settings of lossy methods are chosen.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    deadline: Deadline
    names: Sequence[str] | None = None
    chat: bool = False
    objective: Objective = BY_SPEED

    @property
    def seeded_sampling(self) -> SamplingParams:
        """`sampling` with seed 0 if it has no seed."""
        return replace(self.sampling, seed=self.sampling.seed or 0)


class TuningObserver(Protocol):
    """Receives a text when a step begins (`doing`) and when it ends (`done`). It is not called while something is timed."""

    def doing(self, what: str) -> None: ...

    def done(self, what: str) -> None: ...
