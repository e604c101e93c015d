"""Computes each method's results from the runs of a comparison: totals over all prompts, the
speedup over plain decoding with its confidence interval, where the output differs from plain
decoding's, and predicted speedups. Ranks the methods.

A run is one generation for one prompt by one method; each is repeated. Of the repeats only the run
with the median time counts, with all of its numbers. So seconds, tokens and phases add up, and
every number can be computed again from the trace. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.compare.method_specs import REFERENCE, MethodSpec
from specgen.compare.prompts import ListedPrompt
from specgen.compare.verdict import Difference, count_outcomes
from specgen.decoding.costs import Curve, eesd_speedup
from specgen.methods.base import WITHOUT_A_DRAFT
from specgen.pair.figures import Figures
from specgen.traces.reader import TracedRun

if TYPE_CHECKING:
    from specgen.pair.pair import Pair

RESAMPLES = 2000
LEVEL = 0.95
NOT_RUN = "not run"
# With fewer prompts, or fewer tokens of a method in all, a bootstrap draws from too few values: its
# interval is too narrow, and the first of several methods would often be another one next time.
LEAST_PROMPTS = 10
LEAST_TOKENS = 500
# tokens in a timed pass; times of other widths are interpolated
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
NO_PREDICTION = {"eq14": None, "pass_costs": None}
Key = tuple[str, int, int]  # method as written, prompt index, repeat


@dataclass(frozen=True, slots=True)
class BenchmarkConfig:
    """What to measure: every method in `specs` generates for each prompt `repeats` times.

    With `record` the trace also contains, for each drafted token, how close the target's and the
    draft's distributions are. `chat` applies the chat template. Perplexity is measured for all
    methods if `perplexity` is set or if any method is lossy, joules per token if `energy` is set.
    """

    specs: Sequence[MethodSpec]
    prompts: Sequence[ListedPrompt]
    repeats: int
    sampling: SamplingParams
    chat: bool = False
    record: bool = False
    perplexity: bool = False
    energy: bool = False
    available: int | None = None  # prompts that the file holds; None: those in `prompts`

    def tuned_on(self, spec: MethodSpec) -> int | None:
        """Returns on how many of the prompts `specgen tune` chose the method's settings; None if
        they are not from a profile."""
        if spec.tuned_on is None:
            return None
        return sum(prompt.fingerprint in spec.tuned_on for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Run:
    """One finished generation for one prompt by one method.

    `line` is its summary line as in a trace, with `drafts` (the number of rounds with a draft).
    `branches`: some drafts were trees or several chains. `draft_lengths` has the number of drafted
    tokens of each round; None with such drafts, with drafts that were made during target passes
    (PEARL), and without rounds.
    """

    line: Mapping[str, Any]
    draft_lengths: tuple[int, ...] | None
    branches: bool = False

    @classmethod
    def of(cls, traced: TracedRun) -> Run:
        """Returns a run that was read from a trace, which must have its summary line."""
        assert traced.summary is not None
        rounds = [traced_round.round for traced_round in traced.rounds]
        branches = not all(round_.draft.is_chain for round_ in rounds)
        in_turn = all(round_.mode in ("prefill", "sequential") for round_ in rounds)
        draft_lengths = None
        if rounds and in_turn and not branches:
            draft_lengths = tuple(len(round_.draft.tokens) for round_ in rounds)
        return cls(traced.summary, draft_lengths, branches)

    @property
    def seconds(self) -> float:
        return float(self.line["seconds"])

    @property
    def tokens(self) -> int:
        return len(self.line["token_ids"])


@dataclass(slots=True)
class Results:
    """What a comparison has measured so far.

    `differences` says where a greedy output first differs from plain decoding's. `failures` has the
    error of each method, as written, that cannot run.
    """

    config: BenchmarkConfig
    runs: dict[Key, Run] = field(default_factory=dict)
    differences: dict[Key, Difference] = field(default_factory=dict)
    failures: dict[str, SpecgenError] = field(default_factory=dict)
    # for each method its first run of the first prompt, to display
    examples: dict[str, TracedRun] = field(default_factory=dict)
    # indices of the prompts that are later turns and were too long
    skipped: set[int] = field(default_factory=set)

    def complete_repeats(self) -> set[tuple[int, int]]:
        """Returns the (prompt index, repeat) pairs that all methods but those that failed have run.
        Only these count, so that all methods are compared on the same prompts."""
        running = [spec.written for spec in self.config.specs if spec.written not in self.failures]
        repeats = {(prompt, repeat) for _, prompt, repeat in self.runs}
        return {
            pair for pair in repeats if all((written, *pair) in self.runs for written in running)
        }

    def medians(self) -> dict[str, dict[int, Run]]:
        """Returns, by method as written and by prompt index, the run with the median time of the
        complete repeats; of two middle ones the faster."""
        repeats = sorted(self.complete_repeats())
        medians = {}
        for spec in self.config.specs:
            runs: dict[int, list[Run]] = {}
            for index, repeat in repeats:
                if (spec.written, index, repeat) in self.runs:
                    runs.setdefault(index, []).append(self.runs[spec.written, index, repeat])
            medians[spec.written] = {
                index: sorted(own, key=lambda run: run.seconds)[(len(own) - 1) // 2]
                for index, own in runs.items()
            }
        return medians

    def label(self, prompt_index: int) -> str:
        return next(prompt.label for prompt in self.config.prompts if prompt.index == prompt_index)


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method's numbers over all prompts, or over those of one `category`. `prompts` is their
    count, 0 if the method has no runs that can be compared; `failure` is the error if it could not
    run.

    `speedup` is the ratio of the method's tokens per second to plain decoding's; `low` and `high`
    are the ends of its 95 % confidence interval, `perplexity_interval` has those of the perplexity.
    Each is None if it cannot be computed: see `speedup_interval`; the intervals too if the runs are
    too short, and plain decoding's speedup has none.
    `differences` are the first differences between its outputs and plain decoding's; None if they
    are not compared: when sampling, and for lossy methods. `branches`: some drafts were trees or
    several chains. `by_category` has a result for each category of the prompts. `predicted` has the
    speedups of `with_predictions`; None if they were not requested.
    """

    spec: MethodSpec
    summary: Figures
    prompts: int = 0
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    perplexity_interval: tuple[float, float] | None = None
    differences: Sequence[Difference] | None = None
    branches: bool = False
    category: str = ""
    by_category: Sequence[MethodResult] = ()
    failure: SpecgenError | None = None
    predicted: Mapping[str, float | None] | None = None

    @property
    def name(self) -> str:
        return self.category or self.spec.label

    @property
    def is_reference(self) -> bool:
        return self.spec.written == REFERENCE

    @property
    def is_too_short(self) -> bool:
        return is_too_short(self.prompts, self.summary.new_tokens)

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How many prompts have each outcome (identical, tied, diverged) when compared with plain
        decoding's output. Empty if outputs are not compared."""
        return {} if self.differences is None else count_outcomes(self.prompts, self.differences)

    @property
    def diverged(self) -> Difference | None:
        """The first difference from plain decoding's output that rounding does not explain; None if
        there is none."""
        broken = (difference for difference in self.differences or () if difference.is_broken)
        return next(broken, None)

    @property
    def broken(self) -> Difference | None:
        """As `diverged`, but None for a method that may have such a difference: a baseline with
        other numbers than the target's."""
        return None if self.spec.has_own_numbers else self.diverged

    def rows(self, *, by_category: bool) -> list[MethodResult]:
        """The rows of a table: this one, and with `by_category` one for each category."""
        return [self, *(self.by_category if by_category else ())]


