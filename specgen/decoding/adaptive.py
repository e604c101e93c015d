"""The length policy `adaptive`: drafts as long as the next token is expected to be worth more than it costs. Imports no torch.

It is an optimal stopping rule (SpecDec++, Huang et al. 2024, section 4, proves that the best rule is a threshold on the
probability that a drafted token was rejected). After the tokens drafted so far, another one is drafted while

    P(all so far are accepted) x (expected acceptance of the next) x worth > its cost of drafting + its cost of verification

The worth of a token is the run's cost per output token, because a drafted token that is accepted saves that much. All costs are
in units of a target pass over one token (`DraftingCosts`); the policy never reads the clock, so that equal runs stay equal.
Prompt lookup drafts by the same rule; where a draft model follows, only if it is expected to gain more (`lookup_gain`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar, NamedTuple

from specgen.cost_model.drafting_costs import DraftingCosts
from specgen.decoding.acceptance_calibration import AcceptanceCalibration, Prior, features
from specgen.decoding.drafting_guard import DraftingGuard
from specgen.decoding.length_policy import MATCH_LENGTH, NO_SIGNALS, DraftedToken, LengthPolicy, comparison
from specgen.decoding.lookup_gain import LearnedLookup, LookupPlan, best_plan
from specgen.setting_parsing import Setting, Value

AUTO = "auto"
_EDGES = (-2.0, -1.2, -0.6, -0.2, 0.2, 0.6, 1.0, 1.5, 2.0, 2.7, 3.5, 4.5)
_NEXT_EDGES = (1.2, 1.6, 2.0, 2.4)
_RATE = 0.8  # assumed acceptance rate of a model's drafts at the beginning
_LOOKUP_RATE = 0.5  # the same for prompt lookup
_FIRST = 10.0  # judged tokens that the assumed rate counts as, for the first token of a draft
_FIRST_FADING = 0.99
_COST_FADING = 0.98  # of the costs and tokens from which the worth of a token is computed, for each round
_COST_ROUNDS = 10.0  # tokens that the assumed worth counts as
_GAIN_FADING = 0.9  # of what the model's drafts gained, for each draft of the model or of prompt lookup
_GAIN_ROUNDS = 5.0  # drafts that their assumed gain counts as
_OPTION = 1.1  # one more token also shows whether the tokens after it are worth drafting, which the rule does not count


@dataclass(frozen=True, slots=True)
class Priors:
    """The prior scores of a drafted token (`token`) and of the token after it (`following`), see `AcceptanceCalibration`."""

    token: Prior
    following: Prior


# Fitted to the bundled pair, to its exit layer and to a near copy of the target as draft.
GREEDY = Priors(
    Prior(0.15, (0.45, 0.22, -0.08, 0.67), _EDGES, 30, 20), Prior(1.36, (0.43, -0.16, 0.04, 0.27), _NEXT_EDGES, 20, 40)
)
SAMPLING = Priors(
    Prior(-0.23, (-0.53, 0.57, -0.41, 0.25), _EDGES, 30, 20), Prior(1.69, (-0.07, -0.16, -0.19, 0.16), _NEXT_EDGES, 20, 40)
)


@dataclass(slots=True)
class Learned:
    """What `adaptive` has learned about a drafter of a pair. Kept from run to run, and saved in a profile.

    `token` predicts the acceptance of a drafted token, `following` that of the token after it, both given that the tokens before
    were accepted. `first` counts accepted and judged first tokens of drafts. `cost` and `tokens` are sums over rounds, from
    which the worth of a token is computed. All counts fade. All this is about a drafter that runs a model, and `lookup` about
    prompt lookup. `gains` are what the model's drafts gained (the worth of their accepted tokens minus their cost), summed, and
    their number.
    """

    token: AcceptanceCalibration
    following: AcceptanceCalibration
    first: list[float]
    cost: float
    tokens: float
    guard: DraftingGuard = field(default_factory=DraftingGuard)
    lookup: LearnedLookup = field(default_factory=LearnedLookup)
    gains: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @classmethod
    def prior(cls, costs: DraftingCosts, *, greedy: bool, has_model: bool = True) -> Learned:
        """Returns what is assumed before anything is learned, for decoding at these costs, greedily or by sampling.

        `has_model`: the drafter, or one of two, runs a model.
        """
        priors = GREEDY if greedy else SAMPLING
        calibrations = AcceptanceCalibration(priors.token), AcceptanceCalibration(priors.following)
        worth = costs.time_per_token(_RATE if has_model else _LOOKUP_RATE)
        return cls(*calibrations, [_FIRST * _RATE, _FIRST], _COST_ROUNDS * worth, _COST_ROUNDS)

    @property
    def worth(self) -> float:
        """What an output token is worth: the cost per output token so far, at most 1, the cost with plain decoding."""
        return min(1.0, self.cost / self.tokens)

    @property
    def first_acceptance(self) -> float:
        return self.first[0] / self.first[1]

    def add_first(self, accepted: bool) -> None:
        self.first = [_FIRST_FADING * self.first[0] + accepted, _FIRST_FADING * self.first[1] + 1]

    @property
    def gain(self) -> float:
        """What a draft of the model is expected to gain, in units of a target pass.

        It is assumed to gain as much as the run's average round, which is 1 - `worth`. This counts more the longer prompt lookup
        drafts alone, so that the model is tried again.
        """
        return (self.gains[0] + _GAIN_ROUNDS * (1 - self.worth)) / (self.gains[1] + _GAIN_ROUNDS)

    def add_gains(self, gain: float, drafts: int) -> None:
        self.gains = [_GAIN_FADING * self.gains[0] + gain, _GAIN_FADING * self.gains[1] + drafts]

    def add_round(self, cost: float, tokens: int) -> None:
        self.cost = _COST_FADING * self.cost + cost
        self.tokens = _COST_FADING * self.tokens + tokens

    def copy(self) -> Learned:
        first, gains, guard, lookup = list(self.first), list(self.gains), replace(self.guard), self.lookup.copy()
        calibrations = self.token.copy(), self.following.copy()
        return Learned(*calibrations, first, self.cost, self.tokens, guard, lookup, gains)


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
    A token with the signal `match_length` is prompt lookup's; others are a model's.
    """

    name = "adaptive"
    source = "optimal stopping by cost; SpecDec++, Huang et al. 2024, section 4"
    preferred_signals = frozenset({"entropy", "top_prob", "prob"})
    settings: ClassVar = {
        "draft_cost": Setting(AUTO, "cost of a drafted token in target passes; auto: measured", 0, 100, AUTO, fractional=True),
        "verify_cost": Setting(AUTO, "cost of verifying one more token, likewise", 0, 100, AUTO, fractional=True),
        "exploration": Setting(3.0, "target passes that drafting may lose before it pauses", 0.1, 1000),
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
        self._plan: LookupPlan | None = None  # of this round, if prompt lookup drafts
        self._is_trial = self._was_asked = False
        self._missed = 0  # tokens that the draft model has not read, because rounds drafted nothing

    def starts_draft(self, *, signals: Mapping[str, float] = NO_SIGNALS, is_last: bool = True) -> bool:
        self._was_asked, self._is_trial, self._tokens = True, False, 0
        self.predictions, self._plan = [], None
        if MATCH_LENGTH in signals:
            return self._starts_lookup(int(signals[MATCH_LENGTH]), 0.0 if is_last else self._model_gain)
        self._survival = prod(step.acceptance for step in self._steps)
        learned = self.learned
        if learned.guard.pauses():
            self.reason = f"no draft: paused, {learned.guard.left} more"
            return False
        gain = self._survival * learned.first_acceptance * learned.worth * _OPTION
        cost = self._costs.next_cost(0)
        if gain <= cost and not self._steps:
            self.reason = f"no draft: gain {comparison(gain, '<', cost)}"
            self._is_trial = learned.guard.tries()
            return self._is_trial
        return True

    @property
    def _missed_cost(self) -> float:
        """The cost of the draft model's pass over the tokens that it missed: as much per token as the target's, relatively."""
        return self._missed * self._costs.draft * self._costs.verification.at(1)

    def _starts_lookup(self, match_length: int, other_gain: float) -> bool:
        """Whether prompt lookup drafts: only if this is expected to gain more than `other_gain`, in units of a target pass."""
        lookup = self.learned.lookup
        if not match_length:
            self.reason = "no match"
        elif lookup.guard.pauses():
            self.reason = f"no draft: paused, {lookup.guard.left} more"
        else:
            plan = best_plan(lookup, match_length, self.learned.worth, self._costs, self.max_draft)
            if plan.gain > other_gain:
                self._plan = plan
            self.reason = f"no draft: {plan.reason}"
        return self._plan is not None

    @property
    def _model_gain(self) -> float:
        """What a draft of the model is expected to gain in this round: nothing if it would draft nothing."""
        learned = self.learned
        gain = learned.first_acceptance * learned.worth * _OPTION
        return 0.0 if learned.guard.left or gain <= self._costs.next_cost(0) else max(0.0, learned.gain)

    def keep_drafting(self, token: DraftedToken) -> bool:
        if self._plan is not None:
            self.predictions.append(self._plan.acceptances[token.position - 1])
            self.reason = self._plan.reason
            return token.position < len(self._plan.acceptances)
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
        if self._plan is not None:
            self._observe_lookup(drafted, accepted)
            return
        learned, was_rejected = self.learned, accepted < drafted
        for position, step in enumerate(self._steps[: min(accepted + 1, drafted)]):
            is_accepted = position < accepted
            learned.token.learn(step.score, is_accepted)
            if position:
                learned.following.learn(self._steps[position - 1].following_score, is_accepted)
            else:
                learned.add_first(is_accepted)
        self._steps = [] if was_rejected or not self._in_parallel else self._steps[drafted:]
        tokens = accepted + (was_rejected or not self._in_parallel)
        cost = 1 + self._costs.of_draft(drafted, max(self._tokens, drafted))
        if drafted:
            learned.add_gains(accepted * learned.worth - cost + 1, 1)
            cost += self._missed_cost
            self._missed = 0
            learned.guard.count(cost, tokens, self._exploration, trial=self._is_trial)
        else:
            self._missed += tokens
        learned.add_round(cost, tokens)
        self._was_asked = False

    def _observe_lookup(self, drafted: int, accepted: int) -> None:
        """Counts a round that prompt lookup drafted. What it learns from its tokens comes with `observe_match`."""
        learned, tokens, cost = self.learned, accepted + 1, 1 + self._costs.of_draft(0, drafted)
        self._missed += tokens
        learned.add_gains(0.0, 0)
        learned.lookup.guard.count(cost, tokens, self._exploration, trial=False)
        learned.add_round(cost, tokens)
        self._was_asked, self._plan = False, None

    def observe_match(self, match_length: int, agreed: int, *, ended: bool) -> None:
        self.learned.lookup.learn(match_length, agreed, ended=ended)

    def state(self) -> Mapping[str, float]:
        return {"worth": self.learned.worth, "first_acceptance": self.learned.first_acceptance}
