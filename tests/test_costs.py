"""The cost model: times of passes and rounds; PEARL's window by one rule everywhere, and its
expected gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_helpers import pair_of_models, pass_costs
from tuning_helpers import GREEDY, PROMPTS

from specgen.base.measuring import Sample
from specgen.base.types import (
    PHASES,
    Context,
    Draft,
    Mode,
    Round,
    SamplingParams,
    Verdict,
)
from specgen.decoding.costs import CostTable, Curve, RoundCosts, SpeedupModel, eesd_speedup
from specgen.decoding.parallel import Parallel
from specgen.decoding.parallel_costs import (
    LONGEST_WINDOW,
    Overlapping,
    ParallelCosts,
    RunOverlapping,
    Window,
)
from specgen.decoding.policy_base import LengthPolicy
from specgen.decoding.run import Clock
from specgen.engine.model_runner import ModelOutput
from specgen.methods import METHODS, pass_times, resolve
from specgen.methods.pass_times import PassTimes, time_parallel_passes
from specgen.pair.pair import Pair
from specgen.tune import pair_inspection
from specgen.tune.expected_time import PricedParallelDrafter, PricedTarget, SimulatedClock
from specgen.tune.round_timing import record_reference, time_parallel_rounds
from specgen.tune.simulator import Simulator
from specgen.view import pair_report


@pytest.fixture(autouse=True)
def passes_overlap() -> None:
    """Whether PEARL's passes overlap follows from the times that these tests set."""


# seconds: of a target pass, for each of its tokens, of a draft pass
BASE = 0.0110
TOKEN = 0.0007
DRAFT = 0.002
PASSES = CostTable({8: Curve({1: BASE + TOKEN, 2: BASE + 2 * TOKEN})})
ROUNDS = RoundCosts(CostTable({8: Curve({0: 0.0, 1: DRAFT})}), PASSES)


@pytest.mark.parametrize(
    ("base", "token", "draft", "size", "first"),
    [
        (8, 0, 2, 4, 4),
        (6, 1, 2, 6, 4),
        (12.2, 1, 2, 12, 7),
        (2, 0, 6, 1, 1),
    ],
)
def test_with_the_window_both_models_finish_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, base: float, token: float, draft: float, size: int, first: int
) -> None:
    """Times in ms. The window is the g for which a target pass over g tokens takes as long as g
    draft passes."""
    target = SlowTarget(monkeypatch, base / 1e3, token / 1e3)
    drafter = SlowDrafter(draft / 1e3)
    sample = time_parallel_passes(target, drafter, Context([1] * 10))  # type: ignore[arg-type]
    costs = sample.value
    assert sample.spread == pytest.approx(1)
    assert abs(costs.window.size - size) <= 1  # the iteration ends there
    assert costs.window.first == first
    assert costs.context_length == 10
    assert drafter.closed


def test_measuring_ends_in_time_on_slow_models(monkeypatch: pytest.MonkeyPatch) -> None:
    target = SlowTarget(monkeypatch, 0.3, 0)
    costs = time_parallel_passes(target, SlowDrafter(0.1), Context([1])).value  # type: ignore[arg-type]
    assert target.now < 6
    assert costs.window.size == 3


@given(st.lists(st.floats(-10, 1e6), min_size=1, max_size=30))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_window_follows_from_any_times(steps: list[float]) -> None:
    """A clock that stands, is set back, or shows that the machine slept."""
    ticks = cycle(steps)
    with pytest.MonkeyPatch.context() as patch:
        target = SlowTarget(patch, 0.0, 0.0, lambda _: next(ticks))
        drafter = SlowDrafter(0.0, lambda _: next(ticks))
        sample = time_parallel_passes(target, drafter, Context([1]))  # type: ignore[arg-type]
    for window in (sample.value.window, sample.value.flexible_window):
        assert 1 <= window.size <= LONGEST_WINDOW
        assert 0 <= window.lead < LONGEST_WINDOW
        assert 1 <= window.beside(1) <= window.size
    assert sample.spread >= 1


@pytest.mark.parametrize(
    ("ratio", "size"), [(0.2, 1), (1.4, 1), (1.6, 2), (10.7, 11), (1e9, LONGEST_WINDOW)]
)
def test_the_window_is_the_rounded_ratio(ratio: float, size: int) -> None:
    assert ParallelCosts(1.0, ratio, ratio, ratio, 8, 10).window.size == size


