"""How long a draft pass and a target pass take on this machine: what rounds are priced by, and, with both models at work at the
same time, PEARL's c (section 4.1). Imports no torch."""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

from specgen.types import Context

if TYPE_CHECKING:
    from specgen.decoding.parallel import ParallelDrafter
    from specgen.engine.model_runner import ModelRunner

WARM_UP, STEPS = 5, 30  # as many as the authors' engine takes
FEWEST = 3  # steps that are taken however long they last
LONGEST_WINDOW = 64
_PATIENCE = 2.0  # seconds for all steps together
_ROUGHLY = 5


@dataclass(frozen=True, slots=True)
class Window:
    """How many tokens PEARL drafts during a target pass.

    `size` is PEARL's gamma. `first` is the same for the pass over one token that pre-verify makes: smaller where the time of a
    pass grows with its tokens, as on a CPU.
    """

    size: int
    first: int

    def beside(self, width: int) -> int:
        """The tokens to draft during a pass over `width` tokens, so that both models finish together."""
        if width >= self.size:
            return self.size
        return self.first + round((self.size - self.first) * (width - 1) / (self.size - 1))


@dataclass(frozen=True, slots=True)
class ParallelCosts:
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

    def as_dict(self) -> dict[str, float]:
        """For a trace: what PEARL's window was chosen by, and the window beside a pass over one token."""
        return {**asdict(self), "ratio": self.ratio, "window": self.window.size, "first_window": self.window.first}


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by a number of tokens: straight lines between the measured points, and on beyond the last two."""

    points: Mapping[int, float]

    def at(self, tokens: int) -> float:
        if tokens in self.points:
            return self.points[tokens]
        known = sorted(self.points)
        if len(known) == 1:
            return self.points[known[0]]
        position = min(max(bisect(known, tokens), 1), len(known) - 1)
        left, right = known[position - 1], known[position]
        slope = (self.points[right] - self.points[left]) / (right - left)
        return max(0.0, self.points[left] + slope * (tokens - left))


@dataclass(frozen=True, slots=True)
class CostTable:
    """A curve behind each of one or two context lengths; between them, and beyond, along a straight line."""

    curves: Mapping[int, Curve]

    def at(self, tokens: int, context_length: int) -> float:
        if len(self.curves) == 1:
            return next(iter(self.curves.values())).at(tokens)
        found = Curve({length: curve.at(tokens) for length, curve in self.curves.items()}).at(context_length)
        return max(found, 0.5 * min(curve.at(tokens) for curve in self.curves.values()))  # no line goes on for ever

    def times(self, factor: float) -> CostTable:
        curves = {
            length: Curve({tokens: seconds * factor for tokens, seconds in curve.points.items()})
            for length, curve in self.curves.items()
        }
        return CostTable(curves)

    def as_dict(self) -> dict[int, dict[int, float]]:
        return {length: dict(sorted(curve.points.items())) for length, curve in self.curves.items()}


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """What a round takes (seconds): drafting, by the tokens drafted (in a tree, by its levels); judging, which is the target's
    pass, sampling and all else, by the tokens of that pass; what a policy that looks at a token adds for each.

    Where both go on at once (PEARL), a round takes the longer one of both and `together`.
    """

    drafting: CostTable
    judging: CostTable
    looking: float = 0.0
    together: float | None = None

    def times(self, factor: float) -> RoundCosts:
        """The same on a machine so many times slower."""
        together = None if self.together is None else self.together * factor
        return RoundCosts(self.drafting.times(factor), self.judging.times(factor), self.looking * factor, together)


def _window(ratio: float) -> int:
    return min(max(1, round(ratio)), LONGEST_WINDOW)


def measure(
    target: ModelRunner,
    drafter: ParallelDrafter,
    context: Context,
    synchronize: Callable[[], None] | None = None,
    widest: int = LONGEST_WINDOW,
) -> ParallelCosts:
    """Time passes behind `context`, side by side as PEARL runs them, over as many tokens as the window will hold.

    That number follows from the times, so a rough look comes first, and a second one where it was wrong. Medians. No pass is over
    more than `widest` tokens.
    """
    deadline = time.perf_counter() + _PATIENCE
    drafter.prefill(context)
    try:
        target.logits(context)
        costs = _steps(target, drafter, context, min(8, widest), _ROUGHLY, deadline, synchronize)
        for _ in range(2):
            width = min(costs.window.size, widest)
            costs = _steps(target, drafter, context, width, WARM_UP + STEPS, deadline, synchronize)
            if abs(costs.window.size - width) <= 1:
                break
    finally:
        drafter.close()
    return costs


def _steps(
    target: ModelRunner,
    drafter: ParallelDrafter,
    context: Context,
    width: int,
    count: int,
    deadline: float,
    synchronize: Callable[[], None] | None,
) -> ParallelCosts:
    """`count` steps, each a target pass over `width` tokens beside a draft of as many; fewer, but some, behind the deadline.

    Every third is followed by one with a pass over a single token, so that a machine that slows down for a while slows both.
    """
    drafting: list[float] = []
    judging: list[float] = []
    single: list[float] = []
    while len(judging) < count and (len(judging) < FEWEST or time.perf_counter() < deadline):
        for tokens, seconds in ((width, judging), *(((1, single),) if len(judging) % 3 == 0 else ())):
            drafter.start(context, (), width)
            start = time.perf_counter()
            rows = target.logits(context, [context.ids[-1]] * (tokens - 1))
            rows.logits.argmax(dim=-1)
            if synchronize is not None:
                synchronize()
            seconds.append(time.perf_counter() - start)
            made = len(drafter.finish().tokens)
            drafting.append(drafter.seconds / made if made else math.inf)  # a draft that can't follow here: any window will do
    return ParallelCosts(_settled(drafting), _settled(judging), _settled(single), width, len(context))


def _settled(seconds: list[float]) -> float:
    """The median, but for the first ones, which warm up."""
    return median(seconds[min(WARM_UP, len(seconds) // 2) :])
