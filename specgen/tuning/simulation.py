"""A method's run over recorded behaviour: the real schedules, policies and drafters, with a tape where the models were.

The clock is told what each step costs here, so the rounds that come out carry the seconds that they are expected to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from specgen import factory, methods
from specgen.cost_model import RoundCosts, Window
from specgen.decoding.parallel import Parallel
from specgen.decoding.run import Run
from specgen.decoding.sequential import sequential
from specgen.decoding.verifiers import match_argmax_path
from specgen.engine.attention_masks import depths
from specgen.engine.inference_mode import inference
from specgen.traces.summary import Summary
from specgen.types import PHASES, Context, Draft, Verdict

if TYPE_CHECKING:
    from specgen.decoding.policies import LengthPolicy
    from specgen.decoding.run import Clock, Schedule
    from specgen.decoding.verifiers import Verifier
    from specgen.engine.model_runner import ModelRunner
    from specgen.methods import Method
    from specgen.settings import Settings
    from specgen.tuning.recorded_drafts import RecordedDrafts, ReferenceOutput

THROWS = 3
_BEYOND = 1 << 40  # stands for what the target would say behind the end of its answer: nothing drafted is like it


class SimulatedClock:
    """A run's clock whose seconds are added up, not measured."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._phases = dict.fromkeys(PHASES, 0.0)

    def add(self, phase: str, seconds: float) -> None:
        self._phases[phase] += seconds

    def lap(self, phase: str, *, synchronize: bool = False) -> None:
        """Time passes by being added."""

    def seconds(self) -> dict[str, float]:
        return self._phases


@dataclass(frozen=True, slots=True)
class _Place:
    """What stands for a target's rows: where they begin in the answer, and the parents of the drafted nodes."""

    first: int
    parents: Sequence[int]


class SimulatedTarget:
    """In the target's place: it knows its answer, and what a pass costs."""

    def __init__(self, costs: RoundCosts, meter: SimulatedClock, prefill: float) -> None:
        self._costs, self._meter, self._prefill = costs, meter, prefill
        self.beside = 0.0  # seconds of the last pass

    def logits(self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] = (), *, start: int = 0) -> Any:
        first = len(context) - context.prompt_length
        if first == 0:
            self._meter.add("prefill", self._prefill)
        else:
            self.beside = self._costs.verification_cost.at(len(draft) + 1, len(context))
            self._meter.add("verify", self.beside)
        return _Place(first, parents)


class SimulatedVerifier:
    """Accepts what the answer holds: the rule of greedy decoding, on fates that in sampling were drawn already."""

    lossless = True

    def __init__(self, answer: ReferenceOutput) -> None:
        self._answer = answer.token_ids

    def verify(self, draft: Draft, rows: Any) -> Verdict:
        position: _Place = rows
        choices = [self._said(position.first)]
        choices += [self._said(position.first + depth + 1) for depth in depths(position.parents)]
        return match_argmax_path(draft, choices)

    def _said(self, position: int) -> int:
        return self._answer[position] if position < len(self._answer) else _BEYOND


class SimulatedDrafter:
    """In a draft model's place: what it said then, for as long as the policy wants."""

    def __init__(self, tape: RecordedDrafts, costs: RoundCosts, meter: SimulatedClock) -> None:
        self._tape, self._costs, self._meter = tape, costs, meter
        self._prefill = tape.prefill

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        draft = self.draft(context, policy, limit)
        self._meter.add("draft", self._prefill + self.cost(draft, policy, context))
        self._prefill = 0.0
        return draft

    def draft(self, context: Context, policy: LengthPolicy, limit: int, unverified: int = 0) -> Draft:
        """`unverified` tokens precede the draft."""
        rollout = self._tape.rollouts[len(context) - context.prompt_length]
        tokens: list[int] = []

        def extend(position: int) -> DraftedToken | str:
            at = unverified + position - 1
            drafted = rollout[min(at, len(rollout) - 1)]
            tokens.append(drafted.token if at < len(rollout) else _BEYOND)  # after a recorded mistake: always rejected
            return "eos" if drafted.token in self._tape.answer.eos_ids else DraftedToken(position, drafted.signals)

        reason = extend_draft(policy, limit, extend)
        return Draft.chain(tokens, stop_reason=reason)

    def cost(self, draft: Draft, policy: LengthPolicy, context: Context) -> float:
        length = len(draft.tokens)
        return self._costs.draft_cost.at(length, len(context)) + (self._costs.signal_cost * length if policy.signals else 0.0)


