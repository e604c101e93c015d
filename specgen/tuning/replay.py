"""A method's run over recorded behaviour: the real schedules, policies and drafters, with a tape where the models were.

The clock is told what each step costs here, so the rounds that come out carry the seconds that they are expected to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from specgen import assembly, methods
from specgen.bench.summary import Summary
from specgen.decoding.drafters import NoDrafter, PromptLookup
from specgen.decoding.parallel import Parallel, Window
from specgen.decoding.run import Run
from specgen.decoding.sequential import sequential
from specgen.decoding.verifiers import follow
from specgen.inference import inference
from specgen.models.masks import depths
from specgen.tuning.costs import RoundCosts
from specgen.types import PHASES, Context, Draft, Verdict

if TYPE_CHECKING:
    from specgen.decoding.policies import LengthPolicy
    from specgen.decoding.run import Clock, Schedule
    from specgen.decoding.verifiers import Verifier
    from specgen.methods import Method, Settings
    from specgen.models.session import Session
    from specgen.tuning.behaviour import Answer, Tape

THROWS = 3
_BEYOND = 1 << 40  # stands for what the target would say behind the end of its answer: nothing drafted is like it


class Meter:
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


class ReplayTarget:
    """In the target's place: it knows its answer, and what a pass costs."""

    def __init__(self, costs: RoundCosts, meter: Meter, prefill: float) -> None:
        self._costs, self._meter, self._prefill = costs, meter, prefill
        self.beside = 0.0  # seconds of the last pass

    def logits(self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] = (), *, start: int = 0) -> Any:
        first = len(context) - context.prompt_length
        if first == 0:
            self._meter.add("prefill", self._prefill)
        else:
            self.beside = self._costs.judging.at(len(draft) + 1, len(context))
            self._meter.add("verify", self.beside)
        return _Place(first, parents)


class ReplayVerifier:
    """Accepts what the answer holds: the rule of greedy decoding, on fates that in sampling were drawn already."""

    lossless = True

    def __init__(self, answer: Answer) -> None:
        self._answer = answer.token_ids

    def verify(self, draft: Draft, rows: Any) -> Verdict:
        place: _Place = rows
        choices = [self._said(place.first)]
        choices += [self._said(place.first + depth + 1) for depth in depths(place.parents)]
        return follow(draft, choices)

    def _said(self, place: int) -> int:
        return self._answer[place] if place < len(self._answer) else _BEYOND


class ReplayDrafter:
    """In a draft model's place: what it said then, for as long as the policy wants."""

    def __init__(self, tape: Tape, costs: RoundCosts, meter: Meter) -> None:
        self._tape, self._costs, self._meter = tape, costs, meter
        self._prefill = tape.prefill

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        draft = self.draft(context, policy, limit)
        self._meter.add("draft", self._prefill + self.cost(draft, policy, context))
        self._prefill = 0.0
        return draft

    def draft(self, context: Context, policy: LengthPolicy, limit: int, pending: int = 0) -> Draft:
        """`pending` tokens stand between the context and the draft."""
        rollout = self._tape.rollouts[len(context) - context.prompt_length]
        tokens: list[int] = []
        reason = "length"
        while len(tokens) < limit:
            place = pending + len(tokens)
            drafted = rollout[min(place, len(rollout) - 1)]
            tokens.append(drafted.token if place < len(rollout) else _BEYOND)  # behind what was recorded: all wrong anyway
            if drafted.token in self._tape.answer.eos_ids:
                reason = "eos"
                break
            step = drafted.step if drafted.step.place == len(tokens) else replace(drafted.step, place=len(tokens))
            if not policy.keep_drafting(step):
                reason = policy.reason
                break
        return Draft(tokens, range(-1, len(tokens) - 1), stop_reason=reason)

    def cost(self, draft: Draft, policy: LengthPolicy, context: Context) -> float:
        length = len(draft.tokens)
        return self._costs.drafting.at(length, len(context)) + (self._costs.looking * length if policy.needs else 0.0)


class ReplayParallel(ReplayDrafter):
    """The same beside the target: a round lasts as long as the slower of both."""

    def __init__(self, tape: Tape, costs: RoundCosts, meter: Meter, policy: LengthPolicy, target: ReplayTarget) -> None:
        super().__init__(tape, costs, meter)
        self.policy, self._target, self.seconds = policy, target, 0.0

    def prefill(self, context: Context) -> None:
        """The prompt's passes go on side by side too: `ReplayTarget` is told how long that takes."""

    def start(self, context: Context, pending: Sequence[int], limit: int) -> None:
        self._made = self.draft(context, self.policy, limit, len(pending))
        self.seconds = self.cost(self._made, self.policy, context)
        self._target.beside = 0.0

    def finish(self) -> Draft:
        self._meter.add("draft", max(0.0, self.seconds - self._target.beside) + (self._costs.together or 0.0))
        return self._made

    def close(self) -> None:
        """There is nothing to give up."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """All that was recorded of a pair: the target's answers; of each drafter (`model`, `exit`) a tape an answer; what rounds cost
    with each drafter (`echo` is no draft model at all, `parallel` PEARL), and how many times as long a prompt's pass takes with
    PEARL, whose draft reads it at the same time."""

    answers: Sequence[Answer]
    tapes: Mapping[str, Sequence[Tape]]
    costs: Mapping[str, RoundCosts]
    slower: float = 1.0


def cost_kind(name: str) -> str:
    method = methods.find(name)
    if method.schedule == "parallel":
        return "parallel"
    return "echo" if method.drafter in ("none", "lookup") else method.drafter


@inference
def replay(behaviour: Behaviour, name: str, given: Mapping[str, object], *, has_predictor: bool = False) -> Summary:
    """The method's run along every answer, folded; its seconds are the expected ones. `given` are its settings.

    A policy that throws dice is run a few times.
    """
    method = methods.find(name)
    settings = methods.resolve(method, given, has_predictor=has_predictor)
    summary = Summary(name)
    throws = THROWS if settings.policy is not None and methods.POLICIES[settings.policy].random else 1
    for seed in range(throws):
        for number, answer in enumerate(behaviour.answers):
            for round_ in _run(behaviour, method, settings, number, answer, seed).rounds():
                summary.add(round_)
    return summary


def _run(behaviour: Behaviour, method: Method, settings: Settings, number: int, answer: Answer, seed: int) -> Run:
    costs, meter = behaviour.costs[cost_kind(method.name)], Meter()
    policy = assembly.make_policy(settings, seed)
    parallel = method.schedule == "parallel"
    target = ReplayTarget(costs, meter, answer.prefill * (behaviour.slower if parallel else 1.0))
    schedule: Schedule = sequential
    drafter: Any
    if parallel:
        drafter = ReplayParallel(behaviour.tapes["model"][number], costs, meter, policy, target)
        size = int(settings.values["window"])
        flags = (bool(settings.values[name]) for name in ("pre_verify", "post_verify"))
        schedule = Parallel(drafter, Window(size, size), *flags)
    elif method.drafter == "lookup":
        drafter = PromptLookup(int(settings.values["ngram"]), answer.eos_ids)
    elif method.drafter == "none":
        drafter = NoDrafter()
    else:
        drafter = ReplayDrafter(behaviour.tapes[method.drafter][number], costs, meter)
    return Run(
        context=Context(answer.prompt_ids),
        target=cast("Session", target),
        drafter=drafter,
        policy=policy,
        verifier=cast("Verifier", ReplayVerifier(answer)),
        schedule=schedule,
        limit=answer.limit,
        eos_ids=answer.eos_ids,
        stop_texts=None,
        clock=cast("Clock", meter),
    )
