"""The cost model: the times of rounds and of forward passes, and the expected speedup. Imports no
torch.

A round is one draft with the target pass that verifies it. Times are in seconds. Everywhere, c is
the time of one target pass divided by the time of one draft pass.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WIDTHS = tuple(range(1, 17))  # tokens per timed target pass: drafts of up to 15 tokens
LONG_COPIES = (24, 32, 48)  # tokens of longer drafts, which are tried where a draft is a copy
# Costs where nothing was measured, in target passes over one token.
# Of a further token of a pass: in `tests/bench/measure_passes.py` (SmolLM2-135M), passes over 8
# tokens take 1.3 to 1.7 times as long as over one with AVX-512 (0.045 to 0.1 a further token), 1.6
# to 2.3 times with AVX2, and 1.5 times on torch.
FURTHER_TOKEN = 0.06
LEAST_DRAFT_PASS = 0.05  # a pass of a much smaller draft model takes no less
# per-token acceptance probabilities that reports list
ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds as a function of the number of tokens, from measured `points` (number of tokens:
    seconds).

    It is linear between neighbouring points. Outside the measured range, the line through the
    nearest two points is continued.
    """

    points: Mapping[int, float]
    # what `at` has returned
    _memory: dict[int, float] = field(default_factory=dict, init=False, compare=False, repr=False)

    def at(self, tokens: int) -> float:
        if tokens not in self._memory:
            self._memory[tokens] = self._interpolated(tokens)
        return self._memory[tokens]

    def _interpolated(self, tokens: int) -> float:
        if tokens in self.points:
            return self.points[tokens]
        measured = sorted(self.points)
        if len(measured) == 1:
            return self.points[measured[0]]
        position = min(max(bisect(measured, tokens), 1), len(measured) - 1)
        left = measured[position - 1]
        right = measured[position]
        slope = (self.points[right] - self.points[left]) / (right - left)
        return max(0.0, self.points[left] + slope * (tokens - left))


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds as a function of the number of tokens and of the context length.

    `curves` has one or two measured curves by context length. Between and beyond the two, seconds
    are linear in the context length, but never below half of the smaller curve's; with one curve
    they do not depend on it.
    """

    curves: Mapping[int, Curve]

    def at(self, tokens: int, context_length: int) -> float:
        if len(self.curves) == 1:
            return next(iter(self.curves.values())).at(tokens)
        by_length = {length: curve.at(tokens) for length, curve in self.curves.items()}
        seconds = Curve(by_length).at(context_length)
        return max(seconds, 0.5 * min(by_length.values()))  # bounds the extrapolation

    def times(self, factor: float) -> CostTable:
        curves = {
            length: Curve({tokens: seconds * factor for tokens, seconds in curve.points.items()})
            for length, curve in self.curves.items()
        }
        return CostTable(curves)

    @classmethod
    def of_dict(cls, saved: Mapping[Any, Mapping[Any, Any]]) -> CostTable:
        """Returns the table that `as_dict` wrote; keys may be strings. Raises TypeError, ValueError
        or AttributeError for something else."""
        curves = {}
        for length, points in saved.items():
            curve = Curve({int(tokens): float(seconds) for tokens, seconds in points.items()})
            curves[int(length)] = curve
        return cls(curves)

    def as_dict(self) -> dict[int, dict[int, float]]:
        return {length: dict(sorted(curve.points.items())) for length, curve in self.curves.items()}


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """The seconds that one round of a method takes.

    `draft_cost` depends on the number of drafted tokens (for a tree, on its number of levels).
    `verification_cost` depends on the number of tokens of the target pass, and includes sampling
    and other work. `signal_cost` is added per drafted token if the length policy reads signals
    (numbers about a drafted token, such as entropy). In PEARL both models run at the same time: a
    round takes the larger of draft cost and verification cost, plus `synchronisation_overhead`.
    """

    draft_cost: CostTable
    verification_cost: CostTable
    signal_cost: float = 0.0
    synchronisation_overhead: float = 0.0

    @classmethod
    def of_dict(cls, saved: Mapping[str, Any]) -> RoundCosts:
        """Returns the costs that `as_dict` wrote. Keys may be strings, as JSON makes them, and
        `together` may be missing (0).

        Raises ValueError if the costs are not valid.
        """
        try:
            drafting = CostTable.of_dict(saved["drafting"])
            verification = CostTable.of_dict(saved["judging"])
            overhead = float(saved.get("together", 0.0))
            costs = cls(drafting, verification, float(saved["looking"]), overhead)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError("the costs of a round have another form") from error

        tables = (drafting, verification)
        curves = [curve.points for table in tables for curve in table.curves.values()]
        if not all(table.curves for table in tables) or not all(curves):
            raise ValueError("costs of a round are missing")
        numbers = [seconds for points in curves for seconds in points.values()]
        numbers += [costs.signal_cost, costs.synchronisation_overhead]
        is_valid = all(0 <= seconds < math.inf for seconds in numbers)
        if not is_valid or any(verification.at(1, length) <= 0 for length in verification.curves):
            raise ValueError("costs of a round are not positive")
        return costs

    def times(self, factor: float) -> RoundCosts:
        """Returns these costs multiplied by `factor`."""
        tables = self.draft_cost.times(factor), self.verification_cost.times(factor)
        return RoundCosts(
            *tables, self.signal_cost * factor, self.synchronisation_overhead * factor
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the costs under the keys that `profile.yaml` and `tune --json` use."""
        return {
            "drafting": self.draft_cost.as_dict(),
            "judging": self.verification_cost.as_dict(),
            "looking": self.signal_cost,
            "together": self.synchronisation_overhead,
        }


