"""What a tuning is asked for, the settings that it tries, and its result. Imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from specgen.base.errors import SpecgenError
from specgen.base.settings import Value, written
from specgen.base.types import SamplingParams, TuningVerdict
from specgen.decoding.costs import SpeedupModel
from specgen.methods import DEFAULT_METHOD, METHODS, distance_from_defaults, tuned_grids
from specgen.methods.base import Grid

if TYPE_CHECKING:
    from specgen.compare.prompts import ListedPrompt
    from specgen.pair.pair import Pair

GivenSettings = Mapping[str, Value]  # settings by name; a setting that is missing has its default
PLAIN = "ar"
AS_FAST = 0.97  # settings with at least this share of the best expected speed count as equally fast
# an expected speed that is so many times the best measured one is worth a real run
EXPECTED_GAIN = 1.1
# tokens that a method has to generate in real runs before its speed decides anything
LEAST_EVIDENCE = 40
SHORTLIST_SIZE = 3  # methods that are really run, plain decoding not counted
# methods with less than this share of the best expected speed are not really run
SHORTLIST_SPEED = 0.75
# the factor by which PEARL's expected speeds were wrong: two processes share cores well or badly
PARALLEL_MARGIN = 1.25
ClockFunction = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time limit: the moment when `clock`, which returns seconds, reads `at`.

    Tests pass a clock that counts how often it is read.
    """

    at: float
    clock: ClockFunction = time.perf_counter

    @classmethod
    def after(cls, seconds: float, clock: ClockFunction = time.perf_counter) -> Deadline:
        return cls(clock() + seconds, clock)

    @property
    def left(self) -> float:
        """Seconds until the deadline, negative after it."""
        return self.at - self.clock()

    def share(self, fraction: float) -> Deadline:
        """Returns an earlier deadline: the moment when `fraction` of the time that is left now has
        passed."""
        now = self.clock()
        return Deadline(now + fraction * (self.at - now), self.clock)


@dataclass(frozen=True, slots=True)
class Objective:
    """How the settings of lossy methods are chosen, by their output's perplexity under the target
    and by their speed.

    With `lowest_perplexity` the settings of the lowest perplexity are chosen (MTAD, Appendix F).
    Otherwise the fastest of those whose perplexity is at most `bound`, or `bound` times plain
    decoding's if `is_relative`.
    """

    lowest_perplexity: bool = False
    bound: float = 1.0
    is_relative: bool = True

    @classmethod
    def parse(cls, objective: str, max_perplexity: str | None) -> Objective:
        """Reads the options `--objective` and `--max-perplexity` (None: not given). Raises
        SpecgenError if one is wrong."""
        if objective not in ("speed", "perplexity"):
            raise SpecgenError(f"--objective is {objective!r}", "It has to be speed or perplexity")
        if max_perplexity is None:
            return cls(objective == "perplexity")
        if objective == "perplexity":
            hint = "It bounds the perplexity where --objective is speed"
            raise SpecgenError(
                "--max-perplexity cannot be combined with --objective perplexity", hint
            )
        number = max_perplexity.strip().removesuffix("%")
        is_relative = number != max_perplexity.strip()
        try:
            bound = float(number) / (100 if is_relative else 1)
        except ValueError:
            bound = math.nan
        if not (0 < bound < math.inf if is_relative else 1 < bound < 100):
            hint = (
                "Give a number between 1 and 100, or a percentage of plain decoding's such as 105%"
            )
            raise SpecgenError(f"--max-perplexity is {max_perplexity!r}", hint)
        return cls(bound=bound, is_relative=is_relative)

    def limit(self, plain_perplexity: float) -> float:
        """Returns the largest perplexity that a lossy method's output may have, given that of plain
        decoding's output.

        It is infinite if the objective is the lowest perplexity.
        """
        if self.lowest_perplexity:
            return math.inf
        return self.bound * plain_perplexity if self.is_relative else self.bound


BY_SPEED = Objective()


@dataclass(frozen=True, slots=True)
class TuningRequest:
    """What to tune, on which prompts and until when.

    `names` are the methods, None for all. `chat` puts each prompt into the model's chat template.
    `objective` says how the settings of lossy methods are chosen.
    """

    prompts: Sequence[ListedPrompt]
    sampling: SamplingParams
    deadline: Deadline
    names: Sequence[str] | None = None
    chat: bool = False
    objective: Objective = BY_SPEED


class TuningObserver(Protocol):
    """Receives a text when a step begins (`doing`) and when it ends (`done`). It is not called
    while something is timed."""

    def doing(self, what: str) -> None: ...

    def done(self, what: str) -> None: ...


def is_simple(name: str) -> bool:
    """Whether the method's drafts are chains of one drafter: drafts of the same length cost the
    same for all with one `cost_kind`, so one timing serves all."""
    return METHODS[name].tuning.recorded


def is_searched(name: str) -> bool:
    """Whether the method's rounds are timed for each shape of a tree, of several drafts or of
    beams."""
    tuning = METHODS[name].tuning
    return not tuning.recorded and tuning.grids != ()


