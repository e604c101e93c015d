"""Runs of a comparison folded into a row a method: figures over all prompts, the speedup and its interval, the verdict.

Of a prompt's repeats the run with the median seconds stands for it, with all its figures: so seconds, tokens and phases add up,
and everything in a row can be computed again from the trace. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specgen.compare.method_specs import BASELINE, MethodSpec
from specgen.compare.prompts import Prompt
from specgen.compare.verdict import Difference
from specgen.errors import SpecgenError
from specgen.traces.summary import Summary
from specgen.traces.trace_reader import TracedRun
from specgen.types import Round

RESAMPLES = 2000
FEW_RESAMPLES = 200  # while it runs, where the intervals still move
LEVEL = 0.95
Key = tuple[str, int, int]  # method as written, prompt index, repeat


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its summary line (with `drafts`), and each round's draft length where all were chains, drafted in turn with
    the target's passes; None where they were not, or nobody told. `branches` where drafts were trees, or several at once."""

    line: Mapping[str, Any]
    draft_lengths: tuple[int, ...] | None
    branches: bool = False

    @classmethod
    def of(cls, line: Mapping[str, Any], rounds: Sequence[Round]) -> Run:
        branches = any(list(round_.draft.parents) != list(range(-1, len(round_.draft.tokens) - 1)) for round_ in rounds)
        in_turn = not branches and all(round_.mode in ("prefill", "sequential") for round_ in rounds)
        return cls(line, tuple(len(round_.draft.tokens) for round_ in rounds) if rounds and in_turn else None, branches)


@dataclass(slots=True)
class Results:
    """What was measured so far. `differences` are those from plain decoding's output in greedy decoding."""

    specs: Sequence[MethodSpec]
    prompts: Sequence[Prompt]
    greedy: bool
    runs: dict[Key, Run] = field(default_factory=dict)
    differences: dict[Key, Difference] = field(default_factory=dict)
    failures: dict[str, SpecgenError] = field(default_factory=dict)
    examples: dict[str, TracedRun] = field(default_factory=dict)  # the first prompt's first run, by method
    skipped: set[int] = field(default_factory=set)  # later turns that the context had no room for

    def whole_turns(self) -> set[tuple[int, int]]:
        """The prompts and repeats that every method still in has run: only these are fair to compare."""
        running = [spec.written for spec in self.specs if spec.written not in self.failures]
        turns = {(prompt, repeat) for _, prompt, repeat in self.runs}
        return {turn for turn in turns if all((written, *turn) in self.runs for written in running)}


@dataclass(frozen=True, slots=True)
class Figures:
    """Over some prompts. `identical`, `tied` and `diverged` count prompts, None where outputs are not compared."""

    summary: Summary
    prompts: int
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    identical: int | None = None
    tied: int | None = None
    diverged: int | None = None
    perplexity: float | None = None
    joules_per_token: float | None = None
    branches: bool = False  # drafts are trees, or several at once

    def as_dict(self) -> dict[str, Any]:
        counted = self.summary.as_dict("", "")
        told = {name: value for name, value in counted.items() if name not in ("method", "text", "token_ids", "finish_reason")}
        if self.summary.unsplit_seconds:
            told["phase_seconds"] = None
        return {
            "prompts": self.prompts,
            **told,
            "mean_draft_length": self.summary.mean_draft_length,
            "speedup": self.speedup,
            "speedup_low": self.low,
            "speedup_high": self.high,
            "identical": self.identical,
            "tied": self.tied,
            "diverged": self.diverged,
            "perplexity": self.perplexity,
            "joules_per_token": self.joules_per_token,
        }


@dataclass(frozen=True, slots=True)
class Row:
    """A method's line. Where it could not run `failure` says why, and `overall` is None."""

    spec: MethodSpec
    overall: Figures | None
    by_category: Mapping[str, Figures] = field(default_factory=dict)
    differences: Sequence[Difference] = ()
    failure: SpecgenError | None = None

    @property
    def is_baseline(self) -> bool:
        return self.spec.written == BASELINE

    @property
    def is_broken(self) -> bool:
        return any(not difference.is_tie for difference in self.differences)

    def as_dict(self) -> dict[str, Any]:
        """The JSON line, less its `type`."""
        figures = self.overall or Figures(Summary(self.spec.name), 0)
        return {
            "method": self.spec.written,
            "lossless": self.spec.lossless,
            **figures.as_dict(),
            "differences": [difference.as_dict() for difference in self.differences],
            "error": None if self.failure is None else str(self.failure),
            "by_category": {category: row.as_dict() for category, row in self.by_category.items()},
        }


