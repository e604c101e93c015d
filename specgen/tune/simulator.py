"""Simulates runs of a method: its real drafter, length policy, verifier and schedule, on models whose outputs are remembered.

A clock adds up the seconds that passes took in real rounds; the time that the simulation takes is not counted. All settings see
the same output on a prompt: plain decoding's, called the reference. Where the verifier is one of those that all lossless methods
share, a draft is checked against the reference, and the target is not run at all:

- A greedy or a fixed draft is accepted as far as it equals the reference.
- A drawn draft depends on the output: given the reference's next token y, the drafted token is y with probability
  min(1, q(y) / p(y)), and otherwise drawn from the normalised positive part of q - p. It is drawn so here, with the same random
  numbers for all settings.

Other verifiers, and drafters that learn from the target's logits, run on the target's remembered outputs. A path that no earlier
run has taken runs the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from specgen import methods
from specgen.base.types import Context
from specgen.decoding.chain import ModelDrafter
from specgen.decoding.drafting import Setup, derive_seed
from specgen.decoding.run import Run
from specgen.engine.devices import inference
from specgen.engine.forward_pass import ModelOutput
from specgen.engine.model_runner import ModelRunner, room
from specgen.engine.parts.own_layers import ExitAcceptancePredictor
from specgen.engine.text.translated_runner import TranslatedRunner
from specgen.methods import runs, signals_of
from specgen.methods.adaptive import Adaptive, AdaptiveInputs
from specgen.methods.learned_drafting import DraftingCosts, Learned
from specgen.pair.figures import Figures
from specgen.pair.pair import has_flexible_window, pass_costs, runners
from specgen.pair.request import typical_length
from specgen.tune.expected_time import PricedDrafter, PricedParallelDrafter, PricedTarget, SimulatedClock
from specgen.tune.outcome import PLAIN, Deadline
from specgen.tune.remembered import DrawnRunner, MemoisedRunner
from specgen.tune.round_timing import costs_of, draft_prefill_seconds, time_rounds

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.base.types import SamplingParams
    from specgen.decoding.costs import RoundCosts
    from specgen.methods.method import Method
    from specgen.pair.pair import Pair
    from specgen.tune.round_timing import ReferenceOutput

_SHAPE_SETTINGS = ("width", "nodes", "cape", "beams", "drafts", "window", "ngram", "guesses", "branches")
_LENGTHS = (2, 3, 5)  # draft lengths (levels) that are timed
_SHAPE_SECONDS = 0.3  # for timing a shape


class AbandonedError(Exception):
    """A simulation was ended before its end, by the caller's `goes_on`."""


class _Models(NamedTuple):
    """The models on one prompt, as runners that keep their outputs, in the setup of a run.

    `prefill_seconds` is the time of the drafter's pass over the prompt. `drawn` runs the same model as the setup's `draft`, None
    in greedy decoding.
    """

    setup: Setup
    prefill_seconds: float = 0.0
    drawn: DrawnRunner | None = None


