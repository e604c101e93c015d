"""Bounds what drafting can lose against plain decoding, whatever the predicted acceptance says. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHORTEST_PAUSE, LONGEST_PAUSE = 4, 1024  # rounds
FIRST_TRIAL = 32  # rounds


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
    idle: int = 0  # rounds without a draft, because none was expected to pay
    trial: int = FIRST_TRIAL  # of these rounds, after which one is drafted nevertheless

    def pauses(self) -> bool:
        """Whether the next round drafts nothing because of a pause. Counts this round."""
        if not self.left:
            return False
        self.left -= 1
        return True

    def tries(self) -> bool:
        """Whether to draft in a round in which it is not expected to pay. Counts this round.

        Now and then, and ever more rarely until a token is accepted: where only the expectation is wrong, as before the first
        draft of a large tree, nothing else would correct it. The loss counts as that of any draft.
        """
        self.idle += 1
        if self.idle < self.trial:
            return False
        self.idle, self.trial = 0, min(2 * self.trial, LONGEST_PAUSE)
        return True

    def count(self, cost: float, tokens: int, budget: float) -> None:
        """Counts a round with a draft: its cost in units, and the tokens that it gave."""
        self.loss += cost - tokens
        if tokens > 1:
            self.trial = FIRST_TRIAL
        if self.loss > budget:
            self.left, self.loss = self.pause, self.loss - budget
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        elif self.loss < -budget:
            self.pause, self.loss = max(self.pause // 2, SHORTEST_PAUSE), 0.0

    def copy(self) -> DraftingGuard:
        return replace(self)