def method_results(results: Results, resamples: int = RESAMPLES) -> list[MethodResult]:
    """Computes the results of each method, in the order of `config.specs`. `resamples` is the
    number of bootstrap samples for the confidence interval of the speedup."""
    config = results.config
    repeats = results.complete_repeats()
    medians = results.medians()
    reference = medians[REFERENCE]
    methods = []
    for spec in config.specs:
        own = medians[spec.written]
        failure = results.failures.get(spec.written)
        if failure is not None or not own:
            methods.append(MethodResult(spec, Figures(spec.name), failure=failure))
            continue

        differences = [
            difference
            for (written, *repeat), difference in sorted(results.differences.items())
            if written == spec.written and tuple(repeat) in repeats
        ]
        compared = differences if config.sampling.greedy and spec.lossless else None
        categories: dict[str, dict[int, Run]] = {"": own}
        for prompt in config.prompts:
            if prompt.index in own:
                categories.setdefault(prompt.category, {})[prompt.index] = own[prompt.index]
        whole, *by_category = [
            _result(spec, runs, reference, compared, resamples, category)
            for category, runs in categories.items()
        ]
        methods.append(replace(whole, by_category=by_category))
    return methods


def is_too_short(prompts: int, tokens: int) -> bool:
    """Whether so many prompts, or tokens of a method over all of them, are too few for an interval,
    and to name the fastest method."""
    return prompts < LEAST_PROMPTS or tokens < LEAST_TOKENS


