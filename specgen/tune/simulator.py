"""Simulates runs of a method: its real drafter, length policy, verifier and schedule, on models whose outputs are remembered.

A clock adds up the seconds of passes that were measured in real rounds; the models' own time is not counted. All settings see the
same output on a prompt, the reference: plain decoding's. Where the verifier is one of those that all lossless methods share, a
draft is checked against it, and the target is not run at all:

- A greedy or a fixed draft is accepted as far as it equals the reference.
- A drawn draft depends on the output: given the reference's token y, it was y with probability min(1, q(y) / p(y)), and otherwise
  it was drawn from the normalised positive part of q - p. So it is drawn here, with the same random numbers for all settings.

Other verifiers, and drafters that learn from the target's logits, run on the target's remembered outputs. A path that no earlier
run has taken runs the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specgen import methods
from specgen.base.types import PHASES, Context, Draft, Verdict
from specgen.decoding import token_sampling
from specgen.decoding.chain import ModelDrafter
from specgen.decoding.drafting import LearningDrafter, Setup, derive_seed
from specgen.decoding.run import Clock, Run
from specgen.decoding.verification import match_path
from specgen.engine.forward_pass import ModelOutput, depths
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import room
from specgen.engine.parts.own_layers import ExitAcceptancePredictor
from specgen.methods import runs, signals_of
from specgen.methods.adaptive import Adaptive, AdaptiveInputs
from specgen.methods.learned_drafting import DraftingCosts, Learned
from specgen.pair.figures import Figures
from specgen.pair.pair import has_flexible_window, pass_costs, runners
from specgen.pair.request import typical_length
from specgen.tune.outcome import PLAIN, Deadline
from specgen.tune.round_timing import costs_of, draft_prefill_seconds, time_rounds

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.base.types import SamplingParams
    from specgen.decoding.costs import RoundCosts
    from specgen.decoding.drafting import Drafter
    from specgen.decoding.policy_base import LengthPolicy
    from specgen.engine.model_runner import DraftRunner
    from specgen.methods.method import Method
    from specgen.pair.pair import Pair
    from specgen.tune.round_timing import ReferenceOutput

MOST_BYTES = 128 << 20  # kept logits take at most this much memory; others are computed again
_NO_TOKEN = 1 << 40  # stands for the target's token after the end of its output; no drafted token has this id
_SHAPE_SETTINGS = ("width", "nodes", "cape", "beams", "drafts", "window", "ngram", "guesses", "branches")
_LENGTHS = (2, 3, 5)  # draft lengths (levels) that are timed
_SHAPE_SECONDS = 0.3  # for timing a shape


class SimulatedClock(Clock):
    """Measures no time: the priced target and drafters add the seconds that they are expected to take, by `costs`."""

    def __init__(self, costs: RoundCosts) -> None:
        super().__init__(None)
        self.costs = costs

    def start(self) -> None:
        self._phases = dict.fromkeys(PHASES, 0.0)

    def add(self, phase: str, seconds: float) -> None:
        self._phases[phase] += seconds

    def draft_seconds(self, length: int, policy: LengthPolicy, context: Context) -> float:
        """Returns the seconds of a draft of `length` tokens (levels, for a tree)."""
        signal_seconds = self.costs.signal_cost * length if policy.signals else 0.0
        return self.costs.draft_cost.at(length, len(context)) + signal_seconds if length else 0.0

    def lap(self, phase: str, *, on_device: bool = False) -> None:
        """Does nothing: time advances by `add` only."""

    def move(self, seconds: float, source: str, phase: str) -> None:
        """Does nothing: the expected seconds of drafting include the length policy's."""

    def seconds(self) -> dict[str, float]:
        return self._phases


