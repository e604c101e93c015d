"""The runs of a comparison summed up for each method: figures over all prompts, the speedup and its interval, the differences.

Of a prompt's repeats only the run with the median seconds counts, with all its figures, so that seconds, tokens and phases add up
and every figure can be computed again from the trace. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specgen.compare.method_specs import REFERENCE, MethodSpec
from specgen.compare.prompts import Prompt
from specgen.compare.verdict import Difference, count_outcomes
from specgen.errors import SpecgenError
from specgen.traces.summary import Summary
from specgen.traces.trace_reader import TracedRun
from specgen.types import Round, SamplingParams

RESAMPLES = 2000
FEW_RESAMPLES = 200  # for the live table, whose intervals still change
LEVEL = 0.95
Key = tuple[str, int, int]  # method as written, prompt index, repeat


@dataclass(frozen=True, slots=True)
class BenchmarkConfig:
    """What to measure. `record` adds to the trace how far both models' distributions agree. Perplexity is measured for all
    methods where it is requested or a method is lossy. Raises SpecgenError for fewer than one repeat."""

    specs: Sequence[MethodSpec]
    prompts: Sequence[Prompt]
    repeats: int
    sampling: SamplingParams
    chat: bool = False
    record: bool = False
    perplexity: bool = False
    energy: bool = False

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise SpecgenError(f"--repeats is {self.repeats}", "It has to be a whole number of at least 1")

    @property
    def measures_perplexity(self) -> bool:
        return self.perplexity or not all(spec.lossless for spec in self.specs)


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its summary line (with `drafts`) and each round's draft length, None where drafts were not chains drafted
    in turn with the target's passes, or where there are no rounds. `branches` where drafts were trees or several chains."""

    line: Mapping[str, Any]
    draft_lengths: tuple[int, ...] | None
    branches: bool = False

    @classmethod
    def of(cls, line: Mapping[str, Any], rounds: Sequence[Round]) -> Run:
        branches = not all(round_.draft.is_chain for round_ in rounds)
        in_turn = not branches and all(round_.mode in ("prefill", "sequential") for round_ in rounds)
        return cls(line, tuple(len(round_.draft.tokens) for round_ in rounds) if rounds and in_turn else None, branches)

    @property
    def seconds(self) -> float:
        return float(self.line["seconds"])

    @property
    def tokens(self) -> int:
        return len(self.line["token_ids"])


@dataclass(slots=True)
class Results:
    """What was measured so far. `differences` are those from plain decoding's output in greedy decoding."""

    config: BenchmarkConfig
    runs: dict[Key, Run] = field(default_factory=dict)
    differences: dict[Key, Difference] = field(default_factory=dict)
    failures: dict[str, SpecgenError] = field(default_factory=dict)
    examples: dict[str, TracedRun] = field(default_factory=dict)  # by method, the first run of the first prompt
    skipped: set[int] = field(default_factory=set)  # indices of later turns that the context had no room for

    def complete_repeats(self) -> set[tuple[int, int]]:
        """The (prompt index, repeat) pairs that every method has run, failed methods aside: only these can be compared."""
        running = [spec.written for spec in self.config.specs if spec.written not in self.failures]
        repeats = {(prompt, repeat) for _, prompt, repeat in self.runs}
        return {pair for pair in repeats if all((written, *pair) in self.runs for written in running)}

    def label(self, prompt_index: int) -> str:
        return next(prompt.label for prompt in self.config.prompts if prompt.index == prompt_index)


