"""The length policy `adaptive` and what it decides by: costs, calibration and guard, without any model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.cost_model.drafting_costs import DraftingCosts
from specgen.cost_model.round_costs import CostTable, Curve, RoundCosts
from specgen.decoding.acceptance_calibration import AcceptanceCalibration, features, probability
from specgen.decoding.adaptive import _OPTION, AUTO, GREEDY, SAMPLING, Adaptive, AdaptiveInputs
from specgen.decoding.drafting_guard import LONGEST_PAUSE, SHORTEST_PAUSE, DraftingGuard
from specgen.decoding.learned_drafting import Learned
from specgen.decoding.length_policy import DraftedToken

SURE, UNSURE = {"entropy": 0.05, "top_prob": 0.99, "prob": 0.99}, {"entropy": 2.5, "top_prob": 0.2, "prob": 0.2}
LIKELY = {"entropy": 0.6, "top_prob": 0.8, "prob": 0.8}
CHEAP = DraftingCosts.linear(0.05, 0.01)


def policy(costs: DraftingCosts = CHEAP, *, in_parallel: bool = False, exploration: float = 3.0, max_draft: int = 40) -> Adaptive:
    inputs = AdaptiveInputs(costs, Learned.prior(costs, 0.0), in_parallel)
    return Adaptive(AUTO, AUTO, exploration, max_draft, inputs)


def draft(made: Adaptive, *tokens: dict[str, float], unverified: int = 0) -> int:
    """The number of tokens that the policy drafts of these."""
    if not made.starts_draft(unverified=unverified):
        return 0
    steps = (DraftedToken(position, token) for position, token in enumerate(tokens, 1))
    return next((step.position for step in steps if not made.keep_drafting(step)), len(tokens))


# costs


def table(**points: float) -> CostTable:
    return CostTable({100: Curve({int(name[1:]): seconds for name, seconds in points.items()})})


def test_costs_of_measured_rounds_are_in_passes_over_one_token() -> None:
    drafting, verification = table(_0=0, _1=0.002, _4=0.006, _8=0.012), table(_1=0.010, _2=0.011, _5=0.014, _9=0.015)
    costs = DraftingCosts.of_rounds(RoundCosts(drafting, verification, signal_cost=0.0005), 100)
    assert costs.draft == pytest.approx(0.2)  # six tokens take 0.009 s, and 0.0005 s each for their signals
    assert [costs.verification.at(tokens) for tokens in (0, 1, 2, 4, 8)] == pytest.approx([0, 0.1, 0.2, 0.4, 0.5])
    assert costs.of_draft(2, 4) == pytest.approx(0.8)
    assert costs.with_values(0.5, None).of_draft(2, 4) == pytest.approx(1.4)
    assert costs.with_values(None, 0.01).of_draft(2, 4) == pytest.approx(0.44)
    only_plain = DraftingCosts.of_rounds(RoundCosts(table(_0=0), table(_1=0.01)), 2000)  # the draft could not follow
    assert (only_plain.draft, only_plain.verification.at(5)) == (0, 0)


@pytest.mark.parametrize(
    ("verification", "wanted"),
    [
        (table(_1=0.010, _2=0.015, _5=0.011, _9=0.012), [0.1, 0.1, 0.2]),  # the pass over 2 tokens was disturbed
        (table(_1=0.015, _2=0.012, _5=0.010, _9=0.012), [0, 0, 0.2]),
        (table(_2=0.010, _5=0.020, _9=0.020), [0.5, 2, 2]),  # the line through the first two gives 0.0067 for one token
        (table(_2=0.010, _3=0.022, _9=0.022), [1, 3.4, 3.4]),  # it gives less than nothing
    ],
)
def test_costs_are_positive_and_rise_with_the_tokens_whatever_was_measured(verification: CostTable, wanted: list[float]) -> None:
    drafting = table(_0=0, _1=0.009, _4=0.006, _8=0.012)
    costs = DraftingCosts.of_rounds(RoundCosts(drafting, verification), 100)
    assert [costs.verification.at(tokens) for tokens in (1, 4, 8)] == pytest.approx(wanted, abs=0.01)
    assert 0.09 < costs.draft < 0.31


def test_a_step_up_of_the_pass_is_shared_by_the_tokens_that_use_it() -> None:
    assert CHEAP.next_cost(0) == pytest.approx(0.06)
    assert CHEAP.next_cost(3, 4) == pytest.approx(0.09), "a level of four tokens"
    staircase = DraftingCosts(0.1, Curve({0: 0.0, 7: 0.0, 8: 1.0, 15: 1.0}))
    assert staircase.next_cost(0) == pytest.approx(0.1)
    assert staircase.next_cost(7) == pytest.approx((8 * 0.1 + 1) / sum(0.9**step for step in range(8)))
    assert staircase.next_cost(8) == pytest.approx(0.1)


def test_time_per_token_of_drafts_of_the_best_length() -> None:
    costs = DraftingCosts.linear(0.1, 0.02)
    assert costs.time_per_token(0.8, longest=1) == pytest.approx(1.12 / 1.8)
    assert costs.time_per_token(0.8, longest=2) == pytest.approx(1.24 / (1 + 0.8 + 0.64))
    best = min((1 + 0.12 * k) / sum(0.8**j for j in range(k + 1)) for k in range(17))
    assert costs.time_per_token(0.8) == pytest.approx(best)
    assert DraftingCosts.linear(2.0, 0.0).time_per_token(1.0) == 1, "plain decoding"


# calibration


def teach(calibration: AcceptanceCalibration, score: float, rate: float, count: int) -> None:
    """Judges tokens with this score, of which `rate` are accepted, evenly spread."""
    for number in range(count):
        calibration.learn(score, math.floor((number + 1) * rate) > math.floor(number * rate))


@pytest.mark.parametrize("prior", [GREEDY.token, GREEDY.following, SAMPLING.token, SAMPLING.following])
def test_calibration_corrects_a_wrong_prior_in_each_interval(prior: object) -> None:
    calibration = AcceptanceCalibration(prior)  # type: ignore[arg-type]
    low, high = calibration.prior.edges[0] - 0.5, calibration.prior.edges[-1] + 0.5
    assert calibration.predict(low) == pytest.approx(probability(low)), "nothing is corrected yet"
    for _ in range(200):
        teach(calibration, low, 0.9, 10)  # the prior says that these are the worst
        teach(calibration, high, 0.3, 10)
    assert calibration.predict(low) == pytest.approx(0.9, abs=0.05)
    assert calibration.predict(high) == pytest.approx(0.3, abs=0.05)


def test_calibration_generalises_to_intervals_without_tokens() -> None:
    calibration = AcceptanceCalibration(GREEDY.token)
    before = calibration.predict(1.2)
    teach(calibration, 3.0, 0.1, 100)
    assert calibration.predict(1.2) < before


def test_calibration_follows_a_change_of_the_text() -> None:
    calibration = AcceptanceCalibration(GREEDY.token)
    teach(calibration, 1.2, 0.9, 3000)
    assert calibration.predict(1.2) == pytest.approx(0.9, abs=0.02)
    teach(calibration, 1.2, 0.1, 4000)
    assert calibration.predict(1.2) < 0.3


def test_a_copy_and_a_saved_calibration_predict_the_same() -> None:
    calibration = AcceptanceCalibration(GREEDY.token)
    for score, rate in ((-3.0, 0.4), (0.3, 0.5), (5.0, 0.95)):
        teach(calibration, score, rate, 50)
    copy, saved = calibration.copy(), AcceptanceCalibration.of_dict(GREEDY.token, calibration.as_dict())
    for score in (-3.0, 0.3, 1.2, 5.0):
        assert copy.predict(score) == calibration.predict(score)
        assert saved.predict(score) == pytest.approx(calibration.predict(score), abs=0.001)
    teach(copy, 5.0, 0.0, 50)
    assert calibration.predict(5.0) > copy.predict(5.0)


# guard

ROUNDS = st.lists(st.tuples(st.floats(1.0, 5.0), st.integers(1, 6), st.booleans()), min_size=1, max_size=8)


def total_loss(guard: DraftingGuard, rounds: Sequence[tuple[float, int, bool]], count: int, budget: float) -> float:
    """What `count` rounds lose against plain decoding: each, unless drafting pauses, has the next of these costs and tokens.

    The third number of a round says whether it was expected to pay.
    """
    lost, coming = 0.0, cycle(rounds)
    for _ in range(count):
        if guard.pauses():
            continue
        cost, tokens, expected = next(coming)
        trial = not expected and guard.tries()
        if expected or trial:
            guard.count(cost, tokens, budget, trial=trial)
            lost += cost - tokens
    return lost


@settings(max_examples=150, deadline=None)
@given(rounds=ROUNDS, count=st.integers(1, 1500), budget=st.sampled_from([0.1, 1.0, 3.0, 20.0]))
def test_the_loss_is_bounded_whatever_is_accepted(rounds: list[tuple[float, int, bool]], count: int, budget: float) -> None:
    worst = max(budget, *(cost - tokens for cost, tokens, _ in rounds))
    bound = worst * (3 + math.log2(1 + count / SHORTEST_PAUSE) + count / LONGEST_PAUSE)
    assert total_loss(DraftingGuard(), rounds, count, budget) <= bound + 1e-9


@pytest.mark.parametrize(
    "rounds",
    [
        [(4.0, 1, True)],
        [(3.0, 2, False)],  # its trials give a token, and cost more than it is worth
        [(1.4, 2, False), (3.9, 1, False)],
        [(1.0, 4, True)] + [(4.0, 1, True)] * 3,
        [(1.0, 5, False)] * 2 + [(3.9, 1, False)] * 4,
    ],
)
def test_the_loss_is_bounded_in_long_texts_made_to_fool_the_guard(rounds: list[tuple[float, int, bool]]) -> None:
    count, budget = 20_000, 3.0
    bound = budget * (3 + math.log2(1 + count / SHORTEST_PAUSE) + count / LONGEST_PAUSE)
    assert total_loss(DraftingGuard(), rounds, count, budget) <= bound


def test_pauses_double_while_drafts_lose_and_halve_while_they_win() -> None:
    guard, pauses = DraftingGuard(), []
    for _ in range(8):
        guard.count(4.001, 1, 3.0, trial=False)
        pauses.append(sum(1 for _ in iter(guard.pauses, False)))
    assert pauses == [4, 8, 16, 32, 64, 128, 256, 256]
    lengths = []
    for _ in range(7):
        guard.count(2.0, 6, 3.0, trial=False)
        lengths.append(guard.pause)
    assert lengths == [128, 64, 32, 16, 8, 4, 4]
    assert not guard.pauses()


def test_drafting_returns_after_a_stretch_of_rejections() -> None:
    lost = DraftingGuard()
    lost.count(2.5, 2, 3.0, trial=True)
    assert lost.pauses(), "a trial that gives a token, and costs more than it is worth, is no success"
    guard = DraftingGuard()
    total_loss(guard, [(4.5, 1, False)], 1000, 3.0)
    assert guard.pause >= 128
    drafted = []
    for _ in range(600):
        tries = not guard.pauses() and guard.tries()
        drafted.append(tries)
        if tries:
            guard.count(1.5, 4, 3.0, trial=True)  # the text is easy now
    first = drafted.index(True)
    assert first <= LONGEST_PAUSE
    assert all(drafted[first:])


# policy


@pytest.mark.parametrize("costs", [(0.02, 0.01), (0.1, 0.02), (0.4, 0.1), (0.6, 0.05)])
@pytest.mark.parametrize("in_parallel", [False, True])
def test_it_stops_where_the_next_token_is_not_worth_its_cost(costs: tuple[float, float], in_parallel: bool) -> None:
    made = policy(DraftingCosts.linear(*costs), in_parallel=in_parallel)
    learned = made.learned
    teach(learned.token, 4.0, 0.9, 50)
    survival, verification = 1.0, costs[1]
    tokens = list(islice(cycle([SURE, SURE, UNSURE, SURE]), 60))
    length = draft(made, *tokens)
    assert 0 < length < 40
    for position, token in enumerate(tokens[:length], 1):
        known = features(token["entropy"], token["top_prob"], token["prob"])
        survival *= learned.token.predict(GREEDY.token.score(known))
        assert made.predictions[position - 1] == learned.token.predict(GREEDY.token.score(known))
        gain = survival * learned.following.predict(GREEDY.following.score(known)) * learned.worth * _OPTION
        next_cost = made._costs.draft + verification
        assert (gain > next_cost) == (position < length)
    assert made.reason.startswith("gain ")
    assert made._costs.draft == (0 if in_parallel else costs[0])


def test_the_longest_draft() -> None:
    made = policy(max_draft=3)
    assert draft(made, *[SURE] * 9) == 3
    assert made.reason == "limit 3"


def test_it_drafts_nothing_where_no_token_is_worth_its_cost() -> None:
    made = policy(DraftingCosts.linear(1.5, 0.0))
    drafted = []
    for _ in range(100):
        drafted.append(draft(made, UNSURE))
        assert drafted[-1] or made.reason.startswith("no draft: ")
        made.observe(drafted[-1], 0)
    assert 0 < sum(drafted) < 8, "few trials"
    assert made.learned.worth == 1
    assert made.starts_draft(unverified=4) is False, "also after tokens that are not verified"


def test_it_learns_from_judged_tokens_only() -> None:
    made, wanted = policy(), Learned.prior(CHEAP, 0.0)
    assert draft(made, SURE, UNSURE, SURE, SURE) >= 2
    made._steps.extend(made._steps[:1] * 3)  # five drafted tokens or more
    known = [features(*token.values()) for token in (SURE, UNSURE)]
    made.observe(len(made._steps), 1)
    for position, token in enumerate(known):
        wanted.token.learn(GREEDY.token.score(token), position == 0)
    wanted.add_first(accepted=True)
    wanted.following.learn(GREEDY.following.score(known[0]), accepted=False)
    assert (made.learned.token, made.learned.following, made.learned.first) == (wanted.token, wanted.following, wanted.first)


def test_a_draft_whose_last_token_it_did_not_see() -> None:
    """An end-of-sequence token ends a draft before the policy sees it. It costs as others do, and teaches nothing."""
    made, costs = policy(), policy().learned
    assert draft(made, SURE, SURE) == 2
    made.observe(3, 3)
    assert made.learned.token.all_judged == pytest.approx(2, abs=0.01)
    costs.add_round(1 + 3 * 0.06, 4)
    assert made.learned.worth == pytest.approx(costs.worth)


def test_rounds_without_a_draft_count_as_plain_decoding_and_teach_nothing() -> None:
    made = policy()
    before = made.learned.copy()
    made.observe(0, 0)  # nothing to propose
    before.add_round(1, 1)
    assert made.learned == before
    assert made._missed == 1


def test_in_pearl_pending_tokens_count_until_one_is_rejected() -> None:
    made = policy(in_parallel=True)
    assert draft(made, *[SURE] * 5) == 5
    predictions = made.predictions[1:]
    made.observe(1, 1)  # the target's pass judges the first new token
    assert made.learned.token.all_judged == 1
    assert draft(made, SURE, SURE, unverified=4) == 2
    assert made._survival == pytest.approx(math.prod(predictions + made.predictions))
    made.observe(5, 5)
    assert made.learned.token.all_judged == pytest.approx(6, abs=0.05)
    assert made.learned.following.all_judged == pytest.approx(5, abs=0.05), "the second draft begins after a drafted token"
    assert draft(made, SURE, SURE, SURE, unverified=1) == 3
    made.observe(2, 1)
    assert draft(made, SURE) == 1
    assert made._survival == made.predictions[0], "nothing is left of the tokens after the rejected one"


def test_in_pearl_tokens_that_were_cut_off_are_forgotten() -> None:
    made = policy(in_parallel=True)
    assert draft(made, SURE, SURE, SURE, UNSURE) == 4
    kept = made.predictions[1]
    made.observe(1, 1)
    draft(made, SURE, unverified=1)  # two of the four were cut off
    assert made._survival == pytest.approx(kept * made.predictions[0])
    assert len(made._steps) == 2


def test_in_pearl_a_pass_beside_no_draft_verifies_what_is_pending() -> None:
    """Without post-verify: the target's own token follows, and the next draft begins anew."""
    made = policy(in_parallel=True)
    draft(made, SURE, SURE, SURE)
    made.observe(1, 1)
    tokens = made.learned.tokens
    made.observe(2, 2)
    assert made.learned.tokens == pytest.approx(0.98 * tokens + 3)
    assert made.learned.token.all_judged == pytest.approx(3, abs=0.02)
    draft(made, SURE)
    assert made._survival == made.predictions[0]


