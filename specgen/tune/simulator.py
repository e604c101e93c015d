"""Simulates runs of a method: its real drafter, length policy, verifier and schedule, on models
whose outputs are remembered.

A clock adds up the seconds that passes took in real rounds; the time that the simulation takes is
not counted. All settings see the same output on a prompt: plain decoding's, called the reference.
Where the verifier is one of those that all lossless methods share, a draft is checked against the
reference, and the target is not run at all:

- A greedy or a fixed draft is accepted as far as it equals the reference.
- A drawn draft depends on the output: given the reference's next token y, the drafted token is y
  with probability min(1, q(y) / (c p(y))), and otherwise drawn from the normalised positive part of
  q - c p; c is the probability with which the tokens before are accepted. It is drawn so here, with
  the same random numbers for all settings.

Other verifiers, and drafters that learn from the target's logits, run on the target's remembered
outputs. A path that no earlier run has taken runs the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specgen import methods
from specgen.base.seeds import derive_seed
from specgen.decoding.run import Run
from specgen.decoding.verification import RejectionSampling
from specgen.engine.devices import inference
from specgen.engine.forward_pass import ModelOutput
from specgen.methods import signals_of
from specgen.methods.adaptive import Adaptive
from specgen.methods.base import Request, typical_length
from specgen.methods.learned_drafting import DraftingCosts, Learned
from specgen.pair.figures import Figures
from specgen.tune.expected_time import PricedDrafter, PricedTarget, SimulatedClock
from specgen.tune.outcome import Deadline
from specgen.tune.round_timing import costs_of, time_rounds
from specgen.tune.simulated_models import Drafting, SimulatedModels, SimulatedRun

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.base.types import SamplingParams
    from specgen.decoding.costs import RoundCosts
    from specgen.methods.base import Method
    from specgen.pair.pair import Pair
    from specgen.tune.round_timing import ReferenceOutput

_SHAPE_SETTINGS = (
    "width",
    "nodes",
    "cape",
    "beams",
    "drafts",
    "window",
    "ngram",
    "guesses",
    "branches",
)
_LENGTHS = (2, 3, 5)  # draft lengths (levels) that are timed
_SHAPE_SECONDS = 0.3  # for timing a shape


class AbandonedError(Exception):
    """A simulation was ended before its end, by the caller's `goes_on`."""


