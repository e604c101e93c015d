"""The store of measurements, and what pairs keep in it: PEARL's pass times, layers to skip, costs
of rounds."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock
from pair_helpers import pair_of_models, pass_costs
from tuning_helpers import GREEDY

import specgen
from specgen import demo
from specgen.base import machine
from specgen.base.measuring import PassCheck, Sample
from specgen.base.skipped_layers import SkippedLayers
from specgen.base.types import SamplingParams
from specgen.decoding.parallel_costs import ParallelCosts
from specgen.engine.devices import ThreadChoice
from specgen.methods import skip_search
from specgen.methods.selfsd import SelfSpeculativeDecoding
from specgen.methods.skip_search import find_skips, usual_skips
from specgen.models import measurements
from specgen.models.measurements import Measurements
from specgen.pair.pair import Pair

COSTS = ParallelCosts(0.002, 0.0176, 0.012, 0.0127, 9, 64)


@pytest.fixture
def near(pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pair:
    """A pair of which nothing was measured, with an empty cache folder."""
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    return fresh(pair_of("llama", "near"))


def fresh(pair: Pair) -> Pair:
    """The same models as another process loads them."""
    made = pair_of_models(pair.target, pair.draft)
    made.models._draft_runner = pair.models._draft_runner
    return made


class Source:
    """Counts measurements. The n-th one gives n, or the values in turn."""

    def __init__(self, *values: Any, spread: float = 1.0) -> None:
        self.values = values
        self.count = 0
        self.spread = spread

    def __call__(self) -> Sample[Any]:
        self.count += 1
        return Sample(self.values[self.count - 1] if self.values else self.count, 3, self.spread)


def got(
    store: Measurements,
    kind: str = "numbers",
    key: tuple[Any, ...] = (1,),
    source: Any = None,
    **given: Any,
) -> Any:
    return store.get(kind, key, source or (lambda: pytest.fail("measured again")), float, **given)


def test_a_value_is_measured_once_for_its_kind_and_key(
    near: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = near.measurements
    source = Source()
    found = [
        got(store, source=source),
        got(store),
        got(store, key=(2,), source=source),
        got(store, "others", source=source),
    ]
    assert found == [1, 1, 2, 3]
    other = fresh(near).measurements
    assert [got(other), got(other, key=(2,)), got(other, "others")] == [1, 2, 3]
    assert {path.name for path in tmp_path.iterdir()} == {"measurements.json", "measurements.lock"}
    monkeypatch.setattr(measurements, "_MOST", 2)
    assert [got(fresh(near).measurements, key=(key,), source=source) for key in (1, 3, 2)] == [
        1,
        4,
        2,
    ], "the latest values stay"


@pytest.mark.parametrize("content", ["[]", '{"numbers": 3}', "\x00\xff", '{"numbers": {'])
def test_a_damaged_file_is_measured_and_written_again(
    near: Pair, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "measurements.json"
    source = Source()
    path.write_text(content)
    assert got(near.measurements, source=source) == got(fresh(near).measurements) == 1
    [digest] = json.loads(path.read_text())["numbers"]
    path.write_text(
        json.dumps({"numbers": {digest: {"value": "x", "repetitions": 3, "spread": 1.0}}})
    )
    assert got(fresh(near).measurements, source=source) == 2, (
        "what `read` refuses is measured again, too"
    )


def test_what_cannot_be_written_is_measured_by_each_process(
    near: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(math.inf, 2.0, 3.0)
    assert got(near.measurements, source=source) == got(near.measurements) == math.inf
    monkeypatch.setattr(measurements, "_PATIENCE", 0.01)
    with FileLock(tmp_path / "measurements.lock"):
        assert got(fresh(near).measurements, source=source) == 2, "another process writes it"
    (tmp_path / "measurements.json").mkdir()
    assert got(fresh(near).measurements, source=source) == 3


def test_what_scatters_serves_its_process_and_is_not_stored(near: Pair, tmp_path: Path) -> None:
    loaded = Source(49.0, spread=3.0)
    quiet = Source(12.0, spread=1.1)
    assert [got(near.measurements, source=loaded), got(near.measurements)] == [49, 49]
    assert not (tmp_path / "measurements.json").exists()
    assert got(fresh(near).measurements, source=quiet) == 12
    assert got(fresh(near).measurements) == 12
    [entry] = json.loads((tmp_path / "measurements.json").read_text())["numbers"].values()
    assert entry == {"value": 12.0, "repetitions": 3, "spread": 1.1}


@pytest.mark.parametrize("in_another_process", [False, True])
def test_a_value_in_doubt_is_measured_again_and_no_scattered_sample_replaces_it(
    near: Pair, in_another_process: bool
) -> None:
    store = near.measurements
    got(store, source=Source(12.0))
    store.doubt("numbers", (1,))
    if in_another_process:
        store = fresh(near).measurements
    loaded = Source(49.0, spread=3.0)
    later = Source(14.0)
    assert got(store, source=loaded) == 12
    assert loaded.count == 1
    assert got(store) == 12, "once a process"
    assert got(fresh(near).measurements, source=later) == 14, (
        "the doubt stays until a steady sample"
    )
    assert got(fresh(near).measurements) == 14


def test_on_a_busy_machine_a_value_in_doubt_serves_without_another_measurement(
    near: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would scatter, and each start would take the time again. On a quiet one it is measured."""
    got(near.measurements, source=Source(12.0))
    near.measurements.doubt("numbers", (1,))
    with monkeypatch.context() as busy:
        busy.setattr(measurements, "is_busy", lambda: True)
        assert got(fresh(near).measurements) == 12
    assert got(fresh(near).measurements, source=Source(14.0)) == 14