def _result(
    spec: MethodSpec,
    own: Mapping[int, Run],
    reference: Mapping[int, Run],
    differences: Sequence[Difference] | None,
    resamples: int,
    category: str,
) -> MethodResult:
    """Computes a method's numbers over the prompts of `own`, its runs by prompt index.

    `reference` has plain decoding's runs by prompt index, `differences` those of the method's
    outputs, None if outputs are not compared. Other prompts than those of `own` are ignored.
    """
    summary = Figures(spec.name)
    for run in own.values():
        summary.include(run.line)
    pairs = [
        (run.tokens, run.seconds, reference[index].tokens, reference[index].seconds)
        for index, run in own.items()
    ]
    speedup, low, high = speedup_interval(pairs, resamples)
    if spec.written == REFERENCE:
        differences = ()
    elif differences is not None:
        differences = [difference for difference in differences if difference.prompt_index in own]
    branches = any(run.branches for run in own.values())
    result = MethodResult(
        spec,
        summary,
        len(own),
        speedup,
        differences=differences,
        branches=branches,
        category=category,
    )
    if result.is_too_short:
        return result
    perplexities = perplexity_interval([run.line for run in own.values()], resamples)
    if result.is_reference:
        return replace(result, perplexity_interval=perplexities)
    return replace(result, low=low, high=high, perplexity_interval=perplexities)


def speedup_interval(
    pairs: Sequence[tuple[int, float, int, float]], resamples: int
) -> tuple[float | None, float | None, float | None]:
    """Returns the speedup (a method's tokens per second divided by plain decoding's) and both ends
    of its 95 % confidence interval.

    `pairs` has for each prompt the tokens and seconds of the method, and those of plain decoding.
    The interval is a percentile bootstrap over prompts with `resamples` samples and a fixed seed;
    None with fewer than two prompts. All three are None without prompts, if a run took no time, or
    if plain decoding generated no token.
    """
    import numpy as np

    table = np.array(pairs, dtype=float).reshape(len(pairs), 4)
    if not len(table) or not (table[:, 1] > 0).all() or not table[:, 2].sum():
        return None, None, None
    speedup = float(_ratio(table.sum(axis=0)))
    if len(table) < 2:
        return speedup, None, None
    low, high = _interval(_ratio(_drawn_sums(table, resamples)))
    return speedup, low, high


def _ratio(sums: Any) -> Any:
    return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])


def perplexity_interval(
    lines: Sequence[Mapping[str, Any]], resamples: int
) -> tuple[float, float] | None:
    """Returns both ends of the 95 % confidence interval of the perplexity over the runs with these
    summary lines, one for each prompt: a bootstrap as in `speedup_interval`. None with fewer than
    two runs, and where the perplexity of one was not measured or it has no tokens."""
    import numpy as np

    table = []
    for line in lines:
        tokens = len(line["token_ids"])
        perplexity = line.get("perplexity")
        if not tokens or perplexity is None:
            return None
        table.append((tokens * math.log(perplexity), tokens))
    if len(table) < 2:
        return None
    sums = _drawn_sums(np.array(table), resamples)
    return _interval(np.exp(sums[:, 0] / sums[:, 1]))


def _drawn_sums(table: Any, resamples: int) -> Any:
    """Returns the sums [resamples, columns] of as many rows of `table` as it has, drawn with
    replacement, with a fixed seed."""
    import numpy as np

    drawn = np.random.default_rng(0).integers(0, len(table), (resamples, len(table)))
    return table[drawn].sum(axis=1)


def _interval(values: Any) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def ranked(results: Sequence[MethodResult]) -> list[MethodResult]:
    """Returns the results in this order: plain decoding, lossless methods, methods that should
    be and had another output, lossy methods, methods that did not run; of each kind the fastest
    first."""

    def group(result: MethodResult) -> int:
        if result.is_reference:
            return 0
        if not result.prompts:
            return 4
        if not result.spec.lossless:
            return 3
        return 2 if result.diverged else 1

    return sorted(results, key=lambda result: (group(result), -(result.speedup or 0.0)))


def candidates(results: Sequence[MethodResult]) -> list[MethodResult]:
    """The methods that can be the best one, fastest first: those that keep the target's output and
    have a speedup, but not plain decoding."""

    def keeps_output(result: MethodResult) -> bool:
        spec = result.spec
        return spec.lossless and not spec.has_own_numbers and not result.diverged

    return [
        result
        for result in ranked(results)
        if keeps_output(result) and not result.is_reference and result.speedup
    ]


