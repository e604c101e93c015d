"""Predicts the speedup of each method in a comparison, to be shown next to the measured speedup. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from specgen.compare.method_specs import REFERENCE
from specgen.compare.results import MethodResult, Results, Run, median_runs
from specgen.decoding.costs import Curve, eesd_speedup

if TYPE_CHECKING:
    from specgen.pair.pair import Pair

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # tokens in a timed pass; the widths between are interpolated
NO_PREDICTION = {"eq14": None, "pass_costs": None}


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Measured times of forward passes, in seconds: `draft` for one draft pass over one token (None without a draft model), and
    `target` for target passes, by the number of tokens in the pass."""

    draft: float | None
    target: Mapping[int, float]

    def target_pass(self, tokens: int) -> float:
        """Seconds of a target pass over `tokens` tokens, linearly interpolated between the measured numbers of tokens."""
        return Curve(self.target).at(tokens)

    def as_dict(self) -> dict[str, Any]:
        return {"draft": self.draft, "target": {str(width): seconds for width, seconds in sorted(self.target.items())}}


def with_predictions(made: Sequence[MethodResult], results: Results, costs: PassCosts) -> list[MethodResult]:
    """Returns copies of the method results `made` with `predicted` filled in: by `eq14`, EESD's formula, and by `pass_costs`, the
    measured times of all forward passes added up. The predictions use the same runs (one generation per prompt) as the measured
    speedups. Both are None where drafts were not single chains, were made during target passes, or have unknown lengths."""
    repeats = results.complete_repeats()
    reference = median_runs(results, REFERENCE, repeats)
    prefill = {index: float(run.line["phase_seconds"]["prefill"]) for index, run in reference.items()}
    return [
        replace(result, predicted=_predicted(result, median_runs(results, result.spec.written, repeats), costs, prefill))
        for result in made
    ]


def _predicted(
    result: MethodResult, runs: Mapping[int, Run], costs: PassCosts, prefill: Mapping[int, float]
) -> Mapping[str, float | None]:
    summary = result.summary
    rate, share = summary.acceptance_rate, summary.draft_share
    if rate is None or share is None or result.spec.is_baseline or any(run.draft_lengths is None for run in runs.values()):
        return NO_PREDICTION
    draft_seconds = (summary.phase_seconds["draft"] + summary.phase_seconds["policy"]) / summary.drafted
    if result.spec.choice.method.needs_draft_model and costs.draft is not None:
        draft_seconds = costs.draft
    plain = speculative = 0.0
    for index, run in runs.items():
        lengths = run.draft_lengths or ()
        plain += prefill[index] + (run.tokens - 1) * costs.target_pass(1)
        speculative += prefill[index] + sum(length * draft_seconds + costs.target_pass(length + 1) for length in lengths[1:])
    formula = eesd_speedup(rate, share, costs.target_pass(1) / draft_seconds if draft_seconds else math.inf)
    return {"eq14": formula, "pass_costs": plain / speculative if speculative else None}


def measure_costs(pair: Pair, results: Results) -> PassCosts:
    """Measures the times of single forward passes of both models.

    Passes follow a context of typical length: the median, over the prompts, of the prompt's tokens plus half of its answer's. The
    target is timed with different numbers of tokens per pass, up to what the longest draft in the comparison needed.
    """
    from specgen.engine.model_runner import time_passes
    from specgen.pair.pair import runners

    widest = max((length for run in results.runs.values() for length in run.draft_lengths or ()), default=0) + 1
    widths = sorted({*(width for width in WIDTHS if width <= widest), widest})
    plain = {index: run for (written, index, _), run in results.runs.items() if written == REFERENCE}
    prompts = [prompt for prompt in results.config.prompts if prompt.index in plain]
    lengths = [len(pair.tokenizer.encode(prompt.text)) + plain[prompt.index].tokens // 2 for prompt in prompts]
    context = max(int(median(lengths)), 1) if lengths else 1
    target, draft = runners(pair)
    draft_seconds = None if draft is None else time_passes(draft, [1], context)[1]
    return PassCosts(draft_seconds, time_passes(target, widths, context))
