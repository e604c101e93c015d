"""The length policy `adaptive`: its rule, what it learns about drafts and costs, and its runs on
models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pair_helpers import case_of, knowledge, pair_of_models

from specgen.base.types import Round, SamplingParams, TokenStatus
from specgen.compare.prompts import load_prompts
from specgen.decoding.costs import FURTHER_TOKEN, CostTable, Curve, RoundCosts
from specgen.decoding.parallel import Parallel
from specgen.decoding.parallel_costs import Window
from specgen.decoding.policy_base import MATCH_LENGTH, DraftedToken
from specgen.methods import adaptive
from specgen.methods.adaptive import Adaptive, features
from specgen.methods.drafting_knowledge import AUTO
from specgen.methods.learned_drafting import (
    _LAST_PASSES,
    _MOST,
    LONGEST_PAUSE,
    OPTION,
    SHORTEST_PAUSE,
    Acceptance,
    AdaptiveInputs,
    DraftingCosts,
    DraftingGuard,
    Learned,
    LearnedCosts,
    LevelAcceptance,
)
from specgen.pair.pair import Pair
from specgen.testing.scripted_models import TableRunner, scripted_run
from specgen.workers.worker import DraftWorker

SURE = {"entropy": 0.05, "top_prob": 0.99}
UNSURE = {"entropy": 2.5, "top_prob": 0.2}
LIKELY = {"entropy": 0.6, "top_prob": 0.8}
CHEAP = DraftingCosts(0.05, 0.01)
# tokens, blocks, lookup
GUESSES = (
    DraftingCosts(0.15, FURTHER_TOKEN),
    DraftingCosts(0.01, FURTHER_TOKEN, 0.4),
    DraftingCosts(0.0, FURTHER_TOKEN),
)


def policy(
    costs: DraftingCosts = CHEAP,
    *,
    in_parallel: bool = False,
    exploration: float = 3.0,
    max_draft: int = 40,
) -> Adaptive:
    return Adaptive(
        AUTO, AUTO, exploration, max_draft, AdaptiveInputs(costs, Learned.prior(costs), in_parallel)
    )


def draft(made: Adaptive, *tokens: dict[str, float], unverified: int = 0) -> int:
    """The number of tokens that the policy drafts of these."""
    if not made.starts_draft(unverified=unverified):
        return 0
    steps = (DraftedToken(position, token) for position, token in enumerate(tokens, 1))
    return next((step.position for step in steps if not made.keep_drafting(step)), len(tokens))


def scores(token: dict[str, float]) -> tuple[float, float]:
    """Those of a drafted token and of the one after it."""
    known = features(token["entropy"], token["top_prob"])
    first, second = (
        (row[0] + sum(map(float.__mul__, row[1:], known)))
        for row in (adaptive._TOKEN, adaptive._FOLLOWING)
    )
    return first, second


@contextmanager
def labels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[float, list[tuple[float, bool]]]]:
    """The scores and outcomes that each kind of prediction learns from, in order: by strength, 5
    for tokens, 10 for others."""
    noted: dict[float, list[tuple[float, bool]]] = {5.0: [], 10.0: []}
    learn = Acceptance.learn

    def noting(self: Acceptance, score: float, accepted: bool) -> None:
        noted[self.strength].append((round(score, 9), accepted))
        learn(self, score, accepted)

    with monkeypatch.context() as patch:
        patch.setattr(Acceptance, "learn", noting)
        yield noted


# predictions


def test_sampling_keeps_unsure_tokens_more_often_and_likely_ones_less() -> None:
    def predicted(token: dict[str, float], temperature: float) -> float:
        inputs = AdaptiveInputs(CHEAP, Learned.prior(CHEAP), temperature=temperature)
        made = Adaptive(AUTO, AUTO, 3.0, 40, inputs)
        draft(made, token)
        return made.predictions[0]

    assert predicted(UNSURE, 1.0) > predicted(UNSURE, 0.3) > predicted(UNSURE, 0.0)
    assert predicted(LIKELY, 1.0) < predicted(LIKELY, 0.3) < predicted(LIKELY, 0.0)
    assert predicted(LIKELY, 1.5) == predicted(LIKELY, 1.0)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_predictions_are_right_at_a_temperature(temperature: float, demo_pair: Pair) -> None:
    """Of the tokens that were neither sure nor hopeless, as many are accepted as predicted."""
    judged: list[tuple[float, bool]] = []
    for prompt in load_prompts(None, for_tuning=True)[:16]:
        sampling = SamplingParams(max_new_tokens=64, temperature=temperature, seed=prompt.index)
        for round_ in demo_pair.rounds(
            prompt.text, "sd", sampling, policy="adaptive", draft_cost=0.05, verify_cost=0.02
        ):
            accepted = len(round_.accepted_ids)
            judged += [
                (prediction, position < accepted)
                for position, prediction in enumerate(round_.draft.predicted[: accepted + 1])
            ]
    unsure = [(prediction, kept) for prediction, kept in judged if 0.3 <= prediction < 0.9]
    assert len(unsure) > 30
    predicted, kept = (sum(column) / len(unsure) for column in zip(*unsure, strict=True))
    assert abs(predicted - kept) < 0.15


# the rule


@pytest.mark.parametrize("costs", [(0.02, 0.01), (0.1, 0.02), (0.4, 0.1), (0.6, 0.05)])
@pytest.mark.parametrize("in_parallel", [False, True])
@pytest.mark.parametrize("nodes", [1, 3])
def test_it_stops_where_the_next_token_is_not_worth_its_cost(
    costs: tuple[float, float], in_parallel: bool, nodes: int
) -> None:
    made = policy(DraftingCosts(*costs), in_parallel=in_parallel)
    learned = made.learned
    survival = 1.0
    for number in range(50):
        learned.token.learn(4.0, number % 10 > 0)
    tokens = list(islice(cycle([SURE, SURE, UNSURE, SURE]), 60))
    assert made.starts_draft()
    for position, token in enumerate(tokens, 1):
        goes_on = made.keep_drafting(DraftedToken(position, token, nodes))
        own, following = scores(token)
        survival *= learned.token.predict(own)
        assert made.predictions[-1] == pytest.approx(learned.token.predict(own))
        gain = survival * learned.following.predict(following) * learned.worth * OPTION
        cost = (0 if in_parallel else costs[0]) + nodes * costs[1]
        assert goes_on == (gain > cost)
        if not goes_on:
            break
    assert 0 < position < 40
    assert made.reason.startswith("gain ")
    tokens_before = learned.tokens
    cost_before = learned.cost
    made.observe(position, 0)
    if not in_parallel:
        assert learned.tokens == pytest.approx(0.97 * tokens_before + 1)
        assert learned.cost == pytest.approx(
            0.97 * cost_before + 1 + position * (costs[0] + nodes * costs[1])
        )
    short = policy(max_draft=3)
    assert (draft(short, *[SURE] * 9), short.reason) == (3, "limit 3")


def test_a_refused_copy_says_why_unless_the_model_is_asked_next() -> None:
    made = policy(DraftingCosts(0.05, 0.9))
    assert not made.starts_draft(signals={MATCH_LENGTH: 1}, is_last=False)
    assert made.reason == "", "no text is made that nobody reads"
    assert not made.starts_draft(signals={MATCH_LENGTH: 1}, is_last=True)
    assert made.reason.startswith("no draft: gain ")


def test_useless_drafts_get_rare_and_return_when_they_are_accepted() -> None:
    made = policy(DraftingCosts(0.4, 0.0), exploration=1000)
    drafted = list[int]()
    for _ in range(600):
        drafted.append(draft(made, LIKELY, LIKELY))
        assert drafted[-1] or made.reason.startswith("no draft: gain ")
        made.observe(drafted[-1], 0)
    trials = [number for number, length in enumerate(drafted) if length]
    assert 5 < len(trials) < 60
    assert trials[-1] - trials[-2] > 5 * (trials[1] - trials[0])
    for _ in range(200):
        drafted.append(draft(made, SURE, SURE))
        made.observe(drafted[-1], drafted[-1])
    assert all(drafted[-50:])


def test_drafting_pauses_after_losses() -> None:
    made = policy(DraftingCosts(0.4, 0.0), exploration=0.5)
    lengths = []
    reasons = []
    for _ in range(6):
        lengths.append(draft(made, LIKELY, LIKELY))
        reasons.append(made.reason)
        made.observe(lengths[-1], 0)
    assert [length > 0 for length in lengths] == [True, False, False, False, False, True]
    assert reasons[1:5] == [
        *(f"no draft: paused, {left} more rounds" for left in (3, 2, 1)),
        "no draft: paused",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_guard_bounds_what_drafting_loses_whatever_is_accepted(seed: int) -> None:
    rng = Random(seed)
    guard = DraftingGuard()
    budget = rng.uniform(0.5, 6)
    share = rng.random()
    loss = 0.0
    worst = 0.0
    rounds = 3000
    pauses = list[int]()
    for _ in range(rounds):
        if guard.pauses():
            continue
        cost = rng.uniform(1, 4)
        tokens = 1 + 3 * (rng.random() < share)
        loss = loss + cost - tokens
        worst = max(worst, cost - tokens)
        guard.count(cost, tokens, budget)
        pauses.append(guard.pause)
    assert loss <= max(budget, worst) * (
        3 + math.log2(1 + rounds / SHORTEST_PAUSE) + rounds / LONGEST_PAUSE
    )
    assert {SHORTEST_PAUSE, *pauses} <= {2**power for power in range(2, 11)}


@pytest.mark.parametrize("rounds", [40, 400, 4000])
@pytest.mark.parametrize(
    ("chance", "best"),  # of each token to be accepted; the cost per output token that is reached
    [(0.0, 1.0), (0.3, 1.0), (0.9, 0.5)],
)
def test_block_rounds_lose_no_more_than_the_exploration(
    chance: float, best: float, rounds: int
) -> None:
    """Against plain decoding, whose tokens cost 1 each. All tokens of a block that are computed
    cost, also those that the draft leaves out."""
    rng = Random(rounds)
    costs = DraftingCosts(0.02, 0.05, start=0.5)
    exploration = 6.0
    longest = 15
    inputs = AdaptiveInputs(costs, Learned.prior(costs), sizes_blocks=True)
    made = Adaptive(AUTO, AUTO, exploration, longest, inputs)
    cost = 0.0
    tokens = 0
    for _ in range(rounds):
        drafted = draft(made, *[LIKELY] * longest)
        accepted = next((kept for kept in range(drafted) if rng.random() > chance), drafted)
        computed = made.block_levels or longest
        cost += 1 + costs.of_draft(computed if drafted else 0, drafted)
        tokens += accepted + 1
        made.observe(drafted, accepted)
    pauses = 3 + math.log2(1 + rounds / SHORTEST_PAUSE) + rounds / LONGEST_PAUSE
    assert cost <= best * tokens + exploration * pauses
    if rounds == 4000:
        assert cost <= best * 1.02 * tokens


def test_only_much_that_was_gained_shortens_the_pause() -> None:
    guard = DraftingGuard(pause=16)
    guard.count(1, 2, 3.0)
    assert (guard.pause, guard.loss) == (16, -1)
    guard.count(1, 5, 3.0)
    assert (guard.pause, guard.loss) == (8, 0), "a gain is not saved up for later losses"
    guard.count(6, 1, 3.0)
    assert (guard.left, guard.pause, guard.loss) == (8, 16, 2), (
        "a pause is paid for with the budget"
    )


def test_one_huge_loss_costs_one_pause() -> None:
    guard = DraftingGuard()
    guard.count(300, 1, 3.0)
    assert (guard.left, guard.pause, guard.loss) == (4, 8, 3.0)
    guard.left = 0
    guard.count(1, 2, 3.0)
    assert not guard.left


def test_drafts_that_gain_a_little_are_not_refused_by_chance() -> None:
    """Each token costs 0.4 and is accepted with probability 0.5. Few of 3,600 rounds refuse a draft
    because those before it were rejected."""
    refused = 0
    for seed in range(6):
        rng = Random(seed)
        made = policy(DraftingCosts(0.4, 0.0), exploration=1000)
        for _ in range(600):
            length = draft(made, *[LIKELY] * 40)
            refused += not length
            accepted = 0
            while accepted < length and rng.random() < 0.5:
                accepted += 1
            made.observe(length, accepted)
    assert refused < 70


def test_the_highest_gain_by_hand() -> None:
    """Of two drafts, the older one counts 0.97."""
    learned = Learned.prior(DraftingCosts(0.1, 0.0))
    learned.cost = learned.tokens
    assert learned.highest_gain == learned.mean_gain == 0.6
    for accepted in (2, 0):
        learned.add_draft(accepted, cost=0.5)
    mean = (0.97 * 1.5 - 0.5) / 1.97
    variance = (0.97 * 1.5**2 + 0.5**2) / 1.97 - mean**2
    error = math.sqrt(variance / 1.97)
    assert learned.highest_gain == pytest.approx(learned.mean_gain + error)
    learned.add_idle()  # what was learned counts less, and varies as much
    assert learned.highest_gain - learned.mean_gain == pytest.approx(error / math.sqrt(0.98))
    learned.forget_gains()
    learned.add_draft(0, cost=0.5)
    assert learned.highest_gain == pytest.approx(learned.mean_gain), "one draft varies from none"


@given(
    st.integers(0, 10**6), st.integers(0, 400), st.floats(0, 0.3), st.sampled_from([0.05, 0.2, 0.5])
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_after_useless_drafts_good_ones_are_found_again(
    seed: int, before: int, accepted: float, cost: float
) -> None:
    """A stretch of rounds in which little is accepted delays the first draft after it by at most a
    quarter of its length."""
    rng = Random(seed)
    made = policy(DraftingCosts(cost, 0.03), exploration=6.0)
    drafted = list[int]()
    for number in range(before + 20 + before // 4):
        chance = accepted if number < before else 0.8
        drafted.append(draft(made, *[LIKELY] * 40))
        made.observe(
            drafted[-1],
            next(
                (position for position in range(drafted[-1]) if rng.random() > chance), drafted[-1]
            ),
        )
    assert any(drafted[before:])


def test_the_longest_pause_ends() -> None:
    """From the worst state that rounds can lead to: the longest pause, nothing but lost drafts, no
    acceptance."""
    made = policy(DraftingCosts(0.4, 0.03), exploration=6.0)
    learned = made.learned
    learned.guard = DraftingGuard(loss=6.0, pause=LONGEST_PAUSE, left=LONGEST_PAUSE)
    learned.gain = -300.0
    learned.drafts = 33.0
    learned.trust = 0.2
    learned.token.offset = learned.following.offset = -30.0
    drafted = list[int]()
    for _ in range(LONGEST_PAUSE + 400):
        drafted.append(draft(made, *[SURE] * 40))
        made.observe(drafted[-1], drafted[-1])
    assert not any(drafted[:LONGEST_PAUSE])
    assert all(drafted[-20:])


# what it learns


def test_acceptance_is_learned_from_all_tokens_and_faster_from_the_last() -> None:
    rng = Random(1)
    known = Acceptance(5.0)
    for _ in range(2000):
        known.learn(1.0, rng.random() < 0.3)
    assert 0.1 < known.predict(1.0) < 0.5
    assert known.predict(3.0) > known.predict(1.0) > known.predict(-1.0)
    before = known.predict(1.0)
    offset = known.offset
    for _ in range(15):
        known.learn(1.0, accepted=True)
    assert known.predict(1.0) > before + 0.15
    assert known.offset < offset + 0.4
    assert Acceptance(5.0).predict(-800.0) == 0


def test_in_pearl_pending_tokens_count_until_one_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = policy(in_parallel=True)
    with labels(monkeypatch) as noted:
        assert draft(made, *[SURE] * 5) == 5
        predictions = list(made.predictions[1:])
        made.observe(1, 1)  # the target's pass judges the first new token
        assert len(noted[5.0]) == 1
        assert draft(made, SURE, SURE, unverified=4) == 2
        assert made._survival == pytest.approx(math.prod([*predictions, *made.predictions]))
        made.observe(5, 5)
        assert [len(each) for each in noted.values()] == [6, 5], (
            "the second draft begins after a drafted token"
        )
        assert draft(made, SURE, SURE, SURE, unverified=1) == 3
        made.observe(2, 1)
        assert draft(made, SURE) == 1
        assert made._survival == made.predictions[0], (
            "nothing is left of the tokens after the rejected one"
        )
        made.observe(1, 1)
        tokens = made.learned.tokens
        made.observe(2, 2)  # a pass beside no draft: the target's own token follows
        assert made.learned.tokens == pytest.approx(0.97 * tokens + 3)
    made = policy(in_parallel=True)
    assert draft(made, SURE, SURE, SURE, UNSURE) == 4
    kept = made.predictions[1]
    made.observe(1, 1)
    draft(made, SURE, unverified=1)  # two of the four were cut off
    assert made._survival == pytest.approx(kept * made.predictions[0])
    assert len(made._steps) == 2


def test_in_turn_a_bonus_token_is_no_judged_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the models of PEARL take turns, the target draws a token after an accepted draft."""
    made = policy(in_parallel=True)
    made.in_turn = True
    with labels(monkeypatch) as noted:
        for number in (1, 2):
            assert draft(made, SURE, SURE) == 2
            tokens = made.learned.tokens
            made.observe(2, 2)
            assert made.learned.tokens == pytest.approx(0.97 * tokens + 3)
            assert [len(each) for each in noted.values()] == [2 * number, number]


