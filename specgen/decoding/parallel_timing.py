"""Measures the times that determine PEARL's window (the number of tokens drafted during one target pass; section 4.1).

Both models run at the same time, as they do in PEARL.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from specgen.cost_model.pearl_window import LONGEST_WINDOW, ROUGH_WIDTH, ParallelCosts, settled
from specgen.types import Context

if TYPE_CHECKING:
    from specgen.decoding.parallel import ParallelDrafter
    from specgen.engine.model_runner import ModelRunner

_WARM_UP, _STEPS = 5, 30  # the numbers of PEARL's reference implementation
_FEWEST = 3  # steps that are timed even after the time limit
_TIME_LIMIT = 2.0  # seconds for all steps
_ROUGH_STEPS = 5


def time_parallel_passes(
    target: ModelRunner,
    drafter: ParallelDrafter,
    context: Context,
    synchronize: Callable[[], None] | None = None,
    widest: int = LONGEST_WINDOW,
) -> ParallelCosts:
    """Measures the median seconds of draft and target passes after `context`, for a target pass as wide as the resulting window.

    A few rough steps estimate the window (tokens drafted during one target pass) first; see `settled`. `synchronize` waits for
    the device; None if it computes synchronously. No target pass covers more than `widest` tokens. Closes the drafter.
    """
    deadline = time.perf_counter() + _TIME_LIMIT

    def steps(width: int, count: int) -> ParallelCosts:
        """Times `count` steps, or fewer after the deadline: the target runs over `width` tokens while `width` are drafted.

        Every third step is followed by one with a one-token target pass, so that a slow phase of the machine affects both.
        """
        drafts: list[float] = []
        passes: list[float] = []
        single_passes: list[float] = []
        while len(passes) < count and (len(passes) < _FEWEST or time.perf_counter() < deadline):
            for tokens, seconds in ((width, passes), (1, single_passes))[: 1 if len(passes) % 3 else 2]:
                drafter.start(context, (), width)
                start = time.perf_counter()
                target.logits(context, [context.ids[-1]] * (tokens - 1)).logits.argmax(dim=-1)
                if synchronize is not None:
                    synchronize()
                seconds.append(time.perf_counter() - start)
                drafted = len(drafter.finish().tokens)
                # Infinite where the draft model cannot follow this context: the window is 1 then.
                drafts.append(drafter.seconds / drafted if drafted else math.inf)
        return ParallelCosts(_warm_median(drafts), _warm_median(passes), _warm_median(single_passes), width, len(context))

    drafter.prefill(context)
    try:
        target.logits(context)
        rough = steps(min(ROUGH_WIDTH, widest), _ROUGH_STEPS)
        return settled(rough, lambda width: steps(width, _WARM_UP + _STEPS), widest)
    finally:
        drafter.close()


def _warm_median(seconds: list[float]) -> float:
    """The median of the times without the first few, during which the machine warms up."""
    return median(seconds[min(_WARM_UP, len(seconds) // 2) :])