@dataclass(frozen=True, slots=True)
class SpeedupModel:
    """Computes the expected speedup over plain decoding of drafting k tokens per round, from the
    times of forward passes.

    `target_seconds` maps a number of tokens to the seconds of a target pass over them; 1 is among
    the keys. `draft_seconds` is the time of one draft pass (0: there is no draft model). A draft of
    k tokens takes k draft passes, or one if `drafts_blocks`. `context_length` is the number of
    tokens in the caches during these passes.
    """

    target_seconds: Mapping[int, float]
    draft_seconds: float
    context_length: int
    drafts_blocks: bool = False

    @property
    def draft_lengths(self) -> list[int]:
        """The draft lengths k for which the target pass that verifies them, over k + 1 tokens, was
        timed."""
        return [width - 1 for width in sorted(self.target_seconds) if width > 1]

    def break_even_acceptance(self, k: int) -> float | None:
        """Returns the lowest acceptance rate (accepted / drafted tokens) with which drafts of k
        tokens beat plain decoding.

        A round, which is a draft and one target pass over k + 1 tokens, yields 1 + rate * k tokens.
        None: no rate below 1 is high enough. A pass over k + 1 tokens counts as no shorter than one
        over a single token: only noise in the times makes it so.
        """
        single = self.target_seconds[1]
        more = max(0.0, self.target_seconds[k + 1] - single)
        rate = (self._drafting(k) + more) / (k * single)
        return rate if rate < 1 else None

    @property
    def relative_draft_cost(self) -> float:
        """1 / c: the time of a draft pass / the time of a target pass over one token."""
        return self.draft_seconds / self.target_seconds[1]

    def speedup(self, k: int, acceptance: float) -> float:
        """Returns the speedup of drafting k tokens if each is accepted with probability
        `acceptance`, independently."""
        return (
            _tokens(k, acceptance)
            * self.target_seconds[1]
            / (self._drafting(k) + self.target_seconds[k + 1])
        )

    def _drafting(self, k: int) -> float:
        return (1 if self.drafts_blocks else k) * self.draft_seconds

    def best(self, acceptance: float) -> tuple[int, float]:
        """Returns (k, speedup) of the draft length k with the largest speedup at this acceptance
        probability."""
        speedups = {k: self.speedup(k, acceptance) for k in self.draft_lengths}
        return max(speedups.items(), key=lambda item: item[1])


def _tokens(k: int, acceptance: float) -> float:
    """Returns the expected new tokens of a round that drafts k tokens: 1 + a + ... + a^k (Leviathan
    et al. 2023, Eq. 1)."""
    return sum(acceptance**position for position in range(k + 1))


def eesd_speedup(acceptance_rate: float, draft_share: float, cost_ratio: float) -> float | None:
    """Returns the expected speedup over plain decoding by EESD Eq. 14; None if no drafted token was
    accepted.

    `acceptance_rate` is accepted / drafted tokens, `draft_share` accepted / generated tokens, and
    `cost_ratio` is c, the time of a target pass / the time of a draft pass.
    """
    divisor = (1 / cost_ratio - acceptance_rate) * draft_share + acceptance_rate
    return acceptance_rate / divisor if acceptance_rate and divisor > 0 else None
