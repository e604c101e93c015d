"""Simulates runs of a method on recorded drafts: no model is run, and a clock adds up the measured costs of passes.

The method's real schedule, length policy and verification rule are used. The rounds of a simulated run have the tokens that a
real run would have, and the seconds that it is expected to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from specgen import methods
from specgen.base.types import PHASES, Context, Draft, Verdict
from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.decoding.costs.pearl_window import ParallelCosts, Window, costs_of_rounds
from specgen.decoding.costs.round_costs import RoundCosts
from specgen.decoding.drafting import Setup, derive_seed
from specgen.decoding.policy import DraftedToken, extend_draft
from specgen.decoding.run import Run, sequential
from specgen.decoding.verification import match_path
from specgen.engine.forward_pass import depths
from specgen.engine.inference_mode import inference
from specgen.methods import is_random, runs
from specgen.methods.adaptive import Adaptive, AdaptiveInputs, HybridDrafter
from specgen.methods.learned_drafting import Learned
from specgen.methods.lookup import PromptLookupDrafter
from specgen.methods.pearl_schedule import Parallel
from specgen.pair.figures import Summary
from specgen.pair.request import typical_length

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.decoding.policy import LengthPolicy
    from specgen.decoding.run import Schedule
    from specgen.methods.method import Method
    from specgen.tune.recorded_drafts import RecordedDrafts, ReferenceOutput

RANDOM_RUNS = 3  # runs on each prompt with a length policy that draws random numbers
_NO_TOKEN = 1 << 40  # stands for the target's token after the end of its output; no drafted token has this id


class SimulatedClock:
    """Replaces `decoding.run.Clock`: no time is measured, the simulated drafter and target add their expected seconds."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._phases = dict.fromkeys(PHASES, 0.0)

    def add(self, phase: str, seconds: float) -> None:
        self._phases[phase] += seconds

    def lap(self, phase: str, *, on_device: bool = False) -> None:
        """Does nothing: time advances by `add` only."""

    def move(self, seconds: float, source: str, phase: str) -> None:
        """Does nothing: the expected seconds of drafting include the length policy's."""

    def seconds(self) -> dict[str, float]:
        return self._phases


@dataclass(frozen=True, slots=True)
class _SimulatedOutput:
    """Replaces the target's logits in a simulation.

    `generated` is the number of tokens generated before the pass; `parents` has the index of each drafted node's parent.
    """

    generated: int
    parents: Sequence[int]


class SimulatedTarget:
    """Replaces the target: runs no model, and adds the measured cost of each pass to the simulated clock.

    `prefill_seconds` is the cost of the pass over the prompt. `SimulatedVerifier` reads the output.
    """

    def __init__(self, costs: RoundCosts, clock: SimulatedClock, prefill_seconds: float) -> None:
        self._costs, self._clock, self._prefill_seconds = costs, clock, prefill_seconds
        self.pass_seconds = 0.0  # seconds of the last pass
        self.device = torch.device("cpu")  # nothing waits for it

    def logits(self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] = (), *, start: int = 0) -> Any:
        generated = len(context) - context.prompt_length
        if generated == 0:
            self._clock.add("prefill", self._prefill_seconds)
        else:
            self.pass_seconds = self._costs.verification_cost.at(len(draft) + 1, len(context))
            self._clock.add("verify", self.pass_seconds)
        return _SimulatedOutput(generated, parents)


class SimulatedVerifier:
    """Accepts drafted tokens as long as they equal the tokens of the reference output (the target's own output).

    In greedy decoding this is the real rule. For sampling, acceptance was already drawn when the drafts were recorded: a rejected
    token was recorded as one that differs from the output.
    """

    def __init__(self, reference: ReferenceOutput) -> None:
        self._token_ids = reference.token_ids

    def verify(self, draft: Draft, rows: Any) -> Verdict:
        output: _SimulatedOutput = rows
        choices = [self._token(output.generated)]
        choices += [self._token(output.generated + depth + 1) for depth in depths(output.parents)]
        return match_path(draft, choices.__getitem__, len(choices))

    def _token(self, position: int) -> int:
        return self._token_ids[position] if position < len(self._token_ids) else _NO_TOKEN