class MemoisedRunner:
    """Runs a model on one prompt and keeps its outputs, so that the same tokens need no second forward pass.

    An output is kept under the generated and the drafted tokens before it, so drafts of different lengths and trees of different
    shapes share outputs. Unless `joins`, generated tokens are told from drafted ones: EAGLE's and GliDe's heads read the target's
    states of the former. `kept` has the outputs of all such runners of a simulator. `calls` counts the calls of `logits`.
    """

    def __init__(self, runner: DraftRunner, kept: dict[tuple[Any, ...], ModelOutput], *, joins: bool = True) -> None:
        self._runner, self._kept, self._joins = runner, kept, joins
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def key(self, context: Context, path: Sequence[int]) -> tuple[Any, ...]:
        """Returns under what the output after the context and the drafted `path` is kept."""
        generated = context.ids[context.prompt_length :]
        return (id(self), *generated, *path) if self._joins else (id(self), tuple(generated), *path)

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        """Returns logits as `ModelRunner.logits` does, from kept outputs if all of them are known."""
        self.calls += 1
        paths: list[Sequence[int]] = [()]
        if parents is None:
            paths += [draft[: position + 1] for position in range(len(draft))]
        else:
            for token, parent in zip(draft, parents, strict=True):
                paths.append((*paths[parent + 1], token))
        keys = [self.key(context, path) for path in paths[start:]]
        if all(key in self._kept for key in keys):
            parts = zip(*(self._kept[key] for key in keys), strict=True)
            return ModelOutput(*(None if part[0] is None else torch.cat(part) for part in parts))  # type: ignore[arg-type]
        computed = self._runner.logits(context, list(draft), parents, start=start)._replace(features=None)
        bytes_per_row = sum(part[:1].nbytes for part in computed if part is not None)
        for position, key in enumerate(keys):
            if len(self._kept) * bytes_per_row < MOST_BYTES and key not in self._kept:
                rows = (None if part is None else part[position : position + 1].clone() for part in computed)
                self._kept[key] = ModelOutput(*rows)  # type: ignore[arg-type]
        return computed

    def last_hidden_state(self, context: Context) -> torch.Tensor | None:
        """Returns the hidden state [width] from which the model predicted the context's last token."""
        before = Context(context.ids[: context.prompt_length])
        before.extend(context.ids[context.prompt_length : -1])
        states = self.logits(before).hidden_states
        return None if states is None else states[0]


