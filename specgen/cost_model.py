"""Cost model of speculative decoding: what passes and rounds take on this machine, and which speedups follow from it.

Times are seconds. c is the time of a target pass divided by the time of a draft pass (PEARL, section 4.1). Imports no torch.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

LONGEST_WINDOW = 64
WIDTHS = tuple(range(1, 17))  # tokens per timed target pass: drafts of up to 15 tokens
ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # per-token acceptance probabilities that reports list


@dataclass(frozen=True, slots=True)
class Window:
    """PEARL's window: the number of tokens drafted during one target pass.

    `size` is PEARL's gamma, for a pass over `size` tokens. `first` is the number for the one-token pass of pre-verify, which is
    smaller where the time of a pass grows with its number of tokens, as on a CPU.
    """

    size: int
    first: int

    def beside(self, width: int) -> int:
        """Tokens to draft during a target pass over `width` tokens, so that both models finish at the same time."""
        if width >= self.size:
            return self.size
        return self.first + round((self.size - self.first) * (width - 1) / (self.size - 1))


@dataclass(frozen=True, slots=True)
class ParallelCosts:
    """Pass times of a pair while both models run at the same time: of one draft pass, and of target passes over `width` tokens
    and over one token, after a context of `context_length` tokens."""

    draft_pass: float
    target_pass: float
    single_pass: float
    width: int
    context_length: int

    @property
    def ratio(self) -> float:
        """c, for a target pass over `width` tokens."""
        return self.target_pass / self.draft_pass

    @property
    def window(self) -> Window:
        """The window with which neither model waits for the other: c, rounded, at least 1 (PEARL, Theorem 1)."""
        size = _rounded(self.ratio)
        return Window(size, min(size, _rounded(self.single_pass / self.draft_pass)))

    def as_dict(self) -> dict[str, float]:
        """The `costs` of a trace's start line: the measured times, c and the window."""
        return {**asdict(self), "ratio": self.ratio, "window": self.window.size, "first_window": self.window.first}


def _rounded(ratio: float) -> int:
    return min(max(1, round(ratio)), LONGEST_WINDOW)


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


@dataclass(frozen=True, slots=True)
class SpeedupModel:
    """Expected speedup of drafting k tokens per round over plain decoding, from pass times.

    `target_seconds` are target passes by their number of tokens, 1 among them; `draft_seconds` is one draft pass, 0 where
    drafting costs next to nothing.
    """

    target_seconds: Mapping[int, float]
    draft_seconds: float
    context_length: int

    @property
    def draft_lengths(self) -> list[int]:
        """The k whose target pass over k + 1 tokens was timed."""
        return [width - 1 for width in sorted(self.target_seconds) if width > 1]

    def break_even_acceptance(self, k: int) -> float | None:
        """The acceptance rate (accepted / drafted) from which drafts of k tokens are faster than plain decoding.

        A round yields 1 + rate * k tokens for k draft passes and one target pass over k + 1 tokens. None where no rate is enough.
        """
        single = self.target_seconds[1]
        rate = (k * self.draft_seconds + self.target_seconds[k + 1] - single) / (k * single)
        return max(0.0, rate) if rate < 1 else None

    @property
    def relative_draft_cost(self) -> float:
        """Time of a draft pass / time of a target pass over one token: 1 / c."""
        return self.draft_seconds / self.target_seconds[1]

    def break_even_draft_cost(self, acceptance: float) -> float | None:
        """The relative draft cost below which some draft length is faster than plain decoding at this acceptance probability.

        None where no draft model is cheap enough.
        """
        single = self.target_seconds[1]
        seconds = [(_tokens(k, acceptance) * single - self.target_seconds[k + 1]) / k for k in self.draft_lengths]
        return max(seconds) / single if max(seconds, default=0.0) > 0 else None

    def speedup(self, k: int, acceptance: float) -> float:
        """Speedup where each token is accepted with probability `acceptance`, independently of the others."""
        return _tokens(k, acceptance) * self.target_seconds[1] / (k * self.draft_seconds + self.target_seconds[k + 1])

    def best(self, acceptance: float) -> tuple[int, float]:
        """The draft length with the largest speedup at this acceptance probability, and that speedup."""
        return max(((k, self.speedup(k, acceptance)) for k in self.draft_lengths), key=lambda found: found[1])


def _tokens(k: int, acceptance: float) -> float:
    """Expected tokens of a round with k drafted tokens: 1 + a + ... + a^k (Leviathan et al. 2023, Eq. 1)."""
    return sum(acceptance**position for position in range(k + 1))


def eesd_speedup(acceptance_rate: float, draft_share: float, cost_ratio: float) -> float | None:
    """Expected speedup by EESD Eq. 14, with `cost_ratio` = c. None where nothing was accepted."""
    divisor = (1 / cost_ratio - acceptance_rate) * draft_share + acceptance_rate
    return acceptance_rate / divisor if acceptance_rate and divisor > 0 else None
