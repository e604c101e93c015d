"""The expected speedup over plain decoding, and the lowest acceptance with which drafting is faster than plain decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WIDTHS = tuple(range(1, 17))  # tokens per timed target pass: drafts of up to 15 tokens
ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # per-token acceptance probabilities that reports list


@dataclass(frozen=True, slots=True)
class SpeedupModel:
    """Computes the expected speedup over plain decoding of drafting k tokens per round, from the times of forward passes.

    `target_seconds` maps a number of tokens to the seconds of a target pass over them; 1 is among the keys. `draft_seconds` is
    the time of one draft pass (0: there is no draft model). `context_length` is the number of tokens in the caches during these
    passes.
    """

    target_seconds: Mapping[int, float]
    draft_seconds: float
    context_length: int

    @property
    def draft_lengths(self) -> list[int]:
        """The draft lengths k for which the target pass that verifies them, over k + 1 tokens, was timed."""
        return [width - 1 for width in sorted(self.target_seconds) if width > 1]

    def break_even_acceptance(self, k: int) -> float | None:
        """Returns the lowest acceptance rate (accepted / drafted tokens) with which drafts of k tokens beat plain decoding.

        A round yields 1 + rate * k tokens for k draft passes and one target pass over k + 1 tokens. None: no rate is high enough.
        """
        single = self.target_seconds[1]
        rate = (k * self.draft_seconds + self.target_seconds[k + 1] - single) / (k * single)
        return max(0.0, rate) if rate < 1 else None

    @property
    def relative_draft_cost(self) -> float:
        """1 / c: the time of a draft pass / the time of a target pass over one token."""
        return self.draft_seconds / self.target_seconds[1]

    def break_even_draft_cost(self, acceptance: float) -> float | None:
        """Returns the largest relative draft cost (draft pass time / target pass time) with which drafting beats plain decoding.

        Each drafted token is accepted with probability `acceptance`, and the best draft length is used. None: even a draft model
        that takes no time would not help.
        """
        single = self.target_seconds[1]
        seconds = [(_tokens(k, acceptance) * single - self.target_seconds[k + 1]) / k for k in self.draft_lengths]
        return max(seconds) / single if max(seconds, default=0.0) > 0 else None

    def speedup(self, k: int, acceptance: float) -> float:
        """Returns the speedup of drafting k tokens if each is accepted with probability `acceptance`, independently."""
        return _tokens(k, acceptance) * self.target_seconds[1] / (k * self.draft_seconds + self.target_seconds[k + 1])

    def best(self, acceptance: float) -> tuple[int, float]:
        """Returns (k, speedup) of the draft length k with the largest speedup at this acceptance probability."""
        return max(((k, self.speedup(k, acceptance)) for k in self.draft_lengths), key=lambda found: found[1])


def _tokens(k: int, acceptance: float) -> float:
    """Returns the expected new tokens of a round that drafts k tokens: 1 + a + ... + a^k (Leviathan et al. 2023, Eq. 1)."""
    return sum(acceptance**position for position in range(k + 1))


def eesd_speedup(acceptance_rate: float, draft_share: float, cost_ratio: float) -> float | None:
    """Returns the expected speedup over plain decoding by EESD Eq. 14; None if no drafted token was accepted.

    `acceptance_rate` is accepted / drafted tokens, `draft_share` accepted / generated tokens, and `cost_ratio` is c, the time of
    a target pass / the time of a draft pass.
    """
    divisor = (1 / cost_ratio - acceptance_rate) * draft_share + acceptance_rate
    return acceptance_rate / divisor if acceptance_rate and divisor > 0 else None
