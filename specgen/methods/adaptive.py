"""The length policy `adaptive`: drafts as long as the next token is expected to be worth more than
it costs. Imports no torch.

It is an optimal stopping rule (SpecDec++, Huang et al. 2024, section 4, proves that the best rule
is a threshold on the probability that a drafted token was rejected). After the tokens drafted so
far, another one is drafted while

    P(all so far are accepted) x (expected acceptance of the next) x worth
        > its cost of drafting + its cost of verification

The worth of a token is the run's cost per output token, because a drafted token that is accepted
saves that much. All costs are in units of a target pass over one token (`DraftingCosts`). If a
drafter computes all tokens of a draft in one pass, this pass counts only in the decision whether to
draft at all. Where its length can be chosen, it has as many tokens as are worth their costs by what
was accepted of earlier ones at the same positions. Costs are learned from the times of the run's
own rounds. In a run that draws tokens with a seed they stay what they were at the beginning, so
that equal runs give equal tokens. Prompt lookup drafts by the same rule; where a draft model
follows, only if prompt lookup is expected to gain more.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from specgen.base.errors import SpecgenError
from specgen.base.part_kinds import DEFAULT_PART, MTP
from specgen.base.settings import Setting, Value
from specgen.decoding.policy_base import (
    DRAFT_SIGNALS,
    MATCH_LENGTH,
    NO_SIGNALS,
    DraftedToken,
    LengthPolicy,
    comparison,
)
from specgen.methods.base import (
    ADAPTIVE,
    DraftModelMethod,
    Loading,
    Tuning,
    make_run,
    make_setup,
)
from specgen.methods.copying import LONGEST_NGRAM, OFF, copy_setting
from specgen.methods.drafting_knowledge import AUTO
from specgen.methods.learned_drafting import OPTION, AdaptiveInputs, DraftingGuard
from specgen.methods.lookup import ngram_setting
from specgen.methods.model_drafts import model_drafter
from specgen.methods.readiness import KnownModels, Readiness

if TYPE_CHECKING:
    from specgen.decoding.drafting import Drafter
    from specgen.decoding.run import Run
    from specgen.methods.base import Request
    from specgen.models.models import Models

# prompt lookup drafts no token that is worth less than this, even if verification costs nothing
_UNLIKELY = 0.01
# The score (log odds of acceptance) of a drafted token, and that of the token after it: each is a
# constant and the weights of `features`, to which the temperature times further ones is added. The
# first are fitted to greedy drafts of the bundled draft model, of the exit layer and of a near copy
# of the target, on half of the prompts that `compare` takes from `examples.yaml` and on those for
# tuning; the others to drafts of the first two at temperatures 0.3, 0.7 and 1, on the same half.
_TOKEN = (-0.06, 1.57, 0.91, 0.37)
_FOLLOWING = (1.27, 0.81, 0.12, 0.30)
_TOKEN_BY_TEMPERATURE = (-0.14, -1.82, -0.16, -1.10)
_FOLLOWING_BY_TEMPERATURE = (1.67, -0.56, -0.28, -1.50)
_HIGHEST_TEMPERATURE = 1.0  # a higher one counts as this
# probabilities are kept between these
_SMALLEST = 1e-3
_LARGEST = 1 - 1e-3


Weights = tuple[float, float, float, float]


def features(entropy: float, top_prob: float) -> tuple[float, float, float]:
    """Returns the numbers from which a drafted token's acceptance is predicted: ln p, -ln(1 - p)
    and sqrt(H).

    p is the largest probability of the draft model's distribution and H its entropy (nats), at
    temperature 1 and without penalties. p is kept between 0.001 and 0.999. The probability of the
    token itself adds nothing, in sampling either.
    """
    p = min(max(top_prob, _SMALLEST), _LARGEST)
    return math.log(p), -math.log(1 - p), math.sqrt(max(entropy, 0.0))


def weights_at(temperature: float, greedy: Weights, by_temperature: Weights) -> Weights:
    """Returns a constant and the weights of `features` for a score at a `temperature`, 0 in greedy
    decoding: the `greedy` ones, and for each unit of temperature those `by_temperature`."""
    share = min(temperature, _HIGHEST_TEMPERATURE)
    constant, first, second, third = (
        own + share * change for own, change in zip(greedy, by_temperature, strict=True)
    )
    return constant, first, second, third


# A drafted token (a level of a tree) that is not judged yet: its two scores and the probability
# that it is accepted.
_Step = tuple[float, float, float]


class Adaptive(LengthPolicy):
    """Drafts another token while its expected worth is above its cost, and drafts nothing if that
    holds for no token.

    `inputs` has the costs on this machine and what was learned about the drafter; values of the
    settings `draft_cost` and `verify_cost` other than `auto` replace the costs. `predictions` are
    the acceptance probabilities that were predicted for the tokens of the last draft. A token with
    the signal `match_length` is treated as copied by prompt lookup, any other token as drafted by a
    model.
    """

    name = ADAPTIVE
    reads_costs = True
    learns_from_tokens = True
    decides_copies = True
    unmeasured: ClassVar = {"draft_cost": 0, "verify_cost": 0}
    source = "optimal stopping by cost; SpecDec++, Huang et al. 2024, section 4"
    preferred_signals = frozenset({"entropy", "top_prob"})
    settings: ClassVar = {
        "draft_cost": Setting(
            AUTO,
            "cost of a drafted token in target passes; auto: measured",
            0,
            100,
            (AUTO,),
            fractional=True,
        ),
        "verify_cost": Setting(
            AUTO, "cost of verifying one more token, likewise", 0, 100, (AUTO,), fractional=True
        ),
        "exploration": Setting(
            6.0, "target passes that drafting may lose before it pauses", 0.1, 1000
        ),
        "max_draft": Setting(40, "longest draft", 1, 1000),
    }

    def __init__(
        self,
        draft_cost: Value,
        verify_cost: Value,
        exploration: float,
        max_draft: int,
        inputs: AdaptiveInputs,
    ) -> None:
        self._in_parallel = inputs.in_parallel
        self._sizes_blocks = inputs.sizes_blocks
        # what replaces the costs
        self._draft_cost = None if draft_cost == AUTO else float(draft_cost)
        if inputs.in_parallel:
            self._draft_cost = 0.0
        self._verify_cost = None if verify_cost == AUTO else float(verify_cost)
        self._costs = inputs.costs.with_values(self._draft_cost, self._verify_cost)
        self._timed = inputs.timed
        self._timed_costs = inputs.costs  # those that `_costs` were made from
        self.learned = inputs.learned
        self._key = inputs.key
        self._token_weights = weights_at(inputs.temperature, _TOKEN, _TOKEN_BY_TEMPERATURE)
        self._following_weights = weights_at(
            inputs.temperature, _FOLLOWING, _FOLLOWING_BY_TEMPERATURE
        )
        self._exploration = exploration
        self.max_draft = max_draft
        self.signals = self.preferred_signals
        self.predictions: list[float] = []
        # the drafted tokens that are not judged yet; in PEARL also those of earlier rounds
        self._steps: list[_Step] = []
        # the `_FOLLOWING` score of the drafted token before these, None if there is none
        self._before: float | None = None
        self._survival = 1.0  # probability that all drafted tokens so far are accepted
        self._tokens = 0  # drafted in this round
        # acceptances of the tokens to copy, None unless prompt lookup drafts in this round
        self._copied: list[float] | None = None

    def starts_draft(
        self,
        *,
        unverified: int = 0,
        signals: Mapping[str, float] = NO_SIGNALS,
        is_last: bool = True,
    ) -> bool:
        self._tokens = 0
        self._copied = None
        self.predictions = []
        learned = self.learned
        if MATCH_LENGTH in signals:
            other = 0.0
            if not (is_last or learned.guard.left):
                other = max(0.0, self._unless_too_expensive(learned.mean_gain))
            return not self._pauses(learned.lookup_guard) and self._copies(
                int(signals[MATCH_LENGTH]), other, is_last=is_last
            )
        del self._steps[unverified:]
        self._survival = math.prod(acceptance for _, _, acceptance in self._steps)
        if self._pauses(learned.guard):
            return False
        if self._sizes_blocks:
            cost = self._costs.of_further(1, 1)
            self.block_levels = learned.levels.longest(learned.worth, cost, self.max_draft)
        # in PEARL the first token costs nothing: the pass that runs now judges it
        if self._in_parallel:
            return True
        gain = self._unless_too_expensive(learned.highest_gain)
        if gain > 0:
            return True
        self.reason = f"no draft: gain {comparison(gain, '<', 0.0)}"
        return False

    def _unless_too_expensive(self, gain: float) -> float:
        """Returns the `gain` that is expected of a draft of the model; a negative one if a token
        costs more than it is worth."""
        surplus = self.learned.worth - self._costs.of_further(1, 1)
        is_trial = self._timed is not None and self._timed.is_trial
        return gain if surplus > 0 or is_trial else surplus

    def _pauses(self, guard: DraftingGuard) -> bool:
        if not guard.pauses():
            return False
        self.reason = "no draft: paused" + (f", {guard.left} more rounds" if guard.left else "")
        return True

    def _copies(self, match_length: int, other_gain: float, *, is_last: bool) -> bool:
        """Whether prompt lookup drafts: only if this is expected to gain more than `other_gain`, in
        units of a target pass. If not, `reason` says why if it `is_last`; otherwise the next
        drafter gives a reason.

        The copied tokens cost nothing to draft, and the acceptance of each is predicted before:
        from the number of tokens before it that equal those before the token that it copies.
        """
        learned = self.learned
        copied = list[float]()
        gain = -self._costs.verify_start
        survival = 1.0
        cost = self._costs.verify
        least = max(cost, _UNLIKELY)
        worth = 0.0
        for acceptance in islice(learned.lookup.of_matches(match_length), self.max_draft):
            survival *= acceptance
            worth = survival * learned.worth
            if worth <= least:  # each token after it is worth less
                break
            copied.append(acceptance)
            gain += worth - cost

        is_copied = gain > other_gain
        if is_copied or is_last:
            self.reason = f"limit {self.max_draft}"
            if worth <= least:
                self.reason = f"gain {comparison(worth, '< cost', cost)}"
        if is_copied:
            self._copied = self.predictions = copied
            return True
        if is_last:
            self.reason = f"no draft: {self.reason}"
        return False

    def keep_drafting(self, token: DraftedToken) -> bool:
        if self._copied is not None:
            return token.position < len(self._copied)
        learned = self.learned
        signal = token.signals.get
        x1, x2, x3 = features(signal("entropy", 0.5), signal("top_prob", 0.8))
        # written out, because this runs for every token
        (t0, t1, t2, t3), (f0, f1, f2, f3) = self._token_weights, self._following_weights
        score = t0 + t1 * x1 + t2 * x2 + t3 * x3
        following_score = f0 + f1 * x1 + f2 * x2 + f3 * x3
        acceptance = learned.token.predict(score)
        self._steps.append((score, following_score, acceptance))
        self.predictions.append(acceptance)
        self._survival *= acceptance
        self._tokens += token.nodes
        gain = self._survival * learned.following.predict(following_score) * learned.worth * OPTION
        cost = self._costs.of_further(1, token.nodes)
        if gain <= cost:
            self.reason = f"gain {comparison(gain, '< cost', cost)}"
            return False
        return self._below(self.block_levels or self.max_draft, token)

    def observe(self, drafted: int, accepted: int) -> None:
        if self._copied is not None:
            self._observe_copied(drafted, accepted)
            return
        learned = self.learned
        was_rejected = accepted < drafted

        before = self._before
        for position, (score, following_score, _) in enumerate(
            self._steps[: min(accepted + 1, drafted)]
        ):
            is_accepted = position < accepted
            learned.token.learn(score, is_accepted)
            if before is not None:
                learned.following.learn(before, is_accepted)
            before = following_score

        # In PEARL the target's last logits judge a new token, if there is one; otherwise they give
        # a token of the target's own.
        judges_new = self._in_parallel and not self.in_turn and self._tokens > 0
        if self._sizes_blocks and drafted:
            learned.levels.learn(drafted, accepted)
        self._before = before if judges_new and not was_rejected else None
        if self._in_parallel:
            cost = self._costs.of_draft(drafted, drafted - judges_new)
        else:
            # a tree may leave levels out that were computed
            levels = max(drafted, len(self._steps)) if drafted else 0
            cost = self._costs.of_draft(levels, max(self._tokens, drafted))
        # after a rejected token, those that PEARL has drafted since are discarded too
        del self._steps[: None if was_rejected else drafted]

        tokens = accepted + (was_rejected or not judges_new)
        if drafted:
            learned.add_draft(accepted, cost)
            learned.guard.count(1 + cost, tokens, self._exploration)
        else:
            learned.add_idle()
        learned.add_round(1 + cost, tokens)
        self._tokens = 0

    def _observe_copied(self, drafted: int, accepted: int) -> None:
        """Counts a round in which prompt lookup drafted. What is learned of acceptance comes with
        `observe_match`."""
        learned = self.learned
        cost = 1 + self._costs.of_draft(0, drafted)
        learned.lookup_guard.count(cost, accepted + 1, self._exploration)
        learned.add_idle()
        learned.add_round(cost, accepted + 1)
        self._copied = None

    def observe_match(self, match_length: int, agreed: int, *, ended: bool) -> None:
        self.learned.lookup.learn_match(match_length, agreed, ended=ended)

    def observe_seconds(
        self, levels: int, drafting: float, tokens: int, verification: float
    ) -> None:
        if self._timed is not None:
            self._timed.add(levels, drafting, tokens, verification)
            if self._timed.costs is not self._timed_costs:
                self._timed_costs = self._timed.costs
                self._costs = self._timed_costs.with_values(self._draft_cost, self._verify_cost)
            if self._timed.is_lowered:  # the gains of drafts were computed with the higher costs
                self.learned.forget_gains()

    def share(self, learned: dict[Hashable, Any]) -> None:
        if self._key is not None:
            self.learned = learned.setdefault(self._key, self.learned)

    def state(self) -> Mapping[str, float]:
        return {"worth": self.learned.worth, "gain": self.learned.highest_gain}


class AdaptiveMethod(DraftModelMethod):
    """Drafts by prompt lookup or with a model, whichever is expected to gain more in a round.

    The model is the draft model, or without one the drafting layers in the target's own files.
    With neither, prompt lookup drafts alone.
    """

    name = ADAPTIVE
    paper = "optimal stopping; SpecDec++, Huang et al. 2024"
    policy = ADAPTIVE
    needed_part = ""
    drafts_without_model = True
    signals = DRAFT_SIGNALS | {MATCH_LENGTH}
    settings: ClassVar = {
        **copy_setting(AUTO, "where this gains more"),
        **ngram_setting(LONGEST_NGRAM),
    }
    older_settings: ClassVar = {"lookup": ("copy", {True: AUTO, False: OFF})}
    loading: ClassVar = Loading("here", find=True)
    tuning = Tuning("model", recorded=True)

    def start(self, models: Models, request: Request) -> Run:
        self.check_draft(models, request.settings)
        runners = models.with_draft_model()
        if runners is None and models.has_part(MTP):
            runners = models.with_part(MTP, DEFAULT_PART)
        if runners is None:
            runners = models.plain()
        if runners.draft is None and request.settings.values["copy"] == OFF:
            raise self.without_part(None)

        setup = make_setup(models, request, runners)
        drafter: Drafter | None = None
        if setup.draft is not None:
            drafter = model_drafter(setup, request.settings)
        return make_run(models, request, setup, drafter)

    def check(self, models: KnownModels) -> Readiness:
        if models.draft is None:
            return Readiness(True, "needs no draft model")
        return super().check(models)

    def drafting_remark(self, models: Models) -> str:
        if models.draft is not None:
            return ""
        return f"{MTP} drafts" if models.has_part(MTP) else "no draft model"

    def without_part(self, target: str | None) -> SpecgenError:
        message = f"{self.name} with copy=off needs a draft model, and there is none"
        return SpecgenError(message, "Name one with --draft, or take copy=auto")
