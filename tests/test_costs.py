"""PEARL's window from measured times, and what is kept of them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import specgen
from specgen.cost_model import LONGEST_WINDOW, ParallelCosts, measure
from specgen.decoding.policies import Always
from specgen.engine.model_runner import ModelOutput
from specgen.measurement_cache import CostStore, cache_folder
from specgen.types import Context, Draft, SamplingParams


class SlowTarget:
    """A pass takes a base and a bit a token."""

    def __init__(self, base: float, token: float) -> None:
        self.base, self.token = base, token
        self.passes = 0

    def logits(self, context: Context, draft: Sequence[int] = ()) -> ModelOutput:
        self.passes += 1
        time.sleep(self.base + self.token * (len(draft) + 1))
        return ModelOutput(torch.zeros(len(draft) + 1, 4))


class SlowDrafter:
    """Takes a while a token, by its own clock; waits for nobody."""

    policy = Always()

    def __init__(self, token: float) -> None:
        self.token, self.seconds, self.closed = token, 0.0, False

    def prefill(self, context: Context) -> None: ...

    def start(self, context: Context, pending: Sequence[int], limit: int) -> None:
        self._limit = limit

    def finish(self) -> Draft:
        self.seconds = self._limit * self.token
        return Draft([0] * self._limit, range(-1, self._limit - 1))

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("base", "token", "draft", "size", "first"), [(8, 0, 2, 4, 4), (6, 1, 2, 6, 4), (2, 0, 6, 1, 1)])
def test_the_window_is_where_both_end_together(base: float, token: float, draft: float, size: int, first: int) -> None:
    """Times in ms. Each token of a pass may cost: the window is the g at which a pass over g tokens takes g draft passes."""
    target, drafter = SlowTarget(base / 1e3, token / 1e3), SlowDrafter(draft / 1e3)
    costs = measure(target, drafter, Context([1] * 10))  # type: ignore[arg-type]
    assert abs(costs.window.size - size) <= 1
    assert abs(costs.window.first - first) <= 1
    assert costs.window.first <= costs.window.size
    assert costs.context_length == 10
    assert drafter.closed


def test_measuring_ends_in_time_on_slow_models() -> None:
    start = time.perf_counter()
    target = SlowTarget(0.3, 0)
    costs = measure(target, SlowDrafter(0.1), Context([1]))  # type: ignore[arg-type]
    assert time.perf_counter() - start < 6
    assert costs.window.size == 3


@pytest.mark.parametrize(("ratio", "size"), [(0.2, 1), (1.4, 1), (1.6, 2), (10.7, 11), (1e9, LONGEST_WINDOW)])
def test_the_window_is_the_rounded_ratio(ratio: float, size: int) -> None:
    assert ParallelCosts(1.0, ratio, ratio, 8, 10).window.size == size


COSTS, KEY = ParallelCosts(0.002, 0.017, 0.012, 8, 64), {"models": ["a", "b"], "context": 64}


def test_costs_are_kept_by_what_they_hold_for(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "new")
    assert store.find(KEY) is None
    store.keep(KEY, COSTS)
    assert store.find(KEY) == COSTS
    assert store.find(KEY | {"context": 128}) is None
    store.keep(KEY, replace(COSTS, width=9))
    assert store.find(KEY) == replace(COSTS, width=9)
    assert [path.suffix for path in (tmp_path / "new" / "costs").iterdir()] == [".json"]


@pytest.mark.parametrize("field", ["draft_pass", "target_pass", "width", "single_pass"])
@pytest.mark.parametrize("value", [None, "fast", -1])
def test_a_broken_file_counts_for_nothing(tmp_path: Path, field: str, value: object) -> None:
    store = CostStore(tmp_path)
    store.keep(KEY, COSTS)
    (path,) = (tmp_path / "costs").iterdir()
    written = json.loads(path.read_text())
    written["costs"][field] = value
    path.write_text(json.dumps(written))
    assert store.find(KEY) is None
    path.write_text(path.read_text()[:40])
    assert store.find(KEY) is None


def test_a_cache_that_cannot_be_written_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    CostStore(tmp_path / "file").keep(KEY, COSTS)
    assert CostStore(tmp_path / "file").find(KEY) is None


def test_the_cache_is_where_the_user_keeps_such_things(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("SPECGEN_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specgen"


def test_the_bundled_pair_is_measured_once(demo_pair: specgen.Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    sampling = SamplingParams(max_new_tokens=16)
    start = time.perf_counter()
    plan = demo_pair.plan("def f(x):", "pearl", sampling)
    taken = time.perf_counter() - start
    assert plan.costs is not None
    assert plan.settings.values["window"] == plan.costs.window.size == max(1, round(plan.costs.ratio))
    assert taken < 30, "a loose bound: a worker may have to start on a busy machine"
    monkeypatch.setattr("specgen.cost_model.measure", lambda *_: pytest.fail("measured again"))
    again = demo_pair.plan("def f(x):", "pearl", sampling)
    assert again.costs == plan.costs
    assert demo_pair.plan("def f(x):", "pearl", sampling, window=3).costs is None
