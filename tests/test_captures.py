"""No capture of a GPU's passes falls into a time that is measured. Captures are recorded operators here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from captured_pairs import captured_pair
from graph_checks import GREEDY, draft_setup, graphs_on, nothing_falls_back  # noqa: F401
from static_checks import random_model, random_tokens

from specgen.base.types import Context, Round, SamplingParams
from specgen.compare.method_specs import parse_specs
from specgen.compare.prompts import Prompt
from specgen.compare.results import BenchmarkConfig
from specgen.compare.runner import Runner
from specgen.decoding.drafting import ModelDrafter
from specgen.decoding.policy import Fixed
from specgen.decoding.run import Run
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.native_model import NativeModel
from specgen.engine.native.static_forward import use_static_passes
from specgen.engine.timing import time_passes
from specgen.pair.pair import Pair

METHODS = [
    "sd:k=7",
    "svip",
    "adaptive",
    "pearl",
    "eesd-beta",
    "lookup",
    "sd:width=2:depth=3",
    "eesd-tree",
    "selfsd:skip=3",
    "confidence",
]
TEXTS = ["def f(x):", "The first number is one, the second two. " * 60]  # the longer one's run crosses the end of a bucket


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the captures during runs, whoever makes them, by the method's drafter."""
    counts: Counter[str] = Counter()
    rounds = Run.rounds

    def counted(run: Run) -> Iterator[Round]:
        iterator = rounds(run)
        while True:
            before = counts["captures"]
            round_ = next(iterator, None)
            counts["timed"] += counts["captures"] - before
            if round_ is None:
                return
            yield round_

    monkeypatch.setattr(Run, "rounds", counted)
    return counts


def _compare(pair: Pair, methods: str, counts: Counter[str], new_tokens: int) -> tuple[int, Runner]:
    """How many captures there were in runs of a comparison after those that warm up."""
    prompts = [Prompt(index, text) for index, text in enumerate(TEXTS)]
    config = BenchmarkConfig(
        parse_specs([methods]), prompts, 1, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, seed=1)
    )
    runner, found = Runner(pair, config), None
    for step in runner.steps():
        if found is None and not step.warming_up:
            found = counts["timed"]
    assert found is not None
    assert not runner.results.failures
    return counts["timed"] - found, runner


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_no_timed_run_of_a_comparison_captures_a_pass(method: str, timed: Counter[str]) -> None:
    with captured_pair(timed) as pair:
        found, runner = _compare(pair, method, timed, 40)
        lengths = [len(runner.prompt_ids(prompt)) for prompt in runner.config.prompts]
        assert lengths[0] < 512 < lengths[1] + 40
        assert timed["timed"] > 0  # the runs that warm up
        assert found == 0


@pytest.mark.slow
def test_without_captures_before_timed_runs_these_capture(timed: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "capture_passes", lambda *_: None)
    with captured_pair(timed) as pair:
        assert _compare(pair, "sd:k=7", timed, 40)[0] > 0


def _captured_model(counts: Counter[str]) -> NativeModel:
    model = random_model("llama")
    use_static_passes(model, new_graphs=graphs_on("cpu", counts))
    return model


def test_after_captures_before_a_run_none_is_left_and_the_cache_is_unchanged() -> None:
    """For contexts of 480 to 700 tokens: over the end of a bucket, with self-feeding steps."""
    counts: Counter[str] = Counter()
    model, ids = _captured_model(counts), random_tokens(Random(1), 700)
    runner: Any = ModelRunner(model)
    runner.reserve(700)
    drafter, policy = ModelDrafter(draft_setup(runner, GREEDY)), Fixed(3)
    runner.logits(Context(ids[:480]))
    context = Context(ids[:480])
    drafter.propose(context, policy, 30)  # uses a rule for choosing tokens
    before, entries = counts["captures"], runner.cache.data[:, :, :, :480].clone()
    model.capture_passes(480, 700)
    assert counts["captures"] == before + 5 * 2 - 1 + 1  # passes of five widths over two buckets, and draft steps over one
    assert model.capture_seconds > 0
    assert torch.equal(runner.cache.data[:, :, :, :480], entries)
    before = counts["captures"]
    for length in (481, 505, 511, 513, 600, 690):
        context.extend(ids[len(context) : length])
        for drafted in (0, 1, 3, 7, 9):
            runner.logits(context, ids[length : length + drafted])
        drafter.propose(context, policy, 30)
    assert counts["captures"] == before
    expected = ModelRunner(random_model("llama")).logits(Context(ids[:690])).logits
    assert (runner.logits(context).logits - expected).abs().max() < 1e-4


def test_pass_times_hold_no_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    runner, at = ModelRunner(_captured_model(counts)), []
    logits = ModelRunner.logits
    monkeypatch.setattr(ModelRunner, "logits", lambda *given: [logits(*given), at.append(counts["captures"])][0])
    time_passes(runner, [1, 4, 16], 505)
    turns = [at[1 + 3 * turn : 4 + 3 * turn] for turn in range(len(at) // 3)]
    assert len({number for turn in turns[1:] for number in turn}) == 1  # all captures are in the first turn, which is not counted
