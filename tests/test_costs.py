"""The cost model, PEARL's window from measured pass times, the measurement cache, and planning without any of it."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from timed_models import SlowDrafter, SlowTarget

import specgen
from specgen import demo
from specgen.base import measurement_cache
from specgen.base.files import cache_folder
from specgen.base.types import Context, SamplingParams
from specgen.cli.output_writers import _window
from specgen.decoding.costs.pearl_window import LONGEST_WINDOW, ParallelCosts
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.decoding.costs.speedup import eesd_speedup
from specgen.methods.pearl_timing import time_parallel_passes
from specgen.pair import preparation
from specgen.tune.pair_inspection import measure_parallel


@pytest.mark.parametrize(
    ("base", "token", "draft", "size", "first"), [(8, 0, 2, 4, 4), (6, 1, 2, 6, 4), (12.2, 1, 2, 12, 7), (2, 0, 6, 1, 1)]
)
def test_with_the_window_both_models_finish_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, base: float, token: float, draft: float, size: int, first: int
) -> None:
    """Times in ms. The window is the g for which a target pass over g tokens takes as long as g draft passes."""
    target, drafter = SlowTarget(monkeypatch, base / 1e3, token / 1e3), SlowDrafter(draft / 1e3)
    costs = time_parallel_passes(target, drafter, Context([1] * 10))  # type: ignore[arg-type]
    assert abs(costs.window.size - size) <= 1  # the iteration ends there
    assert costs.window.first == first
    assert costs.context_length == 10
    assert drafter.closed


def test_measuring_ends_in_time_on_slow_models(monkeypatch: pytest.MonkeyPatch) -> None:
    target = SlowTarget(monkeypatch, 0.3, 0)
    costs = time_parallel_passes(target, SlowDrafter(0.1), Context([1]))  # type: ignore[arg-type]
    assert target.now < 6
    assert costs.window.size == 3


@pytest.mark.parametrize(("ratio", "size"), [(0.2, 1), (1.4, 1), (1.6, 2), (10.7, 11), (1e9, LONGEST_WINDOW)])
def test_the_window_is_the_rounded_ratio(ratio: float, size: int) -> None:
    assert ParallelCosts(1.0, ratio, ratio, 8, 10).window.size == size


def test_a_flexible_window_by_hand() -> None:
    """A draft pass takes 1, a target pass 4 over one token and 5 over nine; each token is accepted with probability 0.7.

    Seconds with a lead of n: n for the lead, 4 + n / 8 for its pass, and 0.7 ** (n + 1) * 5 / (1 - 0.7 ** 5) for further passes.
    """
    costs = ParallelCosts(1.0, 5.0, 4.0, 9, 64)
    assert (costs.window.size, costs.window.first) == (5, 4)
    further = 5 / (1 - 0.7**5)
    seconds = [4 + 0.7 * further, 5.125 + 0.49 * further, 6.25 + 0.343 * further]
    assert min(seconds) == seconds[1]
    flexible = costs.flexible_window
    assert (flexible.lead, flexible.size, flexible.first, flexible.is_flexible) == (1, 8, 8, True)
    assert flexible.longest == 9
    assert ParallelCosts(1.0, 4.0, 6.0, 9, 64).window.first == 4, "never more than during a longer pass"
    assert ParallelCosts(0.001, 1.0, 1.0, 9, 64).flexible_window.size == LONGEST_WINDOW


def test_costs_follow_a_machine_that_is_slower() -> None:
    draft, target = (CostTable({8: Curve(points), 64: Curve(points)}) for points in ({1: 1.0}, {1: 3.0, 2: 4.0}))
    slower = RoundCosts(draft, target, 0.5, 0.25).times(2)
    assert slower.as_dict() == {
        "drafting": {8: {1: 2.0}, 64: {1: 2.0}},
        "judging": {8: {1: 6.0, 2: 8.0}, 64: {1: 6.0, 2: 8.0}},
        "looking": 1.0,
        "together": 0.5,
    }
    assert Curve({1: 3.0, 2: 1.0}).at(4) == 0.0, "times that fall, as short measurements may, are never below zero"


KEY = {"models": ["a", "b"], "context": 64}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "new"))
    return tmp_path / "new"


def test_measurements_are_kept_by_what_they_hold_for(cache: Path) -> None:
    assert measurement_cache.find("costs", KEY) is None
    for value in ({"draft_pass": 0.002}, {"draft_pass": 0.003}):
        measurement_cache.keep("costs", KEY, value)
        assert measurement_cache.find("costs", KEY) == value
    assert measurement_cache.find("costs", KEY | {"context": 128}) is None
    assert measurement_cache.find("skips", KEY) is None
    assert [path.suffix for path in (cache / "costs").iterdir()] == [".json"]


def test_a_cache_that_cannot_be_read_or_written_is_ignored(cache: Path) -> None:
    measurement_cache.keep("costs", KEY, {"draft_pass": 0.002})
    (path,) = (cache / "costs").iterdir()
    path.write_text(path.read_text()[:40])
    assert measurement_cache.find("costs", KEY) is None
    path.unlink()
    path.mkdir()
    measurement_cache.keep("costs", KEY, {})
    assert measurement_cache.find("costs", KEY) is None


@pytest.mark.parametrize("field", ["draft_pass", "target_pass", "width", "single_pass"])
@pytest.mark.parametrize("value", [None, "fast", -1, math.inf])
def test_cached_pass_times_have_to_be_positive_numbers(field: str, value: object) -> None:
    written: dict[str, object] = asdict(ParallelCosts(0.002, 0.017, 0.012, 8, 64))
    assert preparation._valid_costs(written) is not None
    assert preparation._valid_costs(written | {field: value}) is None
    assert preparation._valid_costs(None) is None


def test_the_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("SPECGEN_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specgen"


def test_the_bundled_pair_is_measured_once(demo_pair: specgen.Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_pair._pearl_costs, "_known", {})
    sampling = SamplingParams(max_new_tokens=16)
    demo_pair.prepare(demo_pair.request("def f(x):", "pearl", sampling))
    run = demo_pair.run(demo_pair.request("def f(x):", "pearl", sampling))
    costs = run.costs
    assert costs is not None
    assert run.settings.values["window"] == costs.window.size == max(1, round(costs.ratio))
    monkeypatch.setattr("specgen.pair.preparation.time_parallel_passes", lambda *_: pytest.fail("measured again"))
    for known in ({}, demo_pair._pearl_costs._known):  # from the file, from memory
        monkeypatch.setattr(demo_pair._pearl_costs, "_known", known)
        demo_pair.prepare(demo_pair.request("def f(x):", "pearl", sampling))
        assert demo_pair.run(demo_pair.request("def f(x):", "pearl", sampling)).costs == costs
    assert demo_pair.run(demo_pair.request("def f(x):", "pearl", sampling, window=3)).costs is None


def test_planning_starts_nothing_and_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with specgen.load(device="cpu", dtype="float32") as pair:
        pair.prepare(pair.request("def f(x):", "sd"))
        for started in (
            "workers.worker.DraftProcess.__init__",
            "pair.preparation.time_parallel_passes",
            "pair.preparation.search_skips",
        ):
            monkeypatch.setattr(f"specgen.{started}", lambda *_: pytest.fail("a plan starts or measures something"))
        monkeypatch.setattr("specgen.engine.model_runner.ModelRunner.logits", lambda *_, **__: pytest.fail("a plan runs a model"))
        settings: dict[str, dict[str, Any]] = {"pearl": {"window": 3}, "selfsd": {"skip": "1"}}
        measured = [name for name, method in specgen.METHODS.items() if method.policy == "adaptive"]
        settings |= {name: {"draft_cost": 0.1, "verify_cost": 0.02} for name in measured}
        for name, method in specgen.METHODS.items():
            if not method.head or demo.head_folder(method.head).is_dir():
                pair.run(pair.request("def f(x):", name, **settings.get(name, {})))
        for method in settings:
            with pytest.raises(specgen.SpecgenError, match=f"{method} is not prepared"):
                pair.run(pair.request("def f(x):", method))
        assert pair._thread_worker is None
        assert pair._process_worker is None or pair._process_worker._channel is None


def test_inspect_announces_the_window_that_a_run_uses(
    demo_pair: specgen.Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One measurement and one rule: c, rounded, of passes that both models run at the same time."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_pair._pearl_costs, "_known", {})
    monkeypatch.setattr("specgen.pair.preparation.time_parallel_passes", lambda *_: ParallelCosts(0.002, 0.0176, 0.012, 9, 256))
    prompt, sampling = [5] * 200, SamplingParams(max_new_tokens=100)
    demo_pair.prepare(demo_pair.request(prompt, "pearl", sampling))
    announced = measure_parallel(demo_pair, lambda _: None)
    assert announced is not None
    assert demo_pair.run(demo_pair.request(prompt, "pearl", sampling)).settings.values["window"] == announced.window.size == 9


def test_eesd_speedup_by_hand() -> None:
    """In each round 4 tokens are drafted, some are accepted, and the target gives one: 4 draft passes and one target pass.

    A draft pass takes a tenth of a target pass. So with all 4 accepted, 5 tokens take as long as 1.4 of plain decoding.
    """
    for accepted, speedup in ((4, 5 / 1.4), (2, 3 / 1.4), (1, 2 / 1.4)):
        assert eesd_speedup(accepted / 4, accepted / (accepted + 1), cost_ratio=10.0) == pytest.approx(speedup)
    assert eesd_speedup(1 / 4, 1 / 2, cost_ratio=0.5) == pytest.approx(2 / 9), "a draft pass takes two target passes"
    assert eesd_speedup(0.0, 0.0, cost_ratio=10.0) is None


def test_the_printed_times_of_passes_fit_the_printed_ratio() -> None:
    costs = ParallelCosts(0.000654, 0.009026, 0.004, 15, 64)
    schedule = SimpleNamespace(window=SimpleNamespace(is_flexible=False))
    line = _window(cast(Any, SimpleNamespace(costs=costs, schedule=schedule)))
    target, draft, ratio = map(float, re.findall(r"([\d.]+) ms", line) + re.findall(r"c ([\d.]+)", line))
    assert round(target / draft, 1) == ratio
    assert f"; {costs.window.first} while it verifies one token" in line
