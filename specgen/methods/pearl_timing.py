"""Measures the times that determine PEARL's window (the number of tokens drafted during one target pass; section 4.1).

Both models run at the same time, as they do in PEARL.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from specgen.base.types import Context
from specgen.decoding.costs.pearl_window import LONGEST_WINDOW, ROUGH_WIDTH, ParallelCosts, settled

if TYPE_CHECKING:
    from specgen.engine.devices import DeviceTimer
    from specgen.engine.model_runner import ModelRunner
    from specgen.methods.pearl_schedule import ParallelDrafter

_WARM_UP, _STEPS = 5, 30  # the numbers of PEARL's reference implementation
_FEWEST = 3  # steps that are timed even after the time limit
_TIME_LIMIT = 2.0  # seconds for all steps
_ROUGH_STEPS = _OVERLAP_STEPS = 5


def time_parallel_passes(
    target: ModelRunner,
    drafter: ParallelDrafter,
    context: Context,
    timer: DeviceTimer | None = None,
    widest: int = LONGEST_WINDOW,
    shared: bool = False,
) -> ParallelCosts:
    """Measures the median seconds of draft and target passes after `context`, for a target pass as wide as the resulting window.

    A few rough steps estimate the window (tokens drafted during one target pass) first; see `settled`. `timer` times the
    target's device; None if it computes synchronously. No target pass covers more than `widest` tokens. `shared`: one thread runs
    both models, so also measures whether they overlap. Closes the drafter.
    """
    drafter.prefill(context)
    try:
        target.logits(context)
        passes = _TimedPasses(target, drafter, context, timer, time.perf_counter() + _TIME_LIMIT)
        rough = passes.steps(min(ROUGH_WIDTH, widest), _ROUGH_STEPS)
        costs = settled(rough, lambda width: passes.steps(width, _WARM_UP + _STEPS), widest)
        return passes.with_overlap(costs) if shared and max(costs.seconds) < math.inf else costs
    finally:
        drafter.close()


@dataclass(frozen=True, slots=True)
class _TimedPasses:
    """Times passes of both models after `context`, until the `deadline` (of `time.perf_counter`)."""

    target: ModelRunner
    drafter: ParallelDrafter
    context: Context
    timer: DeviceTimer | None
    deadline: float

    def steps(self, width: int, count: int) -> ParallelCosts:
        """Times `count` steps, or fewer after the deadline: the target runs over `width` tokens while `width` are drafted.

        Every third step is followed by one with a one-token target pass, so that a slow phase of the machine affects both.
        """
        drafts: list[float] = []
        passes: list[float] = []
        single_passes: list[float] = []
        while len(passes) < count and (len(passes) < _FEWEST or time.perf_counter() < self.deadline):
            for tokens, seconds in ((width, passes), (1, single_passes))[: 1 if len(passes) % 3 else 2]:
                self.drafter.start(self.context, (), width)
                start = time.perf_counter()
                ended = self._started(tokens)
                drafted = len(self.drafter.finish().tokens)
                seconds.append(ended() - start)
                # Infinite where the draft model cannot follow this context: the window is 1 then.
                drafts.append(self.drafter.seconds / drafted if drafted else math.inf)
        draft_pass, target_pass, single_pass = (_warm_median(seconds) for seconds in (drafts, passes, single_passes))
        return ParallelCosts(draft_pass, target_pass, single_pass, width, len(self.context))

    def with_overlap(self, costs: ParallelCosts) -> ParallelCosts:
        """Returns the costs with the share of the shorter one of target pass and draft that runs beside the other."""
        width, drafted = costs.width, 0
        alone: dict[str, list[float]] = {"target": [], "draft": [], "both": []}
        for _ in range(_OVERLAP_STEPS):
            for kind, seconds in alone.items():
                start = end = time.perf_counter()
                if kind != "target":
                    self.drafter.start(self.context, (), width)
                ended = self._started(width) if kind != "draft" else None
                if kind != "target":
                    drafted = len(self.drafter.finish().tokens)
                    end = time.perf_counter()
                seconds.append((end if ended is None else max(end, ended())) - start)
        target_time, draft_time, both = (_warm_median(seconds) for seconds in alone.values())
        overlap = (target_time + draft_time - both) / min(target_time, draft_time)
        return costs.with_overlap(overlap, draft_time / max(drafted, 1), target_time)

    def _started(self, tokens: int) -> Callable[[], float]:
        """Starts a target pass over so many tokens. Returns a function that waits for it and returns when it ended."""
        if self.timer is not None:
            self.timer.start()
        self.target.logits(self.context, [self.context.ids[-1]] * (tokens - 1)).logits.argmax(dim=-1)
        if self.timer is not None:
            return self.timer.mark()
        ended = time.perf_counter()
        return lambda: ended


def _warm_median(seconds: list[float]) -> float:
    """The median of the times without the first few, during which the machine warms up."""
    return median(seconds[min(_WARM_UP, len(seconds) // 2) :])