# costs


def test_costs_of_measured_rounds_are_in_passes_over_one_token() -> None:
    def table(points: dict[int, float]) -> CostTable:
        return CostTable({100: Curve(points)})

    rounds = RoundCosts(
        table({0: 0, 1: 0.002, 4: 0.006, 8: 0.012}),
        table({1: 0.010, 5: 0.014, 9: 0.018}),
        signal_cost=0.0005,
    )
    costs = DraftingCosts.of_rounds(rounds, 100)
    # six tokens take 0.009 s, and 0.0005 s each for signals
    assert (costs.draft, costs.verify) == pytest.approx((0.2, 0.1))
    assert costs.of_draft(2, 4) == pytest.approx(0.8)
    assert costs.with_values(0.5, None).of_draft(2, 4) == pytest.approx(1.4)
    assert costs.with_values(None, 0.01).of_draft(2, 4) == pytest.approx(0.44)
    mixture = replace(rounds, verification_cost=table({1: 0.010, 2: 0.016, 9: 0.023}))
    costs = DraftingCosts.of_rounds(mixture, 100)
    assert (costs.verify, costs.verify_start) == pytest.approx((0.1, 0.5))
    best = min((1 + 0.12 * k) / sum(0.8**j for j in range(k + 1)) for k in range(17))
    assert DraftingCosts(0.1, 0.02).time_per_token(0.8) == pytest.approx(best)
    assert DraftingCosts(2.0, 0.0).time_per_token(1.0) == 1, "plain decoding"


