"""The acceptance of a draft's first token, which decides whether to draft at all. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import mul

LEVELS = (0.01, 0.2, 0.4, 0.6, 0.75, 0.88, 0.96)  # acceptance probabilities that are distinguished
PRIOR = (0.02, 0.02, 0.06, 0.21, 0.30, 0.25, 0.14)
_CHANGE = 0.02  # assumed probability that the acceptance changes from one round to the next
_LEAST_CHANGE = 0.01
_SHRINKING = 0.85
_USELESS = 0.5


@dataclass(slots=True)
class FirstAcceptance:
    """Estimates the probability that the first token of a draft is accepted, by a filter over `LEVELS` (a hidden Markov model).

    `weights` are the probabilities of the levels. Before each round the acceptance changes with probability `change`, to a level
    drawn from `PRIOR`. So without drafts the estimate returns to the prior's: after some rounds drafting is tried again, sooner
    where it is cheap. If the first tokens of drafts that are very likely useless are rejected again and again, the assumed
    probability of a change falls, so that trials get rarer.
    """

    weights: Sequence[float] = field(default=PRIOR)
    change: float = _CHANGE
    mean: float = field(init=False)

    def __post_init__(self) -> None:
        self.mean = sum(map(mul, LEVELS, self.weights))

    def add(self, accepted: bool | None) -> None:
        """Adds a round: whether the first drafted token was accepted; None without a draft."""
        weights = self.weights
        if accepted is not None:
            weights = [weight * (level if accepted else 1 - level) for weight, level in zip(weights, LEVELS, strict=True)]
            total = sum(weights)
            weights = [weight / total for weight in weights]
            if accepted:
                self.change = _CHANGE
            elif weights[0] > _USELESS:
                self.change = max(_LEAST_CHANGE, _SHRINKING * self.change)
        change = self.change
        self.weights = [weight + change * (prior - weight) for weight, prior in zip(weights, PRIOR, strict=True)]
        self.mean = sum(map(mul, LEVELS, self.weights))

    def as_list(self) -> list[float]:
        """Returns the weights and `change`, to be saved in a profile."""
        return [*self.weights, self.change]

    @classmethod
    def of_list(cls, saved: Sequence[float]) -> FirstAcceptance:
        """Returns what `as_list` returned. Raises ValueError if the weights are no probabilities."""
        *weights, change = saved
        if min(weights) < 0 or abs(sum(weights) - 1) > 1e-3 or not 0 < change <= 1:
            raise ValueError("weights are negative or their sum is not 1, or the probability of a change is not between 0 and 1")
        return cls(weights, change)

    def copy(self) -> FirstAcceptance:
        return replace(self)
