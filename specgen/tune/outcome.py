"""Candidates (methods with settings and speeds), their selection, and the result of a tuning. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specgen.base.settings import written
from specgen.base.types import SamplingParams
from specgen.decoding.costs.speedup import SpeedupModel
from specgen.methods import METHODS
from specgen.tune.candidates import GivenSettings, distance_from_defaults

Verdict = Literal["pays", "does not pay", "unclear", "unconfirmed"]
PLAIN = "ar"
AS_FAST = 0.97  # settings with at least this share of the best expected speed count as equally fast
EXPECTED_GAIN = 1.1  # expected speedup from which a method is chosen without a real run
SHORTLIST_SIZE = 3  # methods that are really run, plain decoding not counted
SHORTLIST_SPEED = 0.75  # methods with less than this share of the best expected speed are not really run
PARALLEL_MARGIN = 1.25  # expected speeds of PEARL were wrong by this factor: two processes share the cores well or badly


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method with settings and its speed in tokens per second.

    `predicted` is the speed expected from a simulation. `tried` is the number of settings from which these were selected.
    `measured` is the speed on the real models; `speedup` is measured against plain decoding on the same prompts, with the 95 %
    interval `low` to `high`. These four are None if the method was not run on the real models. `perplexity` is the perplexity of
    a lossy method's output under the target, and where there are such methods also of plain decoding's; otherwise None.
    """

    name: str
    settings: GivenSettings
    predicted: float
    tried: int = 1
    measured: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    perplexity: float | None = None

    @property
    def lossless(self) -> bool:
        return METHODS[self.name].lossless

    @property
    def written(self) -> str:
        return written(self.name, self.settings)


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun: `1 prompt`, `2 prompts`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def by_speed(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates sorted by expected speed, the fastest first."""
    return sorted(candidates, key=lambda candidate: -candidate.predicted)


@dataclass(frozen=True, slots=True)
class TuningOutcome:
    """The result of a tuning.

    `methods` has the best settings of each method, plain decoding included,
    sorted by expected speed, fastest first. `prompts` is the
    number of prompts. `costs` has the seconds of a round (`RoundCosts.as_dict`), by what a round runs: `echo` (the target alone),
    `model` (the draft model), `exit` (the exit layer), `parallel` (PEARL). `speedup_model` has the times of single passes, None
    without a drafter. `acceptance_probability` is the mean probability that the target accepts a drafted token, given that it
    accepted all tokens before it; None if no drafts were recorded. `left_out` gives the reason for each method that was not
    tuned.
    `draft_dtype` (`int8`) is what the draft's weights were rounded to because that was faster, None if they were not.
    """

    methods: Sequence[Candidate]
    sampling: SamplingParams
    prompts: int
    costs: Mapping[str, Any]
    speedup_model: SpeedupModel | None = None
    acceptance_probability: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    draft_dtype: str | None = None

    @property
    def plain(self) -> Candidate:
        return plain_of(self.methods)

    @property
    def best(self) -> Candidate:
        """The fastest lossless method other than plain decoding; plain decoding if there is no such method.

        Methods that ran on the real models go before those that were only simulated. They are compared by the lower end of the
        interval of their speedup: a method that is fast on some prompts and slow on others is no safe choice for new prompts.
        """
        others = [method for method in self.methods if method.name != PLAIN and method.lossless]
        measured = [method for method in others if method.measured is not None]
        if measured and all(method.low is not None for method in measured):
            return max(measured, key=lambda method: method.low or 0.0)
        return max(measured or others or [self.plain], key=lambda method: method.measured or method.predicted)

    @property
    def verdict(self) -> Verdict:
        """Whether the best speculative method is faster than plain decoding.

        `pays`: it is. `does not pay`: it is not. `unclear`: its measured speedup is at least 1, but the 95 % interval contains 1.
        `unconfirmed`: it was not run on the real models.
        """
        best = self.best
        if best.name == PLAIN:
            return "does not pay"
        if best.speedup is None:
            return "unconfirmed"
        if (best.low or best.speedup) > 1:
            return "pays"
        return "does not pay" if (best.high or best.speedup) < 1 or best.speedup < 1 else "unclear"

    @property
    def chosen(self) -> Candidate:
        """The method to decode with: the best speculative method or plain decoding.

        The speculative method is chosen if it was measured to be faster. If it was not measured, its expected speedup has to be
        larger than `EXPECTED_GAIN`.
        """
        expected = self.verdict == "unconfirmed" and self.speedup_of(self.best) > EXPECTED_GAIN
        return self.best if expected or self.verdict == "pays" else self.plain

    def speedup_of(self, method: Candidate) -> float:
        """Returns the measured speedup over plain decoding, or the expected speedup if the method was not measured."""
        return 1.0 if method.name == PLAIN else method.speedup or method.predicted / self.plain.predicted

    @property
    def break_even_acceptance(self) -> float | None:
        """The lowest acceptance rate with which drafts of one token beat plain decoding. None: no rate is, or no drafter."""
        return None if self.speedup_model is None else self.speedup_model.break_even_acceptance(1)

    @property
    def break_even_draft_cost(self) -> float | None:
        """The largest time of a draft pass, as a fraction of a target pass, with which drafting beats plain decoding.

        It holds for `acceptance_probability`. None: no draft pass is short enough, or there is no drafter.
        """
        model, probability = self.speedup_model, self.acceptance_probability
        return None if model is None or probability is None else model.break_even_draft_cost(probability)

    @property
    def relative_draft_cost(self) -> float | None:
        """The time of a draft pass as a fraction of the time of a target pass over one token; None without a drafter."""
        return None if self.speedup_model is None else self.speedup_model.relative_draft_cost


def plain_of(candidates: Sequence[Candidate]) -> Candidate:
    return next(candidate for candidate in candidates if candidate.name == PLAIN)


def nearest_to_default(tried: Sequence[Candidate]) -> Candidate:
    """Returns one of the candidates `tried`, which are all of one method: the best one, preferring default settings.

    Of the candidates with at least `AS_FAST` of the best expected speed, it has the fewest settings that differ from the
    defaults. A small advantage on these prompts may not hold on others.
    """
    best = max(candidate.predicted for candidate in tried)
    fast = [candidate for candidate in tried if candidate.predicted >= AS_FAST * best]
    chosen = min(fast, key=lambda candidate: (distance_from_defaults(candidate.name, candidate.settings), -candidate.predicted))
    return replace(chosen, tried=len(tried))


def shortlist(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns up to `SHORTLIST_SIZE` candidates to run on the real models, the most promising first.

    They have at least `SHORTLIST_SPEED` of the best expected speed. PEARL's expected speed is raised by `PARALLEL_MARGIN`,
    because it is uncertain.
    """

    def possible(candidate: Candidate) -> float:
        return candidate.predicted * (PARALLEL_MARGIN if METHODS[candidate.name].is_parallel else 1.0)

    best = max((candidate.predicted for candidate in candidates), default=0.0)
    promising = [candidate for candidate in candidates if possible(candidate) >= SHORTLIST_SPEED * best]
    return sorted(promising, key=possible, reverse=True)[:SHORTLIST_SIZE]
