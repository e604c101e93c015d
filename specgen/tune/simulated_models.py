"""The models of simulated runs on one prompt: their outputs are remembered, and passes take the
seconds that were measured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from specgen.base.part_kinds import HEADS
from specgen.base.types import Context
from specgen.decoding.chain import ModelDrafter
from specgen.engine.model_runner import ModelRunner, Runners
from specgen.engine.parts.own_layers import ExitAcceptancePredictor, ExitRunner
from specgen.engine.text.translated_runner import TranslatedRunner
from specgen.methods.base import DRAFT_MODEL, typical_length
from specgen.methods.drafting_knowledge import DraftingKnowledge
from specgen.methods.learned_drafting import AdaptiveInputs, DraftingCosts
from specgen.methods.pass_times import PassTimes
from specgen.tune.expected_time import PricedParallelDrafter, PricedTarget, SimulatedClock
from specgen.tune.remembered import DrawnRunner, MemoisedRunner
from specgen.tune.round_timing import draft_prefill_seconds

if TYPE_CHECKING:
    from specgen.base.types import SamplingParams
    from specgen.decoding.costs import RoundCosts
    from specgen.decoding.drafting import Setup
    from specgen.decoding.parallel import ParallelDrafter
    from specgen.decoding.parallel_costs import ParallelCosts
    from specgen.decoding.policy_base import LengthPolicy
    from specgen.decoding.run import Schedule
    from specgen.engine.forward_pass import ModelOutput
    from specgen.methods.drafting_knowledge import DraftingCase
    from specgen.methods.learned_drafting import Learned
    from specgen.models.loaded_models import LoadedModels
    from specgen.models.models import K, Models, Worker
    from specgen.tune.round_timing import ReferenceOutput


class Drafting(NamedTuple):
    """The runners of a target and of what drafts for it, as runners that keep their outputs.

    `memoised` is the runner that drafts, None if no model drafts. `prefill_seconds` is the time of
    its pass over the prompt. `drawn` runs the same model and draws its tokens; None in greedy
    decoding.
    """

    runners: Runners
    memoised: MemoisedRunner | None = None
    prefill_seconds: float = 0.0
    drawn: DrawnRunner | None = None


class SimulatedRun(NamedTuple):
    """What a simulated run knows: the seconds of its passes, and what the policy `adaptive` has
    learned (None: another policy).

    `draws`: the drafted tokens are drawn given the reference, see `DrawnRunner`.
    """

    target: PricedTarget
    clock: SimulatedClock
    costs: RoundCosts
    learned: Learned | None
    draws: bool


class SimulatedModels:
    """Implements `models.Models` for simulated runs on the prompt of `reference`, one after the
    other: before each, `begin` has to be called.

    `real` are the pair's models. Their runners are replaced by ones that keep their outputs in
    `kept`, the store of all prompts. `first_length` is the length of the context (tokens) for which
    PEARL's passes are timed.
    """

    def __init__(
        self,
        real: LoadedModels,
        reference: ReferenceOutput,
        sampling: SamplingParams,
        kept: dict[tuple[Any, ...], ModelOutput],
        first_length: int,
    ) -> None:
        self.target = real.target
        self.draft = real.draft
        self.measurements = real.measurements
        self.lock = real.lock
        self.tokenizer = real.tokenizer
        self._real = real
        self._reference = reference
        self._sampling = sampling
        self._outputs = kept
        self._plain = MemoisedRunner(real.plain().target, kept)
        self._draftings: dict[tuple[str, str], Drafting] = {}
        self._times = _PassTimesOfOneLength(real, first_length)
        self._knowledge = SimulatedKnowledge(self)
        self._run: SimulatedRun | None = None
        self.drafting: Drafting | None = None  # of the run that was started last

    @property
    def run(self) -> SimulatedRun:
        assert self._run is not None
        return self._run

    def begin(self, run: SimulatedRun) -> None:
        """Makes these the models of the next run."""
        self._run = run
        self.drafting = None

    def plain(self) -> Runners:
        return Runners(self._plain)

    def with_draft_model(self) -> Runners | None:
        real = self._real.with_draft_model()
        return None if real is None else self._drafting(DRAFT_MODEL, "", real)

    def has_part(self, kind: str) -> bool:
        return self._real.has_part(kind)

    def with_part(self, kind: str, name: str) -> Runners | None:
        real = self._real.with_part(kind, name)
        return None if real is None else self._drafting(kind, name, real)

    def without_layers(self, skip: str) -> Runners:
        return self._real.without_layers(skip)

    def worker(self) -> Worker | None:
        return None if self.draft is None else SimulatedWorker(self)

    def kept(self, kind: type[K]) -> K:
        for simulated in (self._knowledge, self._times):
            if isinstance(simulated, kind):
                return simulated
        return self._real.kept(kind)

    def capacity(self, tokens: int) -> int:
        return tokens

    def checked(self, schedule: Schedule) -> Schedule:
        return schedule

    def eos_ids(self, sampling: SamplingParams) -> frozenset[int]:
        return self._reference.eos_ids

    def constraint(self, sampling: SamplingParams) -> None:
        """Remembered outputs are not constrained."""

    def expected_costs(self) -> DraftingCosts:
        """Returns the costs of drafting at the typical length of the context."""
        length = typical_length(len(self._reference.prompt_ids), self._reference.limit)
        return DraftingCosts.of_rounds(self.run.costs, length)

    @property
    def is_process(self) -> bool:
        """Whether another process drafts for PEARL."""
        worker = self._real.worker()
        return worker is not None and worker.is_process

    def _drafting(self, kind: str, name: str, real: Runners) -> Runners:
        """Returns the runners that stand for the `real` ones in this run, and keeps them as
        `drafting`. They are made once, so that runs share their outputs."""
        key = kind, name
        if key not in self._draftings:
            self._draftings[key] = self._make(kind, real)
        self.drafting = drafting = self._draftings[key]
        if drafting.drawn is not None and self.run.draws:
            return drafting.runners._replace(draft=drafting.drawn)
        return drafting.runners

    def _make(self, kind: str, real: Runners) -> Drafting:
        """Returns the `real` runners as ones that keep their outputs. `kind` is `DRAFT_MODEL`, or
        that of a trained part."""
        reference = self._reference
        draft = real.draft
        assert draft is not None
        target = self._plain if kind == DRAFT_MODEL else MemoisedRunner(real.target, self._outputs)
        predictor = real.predictor
        if isinstance(predictor, ExitAcceptancePredictor):
            predictor = ExitAcceptancePredictor(target, predictor.predictor)
        is_model = kind not in HEADS and isinstance(draft, ModelRunner | TranslatedRunner)
        is_model = is_model and not isinstance(draft, ExitRunner)
        memoised = MemoisedRunner(draft, self._outputs, joins=is_model)
        prefill_seconds = draft_prefill_seconds(real.target, draft, reference)
        drawn = None
        if not self._sampling.greedy and draft.traits.draws:
            drawn = DrawnRunner(
                memoised, self._plain, reference, self._sampling, self._sampling.seed or 0
            )

        context = Context(reference.prompt_ids)
        tokens = reference.token_ids
        context.extend(tokens[:1])
        # keeps the outputs along the reference: one pass instead of one for each token
        if is_model and len(tokens) > 1 and draft.room(context) >= len(tokens):
            for runner in (memoised, target):
                runner.logits(context, tokens[1:-1])
        return Drafting(
            Runners(target, memoised, None, predictor), memoised, prefill_seconds, drawn
        )


class SimulatedWorker:
    """Implements `models.Worker`: drafts during the target's simulated passes."""

    threads: int | None = None

    def __init__(self, models: SimulatedModels) -> None:
        self._models = models
        self.is_process = models.is_process

    def ready(self) -> None: ...

    def drafter(self, policy: LengthPolicy, setup: Setup, window: int) -> ParallelDrafter:
        runners = self._models.with_draft_model()
        assert runners is not None
        draft = runners.draft
        if isinstance(draft, DrawnRunner):
            draft = draft.token_by_token()
        drafter = ModelDrafter(replace(setup, draft=draft))
        run = self._models.run
        return PricedParallelDrafter(drafter, policy, run.target, run.clock)


class SimulatedKnowledge(DraftingKnowledge):
    """What `adaptive` knows in simulated runs: the costs of the simulation, and what the runs on
    all prompts have learned."""

    def __init__(self, models: SimulatedModels) -> None:
        super().__init__(models)
        self._simulated = models

    def inputs(self, case: DraftingCase) -> AdaptiveInputs:
        learned = self._simulated.run.learned
        assert learned is not None
        return AdaptiveInputs(
            self._simulated.expected_costs(),
            learned,
            in_parallel=case.in_parallel,
            sizes_blocks=case.sizes_blocks,
            temperature=case.sampling.temperature,
        )


class _PassTimesOfOneLength(PassTimes):
    """The pass times of the real models, for all runs those after a context of `length` tokens:
    each further one takes time."""

    def __init__(self, models: Models, length: int) -> None:
        super().__init__(models)
        self._length = length

    def costs(
        self, context_length: int, sampling: SamplingParams, *, record: bool = False
    ) -> ParallelCosts:
        return super().costs(self._length, sampling, record=record)
