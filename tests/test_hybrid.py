"""Prompt lookup under the length policy `adaptive`: its signal, what it learns, and the choice between it and a draft model."""

from __future__ import annotations

from random import Random

import pytest
from scripted_models import TableRunner, ids_of, scripted_run

from specgen.base.errors import SpecgenError
from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.decoding.policy import LengthPolicy
from specgen.methods.adaptive import AUTO, Adaptive, AdaptiveInputs, HybridDrafter, _copied_score
from specgen.methods.learned_drafting import Learned
from specgen.methods.lookup import PromptLookupDrafter

COSTS = DraftingCosts(0.2, 0.02)
REPEATING = [7, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3]  # `4, 5, 6` would follow, after four equal tokens


class ModelStub:
    """A draft model that drafts three tokens if the policy starts a draft; without room it proposes nothing."""

    def __init__(self, *, has_room: bool = True) -> None:
        self._has_room = has_room

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        if not self._has_room:
            return Draft()
        return Draft.chain([8, 8, 8], stop_reason="model") if policy.starts_draft() else Draft(stop_reason=policy.reason)


def adaptive(known: Learned, exploration: float = 3.0) -> Adaptive:
    return Adaptive(AUTO, AUTO, exploration, 6, AdaptiveInputs(COSTS, known))


def learned(*, lookup: float, gain: float) -> Learned:
    """What was learned if `lookup` of the tokens after long matches agreed, and the model's drafts gained `gain`."""
    found, rng = Learned.prior(COSTS), Random(0)
    policy = adaptive(found)
    for _ in range(1000):
        agrees = rng.random() < lookup
        policy.observe_match(4, 3 * agrees, ended=not agrees)
    found.gain, found.drafts, found.trust, found.cost, found.tokens = 100 * gain, 100.0, 0.2, 5.0, 10.0
    return found


def propose(known: Learned, model: ModelStub | None, ids: list[int] = REPEATING) -> tuple[Draft, Adaptive]:
    policy = adaptive(known)
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
    for model, gain in ((None, 5.0), (ModelStub(has_room=False), 5.0), (ModelStub(), -1.0)):
        assert str(propose(learned(lookup=0.4, gain=gain), model)[0].stop_reason).startswith("lookup: ")
    small.guard.left = 3
    assert str(propose(small, ModelStub())[0].stop_reason).startswith("lookup: ")
    draft, policy = propose(learned(lookup=0.0, gain=0.0), None)
    assert not draft.tokens
    assert policy.reason.startswith("no draft: gain 0.0")


def test_rounds_of_both_parts_are_counted_and_losses_of_one_pause_it_alone() -> None:
    known = learned(lookup=0.97, gain=0.5)
    draft, policy = propose(known, ModelStub())
    policy.observe(len(draft.tokens), 2)
    assert known.lookup_guard.loss == pytest.approx(1 + 6 * 0.02 - 3)
    assert known.guard.loss == 0
    assert known.cost == pytest.approx(0.97 * 5 + 1 + 6 * 0.02)
    assert (known.gain, known.drafts) == pytest.approx((0.98 * 50, 0.98 * 100))
    assert policy.starts_draft()
    worth = known.worth
    policy.observe(3, 3)
    assert known.guard.loss == pytest.approx(1 + 3 * 0.22 - 4)
    assert known.gain == pytest.approx(0.97 * 49 + 3 * worth - 3 * 0.22)
    policy = adaptive(learned(lookup=0.97, gain=0.0), exploration=0.2)
    for _ in range(2):
        assert policy.starts_draft(signals={"match_length": 4}, is_last=False)
        policy.observe(6, 0)
    assert policy.starts_draft(signals={"match_length": 4}, is_last=False) is False
    assert policy.reason.startswith("no draft: paused")
    assert policy.starts_draft()


def test_the_method_needs_no_draft_model() -> None:
    greedy, target = SamplingParams(max_new_tokens=30), TableRunner(1)
    wanted = ids_of(scripted_run("ar", {}, target, None, greedy).rounds())
    rounds = list(scripted_run("adaptive", {"verify_cost": 0.01}, target, None, greedy).rounds())
    assert ids_of(rounds) == wanted
    assert any(round_.verdict.path for round_ in rounds), "prompt lookup drafts"
    with pytest.raises(SpecgenError, match="adaptive with lookup=false needs a draft model"):
        scripted_run("adaptive", {"lookup": False}, target, None, greedy)


def test_matches_teach_whichever_part_drafts() -> None:
    """Each match is compared with the text that follows it, also if the model drafted or nothing was drafted."""
    target = TableRunner(1)
    for settings in ({"verify_cost": 0.01}, {"verify_cost": 99}):
        run = scripted_run("adaptive", settings, target, TableRunner(2), SamplingParams(max_new_tokens=60))
        assert len(list(run.rounds())) > 10
        assert isinstance(run.policy, Adaptive)
        score = _copied_score(4)
        assert run.policy.learned.lookup.predict(score) > Learned.prior(COSTS).lookup.predict(score) + 0.1, "the text repeats"
