"""PEARL's measured costs: one rule for the window everywhere, and a cache that holds no costs that runs contradict."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timed_models import SlowDrafter, SlowTarget
from tuning_helpers import GREEDY, PROMPTS

from specgen.base.types import Context, Draft
from specgen.decoding.costs.pearl_window import LONGEST_WINDOW, ParallelCosts, Window
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.decoding.costs.speedup import SpeedupModel
from specgen.decoding.policy import LengthPolicy
from specgen.methods import METHODS, resolve
from specgen.methods.adaptive import Adaptive
from specgen.methods.pearl_schedule import Parallel
from specgen.methods.pearl_timing import time_parallel_passes
from specgen.pair import preparation
from specgen.pair.pair import Pair
from specgen.tune import pair_inspection
from specgen.tune.outcome import grid
from specgen.tune.round_timing import record_reference
from specgen.tune.simulator import PricedParallelDrafter, PricedTarget, SimulatedClock, Simulator
from specgen.view import pair_report

BASE, TOKEN, DRAFT = 0.0110, 0.0007, 0.002  # seconds: of a target pass, for each of its tokens, of a draft pass
ROUNDS = RoundCosts(CostTable({8: Curve({0: 0.0, 1: DRAFT})}), CostTable({8: Curve({1: BASE + TOKEN, 2: BASE + 2 * TOKEN})}))


@pytest.fixture
def near(pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pair:
    """A pair of which nothing is known, with an empty cache of measurements."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    pair = pair_of("llama", "near")
    return Pair(pair.target, pair.draft)


def timed(monkeypatch: pytest.MonkeyPatch) -> ParallelCosts:
    """What timing passes of models with these costs finds, on a simulated clock."""
    with monkeypatch.context() as patch:
        target = SlowTarget(patch, BASE, TOKEN)
        return time_parallel_passes(target, SlowDrafter(DRAFT), Context([1] * 8))  # type: ignore[arg-type]


def simulated_window(pair: Pair) -> Window:
    """The window of a simulated run in tuning, with `window=auto`, the default."""
    reference = record_reference(pair, PROMPTS[0], GREEDY)
    made, method = Simulator(pair, [reference], GREEDY, {"parallel": ROUNDS}), METHODS["pearl"]
    run = made._run(method, resolve(method, {}), ROUNDS, 0, None)
    assert isinstance(run.schedule, Parallel)
    return run.schedule.window


@pytest.mark.parametrize("flexible", [False, True])
def test_run_inspect_and_tune_have_one_window(near: Pair, monkeypatch: pytest.MonkeyPatch, flexible: bool) -> None:
    """c = 8.3 by hand: a pass over 8 tokens takes 16.6 ms, a draft pass 2 ms. For a pass over one token, 11.7 ms, it is 6."""
    costs = timed(monkeypatch)
    monkeypatch.setattr(preparation, "time_parallel_passes", lambda *_: costs)
    for place in ("pair.pair", "tune.simulator"):
        monkeypatch.setattr(f"specgen.{place}.has_flexible_window", lambda *_: flexible)
    alone = SpeedupModel({1: 0.008, 2: 0.009}, 0.001, 256)
    announced = pair_inspection.measure_parallel(near, lambda _: None)
    assert announced is not None
    measured = pair_inspection._measured(alone, announced)
    assert (measured["pearl_window"], round(measured["cost_ratio"], 3)) == (8, 8.3)
    shown = " ".join(str(text) for _, text in pair_report._costs(alone, announced))
    assert "8.3 draft passes (c): PEARL's window is 8" in shown
    near.prepare(near.request(PROMPTS[0], "pearl", GREEDY))
    run = near.run(near.request(PROMPTS[0], "pearl", GREEDY))
    assert run.settings.values["window"] == 8
    assert run.costs is not None
    assert run.costs.as_dict()["window"] == 8
    assert isinstance(run.schedule, Parallel)
    assert run.schedule.window == simulated_window(near)
    assert run.schedule.window == (Window(12, 12, costs.flexible_window.lead, True) if flexible else Window(8, 6))


# ------------------------------------------------------------------ passes that slow each other


@given(st.floats(0.01, 0.99), st.floats(1e-4, 1.0), st.floats(1e-4, 1.0), st.integers(1, LONGEST_WINDOW), st.floats(-0.5, 0.0))
def test_pearl_is_no_faster_than_sd_where_the_models_take_turns(
    acceptance: float, draft: float, target: float, size: int, overlap: float
) -> None:
    costs = ParallelCosts(draft, target, target, 8, 64).with_overlap(overlap, draft, target)
    assert costs.speed(size, acceptance) <= costs.sequential_speed(size, acceptance) * (1 + 1e-9)
    assert costs.gain is not None
    assert costs.gain <= 1 + 1e-9


