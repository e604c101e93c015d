"""The store of measurements, and what pairs keep in it: PEARL's pass times, layers to skip, costs of rounds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from filelock import FileLock
from tuning_helpers import GREEDY

import specgen
from specgen import demo
from specgen.base.types import SamplingParams
from specgen.engine.devices import ThreadChoice
from specgen.methods.pearl import ParallelCosts
from specgen.pair import measurements, skip_search
from specgen.pair.measurements import Measurements
from specgen.pair.pair import Pair, pass_costs
from specgen.pair.skip_search import find_skips

COSTS = ParallelCosts(0.002, 0.0176, 0.012, 0.0127, 9, 64)


@pytest.fixture
def near(pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pair:
    """A pair of which nothing was measured, with an empty cache folder."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    return fresh(pair_of("llama", "near"))


def fresh(pair: Pair) -> Pair:
    """The same models as another process loads them."""
    made = Pair(pair.target, pair.draft)
    made._draft_runner = pair._draft_runner
    return made


class Source:
    """Counts measurements. The n-th one gives n, or the values in turn."""

    def __init__(self, *values: Any) -> None:
        self.values, self.count = values, 0

    def __call__(self) -> Any:
        self.count += 1
        return self.values[self.count - 1] if self.values else self.count


def got(store: Measurements, kind: str = "numbers", key: tuple[Any, ...] = (1,), source: Any = None, **given: Any) -> Any:
    return store.get(kind, key, source or (lambda: pytest.fail("measured again")), float, **given)


def test_a_value_is_measured_once_for_its_kind_and_key(near: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, source = near.measurements, Source()
    found = [got(store, source=source), got(store), got(store, key=(2,), source=source), got(store, "others", source=source)]
    assert found == [1, 1, 2, 3]
    other = fresh(near).measurements
    assert [got(other), got(other, key=(2,)), got(other, "others")] == [1, 2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"measurements.json", "measurements.lock"}
    monkeypatch.setattr(measurements, "_MOST", 2)
    assert [got(fresh(near).measurements, key=(key,), source=source) for key in (1, 3, 2)] == [1, 4, 2], "the latest values stay"


@pytest.mark.parametrize("content", ["[]", '{"numbers": 3}', "\x00\xff", '{"numbers": {'])
def test_a_damaged_file_is_measured_and_written_again(near: Pair, tmp_path: Path, content: str) -> None:
    path, source = tmp_path / "measurements.json", Source()
    path.write_text(content)
    assert got(near.measurements, source=source) == got(fresh(near).measurements) == 1
    [digest] = json.loads(path.read_text())["numbers"]
    path.write_text(json.dumps({"numbers": {digest: "x"}}))
    assert got(fresh(near).measurements, source=source) == 2, "what `read` refuses is measured again, too"


def test_what_cannot_be_written_is_measured_by_each_process(near: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(math.inf, 2.0, 3.0)
    assert got(near.measurements, source=source) == got(near.measurements) == math.inf
    monkeypatch.setattr(measurements, "_PATIENCE", 0.01)
    with FileLock(tmp_path / "measurements.lock"):
        assert got(fresh(near).measurements, source=source) == 2, "another process writes it"
    (tmp_path / "measurements.json").mkdir()
    assert got(fresh(near).measurements, source=source) == 3


@pytest.mark.parametrize("changed", ["exact", "backend", "dtype_name", "OMP_WAIT_POLICY", "threads", "cores"])
def test_a_value_holds_for_all_that_changes_a_pass(near: Pair, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    target = copy(near.target)
    got(near.measurements, source=Source())
    if changed in ("exact", "backend", "dtype_name"):
        setattr(target, changed, True if changed == "exact" else "another")
    elif changed == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    elif changed == "cores":
        monkeypatch.setattr("specgen.base.machine.os.sched_getaffinity", lambda _: range(17), raising=False)
    else:
        monkeypatch.setenv(changed, "17")
    other = Measurements(target, near.draft)
    assert got(other, source=Source(7.0)) == 7
    assert got(other, "alone", with_draft=False, source=Source(8.0)) == 8
    assert got(Measurements(target, None), "alone") == 8
    assert got(Measurements(target, None), source=Source(9.0)) == 9, "without a draft model"


# ------------------------------------------------------------------ PEARL's pass times


@pytest.mark.parametrize(
    "given",
    [{"record": True}, {"sampling": {"temperature": 1}}, {"context_length": 100}],
    ids=str,
)
def test_pass_times_are_kept_by_what_a_run_does(near: Pair, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    timed = Source(COSTS, replace(COSTS, draft_pass=0.004))
    monkeypatch.setattr("specgen.pair.pair.time_parallel_passes", lambda *_: timed())
    arguments: dict[str, Any] = {"context_length": 40, "sampling": {}} | given
    sampling = SamplingParams(**arguments.pop("sampling"))
    for _ in range(2):
        assert pass_costs(near, 40).draft_pass == 0.002
        assert pass_costs(near, sampling=sampling, **arguments).draft_pass == 0.004
    assert pass_costs(fresh(near), 33) == COSTS, "from the file, for all lengths up to the same power of two"
    assert timed.count == 2


# ------------------------------------------------------------------ layers to skip, and runs that measure nothing


def test_the_layers_to_skip_are_searched_once(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Source()
    monkeypatch.setattr(skip_search, "SEARCH_SECONDS", 0.0)
    found = find_skips(near.measurements, near.target, lambda *_: float(tried()))
    assert tried.count
    never: Any = lambda *_: pytest.fail("searched again")  # noqa: E731
    for pair in (near, fresh(near), Pair(near.target, None)):
        assert find_skips(pair.measurements, pair.target, never) == found
        request = pair.request([1, 5, 6], "selfsd", GREEDY)
        assert pair.run(request).settings.values["skip"] == found
        assert pair.generate([1, 5, 6], "selfsd", GREEDY).token_ids == pair.generate([1, 5, 6], "ar", GREEDY).token_ids


def test_a_run_starts_nothing_and_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with specgen.load(device="cpu", dtype="float32") as pair:
        pair.prepare(pair.request("def f(x):", "sd"))
        for started in (
            "workers.process.DraftProcess.__init__",
            "pair.pair.time_parallel_passes",
            "pair.skip_search.search_skips",
        ):
            monkeypatch.setattr(f"specgen.{started}", lambda *_: pytest.fail("a run starts or measures something"))
        monkeypatch.setattr("specgen.engine.model_runner.ModelRunner.logits", lambda *_, **__: pytest.fail("a run runs a model"))
        settings: dict[str, dict[str, Any]] = {"pearl": {"window": 3}, "selfsd": {"skip": "1"}}
        for name, method in specgen.METHODS.items():
            if not method.head or demo.head_folder(method.head).is_dir():
                pair.run(pair.request("def f(x):", name, **settings.get(name, {})))
        assert cast(Any, pair._worker)._channel is None


def test_the_number_of_threads_is_measured_once_unless_a_command_measures(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, used = [], []
    chosen = ThreadChoice(3, "the fewest", {3: 0.1, 4: 0.2})
    monkeypatch.setattr(measurements, "pick_threads", lambda work: timed.append(work) or chosen)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    for remembered, times in ((True, 1), (True, 1), (False, 2)):
        known = Measurements(near.target, near.draft)
        known.set_threads(lambda: None, remembered=remembered)
        assert (len(timed), known.threads, used.pop()) == (times, chosen, 3)