def test_the_window_is_no_longer_than_verifying_its_tokens_pays() -> None:
    """A draft pass takes 0.4, a target pass 1, and 1 more for each token: c has no end. Where 90 %
    are accepted, the time of a target pass for each accepted token is least over four tokens:
    (1 + n) / (1 - 0.9 ** n) is 14.8, 14.5, 14.7 for n = 3, 4, 5."""
    costs = ParallelCosts(0.4, 9.0, 2.0, 3.0, 8, 10)
    assert [round((1 + n) / (1 - 0.9**n), 1) for n in (3, 4, 5)] == [14.8, 14.5, 14.7]
    assert round(costs.ratio) == 22
    assert (costs.window.size, costs.flexible_window.size) == (4, 6)


def test_a_flexible_window_by_hand() -> None:
    """A draft pass takes 1, a target pass 4 over one token and 5 over nine; each token is accepted
    with probability 0.7.

    Seconds with a lead of n: n for the lead, 4 + n / 8 for its pass, and 0.7 ** (n + 1) * 5 / (1 -
    0.7 ** 5) for further passes. With a pass of 4.9 over two tokens instead of 4.125, a lead does
    not pay.
    """
    costs = ParallelCosts(1.0, 5.0, 4.0, 4.125, 9, 64)
    assert (costs.window.size, costs.window.first) == (5, 4)
    bent = replace(costs, target_pass=12.0, double_pass=8.0)
    assert [bent.window.beside(width) for width in (1, 2, 7, 12)] == [4, 8, 10, 12]
    assert replace(costs, double_pass=4.9).flexible_window.lead == 0
    further = 5 / (1 - 0.7**5)
    seconds = [4 + 0.7 * further, 5.125 + 0.49 * further, 6.25 + 0.343 * further]
    assert min(seconds) == seconds[1]
    flexible = costs.flexible_window
    assert (flexible.lead, flexible.size, flexible.first, flexible.is_flexible) == (1, 8, 8, True)
    assert flexible.longest == 9
    assert ParallelCosts(1.0, 4.0, 6.0, 6.0, 9, 64).window.first == 4, (
        "never more than during a longer pass"
    )
    assert ParallelCosts(0.001, 1.0, 1.0, 1.0, 9, 64).flexible_window.size == LONGEST_WINDOW


def test_the_gain_of_overlapping_passes_by_hand() -> None:
    """A draft pass takes 0.5, a target pass 3 beside it and 2 alone, whatever its width. Each token
    is accepted with probability 0.7.

    PEARL: a window of 6; 3 after a rejection, and 3 again 0.7 / (1 - 0.7 ** 6) times. In turn:
    drafts of n take n / 2 + 2 and give (1 - 0.7 ** (n + 1)) / 0.3 tokens; best is n = 2.
    """
    costs = ParallelCosts(0.5, 3.0, 3.0, 3.0, 8, 10, 0.5, 2.0, 2.0)
    own = (3 + 0.7 / (1 - 0.7**6) * 3) * 0.3
    in_turn = [(n / 2 + 2) * 0.3 / (1 - 0.7 ** (n + 1)) for n in (1, 2, 3)]
    assert min(in_turn) == in_turn[1]
    assert costs.expected_gain == pytest.approx(in_turn[1] / own)
    assert costs.length_in_turn == 2
    assert not costs.overlaps
    undisturbed = ParallelCosts(0.5, 3.0, 3.0, 3.0, 8, 10, 0.5, 3.0, 3.0)
    assert undisturbed.overlaps
    assert ParallelCosts(0.5, 3.0, 3.0, 3.0, 8, 10).expected_gain is None


