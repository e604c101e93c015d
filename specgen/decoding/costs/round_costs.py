"""The time of a round (one draft and its verification), by numbers of drafted and verified tokens and by context length."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a function of the number of tokens, from measured `points` (number of tokens: seconds).

    It is linear between neighbouring points. Outside the measured range, the line through the nearest two points is continued.
    """

    points: Mapping[int, float]
    _found: dict[int, float] = field(default_factory=dict, init=False, compare=False, repr=False)  # what `at` has returned

    def at(self, tokens: int) -> float:
        if (seconds := self._found.get(tokens)) is None:
            seconds = self._found[tokens] = self._interpolated(tokens)
        return seconds

    def _interpolated(self, tokens: int) -> float:
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
    """Seconds as a function of the number of tokens and of the context length.

    `curves` has a curve for each measured context length (one or two). For other context lengths, the cost is linear in the
    context length; with one curve it does not depend on it.
    """

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
    """The seconds that one round of a method takes.

    `draft_cost` depends on the number of drafted tokens (for a tree, on its number of levels). `verification_cost` depends on the
    number of tokens of the target pass, and includes sampling and other work. `signal_cost` is added per drafted token if the
    length policy reads signals (numbers about a drafted token, such as entropy). In PEARL both models run at the same time: a
    round takes the larger of draft cost and verification cost, plus `synchronisation_overhead`.
    """

    draft_cost: CostTable
    verification_cost: CostTable
    signal_cost: float = 0.0
    synchronisation_overhead: float = 0.0

    @classmethod
    def of_dict(cls, saved: Mapping[str, Any]) -> RoundCosts:
        """Returns the costs that `as_dict` returned, also if JSON has made strings of the keys.

        Raises ValueError if they are not valid.
        """
        try:
            tables = [
                CostTable(
                    {
                        int(length): Curve({int(tokens): float(seconds) for tokens, seconds in curve.items()})
                        for length, curve in saved[name].items()
                    }
                )
                for name in ("drafting", "judging")
            ]
            costs = cls(tables[0], tables[1], float(saved["looking"]), float(saved["together"]))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError("the costs of a round have another form") from error
        curves = [curve.points for table in tables for curve in table.curves.values()]
        if not all(table.curves for table in tables) or not all(curves):
            raise ValueError("costs of a round are missing")
        numbers = [seconds for points in curves for seconds in points.values()]
        is_valid = all(0 <= seconds < math.inf for seconds in (*numbers, costs.signal_cost, costs.synchronisation_overhead))
        if not is_valid or any(costs.verification_cost.at(1, length) <= 0 for length in tables[1].curves):
            raise ValueError("costs of a round are not positive")
        return costs

    def times(self, factor: float) -> RoundCosts:
        """Returns these costs multiplied by `factor`."""
        tables = self.draft_cost.times(factor), self.verification_cost.times(factor)
        return RoundCosts(*tables, self.signal_cost * factor, self.synchronisation_overhead * factor)

    def as_dict(self) -> dict[str, Any]:
        """Returns the costs under the keys that `profile.yaml` and `tune --json` use."""
        return {
            "drafting": self.draft_cost.as_dict(),
            "judging": self.verification_cost.as_dict(),
            "looking": self.signal_cost,
            "together": self.synchronisation_overhead,
        }
