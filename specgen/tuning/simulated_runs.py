"""Methods that no tape can hold (trees, several drafts, beams, lossy verifiers), run again along the recorded answers.

Their own drafters and, where the answer does not decide, their own verifiers run on rows that are kept; only the seconds are
looked up, in what rounds of that shape were measured to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from specgen import factory, methods
from specgen.decoding.components import Components
from specgen.decoding.policies import is_random, signals_of
from specgen.decoding.run import Run
from specgen.decoding.sequential import sequential
from specgen.engine.inference_mode import inference
from specgen.traces.summary import Summary
from specgen.tuning.memoised_runner import MemoisedRunner
from specgen.tuning.outcome import PLAIN
from specgen.tuning.recorded_drafts import Recorder
from specgen.tuning.round_timing import RoundProbe
from specgen.tuning.simulation import THROWS, SimulatedClock, SimulatedTarget, SimulatedVerifier
from specgen.types import Context

if TYPE_CHECKING:
    import torch

    from specgen.cost_model import RoundCosts
    from specgen.decoding.drafters import Drafter
    from specgen.decoding.policies import LengthPolicy
    from specgen.decoding.run import Clock
    from specgen.decoding.verifiers import Verifier
    from specgen.engine.exit_layer import Predictor
    from specgen.engine.model_runner import ModelRunner
    from specgen.methods import Method
    from specgen.pair import Pair
    from specgen.settings import Settings
    from specgen.tuning.recorded_drafts import ReferenceOutput
    from specgen.types import Draft, Round, SamplingParams

_BREADTHS = ("width", "beams", "drafts")
_LENGTHS, _PROBED = (2, 3, 5), 0.3  # tokens of the drafts that are timed, and how long (seconds)
_PACED = 0.05  # seconds for passes of the target alone, before and after
_ENDLESS: Mapping[str, Mapping[str, Any]] = {"bild": {"fallback": 0.0}, "eesd-tree": {"depth": 64}}  # no draft ends by itself


class PricedDrafter:
    """A drafter, itself: only what its passes cost is looked up."""

    def __init__(
        self, drafter: Drafter, runner: MemoisedRunner, costs: RoundCosts, meter: SimulatedClock, prefill: float
    ) -> None:
        self._drafter, self._runner, self._costs, self._meter, self._prefill = drafter, runner, costs, meter, prefill

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        before = self._runner.calls
        draft = self._drafter.propose(context, policy, limit)
        passes = self._runner.calls - before
        looking = self._costs.signal_cost * passes if policy.signals else 0.0
        self._meter.add("draft", self._prefill + self._costs.draft_cost.at(passes, len(context)) + looking)
        self._prefill = 0.0
        return draft


class PricedTarget(SimulatedTarget):
    """The target, itself: only what its passes cost is looked up."""

    def __init__(self, runner: ModelRunner, costs: RoundCosts, meter: SimulatedClock, prefill: float) -> None:
        super().__init__(costs, meter, prefill)
        self._runner = runner

    def logits(self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] = (), *, start: int = 0) -> Any:
        super().logits(context, draft, parents)
        return self._runner.logits(context, draft, parents)


class RecordedAcceptance:
    """A predictor along an answer whose target rows [tokens, width] are known (`AcceptancePredictor`)."""

    def __init__(self, predictor: Predictor, rows: torch.Tensor) -> None:
        self._predictor, self._every = predictor, predictor.offsets(rows)
        self._offsets = self._every[0]

    def begin(self, context: Context) -> None:
        self._offsets = self._every[len(context) - context.prompt_length - 1]

    def score(self, draft_row: torch.Tensor, position: int) -> torch.Tensor:
        return self._predictor.score(self._offsets, draft_row, position)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """`perplexity` of a lossy method's output, under the target at temperature 1."""

    summary: Summary
    perplexity: float | None = None


