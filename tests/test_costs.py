"""The cost model, PEARL's window from measured pass times, the measurement cache, and planning without any of it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from timed_models import SlowDrafter, SlowTarget

from specgen.base.files import cache_folder
from specgen.base.types import Context
from specgen.cli.output_writers import _window
from specgen.decoding.costs.pearl_window import LONGEST_WINDOW, ParallelCosts
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.decoding.costs.speedup import eesd_speedup
from specgen.methods.pearl_timing import time_parallel_passes


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


def test_the_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("SPECGEN_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specgen"


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
