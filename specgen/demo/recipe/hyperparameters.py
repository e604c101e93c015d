"""What decides a demo model: its shape, the learning rate and its course, the batches, the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specgen.demo.recipe.tokenizer import CONTEXT_LENGTH
from specgen.errors import SpecgenError

WARMUP_STEPS = 100
DECAY = 0.25
HEAD_SIZE = 32
_LONG_EVERY = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's size; without `heads`, one for every 32 of `hidden_size`. SpecgenError where sizes do not fit."""

    hidden_size: int
    layers: int
    heads: int = 0

    def __post_init__(self) -> None:
        if not self.heads:
            object.__setattr__(self, "heads", max(1, self.hidden_size // HEAD_SIZE))
        if min(self.hidden_size, self.layers, self.heads) < 1:
            raise SpecgenError(f"the shape is {self}", "Each size has to be at least 1")
        if self.hidden_size % (2 * self.heads):
            cure = "It has to divide into heads of an even size, for rotary positions turn pairs"
            raise SpecgenError(f"the hidden size {self.hidden_size} does not fit {self.heads} heads", cure)

    @property
    def intermediate_size(self) -> int:
        return self.hidden_size * 11 // 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the weights, the corpus and the machine aside. Raises SpecgenError where a value makes no sense.

    The budget is `minutes` of training time or a number of optimizer `steps`, one of the two. A step takes `batch_size`
    windows of `window` tokens; while the learning rate falls every fourth step as many tokens in the longest windows that there
    are places for, which attention makes dear.
    """

    shape: Shape
    learning_rate: float
    minutes: float | None = None
    steps: int | None = None
    batch_size: int = 8
    window: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise SpecgenError("the budget is not clear", "Give either minutes or steps")
        budget = self.minutes if self.steps is None else self.steps
        for name, value in (("budget", budget), ("learning rate", self.learning_rate), ("batch size", self.batch_size)):
            if value is None or not math.isfinite(value) or value <= 0:
                raise SpecgenError(f"the {name} is {value}", "It has to be above 0")
        if not 1 <= self.window <= CONTEXT_LENGTH:
            raise SpecgenError(f"the window is {self.window}", f"It has to lie between 1 and {CONTEXT_LENGTH} tokens")

    def windows(self, step: int, *, falling: bool) -> tuple[int, int]:
        """How many windows a step takes, and of how many tokens."""
        if not falling or step % _LONG_EVERY or self.batch_size * self.window < CONTEXT_LENGTH:
            return self.batch_size, self.window
        return self.batch_size * self.window // CONTEXT_LENGTH, CONTEXT_LENGTH


BUNDLED = {
    "target": Recipe(Shape(hidden_size=128, layers=12), learning_rate=4e-3, minutes=90),
    "draft": Recipe(Shape(hidden_size=48, layers=2, heads=3), learning_rate=8e-3, minutes=5),
}
"""Of the bundled pair, on two CPU cores. With a GPU, or days, larger shapes pay."""


def learning_rate_factor(step: int, share: float) -> float:
    """Linear warm-up, a long stable phase, and a linear fall to nothing over the last DECAY of the budget's share.

    Warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395): up to the fall nothing depends on the budget, so that a run can
    be prolonged from there.
    """
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, (1 - share) / DECAY))
