"""Prompt lookup under the length policy `adaptive`: its signal, what it learns, and the choice between it and a draft model."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from random import Random

import pytest
from scripted_models import TableRunner, ids_of, scripted_run

from specgen.base.errors import SpecgenError
from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.decoding.costs.round_costs import Curve
from specgen.decoding.policy import LengthPolicy
from specgen.methods.adaptive import AUTO, Adaptive, AdaptiveInputs, HybridDrafter
from specgen.methods.first_acceptance import FirstAcceptance
from specgen.methods.learned_drafting import Learned
from specgen.methods.lookup import PromptLookupDrafter
from specgen.methods.lookup_gain import LearnedLookup, best_plan

STEPS = Curve({0: 0.0, 1: 0.3, 3: 0.3, 4: 0.7, 7: 0.7, 8: 1.0})  # a target pass gets longer in jumps
COSTS = DraftingCosts.linear(0.2, 0.02)
REPEATING = [7, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3]  # `4, 5, 6` would follow, after four equal tokens


def test_a_plan_is_the_length_of_the_largest_gain() -> None:
    rng = Random(0)
    for _ in range(50):
        learned = LearnedLookup()
        for _ in range(rng.randrange(60)):
            learned.learn(rng.randint(1, 20), rng.randrange(3), ended=rng.random() < 0.6)
        match, worth = rng.randint(1, 20), rng.uniform(0.2, 1)
        costs = DraftingCosts(0.5, rng.choice((STEPS, Curve({0: 0.0, 1: 0.05}), Curve({0: 0.0, 1: 0.4}))))
        plan = best_plan(learned, match, worth, costs, 6)
        acceptances = [learned.predict(match + position) for position in range(6)]
        values = accumulate(accumulate(acceptances, mul))  # expected accepted tokens of each length
        gains = [0.0, *(worth * value - costs.verification.at(length) for length, value in enumerate(values, 1))]
        assert plan.gain == pytest.approx(max(gains))
        assert plan.acceptances == acceptances[: gains.index(max(gains))]


class ModelStub:
    """A draft model that drafts three tokens if the policy starts a draft; without room it proposes nothing."""

    def __init__(self, *, has_room: bool = True) -> None:
        self._has_room = has_room

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        if not self._has_room:
            return Draft()
        return Draft.chain([8, 8, 8], stop_reason="model") if policy.starts_draft() else Draft(stop_reason=policy.reason)


def learned(*, lookup: float, gain: float, first: float = 0.8) -> Learned:
    """What was learned if `lookup` of the tokens after long matches agreed, and the model's drafts gained `gain`."""
    found = Learned.prior(COSTS, 0.0)
    for count in range(1000):
        agrees = count % 100 < 100 * lookup
        found.lookup.learn(4, 3 * agrees, ended=not agrees)
    found.gains, found.cost, found.tokens = [100 * gain, 100.0], 5.0, 10.0
    if first < 0.5:
        found.first = FirstAcceptance([1.0, *[0.0] * 6])
    return found


def propose(known: Learned, model: ModelStub | None, ids: list[int] = REPEATING) -> tuple[Draft, Adaptive]:
    policy = Adaptive(AUTO, AUTO, 3.0, 6, AdaptiveInputs(COSTS, known))
    return HybridDrafter(PromptLookupDrafter(3, frozenset()), model).propose(Context(ids), policy, 20), policy


def test_the_part_with_the_larger_expected_gain_drafts() -> None:
    copied, policy = propose(learned(lookup=0.97, gain=0.5), ModelStub())
    assert list(copied.tokens) == [4, 5, 6, 7, 1, 2]
    assert copied.stop_reason == "lookup: limit 6"
    assert len(policy.predictions) == 6
    assert propose(learned(lookup=0.97, gain=5.0), ModelStub())[0].stop_reason == "model"
    assert propose(learned(lookup=0.0, gain=0.1), ModelStub())[0].stop_reason == "model", "no token is likely enough"
    assert propose(learned(lookup=0.97, gain=0.5), ModelStub(), [1, 2, 3])[0].stop_reason == "model", "there is no match"


def test_prompt_lookup_drafts_where_the_model_does_not() -> None:
    small = learned(lookup=0.4, gain=5.0)
    assert propose(small, ModelStub())[0].stop_reason == "model"
    for model, first in ((None, 0.8), (ModelStub(has_room=False), 0.8), (ModelStub(), 0.01)):
        draft, _ = propose(learned(lookup=0.4, gain=5.0, first=first), model)
        assert str(draft.stop_reason).startswith("lookup: ")
    small.guard.left = 3
    assert str(propose(small, ModelStub())[0].stop_reason).startswith("lookup: ")
    draft, policy = propose(learned(lookup=0.0, gain=0.0), None)
    assert not draft.tokens
    assert policy.reason.startswith("no draft: gain 0.01 < ")


def test_the_method_needs_no_draft_model() -> None:
    greedy, target = SamplingParams(max_new_tokens=30), TableRunner(1)
    wanted = ids_of(scripted_run("ar", {}, target, None, greedy).rounds())
    rounds = list(scripted_run("adaptive", {"verify_cost": 0.01}, target, None, greedy).rounds())
    assert ids_of(rounds) == wanted
    assert any(round_.verdict.path for round_ in rounds), "prompt lookup drafts"
    with pytest.raises(SpecgenError, match="adaptive with lookup=false needs a draft model"):
        scripted_run("adaptive", {"lookup": False}, target, None, greedy)
