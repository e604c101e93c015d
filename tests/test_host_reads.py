"""How often the host waits for a GPU in a round: for what a decision needs, and never for a time alone.

Passes are captured by recording their operators, and the CPU's tensors are taken for a GPU's.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from recorded_streams import RecordedStreams
from runner_checks import every
from scripted_models import scripted_run
from specgen.engine.native.static_forward import use_static_passes
from static_checks import HostReads, RecordedGraphs, random_model, random_tokens

from specgen.base.types import SamplingParams
from specgen.decoding.run import Clock, Run
from specgen.engine.model_runner import ModelRunner
from specgen.workers.stream_worker import StreamWorker

DRAFTED = 3
METHODS: dict[str, dict[str, object]] = {
    "ar": {},
    "sd": {"k": DRAFTED},
    "pearl": {"window": DRAFTED},
    "svip": {"threshold": 100, "max_draft": DRAFTED},
}
CASES = [(name, cuts) for name in METHODS for cuts in ({"temperature": 1.0}, {}, {"temperature": 1.0, "top_p": 0.9})]


@pytest.fixture(scope="module")
def runners() -> list[ModelRunner]:
    """A target and a draft model that is the same, so that much is accepted."""
    found = []
    for _ in range(2):
        model = random_model("llama")
        use_static_passes(model, new_graphs=partial(RecordedGraphs, counts=Counter()))
        found.append(ModelRunner(model))
    return found


class LateTimer:
    """A timer that may be read only after the host has waited for a result of work queued after the mark."""

    def __init__(self, reads: HostReads) -> None:
        self._reads = reads

    def start(self) -> None:
        pass

    def mark(self) -> Callable[[], float]:
        before = self._reads.count

        def ended() -> float:
            assert self._reads.count > before, "the host waits for a time alone"
            return 0.0

        return ended


def run_of(name: str, runners: list[ModelRunner], cuts: dict[str, float], reads: HostReads | None = None) -> Run:
    given: dict[str, Any] = {"max_new_tokens": 14, "seed": 1} | cuts
    worker: Any = StreamWorker(runners[1], RecordedStreams())
    prompt = random_tokens(random.Random(1), 20)
    run = scripted_run(name, METHODS[name], *runners, SamplingParams(**given), worker=worker, prompt=prompt)
    run.clock = Clock(None if reads is None else LateTimer(reads))
    return run


@pytest.mark.parametrize("case", every(3, CASES), ids=str)
def test_the_host_waits_once_for_a_draft_and_once_for_its_verification(
    case: tuple[str, dict[str, float]], runners: list[ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, cuts = case
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    for _ in range(2):  # captures the passes, and compares them once
        list(run_of(name, runners, cuts).rounds())
    found = set()
    with HostReads() as reads:
        rounds = run_of(name, runners, cuts, reads).rounds()
        next(rounds)
        before = reads.count
        for round_ in rounds:
            if len(round_.draft.tokens) == DRAFTED or name == "ar":
                found.add(reads.count - before)
            before = reads.count
    # one for each token where the policy reads something of it
    assert found == {{"ar": 1, "sd": 2, "pearl": 2, "svip": DRAFTED + 1}[name]}
