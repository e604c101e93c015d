"""What the length policy `adaptive` knows about a pair of models: what drafting costs there, and
what its runs have learned.

The costs begin with those of a profile (the result of `specgen tune`), with those that an earlier
process has stored, or with a guess; runs then learn them from the times of their rounds. Runs whose
text depends on them (`Request.is_repeatable`) take those of the profile, or what follows from the
models' sizes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from specgen.base.measuring import Sample
from specgen.decoding.costs import FURTHER_TOKEN, LEAST_DRAFT_PASS
from specgen.methods.learned_drafting import (
    AdaptiveInputs,
    DraftingCosts,
    Learned,
    LearnedCosts,
    verifying,
)

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.base.types import SamplingParams
    from specgen.decoding.costs import RoundCosts
    from specgen.decoding.parallel_costs import ParallelCosts
    from specgen.engine.loaded_model import LoadedModel
    from specgen.models.models import Models

Key = tuple[Any, ...]
AUTO = "auto"
# the kind of costs of drafts that take almost no time, and of methods without drafts
COPYING = "echo"
DRAFTING = "drafting"  # the kind of measurements that are costs of drafting
_FEWEST_ROUNDS = 8  # from which learned costs are stored
_LARGEST_FACTOR = 1.5  # between stored and learned costs, above which the learned ones are stored
_GUESS = DraftingCosts(0.15, FURTHER_TOKEN)
_BLOCK_GUESS = DraftingCosts(0.01, FURTHER_TOKEN, 0.4)
_COST_SETTINGS = ("draft_cost", "verify_cost")
# settings that change how long a draft takes
_SHAPES = ("width", "depth", "nodes", "cape", "drafts", "beams", "skip", "exit", "head")


@dataclass(frozen=True, slots=True)
class DraftingCase:
    """What the costs of a run's drafts depend on, apart from the machine.

    `method` is the method's name, `context_length` the typical length of the context in tokens.
    `cost_kind` is the kind of costs (`Tuning.cost_kind`); `COPYING` where no model drafts. If
    `is_frozen`, nothing may follow from measured times or from earlier runs. `has_model`: a model
    or a part of the target makes at least some of the drafts; otherwise prompt lookup makes all.
    `runs_draft_model`: the method uses the draft model. `in_blocks`: all tokens of a draft are
    computed in one pass. `sizes_blocks`: see `AdaptiveInputs`. `tuned_costs` are those of the
    profile that chose the method, None if none did. `in_parallel`: drafts are made during the
    target's passes; `parallel_costs` are then the times of passes, None where they were not
    measured.
    """

    method: str
    settings: Settings
    sampling: SamplingParams
    context_length: int
    cost_kind: str
    is_frozen: bool
    has_model: bool
    runs_draft_model: bool
    in_blocks: bool
    drafts_trees: bool
    tuned_costs: Mapping[str, RoundCosts] | None
    sizes_blocks: bool = False
    in_parallel: bool = False
    parallel_costs: ParallelCosts | None = None

    @property
    def cost_key(self) -> Key:
        """What distinguishes cases with different costs."""
        shape = ((name, self.settings.values.get(name)) for name in _SHAPES)
        return self.cost_kind, *shape

    @property
    def learned_key(self) -> Key:
        """What distinguishes cases that do not share what `adaptive` learns.

        These are the method, its settings and the sampling parameters: all of them change what is
        accepted or what a round costs.
        """
        return self.method, *sorted(self.settings.values.items()), *self.sampling.warping.values()


class DraftingKnowledge:
    """What the length policy `adaptive` knows about one pair of models: the costs of drafting and
    what runs have learned.

    Later runs go on with what earlier runs have learned.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._learned: dict[Key, Learned] = {}
        self._timed: dict[Key, LearnedCosts] = {}

    def inputs(self, case: DraftingCase) -> AdaptiveInputs:
        """Returns what the run's policy `adaptive` decides by.

        A frozen case gets the costs of the profile, or else those that follow from sizes, and
        nothing that earlier runs have learned.
        """
        draft_cost, verify_cost = (
            None if value == AUTO else float(value)
            for value in (case.settings.values[name] for name in _COST_SETTINGS)
        )
        timed = None
        costs = DraftingCosts(0.0, 0.0)  # where the settings replace them
        times = case.parallel_costs
        if times is not None:
            verify, verify_start = verifying(times.target_passes.at, max(times.width, 3))
            costs = DraftingCosts(0.0, verify, verify_start=verify_start)
        elif draft_cost is None or verify_cost is None:
            if case.is_frozen:
                costs = self._costs_by_size(case)
            elif not case.in_parallel:
                timed = self._timed_costs(case)
                costs = timed.costs
        costs = costs.with_values(draft_cost, verify_cost)

        learned = Learned.prior(costs, has_model=case.has_model)
        key = None
        if not case.is_frozen:
            key = case.learned_key
            learned = self._learned.setdefault(key, learned)
        return AdaptiveInputs(
            costs,
            learned,
            in_parallel=case.in_parallel,
            temperature=case.sampling.temperature,
            key=key,
            timed=timed,
            sizes_blocks=case.sizes_blocks,
        )

    def forget(self) -> None:
        """Keeps everything: only the texts of earlier runs are to be forgotten."""

    def save(self) -> None:
        """Stores the costs of drafting that runs have learned, where they differ much from those
        that this process began with.

        If the file cannot be written, nothing is stored.
        """
        for key, timed in self._timed.items():
            if timed.rounds >= _FEWEST_ROUNDS and timed.costs.differs(timed.guess, _LARGEST_FACTOR):
                sample = Sample(list(astuple(timed.costs)), timed.rounds, timed.spread)
                self._models.measurements.put(DRAFTING, key, sample)

    def _costs_by_size(self, case: DraftingCase) -> DraftingCosts:
        """Returns the costs in the profile, or else those that follow from the method and the sizes
        of the models."""
        guess = _guess(case)
        if case.in_parallel:
            return replace(guess, draft=0.0)
        if guess == _GUESS and case.runs_draft_model and self._models.draft is not None:
            guess = replace(guess, draft=draft_cost(self._models))
        return self._tuned_costs(case) or guess

    def _timed_costs(self, case: DraftingCase) -> LearnedCosts:
        key = case.cost_key
        if key not in self._timed:
            costs = self._tuned_costs(case)
            costs = costs or self._models.measurements.stored(DRAFTING, key, _costs_of)
            self._timed[key] = LearnedCosts(costs or _guess(case))
        return self._timed[key]

    def _tuned_costs(self, case: DraftingCase) -> DraftingCosts | None:
        """Returns the costs in the profile that chose the method, else in the one that the pair was
        loaded with; None if it has none for this case.

        Trees have none, because tuning does not time them.
        """
        if case.drafts_trees:
            return None
        costs = case.tuned_costs
        if costs is None:
            costs = self._models.measurements.tuned_costs
        tuned = costs.get(case.cost_kind)
        return None if tuned is None else DraftingCosts.of_rounds(tuned, case.context_length)


def draft_cost(models: Models) -> float:
    """Returns the cost of a pass of the draft model in target passes, by the bytes of weights that
    a pass of each reads. There must be a draft model.

    If the two are on devices of different kinds, bytes say nothing of time, and the result is a
    guess.
    """
    draft = models.draft
    assert draft is not None
    if draft.device.type != models.target.device.type:
        return _GUESS.draft
    return max(LEAST_DRAFT_PASS, _bytes_of_a_pass(draft) / _bytes_of_a_pass(models.target))


def _guess(case: DraftingCase) -> DraftingCosts:
    if not case.has_model:
        return DraftingCosts(0.0, _GUESS.verify)
    return _BLOCK_GUESS if case.in_blocks else _GUESS


def _bytes_of_a_pass(model: LoadedModel) -> float:
    """Returns about how many bytes of weights a pass over one token reads."""
    size = {None: model.dtype.itemsize, "int8": 1, "int4": 0.5}[model.precision.rounding]
    return model.files.active_parameters * size


def _costs_of(stored: Any) -> DraftingCosts:
    return DraftingCosts(*map(float, stored))
