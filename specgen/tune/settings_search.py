"""Searches for each method's fastest settings until a deadline, in simulated runs, and runs the best ones on the real models.

Sets of layers to skip cannot be simulated, so they are tried in real runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from specgen.base.errors import SpecgenError
from specgen.base.settings import written
from specgen.compare.method_specs import parse_spec
from specgen.compare.results import BenchmarkConfig, method_results
from specgen.compare.runner import Runner
from specgen.methods import METHODS
from specgen.pair.pair import skipping_speed
from specgen.pair.skip_search import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, search_skips
from specgen.tune.outcome import PLAIN, Candidate, GivenSettings, by_speed, counted, nearest_to_default, plain_of, round_robin

if TYPE_CHECKING:
    from specgen.pair.pair import Pair
    from specgen.tune.outcome import Deadline, Objective, TuningObserver, TuningRequest
    from specgen.tune.round_timing import ReferenceOutput
    from specgen.tune.simulator import Simulator

SOME = "some settings"  # the key under which `search` says that time was short
FEWEST_PROMPTS = 2  # a method is really run on at least this many prompts
MOST_REPEATS = 50  # a method is really run at most this many times on each prompt
OUT_OF_TIME = "time was short: the figures are expected ones (a larger --budget helps)"
TIME_WAS_SHORT = "time was short (a larger --budget helps"


def expected(simulator: Simulator, name: str, settings: GivenSettings, numbers: Sequence[int] | None = None) -> Candidate:
    """Simulates the method on the prompts with these `numbers` (None: all) and returns it with its expected speed."""
    found = simulator.run(name, settings, numbers)
    return Candidate(name, settings, found.tokens_per_second or 0.0, perplexity=found.perplexity)


def search(
    simulator: Simulator,
    grids: Mapping[str, Sequence[GivenSettings]],
    deadline: Deadline,
    announce: Callable[[str], None] = lambda what: None,
    *,
    numbers: Sequence[int] | None = None,
    at_least_one: bool = False,
) -> tuple[Mapping[str, Sequence[Candidate]], dict[str, str]]:
    """Simulates the settings in `grids` (method: settings to try) in turn until the deadline, on prompts with these `numbers`.

    Lossy methods (whose output can differ from the target's) come last, because they are never chosen automatically. With
    `at_least_one`, one setting of each method is simulated even after the deadline. Returns what was tried, by method, and why
    methods failed; under `SOME`, that not all settings were tried.
    """
    tried: dict[str, list[Candidate]] = {name: [] for name in grids}
    left_out: dict[str, str] = {}
    lossy = {name: settings for name, settings in grids.items() if not METHODS[name].lossless}
    lossless = {name: settings for name, settings in grids.items() if name not in lossy}
    for name, settings in chain(round_robin(lossless), round_robin(lossy)):
        if deadline.left < 0 and (tried[name] or not at_least_one):
            left_out[SOME] = f"time was short: {sum(map(len, tried.values()))} were simulated"
            break
        if name in left_out:
            continue
        announce(f"simulating {written(name, settings)}")
        try:
            tried[name].append(expected(simulator, name, settings, numbers))
        except SpecgenError as error:
            if name == PLAIN:
                raise
            left_out[name] = error.message
    return tried, left_out


def best_lossy(tried: Sequence[Candidate], plain_perplexity: float, objective: Objective) -> Candidate | str:
    """Returns the best of the candidates `tried`, which are all of one lossy method, the fastest of equally good ones.

    If no perplexity is at most the objective's limit, returns a text that says so. Perplexities that agree to three decimals are
    equally good.
    """
    limit, perplexities = objective.limit(plain_perplexity), [each.perplexity or math.inf for each in tried]
    kept = [each for each, perplexity in zip(tried, perplexities, strict=True) if perplexity <= limit]
    if not kept:
        found = f", the lowest being {lowest:.3f}" if (lowest := min(perplexities)) < math.inf else ""
        allowed = "" if objective.lowest_perplexity else f" of at most {limit:.3f}"
        return f"none of {counted(len(tried), 'setting')} has a perplexity{allowed}{found}"

    def rank(candidate: Candidate) -> tuple[float, float]:
        perplexity = candidate.perplexity if objective.lowest_perplexity else None
        return (0.0 if perplexity is None else -round(perplexity, 3), candidate.predicted)

    return replace(max(kept, key=rank), tried=len(tried))


def best_of_each(
    tried: Mapping[str, Sequence[Candidate]], left_out: Mapping[str, str], plain_perplexity: float | None, objective: Objective
) -> tuple[list[Candidate], dict[str, str]]:
    """Returns the best settings of each method in `tried`, the fastest first, and why methods have none.

    `left_out` are the reasons why methods failed. `plain_perplexity` is None if no lossy method was tried.
    """
    found, reasons = [], {name: why for name, why in left_out.items() if name != SOME}
    any_lossless = any(METHODS[name].lossless for name in tried)
    for name, candidates in tried.items():
        if not candidates:
            alone = ", or these --methods alone" if not METHODS[name].lossless and any_lossless else ""
            reasons.setdefault(name, f"{TIME_WAS_SHORT}{alone})")
        elif METHODS[name].lossless:
            found.append(nearest_to_default(candidates))
        elif isinstance(best := best_lossy(candidates, plain_perplexity or 0.0, objective), Candidate):
            found.append(best)
        else:
            reasons[name] = best
    return by_speed(found), reasons


def tuned_skips(pair: Pair, outputs: Sequence[ReferenceOutput], seconds: float) -> Candidate:
    """Searches for about `seconds` for the layers to skip when the target itself drafts, and returns the fastest set found.

    Each set is run on the beginnings of the prompts of `outputs`. Raises SpecgenError if the target's layers cannot be run one by
    one, or if the time is too short to try one set.
    """
    pair.target.model.check_layers("layer skipping")
    prompts = [output.prompt_ids[:PROMPT_TOKENS] for output in outputs[:PROMPTS]]
    seconds_per_token = sum(output.seconds for output in outputs) / sum(len(output.token_ids) for output in outputs)
    if len(prompts) * NEW_TOKENS * seconds_per_token > seconds:
        raise SpecgenError("time was short for a search of the layers to skip", "A larger --budget helps")
    layers = pair.target.model.shape.num_layers
    speeds = search_skips(layers, lambda skips: skipping_speed(pair, skips, prompts), seconds)
    fastest = max(speeds, key=lambda skips: speeds[skips])
    return Candidate("selfsd", {"skip": fastest}, speeds[fastest], len(speeds))


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
