"""What the length policy `adaptive` estimates and how it bounds losses: calibration, first token, gains and guard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.methods.acceptance_calibration import AcceptanceCalibration, Prior, features
from specgen.methods.drafting_guard import LONGEST_PAUSE, SHORTEST_PAUSE, DraftingGuard
from specgen.methods.first_acceptance import LEVELS, PRIOR, FirstAcceptance
from specgen.methods.learned_drafting import OPTION, Learned

COSTS = DraftingCosts.linear(0.1, 0.02)
GREEDY, SAMPLING = Learned.prior(COSTS, 0.0), Learned.prior(COSTS, 1.0)


def probability(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))


# calibration


def teach(calibration: AcceptanceCalibration, score: float, rate: float, count: int) -> None:
    """Judges tokens with this score, of which `rate` are accepted, evenly spread."""
    for number in range(count):
        calibration.learn(score, math.floor((number + 1) * rate) > math.floor(number * rate))


@pytest.mark.parametrize("prior", [known.prior for learned in (GREEDY, SAMPLING) for known in (learned.token, learned.following)])
def test_calibration_corrects_a_wrong_prior_in_each_interval(prior: Prior) -> None:
    calibration = AcceptanceCalibration(prior)
    low, high = prior.edges[0] - 0.5, prior.edges[-1] + 0.5
    assert calibration.predict(low) == pytest.approx(probability(low)), "nothing is corrected yet"
    for _ in range(200):
        teach(calibration, low, 0.9, 10)  # the prior says that these are the worst
        teach(calibration, high, 0.3, 10)
    assert calibration.predict(low) == pytest.approx(0.9, abs=0.05)
    assert calibration.predict(high) == pytest.approx(0.3, abs=0.05)


def test_calibration_generalises_to_intervals_without_tokens() -> None:
    calibration = AcceptanceCalibration(replace(GREEDY.token.prior, recent_strength=0.0))
    teach(calibration, 3.0, 0.1, 200)
    assert probability(1.2) > 0.75
    assert calibration.predict(1.2) < 0.4
    assert calibration.predict(3.0) == pytest.approx(0.1, abs=0.03)


def test_calibration_follows_a_change_of_the_text() -> None:
    calibration = AcceptanceCalibration(GREEDY.following.prior)  # without an offset of the last tokens
    teach(calibration, 1.3, 0.5, 10_000)
    assert calibration.predict(1.3) == pytest.approx(0.5, abs=0.02)
    teach(calibration, 1.3, 0.9, 3000)
    assert calibration.predict(1.3) == pytest.approx(0.9, abs=0.03)


def test_one_step_is_newtons_with_the_priors_weight() -> None:
    prior = Prior(0.5, (1.0,), (0.0, 1.0), 4.0, 2.0, 3.0)
    calibration = AcceptanceCalibration(prior)
    assert (prior.score((0.25,)), calibration.predict(0.75)) == (0.75, probability(0.75))
    expected = probability(0.75)
    residual, information = 1 - expected, expected * (1 - expected)
    calibration.learn(0.75, accepted=True)
    offset, interval, recent = (residual / (information + strength) for strength in (4.0, 2.0, 3.0))
    assert calibration.predict(0.75) == pytest.approx(probability(0.75 + offset + interval + recent))
    assert calibration.predict(1.5) == pytest.approx(probability(1.5 + offset + recent)), "another interval"
    second = probability(0.75 + offset + interval)  # what the last tokens say does not change what is learned for all
    calibration.learn(0.75, accepted=False)
    step = -second / (0.999 * information + second * (1 - second) + 4.0)
    assert calibration.offset == pytest.approx(offset + step)


def test_the_last_tokens_count_for_a_while() -> None:
    """A stretch of rejections lowers predictions more than it moves what is learned, and is then forgotten."""
    with_recent = AcceptanceCalibration(GREEDY.token.prior)
    without = AcceptanceCalibration(replace(GREEDY.token.prior, recent_strength=0.0))
    calibrations = (with_recent, without)
    for calibration in calibrations:
        teach(calibration, 1.2, 0.8, 2000)
        teach(calibration, 1.2, 0.0, 10)
    assert without.predict(1.2) > 0.7
    assert with_recent.predict(1.2) < without.predict(1.2) - 0.1
    assert with_recent.predict(3.0) < without.predict(3.0) - 0.03, "at all scores"
    for calibration in calibrations:
        teach(calibration, 1.2, 0.8, 100)
    assert with_recent.predict(1.2) == pytest.approx(without.predict(1.2), abs=0.02)


def test_a_copy_and_a_saved_calibration_predict_the_same() -> None:
    calibration = AcceptanceCalibration(GREEDY.token.prior)
    for score, rate in ((-3.0, 0.4), (0.3, 0.5), (5.0, 0.95)):
        teach(calibration, score, rate, 50)
    same = calibration.copy(), AcceptanceCalibration.of_dict(calibration.prior, calibration.as_dict())
    kept = calibration.predict(5.0)
    for other in same:
        assert [other.predict(score) for score in (-3.0, 0.3, 1.2, 5.0)] == [
            calibration.predict(score) for score in (-3.0, 0.3, 1.2, 5.0)
        ]
        teach(other, 5.0, 0.0, 50)
        assert other.predict(5.0) < kept - 0.1
    assert same[0] == same[1], "also what it will learn"
    assert calibration.predict(5.0) == kept


def test_the_prior_follows_the_temperature() -> None:
    read = features(0.6, 0.8, 0.5)
    greedy, half, one, two = (Learned.prior(COSTS, temperature).token.prior.score(read) for temperature in (0.0, 0.5, 1.0, 2.0))
    assert abs(greedy - one) > 0.1
    assert half == pytest.approx((greedy + one) / 2)
    assert two == one


# acceptance of the first token


def test_the_filter_is_bayes_rule_with_changes() -> None:
    """The weights of two levels after each of three rounds, computed by hand: likelihood, normalisation, mixing."""
    first = FirstAcceptance()
    assert first.mean == pytest.approx(sum(map(math.prod, zip(LEVELS, PRIOR, strict=True))))
    expected = list(PRIOR)
    for accepted in (True, False, None):
        if accepted is not None:
            likelihoods = [level if accepted else 1 - level for level in LEVELS]
            evidence = sum(map(math.prod, zip(expected, likelihoods, strict=True)))
            expected = [weight * likelihood / evidence for weight, likelihood in zip(expected, likelihoods, strict=True)]
        expected = [0.98 * weight + 0.02 * prior for weight, prior in zip(expected, PRIOR, strict=True)]
        first.add(accepted)
        assert first.weights == pytest.approx(expected)
    assert sum(PRIOR) == pytest.approx(1)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.75, 0.95])
def test_the_first_acceptance_converges_and_follows_a_change(rate: float) -> None:
    first, rng = FirstAcceptance(), Random(1)
    for start in (rate, 1 - rate, rate):
        means = []
        for number in range(500):
            first.add(rng.random() < start)
            means.append(first.mean if number >= 100 else start)
        assert sum(means) / len(means) == pytest.approx(start, abs=0.09)


def test_without_drafts_the_first_acceptance_returns_to_the_prior() -> None:
    first, means = FirstAcceptance(), []
    for _ in range(20):
        first.add(accepted=False)
    change = first.change
    for _ in range(1500):
        means.append(first.mean)
        first.add(None)
    assert means[0] < 0.1
    assert means == sorted(means)
    assert means[-1] == pytest.approx(FirstAcceptance().mean, abs=0.01)
    assert first.change == change, "rounds without a draft say nothing about changes"


def test_trials_get_rarer_only_while_drafts_are_useless() -> None:
    first = FirstAcceptance()
    for number in range(30):
        first.add(number % 3 > 0)
        assert first.change == 0.02, "not useless: a third is rejected"
    for _ in range(3):
        first.add(accepted=False)
    assert first.change == 0.02, "some rejections in a row"
    changes = []
    for _ in range(40):
        first.add(accepted=False)
        changes.append(first.change)
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] == 0.01
    idle = []  # rounds until half of the tokens are expected to be accepted again
    for change in (0.02, 0.01):
        waiting, count = replace(first, change=change), 0
        while waiting.mean < 0.5:
            waiting.add(None)
            count += 1
        idle.append(count)
    assert idle[1] > 1.8 * idle[0]
    first.add(accepted=True)
    assert first.change == 0.02


def test_a_copy_of_the_first_acceptance_is_independent() -> None:
    first = FirstAcceptance()
    first.add(accepted=False)
    again, copy = FirstAcceptance.of_list(first.as_list()), first.copy()
    assert again == copy == first
    copy.add(accepted=False)
    assert again == first != copy


# gains


def test_whether_to_draft_counts_all_tokens_of_a_draft() -> None:
    """The first token's worth, what later tokens gained where it was accepted, and what they cost where it was not."""
    learned = Learned.prior(COSTS, 0.0)
    learned.cost, learned.tokens = 4.0, 10.0
    accepted = learned.first.mean
    assert learned.start_gain == pytest.approx(accepted * 0.4 * OPTION)
    learned.add_draft(5, 0.9, 0.1)  # four tokens after the first, worth 0.4 each, for 0.8
    assert learned.later == pytest.approx([0.8, 0.97 * 5 + 1])
    assert learned.waste == [0.0, 5.0]
    assert learned.start_gain == pytest.approx(accepted * (0.4 * OPTION + 0.8 / 5.85))
    learned.add_draft(0, 0.7, 0.1)
    learned.add_draft(0, 0.7, 0.1)
    assert learned.later == pytest.approx([0.8, 5.85]), "a draft without an accepted token says nothing about it"
    waste = (0.97 * 0.6 + 0.6) / (0.97 * (0.97 * 5 + 1) + 1)
    assert learned.start_gain == pytest.approx(accepted * (0.4 * OPTION + 0.8 / 5.85) - (1 - accepted) * waste)
    for _ in range(9):
        learned.add_draft(1, 0.9, 0.1)  # the later tokens cost 0.8 for nothing
    assert learned.later[0] < 0
    assert learned.start_gain == pytest.approx(accepted * 0.4 * OPTION - (1 - accepted) * waste), "a draft can end after one"


