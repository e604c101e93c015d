"""The length policy `adaptive`: drafts as long as the next token is expected to be worth more than it costs. Imports no torch.

It is an optimal stopping rule (SpecDec++, Huang et al. 2024, section 4, proves that the best rule is a threshold on the
probability that a drafted token was rejected). After the tokens drafted so far, another one is drafted while

    P(all so far are accepted) x (expected acceptance of the next) x worth > its cost of drafting + its cost of verification

The worth of a token is the run's cost per output token, because a drafted token that is accepted saves that much. All costs are
in units of a target pass over one token (`DraftingCosts`); the policy never reads the clock, so that equal runs stay equal.
Prompt lookup drafts by the same rule; where a draft model follows, only if it is expected to gain more (`lookup_gain`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from specgen.base.settings import Setting, Settings, Value
from specgen.base.types import Context, Draft
from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.decoding.policy import DRAFT_SIGNALS, MATCH_LENGTH, NO_SIGNALS, DraftedToken, LengthPolicy, comparison
from specgen.methods.acceptance_calibration import features
from specgen.methods.learned_drafting import OPTION, Learned
from specgen.methods.lookup import PromptLookupDrafter, lookup_drafter, ngram_setting
from specgen.methods.lookup_gain import LookupPlan, best_plan
from specgen.methods.method import ADAPTIVE, DRAFT_MODEL, Grid, Method
from specgen.methods.sd import model_drafter

if TYPE_CHECKING:
    from specgen.decoding.drafting import Drafter, Setup

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class AdaptiveInputs:
    """What a run's policy `adaptive` decides by: the costs of drafting, and what is known about the drafter.

    `learned` changes during the run. `in_parallel`: drafts are made during the target's passes (PEARL), and cost only what
    `slowdown` says: by how many target passes a drafted token makes the target's pass longer.
    Runs with the same `key` share what they learn, also those whose policy decides in another process; None: this run shares
    nothing.
    """

    costs: DraftingCosts
    learned: Learned
    in_parallel: bool = False
    key: Hashable = None
    slowdown: float = 0.0


# A drafted token (a level of a tree) that is not judged yet: its two scores and the probability that it is accepted.
_Step = tuple[float, float, float]


class Adaptive(LengthPolicy):
    """Drafts another token while it is expected to be worth more than it costs; drafts nothing where no draft is.

    `inputs` are the costs on this machine and what is known about the drafter; the settings `draft_cost` and `verify_cost`
    replace the costs. `predictions` are the acceptance probabilities that were predicted for the tokens of the last draft.
    A token with the signal `match_length` is prompt lookup's; others are a model's.
    """

    name = ADAPTIVE
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
        self._costs = inputs.costs.with_values(inputs.slowdown if inputs.in_parallel else drafting, verification)
        self._exploration, self.max_draft = exploration, max_draft
        priors = self.learned.token.prior, self.learned.following.prior
        self._weights = [(prior.bias, *prior.weights) for prior in priors]
        self.signals = self.preferred_signals
        self.predictions: list[float] = []
        self._steps: list[_Step] = []  # in PEARL those of earlier rounds too, if they are not judged yet
        self._before: float | None = None  # the following score of the drafted token before them, if there is one
        self._survival = 1.0  # probability that all drafted tokens so far are accepted
        self._tokens = 0  # drafted in this round
        self._level = self._first_level = 1  # tokens that one more step adds, and a draft's first one: several in a tree
        self._missed = 0  # tokens that the draft model has not read, because rounds drafted nothing or copied
        self._plan: LookupPlan | None = None  # of this round, if prompt lookup drafts

    def starts_draft(self, *, unverified: int = 0, signals: Mapping[str, float] = NO_SIGNALS, is_last: bool = True) -> bool:
        self._tokens, self._plan, self.predictions = 0, None, []
        if MATCH_LENGTH in signals:
            return self._starts_lookup(int(signals[MATCH_LENGTH]), 0.0 if is_last else self._model_gain)
        del self._steps[unverified:]
        self._survival = 1.0
        for _, _, acceptance in self._steps:
            self._survival *= acceptance
        guard = self.learned.guard
        if guard.pauses():
            self.reason = _paused(guard.left)
            return False
        if self._in_parallel:  # the first token costs nothing: the target's pass that runs now judges it
            return True
        gain, cost = self.learned.start_gain, self._costs.next_cost(0, self._first_level)
        if gain <= cost:
            self.reason = f"no draft: gain {comparison(gain, '< cost', cost)}"
        return gain > cost

    def _starts_lookup(self, match_length: int, other_gain: float) -> bool:
        """Whether prompt lookup drafts: only if this is expected to gain more than `other_gain`, in units of a target pass."""
        lookup = self.learned.lookup
        if lookup.guard.pauses():
            self.reason = _paused(lookup.guard.left)
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
        drafts = not learned.guard.left and learned.start_gain > self._costs.next_cost(0, self._first_level)
        return max(0.0, learned.mean_gain) if drafts else 0.0

    def keep_drafting(self, token: DraftedToken) -> bool:
        if self._plan is not None:
            self.predictions.append(self._plan.acceptances[token.position - 1])
            self.reason = self._plan.reason
            return token.position < len(self._plan.acceptances)
        learned, known = self.learned, token.signals.get
        x1, x2, x3, x4 = features(known("entropy", 0.5), known("top_prob", 0.8), known("prob", 0.8))
        (t0, t1, t2, t3, t4), (f0, f1, f2, f3, f4) = self._weights  # written out, because this runs for every token
        score = t0 + t1 * x1 + t2 * x2 + t3 * x3 + t4 * x4
        following_score = f0 + f1 * x1 + f2 * x2 + f3 * x3 + f4 * x4
        acceptance = learned.token.predict(score)
        self._steps.append((score, following_score, acceptance))
        self.predictions.append(acceptance)
        self._survival *= acceptance
        self._level = token.nodes
        if not self._tokens:
            self._first_level = self._level
        self._tokens += self._level
        gain = self._survival * learned.following.predict(following_score) * learned.worth * OPTION
        cost = self._costs.next_cost(self._tokens - self._in_parallel, self._level)
        if gain <= cost:
            self.reason = f"gain {comparison(gain, '< cost', cost)}"
            return False
        if token.position < self.max_draft:
            return True
        self.reason = f"limit {self.max_draft}"
        return False

    def observe(self, drafted: int, accepted: int) -> None:
        if self._plan is not None:
            self._observe_lookup(drafted, accepted)
            return
        learned, before, was_rejected = self.learned, self._before, accepted < drafted
        for position, (score, following_score, _) in enumerate(self._steps[: min(accepted + 1, drafted)]):
            is_accepted = position < accepted
            learned.token.learn(score, is_accepted)
            if before is not None:
                learned.following.learn(before, is_accepted)
            before = following_score
        # In PEARL the target's last logits judge a new token, if there is one; otherwise they give a token of the target's own.
        judges_new = self._in_parallel and self._tokens > 0
        self._before = before if judges_new and not was_rejected else None
        levels = drafted if self._in_parallel or not drafted else max(drafted, len(self._steps))  # a tree may leave levels out
        del self._steps[:drafted]  # what a rejection makes void is deleted when the next draft starts
        tokens = accepted + (was_rejected or not judges_new)
        cost = self._costs.of_draft(levels, max(self._tokens, drafted) if not self._in_parallel else drafted - judges_new)
        if drafted:
            learned.add_draft(accepted, cost, self._costs.next_cost(0, self._first_level))
            missed = self._missed * self._costs.draft * self._costs.verification.at(1)  # per token as the target's, relatively
            cost += min(missed, self._exploration / 2)  # after a long pause it must not cause the next one by itself
            self._missed = 0
            learned.guard.count(1 + cost, tokens, self._exploration)
        else:
            self._missed += tokens
        learned.first.add(accepted > 0 if drafted else None)
        learned.add_round(1 + cost, tokens)
        self._tokens = 0

    def _observe_lookup(self, drafted: int, accepted: int) -> None:
        """Counts a round that prompt lookup drafted. What it learns from its tokens comes with `observe_match`."""
        learned, tokens, cost = self.learned, accepted + 1, 1 + self._costs.of_draft(0, drafted)
        self._missed += tokens
        learned.fade_gains()
        learned.lookup.guard.count(cost, tokens, self._exploration)
        learned.add_round(cost, tokens)
        self._plan = None

    def observe_match(self, match_length: int, agreed: int, *, ended: bool) -> None:
        self.learned.lookup.learn(match_length, agreed, ended=ended)

    def state(self) -> Mapping[str, float]:
        return {"worth": self.learned.worth, "first_acceptance": self.learned.first.mean}


def _paused(left: int) -> str:
    return "no draft: paused" + (f", {left} more rounds" if left else "")


class HybridDrafter:
    """Asks the length policy in each round whether to copy text of the context, and if not, whether to run the draft model.

    The policy compares what both are expected to gain (`adaptive` does). `model` is None if there is no draft model. The reason
    why a draft of prompt lookup ended begins with `lookup:`.
    """

    def __init__(self, lookup: PromptLookupDrafter, model: Drafter | None) -> None:
        self._lookup, self._model = lookup, model

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        copied = self._lookup.propose(context, policy, limit, is_last=self._model is None)
        if self._model is not None and not copied.tokens:
            drafted = self._model.propose(context, policy, limit)
            if drafted.stop_reason is not None:
                return drafted
            copied = self._lookup.propose(context, policy, limit)  # the draft model has no room for this context
        return replace(copied, stop_reason=f"lookup: {copied.stop_reason}") if copied.tokens else copied


def hybrid_drafter(setup: Setup, settings: Settings) -> Drafter:
    """Prompt lookup or the draft model, whichever is expected to gain more; only one of them without a draft model or lookup."""
    model = None if setup.draft is None else model_drafter(setup, settings)
    if settings.values["lookup"]:
        return HybridDrafter(lookup_drafter(setup, settings), model)
    assert model is not None
    return model


ADAPTIVE_GRID: Grid = {"policy": (ADAPTIVE,)}  # for other methods
ADAPTIVE_METHOD = Method(
    ADAPTIVE,
    "optimal stopping; SpecDec++, Huang et al. 2024",
    DRAFT_MODEL,
    hybrid_drafter,
    policy=ADAPTIVE,
    signals=DRAFT_SIGNALS | {MATCH_LENGTH},
    settings={"lookup": Setting(True, "also draft by prompt lookup, where this gains more"), **ngram_setting(5)},
    drafts_without_model=True,
    drafts="model",
    recorded=True,
)
