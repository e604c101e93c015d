"""The length policy `adaptive`: drafts as long as the next token is expected to be worth more than it costs. Imports no torch.

It is an optimal stopping rule (SpecDec++, Huang et al. 2024, section 4, proves that the best rule is a threshold on the
probability that a drafted token was rejected). After the tokens drafted so far, another one is drafted while

    P(all so far are accepted) x (expected acceptance of the next) x worth > its cost of drafting + its cost of verification

The worth of a token is the run's cost per output token, because a drafted token that is accepted saves that much. All costs are
in units of a target pass over one token (`DraftingCosts`); the policy never reads the clock, so that equal runs stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from specgen.cost_model.drafting_costs import DraftingCosts
from specgen.decoding.acceptance_calibration import AcceptanceCalibration, Prior, features
from specgen.decoding.drafting_guard import DraftingGuard
from specgen.decoding.length_policy import DraftedToken, LengthPolicy, comparison
from specgen.setting_parsing import Setting, Value

AUTO = "auto"
_EDGES = (-2.0, -1.2, -0.6, -0.2, 0.2, 0.6, 1.0, 1.5, 2.0, 2.7, 3.5, 4.5)
_NEXT_EDGES = (1.2, 1.6, 2.0, 2.4)
_RATE = 0.8  # assumed acceptance rate at the beginning
_FIRST = 10.0  # judged tokens that the assumed rate counts as, for the first token of a draft
_FIRST_FADING = 0.99
_COST_FADING = 0.98  # of the costs and tokens from which the worth of a token is computed, for each round
_COST_ROUNDS = 10.0  # tokens that the assumed worth counts as
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
    which the worth of a token is computed. All counts fade.
    """

    token: AcceptanceCalibration
    following: AcceptanceCalibration
    first: list[float]
    cost: float
    tokens: float
    guard: DraftingGuard = field(default_factory=DraftingGuard)

    @classmethod
    def prior(cls, costs: DraftingCosts, *, greedy: bool) -> Learned:
        """Returns what is assumed before anything is learned, for decoding at these costs, greedily or by sampling."""
        priors = GREEDY if greedy else SAMPLING
        calibrations = AcceptanceCalibration(priors.token), AcceptanceCalibration(priors.following)
        worth = costs.time_per_token(_RATE)
        return cls(*calibrations, [_FIRST * _RATE, _FIRST], _COST_ROUNDS * worth, _COST_ROUNDS)

    def as_dict(self) -> dict[str, list[float]]:
        """Returns the numbers to be saved in a profile, by name. The guard is not saved: it is about the latest rounds."""
        saved = {"first": self.first, "worth": [self.cost, self.tokens]}
        for name, calibration in (("token", self.token), ("following", self.following)):
            saved |= {f"{name}_{counts}": numbers for counts, numbers in calibration.as_dict().items()}
        return saved

    @classmethod
    def of_dict(cls, saved: Mapping[str, Sequence[float]], *, greedy: bool) -> Learned:
        """Returns what `as_dict` returned. Raises ValueError if numbers are missing, if there are others, or if they cannot be.

        `greedy`: whether it was learned by greedy decoding.
        """
        learned = cls.prior(DraftingCosts.linear(0.0, 0.0), greedy=greedy)
        expected = learned.as_dict()
        for name in {**expected, **saved}:
            if name not in saved or name not in expected:
                raise ValueError(f"{name} is {'missing' if name in expected else 'unknown'}")
            if len(saved[name]) != len(expected[name]):
                raise ValueError(f"{name} has {len(saved[name])} numbers instead of {len(expected[name])}")
            if not all(0 <= number < math.inf for number in saved[name]):
                raise ValueError(f"{name} has a negative or infinite number")
        learned.first, (learned.cost, learned.tokens) = list(saved["first"]), saved["worth"]
        if min(learned.first[1], learned.cost, learned.tokens) <= 0 or learned.first[0] > learned.first[1]:
            raise ValueError("first or worth counts no tokens, or more accepted ones than judged ones")
        for name, calibration in (("token", learned.token), ("following", learned.following)):
            counts = {key.removeprefix(f"{name}_"): numbers for key, numbers in saved.items() if key.startswith(f"{name}_")}
            setattr(learned, name, AcceptanceCalibration.of_dict(calibration.prior, counts))
        return learned

    @property
    def worth(self) -> float:
        """What an output token is worth: the cost per output token so far, at most 1, the cost with plain decoding."""
        return min(1.0, self.cost / self.tokens)

    @property
    def first_acceptance(self) -> float:
        return self.first[0] / self.first[1]

    def add_first(self, accepted: bool) -> None:
        self.first = [_FIRST_FADING * self.first[0] + accepted, _FIRST_FADING * self.first[1] + 1]

    def add_round(self, cost: float, tokens: int) -> None:
        self.cost = _COST_FADING * self.cost + cost
        self.tokens = _COST_FADING * self.tokens + tokens

    def copy(self) -> Learned:
        return replace(
            self, token=self.token.copy(), following=self.following.copy(), first=list(self.first), guard=replace(self.guard)
        )