# guard

ROUNDS = st.lists(st.tuples(st.floats(1.0, 5.0), st.integers(1, 6)), min_size=1, max_size=8)


def total_loss(guard: DraftingGuard, rounds: Sequence[tuple[float, int]], count: int, budget: float) -> float:
    """The largest loss of the first n of `count` rounds, above the bound for n if it is positive.

    Each round, unless drafting pauses, has the next of these costs and tokens.
    """
    worst = max(budget, *(cost - tokens for cost, tokens in rounds))
    lost, excess, coming = 0.0, -math.inf, cycle(rounds)
    for number in range(1, count + 1):
        if not guard.pauses():
            cost, tokens = next(coming)
            guard.count(cost, tokens, budget)
            lost += cost - tokens
        excess = max(excess, lost - worst * (3 + math.log2(1 + number / SHORTEST_PAUSE) + number / LONGEST_PAUSE))
    return excess


@settings(max_examples=150, deadline=None)
@given(rounds=ROUNDS, count=st.integers(1, 1500), budget=st.sampled_from([0.1, 1.0, 3.0, 20.0]))
def test_the_loss_is_bounded_whatever_is_accepted(rounds: list[tuple[float, int]], count: int, budget: float) -> None:
    assert total_loss(DraftingGuard(), rounds, count, budget) <= 1e-9


