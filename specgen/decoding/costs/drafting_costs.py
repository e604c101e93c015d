"""What one more drafted token costs, in units of a target pass over one token. The length policy `adaptive` decides by it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts

_USUAL = 6  # drafted tokens: the cost of a draft divided by its tokens is taken at this length
_STAGES = 8  # how many tokens `next_cost` looks ahead
_CONTINUES = 0.9  # assumed probability that a token is accepted if the one before it was
_USED = tuple(accumulate(_CONTINUES**step for step in range(_STAGES)))  # expected number of steps that are of use, of 1, 2, ...


@dataclass(frozen=True, slots=True)
class DraftingCosts:
    """The cost of drafting and of verifying, in units of a target pass over one token.

    `draft` is that of one more drafted token (of one more level, for a tree). `verification` maps a number of drafted tokens to
    what they add to the target's pass; it is 0 for none.
    """

    draft: float
    verification: Curve
    _next_costs: dict[tuple[int, int], float] = field(default_factory=dict, init=False, compare=False, repr=False)
    _next_verifications: dict[int, float] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def linear(cls, draft: float, verify: float) -> DraftingCosts:
        """Costs that are the same for each token: `draft` to draft it, `verify` to verify it."""
        return cls(draft, Curve({0: 0.0, 1: verify}))

    @classmethod
    def of_rounds(cls, costs: RoundCosts, context_length: int) -> DraftingCosts:
        """Converts measured seconds of rounds, at this context length (tokens), to units of a target pass over one token."""
        verification = _without_outliers(costs.verification_cost, context_length)
        single = max(verification.at(1), min(verification.points.values()) / 2)  # bounds the extrapolation
        points = {tokens - 1: max(0.0, seconds / single - 1) for tokens, seconds in verification.points.items()}
        draft = _without_outliers(costs.draft_cost, context_length).at(_USUAL) / _USUAL + costs.signal_cost
        return cls(draft / single, Curve({0: 0.0} | points))

    def with_values(self, draft: float | None, verify: float | None) -> DraftingCosts:
        """Returns these costs with another cost of drafting or of verifying one token; None keeps what they have."""
        if draft is None and verify is None:
            return self
        verification = self.verification if verify is None else Curve({0: 0.0, 1: verify})
        return DraftingCosts(self.draft if draft is None else draft, verification)

    def of_draft(self, levels: int, tokens: int) -> float:
        """Returns the cost of drafting `levels` tokens in a row (levels of a tree) and of verifying `tokens` drafted tokens."""
        return levels * self.draft + self.verification.at(tokens)

    def next_cost(self, tokens: int, added: int = 1) -> float:
        """Returns the cost of one more step after `tokens` drafted tokens. A step adds one token, or `added` (a tree's level).

        If the target's pass gets longer in jumps, a step may pay only together with the steps after it. So this is the lowest
        cost per step of several steps, where a later step counts less, because it is less likely to be of use.
        """
        key = tokens, added
        if (known := self._next_costs.get(key)) is None:
            known = self._next_costs[key] = min(
                (steps * self.draft + self._added(tokens, steps * added)) / used for steps, used in enumerate(_USED, 1)
            )
        return known

    def next_verification(self, tokens: int) -> float:
        """Returns the lowest cost per token of verifying some more tokens, up to eight, after `tokens` drafted ones."""
        if (known := self._next_verifications.get(tokens)) is None:
            known = self._next_verifications[tokens] = min(self._added(tokens, more) / more for more in range(1, _STAGES + 1))
        return known

    def _added(self, tokens: int, more: int) -> float:
        """What verifying `more` tokens adds to the cost of `tokens`. Not negative, as measured costs on a busy machine may be."""
        return max(0.0, self.verification.at(tokens + more) - self.verification.at(tokens))

    def time_per_token(self, acceptance: float, longest: int = 16) -> float:
        """Returns the lowest expected cost per output token with drafts of a fixed length, at most `longest` tokens.

        Each drafted token is accepted with probability `acceptance`, independently. At most 1: plain decoding.
        """
        tokens, best = 1.0, 1.0
        for length in range(1, longest + 1):
            tokens += acceptance**length
            best = min(best, (1 + self.of_draft(length, length)) / tokens)
        return best


def _without_outliers(table: CostTable, context_length: int) -> Curve:
    """Returns the seconds at a context length, where no number of tokens takes longer than a larger number.

    If one did, the measurement was disturbed, and the tokens up to the larger number would seem to cost nothing or less.
    """
    lengths = min(table.curves.items(), key=lambda item: abs(item[0] - context_length))[1].points
    shortest, points = math.inf, dict[int, float]()
    for tokens in sorted(lengths, reverse=True):
        points[tokens] = shortest = min(shortest, table.at(tokens, context_length))
    return Curve(points)
