"""Expected speedup over plain decoding, and the acceptance from which drafting pays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WIDTHS = tuple(range(1, 17))  # tokens per timed target pass: drafts of up to 15 tokens
ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # per-token acceptance probabilities that reports list


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