class DrawnRunner:
    """Runs a draft model whose drafts are drawn, for a greedy drafter: the most likely token of its logits is the one drawn.

    The others share the rest of the probability, so that the drawn token has its own; `unpenalised` are the model's logits, from
    which all other signals are computed. A token is drawn once for each context, seed and position in the output. On the way of
    the `reference` it is drawn as the module's docstring says; `target` runs the target there.
    """

    def __init__(
        self, draft: MemoisedRunner, target: MemoisedRunner, reference: ReferenceOutput, sampling: SamplingParams, seed: int
    ) -> None:
        self._draft, self._target, self._reference, self._sampling, self._seed = draft, target, reference, sampling, seed
        self._drawn: dict[tuple[Any, ...], tuple[int, float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        assert parents is None, "only chains are drawn, token by token"
        output, key = self._draft.logits(context, draft, start=start), self._draft.key(context, draft)
        if key not in self._drawn:
            self._drawn[key] = self._draw(output, [*context.ids[context.prompt_length :], *draft])
        token, probability = self._drawn[key]
        if token < 0:  # no token can be drawn: the drafter finds out why
            return output
        rest = (1 - probability) / max(1, output.logits.shape[1] - 1)
        logits = torch.full_like(output.logits, math.log(rest) if rest > 0 else -math.inf)
        logits[0, token] = math.log(max(probability, 1.01 * rest))
        return output._replace(logits=logits, unpenalised=output.model_logits)

    def _draw(self, output: ModelOutput, tokens: list[int]) -> tuple[int, float]:
        """Returns the token that is drafted after the new `tokens`, and its probability."""
        generator = token_sampling.make_generator(output.logits.device, derive_seed(self._seed, f"position {len(tokens)}"))
        width, known = self._target.vocab_size, self._reference.token_ids
        probs = token_sampling.pad_probs(token_sampling.warp(output.logits[0, :width], self._sampling), width)
        if len(tokens) >= len(known) or tokens != known[: len(tokens)]:
            token = int(token_sampling.draw(probs, generator))
            return token, float(probs[token])
        context = Context(self._reference.prompt_ids)
        context.extend(tokens)
        of_target = token_sampling.warp(self._target.logits(context).logits[0], self._sampling)
        token = known[len(tokens)]
        chance = probs[token] / of_target[token]
        if torch.rand(1, generator=generator, device=generator.device) >= chance:
            other = int(token_sampling.draw((probs - of_target).clamp_min(0), generator))
            token = other if other >= 0 else token
        return token, float(probs[token])


class PricedTarget:
    """The target of a simulated run: adds the measured cost of each pass to the clock.

    With `runner` None no model is run. Then this is the run's verifier too, which accepts drafted tokens as long as they equal
    the tokens of the reference. `pass_seconds` is the time of the last pass but that over the prompt.
    """

    def __init__(self, reference: ReferenceOutput, clock: SimulatedClock) -> None:
        self._reference, self._clock, self.pass_seconds = reference, clock, 0.0
        self.runner: MemoisedRunner | None = None
        self.device = torch.device("cpu")  # nothing waits for it

    def logits(self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] = (), *, start: int = 0) -> Any:
        self._generated, self._rows = len(context) - context.prompt_length, len(draft) + 1
        if self._generated == 0:
            self._clock.add("prefill", self._reference.prefill_seconds)
        else:
            self.pass_seconds = self._clock.costs.verification_cost.at(len(draft) + 1, len(context))
            self._clock.add("verify", self.pass_seconds)
        return None if self.runner is None else self.runner.logits(context, draft, parents)

    def verify(self, draft: Draft, output: Any) -> Verdict:
        known = [*self._reference.token_ids[self._generated :], *[_NO_TOKEN] * (len(draft.tokens) + 1)]
        choices = [known[0], *(known[depth + 1] for depth in depths(draft.parents))]
        return match_path(draft, choices.__getitem__, self._rows)


class PricedDrafter(LearningDrafter):
    """Runs a method's drafter and adds the measured costs of its passes to the clock.

    A drafter that learns from the target needs no pass for each level: its draft costs what drafts with as many levels do.
    `runner` counts the passes of what drafts; None if no model does. `prefill_seconds`, of its pass over the prompt, are added to
    the first draft.
    """

    def __init__(self, drafter: Drafter, runner: MemoisedRunner | None, clock: SimulatedClock, prefill_seconds: float) -> None:
        self._drafter, self._runner, self._clock, self._prefill_seconds = drafter, runner, clock, prefill_seconds
        self.learns = isinstance(drafter, LearningDrafter)

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        before = 0 if self._runner is None else self._runner.calls
        draft = self._drafter.propose(context, policy, limit)
        passes = draft.levels if self.learns else 0 if self._runner is None else self._runner.calls - before
        if passes:
            self._clock.add("draft", self._prefill_seconds + self._clock.draft_seconds(passes, policy, context))
            self._prefill_seconds = 0.0
        return draft

    def learn(self, draft: Draft, output: ModelOutput, verdict: Verdict) -> None:
        if isinstance(self._drafter, LearningDrafter):
            self._drafter.learn(draft, output, verdict)


class PricedParallelDrafter:
    """PEARL's drafter in a simulated run: drafting and the target's pass happen at the same time.

    A round takes as long as the longer of the two, plus the measured overhead. The pass over the prompt takes as long as the
    target's. `seconds` is the cost of the last draft.
    """

    def __init__(self, drafter: ModelDrafter, policy: LengthPolicy, target: PricedTarget, clock: SimulatedClock) -> None:
        self._drafter, self.policy, self._target, self._clock, self.seconds = drafter, policy, target, clock, 0.0

    def prefill(self, context: Context) -> None: ...

    def close(self) -> None: ...

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        self._draft = self._drafter.propose(context, self.policy, limit, unverified)
        self._context, self._lead_seconds, self._target.pass_seconds = context, 0.0, 0.0

    def first(self, count: int) -> Sequence[int]:
        """Returns the draft's first `count` tokens, for which the target waits."""
        tokens = self._draft.tokens[:count]
        self._lead_seconds = self._seconds(len(tokens))
        self._clock.add("draft", self._lead_seconds)
        return tokens

    def cut(self) -> None:
        """Ends the draft after the token that is being drafted when the target's pass ends."""
        end, drafted = self._lead_seconds + self._target.pass_seconds, len(self._draft.tokens)
        length = next((length for length in range(1, drafted) if self._seconds(length) >= end), drafted)
        self._draft = replace(self._draft.part(0, length), stop_reason="pass ended") if length < drafted else self._draft

    def finish(self) -> Draft:
        self.seconds = self._seconds(len(self._draft.tokens))
        waiting = max(0.0, self.seconds - self._lead_seconds - self._target.pass_seconds)
        self._clock.add("draft", waiting + self._clock.costs.synchronisation_overhead)
        return self._draft

    def _seconds(self, length: int) -> float:
        return self._clock.draft_seconds(length, self.policy, self._context)


class _Models(NamedTuple):
    """The models on one prompt, as runners that keep their outputs, in the setup of a run.

    `prefill_seconds` is the time of the drafter's pass over the prompt. `drawn` runs the same model as the setup's `draft`, None
    in greedy decoding.
    """

    setup: Setup
    prefill_seconds: float = 0.0
    drawn: DrawnRunner | None = None


class Simulator:
    """Simulates runs on the prompts of `references` (the target's outputs), with measured `costs` of rounds by kind.

    Those of chains hold for all their settings. Rounds of trees, beams and several drafts are timed once for each
    shape (a method with its width, beams or drafts).
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
        self, name: str, given: Mapping[str, Any], numbers: Sequence[int] | None = None, *, perplexity: bool = False
    ) -> Figures:
        """Simulates the method `name` with the settings `given`, and returns one summary of all runs, with expected seconds.

        Runs on the prompts with these `numbers`, None for all. With `perplexity`, and for lossy methods, the summary has the
        perplexity of the output under the target at temperature 1. Raises SpecgenError if the method cannot run with this pair.
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
            if perplexity or not method.lossless:
                summary.add_log_likelihood(self.pair.log_likelihood(self.references[number].prompt_ids, ids))
        return summary

    def _costs_of(self, method: Method, settings: Settings) -> RoundCosts:
        """Returns the costs of the method's rounds with these settings; the first call for a shape measures them.

        The signals that the length policy reads are part of a shape's costs too.
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
        reference, clock, models = self.references[number], SimulatedClock(costs), self._models_of(method, number)
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
        """Returns the models on prompt number `number`, whose outputs are kept for all methods that need the same parts."""
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
        predictor = None if part is None else ExitAcceptancePredictor(memoised, part.predictor)
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
        drafting: Any = MemoisedRunner(draft, self._kept, joins=not method.head)
        drawn = None
        if not self._sampling.greedy:
            drawn = DrawnRunner(drafting, plain, reference, self._sampling, self._sampling.seed or 0)
        context, known = Context(reference.prompt_ids), reference.token_ids
        context.extend(known[:1])
        if not method.head and len(known) > 1 and room(draft, context) >= len(known):  # one pass instead of one for each token
            for runner in (drafting, memoised):
                runner.logits(context, known[1:-1])
        return _Models(replace(setup, draft=drafting), prefill_seconds, drawn)


def run_seed(number: int, seed: int) -> int:
    """Returns the seed of a run on prompt number `number`: each prompt has one of its own."""
    return derive_seed(seed, f"prompt {number}")


def _length(reference: ReferenceOutput) -> int:
    """Returns the length of the context (tokens) at which the costs of rounds on a reference's prompt are read."""
    return typical_length(len(reference.prompt_ids), reference.limit)