@pytest.mark.parametrize("draft_cost", [0.01, 0.1, 0.6])
@pytest.mark.parametrize("verify_cost", [0.0, 0.03, 0.2])
@pytest.mark.parametrize(("single", "verify_start"), [(1e-4, 0.0), (2.0, 0.6)])
def test_costs_are_learned_from_the_times_of_rounds(
    draft_cost: float, verify_cost: float, single: float, verify_start: float
) -> None:
    """With noise, and now and then a round that is ten times as slow. A run of one draft length
    learns the sum of both."""
    rng = Random(0)
    wanted = DraftingCosts(draft_cost, verify_cost, verify_start=verify_start)
    for lengths in (range(9), (4,)):
        timed = LearnedCosts(DraftingCosts(0.15, 0.03))
        for _ in range(300):
            tokens = rng.choice(lengths)
            slow = single * rng.uniform(0.9, 1.1) * (10 if rng.random() < 0.02 else 1)
            timed.add(
                tokens, slow * draft_cost * tokens, tokens, slow * (1 + wanted.of_draft(0, tokens))
            )
        if len(lengths) > 1:
            assert timed.costs.draft == pytest.approx(draft_cost, rel=0.2, abs=0.02)
            assert timed.costs.verify == pytest.approx(verify_cost, abs=0.04)
            assert timed.costs.verify_start == pytest.approx(verify_start, abs=0.1)
            assert not timed.costs.differs(wanted, 2.0) or wanted.of_draft(1, 1) < 0.05
        else:
            assert timed.costs.verify == pytest.approx(timed.guess.verify, abs=0.005), (
                "passes of one width have no slope"
            )
        assert timed.costs.differs(timed.guess, 1.5) == (
            not 0.12 <= timed.costs.of_draft(1, 1) <= 0.27
        )


