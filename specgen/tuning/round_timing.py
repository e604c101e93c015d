"""What rounds take here, measured where they happen: real rounds of this pair with drafts of every length in turn.

Passes timed one by one, each behind itself, would be too fast: in a round two models push each other out of the processor's
caches.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from statistics import mean, median
from typing import TYPE_CHECKING, Any, cast

from specgen.cost_model import CostTable, Curve, RoundCosts
from specgen.decoding.parallel import Parallel
from specgen.decoding.policies import DraftedToken, LengthPolicy, Signals
from specgen.errors import SpecgenError
from specgen.types import Context, Draft, Round, SamplingParams

if TYPE_CHECKING:
    from specgen.decoding.parallel import ParallelDrafter
    from specgen.pair import Pair

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)  # tokens of a draft; a target's pass is over one more
WINDOWS = (1, 2, 3, 4, 6, 8, 12)
LOOKING: Signals = frozenset({"entropy", "prob"})
MOST, WARM_UP = 9, 2  # rounds of each kind
ANSWER = 96  # tokens of a run
ROUNDS = 24  # of PEARL's in one run


class LengthSweep(LengthPolicy):
    """A length policy that goes through lengths in turn, and through looking at a token or not."""

    def __init__(self, lengths: Sequence[int], looks: Sequence[Signals]) -> None:
        self._turns = [(length, signals) for length in lengths for signals in looks]
        self._turn = 0
        self.reason = "ladder"

    @property
    def length(self) -> int:
        return self._turns[self._turn][0]

    @property
    def longest(self) -> int:
        return max(length for length, _ in self._turns)

    @property
    def signals(self) -> Signals:  # type: ignore[override]
        return self._turns[self._turn][1]

    def keep_drafting(self, token: DraftedToken) -> bool:
        return token.position < self.length

    def observe(self, drafted: int, accepted: int) -> None:
        self._turn = (self._turn + 1) % len(self._turns)

    def __len__(self) -> int:
        return len(self._turns)


class RepeatDrafter:
    """Drafts the last token again and again, in no time: what is timed is the target."""

    def propose(self, context: Context, policy: Any, limit: int) -> Draft:
        length = min(policy.length, limit)
        return Draft.chain([context.ids[-1]] * length)


@dataclass(slots=True)
class Samples:
    """Seconds by what they were taken for."""

    seconds: dict[Any, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, key: Any, seconds: float) -> None:
        self.seconds[key].append(seconds)

    def medians(self) -> dict[Any, float]:
        return {key: median(found) for key, found in sorted(self.seconds.items())}


@dataclass(slots=True)
class _Found:
    """What the rounds behind one prompt took."""

    drafting: Samples = field(default_factory=Samples)  # by levels, and whether they were looked at
    judging: Samples = field(default_factory=Samples)  # by the tokens of the pass
    lengths: list[int] = field(default_factory=list)  # of the context
    rounds: list[tuple[int, int, float]] = field(default_factory=list)  # PEARL's: tokens drafted and judged, seconds

    @property
    def length(self) -> int:
        return round(median(self.lengths))

    def add(self, round_: Round, looked: bool, context_length: int) -> None:
        self.drafting.add((round_.draft.levels, looked), round_.seconds["draft"])
        self.judging.add(len(round_.draft.tokens) + 1, sum(round_.seconds[phase] for phase in ("verify", "sample", "other")))
        self.lengths.append(context_length)


class RoundProbe:
    """Times rounds of `method` behind each of `prompts` (two lengths of context, say), as often as it is given time.

    `looks` is what is asked about each token, every other time. With `echo` nothing is asked of a draft.
    """

    def __init__(
        self,
        pair: Pair,
        method: str,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        lengths: Sequence[int] = LENGTHS,
        looks: Signals = LOOKING,
        echo: bool = False,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._pair, self._method, self._echo, self._settings = pair, method, echo, cast("dict[str, Any]", dict(settings or {}))
        self._sampling = _endless(sampling)
        self._behind = [(prompt, _Found()) for prompt in prompts]
        self._ladder = LengthSweep(lengths, [frozenset(), looks] if looks and not echo else [frozenset()])

    def run(self, seconds: float) -> None:
        """At least one round of each kind. Raises SpecgenError as planning does, and where nothing is drafted."""
        for prompt, found in self._behind:
            self._time(prompt, found, time.perf_counter() + seconds / len(self._behind))

    def _time(self, prompt: list[int], found: _Found, deadline: float) -> None:
        kinds, seen = len(self._ladder), 0
        while True:
            self._pair.prepare(prompt, self._method, self._sampling, **self._settings)
            plan = self._pair.plan(prompt, self._method, self._sampling, **self._settings)
            if self._echo:
                plan.run.drafter, plan.run.policy = RepeatDrafter(), self._ladder
            rounds, before = plan.run.rounds(), seen
            for position in range(ANSWER):
                if (
                    position == WARM_UP
                ):  # rounds that do not count take no turn: each length has its own, whatever the run's own rhythm
                    plan.run.policy = self._ladder
                looked = bool(self._ladder.signals)
                round_ = next(rounds, None) if plan.run.remaining > self._ladder.longest else None
                if round_ is None:
                    break
                if position >= WARM_UP and (self._echo or round_.draft.tokens):
                    found.add(round_, looked, len(plan.run.context))
                    seen += 1
                if seen >= kinds and (seen >= MOST * kinds or time.perf_counter() > deadline):
                    return
            if seen == before:
                raise SpecgenError(f"{self._method} drafts nothing behind the prompts", "Take others: --prompts FILE")

    @property
    def costs(self) -> RoundCosts:
        drafting, judging = {}, {}
        looking: list[float] = []
        for _, found in self._behind:
            length = found.length
            drafted = found.drafting.medians()
            drafting[length] = Curve({0: 0.0} | {levels: taken for (levels, looked), taken in drafted.items() if not looked})
            judging[length] = Curve(found.judging.medians())
            looking += [
                (taken - drafted[levels, False]) / levels
                for (levels, looked), taken in drafted.items()
                if looked and (levels, False) in drafted
            ]
        return RoundCosts(CostTable(drafting), CostTable(judging), max(0.0, median(looking)) if looking else 0.0)


def _endless(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, max_new_tokens=ANSWER, ignore_eos=True, stop=(), seed=0)


class _Seen:
    """Stands before a session or a drafter of PEARL's, and remembers how much the last call was about."""

    def __init__(self, target: Any, drafter: ParallelDrafter) -> None:
        self._target, self._drafter = target, drafter
        self.width = self.drafted = 0
        self.policy = drafter.policy
        self.device = target.device

    def logits(self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None) -> Any:
        self.width = len(draft) + 1
        return self._target.logits(context, draft, parents)

    def prefill(self, context: Context) -> None:
        self._drafter.prefill(context)

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        self._drafter.start(context, unverified, limit)

    def finish(self) -> Draft:
        draft = self._drafter.finish()
        self.drafted = len(draft.tokens)
        return draft

    @property
    def seconds(self) -> float:
        return self._drafter.seconds

    def propose(self, context: Context, policy: Any, limit: int) -> Draft:
        return self._drafter.propose(context, policy, limit)

    def close(self) -> None:
        self._drafter.close()