def grid(name: str) -> list[GivenSettings]:
    """Returns all combinations of settings that tuning tries for the method `name`, in the order in
    which it tries them.

    First come the defaults, then what differs from them in one setting, then the rest in random
    order: a search that runs out of time has then tried some from the whole range.
    """
    method = METHODS[name]
    every = combinations(tuned_grids(method))
    Random(0).shuffle(every)
    return sorted(every, key=lambda settings: min(2, distance_from_defaults(method, settings)))


def combinations(grids: Sequence[Grid]) -> list[GivenSettings]:
    settings: list[GivenSettings] = []
    for values in grids:
        for chosen in product(*values.values()):
            settings.append(dict(zip(values, chosen, strict=True)))
    return settings


class Evidence(IntEnum):
    """What a candidate's speed rests on, from the weakest evidence to the strongest."""

    SIMULATION = 0
    ONE_PROMPT = 1
    SEVERAL_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method with settings and its speed in tokens per second.

    `predicted` is the speed expected from a simulation, `measured` the speed on the real models.
    `speedup` is measured against plain decoding on the same prompts, with the 95 % interval `low`
    to `high`; one prompt gives no interval (see `evidence`). `plain` is plain decoding's speed in
    the same turns, on the same `prompts` (their number): `speedup` is `measured` divided by it.
    `tokens` is the number of tokens that the method generated in them, `draft_length` the mean
    length of its drafts. All these but `predicted` are None if the method was not run on the real
    models; `draft_length` also if nothing was drafted. `perplexity` is
    that of a lossy method's output under the target; if there are lossy methods, plain decoding has
    one too. Otherwise it is None.
    """

    name: str
    settings: GivenSettings
    predicted: float
    measured: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    perplexity: float | None = None
    plain: float | None = None
    prompts: int | None = None
    tokens: int | None = None
    draft_length: float | None = None

    @property
    def lossless(self) -> bool:
        return METHODS[self.name].lossless

    @property
    def written(self) -> str:
        return written(self.name, self.settings)

    @property
    def evidence(self) -> Evidence:
        """What the speed rests on: real runs on several prompts or on one, or else a simulation.
        Several prompts with fewer than `LEAST_EVIDENCE` tokens in all count as one."""
        if self.measured is None:
            return Evidence.SIMULATION
        is_short = self.tokens is not None and self.tokens < LEAST_EVIDENCE
        return Evidence.ONE_PROMPT if self.low is None or is_short else Evidence.SEVERAL_PROMPTS

    @property
    def rank(self) -> tuple[Evidence, float]:
        """A sort key: the best candidate has the largest one.

        Stronger evidence goes before speed. The speed of those that ran on several prompts is the
        lower end of their speedup's interval: a method that is fast on some prompts and slow on
        others is no safe choice for new ones.
        """
        speed = {
            Evidence.SIMULATION: self.predicted,
            Evidence.ONE_PROMPT: self.speedup,
            Evidence.SEVERAL_PROMPTS: self.low,
        }
        return self.evidence, speed[self.evidence] or 0.0

    @property
    def is_proven_faster(self) -> bool:
        """Whether it was faster than plain decoding on several prompts, by its speedup's whole
        interval."""
        return self.evidence is Evidence.SEVERAL_PROMPTS and (self.low or 0.0) > 1

    @property
    def was_slower(self) -> bool:
        """Whether it was slower than plain decoding on several prompts taken together."""
        return self.evidence is Evidence.SEVERAL_PROMPTS and (self.speedup or 0.0) < 1


@dataclass(frozen=True, slots=True)
class TuningOutcome:
    """The result of a tuning.

    `methods` has the best settings of each method, plain decoding included, sorted by expected
    speed, fastest first. `left_out` gives the reason for each method that was not tuned. `named`
    are the methods that the user named, None for all: no other one can be chosen, but for plain
    decoding. `pair` has the models that were chosen, `draft_dtype` (`int8`, `int4`) is what the
    draft's weights were rounded to because that was faster, None if they were not.

    What explains the speeds: `costs` has the seconds of a round (`RoundCosts.as_dict`), by what a
    round runs: `echo` (the target alone), `model` (the draft model), `exit` (the exit layer),
    `parallel` (PEARL). `speedup_model` has the times of single passes, None without a drafter.
    `acceptance_probability` is the mean probability that the target accepts a drafted token, given
    that it accepted all tokens before it; None if no drafts were recorded.

    `prompts` is the number of prompts, `real_runs` that of real runs, `simulated` that of simulated
    settings. `missing_seconds` estimates how much more time is needed for what was left out because
    time was short.
    """

    methods: Sequence[Candidate]
    sampling: SamplingParams
    prompts: int
    costs: Mapping[str, Any]
    speedup_model: SpeedupModel | None = None
    acceptance_probability: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    draft_dtype: str | None = None
    pair: Pair | None = None
    real_runs: int = 0
    simulated: int = 0
    missing_seconds: float = 0.0
    named: Sequence[str] | None = None

    @property
    def _speculative(self) -> list[Candidate]:
        """The methods that can be chosen, but for plain decoding."""
        return [
            method
            for method in self.methods
            if method.name != PLAIN and method.lossless and self._may_choose(method.name)
        ]

    def _may_choose(self, name: str) -> bool:
        return self.named is None or name in self.named

    @property
    def best(self) -> Candidate:
        """The best lossless method other than plain decoding (`Candidate.rank`); plain decoding if
        there is no such method."""
        plain = plain_of(self.methods)
        return max(self._speculative, key=lambda method: method.rank, default=plain)

    @property
    def default(self) -> Candidate:
        """The method that decodes where no profile names one; with plain decoding's speed if
        nothing is known about it."""
        speed = plain_of(self.methods).predicted
        for method in self.methods:
            if method.name == DEFAULT_METHOD:
                return method
        return Candidate(DEFAULT_METHOD, {}, speed)

    @property
    def promising(self) -> Candidate | None:
        """The fastest method that may well be faster than the best one, if more real runs confirm
        its speed. None if there is none.

        It ran on one prompt only and was faster there, or it was only simulated and is expected to
        be much faster (`EXPECTED_GAIN`). The best one's speed counts as plain decoding's if that is
        higher, or if the best one was not run.
        """
        best = self.best
        measured = 1.0
        if best.evidence is not Evidence.SIMULATION:
            measured = max(1.0, self.speedup_of(best))
        needed = {
            Evidence.SIMULATION: EXPECTED_GAIN * measured,
            Evidence.ONE_PROMPT: measured,
            Evidence.SEVERAL_PROMPTS: math.inf,
        }
        faster = [
            method
            for method in self._speculative
            if self.speedup_of(method) > needed[method.evidence]
        ]
        return max(faster, key=self.speedup_of, default=None)

    @property
    def verdict(self) -> TuningVerdict:
        """Whether the best speculative method is faster than plain decoding.

        `no time`: nothing was run on the real models. `pays`: the 95 % interval of the best one's
        measured speedup is above 1. `unconfirmed`: it is not, and another one may be faster
        (`promising`), or the best one ran on one prompt only. `unclear`: its measured speedup is at
        least 1, but the interval contains 1. `does not pay`: it is slower, or there is none.
        """
        best = self.best
        if all(method.evidence is Evidence.SIMULATION for method in self.methods):
            return "no time"
        if best.name == PLAIN:
            return "does not pay"
        if best.is_proven_faster:
            return "pays"
        if self.promising is not None or best.evidence is Evidence.ONE_PROMPT:
            return "unconfirmed"
        if best.evidence is Evidence.SIMULATION or best.was_slower:
            return "does not pay"
        return "unclear"

    @property
    def chosen(self) -> Candidate:
        """The method to decode with: the best one if it was proven to be faster than plain
        decoding, else the default.

        Plain decoding takes the default's place if the default was slower on several prompts and no
        other method may be faster, and if the user named other methods than the default.
        """
        if self.verdict == "pays":
            return self.best
        if not self._may_choose(DEFAULT_METHOD):
            return plain_of(self.methods)
        is_settled = self.verdict != "unconfirmed"
        return plain_of(self.methods) if is_settled and self.default.was_slower else self.default

    def speedup_of(self, method: Candidate) -> float:
        """Returns the measured speedup over plain decoding, or the expected speedup if the method
        was not measured."""
        if method.name == PLAIN:
            return 1.0
        return method.speedup or method.predicted / plain_of(self.methods).predicted


def plain_of(candidates: Sequence[Candidate]) -> Candidate:
    return next(candidate for candidate in candidates if candidate.name == PLAIN)


def nearest_to_default(tried: Sequence[Candidate]) -> Candidate:
    """Returns one of the candidates `tried`, which are all of one method: the best one, preferring
    default settings.

    Of the candidates with at least `AS_FAST` of the best expected speed, it has the fewest settings
    that differ from the defaults. A small advantage on these prompts may not hold on others.
    """
    best = max(candidate.predicted for candidate in tried)
    fast = [candidate for candidate in tried if candidate.predicted >= AS_FAST * best]

    def distance(candidate: Candidate) -> tuple[int, float]:
        method = METHODS[candidate.name]
        return distance_from_defaults(method, candidate.settings), -candidate.predicted

    return min(fast, key=distance)


def shortlist(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns up to `SHORTLIST_SIZE` candidates to run on the real models, the most promising
    first.

    They have at least `SHORTLIST_SPEED` of the best expected speed. For this choice PEARL's
    expected speed is multiplied by `PARALLEL_MARGIN`, because it is uncertain.
    """

    def possible(candidate: Candidate) -> float:
        factor = PARALLEL_MARGIN if METHODS[candidate.name].is_parallel else 1.0
        return factor * candidate.predicted

    best = max((candidate.predicted for candidate in candidates), default=0.0)
    promising = [
        candidate for candidate in candidates if possible(candidate) >= SHORTLIST_SPEED * best
    ]
    return sorted(promising, key=possible, reverse=True)[:SHORTLIST_SIZE]
