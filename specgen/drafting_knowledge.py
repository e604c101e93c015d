"""What the length policy `adaptive` knows about a pair's drafters: what drafting costs here, and what it has learned.

Costs come from a profile (the result of `specgen tune`), or from some rounds of the run's own method, which are timed before the
first run and stored in the user's cache folder. What is learned stays from run to run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from specgen import measurement_cache
from specgen.cost_model.drafting_costs import DraftingCosts
from specgen.cost_model.pearl_window import ParallelCosts
from specgen.cost_model.round_costs import CostTable, Curve, RoundCosts
from specgen.decoding.adaptive import AUTO, Adaptive, AdaptiveInputs, Learned
from specgen.decoding.length_sweep import WARM_UP, LengthSweep

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.plan import RunRequest

LENGTHS = (0, 1, 4, 8)  # tokens in the timed drafts
NEW_TOKENS = 160  # of a timed run, at most
_ROUNDS = 6  # timed with each length, at most
_SECONDS = 0.5  # after which each length is timed once more at most
_LONGEST_CONTEXT = 1024  # tokens of the context after which rounds are timed, at most
_COST_SETTINGS = ("draft_cost", "verify_cost")
_SHAPES = ("width", "depth", "drafts", "beams", "skip", "exit")  # settings that change how long a draft takes

Key = tuple[Any, ...]


class DraftingKnowledge:
    """The costs of drafting and what `adaptive` has learned, for one pair of models.

    `conditions` returns everything about the models and the machine that changes the costs. `tuned_costs` are seconds of rounds
    by `Method.cost_kind`, and `tuned_learned` what `adaptive` learned during tuning, by the drafter's name; both come from a
    profile, and are empty without one.
    """

    def __init__(self, conditions: Callable[[], Mapping[str, Any]]) -> None:
        self._conditions = conditions
        self.tuned_costs: Mapping[str, RoundCosts] = {}
        self.tuned_learned: Mapping[str, Learned] = {}
        self._costs: dict[Key, RoundCosts] = {}
        self._learned: dict[Key, Learned] = {}

    def lacks_costs(self, request: RunRequest) -> bool:
        """Whether `measure` has to be called before `inputs`: the run's policy is `adaptive`, and its costs are not known."""
        settings, method = request.settings, request.method
        if settings.policy != Adaptive.name or method.is_parallel or method.cost_kind in self.tuned_costs:
            return False
        return any(settings.values[name] == AUTO for name in _COST_SETTINGS) and self._cost_key(request) not in self._costs

    def measure(self, request: RunRequest, make_run: Callable[[int], Run]) -> None:
        """Times rounds like the request's, or reads their times from the cache.

        `make_run(length)` returns a run of the request's method with its settings on a prompt of `length` tokens, of
        `NEW_TOKENS` new tokens if they fit.
        """
        key = self._cost_key(request)
        stored = {**self._conditions(), "rounds": [str(part) for part in key]}
        costs = _costs_of(measurement_cache.find("rounds", stored))
        if costs is None:
            costs = time_rounds(make_run(_context_length(request)))
            measurement_cache.keep("rounds", stored, costs.as_dict())
        self._costs[key] = costs

    def inputs(self, request: RunRequest, parallel_costs: ParallelCosts | None) -> AdaptiveInputs:
        """Returns what the run's policy `adaptive` decides by. `parallel_costs` are those of PEARL's passes, None for others.

        A sampled run with a seed gets a copy of what was known at the beginning: its tokens depend on the lengths of drafts, and
        the same seed has to give the same tokens.
        """
        method, settings, sampling = request.method, request.settings, request.sampling
        given = [settings.values[name] for name in _COST_SETTINGS]
        if parallel_costs is not None:
            single = parallel_costs.single_pass
            costs = DraftingCosts.linear(0.0, parallel_costs.pass_seconds(2) / single - 1)
        elif AUTO not in given:
            costs = DraftingCosts.linear(*map(float, given))
        else:
            measured = self.tuned_costs.get(method.cost_kind) or self._costs[self._cost_key(request)]
            costs = DraftingCosts.of_rounds(measured, request.typical_length)
        costs = costs.with_values(*(None if value == AUTO else float(value) for value in given))
        tuned = self.tuned_learned.get(method.drafter.name)
        initial = Learned.prior(costs, sampling.temperature) if tuned is None else tuned.copy()
        if sampling.greedy or sampling.seed is None:
            key = *_draft_key(request), sampling.temperature, *given
            initial = self._learned.setdefault(key, initial)
        return AdaptiveInputs(costs, initial, in_parallel=parallel_costs is not None)

    def _cost_key(self, request: RunRequest) -> Key:
        """Returns what distinguishes requests with different costs, apart from the models and the machine."""
        sampling = request.sampling
        return *_draft_key(request), _context_length(request), sampling.greedy, sampling.top_k > 0, sampling.top_p < 1


def _draft_key(request: RunRequest) -> Key:
    """Returns what distinguishes requests with different drafters."""
    return request.method.cost_kind, *((name, request.settings.values.get(name)) for name in _SHAPES)


def _context_length(request: RunRequest) -> int:
    """Returns the length of the context (tokens) at which a request's rounds are timed: a power of two, at most 1,024."""
    return min(1 << (request.typical_length - 1).bit_length(), _LONGEST_CONTEXT)


def time_rounds(run: Run, clock: Callable[[], float] = time.perf_counter) -> RoundCosts:
    """Returns the seconds of a run's rounds with drafts of `LENGTHS` tokens. The run's own length policy does not decide.

    Ends after `_ROUNDS` rounds of each length, or after `_SECONDS` and one round of each. Lengths for which the context had no
    room are left out.
    """
    sweep = LengthSweep(LENGTHS, [run.policy.signals])
    sweep.start_run()
    run = replace(run, policy=sweep)
    drafting, verification = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    start, length = clock(), len(run.context)
    for position, round_ in enumerate(run.rounds()):
        seconds = round_.seconds
        if position >= WARM_UP:
            drafting[round_.draft.levels].append(seconds["draft"] + seconds["policy"])
            verification[len(round_.draft.tokens) + 1].append(seconds["verify"] + seconds["sample"] + seconds["other"])
        counted = position + 1 - WARM_UP
        if counted >= _ROUNDS * len(LENGTHS) or (counted >= len(LENGTHS) and clock() - start > _SECONDS):
            break
    drafting[0].append(0.0)
    return RoundCosts(_table(drafting, length), _table(verification, length))


def _table(seconds: Mapping[int, list[float]], length: int) -> CostTable:
    return CostTable({length: Curve({tokens: median(each) for tokens, each in sorted(seconds.items())})})


def _costs_of(stored: Any) -> RoundCosts | None:
    """Returns costs read from the cache, where JSON has made strings of all keys; None if they are missing or not valid."""
    try:
        tables = []
        for name in ("drafting", "judging"):
            curves = {int(length): {int(n): float(each) for n, each in curve.items()} for length, curve in stored[name].items()}
            tables.append(CostTable({length: Curve(points) for length, points in curves.items()}))
        costs = RoundCosts(*tables)
        seconds = [each for table in tables for curve in table.curves.values() for each in curve.points.values()]
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    return costs if seconds and min(seconds) >= 0 and costs.verification_cost.at(1, 1) > 0 else None
