"""How long a draft pass and a target pass take on this machine, both at work at the same time: PEARL's c (section 4.1)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from specgen.decoding.parallel import Window
from specgen.types import Context

if TYPE_CHECKING:
    from specgen.decoding.parallel import ParallelDrafter
    from specgen.models.session import Session

WARM_UP, STEPS = 5, 30  # as many as the authors' engine takes
FEWEST = 3  # steps that are taken however long they last
LONGEST_WINDOW = 64
_PATIENCE = 2.0  # seconds for all steps together
_ROUGHLY = 5


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a draft pass, and of a target pass over `width` tokens and over one, while the other model works too."""

    draft_pass: float
    target_pass: float
    single_pass: float
    width: int
    context_length: int

    @property
    def ratio(self) -> float:
        """c: how many draft passes a target pass takes."""
        return self.target_pass / self.draft_pass

    @property
    def window(self) -> Window:
        """PEARL's window, with which neither model waits for the other (its Theorem 1): c, rounded; at least 1."""
        size = _window(self.ratio)
        return Window(size, min(size, _window(self.single_pass / self.draft_pass)))


def _window(ratio: float) -> int:
    return min(max(1, round(ratio)), LONGEST_WINDOW)


def measure(target: Session, drafter: ParallelDrafter, context: Context, synchronize: Callable[[], None] | None = None) -> Costs:
    """Time passes behind `context`, side by side as PEARL runs them, over as many tokens as the window will hold.

    That number follows from the times, so a rough look comes first, and a second one where it was wrong. Medians.
    """
    deadline = time.perf_counter() + _PATIENCE
    drafter.prefill(context)
    try:
        target.logits(context)
        width = 8
        passes, _ = _steps(target, drafter, context, width, width, _ROUGHLY, deadline, synchronize)
        single, beside = _steps(target, drafter, context, 1, width, WARM_UP + STEPS // 3, deadline, synchronize)
        for _ in range(2):
            width = _window(passes / beside)
            passes, beside = _steps(target, drafter, context, width, width, WARM_UP + STEPS, deadline, synchronize)
            if abs(_window(passes / beside) - width) <= 1:
                break
    finally:
        drafter.close()
    return Costs(beside, passes, single, width, len(context))


def _steps(
    target: Session,
    drafter: ParallelDrafter,
    context: Context,
    width: int,
    drafted: int,
    count: int,
    deadline: float,
    synchronize: Callable[[], None] | None,
) -> tuple[float, float]:
    """Seconds of a target pass over `width` tokens and of a draft pass: medians of `count` steps, in which `drafted` tokens are
    drafted beside a target pass; of fewer, but some, behind the deadline."""
    tokens = [context.ids[-1]] * (width - 1)
    drafting: list[float] = []
    judging: list[float] = []
    while len(judging) < count and (len(judging) < FEWEST or time.perf_counter() < deadline):
        drafter.start(context, (), drafted)
        start = time.perf_counter()
        rows = target.logits(context, tokens)
        rows.logits.argmax(dim=-1)
        if synchronize is not None:
            synchronize()
        judging.append(time.perf_counter() - start)
        made = len(drafter.finish().tokens)
        drafting.append(drafter.seconds / made if made else math.inf)  # a draft that can't follow here: any window will do
    warm = min(WARM_UP, len(judging) // 2)
    return median(judging[warm:]), median(drafting[warm:])