class Simulator:
    """Simulates runs on the prompts of `references` (plain decoding's outputs), with measured `costs` of rounds by
    `Method.cost_kind`.

    `costs` hold for all settings with which drafts are chains. Rounds with trees, beams or several drafts are timed by the
    simulator, once for each shape (a method with its width, beams or drafts). `clock` returns seconds; it limits this timing.
    """

    def __init__(
        self,
        pair: Pair,
        references: Sequence[ReferenceOutput],
        sampling: SamplingParams,
        costs: Mapping[str, RoundCosts],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pair, self.references, self.costs = pair, references, costs
        self._sampling, self._clock = sampling, clock
        self._kept: dict[tuple[Any, ...], ModelOutput] = {}
        self._shape_costs: dict[tuple[object, ...], RoundCosts] = {}
        self._models: dict[tuple[str, int], _Models] = {}

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
        """Simulates the method `name` with the settings `given`. Returns the figures of all runs together, with expected seconds.

        `numbers` are the prompts to run on, as indices of `references`; None for all. With `perplexity`, and for lossy methods,
        the summary has the perplexity of the output under the target at temperature 1. `goes_on` is asked after each round, with
        the figures so far. Raises AbandonedError where it says no, and SpecgenError if the method cannot run with this pair.
        """
        method = methods.find(name)
        settings = methods.resolve(method, given, has_predictor=self.pair.parts.has_predictor())
        costs, summary, learned = self._costs_of(method, settings), Figures(name), None
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
                summary.add_log_likelihood(self.pair.log_likelihood(self.references[number].prompt_ids, ids))
        return summary

    def _costs_of(self, method: Method, settings: Settings) -> RoundCosts:
        """Returns the costs of the method's rounds with these settings: for chains, those given to the simulator.

        For other drafts, rounds are timed at the first call with this method, these values of settings such as width and beams,
        and a length policy that reads these signals.
        """
        if method.recorded and not method.drafts_trees(settings):
            return self.costs[method.cost_kind]
        shape = {key: settings.values[key] for key in _SHAPE_SETTINGS if key in settings.values}
        signals = signals_of(settings)
        key = (method.name, signals, *shape.values())
        if key not in self._shape_costs:
            prompt = min((reference.prompt_ids for reference in self.references), key=len)
            deadline = Deadline.after(_SHAPE_SECONDS, self._clock)
            rounds = time_rounds(self.pair, method.name, prompt, self._sampling, deadline, _LENGTHS, signals, settings=shape)
            self._shape_costs[key] = costs_of(rounds, self.costs["echo"])
        return self._shape_costs[key]

    def _run(self, method: Method, settings: Settings, costs: RoundCosts, number: int, learned: Learned | None) -> Run:
        """Returns a run on prompt number `number`. `learned` is what the policy `adaptive` knows; None for other policies."""
        reference = self.references[number]
        clock = SimulatedClock(costs)
        models = self._models_of(method, number)
        setup = replace(models.setup, sampling=self._sampling, seed=run_seed(number, self._sampling.seed or 0))
        if models.drawn is not None and method.verifier is None and not method.drafts_trees(settings):
            drawn: Any = models.drawn
            setup = replace(setup, draft=drawn, sampling=replace(self._sampling, temperature=0.0))
        if learned is not None:
            decided = DraftingCosts.of_rounds(costs, _length(reference))
            setup = replace(setup, adaptive=AdaptiveInputs(decided, learned, in_parallel=method.is_parallel))
        if settings.values.get("window") == "auto":  # by the rule and the times of a real run
            passes = pass_costs(self.pair, _length(self.references[0]), self._sampling)
            setup = replace(setup, window=passes.run_window(is_flexible=has_flexible_window(self.pair, self._sampling)))
        target: Any = PricedTarget(reference, clock)
        if method.is_parallel:
            policy = runs.make_policy(settings, setup.seed, setup.adaptive)
            parallel = PricedParallelDrafter(ModelDrafter(setup), policy, target, clock)
            setup = replace(setup, worker=SimpleNamespace(drafter=lambda *_: parallel))
        run = runs.make_run(method, settings, setup, Context(reference.prompt_ids), reference.limit, None, clock)
        memoised: Any = models.setup.draft
        drafter = PricedDrafter(run.drafter, memoised, clock, models.prefill_seconds)
        run = replace(run, target=target, drafter=drafter)
        keeps_reference = method.lossless and not drafter.learns
        if not self._sampling.greedy:  # other verifiers draw, and the reference is one draw of many
            keeps_reference &= method.verifier is None and not settings.values.get("cape")
        if keeps_reference:
            return replace(run, verifier=target)
        target.runner = models.setup.target
        return run

    def _models_of(self, method: Method, number: int) -> _Models:
        """Returns the models on prompt number `number`. Methods with the same `needs` share them, and so their kept outputs."""
        key = method.needs, number
        if key not in self._models:
            self._models[key] = self._make_models(method, number)
        return self._models[key]

    def _make_models(self, method: Method, number: int) -> _Models:
        reference, (target, draft), part = self.references[number], runners(self.pair), None
        if method.needs_exit_layer or method.head:
            target, draft, _, part = self.pair.parts.runners(method)
        plain: Any = None if method.name == PLAIN else self._models_of(methods.find(PLAIN), number).setup.target
        is_own = plain is None or method.needs_exit_layer or method.head
        memoised: Any = MemoisedRunner(target, self._kept) if is_own else plain
        predictor = part
        if isinstance(part, ExitAcceptancePredictor):
            predictor = ExitAcceptancePredictor(memoised, part.predictor)
        setup = Setup(
            None,
            eos_ids=reference.eos_ids,
            vocab_size=memoised.vocab_size,
            target=memoised,
            acceptance_predictor=predictor,
        )
        if draft is None or not method.runs_model:
            return _Models(setup)
        prefill_seconds = draft_prefill_seconds(target, draft, reference)
        is_model = isinstance(draft, ModelRunner | TranslatedRunner) and not method.head
        drafting: Any = MemoisedRunner(draft, self._kept, joins=is_model)
        drawn = None
        if not self._sampling.greedy and getattr(draft, "draws", True):
            drawn = DrawnRunner(drafting, plain, reference, self._sampling, self._sampling.seed or 0)
        context, known = Context(reference.prompt_ids), reference.token_ids
        context.extend(known[:1])
        if is_model and len(known) > 1 and room(draft, context) >= len(known):  # one pass instead of one for each token
            for runner in (drafting, memoised):
                runner.logits(context, known[1:-1])
        return _Models(replace(setup, draft=drafting), prefill_seconds, drawn)


def run_seed(number: int, seed: int) -> int:
    """Returns the seed of a run on prompt number `number`. It is derived from `seed`, and differs for each prompt."""
    return derive_seed(seed, f"prompt {number}")


def _length(reference: ReferenceOutput) -> int:
    """Returns the length of the context (tokens) at which the costs of rounds on a reference's prompt are read."""
    return typical_length(len(reference.prompt_ids), reference.limit)
