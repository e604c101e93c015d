"""Really runs the best candidates, in turn with plain decoding, for as long as there is time. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.compare.method_specs import parse_spec
from specgen.compare.results import BenchmarkConfig, method_results
from specgen.compare.runner import Runner
from specgen.tuning.outcome import PLAIN, Candidate, counted, plain_of

if TYPE_CHECKING:
    from specgen.pair import Pair
    from specgen.tuning.request import TuningObserver, TuningRequest

FEWEST_PROMPTS = 2  # that a method is run on
MOST_REPEATS = 50  # of each prompt
OUT_OF_TIME = "time was short: the figures are expected ones (a larger --budget helps)"


def confirm(
    pair: Pair, request: TuningRequest, candidates: Sequence[Candidate], selected: Sequence[Candidate], observer: TuningObserver
) -> tuple[Sequence[Candidate], Mapping[str, str]]:
    """Run plain decoding and as many of the selected as there is time for.

    Returns the candidates, with the measured speeds of those that ran, and the reasons where something did not run.
    """
    if not selected:
        return candidates, {}
    listed, new_tokens = _affordable(request, candidates, selected)
    if not listed:
        return candidates, {"confirmation": OUT_OF_TIME}
    run_seconds = new_tokens * _token_seconds(candidates, listed)
    specs = [parse_spec(PLAIN), *(parse_spec(candidate.written) for candidate in listed)]
    sampling = replace(request.seeded_sampling, max_new_tokens=new_tokens)
    config = BenchmarkConfig(specs, request.prompts, MOST_REPEATS, sampling, request.chat)
    runner = Runner(pair, config)
    results = runner.results
    for step in runner.steps():
        observer.doing(f"really running {'' if step.spec is None else step.spec.written}")
        if request.deadline.left < run_seconds:
            break
    left_out = {written: error.message for written, error in results.failures.items()}
    turns = len(results.complete_repeats())
    if not turns:
        return candidates, {**left_out, "confirmation": OUT_OF_TIME}
    runs = f"{counted(turns, 'turn')} of up to {new_tokens} tokens"
    observer.done(f"{counted(len(listed), 'method')} and plain decoding really run, {runs}")
    figures = {made.spec.written: made.overall for made in method_results(results) if made.overall is not None}
    measured = []
    for candidate in candidates:
        found = figures.get(candidate.written)
        if found is not None and found.summary.new_tokens:
            speed = found.summary.tokens_per_second
            candidate = replace(candidate, measured=speed, speedup=found.speedup, low=found.low, high=found.high)
        measured.append(candidate)
    return measured, left_out


def _affordable(
    request: TuningRequest, candidates: Sequence[Candidate], selected: Sequence[Candidate]
) -> tuple[Sequence[Candidate], int]:
    """The first of `selected` that can run on `FEWEST_PROMPTS` at least, warm-up included, and the new tokens of each run.

    Runs are shortened by up to a half so that they cover all prompts: a speed on few prompts may not hold on others.
    """
    seconds, most = request.deadline.left, request.sampling.max_new_tokens
    shortest = max(1, most // 2)

    def fitting(listed: Sequence[Candidate], prompts: int) -> float:
        return seconds / ((1 + prompts) * (len(listed) + 1) * _token_seconds(candidates, listed))

    listed = selected
    while listed and fitting(listed, FEWEST_PROMPTS) < shortest:
        listed = listed[:-1]
    return listed, min(most, max(shortest, int(fitting(listed, len(request.prompts)))))


def _token_seconds(candidates: Sequence[Candidate], listed: Sequence[Candidate]) -> float:
    """Expected seconds per token of the slowest method that runs, with a margin of a fifth."""
    return 1.2 / min(candidate.predicted for candidate in (plain_of(candidates), *listed))