def test_a_blocks_pass_and_its_tokens_cost_what_they_took() -> None:
    rng = Random(0)
    timed = LearnedCosts(GUESSES[1])
    for _ in range(64):
        tokens = rng.choice((1, 2, 3, 6))
        noise = rng.uniform(0.9, 1.1)
        timed.add(
            tokens, 3e-3 * noise * (0.6 + 0.2 * tokens), tokens, 3e-3 * noise * (1 + 0.05 * tokens)
        )
    assert timed.costs.start == pytest.approx(0.6, abs=0.1)
    assert timed.costs.draft == pytest.approx(0.2, abs=0.04)


def test_a_block_is_as_long_as_its_tokens_are_accepted_and_pay() -> None:
    levels = LevelAcceptance()
    at_first = levels.longest(1.0, 0.1, 40)
    assert 5 < at_first < 40
    assert levels.longest(1.0, 0.1, 3) == 3
    for _ in range(50):
        levels.learn(4, 2)
    assert levels.longest(1.0, 0.3, 40) == 2
    assert levels.longest(1.0, 2.0, 40) == 1, "whether to draft at all is decided elsewhere"
    assert levels.longest(0.1, 0.3, 40) == 1
    for _ in range(200):  # what was seen of the third token is forgotten
        levels.learn(2, 2)
    assert levels.longest(1.0, 0.3, 40) > 3
    levels = LevelAcceptance()
    for _ in range(50):
        levels.learn(4, 1)
    for _ in range(30):
        levels.learn(2, 2)
    assert levels.longest(1.0, 0.3, 40) > 2, "a token after a rejected one was not judged"


