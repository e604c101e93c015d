"""Measures the times of passes while both models run, from which PEARL's window follows. Imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specgen.base.measuring import STEADY, Sample, distinct_ids, spread, undisturbed
from specgen.decoding.parallel_costs import LONGEST_WINDOW, ParallelCosts

if TYPE_CHECKING:
    from specgen.base.types import Context
    from specgen.decoding.parallel import ParallelDrafter
    from specgen.engine.devices import DeviceTimer
    from specgen.engine.model_runner import ModelRunner

_ROUGH_WIDTH = 8  # tokens of the target passes from which the window is first estimated
_TURNS = 2  # estimates of the window after the first
_WARM_UP, _STEPS = 5, 30  # timed steps; the numbers of PEARL's reference implementation
_FEWEST = 3  # steps that are timed even after the time limit
_TIME_LIMIT = 2.0  # seconds for all steps
_ROUGH_STEPS = 5
_SHORTEST = 1e-9  # seconds of a pass, also on a clock that stands


def time_parallel_passes(
    target: ModelRunner,
    drafter: ParallelDrafter,
    context: Context,
    timer: DeviceTimer | None = None,
    widest: int = LONGEST_WINDOW,
) -> Sample[ParallelCosts]:
    """Measures the seconds of draft and target passes after `context`, for a target pass as wide as the resulting window.

    The window depends on the time of a target pass, and this time on the number of tokens, which is the window. So a few rough
    steps estimate the window first. Then passes over that many tokens are measured, and if the window changes by more than one
    token, once more.
    `timer` times the target's device; None if it computes synchronously. No target pass covers more than `widest` tokens. Closes
    the drafter.
    """
    with closing(drafter):
        drafter.prefill(context)
        target.logits(context)
        deadline = time.perf_counter() + _TIME_LIMIT
        timed = _Timed(target, drafter, context, distinct_ids(widest, target.num_embeddings), timer)
        sample = timed.steps(min(_ROUGH_WIDTH, widest), _ROUGH_STEPS, deadline)
        for _ in range(_TURNS):
            width = min(sample.value.window.size, widest)
            sample = timed.steps(width, _WARM_UP + _STEPS, deadline)
            if abs(sample.value.window.size - width) <= 1:
                break
        return sample


@dataclass(frozen=True, slots=True)
class _Timed:
    """What `time_parallel_passes` times."""

    target: ModelRunner
    drafter: ParallelDrafter
    context: Context
    draft: Sequence[int]
    timer: DeviceTimer | None

    def steps(self, width: int, count: int, deadline: float) -> Sample[ParallelCosts]:
        """Times `count` steps, or fewer after the deadline: the target runs over `width` tokens while `width` are drafted.

        Every third step is followed by ones with target passes over one token and over two, so that a slow phase of the machine
        affects all.
        """
        drafts: list[float] = []  # seconds of a draft pass
        own_drafts: list[float] = []  # those in which its thread ran
        passes: dict[int, list[float]] = {width: [], 1: [], 2: []}  # seconds of target passes by the number of tokens
        own: dict[int, list[float]] = {width: [], 1: [], 2: []}  # those in which this thread ran
        for number in range(count):
            if number >= _FEWEST and time.perf_counter() >= deadline:
                break
            for tokens in (width, 1, 2) if number % 3 == 0 else (width,):
                seconds, own_seconds, drafted = self.step(tokens, width)
                passes[tokens].append(seconds)
                own[tokens].append(own_seconds)
                # Infinite where the draft model cannot follow this context: the window is 1 then.
                drafts.append(self.drafter.seconds / drafted if drafted else math.inf)
                own_drafts.append(self.drafter.own_seconds / drafted if drafted else math.inf)
        # Beside busy programs all passes may take long, and evenly, but this thread waits for a processor then.
        wait = 1.0
        if self.target.device.type == "cpu" and sum(own[width]) > 0:
            wait = sum(passes[width]) / sum(own[width])
        if wait > STEADY:
            passes = own
            drafts = own_drafts
        warm = {tokens: _warm(seconds) for tokens, seconds in passes.items()}
        times = (_warm(drafts), warm[width], warm[1], warm[2])
        draft, whole, single, double = (max(undisturbed(seconds), _SHORTEST) for seconds in times)
        costs = ParallelCosts(draft, whole, single, double, width, len(self.context))
        scatter = max(spread(warm[width]), spread(_warm(drafts)))
        return Sample(costs, len(warm[width]), max(scatter, wait))

    def step(self, tokens: int, window: int) -> tuple[float, float, int]:
        """Returns the seconds of a target pass over `tokens` tokens, those in which this thread ran, and how many tokens (at
        most `window`) were drafted meanwhile."""
        self.drafter.start(self.context, (), window)
        if self.timer is not None:
            self.timer.start()
        own_start = time.thread_time()
        start = time.perf_counter()
        self.target.logits(self.context, self.draft[: tokens - 1]).logits.argmax(dim=-1)
        end = time.perf_counter() if self.timer is None else self.timer.mark()
        own_seconds = time.thread_time() - own_start
        drafted = len(self.drafter.finish().tokens)
        return (end() if callable(end) else end) - start, own_seconds, drafted


def _warm(seconds: list[float]) -> list[float]:
    """The times without the first few, during which the machine warms up."""
    return seconds[min(_WARM_UP, len(seconds) // 2) :]
