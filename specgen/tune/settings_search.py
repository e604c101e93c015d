"""Searches for each method's fastest settings until a deadline, in runs simulated from recorded drafts and measured costs.

Sets of layers to skip cannot be simulated, so they are tried in real runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from specgen.base.errors import SpecgenError
from specgen.base.settings import written
from specgen.methods import METHODS
from specgen.pair.pair import skipping_speed
from specgen.pair.preparation import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, search_skips
from specgen.tune.candidates import GivenSettings, grid, round_robin
from specgen.tune.outcome import Candidate, by_speed, counted, nearest_to_default
from specgen.tune.request import BY_SPEED, Objective
from specgen.tune.simulation import simulate

if TYPE_CHECKING:
    from specgen.pair.pair import Pair
    from specgen.tune.recorded_drafts import ReferenceOutput
    from specgen.tune.request import Deadline
    from specgen.tune.simulated_runs import SimulatedRuns
    from specgen.tune.simulation import PairMeasurements

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search: each method with its best settings, the fastest expected one first.

    `tried` is the number of settings tried for all methods together. `plain_perplexity` is that of plain decoding's output, None
    if no lossy method was tried. `left_out` has the reason for each method without a result,
    and, under `some settings`, for settings that were not tried.
    """

    candidates: Sequence[Candidate]
    tried: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    plain_perplexity: float | None = None


def simulate_grids(
    measurements: PairMeasurements, names: Sequence[str], deadline: Deadline, announce: Announce = lambda what: None
) -> SearchResult:
    """Simulates the methods `names` on the recorded drafts, with all settings of their grids in turn, until the deadline.

    At least one setting of each method is simulated, even after the deadline.
    """
    found: dict[str, list[Candidate]] = {}
    tried, left_out = 0, {}
    for name, settings in round_robin({name: grid(name) for name in names}):
        if tried % 20 == 0:
            announce(f"simulating, {tried} settings so far")
        if name in found and deadline.left < 0:
            left_out["some settings"] = f"time was short: {tried} were simulated"
            break
        found.setdefault(name, []).append(expected(measurements, name, settings))
        tried += 1
    return SearchResult(by_speed([nearest_to_default(candidates) for candidates in found.values()]), tried, left_out)


def expected(measurements: PairMeasurements, name: str, settings: GivenSettings) -> Candidate:
    """Simulates the method on all prompts and returns it with its expected speed."""
    return Candidate(name, settings, simulate(measurements, name, settings).tokens_per_second or 0.0)


def search(
    runs: SimulatedRuns,
    grids: Mapping[str, Sequence[GivenSettings]],
    deadline: Deadline,
    announce: Announce,
    objective: Objective = BY_SPEED,
) -> SearchResult:
    """Simulates the settings in `grids` (method: settings to try) in turn until the deadline.

    Lossy methods (whose output can differ from the target's) come last, because they are never chosen automatically. `objective`
    says how their settings are chosen.
    """
    tried: dict[str, list[Candidate]] = {name: [] for name in grids}
    left_out: dict[str, str] = {}
    lossy = {name: settings for name, settings in grids.items() if not METHODS[name].lossless}
    lossless = {name: settings for name, settings in grids.items() if name not in lossy}
    for name, settings in chain(round_robin(lossless), round_robin(lossy)):
        if deadline.left < 0:
            break
        if name in left_out:
            continue
        announce(f"simulating {written(name, settings)}")
        try:
            summary = runs.run(name, settings)
        except SpecgenError as error:
            left_out[name] = error.message
        else:
            tried[name].append(Candidate(name, settings, summary.tokens_per_second or 0.0, perplexity=summary.perplexity))
    plain_perplexity = runs.plain_perplexity if any(tried[name] for name in lossy) else None
    limit = objective.limit(plain_perplexity or 0.0)
    best = []
    for name, candidates in tried.items():
        if (chosen := _best(candidates, limit, objective)) is not None:
            best.append(replace(chosen, tried=len(candidates)))
        elif name not in left_out and candidates:
            lowest = min((each.perplexity for each in candidates if each.perplexity is not None), default=None)
            found = "" if lowest is None else f", the lowest being {lowest:.3f}"
            allowed = "" if objective.lowest_perplexity else f" of at most {limit:.3f}"
            left_out[name] = f"none of {counted(len(candidates), 'setting')} has a perplexity{allowed}{found}"
        elif name not in left_out:
            alone = ", or these --methods alone" if name in lossy and lossless else ""
            left_out[name] = f"time was short (a larger --budget helps{alone})"
    return SearchResult(by_speed(best), sum(map(len, tried.values())), left_out, plain_perplexity)


def _best(candidates: Sequence[Candidate], limit: float, objective: Objective) -> Candidate | None:
    """Returns the best candidate of one method, the fastest of equally good ones; None if no perplexity is at most `limit`.

    Perplexities that agree to three decimals are equally good.
    """
    kept = [each for each in candidates if each.lossless or (each.perplexity is not None and each.perplexity <= limit)]

    def rank(candidate: Candidate) -> tuple[float, float]:
        perplexity = candidate.perplexity if objective.lowest_perplexity else None
        return (0.0 if perplexity is None else -round(perplexity, 3), candidate.predicted)

    return max(kept, key=rank, default=None)


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
    found = search_skips(layers, lambda skips: skipping_speed(pair, skips, prompts), seconds)
    return Candidate("selfsd", {"skip": found.skips}, found.tokens_per_second, found.tried)