class SimulatedDrafter:
    """Drafts the tokens that were recorded at a position, until the length policy stops, and adds their measured cost."""

    def __init__(self, recorded: RecordedDrafts, costs: RoundCosts, clock: SimulatedClock) -> None:
        self._recorded, self._costs, self._clock = recorded, costs, clock
        self._prefill_seconds = recorded.prefill_seconds

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        draft = self.draft(context, policy, limit)
        if draft.tokens:
            self._clock.add("draft", self._prefill_seconds + self.cost(len(draft.tokens), policy, context))
            self._prefill_seconds = 0.0
        return draft

    def draft(self, context: Context, policy: LengthPolicy, limit: int, unverified: int = 0) -> Draft:
        """Returns the recorded draft after the context, as long as the policy makes it and at most `limit` tokens.

        `unverified` is the number of drafted, not yet verified tokens after the context; the draft continues after them (PEARL).
        """
        rollout = self._recorded.rollouts[len(context) - context.prompt_length]
        tokens: list[int] = []

        def extend(position: int) -> DraftedToken | str:
            index = unverified + position - 1
            drafted = rollout[min(index, len(rollout) - 1)]
            tokens.append(drafted.token if index < len(rollout) else _NO_TOKEN)  # a rollout ends after a rejected token
            return "eos" if drafted.token in self._recorded.reference.eos_ids else DraftedToken(position, drafted.signals)

        reason = extend_draft(policy, limit, extend, unverified=unverified)
        return Draft.chain(tokens, stop_reason=reason)

    def cost(self, length: int, policy: LengthPolicy, context: Context) -> float:
        if not length:
            return 0.0
        return self._costs.draft_cost.at(length, len(context)) + (self._costs.signal_cost * length if policy.signals else 0.0)


class SimulatedParallelDrafter(SimulatedDrafter):
    """Replaces PEARL's drafter, using recorded drafts: drafting and the target's pass happen at the same time.

    A round takes as long as the longer of the two, plus the measured overhead. `seconds` is the cost of the last draft.
    """

    def __init__(
        self, recorded: RecordedDrafts, costs: RoundCosts, clock: SimulatedClock, policy: LengthPolicy, target: SimulatedTarget
    ) -> None:
        super().__init__(recorded, costs, clock)
        self.policy, self._target, self.seconds = policy, target, 0.0

    def prefill(self, context: Context) -> None:
        """Does nothing: the time that `SimulatedTarget` adds for the prompt includes the draft model's pass over it."""

    def complete_prefill(self) -> None:
        """Does nothing, like `prefill`."""

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        self._draft = self.draft(context, self.policy, limit, len(unverified))
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
        self._clock.add("draft", waiting + self._costs.synchronisation_overhead)
        return self._draft

    def _seconds(self, length: int) -> float:
        return self.cost(length, self.policy, self._context)

    def close(self) -> None:
        """Does nothing: no draft is in progress."""


@dataclass(frozen=True, slots=True)
class PairMeasurements:
    """The measurements of a pair that simulations use.

    `references` has the target's own output for each prompt. `drafts` has, for each drafter (`model` or `exit`), what it drafts
    at each position of these outputs. `costs` has the costs of a round by kind: `echo` (the target alone), `model` (the draft
    model), `exit` (the exit layer), `parallel` (PEARL). In PEARL the pass over the prompt takes `slowdown` times as long, because
    the draft model processes the prompt at the same time; `flexible_window` says whether its drafts end with the target's pass
    where the window is `auto`. `parallel_costs` has how far both models' passes overlap, None if one thread does not run both.
    `learned` is what the length policy `adaptive` has learned in its last simulation, by drafter.
    """

    references: Sequence[ReferenceOutput]
    drafts: Mapping[str, Sequence[RecordedDrafts]]
    costs: Mapping[str, RoundCosts]
    slowdown: float = 1.0
    has_predictor: bool = False  # whether the exit layer has a predictor of acceptance
    flexible_window: bool = False
    temperature: float = 0.0  # with which the references were decoded
    parallel_costs: ParallelCosts | None = None
    learned: dict[str, Learned] = field(default_factory=dict)