def test_a_policy_that_sizes_blocks_ends_drafts_there() -> None:
    costs = DraftingCosts(0.05, 0.25, 0.1)
    inputs = AdaptiveInputs(costs, Learned.prior(costs), sizes_blocks=True)
    made = Adaptive(AUTO, AUTO, 100.0, 40, inputs)
    for _ in range(60):
        made.observe(draft(made, *[SURE] * 6), 1)
    assert draft(made, *[SURE] * 6) == made.block_levels == 1
    assert made.reason == "limit 1"
    other = Adaptive(AUTO, AUTO, 100.0, 40, replace(inputs, sizes_blocks=False))
    assert other.block_levels is None


def test_stalled_passes_leave_the_unit_what_it_is() -> None:
    """Fifteen rounds of 3 ms, of which one took 12 ms: passes with drafts first, then plain
    ones."""
    timed = LearnedCosts(DraftingCosts(0.15, 0.03))
    for tokens, passes in ((4, 1.1), (4, 1.1), (5, 4.0), *[(0, 1.0)] * 12):
        timed.add(tokens, tokens * 4.5e-4, tokens, passes * 3e-3)
    assert timed._verification()[0] == pytest.approx(3e-3, rel=0.1)
    assert timed.costs.draft == pytest.approx(0.15, rel=0.1)
    assert timed.costs.of_further(1, 1) < 0.7


