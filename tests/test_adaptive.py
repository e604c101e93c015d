"""The length policy `adaptive` and the costs that it decides by, without any model."""

from __future__ import annotations

import math
from collections import Counter
from itertools import cycle, islice

import pytest

from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.decoding.policy import DraftedToken
from specgen.methods.acceptance_calibration import AcceptanceCalibration, features
from specgen.methods.adaptive import AUTO, Adaptive, AdaptiveInputs
from specgen.methods.learned_drafting import OPTION, Learned

SURE, UNSURE = {"entropy": 0.05, "top_prob": 0.99, "prob": 0.99}, {"entropy": 2.5, "top_prob": 0.2, "prob": 0.2}
LIKELY = {"entropy": 0.6, "top_prob": 0.8, "prob": 0.8}
CHEAP = DraftingCosts.linear(0.05, 0.01)
TOKEN, FOLLOWING = (known.prior for known in (Learned.prior(CHEAP, 0.0).token, Learned.prior(CHEAP, 0.0).following))


def policy(costs: DraftingCosts = CHEAP, *, in_parallel: bool = False, exploration: float = 3.0, max_draft: int = 40) -> Adaptive:
    inputs = AdaptiveInputs(costs, Learned.prior(costs, 0.0), in_parallel)
    return Adaptive(AUTO, AUTO, exploration, max_draft, inputs)


def draft(made: Adaptive, *tokens: dict[str, float], unverified: int = 0) -> int:
    """The number of tokens that the policy drafts of these."""
    if not made.starts_draft(unverified=unverified):
        return 0
    steps = (DraftedToken(position, token) for position, token in enumerate(tokens, 1))
    return next((step.position for step in steps if not made.keep_drafting(step)), len(tokens))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """The number of tokens that each calibration has learned from, by its `id`."""
    counts, learn = Counter[int](), AcceptanceCalibration.learn

    def counted(self: AcceptanceCalibration, score: float, accepted: bool) -> None:
        counts[id(self)] += 1
        learn(self, score, accepted)

    monkeypatch.setattr(AcceptanceCalibration, "learn", counted)
    return counts


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


# policy


@pytest.mark.parametrize("costs", [(0.02, 0.01), (0.1, 0.02), (0.4, 0.1), (0.6, 0.05)])
@pytest.mark.parametrize("in_parallel", [False, True])
def test_it_stops_where_the_next_token_is_not_worth_its_cost(costs: tuple[float, float], in_parallel: bool) -> None:
    made = policy(DraftingCosts.linear(*costs), in_parallel=in_parallel)
    learned = made.learned
    for number in range(50):
        learned.token.learn(4.0, number % 10 > 0)
    survival, verification = 1.0, costs[1]
    tokens = list(islice(cycle([SURE, SURE, UNSURE, SURE]), 60))
    length = draft(made, *tokens)
    assert 0 < length < 40
    for position, token in enumerate(tokens[:length], 1):
        known = features(token["entropy"], token["top_prob"], token["prob"])
        survival *= learned.token.predict(TOKEN.score(known))
        assert made.predictions[position - 1] == learned.token.predict(TOKEN.score(known))
        gain = survival * learned.following.predict(FOLLOWING.score(known)) * learned.worth * OPTION
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
    for unverified in (0, 0, 4):
        assert made.starts_draft(unverified=unverified) is False
        assert made.reason.startswith("no draft: gain ")
        made.observe(0, 0)
    assert made.learned.worth == 1


def test_drafts_that_are_rejected_get_rare_and_return_when_they_are_accepted() -> None:
    made, drafted = policy(DraftingCosts.linear(0.4, 0.0), exploration=1000), []
    for _ in range(400):
        drafted.append(draft(made, LIKELY, LIKELY))
        assert drafted[-1] or made.reason.startswith("no draft: gain ")
        made.observe(drafted[-1], 0)
    trials = [number for number, length in enumerate(drafted) if length]
    assert 5 < len(trials) < 30
    assert trials[-1] - trials[-2] > 30
    for _ in range(100):
        drafted.append(draft(made, SURE, SURE))
        made.observe(drafted[-1], drafted[-1])
    assert all(drafted[-50:])


def test_drafting_pauses_after_losses() -> None:
    made = policy(DraftingCosts.linear(0.4, 0.0), exploration=0.5)
    lengths, reasons = [], []
    for _ in range(6):
        lengths.append(draft(made, LIKELY, LIKELY))
        reasons.append(made.reason)
        made.observe(lengths[-1], 0)
    assert [length > 0 for length in lengths] == [True, False, False, False, False, True]
    assert reasons[1:5] == [*(f"no draft: paused, {left} more rounds" for left in (3, 2, 1)), "no draft: paused"]


def test_it_learns_from_judged_tokens_only() -> None:
    made, wanted = policy(), Learned.prior(CHEAP, 0.0)
    assert draft(made, SURE, UNSURE, SURE, SURE) >= 2
    made._steps.extend(made._steps[:1] * 3)  # five drafted tokens or more
    known = [features(*token.values()) for token in (SURE, UNSURE)]
    made.observe(len(made._steps), 1)
    for position, token in enumerate(known):
        wanted.token.learn(TOKEN.score(token), position == 0)
    wanted.first.add(accepted=True)
    wanted.following.learn(FOLLOWING.score(known[0]), accepted=False)
    assert (made.learned.token, made.learned.following, made.learned.first) == (wanted.token, wanted.following, wanted.first)


def test_a_draft_whose_last_token_it_did_not_see(judged: Counter[int]) -> None:
    """An end-of-sequence token ends a draft before the policy sees it. It costs as others do, and teaches nothing."""
    made, costs = policy(), policy().learned
    assert draft(made, SURE, SURE) == 2
    made.observe(3, 3)
    assert judged[id(made.learned.token)] == 2
    costs.add_round(1 + 3 * 0.06, 4)
    assert made.learned.worth == pytest.approx(costs.worth)


def test_rounds_without_a_draft_count_as_plain_decoding_and_teach_nothing() -> None:
    made = policy()
    before = made.learned.copy()
    made.observe(0, 0)  # nothing to propose
    before.add_round(1, 1)
    before.first.add(None)
    assert made.learned == before
    assert made._missed == 1


def test_in_pearl_pending_tokens_count_until_one_is_rejected(judged: Counter[int]) -> None:
    made = policy(in_parallel=True)
    assert draft(made, *[SURE] * 5) == 5
    predictions = made.predictions[1:]
    made.observe(1, 1)  # the target's pass judges the first new token
    assert judged[id(made.learned.token)] == 1
    assert draft(made, SURE, SURE, unverified=4) == 2
    assert made._survival == pytest.approx(math.prod(predictions + made.predictions))
    made.observe(5, 5)
    assert judged[id(made.learned.token)] == 6
    assert judged[id(made.learned.following)] == 5, "the second draft begins after a drafted token"
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


def test_in_pearl_a_pass_beside_no_draft_verifies_what_is_pending(judged: Counter[int]) -> None:
    """Without post-verify: the target's own token follows, and the next draft begins anew."""
    made = policy(in_parallel=True)
    draft(made, SURE, SURE, SURE)
    made.observe(1, 1)
    tokens = made.learned.tokens
    made.observe(2, 2)
    assert made.learned.tokens == pytest.approx(0.97 * tokens + 3)
    assert judged[id(made.learned.token)] == 3
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
        assert made.learned.tokens == pytest.approx(0.97 * tokens + 1)
        assert made.learned.cost == pytest.approx(0.97 * cost + 1 + 0.06 * nodes * lengths[-1])
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
