"""What theory says a method should gain on this pair, to be read beside what was measured. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from specgen.compare.method_specs import BASELINE, MethodSpec
from specgen.compare.results import Results, Run, median_runs
from specgen.cost_model import Curve, eesd_speedup
from specgen.methods import METHODS
from specgen.traces.summary import Summary

if TYPE_CHECKING:
    from specgen.pair import Pair

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # tokens of a pass; those between are taken from a straight line


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of a draft model's pass over one token (None without one), and of a target's pass by its number of tokens."""

    draft: float | None
    target: Mapping[int, float]

    def target_pass(self, tokens: int) -> float:
        """Seconds for so many tokens, between the measured widths along a straight line."""
        return Curve(self.target).at(min(tokens, max(self.target)))

    def as_dict(self) -> dict[str, Any]:
        return {"draft": self.draft, "target": {str(width): seconds for width, seconds in sorted(self.target.items())}}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Speedups: by EESD's Eq. 14, and by adding up the passes at their measured costs. None where drafts are no chains drafted in
    turn with the target, or nobody told what was drafted."""

    formula: float | None
    pass_costs: float | None


def predict(results: Results, costs: PassCosts) -> dict[str, Prediction]:
    """By method as written, for the runs that the table is made of."""
    turns = results.whole_turns()
    prefill = {index: float(run.line["phase_seconds"]["prefill"]) for index, run in median_runs(results, BASELINE, turns).items()}
    return {
        spec.written: _predicted(spec, median_runs(results, spec.written, turns), costs, prefill)
        for spec in results.specs
        if spec.written not in results.failures
    }


def _predicted(spec: MethodSpec, runs: Mapping[int, Run], costs: PassCosts, prefill: Mapping[int, float]) -> Prediction:
    summary = Summary(spec.name)
    for run in runs.values():
        summary.include(run.line)
    rate, share = summary.acceptance_rate, summary.draft_share
    if spec.is_rival or rate is None or share is None or any(run.draft_lengths is None for run in runs.values()):
        return Prediction(None, None)
    drafts_with_a_model = METHODS[spec.name].needs_draft_model and costs.draft is not None
    a_draft = costs.draft if drafts_with_a_model else summary.phase_seconds["draft"] / summary.drafted
    assert a_draft is not None
    plain = passes = 0.0
    for index, run in runs.items():
        lengths = run.draft_lengths or ()
        plain += prefill[index] + (len(run.line["token_ids"]) - 1) * costs.target_pass(1)
        passes += prefill[index] + sum(length * a_draft + costs.target_pass(length + 1) for length in lengths[1:])
    return Prediction(
        eesd_speedup(rate, share, costs.target_pass(1) / a_draft if a_draft else math.inf), plain / passes if passes else None
    )


def measure_costs(pair: Pair, results: Results) -> PassCosts:
    """Time single passes behind a context as long as the runs' own, for the widths that the runs needed."""
    from specgen.engine.timing import time_passes

    runs = list(results.runs.values())
    widest = max((length for run in runs for length in run.draft_lengths or ()), default=0) + 1
    widths = sorted({*(width for width in WIDTHS if width <= widest), widest})
    plain = {key[1]: run for key, run in results.runs.items() if key[0] == BASELINE}
    prompts = [prompt for prompt in results.prompts if prompt.index in plain]
    # half of an answer is what a pass sees on average
    lengths = [len(pair.tokenizer.encode(prompt.text)) + len(plain[prompt.index].line["token_ids"]) // 2 for prompt in prompts]
    context = max(int(median(lengths)), 1) if lengths else 1
    target, draft = pair.runners
    a_draft = None if draft is None else time_passes(draft, [1], context)[1]
    return PassCosts(a_draft, time_passes(target, widths, context))
