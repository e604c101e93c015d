"""Runs the best candidates (methods with settings) on the real models, in turn with plain decoding. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.compare.method_specs import parse_spec
from specgen.compare.results import BenchmarkConfig, method_results
from specgen.compare.runner import Runner
from specgen.tune.outcome import PLAIN, Candidate, counted, plain_of

if TYPE_CHECKING:
    from specgen.pair.pair import Pair
    from specgen.tune.request import TuningObserver, TuningRequest

FEWEST_PROMPTS = 2  # a method is run on at least this many prompts
MOST_REPEATS = 50  # a method is run at most this many times on each prompt
OUT_OF_TIME = "time was short: the figures are expected ones (a larger --budget helps)"


def confirm(
    pair: Pair, request: TuningRequest, candidates: Sequence[Candidate], selected: Sequence[Candidate], observer: TuningObserver
) -> tuple[Sequence[Candidate], Mapping[str, str]]:
    """Measures plain decoding and as many of the `selected` candidates as the time allows, by decoding with them.

    Returns (1) all `candidates`, with measured speeds where they ran, and (2) the reasons why something did not run. The keys of
    (2) are candidates in text form, such as `sd:k=4`, and `confirmation` if nothing could be measured in the time.
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
    figures = {made.spec.written: made for made in method_results(results) if made.prompts}
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
    """Returns the candidates that the remaining time is enough for, and the number of new tokens to generate on each prompt.

    Candidates are dropped from the end of `selected` until each can run on `FEWEST_PROMPTS` prompts, after one warm-up. If the
    time is too short for all prompts, fewer tokens are generated, down to half the requested number: more prompts give a surer
    speed.
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
    """Returns the expected seconds per token of the slowest of plain decoding and `listed`, plus a margin of 20 %."""
    return 1.2 / min(candidate.predicted for candidate in (plain_of(candidates), *listed))
