"""Hyperparameters of a demo model: shape, learning rate and its schedule, batches, training budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specgen.base.errors import SpecgenError

CONTEXT_LENGTH = 1024
WARMUP_STEPS = 100
DECAY_SHARE = 0.25  # of the budget
_HEAD_SIZE = 32
_LONG_BATCH_EVERY = 4  # steps of the decay phase


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a Llama model. `heads` 0 stands for one head per 32 of `hidden_size`.

    Raises SpecgenError if a size is below 1, or if the heads would not have the same even size (rotary positions need it even).
    """

    hidden_size: int
    layers: int
    heads: int = 0

    def __post_init__(self) -> None:
        if not self.heads:
            object.__setattr__(self, "heads", max(1, self.hidden_size // _HEAD_SIZE))
        if min(self.hidden_size, self.layers, self.heads) < 1:
            raise SpecgenError(f"the shape is {self}", "Each size has to be at least 1")
        if self.hidden_size % (2 * self.heads):
            raise SpecgenError(
                f"the hidden size {self.hidden_size} does not fit {self.heads} heads", "All heads need the same, even size"
            )

    @property
    def intermediate_size(self) -> int:
        return self.hidden_size * 11 // 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """All hyperparameters of a training run. Raises SpecgenError for values that are out of range.

    The budget is either `minutes` of training time or a number of optimizer `steps`. A batch has `batch_size` sequences of
    `training_length` tokens.
    """

    shape: Shape
    learning_rate: float
    minutes: float | None = None
    steps: int | None = None
    batch_size: int = 8
    training_length: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise SpecgenError("the budget is not clear", "Give either minutes or steps")
        budget = self.minutes if self.steps is None else self.steps
        for name, value in (("budget", budget), ("learning rate", self.learning_rate), ("batch size", self.batch_size)):
            if value is None or not math.isfinite(value) or value <= 0:
                raise SpecgenError(f"the {name} is {value}", "It has to be above 0")
        if not 1 <= self.training_length <= CONTEXT_LENGTH:
            raise SpecgenError(
                f"the training sequences have {self.training_length} tokens", f"It has to be 1 to {CONTEXT_LENGTH} tokens"
            )

    def batch_shape(self, step: int, *, decaying: bool) -> tuple[int, int]:
        """The number of sequences in a step's batch, and their length in tokens.

        In the decay phase every fourth batch has sequences of CONTEXT_LENGTH tokens, so that the model learns all positions. They
        are not used more often because attention over long sequences is expensive. The number of tokens stays the same.
        """
        tokens = self.batch_size * self.training_length
        if not decaying or step % _LONG_BATCH_EVERY or tokens < CONTEXT_LENGTH:
            return self.batch_size, self.training_length
        return tokens // CONTEXT_LENGTH, CONTEXT_LENGTH


BUNDLED = {
    "target": Recipe(Shape(hidden_size=128, layers=12), learning_rate=4e-3, minutes=90),
    "draft": Recipe(Shape(hidden_size=48, layers=2, heads=3), learning_rate=8e-3, minutes=5),
}
"""The recipes of the bundled pair, which was trained on two CPU cores."""


def learning_rate_factor(step: int, budget_spent: float) -> float:
    """Warmup-stable-decay schedule (Hu et al. 2024, arXiv 2404.06395), between 0 and 1; `budget_spent` is a share from 0 to 1.

    A linear warmup, then a constant learning rate, then a linear decay to 0 over the last DECAY_SHARE of the budget. Nothing
    before the decay depends on the budget, so a run can be continued from there with a larger one.
    """
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, (1 - budget_spent) / DECAY_SHARE))
