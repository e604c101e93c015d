"""What rounds take here, measured where they happen: real rounds of this pair with drafts of every length in turn.

Passes timed one by one, each behind itself, would be too fast: in a round two models push each other out of the processor's caches.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count, islice
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from specgen.decoding.parallel import Parallel
from specgen.decoding.policies import Feeds, Step
from specgen.errors import SpecgenError
from specgen.tuning.costs import Curve, RoundCosts, Surface
from specgen.types import Context, Draft, Round, SamplingParams

if TYPE_CHECKING:
    from specgen.decoding.parallel import ParallelDrafter
    from specgen.pair import Pair

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)  # tokens of a draft; a target's pass is over one more
WINDOWS = (1, 2, 3, 4, 6, 8, 12)
LOOKING: Feeds = frozenset({"entropy", "prob"})
MOST, FEWEST, WARM_UP = 9, 2, 2  # rounds of each kind
ANSWER = 96  # tokens of a run
ROUNDS = 12  # of PEARL's with one window


class Ladder:
    """A length policy that goes through lengths in turn, and through looking at a token or not."""

    def __init__(self, lengths: Sequence[int], looks: Sequence[Feeds]) -> None:
        self._turns = [(length, needs) for length in lengths for needs in looks]
        self._turn = 0
        self.reason = "ladder"

    @property
    def length(self) -> int:
        return self._turns[self._turn][0]

    @property
    def needs(self) -> Feeds:
        return self._turns[self._turn][1]

    def keep_drafting(self, step: Step) -> bool:
        return step.place < self.length

    def observe(self, drafted: int, accepted: int) -> None:
        self._turn = (self._turn + 1) % len(self._turns)

    def state(self) -> None:
        return None

    def __len__(self) -> int:
        return len(self._turns)


class Echo:
    """Drafts the last token again and again, in no time: what is timed is the target."""

    def propose(self, context: Context, policy: Any, limit: int) -> Draft:
        length = min(policy.length, limit)
        return Draft([context.ids[-1]] * length, range(-1, length - 1))


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

    def add(self, round_: Round, looked: bool, context_length: int) -> None:
        self.drafting.add((round_.draft.levels, looked), round_.seconds["draft"])
        self.judging.add(len(round_.draft.tokens) + 1, sum(round_.seconds[phase] for phase in ("verify", "sample", "other")))
        self.lengths.append(context_length)


def round_costs(
    pair: Pair,
    method: str,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    seconds: float,
    *,
    lengths: Sequence[int] = LENGTHS,
    looks: Feeds = LOOKING,
    echo: bool = False,
    **settings: object,
) -> RoundCosts:
    """Time rounds of `method` behind each of `prompts` (two lengths of context, say), for about so many seconds in all.

    `looks` is what is asked about each token, every other time. With `echo` nothing is asked of a draft. Raises SpecgenError as planning does.
    """
    drafting, judging = {}, {}
    looking: list[float] = []
    for prompt in prompts:
        ladder = Ladder(lengths, [frozenset(), looks] if looks and not echo else [frozenset()])
        found = _probe(pair, method, prompt, sampling, ladder, seconds / len(prompts), echo, settings)
        length = round(median(found.lengths))
        drafted = found.drafting.medians()
        drafting[length] = Curve({0: 0.0} | {levels: taken for (levels, looked), taken in drafted.items() if not looked})
        judging[length] = Curve(found.judging.medians())
        looking += [
            (taken - drafted[levels, False]) / levels
            for (levels, looked), taken in drafted.items()
            if looked and (levels, False) in drafted
        ]
    return RoundCosts(Surface(drafting), Surface(judging), max(0.0, median(looking)) if looking else 0.0)


def _probe(
    pair: Pair,
    method: str,
    prompt: list[int],
    sampling: SamplingParams,
    ladder: Ladder,
    seconds: float,
    echo: bool,
    settings: Mapping[str, object],
) -> _Found:
    """Runs of one prompt, again and again, until time is over or each kind of round was seen often enough."""
    found, deadline = _Found(), time.perf_counter() + seconds
    sampling = replace(sampling, max_new_tokens=ANSWER, ignore_eos=True, stop=(), seed=0)
    seen = 0
    while True:
        plan = pair.plan(prompt, method, sampling, **settings)
        plan.run.policy = ladder
        if echo:
            plan.run.drafter = Echo()
        rounds = plan.run.rounds()
        for place in range(ANSWER):
            looked = bool(ladder.needs)
            round_ = next(rounds, None)
            if round_ is None:
                break
            if place >= WARM_UP and (echo or round_.draft.tokens):
                found.add(round_, looked, len(plan.run.context))
                seen += 1
            if seen >= FEWEST * len(ladder) and (seen >= MOST * len(ladder) or time.perf_counter() > deadline):
                return found
        if not seen:
            raise SpecgenError(f"{method} drafts nothing behind this prompt", "Take other prompts: --prompts FILE")


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

    def start(self, context: Context, pending: Sequence[int], limit: int) -> None:
        self._drafter.start(context, pending, limit)

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


def parallel_costs(
    pair: Pair, prompts: Sequence[list[int]], sampling: SamplingParams, seconds: float
) -> tuple[RoundCosts, float]:
    """PEARL's rounds, both models at work at once, as `round_costs`; and how many times as long the prompt's pass takes then."""
    drafting, judging = {}, {}
    together: list[float] = []
    slower: list[float] = []
    sampling = replace(sampling, max_new_tokens=ANSWER, ignore_eos=True, stop=(), seed=0)
    for prompt in prompts:
        drafted, judged, lengths = Samples(), Samples(), []
        deadline = time.perf_counter() + seconds / len(prompts)
        for turn in count():
            for window in WINDOWS:
                plan = pair.plan(prompt, "pearl", sampling, window=window)
                pair.forget()
                schedule = plan.run.schedule
                assert isinstance(schedule, Parallel)
                seen = _Seen(plan.run.target, schedule.drafter)
                plan.run.target, plan.run.drafter = cast("Any", seen), seen
                plan.run.schedule = replace(schedule, drafter=seen)
                with closing(cast("Generator[Round, None, None]", plan.run.rounds())) as rounds:
                    for place, round_ in enumerate(islice(rounds, WARM_UP + ROUNDS)):
                        if not place:
                            slower.append(sum(round_.seconds.values()))
                        if place < WARM_UP or not seen.drafted:
                            continue
                        drafted.add(seen.drafted, seen.seconds)
                        judged.add(seen.width, round_.seconds["verify"])
                        lengths.append(len(plan.run.context))
                        longer = max(seen.seconds, round_.seconds["verify"])
                        together.append(sum(round_.seconds.values()) - longer)
                        seen.drafted = 0
                if turn and time.perf_counter() > deadline:
                    break
            if time.perf_counter() > deadline or turn >= MOST:
                break
        length = round(median(lengths))
        drafting[length] = Curve({0: 0.0} | drafted.medians())
        judging[length] = Curve(judged.medians())
    plan = pair.plan(prompts[-1], "ar", sampling)
    pair.forget()
    alone = sum(next(plan.run.rounds()).seconds.values())
    costs = RoundCosts(Surface(drafting), Surface(judging), 0.0, max(0.0, median(together)))
    return costs, median(slower[-len(slower) // len(prompts) :]) / alone