def best(results: Sequence[MethodResult]) -> MethodResult | None:
    """Returns the fastest lossless method, of the `candidates`; None if there are none, or if what
    was measured is too short to name one."""
    first = next(iter(candidates(results)), None)
    return None if first is None or first.is_too_short else first


def as_fast_as(results: Sequence[MethodResult], top: MethodResult) -> list[MethodResult]:
    """Returns the methods that may be as fast as the best one, `top`: their 95 % confidence
    intervals reach its speedup."""
    others = (result for result in candidates(results) if result is not top)
    return [result for result in others if (result.high or 0.0) >= (top.speedup or 0.0)]


def not_run(results: Sequence[MethodResult]) -> list[tuple[list[str], str]]:
    """Returns the methods that have no results, as pairs: the names of all methods with the same
    reason, and the reason, such as an error message or `not measured yet`."""
    reasons: dict[str, list[str]] = {}
    for result in ranked(results):
        if result.prompts:
            continue
        reason = "not measured yet"
        if result.failure is not None:
            # without the advice to take other methods
            failure = str(result.failure).removesuffix(WITHOUT_A_DRAFT)
            reason = f"{NOT_RUN}: {failure.removeprefix(f'{result.spec.name} ')}"
        reasons.setdefault(reason, []).append(result.spec.written)
    return [(names, reason) for reason, names in reasons.items()]


def measure_costs(pair: Pair, results: Results) -> dict[str, Any]:
    """Measures the seconds of single forward passes: `draft` of a draft pass over one token (None
    without a draft model), and `target` of target passes by their number of tokens, up to what the
    longest draft in the comparison needed.

    Passes follow a context of typical length: the prompts' median of tokens, plus half of plain
    decoding's mean answer.
    """
    from specgen.engine.model_runner import time_passes

    runs = results.runs
    longest_draft = max((max(run.draft_lengths or (0,)) for run in runs.values()), default=0)
    widest = longest_draft + 1
    widths = sorted({*(width for width in WIDTHS if width <= widest), widest})

    prompt = median(len(pair.tokenizer.encode(prompt.text)) for prompt in results.config.prompts)
    answer = fmean(run.tokens for (written, _, _), run in runs.items() if written == REFERENCE)
    context = int(prompt + answer / 2)

    runners = pair.models.with_draft_model() or pair.models.plain()
    target = runners.target
    draft = runners.draft
    draft_seconds = None if draft is None else time_passes(draft, [1], context)[1]
    return {"draft": draft_seconds, "target": time_passes(target, widths, context)}


def with_predictions(
    methods: Sequence[MethodResult], results: Results, costs: Mapping[str, Any]
) -> list[MethodResult]:
    """Returns the methods with their `predicted` speedups, of the same runs as the measured ones.

    `costs` are the seconds of single passes, from `measure_costs`. `eq14` is by EESD's formula (Eq.
    14), from these and the acceptance. `pass_costs` divides the summed costs of plain decoding's
    passes by those of all passes in the method's rounds. These two are None for a method that
    drafted nothing, for transformers' own methods, and where drafts were not single chains or were
    made during target passes.
    """
    medians = results.medians()
    prefill = {
        index: float(run.line["phase_seconds"]["prefill"])
        for index, run in medians[REFERENCE].items()
    }
    return [
        replace(method, predicted=_predicted(method, medians[method.spec.written], costs, prefill))
        for method in methods
    ]


def _predicted(
    result: MethodResult,
    runs: Mapping[int, Run],
    costs: Mapping[str, Any],
    prefill: Mapping[int, float],
) -> Mapping[str, float | None]:
    summary = result.summary
    target_pass = Curve(costs["target"]).at
    rate = summary.acceptance_rate
    share = summary.draft_share
    if (
        rate is None
        or share is None
        or result.spec.is_baseline
        or any(run.draft_lengths is None for run in runs.values())
    ):
        return NO_PREDICTION
    drafting = summary.phase_seconds["draft"] + summary.phase_seconds["policy"]
    draft_seconds = drafting / summary.drafted
    if result.spec.choice.method.needs_draft_model and costs["draft"] is not None:
        draft_seconds = costs["draft"]

    plain = 0.0
    speculative = 0.0
    for index, run in runs.items():
        lengths = run.draft_lengths or ()
        plain += prefill[index] + (run.tokens - 1) * target_pass(1)
        speculative += prefill[index] + sum(
            length * draft_seconds + target_pass(length + 1) for length in lengths[1:]
        )
    ratio = target_pass(1) / draft_seconds if draft_seconds else math.inf
    formula = eesd_speedup(rate, share, ratio)
    return {"eq14": formula, "pass_costs": plain / speculative if speculative else None}
