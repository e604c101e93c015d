"""What a draft of prompt lookup is expected to gain, and what was learned about its matches. Imports no torch.

The tokens of such a draft cost nothing to draft, and the acceptance of each is predicted before it is drafted: from the number of
tokens before it that equal those before the token that it copies. So the best length follows from the sums of all lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.decoding.policy import comparison
from specgen.methods.acceptance_calibration import AcceptanceCalibration, Prior
from specgen.methods.drafting_guard import DraftingGuard

_UNLIKELY = 0.01  # a draft ends before a token that is accepted less likely than this, even if verification costs nothing
_BIAS, _WEIGHT = -1.2, 0.8  # log odds of acceptance are at least about _BIAS + _WEIGHT ln(match length) with the bundled target
_EDGES = tuple(_BIAS + _WEIGHT * math.log(length) for length in (1.5, 2.5, 3.5, 5.5, 8.5, 12.5, 20.5))
PRIOR = Prior(_BIAS, (_WEIGHT,), _EDGES, 10, 10, 5)


@dataclass(slots=True)
class LearnedLookup:
    """What was learned about prompt lookup: the acceptance of a copied token given the match's length, and its losses."""

    acceptance: AcceptanceCalibration = field(default_factory=lambda: AcceptanceCalibration(PRIOR))
    guard: DraftingGuard = field(default_factory=DraftingGuard)

    def predict(self, match_length: int) -> float:
        """Returns the probability that a copied token is accepted after `match_length` equal tokens (at least 1)."""
        return self.acceptance.predict(_score(match_length))

    def learn(self, match_length: int, agreed: int, *, ended: bool) -> None:
        """Learns from a match, see `LengthPolicy.observe_match`."""
        for position in range(agreed):
            self.acceptance.learn(_score(match_length + position), accepted=True)
        if ended:
            self.acceptance.learn(_score(match_length + agreed), accepted=False)

    def copy(self) -> LearnedLookup:
        return LearnedLookup(self.acceptance.copy(), self.guard.copy())


@cache
def _score(match_length: int) -> float:
    return PRIOR.score((math.log(match_length),))


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """The length of a lookup draft that is expected to gain most. `acceptances` are the probabilities of its tokens.

    `gain` is the expected gain in units of a target pass over one token. `reason` says why the draft is not longer.
    """

    acceptances: Sequence[float]
    gain: float
    reason: str


def best_plan(learned: LearnedLookup, match_length: int, worth: float, costs: DraftingCosts, longest: int) -> LookupPlan:
    """Returns the plan for a match of this length, of at most `longest` tokens.

    The gain of a draft is the sum over its tokens of (P(it and all before it are accepted) x `worth`), minus the cost of
    verification.
    """
    acceptances: list[float] = []
    best, length, value, survival = 0.0, 0, 0.0, 1.0
    reason, predict, verification = f"limit {longest}", learned.predict, costs.verification.at
    for position in range(longest):
        acceptance = predict(match_length + position)
        survival *= acceptance
        if survival < _UNLIKELY:
            reason = f"acceptance {comparison(survival, '<', _UNLIKELY)}"
            break
        if survival * worth <= (cost := costs.next_verification(position)):  # each token after it is worth less
            reason = f"gain {comparison(survival * worth, '< cost', cost)}"
            break
        acceptances.append(acceptance)
        value += survival * worth
        if (gain := value - verification(position + 1)) > best:
            best, length = gain, position + 1
    if length < len(acceptances):
        left_out = verification(len(acceptances)) - verification(length)
        reason = f"gain {comparison(value - best - verification(length), '< cost', left_out)}"
    return LookupPlan(acceptances[:length], best, reason)
