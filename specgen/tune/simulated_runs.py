"""Simulated runs of methods whose drafts depend on their settings: trees, several drafts, beams and lossy verification.

Their drafts cannot be recorded once for all settings. So the real drafters run here, and the real verifiers if needed. The
models' outputs are kept and used again. Only the seconds are simulated: they were measured in real rounds of the same shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from specgen import methods
from specgen.base.types import Context
from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.decoding.drafting import LearningDrafter, Setup
from specgen.decoding.run import sequential
from specgen.engine.forward_pass import ModelOutput
from specgen.engine.inference_mode import inference
from specgen.methods import is_random, runs, signals_of
from specgen.methods.adaptive import Adaptive, AdaptiveInputs
from specgen.methods.learned_drafting import Learned
from specgen.methods.length_sweep import RepeatDrafter
from specgen.pair.figures import Summary
from specgen.pair.pair import runners
from specgen.pair.request import typical_length
from specgen.tune.outcome import PLAIN
from specgen.tune.recorded_drafts import draft_prefill_seconds
from specgen.tune.request import ClockFunction, Deadline
from specgen.tune.round_timing import RoundProbe
from specgen.tune.simulation import RANDOM_RUNS, SimulatedClock, SimulatedTarget, SimulatedVerifier, make_run, run_seed

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.base.types import Draft, SamplingParams, Verdict
    from specgen.decoding.costs.round_costs import RoundCosts
    from specgen.decoding.drafting import Drafter
    from specgen.decoding.policy import LengthPolicy
    from specgen.decoding.run import Run
    from specgen.engine.model_runner import DraftRunner, ModelRunner
    from specgen.engine.parts.acceptance import Predictor
    from specgen.methods.method import Method
    from specgen.pair.pair import Pair
    from specgen.tune.recorded_drafts import ReferenceOutput

_SHAPE_SETTINGS = ("width", "nodes", "cape", "beams", "drafts", "window", "ngram", "guesses", "branches")
_LENGTHS = (2, 3, 5)  # draft lengths (levels) that are timed
_SHAPE_SECONDS, _PLAIN_SECONDS = 0.3, 0.05  # for timing a shape, and for timing plain passes before and after it
_WITHOUT_STOP: Mapping[str, Mapping[str, Any]] = {
    "bild": {"fallback": 0.0},
    "eesd-tree": {"depth": 64},
}  # settings with which drafts do not stop before the length to be timed
MOST_BYTES = 128 << 20  # kept logits take at most this much memory


class MemoisedRunner:
    """Runs a model on one prompt and keeps its outputs, so that the same tokens need no second forward pass.

    An output is kept under the generated tokens and the drafted tokens that precede it, so draft trees of different shapes share
    outputs. `calls` counts the calls of `logits`, `passes` the calls that needed a forward pass.
    """

    def __init__(self, runner: DraftRunner) -> None:
        self._runner = runner
        self.context_limit, self.num_embeddings = runner.context_limit, runner.num_embeddings
        self.vocab_size, self.device = runner.vocab_size, runner.device
        self._outputs: dict[tuple[tuple[int, ...], tuple[int, ...]], ModelOutput] = {}
        self.calls = self.passes = self._bytes = 0

    def __getattr__(self, name: str) -> Any:
        """Returns what only some runners have, such as `longest_draft`."""
        return getattr(self._runner, name)

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        """Returns logits as `ModelRunner.logits` does, from kept outputs if all of them are known."""
        self.calls += 1
        tokens = list(draft)
        parents = list(range(-1, len(tokens) - 1)) if parents is None else list(parents)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent + 1], token))
        generated = tuple(context.ids[context.prompt_length :])
        keys = [(generated, path) for path in paths[start:]]
        if all(key in self._outputs for key in keys):
            kept = [self._outputs[key] for key in keys]
            parts = ([part for part in parts if part is not None] for parts in zip(*kept, strict=True))
            return ModelOutput(*(torch.stack(part) if part else None for part in parts))  # type: ignore[arg-type]
        self.passes += 1
        computed = self._runner.logits(context, tokens, parents, start=start)
        for position, key in enumerate(keys):
            if self._bytes < MOST_BYTES and key not in self._outputs:
                row = ModelOutput(*(None if part is None else part[position].clone() for part in computed))  # type: ignore[arg-type]
                self._outputs[key] = row
                self._bytes += sum(part.nbytes for part in (row.logits, row.unpenalised, row.unrestricted) if part is not None)
        return computed


class PricedDrafter:
    """Runs a method's drafter and adds the measured costs of its passes to the simulated clock.

    `prefill_seconds` is the time of the draft model's pass over the prompt; it is added to the first draft.
    """

    def __init__(
        self, drafter: Drafter, runner: MemoisedRunner, costs: RoundCosts, clock: SimulatedClock, prefill_seconds: float
    ) -> None:
        self._drafter, self._runner, self._costs, self._clock = drafter, runner, costs, clock
        self._prefill_seconds = prefill_seconds

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        calls_before = self._runner.calls
        draft = self._drafter.propose(context, policy, limit)
        self._add_cost(self._runner.calls - calls_before, context, policy)
        return draft

    def _add_cost(self, passes: int, context: Context, policy: LengthPolicy) -> None:
        signal_seconds = self._costs.signal_cost * passes if policy.signals else 0.0
        self._clock.add("draft", self._prefill_seconds + self._costs.draft_cost.at(passes, len(context)) + signal_seconds)
        self._prefill_seconds = 0.0


class PricedLearner(PricedDrafter, LearningDrafter):
    """The same for a drafter that learns from the target. A draft's cost is that of drafts with as many levels.

    Such drafters need no pass for each level.
    """

    _drafter: LearningDrafter

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        draft = self._drafter.propose(context, policy, limit)
        self._add_cost(draft.levels, context, policy)
        return draft

    def learn(self, draft: Draft, output: ModelOutput, verdict: Verdict) -> None:
        self._drafter.learn(draft, output, verdict)


class PricedTarget(SimulatedTarget):
    """Runs the target and adds the measured costs of its passes to the simulated clock."""

    def __init__(self, runner: ModelRunner, costs: RoundCosts, clock: SimulatedClock, prefill_seconds: float) -> None:
        super().__init__(costs, clock, prefill_seconds)
        self._runner = runner

    def logits(self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] = (), *, start: int = 0) -> Any:
        super().logits(context, draft, parents)
        return self._runner.logits(context, draft, parents)


class RecordedPredictor:
    """Predicts whether drafted tokens are accepted, at positions of one reference output (the target's own output).

    `hidden` are the target's hidden states [tokens, width] at the output's tokens.
    """

    def __init__(self, predictor: Predictor, hidden: torch.Tensor) -> None:
        self._predictor, self._all_offsets = predictor, predictor.offsets(hidden)
        self._offsets = self._all_offsets[0]

    def begin(self, context: Context) -> None:
        self._offsets = self._all_offsets[len(context) - context.prompt_length - 1]

    def score(self, draft_row: torch.Tensor, position: int) -> torch.Tensor:
        return self._predictor.score(self._offsets, draft_row, position)


class SimulatedRuns:
    """Simulates runs on the prompts of `references` (the target's outputs), with costs measured in real rounds.

    Rounds are timed once for each shape (a method with its width, beams or drafts), by a `probe`. The machine may then be slower
    than when the other methods were timed. So target passes are timed again and compared with `plain`, their costs at the earlier
    time; the measured costs are corrected by the ratio.
    """

    def __init__(
        self,
        pair: Pair,
        references: Sequence[ReferenceOutput],
        sampling: SamplingParams,
        plain: RoundCosts,
        *,
        probe: Callable[..., RoundProbe] = RoundProbe,
        clock: ClockFunction = time.perf_counter,
    ) -> None:
        self._pair, self._references, self._sampling, self._plain = pair, references, sampling, plain
        self._probe, self._clock = probe, clock
        self._costs: dict[tuple[object, ...], RoundCosts] = {}
        self._components: dict[tuple[str, int], tuple[Setup, float]] = {}

    @inference
    def run(self, name: str, given: Mapping[str, Any]) -> Summary:
        """Simulates the method `name` with the settings `given` on each prompt, and returns one summary of all runs.

        A length policy that draws random numbers is run `RANDOM_RUNS` times, with other numbers each time. For a lossy method
        the summary has the perplexity of the output under the target at temperature 1. Raises SpecgenError if the method cannot
        run with this pair.
        """
        method = methods.find(name)
        settings = methods.resolve(method, given, has_predictor=self._pair.parts.has_predictor())
        costs = self._costs_of(method, settings)
        summary, learned = Summary(name), self._prior(costs) if settings.policy == Adaptive.name else None
        for repeat in range(RANDOM_RUNS if is_random(settings) else 1):
            for number, reference in enumerate(self._references):
                ids: list[int] = []
                for round_ in self._run(method, settings, costs, number, run_seed(number, repeat), learned).rounds():
                    summary.add(round_)
                    ids += round_.token_ids
                if not method.lossless:
                    summary.add_log_likelihood(self._pair.log_likelihood(reference.prompt_ids, ids))
        return summary

    @property
    def plain_perplexity(self) -> float:
        """The perplexity of the target's own outputs under the target; a lossless method is expected to have the same."""
        summary = Summary(PLAIN)
        for reference in self._references:
            summary.token_ids += reference.token_ids
            summary.add_log_likelihood(self._pair.log_likelihood(reference.prompt_ids, reference.token_ids))
        return summary.perplexity or 0.0

    def _costs_of(self, method: Method, settings: Settings) -> RoundCosts:
        """Returns the costs of the method's rounds with this width, beams or drafts; the first call measures them.

        The signals that the length policy reads are part of the costs too.
        """
        shape = {key: settings.values[key] for key in _SHAPE_SETTINGS if key in settings.values}
        key = (method.name, signals_of(settings), *shape.values())
        if key not in self._costs:
            prompts = [min((reference.prompt_ids for reference in self._references), key=len)]
            fixed = {**shape, **_WITHOUT_STOP.get(method.name, {})}
            common = (prompts, self._sampling)
            probe = self._probe(self._pair, method.name, *common, lengths=_LENGTHS, signals=signals_of(settings), settings=fixed)
            plain = self._probe(self._pair, PLAIN, *common, lengths=(0,), drafter=RepeatDrafter())
            for timed, seconds in ((plain, _PLAIN_SECONDS), (probe, _SHAPE_SECONDS), (plain, _PLAIN_SECONDS)):
                timed.run(Deadline.after(seconds, self._clock))
            ((length, now),) = plain.costs.verification_cost.curves.items()
            self._costs[key] = probe.costs.times(self._plain.verification_cost.at(1, length) / now.at(1))
        return self._costs[key]

    def _prior(self, costs: RoundCosts) -> Learned:
        """Returns what the length policy `adaptive` knows before the first prompt."""
        return Learned.prior(DraftingCosts.of_rounds(costs, _length(self._references[0])), has_model=True)

    def _run(self, method: Method, settings: Settings, costs: RoundCosts, number: int, seed: int, learned: Learned | None) -> Run:
        """Returns a run on prompt number `number`. `learned` is what the policy `adaptive` knows; None for other policies."""
        reference, clock = self._references[number], SimulatedClock()
        components, prefill_seconds = self._components_of(method, number)
        components = replace(components, seed=seed)
        target: Any
        verifier: Any
        drafter = runs.make_drafter(method, settings, components)
        learns = isinstance(drafter, LearningDrafter)
        # When sampling, the reference output is one random draw: it can decide about fixed drafted tokens, not about drawn ones.
        if method.lossless and not learns and (self._sampling.greedy or settings.drafts_tree):
            target, verifier = SimulatedTarget(costs, clock, reference.prefill_seconds), SimulatedVerifier(reference)
        else:
            assert components.target is not None
            target = PricedTarget(components.target, costs, clock, reference.prefill_seconds)
            verifier = runs.make_verifier(method, settings, components)
        runner = cast("MemoisedRunner", components.draft)
        priced = (PricedLearner if learns else PricedDrafter)(drafter, runner, costs, clock, prefill_seconds)
        adaptive = None
        if learned is not None:
            adaptive = AdaptiveInputs(DraftingCosts.of_rounds(costs, _length(reference)), learned)
        return make_run(reference, target, priced, runs.make_policy(settings, seed, adaptive), verifier, clock, sequential)

    def _components_of(self, method: Method, number: int) -> tuple[Setup, float]:
        """Returns the parts of a run on prompt number `number`, and the seconds of the draft model's pass over the prompt.

        The models' outputs are kept and used again (`MemoisedRunner`).
        """
        key = method.needs, number
        if key not in self._components:
            reference = self._references[number]
            draft: DraftRunner | None
            target, draft = runners(self._pair)
            predictor = None
            if method.needs_exit_layer:
                target, draft, _, of_exit = self._pair.parts.runners(method)
                if of_exit is not None:
                    hidden = target.logits(Context(reference.prompt_ids), reference.token_ids).hidden_states
                    assert hidden is not None
                    predictor = RecordedPredictor(of_exit.predictor, hidden)
            elif method.head:
                target, draft, *_ = self._pair.parts.runners(method)
            runs_draft = method.runs_model
            if draft is None and runs_draft:
                raise method.without_part(None)
            prefill_seconds = draft_prefill_seconds(target, draft, reference) if draft is not None and runs_draft else 0.0
            memoised = cast("ModelRunner", MemoisedRunner(target)), None if draft is None else MemoisedRunner(draft)
            components = Setup(
                memoised[1],
                self._sampling,
                reference.eos_ids,
                target.vocab_size,
                target=memoised[0],
                acceptance_predictor=predictor,
            )
            self._components[key] = components, prefill_seconds
        return self._components[key]


def _length(reference: ReferenceOutput) -> int:
    """Returns the length of the context (tokens) at which the costs of rounds on a reference's prompt are read."""
    return typical_length(len(reference.prompt_ids), reference.limit)