def test_models_take_turns_where_overlapping_is_slower(
    near: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = ParallelCosts(0.5, 3.0, 3.0, 3.0, 8, 10, 0.5, 2.0, 2.0)
    monkeypatch.setattr(
        "specgen.methods.pass_times.time_parallel_passes", lambda *_: Sample(costs, 30, 1.0)
    )
    plain = near.generate(PROMPTS[0], method="ar", sampling=GREEDY)
    run = near.prepare(near.request(PROMPTS[0], "pearl", GREEDY))
    assert not isinstance(run.schedule, Parallel)
    assert run.settings.values["window"] == costs.length_in_turn == 2
    rounds = list(run.rounds())
    assert max(len(round_.draft.tokens) for round_ in rounds) == 2
    reasons = [round_.draft.stop_reason for round_ in rounds]
    assert "in turn 2" in reasons
    assert {reason for reason in reasons if reason} <= {"in turn 2", "length, in turn"}
    found = near.generate(PROMPTS[0], method="pearl", sampling=GREEDY)
    assert found.token_ids == plain.token_ids

    for given_ in ({"window": 3}, {"post_verify": False}):
        named = near.prepare(near.request(PROMPTS[0], "pearl", GREEDY, **given_))
        assert isinstance(named.schedule, Parallel), "what the user names is run as it is"


class ScriptedClock(Clock):
    """A clock on which each round takes `seconds_of_round`."""

    def __init__(self, seconds_of_round: float) -> None:
        super().__init__(None)
        self._seconds_of_round = seconds_of_round

    def seconds(self) -> dict[str, float]:
        return dict.fromkeys(PHASES, 0.0) | {"verify": self._seconds_of_round}


def round_of(
    seconds: float, mode: Mode = "post-verify", accepted: int = 3, forced: int = 0
) -> Round:
    """A round of PEARL that took so long. After the accepted tokens, of which the first ones are
    `forced`, the target corrects one."""
    tokens = accepted + 1
    draft = Draft.chain([1] * tokens, entropies=[0.0] * tokens, forced=frozenset(range(forced)))
    verdict = Verdict(tuple(range(accepted)), 2, "correction")
    return Round(0, mode, draft, verdict, {"verify": seconds}, {}, 1, 0)


# a target pass takes 3 seconds beside the other model; alone 2, and 3
CONTENTION = ParallelCosts(0.5, 3.0, 3.0, 3.0, 8, 10, 0.5, 2.0, 2.0)
NO_CONTENTION = ParallelCosts(0.5, 3.0, 3.0, 3.0, 8, 10, 0.5, 3.0, 3.0)


def add(runs: Overlapping, *rounds: Round, costs: ParallelCosts = CONTENTION) -> None:
    """Adds rounds of the kind that was decided for."""
    for round_ in rounds:
        length = runs.length_in_turn(costs, 40) if runs.is_in_turn else None
        runs.add(round_, costs, length, 40)


@pytest.mark.parametrize(
    ("overlapping", "in_turn", "taken"),
    [
        # after 8 periods in turn, then after 16, overlapping is tried again
        (6.0, 4.0, [False, *[True] * 8, False, *[True] * 16, False, True]),
        # and so are turns
        (6.0, 8.0, [False, True, *[False] * 8, True, *[False] * 16, True, False]),
        (5.0, 9.0, [False, False, False, False]),
    ],
)
def test_runs_take_turns_where_their_rounds_are_faster_so(
    overlapping: float, in_turn: float, taken: list[bool]
) -> None:
    """Each round accepts 3 of 4 tokens, and gives 4. Seconds of a round are scripted: 5.7 are
    predicted with overlapping passes, 5.1 in turn."""
    runs = Overlapping()
    seen = []
    for _ in taken:
        seen.append(runs.is_in_turn)
        for _ in range(16):
            assert runs.is_in_turn == seen[-1]
            add(runs, round_of(in_turn if runs.is_in_turn else overlapping))
    assert seen == taken


def test_a_trial_that_wins_is_no_trial_any_more() -> None:
    """After a disturbed period, and 8 periods in turn, passes overlap for good."""
    runs = Overlapping()
    add(runs, *[round_of(100.0)] * 16)
    for _ in range(8):
        assert runs.is_in_turn
        assert not runs.is_trial
        add(runs, *[round_of(5.0)] * 16)
    assert runs.is_trial
    for _ in range(8):
        assert not runs.is_in_turn
        add(runs, *[round_of(4.0)] * 16)
        assert not runs.is_trial or runs.is_in_turn
    assert runs.is_in_turn, "the next trial comes as soon as the first"
    assert runs.is_trial


def test_a_few_disturbed_rounds_do_not_end_overlapping() -> None:
    """Pre-verifies of 2 seconds and post-verifies of 6 give 1 second for each token. Their mean
    seconds are far above, in rounds that a busy machine disturbs."""
    runs = Overlapping()
    for number in range(8):
        disturbance = 100.0 if number < 3 else 0.0
        add(runs, round_of(2.0 + disturbance, "pre-verify"), round_of(6.0 + disturbance))
    assert not runs.is_in_turn
    add(runs, *[round_of(100.0)] * 16)
    assert runs.is_in_turn
    assert runs.length_in_turn(CONTENTION, 40) == 3


def test_forced_tokens_say_nothing_of_the_speed_of_overlapping_passes() -> None:
    """3 seconds for the only token that no grammar forces; in turn, a rejected draft takes 2.5."""
    runs = Overlapping()
    for _ in range(16):
        assert not runs.is_in_turn
        add(runs, round_of(3.0, forced=3))
    assert runs.is_in_turn
    assert runs.length_in_turn(CONTENTION, 40) == 1


def test_turns_within_a_run_leave_its_tokens_as_they_are(
    near: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 16 rounds that took long, and the first one, the draft model drafts while the target
    waits."""
    costs = ParallelCosts(0.5, 3.0, 3.0, 3.0, 8, 10, 0.5, 3.0, 3.0)
    monkeypatch.setattr(
        "specgen.methods.pass_times.time_parallel_passes", lambda *_: Sample(costs, 30, 1.0)
    )
    sampling = replace(GREEDY, max_new_tokens=150, ignore_eos=True)
    plain = near.generate(PROMPTS[0], method="ar", sampling=sampling)
    run = near.prepare(near.request(PROMPTS[0], "pearl", sampling))
    assert isinstance(run.schedule, Parallel)
    run.clock = ScriptedClock(100.0)
    rounds = list(run.rounds())
    assert [token for round_ in rounds for token in round_.token_ids] == plain.token_ids
    modes = [round_.mode for round_ in rounds]
    assert "pre-verify" in modes[1:18], "after a rejection"
    assert modes[18:34] == ["post-verify"] * 16
    in_turn = ["in turn" in (round_.draft.stop_reason or "") for round_ in rounds]
    assert not any(in_turn[:18])
    assert all(in_turn[19:34]), "after what was drafted before the first turn"

    assert run.schedule.overlapping is not None
    later = near.prepare(near.request(PROMPTS[1], "pearl", sampling))
    assert not isinstance(later.schedule, Parallel), "the next run needs no worker"
    assert later.settings.values["window"] == run.schedule.overlapping.length_of_next
    later.clock = ScriptedClock(1000.0)
    plain = near.generate(PROMPTS[1], method="ar", sampling=sampling)
    rounds = list(later.rounds())
    assert [token for round_ in rounds for token in round_.token_ids] == plain.token_ids
    assert {round_.mode for round_ in rounds[1:]} == {"sequential"}
    assert len(rounds) > 18
    latest = near.prepare(near.request(PROMPTS[1], "pearl", sampling))
    assert isinstance(latest.schedule, Parallel), "turns were slower"

    seeded = replace(sampling, temperature=1.0, seed=3)
    run = near.prepare(near.request(PROMPTS[0], "pearl", seeded))
    assert isinstance(run.schedule, Parallel)
    assert run.schedule.overlapping is None, "no text of a seed depends on the clock"


def test_a_text_whose_tokens_are_rejected_does_not_decide() -> None:
    """After a disturbed period, all rounds take twice as long as their passes predict for what they
    accept: first 3 of 4 tokens, then none. Overlapping is faster at the rates of both texts."""
    costs = NO_CONTENTION
    runs = Overlapping()
    add(runs, *[round_of(1000.0)] * 16, costs=costs)
    lengths = []
    for accepted, rate in ((3, 0.75), (0, 0.0)):
        for _ in range(4):  # periods
            assert runs.is_in_turn
            lengths.append(runs.length_in_turn(costs, 40))
            seconds = 2 * (accepted + 1) * costs.seconds_in_turn(lengths[-1], rate)
            add(runs, *[round_of(seconds, accepted=accepted)] * 16, costs=costs)
    assert lengths[0] == 3
    assert lengths[-1] == 2, "fewer tokens are drafted where fewer are accepted"
    assert runs.length_in_turn(costs, 1) == 1
    runs.forget_acceptance()
    assert runs.length_in_turn(costs, 40) == 3
    for _ in range(4):
        assert not runs.is_in_turn
        seconds = 2 * costs.seconds_overlapping(0.0)
        add(runs, *[round_of(seconds, accepted=0)] * 16, costs=costs)


def test_runs_with_other_costs_at_the_same_time_are_judged_by_their_own() -> None:
    """Passes take 10 times as long in a longer context. All rounds take what their passes
    predict."""
    costs = {1: NO_CONTENTION, 10: ParallelCosts(5.0, 30.0, 30.0, 30.0, 8, 99, 5.0, 30.0, 30.0)}
    runs = Overlapping()
    for _ in range(64):
        for factor, own in costs.items():
            assert not runs.is_in_turn
            add(runs, round_of(4 * factor * NO_CONTENTION.seconds_overlapping(0.75)), costs=own)


def test_a_run_in_turn_keeps_its_length_and_is_judged_by_it() -> None:
    runs = Overlapping()
    add(runs, *[round_of(100.0)] * 16)
    run = RunOverlapping(runs, CONTENTION, longest=40)
    assert run.length_in_turn == 3
    hard = round_of(CONTENTION.seconds_in_turn(3, 0.0), accepted=0)
    for _ in range(1 + 7 * 16):
        assert runs.is_in_turn
        run.add(hard, in_turn=True)
    assert run.length_of_next == 3
    assert runs.length_in_turn(CONTENTION, 40) == 1, "a later run's"
    assert runs._in_turn_over_predicted == pytest.approx(1.0)


def test_rounds_without_a_token_of_the_draft_model_do_not_decide() -> None:
    """Nor does the first one with such a token, which waits for the prompt, in each run."""
    runs = Overlapping()
    drafted = round_of(6.0)
    draft = drafted.draft
    others = [
        replace(drafted, draft=Draft()),
        replace(drafted, draft=replace(draft, entropies=[])),
        replace(drafted, draft=replace(draft, forced=frozenset(range(4)))),
    ]
    for _ in range(2):
        run = RunOverlapping(runs, CONTENTION, longest=40)
        for round_ in [*others * 16, round_of(1000.0), *[drafted] * 8]:
            assert not runs.is_in_turn
            run.add(round_, in_turn=False)
    assert runs.is_in_turn, "short runs decide together"
    assert run.length_of_next == 3


def test_a_run_with_a_worker_takes_turns_and_tries_overlapping_again() -> None:
    """Its rounds in turn do not say how long turns take in this process."""
    runs = Overlapping()
    run = RunOverlapping(runs, CONTENTION, longest=2)
    rounds = [round_of(6.0)] * 16
    for round_ in [*rounds, *rounds]:
        run.add(round_, in_turn=run.length_of_next is not None)
    assert run.length_of_next == 2, "no draft is longer than the worker has room for"
    for round_ in rounds * 7:
        run.add(round_, in_turn=True)
    assert run.length_of_next == 2
    for round_ in rounds:
        run.add(round_, in_turn=True)
    assert run.length_of_next is None
    for round_ in rounds:
        run.add(round_, in_turn=False)
    assert run.length_of_next == 2


def test_a_run_does_not_try_turns_in_the_worker() -> None:
    runs = Overlapping()
    run = RunOverlapping(runs, CONTENTION, longest=40)
    runs.is_in_turn = runs.is_trial = True
    assert run.length_of_next is None
    assert RunOverlapping(runs, CONTENTION, longest=40).length_of_next == 2


def test_inspect_runs_pearl_beside_sd(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round takes a second, so that the speeds are tokens by rounds."""
    costs = ParallelCosts(0.001, 0.003, 0.003, 0.003, 8, 10, 0.001, 0.002, 0.002)
    clock = ScriptedClock(1.0)
    monkeypatch.setattr("specgen.decoding.Clock.of_device", lambda _: clock)
    monkeypatch.setattr(pair_inspection, "example_prompts", lambda _: PROMPTS[:2])
    monkeypatch.setattr(pair_inspection, "_TRIAL_SECONDS", 600.0)
    trial = pair_inspection.try_overlapping(near, costs, lambda _: None)
    assert trial is not None
    assert (trial.length, trial.prompts) == (costs.length_in_turn, 2)

    sampling = replace(GREEDY, max_new_tokens=48, ignore_eos=True)
    speeds = []
    for method, setting in (("pearl", {"window": 3}), ("sd", {"k": trial.length})):
        results = near.generate(PROMPTS[:2], method, sampling, **setting)
        rounds = [round_ for result in results for round_ in result.rounds[1:]]
        speeds.append(sum(len(round_.token_ids) for round_ in rounds) / len(rounds))
        if method == "pearl":
            accepted = sum(len(round_.accepted_ids) for round_ in rounds)
            rejected = sum(round_.verdict.source == "correction" for round_ in rounds)
            assert trial.acceptance == pytest.approx(accepted / (accepted + rejected))
    assert trial.gain == pytest.approx(speeds[0] / speeds[1])
    assert trial.expected_gain == pytest.approx(costs.gain(trial.acceptance, trial.length))

    unknown = replace(costs, draft_alone=0.0)
    assert pair_inspection.try_overlapping(near, unknown, lambda _: None) is None


@pytest.mark.parametrize("verification", [2.0, 3.0])
def test_with_a_seed_the_profile_decides_whether_passes_overlap(
    near: Pair, monkeypatch: pytest.MonkeyPatch, verification: float
) -> None:
    """Target passes take 3 seconds beside the draft model, and `verification` alone."""

    def rounds(target_pass: float) -> RoundCosts:
        drafting = CostTable({8: Curve({0: 0.0, 1: 0.5})})
        return RoundCosts(drafting, CostTable({8: Curve({1: target_pass})}))

    tuned = {"parallel": rounds(3.0), "model": rounds(verification)}
    monkeypatch.setattr(near.measurements, "tuned_costs", tuned)
    seeded = replace(GREEDY, temperature=1.0, seed=3)
    run = near.prepare(near.request(PROMPTS[0], "pearl", seeded))
    assert isinstance(run.schedule, Parallel) == (verification == 3.0)
    monkeypatch.setattr(near.measurements, "tuned_costs", {"model": tuned["model"]})
    assert isinstance(near.prepare(near.request(PROMPTS[0], "pearl", seeded)).schedule, Parallel)


def test_tune_times_and_simulates_pearl_where_models_take_turns(
    near: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = ParallelCosts(0.5, 3.0, 3.0, 3.0, 8, 10, 0.5, 2.0, 2.0)
    monkeypatch.setattr(
        "specgen.methods.pass_times.time_parallel_passes", lambda *_: Sample(costs, 30, 1.0)
    )
    reference = record_reference(near, PROMPTS[0], GREEDY)
    timed_rounds = time_parallel_rounds(near, reference, GREEDY)
    assert timed_rounds.draft_cost.at(2, costs.context_length) == 2 * costs.draft_pass
    assert timed_rounds.verification_cost.at(8, costs.context_length) == costs.target_pass

    simulator = Simulator(near, [reference], GREEDY, {"parallel": timed_rounds})
    found = simulator.run("pearl", {})
    assert found.new_tokens == len(reference.token_ids)
    assert 0 < found.drafted <= costs.length_in_turn * found.rounds


def test_costs_follow_a_machine_that_is_slower() -> None:
    draft, target = (
        CostTable({8: Curve(points), 64: Curve(points)}) for points in ({1: 1.0}, {1: 3.0, 2: 4.0})
    )
    slower = RoundCosts(draft, target, 0.5, 0.25).times(2)
    assert slower.as_dict() == {
        "drafting": {8: {1: 2.0}, 64: {1: 2.0}},
        "judging": {8: {1: 6.0, 2: 8.0}, 64: {1: 6.0, 2: 8.0}},
        "looking": 1.0,
        "together": 0.5,
    }
    assert Curve({1: 3.0, 2: 1.0}).at(4) == 0.0, (
        "times that fall, as short measurements may, are never below zero"
    )


def test_eesd_speedup_by_hand() -> None:
    """In each round 4 tokens are drafted, some are accepted, and the target gives one: 4 draft
    passes and one target pass.

    A draft pass takes a tenth of a target pass. So with all 4 accepted, 5 tokens take as long as
    1.4 of plain decoding.
    """
    for accepted, speedup in ((4, 5 / 1.4), (2, 3 / 1.4), (1, 2 / 1.4)):
        assert eesd_speedup(
            accepted / 4, accepted / (accepted + 1), cost_ratio=10.0
        ) == pytest.approx(speedup)
    assert eesd_speedup(1 / 4, 1 / 2, cost_ratio=0.5) == pytest.approx(2 / 9), (
        "a draft pass takes two target passes"
    )
    assert eesd_speedup(0.0, 0.0, cost_ratio=10.0) is None


class SlowTarget:
    """A pass takes a base time plus a time per token, on a simulated clock."""

    num_embeddings = 4
    device = torch.device("cpu")

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        base: float,
        token: float,
        slowed: Callable[[float], float] = lambda seconds: seconds,
    ) -> None:
        self.base = base
        self.token = token
        self.now = 0.0
        self.slowed = slowed
        self.own = 0.0  # seconds in which the thread runs
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr("time.thread_time", lambda: self.own)

    def logits(self, context: Context, draft: Sequence[int] = ()) -> ModelOutput:
        seconds = self.base + self.token * (len(draft) + 1)
        self.own += seconds
        self.now += self.slowed(seconds)
        return ModelOutput(torch.zeros(len(draft) + 1, 4))


class SlowDrafter:
    """Reports a fixed time per token without waiting."""

    policy = LengthPolicy()

    def __init__(
        self, token: float, slowed: Callable[[float], float] = lambda seconds: seconds
    ) -> None:
        self.token = token
        self.seconds = 0.0
        self.own_seconds = 0.0
        self.closed = False
        self.slowed = slowed

    def prefill(self, context: Context) -> None: ...

    def start(self, context: Context, pending: Sequence[int], limit: int) -> None:
        self._limit = limit

    def finish(self) -> Draft:
        self.own_seconds = self._limit * self.token
        self.seconds = self.slowed(self.own_seconds)
        return Draft([0] * self._limit, range(-1, self._limit - 1))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def near(pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pair:
    """A pair of which nothing is known, with an empty cache of measurements."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    pair = pair_of("llama", "near")
    return pair_of_models(pair.target, pair.draft)


def timed(monkeypatch: pytest.MonkeyPatch) -> ParallelCosts:
    """What timing passes of models with these costs finds, on a simulated clock."""
    with monkeypatch.context() as patch:
        target = SlowTarget(patch, BASE, TOKEN)
        return time_parallel_passes(target, SlowDrafter(DRAFT), Context([1] * 8)).value  # type: ignore[arg-type]


def busy(rng: Random, seconds: float) -> float:
    """What work takes beside busy programs: four times of five it is kept waiting for a while."""
    return seconds if rng.random() < 0.2 else seconds * rng.uniform(1.5, 8)


@pytest.mark.parametrize("first", ["busy", "evenly busy", "quiet"])
def test_a_busy_machine_leaves_no_window_behind(
    near: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: str
) -> None:
    """On a quiet machine the window is 8. What was measured beside busy programs is near it, and is
    not kept."""
    slowed: dict[str, Callable[[float], float]] = {
        "busy": partial(busy, Random(1)),
        "evenly busy": lambda seconds: 3 * seconds,
        "quiet": lambda seconds: seconds,
    }
    state = [first]

    def passes(*_: object) -> Sample[ParallelCosts]:
        with monkeypatch.context() as patch:
            target = SlowTarget(patch, BASE, TOKEN, slowed[state[0]])
            drafter = SlowDrafter(DRAFT, slowed["quiet" if state[0] == "evenly busy" else state[0]])
            return time_parallel_passes(target, drafter, Context([1] * 8))  # type: ignore[arg-type]

    monkeypatch.setattr("specgen.methods.pass_times.time_parallel_passes", passes)
    pair = near
    windows = [pass_costs(pair, 8).window.size]
    assert (tmp_path / "cache/measurements.json").exists() == (first == "quiet")
    for state[0] in ("busy", "quiet") if first == "quiet" else ("quiet", "busy"):
        pair = pair_of_models(near.target, near.draft)
        key = pair.models.kept(PassTimes)._key(8, SamplingParams(), record=False)
        pair.measurements.doubt(pass_times.PASSES, key)
        windows.append(pass_costs(pair, 8).window.size)
    assert windows[1:] == [8, 8]
    assert windows[0] == 8 if first == "quiet" else 6 <= windows[0] <= 12


def simulated_window(pair: Pair) -> Window:
    """The window of a simulated run in tuning, with `window=auto`, the default."""
    reference = record_reference(pair, PROMPTS[0], GREEDY)
    made = Simulator(pair, [reference], GREEDY, {"parallel": ROUNDS})
    method = METHODS["pearl"]
    run = made._run(method, resolve(method, {}), ROUNDS, 0, None)
    assert isinstance(run.schedule, Parallel)
    return run.schedule.window


@pytest.mark.parametrize("flexible", [False, True])
def test_run_inspect_and_tune_have_one_window(
    near: Pair, monkeypatch: pytest.MonkeyPatch, flexible: bool
) -> None:
    """c = 8.3 by hand: a pass over 8 tokens takes 16.6 ms, a draft pass 2 ms. For a pass over one
    token, 11.7 ms, it is 6."""
    costs = timed(monkeypatch)
    monkeypatch.setattr(
        "specgen.methods.pass_times.time_parallel_passes", lambda *_: Sample(costs, 30, 1.0)
    )
    worker = near.models.worker()
    assert worker is not None
    monkeypatch.setattr(worker, "is_process", flexible)
    ready = worker.ready()  # it drafts in this process all the same
    monkeypatch.setattr(worker, "ready", lambda: ready)
    alone = SpeedupModel({1: 0.008, 2: 0.009}, 0.001, 256)
    announced = pair_inspection.measure_parallel(near, lambda _: None)
    assert announced is not None
    measured = pair_inspection._measured(alone, announced)
    assert (measured["pearl_window"], round(measured["cost_ratio"], 3)) == (8, 8.3)
    shown = " ".join(str(text) for _, text in pair_report._costs(alone, announced))
    assert "8.3 draft passes (c): PEARL's window is 8" in shown
    run = near.prepare(near.request(PROMPTS[0], "pearl", GREEDY))
    assert run.settings.values["window"] == 8
    assert run.costs is not None
    assert run.costs.as_dict()["window"] == 8
    assert isinstance(run.schedule, Parallel)
    assert run.schedule.window == simulated_window(near)
    assert run.schedule.window == (
        Window(12, 12, costs.flexible_window.lead, True) if flexible else Window(8, 6, second=6)
    )


def test_a_simulated_draft_ends_with_the_simulated_pass() -> None:
    """Ten draft passes fit into a target pass. The target waits for two of them, and the token that
    is being drafted counts."""
    costs = RoundCosts(
        CostTable({8: Curve({0: 0.0, 1: 1.0})}), CostTable({8: Curve({1: 9.5, 2: 9.5})}), 0.0, 0.25
    )
    clock = SimulatedClock(costs)
    reference: Any = SimpleNamespace(token_ids=[], prefill_seconds=0.0)
    target = PricedTarget(reference, clock)
    drafted: Any = SimpleNamespace(
        propose=lambda *given: Draft.chain(range(20, 20 + given[2]), stop_reason="length")
    )
    drafter = PricedParallelDrafter(drafted, LengthPolicy(), target, clock)
    context = Context([1, 2])
    context.extend([3])
    drafter.start(context, (), 20)
    assert list(drafter.first(2)) == [20, 21]
    target.logits(context, [20, 21])
    drafter.cut()
    draft = drafter.finish()
    assert list(draft.tokens) == list(range(20, 32)), (
        "2 + 9.5 seconds: the twelfth token is complete after 12"
    )
    assert clock.seconds()["draft"] == pytest.approx(2 + 0.5 + 0.25)
    assert clock.seconds()["verify"] == 9.5
    drafter.start(context, (), 4)
    target.logits(context)
    drafter.cut()
    assert (len(drafter.finish().tokens), clock.seconds()["draft"]) == (
        4,
        pytest.approx(2.75 + 0.25),
    )