class SimulatedRuns:
    """Runs behind the prompts of `answers`. Raises SpecgenError where a method cannot be had with this pair.

    A shape is timed in one moment. `plain`, what passes of the target alone took when all else was timed, says how much slower or
    faster the machine is in it.
    """

    def __init__(
        self, pair: Pair, answers: Sequence[ReferenceOutput], sampling: SamplingParams, plain: RoundCosts | None = None
    ) -> None:
        self._pair, self._answers, self._sampling, self._plain = pair, answers, sampling, plain
        self._costs: dict[tuple[object, ...], RoundCosts] = {}
        self._components: dict[tuple[bool, int], tuple[Components, float]] = {}

    def price(self, name: str, given: Mapping[str, Any]) -> None:
        """Time real rounds of that method's shape, unless that was done. Raises SpecgenError as planning does."""
        settings = self._resolved(name, given)[1]
        shape = _shape(settings)
        if (name, *shape.values()) in self._costs:
            return
        signals = signals_of(settings)
        behind = [min((answer.prompt_ids for answer in self._answers), key=len)]
        fixed = {**shape, **_ENDLESS.get(name, {})}
        probe = RoundProbe(self._pair, name, behind, self._sampling, lengths=_LENGTHS, looks=signals, settings=fixed)
        self._costs[name, *shape.values()] = self._timed(probe, behind)

    def _timed(self, probe: RoundProbe, behind: Sequence[list[int]]) -> RoundCosts:
        if self._plain is None:
            probe.run(_PROBED)
            return probe.costs
        alone = RoundProbe(self._pair, PLAIN, behind, self._sampling, lengths=(0,), echo=True)
        alone.run(_PACED)
        probe.run(_PROBED)
        alone.run(_PACED)
        ((length, now),) = alone.costs.verification_cost.curves.items()
        return probe.costs.times(self._plain.verification_cost.at(1, length) / now.at(1))

    @inference
    def run(self, name: str, given: Mapping[str, Any]) -> SimulatedRun:
        """Behind every prompt, once, or where the policy throws dice a few times; folded."""
        self.price(name, given)
        method, settings = self._resolved(name, given)
        summary = Summary(name)
        for seed in range(THROWS if is_random(settings) else 1):
            for number, answer in enumerate(self._answers):
                run = self._run(method, settings, number, seed)
                ids = [token for round_ in run.rounds() for token in _counted(summary, round_)]
                if not method.lossless:
                    summary.add_log_likelihood(self._pair.log_likelihood(answer.prompt_ids, ids))
        return SimulatedRun(summary, summary.perplexity)

    @property
    def plain_perplexity(self) -> float:
        """Of the answers themselves, which is `sd`'s too: a lossless method's output is the target's own."""
        summary = Summary("ar")
        for answer in self._answers:
            summary.token_ids += answer.token_ids
            summary.add_log_likelihood(self._pair.log_likelihood(answer.prompt_ids, answer.token_ids))
        return summary.perplexity or 0.0

    def _resolved(self, name: str, given: Mapping[str, Any]) -> tuple[Method, Settings]:
        layer = self._pair.exit_layer
        method = methods.find(name)
        return method, methods.resolve(method, given, has_predictor=layer is not None and layer.predictor is not None)

    def _run(self, method: Method, settings: Settings, number: int, seed: int) -> Run:
        answer = self._answers[number]
        components, prefill = self._made(method, number)
        components = replace(components, seed=seed)
        costs, meter = self._costs[method.name, *_shape(settings).values()], SimulatedClock()
        target: Any
        verifier: Verifier
        # In sampling an answer is a draw: it says what becomes of fixed candidates, not of drawn ones.
        if method.lossless and (self._sampling.greedy or settings.drafts_tree):
            target, verifier = SimulatedTarget(costs, meter, answer.prefill), cast("Verifier", SimulatedVerifier(answer))
        else:
            target = PricedTarget(components.target, costs, meter, answer.prefill)
            verifier = factory.make_verifier(method, settings, components)
        runner = cast("MemoisedRunner", components.draft)
        drafter = PricedDrafter(factory.make_drafter(method, settings, components), runner, costs, meter, prefill)
        return Run(
            context=Context(answer.prompt_ids),
            target=target,
            drafter=drafter,
            policy=factory.make_policy(settings, seed),
            verifier=verifier,
            schedule=sequential,
            limit=answer.limit,
            eos_ids=answer.eos_ids,
            stop_texts=None,
            clock=cast("Clock", meter),
        )

    def _made(self, method: Method, number: int) -> tuple[Components, float]:
        """The sessions of a prompt, which remember, and the seconds of the draft's own look at that prompt."""
        key = method.needs_exit_layer, number
        if key not in self._components:
            answer = self._answers[number]
            target, draft = self._pair.runners
            predictor = None
            if method.needs_exit_layer:
                both = self._pair.early_exit(method)
                target, draft = both.target, both.draft
                predictor = self._predictor(target, answer)
            if draft is None:
                raise methods.no_draft_model(method)
            prefill = Recorder(target, draft, self._sampling).prefill(answer)
            remembered = cast("ModelRunner", MemoisedRunner(target))
            own, vocab_size = MemoisedRunner(draft), target.vocab_size
            components = Components(
                remembered, own, self._sampling, answer.eos_ids, vocab_size, 0, acceptance_predictor=predictor
            )
            self._components[key] = components, prefill
        return self._components[key]

    def _predictor(self, target: ModelRunner, answer: ReferenceOutput) -> RecordedAcceptance | None:
        layer = self._pair.exit_layer
        if layer is None or layer.predictor is None:
            return None
        rows = target.logits(Context(answer.prompt_ids), answer.token_ids).hidden_states
        assert rows is not None
        return RecordedAcceptance(layer.predictor, rows)


def _shape(settings: Settings) -> dict[str, Any]:
    """How broad drafts are: rounds of one method that are as broad cost the same."""
    return {key: settings.values[key] for key in _BREADTHS if key in settings.values}


def _counted(summary: Summary, round_: Round) -> list[int]:
    summary.add(round_)
    return round_.token_ids