@pytest.mark.parametrize("budget", [0.5, 3.0])
def test_the_loss_is_bounded_against_an_adversary(budget: float) -> None:
    """It loses until pauses are long, then wins the least that halves them, and loses again."""
    for longest in (4, 16, 64, 256, 2048):
        guard, lost, excess = DraftingGuard(), 0.0, []
        for number in range(1, 10_001):
            if not guard.pauses():
                loss = budget if guard.pause <= longest or guard.loss > 0 else -budget - guard.loss - 1e-6
                guard.count(loss + 1, 1, budget)
                lost += loss
            bound = budget * (3 + math.log2(1 + number / SHORTEST_PAUSE) + number / LONGEST_PAUSE)
            excess.append(lost / bound)
        assert 0.1 < max(excess) <= 1


@pytest.mark.parametrize(
    "rounds", [[(4.0, 1)], [(3.9, 1), (1.4, 2)], [(1.0, 4)] + [(4.0, 1)] * 3, [(1.0, 5)] * 2 + [(3.9, 1)] * 4]
)
def test_the_loss_is_bounded_in_long_texts(rounds: list[tuple[float, int]]) -> None:
    assert total_loss(DraftingGuard(), rounds, 10_000, 3.0) <= 0


def test_pauses_double_while_drafts_lose_and_halve_while_they_win() -> None:
    guard, pauses = DraftingGuard(), []
    for _ in range(10):
        guard.count(4.001, 1, 3.0)
        pauses.append(sum(1 for _ in iter(guard.pauses, False)))
    assert pauses == [4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]
    guard.count(1.5, 1, 3.0)
    assert guard.pause == LONGEST_PAUSE
    assert not guard.pauses(), "within the budget"
    lengths = []
    for _ in range(10):
        guard.count(2.0, 6, 3.0)
        lengths.append(guard.pause)
    assert lengths == [512, 256, 128, 64, 32, 16, 8, 4, 4, 4]
    assert not guard.pauses()


def test_drafting_returns_after_a_stretch_of_rejections() -> None:
    guard = DraftingGuard()
    assert total_loss(guard, [(4.5, 1)], 1000, 3.0) <= 0
    assert guard.pause >= 128
    drafted = []
    for _ in range(1200):
        drafted.append(not guard.pauses())
        if drafted[-1]:
            guard.count(1.5, 4, 3.0)  # the text is easy now
    assert all(drafted[drafted.index(True) :])