@inference
def simulate(measurements: PairMeasurements, name: str, given: Mapping[str, object]) -> Summary:
    """Simulates the method `name` with the settings `given` on all prompts, and returns one summary with expected seconds.

    A length policy that draws random numbers is run `RANDOM_RUNS` times on each prompt, with other numbers each time.
    """
    method = methods.find(name)
    settings = methods.resolve(method, given, has_predictor=measurements.has_predictor)
    summary = Summary(name)
    if settings.policy == Adaptive.name:
        measurements.learned.pop(method.drafts, None)
    for repeat in range(RANDOM_RUNS if is_random(settings) else 1):
        for number in range(len(measurements.references)):
            for round_ in _run(measurements, method, settings, number, run_seed(number, repeat)).rounds():
                summary.add(round_)
    return summary


def run_seed(number: int, repeat: int) -> int:
    """Returns the seed of a simulated run: each prompt (its number) and repeat has one of its own."""
    return derive_seed(repeat, f"prompt {number}")


def _run(measurements: PairMeasurements, method: Method, settings: Settings, number: int, seed: int) -> Run:
    reference, costs, clock = measurements.references[number], measurements.costs[method.cost_kind], SimulatedClock()
    adaptive = _adaptive_inputs(measurements, method, reference) if settings.policy == Adaptive.name else None
    policy = runs.make_policy(settings, seed, adaptive)
    parallel = method.is_parallel
    target = SimulatedTarget(costs, clock, reference.prefill_seconds * (measurements.slowdown if parallel else 1.0))
    schedule: Schedule = sequential
    drafter: Any
    if parallel:
        drafter = SimulatedParallelDrafter(measurements.drafts[method.drafts][number], costs, clock, policy, target)
        pre_verify, post_verify = (bool(settings.values[name]) for name in ("pre_verify", "post_verify"))
        schedule = Parallel(drafter, _window(measurements, settings, reference), pre_verify, post_verify)
    elif not method.runs_model:
        drafter = runs.make_drafter(method, settings, Setup(None, eos_ids=reference.eos_ids))
    else:
        drafter = SimulatedDrafter(measurements.drafts[method.drafts][number], costs, clock)
        if settings.values.get("lookup"):
            drafter = HybridDrafter(PromptLookupDrafter(int(settings.values["ngram"]), reference.eos_ids), drafter)
    return make_run(reference, target, drafter, policy, SimulatedVerifier(reference), clock, schedule)


def _adaptive_inputs(measurements: PairMeasurements, method: Method, reference: ReferenceOutput) -> AdaptiveInputs:
    """Returns what the length policy `adaptive` decides by. It keeps what it learns from prompt to prompt, as in real runs."""
    length = typical_length(len(reference.prompt_ids), reference.limit)
    costs = DraftingCosts.of_rounds(measurements.costs[method.cost_kind], length)
    prior = Learned.prior(costs, has_model=method.runs_model)
    learned = measurements.learned.setdefault(method.drafts, prior)
    passes = measurements.parallel_costs if method.is_parallel else None
    slowdown = 0.0 if passes is None else passes.added_by_token / passes.single_pass
    return AdaptiveInputs(costs, learned, in_parallel=method.is_parallel, slowdown=slowdown)


def _window(measurements: PairMeasurements, settings: Settings, reference: ReferenceOutput) -> Window:
    """Returns PEARL's window on the prompt of a reference output: where it is `auto`, by the rule that a real run follows."""
    given = settings.values["window"]
    if given != "auto":
        return Window(int(given), int(given))
    length = typical_length(len(reference.prompt_ids), reference.limit)
    costs = costs_of_rounds(measurements.costs["parallel"], length)
    if (passes := measurements.parallel_costs) is not None:
        costs = costs.with_overlap(passes.overlap, passes.draft_alone, passes.target_alone)
    return costs.run_window(is_flexible=measurements.flexible_window)


def make_run(
    reference: ReferenceOutput, target: Any, drafter: Any, policy: LengthPolicy, verifier: Any, clock: Any, schedule: Schedule
) -> Run:
    """Returns a run of the given (simulated) parts on the prompt of a reference output.

    It has the same limit of new tokens and the same end-of-sequence tokens as the reference output.
    """
    return Run(
        context=Context(reference.prompt_ids),
        target=target,
        drafter=drafter,
        policy=policy,
        verifier=verifier,
        schedule=schedule,
        limit=reference.limit,
        eos_ids=reference.eos_ids,
        stop_texts=None,
        clock=clock,
    )
