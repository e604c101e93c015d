"""A pair's prompts, round costs and real runs, for the tests of tuning."""

from __future__ import annotations

from collections.abc import Callable

from specgen.cost_model.round_costs import CostTable, Curve, RoundCosts
from specgen.pair import Pair
from specgen.traces.summary import Summary
from specgen.types import SamplingParams

GREEDY = SamplingParams(max_new_tokens=24, seed=3)
PROMPTS = [[5, 9, 7, 3, 11, 5, 9, 7], [20, 21, 22, 4, 6], [8, 8, 13, 30, 31]]
COSTS = RoundCosts(CostTable({8: Curve({0: 0.0, 1: 1.0, 2: 2.0})}), CostTable({8: Curve({1: 10.0, 2: 10.0})}), 0.0)
PairOf = Callable[[str, str], Pair]


def really(pair: Pair, name: str, given: dict[str, object], sampling: SamplingParams = GREEDY) -> Summary:
    summary = Summary(name)
    for prompt in PROMPTS:
        for round_ in pair.rounds(prompt, name, sampling, **given):
            summary.add(round_)
    return summary
