"""Tuning on a slow machine: a clock that only passes of the models advance, each by as much as a
pass takes there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from pair_helpers import pair_of_models
from tuning_helpers import GREEDY, PairOf, finished

from specgen.base.types import Context
from specgen.compare.prompts import ListedPrompt
from specgen.engine.model_runner import ModelRunner
from specgen.pair.figures import Figures
from specgen.pair.pair import Pair
from specgen.tune.outcome import Deadline, TuningOutcome, TuningRequest, plain_of
from specgen.tune.prospects import Prospects, likeliest
from specgen.tune.real_runs import PlainSpeed, Plan, plan
from specgen.tune.tuner import tune

REPEATING = [
    "abc abc abc abc abc abc",
    "one two one two one two",
    "0123 0123 0123 0123",
    "so it is so it is so",
]
TEXTS = [ListedPrompt(index, text) for index, text in enumerate(REPEATING)]


class SlowMachine:
    """What a pass of the model `target` takes: `first` seconds for one token, `further` for each
    other one. A draft's pass takes a fifth. `seconds` counts them, `of_method` by the method of the
    last request."""

    def __init__(self, first: float, further: float) -> None:
        self.first = first
        self.further = further
        self.seconds = 0.0
        self.of_method = Counter[str]()
        self.method = ""
        self.target: object = None

    def read(self) -> float:
        return self.seconds

    def add(self, tokens: int, share: float) -> None:
        seconds = share * (self.first + self.further * (tokens - 1))
        self.seconds += seconds
        self.of_method[self.method] += seconds  # type: ignore[assignment]


@pytest.fixture
def slow(pair_of: PairOf, monkeypatch: pytest.MonkeyPatch) -> SlowMachine:
    machine = SlowMachine(0.1, 0.06)
    logits = ModelRunner.logits
    machine.target = pair_of("llama", "near").target.model

    def timed(
        runner: ModelRunner, context: Context, draft: Sequence[int] = (), *given: Any, **named: Any
    ) -> Any:
        machine.add(len(draft) + 1, 1.0 if runner._forward.model is machine.target else 0.2)  # type: ignore[attr-defined]
        return logits(runner, context, draft, *given, **named)

    monkeypatch.setattr(ModelRunner, "logits", timed)
    clock = SimpleNamespace(perf_counter=machine.read)
    for module in ("decoding.run", "tune.round_timing"):
        monkeypatch.setattr(f"specgen.{module}.time", clock)
    request = Pair.request

    def named(
        pair: Pair, prompt: Any, method: str | None = None, *given: Any, **settings: Any
    ) -> Any:
        machine.method = method or ""
        return request(pair, prompt, method, *given, **settings)

    monkeypatch.setattr(Pair, "request", named)
    return machine


def tuned(
    pair: Pair, machine: SlowMachine, budget: float, names: list[str] | None = None
) -> tuple[TuningOutcome, list[str]]:
    steps = Mock()
    deadline = Deadline.after(budget, machine.read)
    task = TuningRequest(
        TEXTS, replace(GREEDY, max_new_tokens=64, ignore_eos=True), deadline, names
    )
    return tune(pair, task, steps), finished(steps)


def without_draft(pair: Pair) -> Pair:
    return pair_of_models(pair.target, None)


@pytest.mark.parametrize("budget", [10, 30, 90])
def test_a_slow_model_is_tuned_within_the_budget_and_the_result_rests_on_real_runs(
    pair_of: PairOf, slow: SlowMachine, budget: float
) -> None:
    """Plain decoding and the default are run first, and nothing is spent on lookahead, which can
    never catch up here."""
    pair = without_draft(pair_of("llama", "near"))
    found, steps = tuned(pair, slow, budget)
    assert slow.seconds <= 1.1 * budget
    assert steps[0].startswith("really run, tokens/s: ar ")
    assert all(
        each.measured is not None for each in (plain_of(found.methods), found.default, found.chosen)
    )
    assert found.real_runs >= 2
    assert slow.of_method["lookahead"] == 0
    if budget == 90:
        assert "far behind" in found.left_out["lookahead"]
        assert found.simulated > 10


def test_a_draft_that_accepts_nothing_takes_little_of_the_time(
    pair_of: PairOf, slow: SlowMachine
) -> None:
    """Of its many settings a few rounds each are simulated, then its methods are given up; plain
    decoding is the fastest."""
    pair = pair_of("llama", "unrelated")
    fresh = pair_of_models(pair.target, pair.draft)
    slow.target = pair.target.model
    found, _ = tuned(fresh, slow, 60, ["sd", "svip", "spectr"])
    assert slow.seconds <= 1.1 * 60
    assert plain_of(found.methods).measured is not None
    assert found.verdict in ("does not pay", "unconfirmed"), (
        found.methods,
        found.left_out,
        slow.seconds,
    )
    assert found.chosen.name == "ar"
    assert found.simulated < 60


def test_how_many_methods_and_tokens_are_planned() -> None:
    """Fewer methods before shorter runs; the shortest runs of the default alone; nothing where
    there is no time for them."""
    fast = PlainSpeed(0.01, 0.001)
    slow = PlainSpeed(0.5, 0.1)
    assert plan(fast, 20.0, 50.0, 5, 64) == Plan(5, 64)
    planned = [plan(slow, 0.4 * left, left, 5, 64) for left in (250.0, 60.0, 40.0, 10.0, 6.0, 1.0)]
    assert [None if each is None else each.methods for each in planned] == [5, 4, 2, 2, 2, None]
    tokens = [each.tokens for each in planned if each is not None]
    assert min(tokens[:3]) >= 16
    assert 4 <= tokens[4] < tokens[3] <= 16
    for left, found in zip((250.0, 60.0, 40.0), planned, strict=False):
        assert found is not None
        assert found.methods * (slow.seconds(4) + 2 * slow.seconds(found.tokens)) <= 0.4 * left


def test_the_likeliest_methods_are_one_for_each_thing_that_drafts() -> None:
    copying = ["ar", "lookup", "suffix", "lookahead"]
    model = ["sd", "svip", "confidence", "pearl", "mtad"]
    assert likeliest(copying, ()) == ["lookup", "suffix"]
    assert likeliest([*copying, *model], ()) == ["svip", "lookup", "suffix"]
    assert likeliest([*copying, *model, "eagle"], ()) == ["svip", "eagle", "lookup"]
    assert likeliest([*copying, *model], ["mtad", "pearl", "confidence"]) == [
        "pearl",
        "confidence",
        "mtad",
    ]


def test_what_counts_as_far_behind() -> None:
    """A target pass takes 1 s for one token and 0.5 s for each other one; one method is expected at
    1.5 times plain decoding."""
    found = Prospects(["mtad"], 1.0, lambda tokens: 0.5 + 0.5 * tokens)
    assert found.floor("lookahead") == pytest.approx(0.7), "plain decoding is known"
    found.note("lookup", 1.5)
    assert found.floor("sd") == 0, "its first settings are simulated"
    found.note("sd", 0.5)
    small, large = ({"window": window, "ngram": 3, "guesses": 3} for window in (1, 15))
    assert (found.can_reach("lookahead", small), found.can_reach("lookahead", large)) == (
        True,
        False,
    )
    assert found.floor("sd") == pytest.approx(0.7 * 1.5)
    assert found.floor("mtad") == 0, "what the user named is compared with itself"
    assert found.floor("ar") == 0

    def behind(name: str, tokens: int, seconds: float, prefill: float = 100.0) -> bool:
        figures = Figures(name, token_ids=[1] * tokens)
        figures.phase_seconds |= {"verify": seconds, "prefill": prefill}
        return found.is_behind(name, figures)

    assert not behind("sd", 3, 14.2), "twelve more tokens in this time would be enough"
    assert behind("sd", 3, 14.3)
    assert not behind("lookahead", 3, 4.7), "two more would be enough"
    assert behind("lookahead", 3, 4.8)
    assert not behind("mtad", 3, 1000.0)
    found.note("sd", 2.0)
    assert behind("sd", 3, 10.8)
    assert not behind("sd", 3, 10.6)
    for name, strikes in (("sd", 4), ("lookahead", 1)):
        found.note(name, 0.1)
        for _ in range(strikes):
            assert not found.is_given_up(name)
            found.strike(name)
        assert found.is_given_up(name)
