"""Runs comparisons on a tiny pair and reads their traces. Also makes the results of comparisons
from given figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Lines, parsed, run_main

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.compare.method_specs import MethodSpec, parse_spec
from specgen.compare.prompts import ListedPrompt
from specgen.compare.results import NO_PREDICTION, BenchmarkConfig, Results, Run, method_results
from specgen.compare.verdict import Difference
from specgen.methods.mtad import MTAD
from specgen.traces.reader import read_trace
from specgen.view.comparison import Report, page

PROMPTS = ["the cat sat on the mat", "hello there", "a b c a b c a b", "what is one and one"]
CATEGORIES = ["prose", "prose", "code", "code"]

Compare = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    entries = [
        {"prompt": text, "category": category}
        for text, category in zip(PROMPTS, CATEGORIES, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, entries)))
    return str(path)


@pytest.fixture
def compare(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    pair: tuple[str, ...],
    prompts: str,
) -> Compare:
    """Run `specgen compare` on the tiny pair in this process: its exit code, stdout and stderr."""

    def call(*arguments: str, models: tuple[str, ...] = pair) -> tuple[int, str, str]:
        return run_main(
            monkeypatch,
            capfd,
            "compare",
            *models,
            "--device",
            "cpu",
            "--prompts",
            prompts,
            *arguments,
        )

    return call


def runs_of(trace: Path) -> dict[str, dict[int, Lines]]:
    """The runs of a comparison's trace by method and by prompt index, in the order of repeats.

    A run is its summary line, with its start line under `start` and its round lines under `rounds`.
    """
    runs: dict[str, dict[int, Lines]] = {}
    run: dict[str, Any] = {}
    for line in parsed(trace.read_text(encoding="utf-8")):
        if line["type"] == "start":
            run = {"start": line, "rounds": []}
        elif line["type"] == "round":
            run["rounds"].append(line)
        else:
            start = run["start"]
            runs.setdefault(start["spec"], {}).setdefault(start["prompt_index"], []).append(
                {**line, **run}
            )
    return runs


PHASE_SHARES = {
    "prefill": 0.1,
    "draft": 0.17,
    "policy": 0.03,
    "verify": 0.6,
    "sample": 0.05,
    "other": 0.05,
}


class Wild(MTAD):
    name = "wild"


WILD = MethodSpec("wild", replace(methods.choice_of("mtad", {}), method=Wild()))


def run(seconds: float, drafted: int = 0, accepted: int = 0, **more: Any) -> Run:
    """A run of 100 tokens in `seconds`, of which `accepted` of `drafted` tokens are the draft's.

    Each round has one token of the target's own. `more` replaces or adds keys of the summary line.
    """
    line = {
        "token_ids": [1] * 100,
        "rounds": 100 - accepted,
        "drafts": (100 - accepted) * bool(drafted),
        "drafted": drafted,
        "accepted": accepted,
        "seconds": seconds,
        "phase_seconds": {phase: share * seconds for phase, share in PHASE_SHARES.items()},
        **more,
    }
    return Run(line, None)


def results_of(methods: Mapping[str, Sequence[Run]]) -> Results:
    """The results of a comparison with these runs of each method, one per prompt; there are at
    least three prompts."""
    specs = [WILD if method == "wild" else parse_spec(method) for method in methods]
    count = max(3, *map(len, methods.values()))
    prompts = [
        ListedPrompt(index, "text", "one" if index % 2 else "two", f"p{index}")
        for index in range(count)
    ]
    results = Results(BenchmarkConfig(specs, prompts, 1, SamplingParams(max_new_tokens=100)))
    for spec, runs in zip(specs, methods.values(), strict=True):
        for index, measured in enumerate(runs):
            results.runs[spec.written, index, 0] = measured
    return results


def usual() -> Results:
    """Results on twelve prompts, with a tie, a lossy method, a method without times by phase, and a
    method that failed."""
    results = results_of(
        {
            "ar": [run(2.0), run(2.2), run(2.1)] * 4,
            "svip": [run(1.0, 90, 70), run(1.4, 95, 60), run(0.6, 80, 75)] * 4,
            "lookup": [run(1.9, 200, 20), run(1.8, 200, 30), run(2.2, 200, 10)] * 4,
            "transformers-assisted": [run(1.5, 90, 70, phase_seconds=None)] * 12,
            "wild": [run(0.5, 90, 80, perplexity=perplexity) for perplexity in (1.9, 2.0, 2.1)] * 4,
            "sd:k=8": [],
        }
    )
    results.failures["sd:k=8"] = SpecgenError(
        "sd needs a thing that is not there", "Make one: specgen tune --train"
    )
    results.differences["svip", 1, 0] = Difference(1, 0, 57, 4, 5, 0.0004, 1e-3)
    return results


def report_of(results: Results, **options: bool) -> Report:
    return Report(results, method_results(results), "demo pair, cpu float32", **options)


def shown(results: Results, width: int, **options: bool) -> list[str]:
    return [line.plain for line in page(report_of(results, **options), width)]


def comparison() -> Report:
    """The report of the comparison `usual`, with predictions, categories, phases, a note, and
    hostile text in a prompt."""
    results = usual()
    first = ListedPrompt(0, "<script>alert(1)</script>\x1b", "two", "<p0>")
    results.config = replace(results.config, prompts=[first, *results.config.prompts[1:]])
    run = next(read_trace(Path(__file__).parent / "golden" / "trace.jsonl"))
    results.examples["svip"] = replace(run, start={**run.start, "prompt_index": 0})
    report = report_of(results, by_category=True, phases=True)
    predicted = {"svip": {"eq14": 1.25, "pass_costs": 1.5}}
    made = [
        replace(each, predicted=predicted.get(each.spec.written, NO_PREDICTION))
        for each in report.methods
    ]
    return replace(report, methods=made, notes="A note.")