@dataclass(frozen=True, slots=True)
class AdaptiveInputs:
    """What a run's policy `adaptive` decides by: the costs of drafting, and what is known about the drafter.

    `learned` changes during the run. `in_parallel`: drafts are made during the target's passes (PEARL), and cost nothing.
    Runs with the same `key` share what they learn, also those whose policy decides in another process; None: this run shares
    nothing.
    """

    costs: DraftingCosts
    learned: Learned
    in_parallel: bool = False
    key: Hashable = None


# A drafted token (a level of a tree) that is not judged yet: its two scores and the probability that it is accepted.
_Step = tuple[float, float, float]


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
        self._steps: list[_Step] = []  # in PEARL those of earlier rounds too, if they are not judged yet
        self._before: float | None = None  # the following score of the drafted token before them, if there is one
        self._survival = 1.0  # probability that all drafted tokens so far are accepted
        self._tokens = 0  # drafted in this round
        self._level = 1  # tokens that one more step adds: more than one in a tree
        self._is_trial = False
        self._missed = 0  # tokens that the draft model has not read, because rounds drafted nothing

    def starts_draft(self, *, unverified: int = 0) -> bool:
        self._is_trial, self._tokens = False, 0
        del self._steps[unverified:]
        self._survival = 1.0
        for _, _, acceptance in self._steps:
            self._survival *= acceptance
        self.predictions = []
        learned = self.learned
        if learned.guard.pauses():
            self.reason = "no draft: paused" + (f", {learned.guard.left} more rounds" if learned.guard.left else "")
            return False
        if self._in_parallel:  # the first token costs nothing: the target's pass that runs now judges it
            return True
        gain = learned.first_acceptance * learned.worth * _OPTION
        cost = self._costs.next_cost(0, self._level) + self._missed_cost
        if gain <= cost:
            self.reason = f"no draft: gain {comparison(gain, '< cost', cost)}"
            self._is_trial = learned.guard.tries()
            return self._is_trial
        return True

    @property
    def _missed_cost(self) -> float:
        """The cost of the draft model's pass over the tokens that it missed: as much per token as the target's, relatively."""
        return self._missed * self._costs.draft * self._costs.verification.at(1)

    def keep_drafting(self, token: DraftedToken) -> bool:
        learned, (prior, following), known = self.learned, self._priors, token.signals.get
        read = features(known("entropy", 0.5), known("top_prob", 0.8), known("prob", 0.8))
        score, following_score = prior.score(read), following.score(read)
        acceptance = learned.token.predict(score)
        self._steps.append((score, following_score, acceptance))
        self.predictions.append(acceptance)
        self._survival *= acceptance
        self._level = token.nodes
        self._tokens += self._level
        gain = self._survival * learned.following.predict(following_score) * learned.worth * _OPTION
        cost = self._costs.next_cost(self._tokens - self._in_parallel, self._level)
        if gain <= cost:
            self.reason = f"gain {comparison(gain, '< cost', cost)}"
            return False
        if token.position < self.max_draft:
            return True
        self.reason = f"limit {self.max_draft}"
        return False

    def observe(self, drafted: int, accepted: int) -> None:
        learned, before, was_rejected = self.learned, self._before, accepted < drafted
        for position, (score, following_score, _) in enumerate(self._steps[: min(accepted + 1, drafted)]):
            is_accepted = position < accepted
            learned.token.learn(score, is_accepted)
            if before is None:
                learned.add_first(is_accepted)
            else:
                learned.following.learn(before, is_accepted)
            before = following_score
        # In PEARL the target's last logits judge a new token, if there is one; otherwise they give a token of the target's own.
        judges_new = self._in_parallel and self._tokens > 0
        self._before = before if judges_new and not was_rejected else None
        del self._steps[:drafted]  # what a rejection makes void is deleted when the next draft starts
        tokens = accepted + (was_rejected or not judges_new)
        cost = 1 + self._costs.of_draft(drafted, max(self._tokens, drafted) if not self._in_parallel else drafted - judges_new)
        if drafted:
            cost += self._missed_cost
            self._missed = 0
            learned.guard.count(cost, tokens, self._exploration, trial=self._is_trial)
        else:
            self._missed += tokens
        learned.add_round(cost, tokens)
        self._tokens = 0

    def state(self) -> Mapping[str, float]:
        return {"worth": self.learned.worth, "first_acceptance": self.learned.first_acceptance}
