"""Measures the time of rounds (one draft and its verification) by running real rounds with drafts of different lengths.

Passes of one model alone would be too fast: in a round, the two models evict each other from the processor's caches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from statistics import mean, median
from typing import TYPE_CHECKING, Any, cast

from specgen.base.errors import SpecgenError
from specgen.base.types import Round, SamplingParams
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.decoding.policy import Signals
from specgen.methods.length_sweep import WARM_UP, LengthSweep, RepeatDrafter
from specgen.methods.pearl_schedule import Parallel
from specgen.tune.request import Deadline

if TYPE_CHECKING:
    from collections.abc import Generator

    from specgen.decoding.drafting import Drafter
    from specgen.pair.pair import Pair
    from specgen.tune.recorded_drafts import ReferenceOutput

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)  # drafted tokens; the target's pass covers one more
_SWEEPS = (LENGTHS, (1, 2, 4, 8, 15), (1, 4, 12), (2, 8))  # draft lengths to time: fewer for a slower target
WINDOWS = (1, 2, 3, 4, 6, 8, 12)
SIGNALS: Signals = frozenset({"entropy", "prob"})
MOST_ROUNDS = 9  # rounds that are timed with each draft length
NEW_TOKENS = 96  # tokens that one run generates at most
PARALLEL_ROUNDS = 24  # rounds of PEARL that are timed in one run
SHORT_PROMPT = 48  # tokens of the shorter context
_TURNS = 2  # each kind of rounds is timed in this many turns
_LABELS = {"echo": "the target alone", "parallel": "pearl", "model": "with the draft", "exit": "with the exit layer"}


Samples = dict[Any, list[float]]  # measured seconds, by what was measured (such as a number of tokens)


def _medians(samples: Samples) -> dict[Any, float]:
    return {key: median(seconds) for key, seconds in sorted(samples.items())}


@dataclass(slots=True)
class _Timings:
    """The measured times of rounds after one prompt. All times are seconds."""

    prompt: list[int]
    drafting: Samples = field(
        default_factory=lambda: defaultdict(list)
    )  # by (levels of the draft, whether signals were computed)
    verification: Samples = field(default_factory=lambda: defaultdict(list))  # by the number of tokens of the target's pass
    context_lengths: list[int] = field(default_factory=list)
    parallel_rounds: list[tuple[int, int, float]] = field(default_factory=list)  # tokens drafted, tokens of the pass, seconds

    @property
    def context_length(self) -> int:
        return round(median(self.context_lengths))

    def add(self, round_: Round, levels: int, with_signals: bool, context_length: int) -> None:
        self.drafting[levels, with_signals].append(round_.drafting_seconds)
        self.verification[round_.pass_tokens].append(round_.verification_seconds)
        self.context_lengths.append(context_length)


def _cost_tables(timings: Sequence[_Timings]) -> tuple[CostTable, CostTable]:
    """Returns the cost of drafting without signals and the cost of verification, with a curve for each context length."""
    drafting, verification = {}, {}
    for measured in timings:
        without_signals = {tokens: seconds for (tokens, signals), seconds in _medians(measured.drafting).items() if not signals}
        drafting[measured.context_length] = Curve({0: 0.0} | without_signals)
        verification[measured.context_length] = Curve(_medians(measured.verification))
    return CostTable(drafting), CostTable(verification)


def _shares(timings: Sequence[_Timings], deadline: Deadline) -> Iterator[tuple[_Timings, Deadline]]:
    """Yields each prompt's timings with the deadline for measuring them: the remaining time is divided equally."""
    for position, taken in enumerate(timings):
        yield taken, deadline.share(1 / (len(timings) - position))