class Simulator:
    """Simulates runs on the prompts of `references` (plain decoding's outputs), with measured
    `costs` of rounds by `Tuning.cost_kind`.

    `costs` hold for all settings with which drafts are chains. Rounds with trees, beams or several
    drafts are timed by the simulator, once for each shape (a method with its width, beams or
    drafts). `clock` returns seconds; it limits this timing.
    """

    def __init__(
        self,
        pair: Pair,
        references: Sequence[ReferenceOutput],
        sampling: SamplingParams,
        costs: Mapping[str, RoundCosts],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pair = pair
        self.references = references
        self.costs = costs
        self._sampling = sampling
        self._clock = clock
        self._kept: dict[tuple[Any, ...], ModelOutput] = {}
        self._shape_costs: dict[tuple[object, ...], RoundCosts] = {}
        self._models: dict[int, SimulatedModels] = {}  # by prompt number

    @inference
    def run(
        self,
        name: str,
        given: Mapping[str, Any],
        numbers: Sequence[int] | None = None,
        *,
        perplexity: bool = False,
        goes_on: Callable[[Figures], bool] = lambda _: True,
    ) -> Figures:
        """Simulates the method `name` with the settings `given`. Returns the figures of all runs
        together, with expected seconds.

        `numbers` are the prompts to run on, as indices of `references`; None for all. With
        `perplexity`, and for lossy methods, the figures have the perplexity of the output under the
        target at temperature 1. `goes_on` is asked after each round, with the figures so far.
        Raises AbandonedError where it says no, and SpecgenError if the method cannot run with this
        pair.
        """
        method = methods.find(name)
        settings = methods.resolve(method, given, has_predictor=self.pair.parts.has_predictor())
        costs = self._costs_of(method, settings)
        summary = Figures(name)
        learned = None
        if settings.policy == Adaptive.name:
            prior = DraftingCosts.of_rounds(costs, _length(self.references[0]))
            learned = Learned.prior(prior, has_model=method.runs_model)
        for number in range(len(self.references)) if numbers is None else numbers:
            ids: list[int] = []
            for round_ in self._run(method, settings, costs, number, learned).rounds():
                summary.add(round_)
                ids += round_.token_ids
                if not goes_on(summary):
                    raise AbandonedError
            if perplexity or not method.lossless:
                summary.add_log_likelihood(
                    self.pair.log_likelihood(self.references[number].prompt_ids, ids)
                )
        return summary

    def _costs_of(self, method: Method, settings: Settings) -> RoundCosts:
        """Returns the costs of the method's rounds with these settings: for chains, those given to
        the simulator.

        For other drafts, rounds are timed at the first call with this method, these values of
        settings such as width and beams, and a length policy that reads these signals.
        """
        if method.tuning.recorded and not method.drafts_trees(settings):
            return self.costs[method.tuning.cost_kind]
        shape = {key: settings.values[key] for key in _SHAPE_SETTINGS if key in settings.values}
        signals = signals_of(settings)
        key = (method.name, signals, *shape.values())
        if key not in self._shape_costs:
            prompt = min((reference.prompt_ids for reference in self.references), key=len)
            deadline = Deadline.after(_SHAPE_SECONDS, self._clock)
            rounds = time_rounds(
                self.pair,
                method.name,
                prompt,
                self._sampling,
                deadline,
                _LENGTHS,
                signals,
                settings=shape,
            )
            self._shape_costs[key] = costs_of(rounds, self.costs["echo"])
        return self._shape_costs[key]

    def _run(
        self,
        method: Method,
        settings: Settings,
        costs: RoundCosts,
        number: int,
        learned: Learned | None,
    ) -> Run:
        """Returns a run on prompt number `number`. `learned` is what the policy `adaptive` knows;
        None for other policies."""
        reference = self.references[number]
        sampling = replace(self._sampling, seed=None, stop=())
        policy = None if settings.policy is None else methods.POLICIES[settings.policy]
        seed = run_seed(number, self._sampling.seed or 0)
        request = Request(
            method, settings, policy, sampling, reference.prompt_ids, reference.limit, own_seed=seed
        )

        clock = SimulatedClock(costs)
        target = PricedTarget(reference, clock)
        draws = not sampling.greedy and method.lossless and not method.drafts_trees(settings)
        models = self._models_of(number)
        models.begin(SimulatedRun(target, clock, costs, learned, draws))
        run = method.start(models, request)

        drafting = models.drafting or Drafting(models.plain())
        drafter = PricedDrafter(run.drafter, drafting.memoised, clock, drafting.prefill_seconds)
        keeps_reference = method.lossless and not drafter.learns
        if not sampling.greedy:  # other verifiers draw, and the reference is one draw of many
            keeps_reference &= isinstance(
                run.verifier, RejectionSampling
            ) and not settings.values.get("cape")
        if not keeps_reference:
            target.runner = drafting.runners.target
        verifier = target if keeps_reference else run.verifier
        return replace(run, target=target, drafter=drafter, clock=clock, verifier=verifier)

    def _models_of(self, number: int) -> SimulatedModels:
        """Returns the models on prompt number `number`. All methods share them, and so their kept
        outputs."""
        if number not in self._models:
            first = _length(self.references[0])
            reference = self.references[number]
            self._models[number] = SimulatedModels(
                self.pair.models, reference, self._sampling, self._kept, first
            )
        return self._models[number]


def run_seed(number: int, seed: int) -> int:
    """Returns the seed of a run on prompt number `number`. It is derived from `seed`, and differs
    for each prompt."""
    return derive_seed(seed, f"prompt {number}")


def _length(reference: ReferenceOutput) -> int:
    """Returns the length of the context (tokens) at which the costs of rounds on a reference's
    prompt are read."""
    return typical_length(len(reference.prompt_ids), reference.limit)
