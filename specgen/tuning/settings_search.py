"""Tries the settings of each method in simulated runs until a deadline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from specgen.errors import SpecgenError
from specgen.methods import METHODS
from specgen.settings import written
from specgen.tuning.candidates import GivenSettings, grid, round_robin
from specgen.tuning.outcome import Candidate, by_speed, nearest_to_default
from specgen.tuning.simulation import simulate

if TYPE_CHECKING:
    from specgen.tuning.request import Deadline
    from specgen.tuning.simulated_runs import SimulatedRun, SimulatedRuns
    from specgen.tuning.simulation import PairMeasurements

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GridResult:
    """Each method's best candidate by expected speed, the number of settings tried, and whether that was all of them."""

    candidates: Sequence[Candidate]
    tried: int
    complete: bool


def simulate_grids(
    measurements: PairMeasurements, names: Sequence[str], deadline: Deadline, announce: Announce = lambda what: None
) -> GridResult:
    """Simulate the methods' settings in turn on the recorded drafts; at least one of each method, whatever the deadline."""
    found: dict[str, list[Candidate]] = {}
    tried, complete = 0, True
    for name, settings in round_robin({name: grid(name) for name in names}):
        if tried % 20 == 0:
            announce(f"simulating, {tried} settings so far")
        if name in found and deadline.left < 0:
            complete = False
            break
        found.setdefault(name, []).append(expected(measurements, name, settings))
        tried += 1
    return GridResult(by_speed([nearest_to_default(candidates) for candidates in found.values()]), tried, complete)


def expected(measurements: PairMeasurements, name: str, settings: GivenSettings) -> Candidate:
    """The method with its expected speed on all prompts."""
    summary = simulate(measurements, name, settings)
    return Candidate(name, settings, METHODS[name].lossless, summary.tokens_per_second or 0.0, 1, summary.acceptance_rate)


@dataclass(slots=True)
class SearchResult:
    """The best settings by method, how many were tried of each, and why others have none.

    The output of a lossy method may not be less likely than plain decoding's, whose perplexity is `perplexity_limit`: the fastest
    settings that keep it count. `lowest` is the lowest perplexity by method.
    """

    best: dict[str, Candidate] = field(default_factory=dict)
    tried: Counter[str] = field(default_factory=Counter)
    left_out: dict[str, str] = field(default_factory=dict)
    perplexity_limit: float = 0.0
    lowest: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, settings: GivenSettings, run: SimulatedRun) -> None:
        self.tried[name] += 1
        lossless, perplexity = METHODS[name].lossless, run.perplexity
        if perplexity is not None:
            self.lowest[name] = min(perplexity, self.lowest.get(name, perplexity))
        if not lossless and (perplexity is None or perplexity > self.perplexity_limit):
            return
        speed, rate = run.summary.tokens_per_second or 0.0, run.summary.acceptance_rate
        if name not in self.best or speed > self.best[name].predicted:
            self.best[name] = Candidate(name, settings, lossless, speed, 1, rate, perplexity=perplexity)

    def merged_with(self, candidates: Sequence[Candidate], scale: float) -> list[Candidate]:
        """`candidates` and what was found, the faster one where both have a method; found speeds are multiplied by `scale`."""
        merged = {candidate.name: candidate for candidate in candidates}
        for name, found in self.best.items():
            found = replace(found, predicted=found.predicted * scale)
            known = merged.get(name)
            fastest = found if known is None else max(known, found, key=lambda candidate: candidate.predicted)
            merged[name] = replace(fastest, tried=self.tried[name] + (0 if known is None else known.tried))
        return by_speed(list(merged.values()))


def search(
    runs: SimulatedRuns, grids: Mapping[str, Sequence[GivenSettings]], deadline: Deadline, announce: Announce
) -> SearchResult:
    """Run the methods' settings in turn until the deadline. Lossy methods come last: they are never chosen automatically."""
    result = SearchResult()
    lossy = {name: settings for name, settings in grids.items() if not METHODS[name].lossless}
    lossless = {name: settings for name, settings in grids.items() if name not in lossy}
    for name, settings in chain(round_robin(lossless), round_robin(lossy)):
        if deadline.left < 0:
            break
        if name in result.left_out:
            continue
        announce(f"simulating {written(name, settings)}")
        if name in lossy and not result.perplexity_limit:
            result.perplexity_limit = runs.plain_perplexity
        try:
            result.add(name, settings, runs.run(name, settings))
        except SpecgenError as error:
            result.left_out[name] = error.message
    for name in [name for name in grids if name not in result.best and name not in result.left_out]:
        alone = ", or these --methods alone" if name in lossy and lossless else ""
        result.left_out[name] = f"time was short (a larger --budget helps{alone})"
        if count := result.tried[name]:
            lowest = f", the lowest being {result.lowest[name]:.2f}" if name in result.lowest else ""
            tried = f"{count} setting{'s' * (count != 1)}"
            result.left_out[name] = f"none of {tried} keeps sd's perplexity of {result.perplexity_limit:.2f}{lowest}"
    return result
