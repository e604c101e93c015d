"""Prompt lookup under the length policy `adaptive`: its signal, what it learns, and the choice between it and a draft model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from operator import mul
from random import Random

import pytest
from scripted_models import TableRunner, ids_of, scripted_run

from specgen.base.errors import SpecgenError
from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.decoding.policy import NO_SIGNALS, DraftedToken, LengthPolicy
from specgen.decoding.run import Run
from specgen.methods.adaptive import AUTO, Adaptive, AdaptiveInputs, HybridDrafter
from specgen.methods.first_acceptance import FirstAcceptance
from specgen.methods.learned_drafting import Learned
from specgen.methods.lookup import PromptLookupDrafter
from specgen.methods.lookup_gain import LearnedLookup, best_plan
from specgen.pair import drafting_knowledge, measurements
from specgen.pair.pair import Pair

STEPS = Curve({0: 0.0, 1: 0.3, 3: 0.3, 4: 0.7, 7: 0.7, 8: 1.0})  # a target pass gets longer in jumps
COSTS = DraftingCosts.linear(0.2, 0.02)
REPEATING = [7, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3]  # `4, 5, 6` would follow, after four equal tokens


class Recording(LengthPolicy):
    """Drafts everything, and records what it is asked and what it gets to learn."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def starts_draft(self, *, unverified: int = 0, signals: Mapping[str, float] = NO_SIGNALS, is_last: bool = True) -> bool:
        self.seen.append(signals["match_length"])
        return True

    def keep_drafting(self, token: DraftedToken) -> bool:
        self.seen.append((token.position, token["match_length"]))
        return True

    def observe_match(self, match_length: int, agreed: int, *, ended: bool) -> None:
        self.seen.append((match_length, agreed, ended))


def test_match_lengths_are_known_beforehand_and_their_tokens_compared_afterwards() -> None:
    drafter, policy = PromptLookupDrafter(2, frozenset()), Recording()
    context = Context(REPEATING)
    assert list(drafter.propose(context, policy, 2).tokens) == [4, 5]
    assert policy.seen == [4, (1, 4), (2, 5)], "four tokens are equal, though two were looked up"
    rounds = [([4, 5, 9], [(4, 2, True)]), ([7], [1, (1, 1)]), ([1, 2], [(1, 2, False), 3, (1, 3)])]
    for joined, seen in rounds:
        policy.seen.clear()
        context.extend(joined)
        drafter.propose(context, policy, 1)
        assert policy.seen == seen


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


def test_acceptance_after_matches_of_each_length_is_learned() -> None:
    learned, rng = LearnedLookup(), Random(1)
    rates = {1: 0.1, 2: 0.6, 7: 0.95}
    for length in rng.choices(list(rates), k=3000):
        agrees = rng.random() < rates[length]
        learned.learn(length, int(agrees), ended=not agrees)
    assert {length: learned.predict(length) for length in rates} == pytest.approx(rates, abs=0.06)


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


def test_rounds_of_both_parts_are_counted() -> None:
    """Prompt lookup's tokens cost no drafting, but the draft model reads them when it drafts again."""
    known = learned(lookup=0.97, gain=0.5)
    draft, policy = propose(known, ModelStub())
    policy.observe(len(draft.tokens), 2)
    assert known.lookup.guard.loss == pytest.approx(1 + 6 * 0.02 - 3)
    assert known.guard.loss == 0
    assert known.cost == pytest.approx(0.97 * 5 + 1 + 6 * 0.02)
    assert known.gains == pytest.approx([0.9 * 50, 0.9 * 100])
    known.gains = [900.0, 100.0]
    assert policy.starts_draft(signals={"match_length": 4}, is_last=False) is False
    assert policy.starts_draft()
    worth = known.worth
    policy.observe(3, 3)
    assert known.guard.loss == pytest.approx(1 + 3 * 0.22 + 3 * 0.2 * 0.02 - 4), "it reads three tokens that it missed"
    assert known.gains == pytest.approx([0.9 * 900 + 3 * worth - 3 * 0.22, 91])


def test_a_model_that_drafted_badly_is_tried_again() -> None:
    """What it gained once counts less with each draft of prompt lookup; then it is assumed to gain as much as others."""
    known = learned(lookup=0.4, gain=-1.0)
    policy = Adaptive(AUTO, AUTO, 1000, 6, AdaptiveInputs(COSTS, known))
    drafts = 0
    while drafts < 100 and policy.starts_draft(signals={"match_length": 4}, is_last=False):
        policy.observe(4, 2)
        drafts += 1
    assert 5 < drafts < 100


def test_losses_of_prompt_lookup_pause_it_alone() -> None:
    known = learned(lookup=0.97, gain=0.0)
    policy = Adaptive(AUTO, AUTO, 0.2, 6, AdaptiveInputs(COSTS, known))
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
        assert run.policy.learned.lookup.predict(4) > LearnedLookup().predict(4) + 0.1, "this target's text repeats"


def test_timed_rounds_draft_with_the_model_or_copy_a_token(pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup draft costs nothing, and whether there is a match must not change what is timed."""
    timed: list[str] = []
    table = CostTable({1: Curve({0: 0.0, 1: 1.0})})

    def time_rounds(run: Run, **_: object) -> RoundCosts:
        timed.append(type(run.drafter).__name__)
        return RoundCosts(table, table)

    monkeypatch.setattr(drafting_knowledge, "time_rounds", time_rounds)
    monkeypatch.setattr(measurements, "_stored", dict)
    shared = pair_of("llama", "near")
    for draft in (shared.draft, None):
        pair = Pair(shared.target, draft)
        pair.prepare(pair.request([1, 2, 3], "adaptive"))
        pair.prepare(pair.request([1, 2, 3], "lookup", policy="adaptive"))
    assert timed == ["ModelDrafter", *["RepeatDrafter"] * 3]
