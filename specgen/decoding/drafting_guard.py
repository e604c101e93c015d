"""Bounds what drafting can lose against plain decoding, whatever the predicted acceptance says. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST_PAUSE, LONGEST_PAUSE = 4, 256  # rounds


@dataclass(slots=True)
class DraftingGuard:
    """Pauses drafting after it has lost more than a budget, and tries again after the pause.

    Losses are in units of a target pass over one token: the cost of a round minus the tokens that it gave, because plain
    decoding pays one unit for each. They are summed over rounds with a draft. Above the budget drafting pauses, the sum falls by
    the budget and the next pause is twice as long; below minus the budget the next pause is half as long. So whatever is
    accepted, n rounds lose at most b * (3 + log2(1 + n / `SHORTEST_PAUSE`) + n / `LONGEST_PAUSE`) units against plain decoding,
    where b is the larger one of the budget and the loss of one round.
    A round after a pause is a trial: it drafts even if the predicted acceptance says that this does not pay. Otherwise rejected
    drafts in one part of a text could end drafting for ever, since rounds without a draft teach nothing.
    """

    loss: float = 0.0
    pause: int = SHORTEST_PAUSE  # rounds of the next pause
    left: int = 0  # rounds that are left of this pause
    may_try: bool = False  # a pause has ended

    def pauses(self) -> bool:
        """Whether the next round drafts nothing because of a pause. Counts this round."""
        if not self.left:
            return False
        self.left -= 1
        self.may_try = not self.left
        return True

    def tries(self) -> bool:
        """Whether the next round is a trial. Asked only if drafting is not expected to pay; if not, a pause begins with it."""
        if not self.may_try:
            self.left = self.pause - 1
            self.may_try = not self.left
            return False
        self.may_try = False
        return True

    def count(self, cost: float, tokens: int, budget: float, *, trial: bool) -> None:
        """Counts a round with a draft: its cost in units, the tokens that it gave, and whether it was a trial.

        After a trial that paid, the next round may be another; after one that did not, a pause begins.
        """
        self.loss += cost - tokens
        if self.loss > budget or (trial and cost >= tokens):
            self.left, self.may_try = self.pause, False
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
            self.loss -= min(max(self.loss, 0.0), budget)
            return
        self.may_try |= trial
        if self.loss < -budget:
            self.pause, self.loss = max(self.pause // 2, SHORTEST_PAUSE), 0.0
