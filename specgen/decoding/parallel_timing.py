"""Times the passes that determine PEARL's window, with both models running at the same time (PEARL, section 4.1)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from specgen.cost_model.pearl_window import LONGEST_WINDOW, ParallelCosts
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
    """Median seconds of draft and target passes after `context`, for a target pass as wide as the resulting window.

    The window depends on the times, and the time of a target pass on its width. So a few rough steps come first; the passes are
    timed once more where their window turns out different. No pass covers more than `widest` tokens. Closes the drafter.
    """
    deadline = time.perf_counter() + _TIME_LIMIT

    def steps(width: int, count: int) -> ParallelCosts:
        """Time `count` steps, fewer after the deadline: a target pass over `width` tokens during a draft of as many.

        A step with a one-token target pass follows every third one, so that a slower phase of the machine affects both medians.
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
        costs = steps(min(8, widest), _ROUGH_STEPS)
        for _ in range(2):
            width = min(costs.window.size, widest)
            costs = steps(width, _WARM_UP + _STEPS)
            if abs(costs.window.size - width) <= 1:
                break
    finally:
        drafter.close()
    return costs


def _warm_median(seconds: list[float]) -> float:
    """The median without the first samples, which warm up."""
    return median(seconds[min(_WARM_UP, len(seconds) // 2) :])