def simulated_speed(size: int, acceptance: float, seconds: float) -> float:
    """The tokens per second of PEARL's steps, each of so many seconds: a rejection is drawn for each token."""
    rng, tokens, steps, pending = random.Random(size), 0, 0, 1
    while steps < 8_000:
        steps += 1
        accepted = next((number for number in range(pending) if rng.random() >= acceptance), pending)
        tokens += accepted + (accepted < pending)
        pending = size if accepted == pending else 1
    return tokens / (steps * seconds)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_the_expected_speed_is_that_of_simulated_steps(size: int) -> None:
    for overlap, seconds in ((0.0, 8 + 2 * size), (1.0, max(8, 2 * size)), (0.5, 8 + 2 * size - 0.5 * min(8, 2 * size))):
        costs = ParallelCosts(3.0, 9.0, 9.0, 8, 64).with_overlap(overlap, 2.0, 8.0)
        assert costs.step_seconds(size) == seconds
        assert costs.speed(size, 0.6) == pytest.approx(simulated_speed(size, 0.6, seconds), rel=0.05)


@pytest.mark.parametrize(("overlap", "size"), [(None, 8), (1.2, 8), (1.0, 8), (0.9, 7), (0.0, 3), (-0.3, 3)])
def test_a_window_is_shorter_where_the_models_slow_each_other(overlap: float | None, size: int) -> None:
    """The best windows by hand: with one after the other, (8 + g) (1 + 0.7 / (1 - 0.7^g)) is least for g = 3."""
    measured = (None, None, None) if overlap is None else (overlap, 1.0, 8.0)
    costs = ParallelCosts(1.0, 8.0, 8.0, 8, 64).with_overlap(*measured)
    assert costs.window.size == size
    assert bool(costs.remark) == (overlap is not None and overlap <= 0)


@pytest.mark.parametrize(("overlap", "cost"), [(None, 0.0), (1.0, 0.0), (0.25, 0.75 / 8), (-0.5, 1.5 / 8)])
def test_a_drafted_token_costs_adaptive_what_it_adds_to_the_pass(overlap: float | None, cost: float, near: Pair) -> None:
    measured = (None, None, None) if overlap is None else (overlap, 1.0, 8.0)
    costs = ParallelCosts(1.0, 8.0, 8.0, 8, 64).with_overlap(*measured)
    request = near.request(PROMPTS[0], "pearl", GREEDY, policy="adaptive")
    inputs = near._knowledge.inputs(request, costs)
    assert inputs.slowdown == pytest.approx(cost)
    assert Adaptive("auto", "auto", 6.0, 40, inputs)._costs.draft == pytest.approx(cost)


def test_tuning_tries_the_default_window_first() -> None:
    assert grid("pearl")[0] == {"window": "auto"}
    assert {settings["window"] for settings in grid("pearl")} > {1, 16}


def test_a_simulated_draft_ends_with_the_simulated_pass() -> None:
    """Ten draft passes fit into a target pass. The target waits for two of them, and the token that is being drafted counts."""
    costs = RoundCosts(CostTable({8: Curve({0: 0.0, 1: 1.0})}), CostTable({8: Curve({1: 9.5, 2: 9.5})}), 0.0, 0.25)
    clock = SimulatedClock()
    reference: Any = SimpleNamespace(token_ids=[], prefill_seconds=0.0)
    target = PricedTarget(reference, costs, clock)
    drafted: Any = SimpleNamespace(propose=lambda *given: Draft.chain(range(20, 20 + given[2]), stop_reason="length"))
    drafter = PricedParallelDrafter(drafted, LengthPolicy(), target, costs, clock)
    context = Context([1, 2])
    context.extend([3])
    drafter.start(context, (), 20)
    assert list(drafter.first(2)) == [20, 21]
    target.logits(context, [20, 21])
    drafter.cut()
    draft = drafter.finish()
    assert list(draft.tokens) == list(range(20, 32)), "2 + 9.5 seconds: the twelfth token is complete after 12"
    assert clock.seconds()["draft"] == pytest.approx(2 + 0.5 + 0.25)
    assert clock.seconds()["verify"] == 9.5
    drafter.start(context, (), 4)
    target.logits(context)
    drafter.cut()
    assert (len(drafter.finish().tokens), clock.seconds()["draft"]) == (4, pytest.approx(2.75 + 0.25))