@dataclass(frozen=True, slots=True)
class Figures:
    """A method's figures over some prompts. `differences` is None where outputs are not compared: when sampling, and for lossy
    methods. `low` and `high` are the ends of the speedup's 95 % interval."""

    summary: Summary
    prompts: int
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    differences: Sequence[Difference] | None = None
    branches: bool = False  # drafts are trees or several chains

    @property
    def outcomes(self) -> Mapping[str, int]:
        """Prompts by how their output compares with plain decoding's; empty where outputs are not compared."""
        return {} if self.differences is None else count_outcomes(self.prompts, self.differences)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted speedups: by EESD's Eq. 14, and by adding up all passes at their measured costs. None where drafts are not chains
    drafted in turn with the target, or where their lengths are unknown."""

    formula: float | None = None
    pass_costs: float | None = None


@dataclass(frozen=True, slots=True)
class MethodResult:
    """A method's results. `overall` is None where it has no runs to compare; `failure` says why it could not run."""

    spec: MethodSpec
    overall: Figures | None
    by_category: Mapping[str, Figures] = field(default_factory=dict)
    failure: SpecgenError | None = None
    prediction: Prediction | None = None  # only where predictions were requested

    @property
    def is_reference(self) -> bool:
        return self.spec.written == REFERENCE

    @property
    def differences(self) -> Sequence[Difference]:
        return (self.overall and self.overall.differences) or ()

    @property
    def broken(self) -> Difference | None:
        """The first difference that a lossless method must not have."""
        return next((difference for difference in self.differences if difference.is_broken), None)

    @property
    def speedup(self) -> float | None:
        return None if self.overall is None else self.overall.speedup


def method_results(results: Results, resamples: int = RESAMPLES) -> list[MethodResult]:
    """Each method's results, in the order of the request, plain decoding first."""
    config, repeats = results.config, results.complete_repeats()
    reference = median_runs(results, REFERENCE, repeats)
    categories = {prompt.index: prompt.category for prompt in config.prompts}
    made = []
    for spec in config.specs:
        own, failure = median_runs(results, spec.written, repeats), results.failures.get(spec.written)
        if failure is not None or not own:
            made.append(MethodResult(spec, None, failure=failure))
            continue
        differences = None
        if config.sampling.greedy and spec.lossless:
            differences = [
                found for key, found in sorted(results.differences.items()) if key[0] == spec.written and key[1:] in repeats
            ]
        parts: dict[str, dict[int, Run]] = {}
        for index, run in own.items():
            parts.setdefault(categories[index], {})[index] = run
        by_category = {category: _figures(spec, part, reference, differences, resamples) for category, part in parts.items()}
        made.append(MethodResult(spec, _figures(spec, own, reference, differences, resamples), by_category))
    return made


def median_runs(results: Results, written: str, repeats: Iterable[tuple[int, int]]) -> dict[int, Run]:
    """By prompt index the run whose seconds are the median of its repeats (the lower one of two)."""
    runs: dict[int, list[Run]] = {}
    for index, repeat in sorted(repeats):
        if (written, index, repeat) in results.runs:
            runs.setdefault(index, []).append(results.runs[written, index, repeat])
    return {index: sorted(own, key=lambda run: run.seconds)[(len(own) - 1) // 2] for index, own in runs.items()}


def _figures(
    spec: MethodSpec,
    own: Mapping[int, Run],
    reference: Mapping[int, Run],
    differences: Sequence[Difference] | None,
    resamples: int,
) -> Figures:
    """Figures over the prompts of `own`. `reference` and `differences` may be of more prompts."""
    summary = Summary(spec.name)
    for run in own.values():
        summary.include(run.line)
    pairs = [(run.tokens, run.seconds, reference[index].tokens, reference[index].seconds) for index, run in own.items()]
    speedup, low, high = speedup_interval(pairs, resamples)
    if spec.written == REFERENCE:
        differences, low, high = (), None, None
    elif differences is not None:
        differences = [difference for difference in differences if difference.prompt_index in own]
    return Figures(summary, len(own), speedup, low, high, differences, any(run.branches for run in own.values()))


def speedup_interval(
    pairs: Sequence[tuple[int, float, int, float]], resamples: int = RESAMPLES
) -> tuple[float | None, float | None, float | None]:
    """The ratio of a method's tokens per second to plain decoding's, and its 95 % interval, None with fewer than two prompts.

    `pairs` has one tuple a prompt: tokens and seconds of the method, tokens and seconds of plain decoding. The interval is a
    percentile bootstrap over prompts with a fixed seed.
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
