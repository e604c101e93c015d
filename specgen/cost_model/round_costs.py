"""What a round of a method costs, by drafted tokens, verified tokens and context length."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by number of tokens: piecewise linear between the measured points and beyond the last two."""

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
    """Seconds by number of tokens and by context length: one curve for each of one or two context lengths, linear in between."""

    curves: Mapping[int, Curve]

    def at(self, tokens: int, context_length: int) -> float:
        if len(self.curves) == 1:
            return next(iter(self.curves.values())).at(tokens)
        found = Curve({length: curve.at(tokens) for length, curve in self.curves.items()}).at(context_length)
        return max(found, 0.5 * min(curve.at(tokens) for curve in self.curves.values()))  # bounds the extrapolation

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
    """Costs of one round of a method.

    `draft_cost` is by drafted tokens (in a tree: by levels); `verification_cost` covers the target pass, sampling and the rest,
    by the tokens of that pass; `signal_cost` is added for each drafted token where the length policy needs signals. Where both
    models run at the same time (PEARL), a round takes the longer of both costs plus `synchronisation_overhead`.
    """

    draft_cost: CostTable
    verification_cost: CostTable
    signal_cost: float = 0.0
    synchronisation_overhead: float = 0.0

    def times(self, factor: float) -> RoundCosts:
        """The costs on a machine that is slower by `factor`."""
        tables = self.draft_cost.times(factor), self.verification_cost.times(factor)
        return RoundCosts(*tables, self.signal_cost * factor, self.synchronisation_overhead * factor)

    def as_dict(self) -> dict[str, Any]:
        """The costs under the keys of profiles and of `tune --json`."""
        return {
            "drafting": self.draft_cost.as_dict(),
            "judging": self.verification_cost.as_dict(),
            "looking": self.signal_cost,
            "together": self.synchronisation_overhead,
        }
