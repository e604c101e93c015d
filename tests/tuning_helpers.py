"""Prompts, costs of rounds, real runs and the outcome of a tuning, for the tests of tuning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

from typer.testing import CliRunner

from specgen.base.types import SamplingParams
from specgen.cli.app import app
from specgen.compare.prompts import ListedPrompt
from specgen.decoding.costs import CostTable, Curve, RoundCosts
from specgen.pair.figures import Figures
from specgen.pair.pair import Pair
from specgen.tune.outcome import Candidate, TuningOutcome
from specgen.tune.simulator import run_seed

GREEDY = SamplingParams(max_new_tokens=24, seed=3)
PROMPTS = [[5, 9, 7, 3, 11, 5, 9, 7], [20, 21, 22, 4, 6], [8, 8, 13, 30, 31]]
COSTS = RoundCosts(
    CostTable({8: Curve({0: 0.0, 1: 1.0, 2: 2.0})}), CostTable({8: Curve({1: 10.0, 2: 10.0})}), 0.0
)
PairOf = Callable[[str, str], Pair]
TEXTS = [
    ListedPrompt(index, text)
    for index, text in enumerate(["one two three", "abc abc abc", "0123456789"])
]


def really(
    pair: Pair, name: str, given: dict[str, object], sampling: SamplingParams = GREEDY
) -> Figures:
    """Real runs on all prompts, each with the seed of the simulated run on it."""
    summary = Figures(name)
    for number, prompt in enumerate(PROMPTS):
        for round_ in pair.rounds(
            prompt, name, replace(sampling, seed=run_seed(number, sampling.seed or 0)), **given
        ):
            summary.add(round_)
    return summary


CURVES = {"drafting": {8: {0: 0.0, 1: 0.002}}, "judging": {8: {1: 0.01, 2: 0.012}}, "looking": 1e-5}


def outcome() -> TuningOutcome:
    """The outcome of a tuning in which svip and plain decoding were run on the real models."""
    methods = [
        Candidate(
            "svip", {"threshold": 0.45, "c": 0.15, "max_draft": 12}, 120.0, 118.0, 1.4, 1.2, 1.6
        ),
        Candidate("sd", {"k": 3}, 100.0),
        Candidate("confidence", {"threshold": 0.4, "max_draft": 8}, 90.0),
        Candidate("lookup", {"k": 4, "ngram": 2}, 85.0),
        Candidate("ar", {}, 80.0, 84.0, 1.0),
    ]
    costs = {"echo": CURVES, "parallel": CURVES | {"together": 1e-4}}
    return TuningOutcome(methods, SamplingParams(), 8, costs, None, 0.8, real_runs=16, simulated=40)


def finished(observer: Mock) -> list[str]:
    """The steps that were reported as done."""
    return [call.args[0] for call in observer.done.call_args_list]


def generated(pair: tuple[str, ...], *more: str) -> str:
    result = CliRunner().invoke(
        app,
        ["generate", "abcabc", *pair, "--device", "cpu", "--dtype", "float32", "-n", "6", *more],
    )
    assert result.exit_code == 0, result.stderr
    return result.stderr
