"""The length policy `adaptive`: drafts as long as the next token is expected to be worth more than it costs. Imports no torch.

It is an optimal stopping rule (SpecDec++, Huang et al. 2024, section 4, proves that the best rule is a threshold on the
probability that a drafted token was rejected). After the tokens drafted so far, another one is drafted while

    P(all so far are accepted) x (expected acceptance of the next) x worth > its cost of drafting + its cost of verification

The worth of a token is the run's cost per output token, because a drafted token that is accepted saves that much. All costs are
in units of a target pass over one token (`DraftingCosts`); the policy never reads the clock, so that equal runs stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar, NamedTuple

from specgen.cost_model.drafting_costs import DraftingCosts
from specgen.decoding.acceptance_calibration import AcceptanceCalibration, Prior, features
from specgen.decoding.drafting_guard import DraftingGuard
from specgen.decoding.first_acceptance import FirstAcceptance
from specgen.decoding.length_policy import DraftedToken, LengthPolicy, comparison
from specgen.setting_parsing import Setting, Value

AUTO = "auto"
_EDGES = (-2.0, -1.2, -0.6, -0.2, 0.2, 0.6, 1.0, 1.5, 2.0, 2.7, 3.5, 4.5)
_NEXT_EDGES = (1.2, 1.6, 2.0, 2.4)
_RATE = 0.8  # assumed acceptance rate at the beginning, from which the first worth of a token is computed
_COST_FADING = 0.97  # of the costs and tokens from which the worth of a token is computed, for each round
_COST_TOKENS = 10.0  # tokens that the first worth counts as
_OPTION = 1.1  # one more token also shows whether the tokens after it are worth drafting, which the rule does not count


# Fitted to the drafts of the bundled draft model, of the exit layer and of a near copy of the target, on half of the prompts of
# `examples.yaml`: scores of a drafted token, and of the token after it.
_GREEDY = (
    Prior(-0.06, (0.74, 0.08, 0.37, 0.83), _EDGES, 5, 5, 5),
    Prior(1.27, (0.50, -0.19, 0.30, 0.31), _NEXT_EDGES, 10, 20),
)
_SAMPLING = (
    Prior(-0.64, (-0.25, 0.62, -0.04, 0.26), _EDGES, 5, 5, 5),
    Prior(2.09, (-0.16, -0.15, -0.83, 0.11), _NEXT_EDGES, 10, 20),
)


@dataclass(slots=True)
class Learned:
    """What `adaptive` has learned about a drafter of a pair. Kept from run to run, and saved in a profile.

    `token` predicts the acceptance of a drafted token, `following` that of the token after it, both given that the tokens before
    were accepted; `first` that of a draft's first token. `cost` and `tokens` are fading sums over rounds, from which the worth of
    a token is computed.
    """

    token: AcceptanceCalibration
    following: AcceptanceCalibration
    first: FirstAcceptance
    cost: float
    tokens: float
    guard: DraftingGuard = field(default_factory=DraftingGuard)

    @classmethod
    def prior(cls, costs: DraftingCosts, temperature: float) -> Learned:
        """Returns what is assumed before anything is learned, for decoding at these costs and this temperature (0: greedily)."""
        share = min(temperature, 1.0)
        pairs = zip(_GREEDY, _SAMPLING, strict=True)
        token, following = (AcceptanceCalibration(greedy.mixed(sampling, share)) for greedy, sampling in pairs)
        return cls(token, following, FirstAcceptance(), _COST_TOKENS * costs.time_per_token(_RATE), _COST_TOKENS)

    @property
    def worth(self) -> float:
        """What an output token is worth: the cost per output token so far, at most 1, the cost with plain decoding."""
        return min(1.0, self.cost / self.tokens)

    def add_round(self, cost: float, tokens: int) -> None:
        self.cost = _COST_FADING * self.cost + cost
        self.tokens = _COST_FADING * self.tokens + tokens

    def copy(self) -> Learned:
        parts = {name: getattr(self, name).copy() for name in ("token", "following", "first", "guard")}
        return replace(self, **parts)


@dataclass(frozen=True, slots=True)
class AdaptiveInputs:
    """What a run's policy `adaptive` decides by: the costs of drafting, and what is known about the drafter.

    `learned` changes during the run. `in_parallel`: drafts are made during the target's passes (PEARL), and cost nothing.
    """

    costs: DraftingCosts
    learned: Learned
    in_parallel: bool = False


class _Step(NamedTuple):
    """A drafted token (a level of a tree) that is not judged yet: its scores and the probability that it is accepted."""

    score: float
    following_score: float
    acceptance: float


class Adaptive(LengthPolicy):
    """Drafts another token while it is expected to be worth more than it costs; drafts nothing where no token is.

    `inputs` are the costs on this machine and what is known about the drafter; the settings `draft_cost` and `verify_cost`
    replace the costs. `predictions` are the acceptance probabilities that were predicted for the tokens of the last draft.
    """

    name = "adaptive"
    source = "optimal stopping by cost; SpecDec++, Huang et al. 2024, section 4"
    preferred_signals = frozenset({"entropy", "top_prob", "prob"})
    settings: ClassVar = {
        "draft_cost": Setting(AUTO, "cost of a drafted token in target passes; auto: measured", 0, 100, AUTO, fractional=True),
        "verify_cost": Setting(AUTO, "cost of verifying one more token, likewise", 0, 100, AUTO, fractional=True),
        "exploration": Setting(6.0, "target passes that drafting may lose before it pauses", 0.1, 1000),
        "max_draft": Setting(40, "longest draft", 1, 1000),
    }

    def __init__(self, draft_cost: Value, verify_cost: Value, exploration: float, max_draft: int, inputs: AdaptiveInputs) -> None:
        drafting, verification = (None if cost == AUTO else float(cost) for cost in (draft_cost, verify_cost))
        self._in_parallel, self.learned = inputs.in_parallel, inputs.learned
        self._costs = inputs.costs.with_values(0.0 if inputs.in_parallel else drafting, verification)
        self._exploration, self.max_draft = exploration, max_draft
        self._priors = self.learned.token.prior, self.learned.following.prior
        self.signals = self.preferred_signals
        self.predictions: list[float] = []
        self._steps: list[_Step] = []
        self._survival = 1.0  # probability that all drafted tokens so far are accepted
        self._tokens = 0  # drafted in this round
        self._was_asked = False
        self._missed = 0  # tokens that the draft model has not read, because rounds drafted nothing

    def starts_draft(self) -> bool:
        self._was_asked, self._tokens = True, 0
        self._survival = prod(step.acceptance for step in self._steps)
        self.predictions = []
        learned = self.learned
        if learned.guard.pauses():
            self.reason = f"no draft: paused, {learned.guard.left} more"
            return False
        gain = self._survival * learned.first.mean * learned.worth * _OPTION
        cost = self._costs.next_cost(0) + self._missed_cost
        if gain <= cost and not self._steps:
            self.reason = f"no draft: gain {comparison(gain, '<', cost)}"
            return False
        return True

    @property
    def _missed_cost(self) -> float:
        """The cost of the draft model's pass over the tokens that it missed: as much per token as the target's, relatively."""
        return self._missed * self._costs.draft * self._costs.verification.at(1)

    def keep_drafting(self, token: DraftedToken) -> bool:
        learned, (prior, following) = self.learned, self._priors
        known = features(token.signals.get("entropy", 0.5), token.signals.get("top_prob", 0.8), token.signals.get("prob", 0.8))
        score, following_score = prior.score(known), following.score(known)
        acceptance = learned.token.predict(score)
        self._steps.append(_Step(score, following_score, acceptance))
        self.predictions.append(acceptance)
        self._survival *= acceptance
        self._tokens += token.nodes
        gain = self._survival * learned.following.predict(following_score) * learned.worth * _OPTION
        cost = self._costs.next_cost(self._tokens, token.nodes)
        if gain <= cost:
            self.reason = f"gain {comparison(gain, '<', cost)}"
            return False
        return self._below(self.max_draft, token)

    def observe(self, drafted: int, accepted: int) -> None:
        if not self._was_asked:  # the pass over the prompt, or no room for a draft
            return
        learned, was_rejected = self.learned, accepted < drafted
        for position, step in enumerate(self._steps[: min(accepted + 1, drafted)]):
            is_accepted = position < accepted
            learned.token.learn(step.score, is_accepted)
            if position:
                learned.following.learn(self._steps[position - 1].following_score, is_accepted)
        self._steps = [] if was_rejected or not self._in_parallel else self._steps[drafted:]
        tokens = accepted + (was_rejected or not self._in_parallel)
        cost = 1 + self._costs.of_draft(drafted, max(self._tokens, drafted))
        if drafted:
            cost += self._missed_cost
            self._missed = 0
            learned.guard.count(cost, tokens, self._exploration)
        else:
            self._missed += tokens
        learned.first.add(accepted > 0 if drafted else None)
        learned.add_round(cost, tokens)
        self._was_asked = False

    def state(self) -> Mapping[str, float]:
        return {"worth": self.learned.worth, "first_acceptance": self.learned.first.mean}
