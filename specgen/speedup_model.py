"""From which acceptance on speculation pays, computed from what passes cost here. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WIDTHS = tuple(range(1, 17))  # tokens of a target pass that are timed: drafts of up to 15
ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class SpeedupModel:
    """Seconds of target passes by their width (1 among them), and of a draft pass, 0 where drafting costs next to nothing."""

    target_seconds: Mapping[int, float]
    draft_seconds: float
    context_length: int

    @property
    def window(self) -> int | None:
        """PEARL's window max(1, round(c)) for a pass as wide as itself, as far as widths were timed; None without a draft."""
        if not self.draft_seconds:
            return None
        window = 1
        for _ in range(8):
            window = max(1, round(self._pass(window) / self.draft_seconds))
        return window

    @property
    def cost_ratio(self) -> float | None:
        """c: how many draft passes a target pass takes, one as wide as PEARL's window (its section 4.1)."""
        return None if self.window is None else self._pass(self.window) / self.draft_seconds

    @property
    def draft_lengths(self) -> list[int]:
        """The K for which the pass over K + 1 tokens was timed."""
        return [width - 1 for width in sorted(self.target_seconds) if width > 1]

    def pays_from(self, k: int) -> float | None:
        """The acceptance rate (accepted of drafted) from which drafts of k tokens are faster than plain decoding.

        A round gives 1 + rate * k tokens, for k draft passes and one target pass over k + 1 tokens. None where no rate is enough.
        """
        single = self.target_seconds[1]
        rate = (k * self.draft_seconds + self.target_seconds[k + 1] - single) / (k * single)
        return max(0.0, rate) if rate < 1 else None

    def speedup(self, k: int, chance: float) -> float:
        """Over plain decoding, where each token is accepted with the same chance, whatever became of others."""
        tokens = sum(chance**position for position in range(k + 1))
        return tokens * self.target_seconds[1] / (k * self.draft_seconds + self.target_seconds[k + 1])

    def best(self, chance: float) -> tuple[int, float]:
        """The draft length that gains most at this chance, and what it gains."""
        return max(((k, self.speedup(k, chance)) for k in self.draft_lengths), key=lambda found: found[1])

    def _pass(self, width: int) -> float:
        return self.target_seconds[min(width, max(self.target_seconds))]
