"""What the length policy `adaptive` knows about a pair's drafters: what drafting costs here, and what it has learned.

Costs begin with those of a profile (the result of `specgen tune`), with those that an earlier process has stored in the user's
cache folder, or with a guess. Runs learn them from the times of their own rounds. Both kinds of knowledge stay from run to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specgen.methods.adaptive import AUTO, Adaptive, AdaptiveInputs
from specgen.methods.learned_drafting import DraftingCosts, Learned, LearnedCosts
from specgen.methods.method import COPYING
from specgen.methods.pearl import ParallelCosts
from specgen.pair.measurements import Key

if TYPE_CHECKING:
    from specgen.decoding.costs import RoundCosts
    from specgen.methods.method import Method
    from specgen.pair.measurements import Measurements
    from specgen.pair.request import Request

KIND = "drafting"  # of measurements
TRIAL_ROUNDS = 24
_FEWEST_ROUNDS = 8  # from which costs are stored
_LARGEST_FACTOR = 1.5  # between stored and learned costs, above which the learned ones are stored
_GUESS = DraftingCosts(0.15, 0.03)
_COST_SETTINGS = ("draft_cost", "verify_cost")
# Settings that change how long a draft takes.
_SHAPES = ("width", "depth", "nodes", "cape", "drafts", "beams", "skip", "exit", "head")


class DraftingKnowledge:
    """The costs of drafting and what `adaptive` has learned, for one pair of models.

    `has_draft_model` says whether the pair has a draft model, which `adaptive` can do without.
    """

    def __init__(self, measurements: Measurements, *, has_draft_model: bool) -> None:
        self._measurements, self._has_draft_model = measurements, has_draft_model
        self._learned: dict[Key, Learned] = {}
        self._timed: dict[Key, LearnedCosts] = {}

    def _drafts_with_model(self, method: Method) -> bool:
        """Whether the method's drafts, or some of them, are a model's. Otherwise they are all prompt lookup's."""
        return method.runs_model and (self._has_draft_model or not method.uses_draft_model)

    @staticmethod
    def reads_pass_costs(request: Request) -> bool:
        """Whether the run's policy is `adaptive` in PEARL's window, and reads what the target's passes cost there."""
        settings = request.settings
        return request.method.is_parallel and settings.policy == Adaptive.name and settings.values["verify_cost"] == AUTO

    def needs_trial(self, request: Request) -> bool:
        """Whether another run has to learn the costs before this one, because this one must not, and no costs are known."""
        if not _is_frozen(request) or not self._learns_costs(request) or self._tuned_costs(request) is not None:
            return False
        return not self._timed_costs(request).rounds and self._stored(request) is None

    def inputs(self, request: Request, parallel_costs: ParallelCosts | None) -> AdaptiveInputs:
        """Returns what the run's policy `adaptive` decides by. `parallel_costs` are those of PEARL's passes.

        They are None for other methods, and if the setting `verify_cost` says what verification costs.

        A sampled run with a seed decides by the costs at the beginning of the process, and gets a copy of what else was known
        then: its tokens depend on the lengths of drafts, and the same seed has to give the same tokens.
        """
        method, frozen, timed = request.method, _is_frozen(request), None
        costs = DraftingCosts(0.0, 0.0)  # where the settings replace them
        if parallel_costs is not None:
            single = parallel_costs.single_pass
            costs = DraftingCosts(0.0, max(0.0, parallel_costs.pass_seconds(2) / single - 1))
        elif self._learns_costs(request):
            known = self._timed_costs(request)
            costs, timed = (known.guess, None) if frozen else (known.costs, known)
        given = (request.settings.values[name] for name in _COST_SETTINGS)
        costs = costs.with_values(*(None if value == AUTO else float(value) for value in given))
        learned = Learned.prior(costs, has_model=self._drafts_with_model(method))
        key = None if frozen else _learned_key(request)
        if key is not None:
            learned = self._learned.setdefault(key, learned)
        return AdaptiveInputs(costs, learned, in_parallel=method.is_parallel, key=key, timed=timed)

    def after_trial(self, request: Request) -> None:
        """Takes the costs that a trial run has learned as those at the beginning, and stores them."""
        known = self._timed_costs(request)
        known.guess = known.costs
        self._measurements.put(KIND, self._cost_key(request), [known.guess.draft, known.guess.verify])

    def save(self) -> None:
        """Stores the costs that were learned, where they differ much from those stored. Does nothing if it fails."""
        for key, known in self._timed.items():
            if known.rounds >= _FEWEST_ROUNDS and known.costs.differs(known.guess, _LARGEST_FACTOR):
                self._measurements.put(KIND, key, [known.costs.draft, known.costs.verify])

    def _learns_costs(self, request: Request) -> bool:
        settings = request.settings
        if settings.policy != Adaptive.name or request.method.is_parallel:
            return False
        return any(settings.values[name] == AUTO for name in _COST_SETTINGS)

    def _timed_costs(self, request: Request) -> LearnedCosts:
        key = self._cost_key(request)
        if key not in self._timed:
            guess = _GUESS if self._drafts_with_model(request.method) else DraftingCosts(0.0, _GUESS.verify)
            if (tuned := self._tuned_costs(request)) is not None:
                guess = DraftingCosts.of_rounds(tuned, request.typical_length)
            elif (stored := self._stored(request)) is not None:
                guess = stored
            self._timed[key] = LearnedCosts(guess)
        return self._timed[key]

    def _stored(self, request: Request) -> DraftingCosts | None:
        match self._measurements.stored(KIND, self._cost_key(request)):
            case [int() | float() as draft, int() | float() as verify] if 0 <= draft < 100 and 0 <= verify < 100:
                return DraftingCosts(draft, verify)
        return None

    def _tuned_costs(self, request: Request) -> RoundCosts | None:
        """Returns the costs in the profile, None without a profile and for drafts that are trees, which tuning does not time."""
        method = request.method
        if method.drafts_trees(request.settings):
            return None
        return self._measurements.tuned_costs.get(method.cost_kind if self._drafts_with_model(method) else COPYING)

    def _cost_key(self, request: Request) -> Key:
        """Returns what distinguishes requests with different costs, apart from the models and the machine."""
        kind = request.method.cost_kind if self._drafts_with_model(request.method) else COPYING
        return kind, *((name, request.settings.values.get(name)) for name in _SHAPES)


def _is_frozen(request: Request) -> bool:
    return not request.sampling.greedy and request.sampling.seed is not None


def _learned_key(request: Request) -> Key:
    """Returns what distinguishes requests that do not share what `adaptive` learns.

    These are the method, its settings and the sampling parameters: all of them change what is accepted or what a round costs.
    """
    sampling = request.sampling
    cuts = () if sampling.greedy else (sampling.top_k, sampling.top_p)
    return request.method.name, *sorted(request.settings.values.items()), sampling.temperature, *cuts
