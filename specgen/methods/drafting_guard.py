"""Bounds what drafting can lose against plain decoding, whatever the predicted acceptance says. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHORTEST_PAUSE, LONGEST_PAUSE = 4, 1024  # rounds


@dataclass(slots=True)
class DraftingGuard:
    """Pauses drafting after it has lost more than a budget.

    Losses are in units of a target pass over one token: the cost of a round minus the tokens that it gave, because plain
    decoding pays one unit for each. They are summed over rounds with a draft. Above the budget drafting pauses, the sum falls by
    the budget and the next pause is twice as long; below minus the budget the next pause is half as long. So whatever is
    accepted, n rounds lose at most b * (3 + log2(1 + n / `SHORTEST_PAUSE`) + n / `LONGEST_PAUSE`) units against plain decoding,
    where b is the larger one of the budget and the loss of one round.
    """

    loss: float = 0.0
    pause: int = SHORTEST_PAUSE  # rounds of the next pause
    left: int = 0  # rounds that are left of this pause

    def pauses(self) -> bool:
        """Whether the next round drafts nothing because of a pause. Counts this round."""
        if not self.left:
            return False
        self.left -= 1
        return True

    def count(self, cost: float, tokens: int, budget: float) -> None:
        """Counts a round with a draft: its cost in units, and the tokens that it gave."""
        self.loss += cost - tokens
        if self.loss > budget:
            self.left, self.loss = self.pause, self.loss - budget
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        elif self.loss < -budget:
            self.pause, self.loss = max(self.pause // 2, SHORTEST_PAUSE), 0.0

    def copy(self) -> DraftingGuard:
        return replace(self)
