"""The phase `policy` of a round: the time of the length policy and of the acceptance predictor, apart from drafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_models import TableRunner, TopProbPredictor, scripted_run

from specgen.base.types import SamplingParams
from specgen.decoding import drafting
from specgen.decoding import policy as policy_module
from specgen.decoding import run as run_module
from specgen.engine.devices import WaitingTimer
from specgen.methods.eesd import CaliTS
from specgen.pair.figures import Figures
from specgen.view.charts import time_shares
from specgen.view.generation import footer
from specgen.workers.worker import DraftWorker

PASS, DECIDE, UPDATE, BEGIN, SCORE = 1000.0, 100.0, 10.0, 1.0, 0.125  # seconds that each takes


class Clock:
    """A clock that only advances where the test says so. `reads` counts how often it was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reads, self._patch = 0.0, 0, monkeypatch.setattr
        monkeypatch.setattr(drafting, "perf_counter", self.read)
        monkeypatch.setattr(policy_module, "perf_counter", self.read)
        monkeypatch.setattr(run_module, "time", SimpleNamespace(perf_counter=self.read))

    def read(self) -> float:
        self.reads += 1
        return self.now

    def takes(self, owner: Any, name: str, seconds: float) -> None:
        """Each call of the method takes this long."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            self.now += seconds
            return inner(*arguments, **named)

        self._patch(owner, name, timed)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(monkeypatch)
    made.takes(TableRunner, "logits", PASS)
    made.takes(CaliTS, "keep_drafting", DECIDE)
    made.takes(CaliTS, "observe", UPDATE)
    made.takes(TopProbPredictor, "begin", BEGIN)
    made.takes(TopProbPredictor, "score", SCORE)
    return made


@pytest.mark.parametrize("name", ["eesd-cali", "eesd-tree"])
def test_the_policy_and_its_predictor_have_a_phase_of_their_own(clock: Clock, name: str) -> None:
    run = scripted_run(name, {"theta0": 1.0}, TableRunner(1), TableRunner(2), SamplingParams(max_new_tokens=16))
    prefill, *rounds = run.rounds()
    assert prefill.seconds == pytest.approx(dict.fromkeys(prefill.seconds, 0.0) | {"prefill": PASS})
    assert max(round_.draft.levels for round_ in rounds) > 1
    for round_ in rounds:
        levels = round_.draft.levels
        wanted = {"draft": PASS * levels, "verify": PASS, "policy": UPDATE}
        wanted["policy"] += BEGIN * (levels > 0) + (SCORE + DECIDE) * levels
        assert round_.seconds == pytest.approx(dict.fromkeys(round_.seconds, 0.0) | wanted)


def test_two_readings_of_the_clock_for_each_decision_and_score(clock: Clock) -> None:
    run = scripted_run("eesd-cali", {"theta0": 1.0}, TableRunner(1), TableRunner(2), SamplingParams(max_new_tokens=16))
    rounds = run.rounds()
    next(rounds)
    before = clock.reads
    for round_ in rounds:
        per_round = 7  # start, draft, verify, sample, the update's two, other; a draft's: its start and the predictor's
        assert clock.reads - before == per_round + 4 * bool(round_.draft.tokens) + 4 * len(round_.draft.tokens)
        before = clock.reads


def test_in_pearl_the_decisions_are_not_part_of_a_round(clock: Clock) -> None:
    with_policy = {"policy": "cali-ts", "model_prediction": False, "theta0": 1.0, "window": 3}
    draft = TableRunner(2)
    worker = DraftWorker.in_this_process(draft)
    run = scripted_run("pearl", with_policy, TableRunner(1), draft, SamplingParams(max_new_tokens=12), worker=worker)
    assert {round_.seconds["policy"] for round_ in run.rounds() if round_.index} == {UPDATE}
    worker.close()


def test_the_footer_and_the_pages_show_the_phase() -> None:
    summary = Figures("eesd-cali")
    summary.phase_seconds |= {"draft": 0.5, "policy": 0.25, "verify": 0.25}
    summary.drafted, summary.accepted, summary.rounds, summary.target_passes, summary.token_ids = 3, 3, 2, 2, [1] * 5
    assert "50% drafting and 25% length policy, 25% verifying" in footer(summary, [], 200).plain
    assert time_shares(summary) == [("draft", "drafting", 0.5), ("policy", "policy", 0.25), ("verify", "verifying", 0.25)]
    summary.phase_seconds["policy"] = 0.001
    assert "length policy" not in footer(summary, [], 200).plain


@pytest.mark.parametrize("name", ["eesd-cali", "eesd-tree"])
def test_the_phase_never_waits_for_the_device(name: str) -> None:
    """Only the target's pass is waited for, once a round."""
    waits: list[int] = []
    run = scripted_run(name, {"theta0": 1.0}, TableRunner(1), TableRunner(2), SamplingParams(max_new_tokens=16))
    rounds = list(replace(run, clock=run_module.Clock(WaitingTimer(lambda: waits.append(1)))).rounds())
    assert len(waits) == len(rounds)