class SimulatedParallelDrafter(SimulatedDrafter):
    """The same beside the target: a round lasts as long as the slower of both."""

    def __init__(
        self, tape: RecordedDrafts, costs: RoundCosts, meter: SimulatedClock, policy: LengthPolicy, target: SimulatedTarget
    ) -> None:
        super().__init__(tape, costs, meter)
        self.policy, self._target, self.seconds = policy, target, 0.0

    def prefill(self, context: Context) -> None:
        """The prompt's passes go on side by side too: `SimulatedTarget` is told how long that takes."""

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        self._made = self.draft(context, self.policy, limit, len(unverified))
        self.seconds = self.cost(self._made, self.policy, context)
        self._target.beside = 0.0

    def finish(self) -> Draft:
        self._meter.add("draft", max(0.0, self.seconds - self._target.beside) + (self._costs.synchronisation_overhead or 0.0))
        return self._made

    def close(self) -> None:
        """There is nothing to give up."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """All that was recorded of a pair: the target's answers; of each drafter (`model`, `exit`) a tape an answer; what rounds cost
    with each drafter (`echo` is no draft model at all, `parallel` PEARL), and how many times as long a prompt's pass takes with
    PEARL, whose draft reads it at the same time."""

    answers: Sequence[ReferenceOutput]
    tapes: Mapping[str, Sequence[RecordedDrafts]]
    costs: Mapping[str, RoundCosts]
    slowdown: float = 1.0


@inference
def simulate(behaviour: Behaviour, name: str, given: Mapping[str, object], *, has_predictor: bool = False) -> Summary:
    """The method's run along every answer, folded; its seconds are the expected ones. `given` are its settings.

    A policy that throws dice is run a few times.
    """
    method = methods.find(name)
    settings = methods.resolve(method, given, has_predictor=has_predictor)
    summary = Summary(name)
    throws = THROWS if is_random(settings) else 1
    for seed in range(throws):
        for number, answer in enumerate(behaviour.answers):
            for round_ in _run(behaviour, method, settings, number, answer, seed).rounds():
                summary.add(round_)
    return summary


def _run(behaviour: Behaviour, method: Method, settings: Settings, number: int, answer: ReferenceOutput, seed: int) -> Run:
    costs, meter = behaviour.costs[method.cost_kind], SimulatedClock()
    policy = factory.make_policy(settings, seed)
    parallel = method.schedule == "parallel"
    target = SimulatedTarget(costs, meter, answer.prefill * (behaviour.slowdown if parallel else 1.0))
    schedule: Schedule = sequential
    drafter: Any
    if parallel:
        drafter = SimulatedParallelDrafter(behaviour.tapes[method.drafter.name][number], costs, meter, policy, target)
        size = int(settings.values["window"])
        flags = (bool(settings.values[name]) for name in ("pre_verify", "post_verify"))
        schedule = Parallel(drafter, Window(size, size), *flags)
    elif method.drafter.source is DraftSource.NOTHING:
        drafter = method.drafter.make(DraftSetup(None, eos_ids=answer.eos_ids), settings)
    else:
        drafter = SimulatedDrafter(behaviour.tapes[method.drafter.name][number], costs, meter)
    return Run(
        context=Context(answer.prompt_ids),
        target=cast("ModelRunner", target),
        drafter=drafter,
        policy=policy,
        verifier=cast("Verifier", SimulatedVerifier(answer)),
        schedule=schedule,
        limit=answer.limit,
        eos_ids=answer.eos_ids,
        stop_texts=None,
        clock=cast("Clock", meter),
    )