@pytest.mark.parametrize("load", [1.4, 9.9, None])
def test_a_machine_is_busy_with_more_programs_than_cores(
    monkeypatch: pytest.MonkeyPatch, load: float | None
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    if load is None:
        monkeypatch.delattr(os, "getloadavg")
    else:
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert machine.is_busy() == (load == 9.9)


@pytest.mark.parametrize(
    "changed", ["exact", "backend", "dtype_name", "OMP_WAIT_POLICY", "threads", "cores"]
)
def test_a_value_holds_for_all_that_changes_a_pass(
    near: Pair, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    target = copy(near.target)
    got(near.measurements, source=Source())
    if changed == "exact":
        source = replace(target.files.source, exact=True)
        target.files = replace(target.files, source=source)
    elif changed == "backend":
        target.files = replace(target.files, architecture=None)
    elif changed == "dtype_name":
        target.precision = replace(target.precision, dtype=torch.float16)
    elif changed == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    elif changed == "cores":
        monkeypatch.setattr(
            "specgen.base.machine.os.sched_getaffinity", lambda _: range(17), raising=False
        )
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
def test_pass_times_are_kept_by_what_a_run_does(
    near: Pair, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    timed = Source(COSTS, replace(COSTS, draft_pass=0.004))
    monkeypatch.setattr("specgen.methods.pass_times.time_parallel_passes", lambda *_: timed())
    arguments: dict[str, Any] = {"context_length": 40, "sampling": {}} | given
    sampling = SamplingParams(**arguments.pop("sampling"))
    for _ in range(2):
        assert pass_costs(near, 40).draft_pass == 0.002
        assert pass_costs(near, sampling=sampling, **arguments).draft_pass == 0.004
    assert pass_costs(fresh(near), 33) == COSTS, (
        "from the file, for all lengths up to the same power of two"
    )
    assert timed.count == 2


@pytest.mark.parametrize(
    ("settings", "is_timed"),
    [
        ({}, True),
        ({"window": 3}, False),
        ({"window": 3, "policy": "adaptive"}, True),
        ({"window": 3, "policy": "adaptive", "verify_cost": 0.1}, False),
    ],
    ids=str,
)
def test_passes_are_timed_where_the_window_or_the_policy_follows_from_them(
    near: Pair, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], is_timed: bool
) -> None:
    timed = Source(COSTS)
    monkeypatch.setattr("specgen.methods.pass_times.time_parallel_passes", lambda *_: timed())
    run = near.run(near.request([1, 5, 6], "pearl", **settings))
    assert timed.count == is_timed
    assert run.costs == (None if settings else COSTS), "those that the window was computed from"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_greedy_drafts_of_another_process_end_with_the_target_pass(
    near: Pair, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    monkeypatch.setattr(
        "specgen.methods.pass_times.time_parallel_passes", lambda *_: Source(COSTS)()
    )
    monkeypatch.setattr(near.models.worker(), "is_process", True)
    sampling = SamplingParams(temperature=temperature)
    schedule: Any = near.run(near.request([1, 5, 6], "pearl", sampling)).schedule
    assert schedule.window == COSTS.run_window(is_flexible=temperature == 0)


def times(factor: float) -> ParallelCosts:
    return replace(
        COSTS,
        **{name: getattr(COSTS, name) * factor for name in asdict(COSTS) if name.endswith("_pass")},
    )


@pytest.mark.parametrize("factor", [1000.0, 0.001])
@pytest.mark.parametrize("in_another_process", [False, True])
def test_pass_times_far_from_those_of_a_run_are_measured_again_before_the_next(
    near: Pair, monkeypatch: pytest.MonkeyPatch, factor: float, in_another_process: bool
) -> None:
    """A busy start was taken for the machine's own speed. The run itself keeps its window."""
    timed = Source(times(factor), times(1.0))
    monkeypatch.setattr("specgen.methods.pass_times.time_parallel_passes", lambda *_: timed())
    request = near.request([1, 5, 6], "pearl", SamplingParams(max_new_tokens=60, ignore_eos=True))
    run = near.run(request)
    assert len(list(run.rounds())) > 8
    assert run.costs == times(factor)
    later = fresh(near) if in_another_process else near
    assert later.run(request).costs == times(1.0)


@pytest.mark.parametrize(
    ("target", "draft", "passes", "is_doubted"),
    [
        (1.4, 1.4, 9, False),
        (1.6, 1.0, 9, True),
        (1.0, 1.6, 9, True),
        (0.6, 1.0, 9, True),
        (1.0, 0.6, 9, True),
        (9.0, 9.0, 7, False),
        (0.6, 1.0, 2, True),
    ],
)
def test_a_run_doubts_costs_that_its_passes_do_not_have(
    target: float, draft: float, passes: int, is_doubted: bool
) -> None:
    doubts: list[bool] = []
    check = PassCheck(lambda: doubts.append(True))
    for number in range(passes):
        stall = 100 if number == 3 else 1
        check.add("target", 0.0176 * target * stall, 0.0176)
        check.add("draft", 0.008 * draft * stall, 0.008)
    check.end()
    assert bool(doubts) == is_doubted


# ---------------------------------------------------- layers to skip, and runs that measure nothing


def test_the_layers_to_skip_are_searched_once(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Source()
    monkeypatch.setattr(skip_search, "SEARCH_SECONDS", 0.0)
    found = find_skips(near.models, lambda *_: 10.0 if tried() else 0.0)
    assert tried.count
    never: Any = lambda *_: pytest.fail("searched again")  # noqa: E731
    for pair in (near, fresh(near), pair_of_models(near.target, None)):
        assert find_skips(pair.models, never) == found
        request = pair.request([1, 5, 6], "selfsd", GREEDY)
        assert pair.run(request).settings.values["skip"] == found
        assert (
            pair.generate([1, 5, 6], "selfsd", GREEDY).token_ids
            == pair.generate([1, 5, 6], "ar", GREEDY).token_ids
        )


def test_a_seeded_run_searches_for_no_layers(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specgen.methods.selfsd.find_skips", lambda *_: pytest.fail("searched"))
    sampling = SamplingParams(temperature=1.0, seed=1)
    run = near.run(near.request([1, 5, 6], "selfsd", sampling))
    assert run.settings.values["skip"] == usual_skips(near.target)


def test_each_run_skips_the_layers_that_it_names(near: Pair) -> None:
    first = near.models.without_layers("1").draft
    assert near.models.without_layers("1").draft is first
    assert near.models.without_layers("0").draft is not first


def test_the_speed_of_skips_is_without_the_prompts_pass(
    near: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = SimpleNamespace(token_ids=[1], seconds={"prefill": 9.0})
    round_ = SimpleNamespace(token_ids=[1, 2, 3], seconds={"draft": 0.25, "verify": 0.25})
    run = SimpleNamespace(rounds=lambda: iter([prefill, round_, round_]))
    method = SelfSpeculativeDecoding()
    monkeypatch.setattr(method, "start", lambda *_: run)
    skips = SkippedLayers.parse("1", near.target.model.shape.num_layers)
    assert method.speed(near.models, skips, [[1, 5], [6]]) == 6.0


def test_a_run_starts_nothing_and_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with specgen.load(device="cpu", dtype="float32") as pair:
        pair.prepare(pair.request("def f(x):", "sd"))
        assert pair.models._worker is None
        for started in (
            "workers.process.DraftProcess.__init__",
            "methods.pass_times.time_parallel_passes",
            "methods.skip_search.search_skips",
        ):
            monkeypatch.setattr(
                f"specgen.{started}", lambda *_: pytest.fail("a run starts or measures something")
            )
        monkeypatch.setattr(
            "specgen.engine.model_runner.ModelRunner.logits",
            lambda *_, **__: pytest.fail("a run runs a model"),
        )
        settings: dict[str, dict[str, Any]] = {"pearl": {"window": 3}, "selfsd": {"skip": "1"}}
        for name, method in specgen.METHODS.items():
            if not method.head or demo.head_folder(method.head).is_dir():
                pair.run(pair.request("def f(x):", name, **settings.get(name, {})))


def pick(
    monkeypatch: pytest.MonkeyPatch, choice: ThreadChoice, spread: float = 1.1
) -> list[object]:
    """Has this number of threads chosen, after runs of the work with it and with one more. Returns
    the work of each choice."""
    timed: list[object] = []

    def picked(work: Callable[[], object]) -> Sample[ThreadChoice]:
        timed.append(work)
        for threads in (choice.threads + 1, choice.threads, choice.threads):
            torch.set_num_threads(threads)
            work()
        return Sample(choice, 2, spread)

    monkeypatch.setattr(measurements, "pick_threads", picked)
    return timed


def test_the_number_of_threads_is_measured_once_unless_a_command_measures(
    near: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = 0
    used = []
    chosen = ThreadChoice(3, "the fewest", {3: 0.1, 4: 0.2})
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    for remembered, times, spread in (
        (True, 1, 2.0),
        (True, 2, 1.1),
        (True, 2, 1.1),
        (False, 3, 1.1),
    ):
        picked = pick(monkeypatch, chosen, spread)
        known = Measurements(near.target, near.draft)
        known.set_threads(lambda: {1: 0.1}, remembered=remembered)
        timed += len(picked)
        assert (timed, known.threads, used.pop()) == (times, chosen, 3)


@pytest.mark.parametrize(("seconds", "again"), [(1000.0, True), (1e-9, True), (None, False)])
def test_a_number_of_threads_whose_passes_are_not_those_of_a_run_is_chosen_again(
    near: Pair, monkeypatch: pytest.MonkeyPatch, seconds: float | None, again: bool
) -> None:
    """It was chosen beside a busy program. The next process chooses it again, also if its number
    was another one before."""
    threads = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: threads.__setitem__(0, number))
    request = near.request([1, 5, 6], "ar", SamplingParams(max_new_tokens=20, ignore_eos=True))
    taken = [round_.seconds["verify"] for round_ in fresh(near).run(request).rounds()][1:]
    passes = {1: min(taken) if seconds is None else seconds, 5: 1000.0}
    if seconds is None:  # as far as other programs let this one run evenly
        monkeypatch.setattr("specgen.base.measuring._LARGEST_FACTOR", 1000.0)

    numbers = []
    for choice in (3, 2):
        timed = pick(monkeypatch, ThreadChoice(choice, "the fewest", {choice: 0.1}))
        threads[0] = 4
        pair = fresh(near)
        work = lambda choice=choice: passes if threads[0] == choice else {1: 1e-12}  # noqa: E731
        pair.measurements.set_threads(work, remembered=True)
        assert len(list(pair.run(request).rounds())) > 8
        numbers.append((threads[0], len(timed)))
    assert numbers == [(3, 1), (2, 1) if again else (3, 0)]


def test_passes_that_cannot_be_compared_put_nothing_in_doubt(
    near: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other widths, and after a long context; and those of PEARL, whose target shares the
    processor."""
    monkeypatch.setattr(measurements, "LONGEST_COMPARED", 40)
    for method, prompt, passes in (
        ("ar", [1, 5, 6], {2: 1e3}),
        ("ar", [1, 5, 6] * 20, {1: 1e3}),
        ("pearl", [1, 5, 6], {1: 1e3}),
    ):
        pair = fresh(near)
        got(pair.measurements, source=Source())
        pair.measurements.watch("numbers", (1,), passes)
        settings = {"window": 2} if method == "pearl" else {}
        pair.generate(prompt, method, max_new_tokens=12, ignore_eos=True, **settings)
        assert got(pair.measurements) == 1
    pair.measurements.watch("numbers", (1,), {1: 1e3})
    pair.generate([1, 5, 6], "ar", max_new_tokens=12, ignore_eos=True)
    assert got(pair.measurements, source=Source(2.0)) == 2