TIMES = st.one_of(st.floats(), st.sampled_from([0.0, 1e-9, 3e-3, 1.0, 3600.0]))


@given(
    st.lists(st.tuples(st.integers(0, 12), TIMES, TIMES), max_size=100), st.sampled_from(GUESSES)
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_learned_costs_stay_within_what_was_seen(
    rounds: list[tuple[int, float, float]], guess: DraftingCosts
) -> None:
    timed = LearnedCosts(guess)
    seen = list[tuple[float, float]]()
    for tokens, drafting, verification in rounds:
        timed.add(tokens if guess.draft else 0, drafting, tokens, verification)
        assert all(
            0 <= cost <= most
            for cost, most in zip(astuple(timed.costs), astuple(_MOST), strict=True)
        )
        if 1e-9 < verification < 1e9:
            seen = [*seen, (verification / (1 + _MOST.of_draft(0, tokens)), verification)][
                -_LAST_PASSES:
            ]
    if seen:
        shortest = min(least for least, _ in seen)
        longest = max(most for _, most in seen)
        assert shortest * 0.999 <= timed._verification()[0] <= longest * 1.05, (
            "the guess counts a little too"
        )


def disturbed(rng: Random, seconds: float, share: float) -> float:
    """What a clock shows for these seconds, if a `share` of times is one of a stall, or of a clock
    that stands or is set."""
    if rng.random() > share:
        return seconds
    return rng.choice([0.0, -1.0, seconds + 1, seconds + 60, seconds + 3600, math.inf, math.nan])


@given(
    st.integers(0, 10**6),
    st.integers(0, 200),
    st.floats(0, 0.5),
    st.sampled_from([(GUESSES[0], 0.1, 0.0), (GUESSES[0], 0.3, 0.0), (GUESSES[1], 0.01, 0.4)]),
)
@example(316, 7, 0.5, (GUESSES[1], 0.01, 0.4))  # drafts were charged for stalls
@settings(max_examples=40, deadline=None, derandomize=True)
def test_drafting_is_back_soon_after_any_stalls(
    seed: int, before: int, share: float, machine: tuple[DraftingCosts, float, float]
) -> None:
    """Passes take 3 ms, and four of five tokens are accepted."""
    guess, draft_cost, start = machine
    rng = Random(seed)
    wanted = DraftingCosts(draft_cost, 0.03, start)
    made = Adaptive(
        AUTO, AUTO, 6.0, 40, AdaptiveInputs(guess, Learned.prior(guess), timed=LearnedCosts(guess))
    )
    drafted = list[int]()
    for number in range(before + 20):
        count = draft(made, *[LIKELY] * 40)
        made.observe(
            count, next((position for position in range(count) if rng.random() > 0.8), count)
        )
        drafting = 3e-3 * wanted.of_draft(count, 0)
        verification = 3e-3 * (1 + wanted.of_draft(0, count))
        if number < before:
            drafting = disturbed(rng, drafting, share)
            verification = disturbed(rng, verification, share)
        made.observe_seconds(count, drafting, count, verification)
        drafted.append(count)
    assert any(drafted[before:])


@pytest.mark.parametrize(
    ("seconds", "pauses"), [(2.0, [16, 32, 64, 128]), (9.0, [16, 16, 16, 16]), (0.1, [])]
)
def test_costs_that_forbid_drafts_are_tried_again(seconds: float, pauses: list[int]) -> None:
    """A drafted token that takes two passes is tried ever more rarely; one that takes nine has met
    a stall and says little."""
    timed = LearnedCosts(GUESSES[0])
    found = list[int]()
    idle = 0
    for _ in range(400):
        drafts = timed.costs.of_further(1, 1) < 1
        if drafts and idle > 1:
            found.append(idle)
        idle = 0 if drafts else idle + 1
        timed.add(drafts, seconds * drafts, drafts, 1.0)
    assert found[: len(pauses)] == pauses
    assert bool(found) == bool(pauses)


def test_long_pauses_estimate_the_costs_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """But still find a target that has become slower: the same draft then costs less of a pass."""
    estimated = list[int]()
    estimate = LearnedCosts._estimate

    def counted(timed: LearnedCosts) -> DraftingCosts:
        estimated.append(timed.rounds)
        return estimate(timed)

    monkeypatch.setattr(LearnedCosts, "_estimate", counted)
    timed = LearnedCosts(GUESSES[0])
    for _ in range(32):
        timed.add(1, 1.0, 1, 1.0)
    assert timed.costs.draft == pytest.approx(1.0, rel=0.1)

    for _ in range(_LAST_PASSES):
        timed.add(0, 0.0, 0, 1.0)
    estimated.clear()
    for _ in range(4 * _LAST_PASSES):
        timed.add(0, 0.0, 0, 4.0)
    assert len(estimated) == 4
    assert timed._estimate().draft == pytest.approx(0.25, rel=0.2)


@pytest.mark.parametrize(
    "machine", [(GUESSES[0], 0.05), (GUESSES[2], 0.0)], ids=["model", "lookup"]
)
def test_a_cheap_trial_replaces_what_was_learned_before(
    machine: tuple[DraftingCosts, float],
) -> None:
    guess, draft_cost = machine
    timed = LearnedCosts(guess)
    levels = 2 if guess.draft else 0
    for tokens in (1, 8, 0) * 14:
        timed.add(tokens if levels else 0, 9.0 * tokens, tokens, 1.0 + tokens)
    assert timed.costs.of_further(1, 1) > 0.9
    for _ in range(20):
        timed.add(0, 0.0, 0, 1.0)
    timed.add(levels, draft_cost * levels, 2, 1.06)
    assert timed.costs.of_further(1, 1) < 0.3


def test_costs_change_within_a_run_unless_they_are_given() -> None:
    made = Adaptive(
        AUTO, 0.5, 3.0, 40, AdaptiveInputs(CHEAP, Learned.prior(CHEAP), timed=LearnedCosts(CHEAP))
    )
    for _ in range(50):
        made.observe_seconds(2, 2.0, 2, 1.0)
    assert made._costs.draft > 0.5
    assert made._costs.verify == 0.5


@pytest.mark.parametrize(("accepted", "most"), [(0.3, 1.08), (0.5, 1.08), (0.9, 0.71)])
def test_drafts_for_a_mixture_of_experts_are_made_where_they_pay(
    accepted: float, most: float
) -> None:
    """Of 64 experts a token needs 8, which take 80 % of the target's time. The cost per output
    token is at most `most`."""
    rng = Random(0)
    guess = DraftingCosts(0.15, 0.03)
    made = Adaptive(
        AUTO, AUTO, 6.0, 40, AdaptiveInputs(guess, Learned.prior(guess), timed=LearnedCosts(guess))
    )
    chance = math.log(accepted / (1 - accepted))
    cost = 0.0
    tokens = 0
    for _ in range(1500):
        prob = min(max(1 / (1 + math.exp(-rng.gauss(chance, 1))), 0.02), 0.99)
        count = draft(made, *[{"entropy": 1.5 * (1 - prob), "top_prob": prob}] * 40)
        correct = next((number for number in range(count) if rng.random() > prob), count)
        seconds = 0.2 + 0.1 * 64 * (1 - (1 - 8 / 64) ** (count + 1))
        made.observe(count, correct)
        made.observe_seconds(count, 0.1 * count, count, seconds)
        cost = cost + seconds + 0.1 * count
        tokens = tokens + correct + 1
    assert cost / tokens < most


PROMPT = [5, 9, 7, 3]


def lengths(rounds: Sequence[Round]) -> list[int]:
    return [len(round_.draft.tokens) for round_ in rounds]


def test_a_seeded_run_keeps_its_costs_and_others_learn_and_store_them(
    pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same seed gives the same tokens, whatever was learned meanwhile, and in a later
    process."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(LearnedCosts, "spread", 1.0)  # as on a quiet machine
    shared = pair_of("llama", "near")
    seeded = SamplingParams(max_new_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    free = replace(seeded, seed=None)
    first = pair_of_models(shared.target, shared.draft)
    outputs = [first.generate(PROMPT, "adaptive", seeded)]
    assert not knowledge(first)._timed, "its costs follow from the models' sizes"
    first.generate(PROMPT, "adaptive", free)
    [timed] = knowledge(first)._timed.values()
    for sampling in (free, replace(free, temperature=0.0)):
        before = timed.rounds
        first.generate(PROMPT, "adaptive", sampling)
        assert timed.rounds > before
    own = knowledge(first).inputs(case_of(first, first.request(PROMPT, "adaptive", seeded))).learned
    assert not any(own is shared for shared in knowledge(first)._learned.values()), (
        "seeded runs share nothing"
    )
    assert len(knowledge(first)._learned) == 2
    timed.costs = DraftingCosts(9.0, 9.0)
    timed._idle = 0  # no trial is due
    outputs.append(first.generate(PROMPT, "adaptive", seeded))
    assert not lengths(first.generate(PROMPT, "adaptive", free, lookup=False).rounds)[1], (
        "costs hold for all settings"
    )
    timed.costs = DraftingCosts(9.0, 9.0)
    first.close()
    later = pair_of_models(shared.target, shared.draft)
    outputs.append(later.generate(PROMPT, "adaptive", seeded))
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    assert lengths(outputs[0].rounds) == lengths(outputs[1].rounds) == lengths(outputs[2].rounds)
    last = pair_of_models(shared.target, None)
    assert knowledge(last).inputs(case_of(last, last.request(PROMPT, "lookup"))).costs.draft == 0
    again = pair_of_models(shared.target, shared.draft)
    costs = knowledge(again).inputs(case_of(again, again.request(PROMPT, "adaptive"))).costs
    assert costs.draft > 1, "what differs much is stored when the pair is closed"
    given = knowledge(again).inputs(
        case_of(again, again.request(PROMPT, "adaptive", verify_cost=0.5))
    )
    assert (given.costs.verify, given.costs.draft) == (0.5, costs.draft)


# runs


def judged(rounds: Sequence[Round]) -> list[tuple[float, bool]]:
    """The score of the likeliest token of each level up to the first rejected one, and whether a
    token of it was accepted."""
    found = []
    for round_ in rounds:
        draft = round_.draft
        path = round_.verdict.path
        depths = [0]
        for parent in draft.parents:
            depths.append(depths[parent + 1] + 1)
        for level in range(1, draft.levels + 1):
            nodes = [node for node in range(len(draft.tokens)) if depths[node + 1] == level]
            accepted = any(node in path for node in nodes)
            if not accepted and (len(path) < level - 1 or round_.verdict.source != "correction"):
                continue
            entropy = draft.entropies[nodes[0]]
            top_prob = draft.top_probs[nodes[0]]
            assert accepted or TokenStatus.REJECTED in round_.statuses
            found.append((scores({"entropy": entropy, "top_prob": top_prob})[0], accepted))
    return found


def _ends_at_random(rng: Random, *_: int) -> bool:
    return rng.random() < 0.7


@pytest.mark.parametrize(
    ("method", "options", "window"),
    [
        ("adaptive", {"lookup": False}, None),
        ("sd", {"policy": "adaptive", "width": 2}, None),
        ("pearl", {"window": 3}, None),
        ("pearl", {"window": 3, "pre_verify": False}, None),
        ("pearl", {"window": 3, "post_verify": False}, None),
        ("pearl", {"window": 9, "pre_verify": False, "post_verify": False}, None),
        ("pearl", {"window": 6}, Window(4, 4, lead=2, is_flexible=True)),
    ],
)
def test_each_judged_token_of_a_run_is_learned_once(
    method: str, options: dict[str, object], window: Window | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own score and outcome, in order, also where drafts are cut when the target's pass
    ends."""
    given_ = {
        **options,
        "verify_cost": 0.02,
        **({"policy": "adaptive"} if method == "pearl" else {"draft_cost": 0.05}),
    }
    for seed in range(4):
        target = TableRunner(seed)
        model = TableRunner(seed + 1)
        same = torch.rand(6, 6, 1, generator=torch.Generator().manual_seed(seed)) < 0.7
        model.table = torch.where(same, target.table, model.table)
        worker: Any = DraftWorker.in_this_process(model)  # type: ignore[arg-type]
        with closing(worker), labels(monkeypatch) as learned:
            run = scripted_run(
                method, given_, target, model, SamplingParams(max_new_tokens=40), worker=worker
            )
            if window is not None:
                assert isinstance(run.schedule, Parallel)
                run.schedule = replace(run.schedule, window=window)
                # as if the target's pass had ended
                worker.ready()._server.show = partial(_ends_at_random, Random(seed))
            rounds = list(run.rounds())
        found = judged(rounds)
        assert [score for score, _ in learned[5.0]] == pytest.approx(
            [score for score, _ in found], abs=1e-3
        )
        assert [accepted for _, accepted in learned[5.0]] == [accepted for _, accepted in found]
        if options.get("post_verify") is options.get("pre_verify") is False:
            # each draft but its first token
            assert len(learned[10.0]) == len(found) - sum(map(bool, lengths(rounds)))
        if window is None:  # how long a flexible window's drafts are depends on the machine
            assert len(learned[5.0]) > 20
            assert len(set(lengths(rounds))) > 2
