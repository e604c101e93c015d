"""What the length policy `adaptive` knows about a pair's drafters: what drafting costs here, and what it has learned.

Costs come from a profile (the result of `specgen tune`), or from some rounds of the run's own method, which are timed before the
first run and stored in the user's cache folder. What is learned stays from run to run.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from specgen.decoding.costs.cost_check import CostCheck
from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.decoding.costs.pearl_window import ParallelCosts
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.methods.adaptive import AUTO, Adaptive, AdaptiveInputs
from specgen.methods.learned_drafting import Learned
from specgen.methods.length_sweep import WARM_UP, LengthSweep, RepeatDrafter
from specgen.methods.method import COPYING
from specgen.pair.request import prepared

if TYPE_CHECKING:
    from specgen.decoding.run import Run
    from specgen.methods.method import Method
    from specgen.pair.measurements import Measurements
    from specgen.pair.request import Request

_ROUNDS_KIND = "rounds"  # of measurements
LENGTHS = (1, 4, 8, 0)  # tokens in the timed drafts; the first one is not 0, so that the draft model's prefill warms up
NEW_TOKENS = 160  # of a timed run, at most
_ROUNDS = 6  # timed with each length, at most
_SECONDS = 0.5  # after which each length is timed once more at most
_LONGEST_CONTEXT = 1024  # tokens of the context after which rounds are timed, at most
LONGEST_MEASURED = _LONGEST_CONTEXT + NEW_TOKENS  # tokens of the context and the output of a timed run, at most
_COST_SETTINGS = ("draft_cost", "verify_cost")
_SHAPES = (
    "width",
    "depth",
    "nodes",
    "cape",
    "drafts",
    "beams",
    "skip",
    "exit",
    "head",
)  # settings that change how long a draft takes

Key = tuple[Any, ...]


class DraftingKnowledge:
    """The costs of drafting and what `adaptive` has learned, for one pair of models.

    `has_draft_model` says whether the pair has a draft model, which `adaptive` can do without.
    """

    def __init__(self, measurements: Measurements, *, has_draft_model: bool) -> None:
        self._measurements, self._has_draft_model = measurements, has_draft_model
        self._learned: dict[Key, Learned] = {}

    def drafts_with_model(self, method: Method) -> bool:
        """Whether the method's drafts, or some of them, are a model's. Otherwise they are all prompt lookup's."""
        return method.runs_model and (self._has_draft_model or not method.uses_draft_model)

    def _cost_kind(self, method: Method) -> str:
        return method.cost_kind if self.drafts_with_model(method) else COPYING

    @staticmethod
    def reads_pass_costs(request: Request) -> bool:
        """Whether the run's policy is `adaptive` in PEARL's window, and reads what the target's passes cost there."""
        settings = request.settings
        return request.method.is_parallel and settings.policy == Adaptive.name and settings.values["verify_cost"] == AUTO

    def lacks_costs(self, request: Request) -> bool:
        """Whether `measure` has to be called before `inputs`: the run's policy is `adaptive`, and its costs are not known."""
        return self._measures_costs(request) and self._measurements.find(_ROUNDS_KIND, self._cost_key(request)) is None

    def _measures_costs(self, request: Request) -> bool:
        """Whether the run's policy is `adaptive` with costs that `measure` finds: of the method's rounds, not from a profile."""
        settings = request.settings
        if settings.policy != Adaptive.name or request.method.is_parallel:
            return False
        return any(settings.values[name] == AUTO for name in _COST_SETTINGS) and self._tuned_costs(request) is None

    def measure(
        self,
        request: Request,
        run_of: Callable[..., Run],
        context_limit: int,
        part: str | None = None,
        capture: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """Times rounds like the request's, or reads their times from the cache.

        `run_of` makes a run, with the arguments of `Pair.request`. `context_limit` (tokens) is that of the models. `part`
        identifies the part of the target that drafts, if one does. `capture` captures passes, see `Pair.capture_passes`.
        """

        def timed() -> RoundCosts:
            run = self._timed_run(request, run_of, context_limit)
            costs = time_rounds(run, before=partial(capture, len(run.context), len(run.context) + run.limit))
            if not any(max(curve.points) for curve in costs.draft_cost.curves.values()):
                return replace(costs, draft_cost=_table({0: [0.0], 1: [math.inf]}, 0))  # it could not follow this one context
            return costs

        key = self._cost_key(request)
        self._measurements.get(_ROUNDS_KIND, key, timed, RoundCosts.of_dict, RoundCosts.as_dict, about=part)

    def _timed_run(self, request: Request, run_of: Callable[..., Run], context_limit: int) -> Run:
        """Returns a run like the one requested, of `NEW_TOKENS` tokens if they fit. Without a model it always drafts."""
        sampling = replace(request.sampling, max_new_tokens=NEW_TOKENS, ignore_eos=True, stop=(), seed=0)
        length = max(1, min(_context_length(request), context_limit - NEW_TOKENS))
        given: dict[str, Any] = request.settings.as_dict(with_policy=request.method.any_policy)
        has_model = self.drafts_with_model(request.method)
        timed = {"draft_cost": 0, "verify_cost": 0, "fallback": 0, "history": False} | ({"lookup": False} if has_model else {})
        given |= {name: value for name, value in timed.items() if name in given}  # fallback: BiLD drops no token
        run = run_of([1] * length, request.method.name, sampling, **given)
        return run if has_model else replace(run, drafter=RepeatDrafter())

    def check(self, request: Request) -> CostCheck | None:
        """Returns the check of the costs that the request's run decides by; None if they were not measured by `measure`.

        If they do not fit the times of rounds, later processes measure again.
        """
        if not self._measures_costs(request):
            return None
        key, length = self._cost_key(request), _context_length(request)
        costs = self._costs(request)
        drafting = partial(costs.draft_cost.at, context_length=length)
        return self._measurements.check(_ROUNDS_KIND, key, drafting, partial(costs.verification_cost.at, context_length=length))

    def _costs(self, request: Request) -> RoundCosts:
        """Returns the costs found by `measure`. A draft model that could not be timed is taken to cost as much as the target."""
        costs: RoundCosts = prepared(request.method, self._measurements.find(_ROUNDS_KIND, self._cost_key(request)))
        if any(math.inf in curve.points.values() for curve in costs.draft_cost.curves.values()):
            return replace(costs, draft_cost=_table({0: [0.0], 1: [costs.verification_cost.at(1, 0)]}, 0))
        return costs

    def inputs(self, request: Request, parallel_costs: ParallelCosts | None) -> AdaptiveInputs:
        """Returns what the run's policy `adaptive` decides by. `parallel_costs` are those of PEARL's passes.

        They are None for other methods, and if the setting `verify_cost` says what verification costs.

        A sampled run with a seed gets a copy of what was known at the beginning: its tokens depend on the lengths of drafts, and
        the same seed has to give the same tokens. Raises SpecgenError if `measure` has to be called first.
        """
        method, settings, sampling = request.method, request.settings, request.sampling
        given = [settings.values[name] for name in _COST_SETTINGS]
        slowdown = 0.0
        if parallel_costs is not None:
            single = parallel_costs.single_pass
            slowdown = parallel_costs.added_by_token / single
            costs = DraftingCosts.linear(0.0, max(0.0, parallel_costs.pass_seconds(2) / single - 1))
        elif method.is_parallel or AUTO not in given:
            costs = DraftingCosts.linear(0.0, 0.0)  # the settings replace them
        else:
            measured = self._tuned_costs(request) or self._costs(request)
            costs = DraftingCosts.of_rounds(measured, request.typical_length)
        costs = costs.with_values(*(None if value == AUTO else float(value) for value in given))
        tuned = self._measurements.tuned_learned.get(method.drafts)
        prior = Learned.prior(costs, sampling.temperature, has_model=self.drafts_with_model(method))
        initial = prior if tuned is None else tuned.copy()
        key = None
        if sampling.greedy or sampling.seed is None:
            key = _learned_key(request)
            initial = self._learned.setdefault(key, initial)
        return AdaptiveInputs(costs, initial, in_parallel=method.is_parallel, key=key, slowdown=slowdown)

    def _tuned_costs(self, request: Request) -> RoundCosts | None:
        """Returns the costs in the profile, None without a profile and for drafts that are trees, which tuning does not time."""
        if request.method.drafts_trees(request.settings):
            return None
        return self._measurements.tuned_costs.get(self._cost_kind(request.method))

    def _cost_key(self, request: Request) -> Key:
        """Returns what distinguishes requests with different costs, apart from the models and the machine."""
        sampling = request.sampling
        return *_draft_key(request), _context_length(request), sampling.greedy, sampling.top_k > 0, sampling.top_p < 1


def _draft_key(request: Request) -> Key:
    """Returns what distinguishes requests with different drafters."""
    return request.method.cost_kind, *((name, request.settings.values.get(name)) for name in _SHAPES)


def _learned_key(request: Request) -> Key:
    """Returns what distinguishes requests that do not share what `adaptive` learns.

    These are the method, its settings and the sampling parameters: all of them change what is accepted or what a round costs.
    """
    sampling = request.sampling
    cuts = () if sampling.greedy else (sampling.top_k, sampling.top_p)
    return request.method.name, *sorted(request.settings.values.items()), sampling.temperature, *cuts


def _context_length(request: Request) -> int:
    """Returns the length of the context (tokens) at which a request's rounds are timed: a power of two, at most 1,024."""
    return min(1 << (request.typical_length - 1).bit_length(), _LONGEST_CONTEXT)


def time_rounds(
    run: Run, clock: Callable[[], float] = time.perf_counter, before: Callable[[], None] = lambda: None
) -> RoundCosts:
    """Returns the seconds of a run's rounds with drafts of `LENGTHS` tokens. The run's own length policy does not decide.

    `before` is called before the first timed round, after those that warm up.

    Ends after `_ROUNDS` rounds of each length, or after `_SECONDS` and one round of each. Lengths for which the context had no
    room are left out.
    """
    sweep = LengthSweep(LENGTHS, [run.policy.signals])
    sweep.start_run()
    run = replace(run, policy=sweep)
    drafting, verification = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    start, length = clock(), len(run.context)
    for position, round_ in enumerate(run.rounds()):
        if position == WARM_UP - 1:
            before()
            start = clock()
        if position >= WARM_UP:
            drafting[max(sweep.levels, round_.draft.levels)].append(round_.drafting_seconds)
            verification[len(round_.draft.tokens) + 1].append(round_.verification_seconds)
        counted = position + 1 - WARM_UP
        if counted >= _ROUNDS * len(LENGTHS) or (counted >= len(LENGTHS) and clock() - start > _SECONDS):
            break
    drafting[0].append(0.0)
    return RoundCosts(_table(drafting, length), _table(verification, length))


def _table(seconds: Mapping[int, list[float]], length: int) -> CostTable:
    return CostTable({length: Curve({tokens: median(each) for tokens, each in sorted(seconds.items())})})
