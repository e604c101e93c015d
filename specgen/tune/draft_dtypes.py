"""Decides whether a pair is tuned with its draft model as it is, or with the draft's weights rounded (`--draft-dtype int8`).

Rounding makes a draft pass shorter where it is bound by memory, and some of what it drafts worse. Both are measured, and
simulated runs of one method say which draft gives the larger speedup over plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen import methods
from specgen.tune.candidates import grid
from specgen.tune.outcome import AS_FAST, PLAIN
from specgen.tune.recorded_drafts import mean_acceptance
from specgen.tune.settings_search import expected

if TYPE_CHECKING:
    from specgen.pair.pair import Pair
    from specgen.tune.request import Deadline, TuningObserver
    from specgen.tune.simulation import PairMeasurements

SHARE = 0.7  # of the time left; the share of it that costs are timed for is a little less than that for the stored draft
_SIMULATION = 0.1  # of the time left, for simulating with each draft
LEAST_BYTES = 8 << 20  # of the draft's weight files; smaller ones stay in the processor's cache, where rounding gains nothing


def worth_rounding(pair: Pair) -> bool:
    """Whether the draft model is so large that its passes may be bound by reading its weights."""
    if pair.draft is None or pair.draft.refusal is not None:  # no tuned method runs one whose tokens cannot be translated
        return False
    return sum(path.stat().st_size for path in pair.draft.folder.glob("*.safetensors")) >= LEAST_BYTES


def methods_with_draft(names: Sequence[str]) -> list[str]:
    """Returns those of the simulated methods that run the draft model."""
    return [name for name in names if (method := methods.METHODS[name]).needs_draft_model and method.recorded]


def merged(stored: PairMeasurements, rounded: PairMeasurements) -> PairMeasurements:
    """Returns the measurements with the rounded draft, and those of `stored` that were not taken again (the exit layer's)."""
    drafts, costs = {**stored.drafts, **rounded.drafts}, {**stored.costs, **rounded.costs}
    return replace(rounded, drafts=drafts, costs=costs, has_predictor=stored.has_predictor)


def is_faster(
    rounded: PairMeasurements,
    stored: PairMeasurements,
    names: Sequence[str],
    deadline: Deadline,
    observer: TuningObserver,
    dtype: str,
) -> bool:
    """Whether the draft with weights rounded to `dtype` is expected to be clearly faster; reports why."""
    both = rounded, stored
    speedups = _expected_speedups(both, "sd" if "sd" in names else names[0], deadline.share(_SIMULATION))
    accepted = [mean_acceptance(each.drafts)["model"] for each in both]
    better = AS_FAST * speedups[0] > speedups[1]
    figures = [f"{speedup:.2f}× expected with {share:.0%} accepted" for speedup, share in zip(speedups, accepted, strict=True)]
    observer.done(f"{dtype} draft: {figures[0]}, else {figures[1]}: {'taken' if better else 'not taken'}")
    return better


def _expected_speedups(both: Sequence[PairMeasurements], name: str, deadline: Deadline) -> list[float]:
    """Returns the largest speedups over plain decoding of the method with each draft, in simulations of the same settings."""
    plain = [expected(each, PLAIN, {}).predicted for each in both]
    best = [0.0 for _ in both]
    for tried, settings in enumerate(grid(name)):
        if tried and deadline.left < 0:
            break
        best = [max(known, expected(each, name, settings).predicted) for known, each in zip(best, both, strict=True)]
    return [speed / slow for speed, slow in zip(best, plain, strict=True)]
