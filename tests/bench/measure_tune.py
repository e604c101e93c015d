"""Is `specgen tune` right? Not a test: `python tests/bench/measure_tune.py` prints figures.

A grid of methods and settings is measured by real runs in turn, and compared with what simulation
expects of each and with what tuning chose: median error, rank correlation within the best quarter,
whether the choice lies inside the interval of the best. With `--held-out` the tuning sees some
categories, the measurement the others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median

import specgen
from specgen.base.settings import written
from specgen.base.types import SamplingParams
from specgen.compare.method_specs import parse_specs
from specgen.compare.prompts import ListedPrompt, load_prompts
from specgen.compare.results import BenchmarkConfig, MethodResult, method_results
from specgen.compare.runner import Runner
from specgen.methods import METHODS
from specgen.pair.pair import Pair
from specgen.tune.outcome import (
    Deadline,
    TuningOutcome,
    TuningRequest,
    combinations,
    grid,
    is_searched,
    is_simple,
)
from specgen.tune.tuner import Tuner, outcome_of

HELD_OUT = ("news", "chat")
TUNED = [name for name in METHODS if name != "ar" and (is_simple(name) or is_searched(name))]


class Steps:
    def done(self, what: str) -> None:
        print(f"  {what}", flush=True)

    def doing(self, what: str) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--settings", type=int, default=6, help="of each method, spread over its grid"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=60.0, help="of the tuning, without loading")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--methods", default=",".join(TUNED))
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    everything = load_prompts(
        None, limit=2 * options.prompts if options.held_out else options.prompts
    )
    known = [
        prompt for prompt in everything if not options.held_out or prompt.category not in HELD_OUT
    ]
    measured = [
        prompt for prompt in everything if not options.held_out or prompt.category in HELD_OUT
    ]
    sampling = SamplingParams(
        max_new_tokens=options.tokens, temperature=options.temperature, seed=0
    )
    with specgen.load(device="cpu", dtype="float32") as pair:
        pair.warm_up()
        start = time.perf_counter()
        request = TuningRequest(known, sampling, Deadline(start + options.budget))
        tuner = Tuner(pair, request, Steps())
        chosen = tuner.select()
        references = tuner.try_likeliest(chosen)
        simulator, acceptance = tuner.measure(pair, chosen, references, request.deadline)
        candidates = tuner.confirm(pair, tuner.choose(simulator, chosen))
        outcome = outcome_of(simulator, candidates, request, tuner.left_out, acceptance)
        print(
            (
                f"tuned in {time.perf_counter() - start:.1f} s: {outcome.verdict}, "
                f"{outcome.chosen.written}"
            ),
            flush=True,
        )
        names = [name for name in options.methods.split(",") if name in chosen]
        specs = [written(name, given) for name in names for given in grid(name)[: options.settings]]
        trees = combinations(METHODS["sd"].tuning.shapes) if "sd" in names else []
        specs += [
            written("sd", given) for given in trees[:: -(-len(trees) // options.settings) or 1]
        ]
        specs = list(dict.fromkeys([*specs, outcome.best.written]))
        found = measure(pair, specs, measured, options.repeats, sampling)
        specs_found = [row.spec for row in found]
        expected = {
            each.written: simulator.run(each.name, each.choice.given).tokens_per_second or 0.0
            for each in specs_found
        }
        report(found, expected, outcome)


def measure(
    pair: Pair,
    specs: Sequence[str],
    prompts: Sequence[ListedPrompt],
    repeats: int,
    sampling: SamplingParams,
) -> list[MethodResult]:
    runner = Runner(pair, BenchmarkConfig(parse_specs(list(specs)), prompts, repeats, sampling))
    results = runner.results
    start = time.perf_counter()
    for step in runner.steps():
        if step.done and step.done % 200 == 0:
            print(
                f"  {step.done} of {step.total} runs, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    broken = [difference for difference in results.differences.values() if difference.is_broken]
    assert not broken, "an output is not the target's"
    return [result for result in method_results(results) if result.prompts]


def report(
    found: Sequence[MethodResult], expected: dict[str, float], outcome: TuningOutcome
) -> None:
    from scipy.stats import spearmanr

    speeds = {row.spec.written: row.summary.tokens_per_second or 0.0 for row in found}
    intervals = {row.spec.written: (row.low, row.high) for row in found}
    speedups = {row.spec.written: row.speedup or 0.0 for row in found}
    ranked = sorted(speeds, key=lambda name: -speeds[name])
    lossless = {row.spec.written for row in found if row.spec.lossless}
    print(f"{'setting':60} measured  expected  error    speedup (95 %)")
    for name in ranked:
        low, high = intervals[name]
        interval = "" if low is None or high is None else f"{low:.2f}-{high:.2f}"
        error = expected[name] / speeds[name] - 1
        mark = "" if name in lossless else "  lossy"
        print(
            f"{name:60} {speeds[name]:8.1f}  {expected[name]:8.1f}  {error:+6.1%}  "
            f"{speedups[name]:5.2f}  {interval}{mark}"
        )
    errors = [abs(expected[name] / speeds[name] - 1) for name in ranked]
    print(f"{len(ranked)} settings; median error {median(errors):.1%}")
    drifting = expected["ar"] / speeds["ar"]
    relative = [abs(expected[name] / speeds[name] / drifting - 1) for name in ranked]
    print(
        f"median error of the speedups {median(relative):.1%} (a machine that drifted "
        "between both is out of it)"
    )
    quarter = ranked[: max(3, len(ranked) // 4)]
    for names, what in ((quarter, "the best quarter"), (ranked, "all")):
        rank = spearmanr(
            [speeds[name] for name in names], [expected[name] for name in names]
        ).statistic
        print(f"Spearman within {what} ({len(names)}): {rank:.2f}")
    best = next(name for name in ranked if name in lossless)
    chosen = outcome.chosen.written
    low, high = intervals[best]
    inside = low is None or (low <= speedups[chosen] <= (high or speedups[chosen]))
    share = speeds[chosen] / speeds[best]
    print(
        f"best: {best} {speeds[best]:.1f} tokens/s; chosen: {chosen} {speeds[chosen]:.1f} "
        f"tokens/s ({share:.1%})"
    )
    print(
        f"the choice lies {'inside' if inside else 'OUTSIDE'} the interval of the best "
        "one's speedup"
    )


if __name__ == "__main__":
    main()
