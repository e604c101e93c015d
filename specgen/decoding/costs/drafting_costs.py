"""What one more drafted token costs, in units of a target pass over one token. The length policy `adaptive` decides by it."""

from __future__ import annotations

from dataclasses import dataclass

from specgen.decoding.costs.round_costs import RoundCosts

_USUAL = 6  # drafted tokens: costs per token are taken at this length
_FADING = 0.98  # of all sums over rounds, for each round
_OUTLIER = 3.0  # a time counts as at most this many times the expected one
_WIDEST = 8  # drafted tokens of the second one of two passes that stand for the first guess


@dataclass(frozen=True, slots=True)
class DraftingCosts:
    """The costs of drafting and of verifying one more token, in units of a target pass over one token.

    `draft` is that of one more drafted token (of one more level, for a tree), `verify` what a drafted token adds to the target's
    pass.
    """

    draft: float
    verify: float

    @classmethod
    def of_rounds(cls, costs: RoundCosts, context_length: int) -> DraftingCosts:
        """Converts measured seconds of rounds, at this context length (tokens)."""
        single, usual = (costs.verification_cost.at(width, context_length) for width in (1, _USUAL + 1))
        draft = costs.draft_cost.at(_USUAL, context_length) / _USUAL + costs.signal_cost
        return cls(draft / single, max(0.0, usual / single - 1) / _USUAL)

    def with_values(self, draft: float | None, verify: float | None) -> DraftingCosts:
        """Returns these costs with another cost of drafting or of verifying; None keeps what they have."""
        return DraftingCosts(self.draft if draft is None else draft, self.verify if verify is None else verify)

    def of_draft(self, levels: int, tokens: int) -> float:
        """Returns the cost of drafting `levels` tokens in a row (levels of a tree) and of verifying `tokens` drafted tokens."""
        return levels * self.draft + tokens * self.verify

    def time_per_token(self, acceptance: float, longest: int = 16) -> float:
        """Returns the lowest expected cost per output token with drafts of a fixed length, at most `longest` tokens.

        Each drafted token is accepted with probability `acceptance`, independently. At most 1: plain decoding.
        """
        tokens, best = 1.0, 1.0
        for length in range(1, longest + 1):
            tokens += acceptance**length
            best = min(best, (1 + self.of_draft(length, length)) / tokens)
        return best

    def differs(self, other: DraftingCosts, factor: float) -> bool:
        """Whether the cost of a drafted token is more than `factor` times that of the `other` costs, or the reverse."""
        own, its = self.of_draft(1, 1), other.of_draft(1, 1)
        return max(own, its) > factor * min(own, its)


class LearnedCosts:
    """Learns the costs of drafting from the times of rounds, beginning with a `guess`. `costs` are those learned so far.

    The cost of verification is the slope of a line through the seconds of target passes by the number of drafted tokens, that of
    drafting the mean of the seconds per drafted token. Two target passes and a draft that the guess predicts count, too.
    """

    def __init__(self, guess: DraftingCosts) -> None:
        self.guess = self.costs = guess
        self.rounds = 0
        self._single = 0.0  # seconds of a target pass over one token; 0: not known yet
        self._passes = [0.0] * 5  # sums over target passes: 1, x, x^2, y, x y for y seconds with x drafted tokens
        self._drafts = [0.0, 0.0]  # sums of seconds and of tokens (levels of a tree)

    def add(self, levels: int, drafting: float, tokens: int, verification: float) -> None:
        """Adds a round, see `LengthPolicy.observe_seconds`."""
        guess, expected = self.guess, self.costs
        if not self._single:
            self._single = max(verification, 1e-9) / (1 + guess.verify * tokens)
        seconds = min(verification, _OUTLIER * self._single * (1 + expected.verify * tokens))
        added = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._passes = [_FADING * old + new for old, new in zip(self._passes, added, strict=True)]
        if levels:
            drafting = min(drafting, _OUTLIER * self._single * max(levels * expected.draft, 0.1))
            self._drafts = [_FADING * self._drafts[0] + drafting, _FADING * self._drafts[1] + levels]
        count, x, xx, y, xy = self._passes
        widest = self._single * (1 + guess.verify * _WIDEST)
        count, x, xx = count + 2, x + _WIDEST, xx + _WIDEST**2
        y, xy = y + self._single + widest, xy + _WIDEST * widest
        slope = max(0.0, (count * xy - x * y) / (count * xx - x * x))
        self._single = max((y - slope * x) / count, 0.1 * self._single)
        draft = (self._drafts[0] / self._single + guess.draft) / (self._drafts[1] + 1)
        self.costs = DraftingCosts(draft, slope / self._single)
        self.rounds += 1