class _Turns:
    """In a window's place: windows in turn, one a round, so that a machine that slows down for a while slows them all."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self.size = cycle(sizes), max(sizes)

    def beside(self, width: int) -> int:
        return next(self._sizes)


class ParallelProbe:
    """The same for PEARL, both models at work at once."""

    def __init__(self, pair: Pair, prompts: Sequence[list[int]], sampling: SamplingParams) -> None:
        self._pair, self._sampling = pair, _endless(sampling)
        self._behind = [(prompt, _Found()) for prompt in prompts]
        self._prefills: list[tuple[float, float]] = []
        self._turns = _Turns(WINDOWS[::-1])

    def run(self, seconds: float) -> None:
        """At least a few rounds behind each prompt."""
        for prompt, found in self._behind:
            deadline = time.perf_counter() + seconds / len(self._behind)
            while True:
                self._time(prompt, found)
                if time.perf_counter() > deadline:
                    break

    def _time(self, prompt: list[int], found: _Found) -> None:
        alone = self._pair.plan(prompt, "ar", self._sampling)
        self._pair.forget()
        first = next(alone.run.rounds())
        plan = self._pair.plan(prompt, "pearl", self._sampling, window=self._turns.size)
        self._pair.forget()
        schedule = plan.run.schedule
        assert isinstance(schedule, Parallel)
        seen = _Seen(plan.run.target, schedule.drafter)
        plan.run.target, plan.run.drafter = cast("Any", seen), seen
        plan.run.schedule = replace(schedule, drafter=cast("ParallelDrafter", seen), window=cast("Any", self._turns))
        with closing(cast("Generator[Round, None, None]", plan.run.rounds())) as rounds:
            for position, round_ in enumerate(islice(rounds, WARM_UP + ROUNDS)):
                taken = sum(round_.seconds.values())
                if not position:
                    self._prefills.append((taken, sum(first.seconds.values())))
                elif position >= WARM_UP and seen.drafted:
                    found.drafting.add((seen.drafted, False), seen.seconds)
                    found.judging.add(seen.width, round_.seconds["verify"])
                    found.lengths.append(len(plan.run.context))
                    found.rounds.append((seen.drafted, seen.width, taken))
                seen.drafted = 0

    @property
    def costs(self) -> RoundCosts:
        drafting, judging = {}, {}
        for _, found in self._behind:
            length = found.length
            drafting[length] = Curve({0: 0.0} | {drafted: taken for (drafted, _), taken in found.drafting.medians().items()})
            judging[length] = Curve(found.judging.medians())
        costs = RoundCosts(CostTable(drafting), CostTable(judging), 0.0)
        return replace(costs, synchronisation_overhead=max(0.0, mean(self._beyond(costs))))

    def _beyond(self, costs: RoundCosts) -> Iterator[float]:
        """Seconds that rounds took beyond the longer of what their draft and their pass usually take: handing over, and waiting
        for whichever came late. A late one is rare and long, so what counts is the mean."""
        for _, found in self._behind:
            length = found.length
            for drafted, judged, taken in found.rounds:
                yield taken - max(costs.draft_cost.at(drafted, length), costs.verification_cost.at(judged, length))

    @property
    def slowdown(self) -> float:
        """How many times as long the prompt's pass takes while the draft reads it too."""
        return max(1.0, median(both / alone for both, alone in self._prefills))