def rows(results: Results, resamples: int = RESAMPLES) -> list[Row]:
    """A row a method, in the order asked for, `ar` first."""
    turns = results.whole_turns()
    categories = {prompt.index: prompt.category for prompt in results.prompts}
    medians = {spec.written: median_runs(results, spec.written, turns) for spec in results.specs}
    baseline = medians[BASELINE]
    made = []
    for spec in results.specs:
        failure = results.failures.get(spec.written)
        if failure is not None or not medians[spec.written]:
            made.append(Row(spec, None, failure=failure))
            continue
        different = [
            results.differences[key]
            for key in sorted(results.differences, key=lambda key: key[1:])
            if key[0] == spec.written and key[1:] in turns
        ]
        own = medians[spec.written]
        by_category = {
            category: _figures(
                results, spec, _only(own, categories, category), _only(baseline, categories, category), different, resamples
            )
            for category in dict.fromkeys(categories[index] for index in sorted(own))
        }
        made.append(Row(spec, _figures(results, spec, own, baseline, different, resamples), by_category, different))
    return made


def _only(runs: Mapping[int, Run], categories: Mapping[int, str], category: str) -> dict[int, Run]:
    return {index: run for index, run in runs.items() if categories[index] == category}


def median_runs(results: Results, written: str, turns: Iterable[tuple[int, int]]) -> dict[int, Run]:
    """By prompt index the run whose seconds are the median of its repeats (the lower one of two)."""
    repeats: dict[int, list[Run]] = {}
    for index, repeat in sorted(turns):
        if (written, index, repeat) in results.runs:
            repeats.setdefault(index, []).append(results.runs[written, index, repeat])
    return {index: sorted(runs, key=_seconds)[(len(runs) - 1) // 2] for index, runs in sorted(repeats.items())}


def _seconds(run: Run) -> float:
    return float(run.line["seconds"])


def _figures(
    results: Results,
    spec: MethodSpec,
    own: Mapping[int, Run],
    baseline: Mapping[int, Run],
    differences: Sequence[Difference],
    resamples: int,
) -> Figures:
    summary = Summary(spec.name)
    for run in own.values():
        summary.include(run.line)
    speedup, low, high = speedup_interval([_pace(own[index]) + _pace(baseline[index]) for index in own], resamples)
    identical = tied = diverged = None
    if spec.written == BASELINE:
        identical, tied, diverged, low, high = len(own), 0, 0, None, None
    elif results.greedy and spec.lossless:
        broken = {difference.prompt_index for difference in differences if not difference.is_tie} & set(own)
        ties = {difference.prompt_index for difference in differences if difference.is_tie} & set(own) - broken
        identical, tied, diverged = len(own) - len(ties) - len(broken), len(ties), len(broken)
    return Figures(
        summary,
        len(own),
        speedup,
        low,
        high,
        identical,
        tied,
        diverged,
        _mean(own.values(), "perplexity", geometric=True),
        _mean(own.values(), "joules_per_token"),
        any(run.branches for run in own.values()),
    )


def _pace(run: Run) -> tuple[int, float]:
    return len(run.line["token_ids"]), _seconds(run)


def _mean(runs: Iterable[Run], key: str, *, geometric: bool = False) -> float | None:
    """The mean over all tokens of a figure that runs may have: perplexities are averaged as log-likelihoods, joules add up.

    None unless each run with tokens has it: a mean over some of the prompts is that of another text.
    """
    lines = [run.line for run in runs if run.line["token_ids"]]
    if not lines or any(line.get(key) is None for line in lines):
        return None
    told = [(float(line[key]), len(line["token_ids"])) for line in lines]
    total = sum(tokens for _, tokens in told)
    if geometric:
        return math.exp(sum(math.log(value) * tokens for value, tokens in told) / total)
    return sum(value * tokens for value, tokens in told) / total


def speedup_interval(
    pairs: Sequence[tuple[int, float, int, float]], resamples: int = RESAMPLES
) -> tuple[float | None, float | None, float | None]:
    """How many times as many tokens a second as plain decoding, with a 95 % interval: None with fewer than two prompts.

    `pairs` has a line a prompt: tokens and seconds of the method, tokens and seconds of plain decoding. Where the outputs are the
    same this is plain decoding's seconds over the method's. The interval is a percentile bootstrap over prompts, its seed fixed.
    """
    import numpy as np

    table = np.array(pairs, dtype=float).reshape(len(pairs), 4)
    if not len(table) or not (table[:, 1] > 0).all() or not table[:, 2].sum():
        return None, None, None
    speedup = _ratio(table.sum(axis=0))
    if len(table) < 2:
        return float(speedup), None, None
    drawn = np.random.default_rng(0).integers(0, len(table), (resamples, len(table)))
    edges = np.quantile(_ratio(table[drawn].sum(axis=1)), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(speedup), float(edges[0]), float(edges[1])


def _ratio(sums: Any) -> Any:
    return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