class RoundProbe:
    """Times rounds of `method` after each of `prompts` (token ids), with the draft `lengths` in turn.

    Every other round also computes `signals` (numbers about a drafted token, such as entropy), if there are any. `drafter`
    replaces the method's drafter (None: keeps it). `run` raises SpecgenError if the method cannot run with this pair or drafts
    nothing.
    """

    def __init__(
        self,
        pair: Pair,
        method: str,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        lengths: Sequence[int] = LENGTHS,
        signals: Signals = frozenset(),
        drafter: Drafter | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._pair, self._method, self._drafter = pair, method, drafter
        self._settings: dict[str, Any] = dict(settings or {})
        self._sampling = _without_end(sampling)
        self._timings = [_Timings(prompt) for prompt in prompts]
        self._sweep = LengthSweep(lengths, [frozenset(), signals] if signals else [frozenset()])

    def run(self, deadline: Deadline) -> None:
        for timings, own in _shares(self._timings, deadline):
            self._time(timings, own)

    def _time(self, timings: _Timings, deadline: Deadline) -> None:
        combinations, counted = len(self._sweep.combinations), 0
        while True:
            self._sweep.start_run()
            run = self._pair.run(self._pair.request(timings.prompt, self._method, self._sampling, **self._settings))
            run = replace(run, policy=self._sweep, drafter=self._drafter or run.drafter)
            rounds, before = run.rounds(), counted
            for position in range(NEW_TOKENS):
                with_signals = bool(self._sweep.signals)
                round_ = next(rounds, None) if run.remaining > self._sweep.longest else None
                if round_ is None:
                    break
                if position == WARM_UP - 1:
                    self._pair.capture_passes(len(timings.prompt), len(run.context) + NEW_TOKENS)
                if position >= WARM_UP and (self._drafter is not None or round_.draft.tokens):
                    timings.add(round_, max(self._sweep.levels, round_.draft.levels), with_signals, len(run.context))
                    counted += 1
                if counted >= combinations and (counted >= MOST_ROUNDS * combinations or deadline.left < 0):
                    return
            if counted == before:
                raise _drafts_nothing(self._method)

    @property
    def costs(self) -> RoundCosts:
        signal_costs = []
        for timings in self._timings:
            drafted = _medians(timings.drafting)
            signal_costs += [
                (seconds - drafted[levels, False]) / levels
                for (levels, with_signals), seconds in drafted.items()
                if with_signals and (levels, False) in drafted
            ]
        signal_cost = max(0.0, median(signal_costs)) if signal_costs else 0.0
        return RoundCosts(*_cost_tables(self._timings), signal_cost)


def _drafts_nothing(method: str) -> SpecgenError:
    return SpecgenError(f"{method} drafts nothing after these prompts", "Take others: --prompts FILE")


def _without_end(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, max_new_tokens=NEW_TOKENS, ignore_eos=True, stop=(), seed=0)


class WindowCycle:
    """Replaces PEARL's `Window` (the number of tokens drafted during a target pass) to time rounds with windows of many sizes.

    The size changes each round, so that a machine that is slow for a while slows all sizes alike. `size` is the largest of
    `sizes`. `drafted` is the last round's window, `pass_tokens` the number of tokens of its target pass.
    """

    lead, is_flexible = 0, False

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self.size = cycle(sizes), max(sizes)
        self.drafted = self.pass_tokens = 0

    def beside(self, width: int) -> int:
        self.drafted, self.pass_tokens = next(self._sizes), width
        return self.drafted


class ParallelProbe:
    """Times rounds of PEARL, in which both models run at the same time, after each of `prompts` (token ids).

    `run` raises SpecgenError if PEARL drafts nothing after one of them.
    """

    def __init__(self, pair: Pair, prompts: Sequence[list[int]], sampling: SamplingParams) -> None:
        self._pair, self._sampling = pair, _without_end(sampling)
        self._timings = [_Timings(prompt) for prompt in prompts]
        self._prefills: list[tuple[float, float]] = []  # seconds with the draft's prefill at the same time, and alone
        self._windows = WindowCycle(WINDOWS[::-1])

    def run(self, deadline: Deadline) -> None:
        for timings, own in _shares(self._timings, deadline):
            self._time(timings)
            if not timings.parallel_rounds:
                raise _drafts_nothing("pearl")
            while own.left >= 0:
                self._time(timings)

    def _time(self, timings: _Timings) -> None:
        plain = self._pair.run(self._pair.request(timings.prompt, "ar", self._sampling))
        self._pair.forget()
        prefill_alone = sum(next(plain.rounds()).seconds.values())
        windows = self._windows
        run = self._pair.run(self._pair.request(timings.prompt, "pearl", self._sampling, window=windows.size))
        self._pair.forget()
        assert isinstance(run.schedule, Parallel)
        drafter = run.schedule.drafter
        run = replace(run, schedule=replace(run.schedule, window=cast("Any", windows)))
        with closing(cast("Generator[Round, None, None]", run.rounds())) as rounds:
            for position, round_ in enumerate(islice(rounds, WARM_UP + PARALLEL_ROUNDS)):
                seconds = sum(round_.seconds.values())
                if position == 0:
                    self._prefills.append((seconds, prefill_alone))
                elif not round_.draft.tokens:  # the draft model has no room for this context
                    break
                elif position >= WARM_UP:
                    timings.drafting[windows.drafted, False].append(drafter.seconds)
                    timings.verification[windows.pass_tokens].append(round_.seconds["verify"])
                    timings.context_lengths.append(len(run.context))
                    timings.parallel_rounds.append((windows.drafted, windows.pass_tokens, seconds))
                if run.remaining < 2 * windows.size:  # the next draft could be shorter than its window
                    break

    @property
    def costs(self) -> RoundCosts:
        costs = RoundCosts(*_cost_tables(self._timings))
        return replace(costs, synchronisation_overhead=max(0.0, mean(self._overheads(costs))))

    def _overheads(self, costs: RoundCosts) -> Iterator[float]:
        """Yields for each round by how many seconds it was longer than its draft and its target pass usually are.

        A round should take the longer of the median draft time and the median pass time. The rest is for passing the draft on and
        for waiting when the draft or the pass is late. This is rare but long: the mean over rounds is used, not the median.
        """
        for timings in self._timings:
            length = timings.context_length
            for drafted, pass_tokens, seconds in timings.parallel_rounds:
                yield seconds - max(costs.draft_cost.at(drafted, length), costs.verification_cost.at(pass_tokens, length))

    @property
    def slowdown(self) -> float:
        """Time of the target's pass over the prompt while the draft model processes it too / time alone; at least 1."""
        return max(1.0, median(both / alone for both, alone in self._prefills))


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The measured costs of rounds, by kind.

    The kinds are `echo` (the target alone), `model` (with the draft model), `exit` (with the exit layer) and `parallel` (PEARL).
    `slowdown` is the factor by which PEARL's pass over the prompt takes longer than a pass of the target alone. `failures` has
    the reason for each kind that could not be timed.
    """

    costs: Mapping[str, RoundCosts]
    slowdown: float
    failures: Mapping[str, str]

    @property
    def description(self) -> str:
        target = self.costs["echo"].verification_cost
        length = min(target.curves)
        wider = ", ".join(f"{1e3 * target.at(tokens, length):.3g} for {tokens}" for tokens in (6, 16))
        return f"a target pass takes {1e3 * target.at(1, length):.3g} ms for 1 token, {wider}"


def measure_costs(
    pair: Pair,
    kinds: Sequence[str],
    references: Sequence[ReferenceOutput],
    sampling: SamplingParams,
    deadline: Deadline,
    announce: Callable[[str], None],
) -> MeasuredCosts:
    """Times rounds of each of `kinds` (see `MeasuredCosts`) until the deadline, after prompts taken from `references`.

    The kinds take turns, so that a machine that slows down affects all of them. Raises SpecgenError if the rounds of the target
    alone cannot be timed.
    """
    seconds = deadline.left / (len(kinds) * _TURNS)
    probes = _probes(pair, kinds, references, sampling, seconds / 2)
    failures: dict[str, str] = {}
    for position, kind in enumerate([*kinds] * _TURNS):
        if kind in failures or (position >= len(kinds) and deadline.left < 0):
            continue
        announce(f"timing rounds ({_LABELS[kind]})")
        try:
            probes[kind].run(Deadline.after(seconds, deadline.clock))
        except SpecgenError as error:
            if kind == "echo":
                raise
            failures[kind] = error.message
    timed = {kind: probe for kind, probe in probes.items() if kind not in failures}
    slowdown = next((probe.slowdown for probe in timed.values() if isinstance(probe, ParallelProbe)), 1.0)
    alone = probes["echo"].costs.verification_cost
    return MeasuredCosts({kind: _with_single_pass(probe.costs, alone) for kind, probe in timed.items()}, slowdown, failures)


def _with_single_pass(costs: RoundCosts, alone: CostTable) -> RoundCosts:
    """Returns the costs with the pass over one token, taken from those of the target `alone` if it was not timed.

    It is the pass of a round without a draft, which is rare or missing where another model drafts.
    """
    table = costs.verification_cost
    curves = {length: Curve({1: alone.at(1, length), **curve.points}) for length, curve in table.curves.items()}
    return replace(costs, verification_cost=CostTable(curves))


def _probes(
    pair: Pair, kinds: Sequence[str], references: Sequence[ReferenceOutput], sampling: SamplingParams, seconds: float
) -> dict[str, RoundProbe | ParallelProbe]:
    """Returns a probe for each kind of rounds, with as many draft lengths as it can time in `seconds` on all prompts."""
    prompts = _prompts(pair, references)
    token_seconds = sum(reference.seconds for reference in references) / sum(len(each.token_ids) for each in references)
    room = seconds / len(prompts)
    lengths = next((sweep for sweep in _SWEEPS if token_seconds * (4 * len(sweep) + sum(sweep)) < room), _SWEEPS[-1])
    exit_signals = frozenset({"predicted_acceptance"} if pair.parts.has_predictor() else ())
    given = (prompts, sampling)
    probes: dict[str, RoundProbe | ParallelProbe] = {
        "echo": RoundProbe(pair, "ar", *given, lengths=(0, *lengths), drafter=RepeatDrafter()),
        "model": RoundProbe(pair, "sd", *given, lengths=lengths, signals=SIGNALS),
        "exit": RoundProbe(pair, "eesd-fixed", *given, lengths=lengths, signals=exit_signals),
        "parallel": ParallelProbe(pair, *given),
    }
    return {kind: probes[kind] for kind in kinds}


def _prompts(pair: Pair, references: Sequence[ReferenceOutput]) -> list[list[int]]:
    """Returns one or two prompts (token ids) after which rounds are timed, so that costs are known at different context lengths.

    The first has at most `SHORT_PROMPT` tokens. The second is about as long as the longest prompt with its output; it is left out
    if it is not more than twice as long as the first. Neither fills more than half of a model's context.
    """
    prompts = sorted((reference.prompt_ids for reference in references), key=len)
    limits = [model.context_limit for model in (pair.target, pair.draft) if model is not None]
    longest = max(1, min(limits) // 2)
    all_tokens = [token for ids in prompts[::-1] for token in ids]
    short = prompts[0][: min(SHORT_PROMPT, longest)]
    long = all_tokens[: min(len(prompts[-1]) + len(references[0].token_ids), longest)]
    return [short, long] if len(long) > 2 * len(short) else [short]