def test_a_level_of_a_tree_costs_its_nodes() -> None:
    costs = DraftingCosts.linear(0.0, 0.06)
    lengths = []
    for nodes in (1, 5):
        made = policy(costs)
        assert made.starts_draft()
        steps = (DraftedToken(position, LIKELY, nodes) for position in range(1, 40))
        lengths.append(next(step.position for step in steps if not made.keep_drafting(step)))
        tokens, cost = made.learned.tokens, made.learned.cost
        made.observe(lengths[-1], 0)
        assert made.learned.tokens == pytest.approx(0.98 * tokens + 1)
        assert made.learned.cost == pytest.approx(0.98 * cost + 1 + 0.06 * nodes * lengths[-1])
    assert lengths[0] > lengths[1]
    assert not policy(DraftingCosts.linear(0.0, 0.9)).starts_draft()
    wide = policy(DraftingCosts.linear(0.0, 0.2))
    assert wide.starts_draft()
    wide.keep_drafting(DraftedToken(1, SURE, 6))
    wide.observe(1, 1)
    assert not wide.starts_draft(), "the first level of the next tree is expected to have as many nodes"


def test_it_never_reads_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal runs stay equal whatever the machine does meanwhile."""
    import time

    for name in ("perf_counter", "monotonic", "time", "process_time"):
        monkeypatch.setattr(time, name, lambda: pytest.fail("the clock was read"))
    made = policy()
    made.observe(draft(made, SURE, UNSURE), 1)
