"""Computes each method's results from the runs of a comparison: totals over all prompts, the speedup over plain decoding with its
confidence interval, and where the output differs from plain decoding's.

A run is one generation for one prompt by one method; each is repeated. Of the repeats only the run with the median time counts,
with all of its numbers. So seconds, tokens and phases add up, and every number can be computed again from the trace. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specgen.base.errors import SpecgenError
from specgen.base.types import Round, SamplingParams
from specgen.compare.method_specs import REFERENCE, MethodSpec
from specgen.compare.prompts import Prompt
from specgen.compare.verdict import Difference, count_outcomes
from specgen.pair.figures import Summary
from specgen.traces.reader import TracedRun

RESAMPLES = 2000
FEW_RESAMPLES = 200  # for the live table, whose intervals still change
LEVEL = 0.95
Key = tuple[str, int, int]  # method as written, prompt index, repeat


@dataclass(frozen=True, slots=True)
class BenchmarkConfig:
    """What to measure: every method in `specs` generates for each prompt `repeats` times.

    With `record` the trace also contains, for each drafted token, how close the target's and the draft's distributions are.
    `chat` applies the chat template. Perplexity is measured for all methods if `perplexity` is set or if any method is lossy.
    Raises SpecgenError if `repeats` is less than 1.
    """

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

    def tuned_on(self, spec: MethodSpec) -> int | None:
        """Returns how many of the prompts chose the method's settings in `specgen tune`; None if no profile has its settings."""
        return None if spec.tuned_on is None else sum(prompt.fingerprint in spec.tuned_on for prompt in self.prompts)

    @property
    def measures_perplexity(self) -> bool:
        return self.perplexity or not all(spec.lossless for spec in self.specs)


@dataclass(frozen=True, slots=True)
class Run:
    """One finished generation for one prompt by one method.

    `line` is its summary line as in a trace, with `drafts` (the number of rounds with a draft). `draft_lengths` are the drafted
    tokens of each round (one target pass). It is None if some drafts were not single chains or were made during target passes
    (PEARL), or if no rounds are known. `branches` says that some drafts were trees or several chains.
    """

    line: Mapping[str, Any]
    draft_lengths: tuple[int, ...] | None
    branches: bool = False

    @classmethod
    def of(cls, line: Mapping[str, Any], rounds: Sequence[Round]) -> Run:
        """Makes a Run from its summary line and its rounds (empty for transformers' own methods)."""
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
    """What a comparison has measured so far.

    `runs` and `differences` have the key (method as written, prompt index, repeat). `differences` says where a greedy output
    first differs from plain decoding's. `failures` maps each method that cannot run to its error.
    """

    config: BenchmarkConfig
    runs: dict[Key, Run] = field(default_factory=dict)
    differences: dict[Key, Difference] = field(default_factory=dict)
    failures: dict[str, SpecgenError] = field(default_factory=dict)
    examples: dict[str, TracedRun] = field(default_factory=dict)  # for each method its first run of the first prompt, to display
    skipped: set[int] = field(default_factory=set)  # indices of later turns (as prompts) that were too long

    def complete_repeats(self) -> set[tuple[int, int]]:
        """Returns the (prompt index, repeat) pairs that all methods have run, apart from methods that failed. Only these are
        used, so that all methods are compared on the same prompts."""
        running = [spec.written for spec in self.config.specs if spec.written not in self.failures]
        repeats = {(prompt, repeat) for _, prompt, repeat in self.runs}
        return {pair for pair in repeats if all((written, *pair) in self.runs for written in running)}

    def label(self, prompt_index: int) -> str:
        return next(prompt.label for prompt in self.config.prompts if prompt.index == prompt_index)


@dataclass(frozen=True, slots=True)
class Figures:
    """A method's numbers over a set of prompts (all prompts, or one category). `prompts` is their count.

    `speedup` is the ratio of the method's tokens per second to plain decoding's; `low` and `high` are the ends of its 95 %
    confidence interval. All three are None if they cannot be computed. `differences` are the first differences between the
    method's outputs and plain decoding's. It is None if outputs are not compared: when sampling, and for lossy methods.
    """

    summary: Summary
    prompts: int
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    differences: Sequence[Difference] | None = None
    branches: bool = False  # drafts are trees or several chains

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How many prompts have each outcome (identical, tied, diverged) when compared with plain decoding's output. Empty if
        outputs are not compared."""
        return {} if self.differences is None else count_outcomes(self.prompts, self.differences)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A method's predicted speedups. `formula` is computed with EESD's Eq. 14, `pass_costs` by adding up the measured times of
    all its forward passes. Both are None if no prediction is possible: drafts were not single chains, were made during target
    passes, or have unknown lengths."""

    formula: float | None = None
    pass_costs: float | None = None


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method's results. `overall` (over all prompts) is None if the method has no runs that can be compared yet. `failure` is
    the error if the method could not run, otherwise None."""

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
        """The first difference from plain decoding's output that rounding does not explain, which a lossless method must not
        have. None if there is none."""
        return next((difference for difference in self.differences if difference.is_broken), None)

    @property
    def speedup(self) -> float | None:
        return None if self.overall is None else self.overall.speedup


def method_results(results: Results, resamples: int = RESAMPLES) -> list[MethodResult]:
    """Computes the results of each method, in the order of `config.specs`. `resamples` is the number of bootstrap samples for the
    confidence interval of the speedup."""
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
    """Returns one run of a method for each prompt index: the one with the median time among the repeats in `repeats` (the lower
    of the two middle ones if their number is even). `written` is the method as given on the command line."""
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
    """Computes a method's numbers over the prompts of `own`, which maps prompt indices to the method's runs.

    `reference` maps prompt indices to plain decoding's runs. `differences` are the differences between the method's outputs and
    plain decoding's, None if outputs are not compared. Both may also cover prompts that are not in `own`; these are ignored.
    `resamples` is the number of bootstrap samples for the confidence interval of the speedup.
    """
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
    """Returns the speedup (a method's tokens per second divided by plain decoding's) and the low and high end of its 95 %
    confidence interval.

    `pairs` has one tuple per prompt: tokens and seconds of the method, tokens and seconds of plain decoding. The interval is a
    percentile bootstrap over prompts with `resamples` samples and a fixed seed. Its ends are None with fewer than two prompts;
    all three are None if nothing can be compared.
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
