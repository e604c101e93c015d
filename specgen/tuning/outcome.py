"""Candidates, how the best are selected, and what a tuning returns. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specgen.cost_model.speedup import SpeedupModel
from specgen.methods import METHODS
from specgen.setting_parsing import written
from specgen.tuning.candidates import GivenSettings, distance_from_defaults
from specgen.types import SamplingParams

Verdict = Literal["pays", "does not pay", "unclear", "unconfirmed"]
PLAIN = "ar"
AS_FAST = 0.97  # of the best expected speed: settings above it count as equally fast
EXPECTED_GAIN = 1.1  # expected speedup from which a method is chosen without a real run
SHORTLIST_SIZE = 3  # methods that are really run, plain decoding not counted
SHORTLIST_SPEED = 0.75  # of the best expected speed: slower methods are not run
PARALLEL_MARGIN = 1.25  # expected speeds of PEARL were wrong by this factor: two processes share the cores well or badly


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method with settings, and its tokens per second.

    `predicted` is the expected speed, `tried` the number of settings it was selected from. Where the method was really run,
    `measured` is its speed and `speedup`, with the 95 % interval `low` to `high`, is relative to plain decoding in the same
    turns. `perplexity` is that of a lossy method's output.
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
    """A number with its noun: `1 prompt`, `2 prompts`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def by_speed(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest expected one first."""
    return sorted(candidates, key=lambda candidate: -candidate.predicted)


@dataclass(frozen=True, slots=True)
class TuningOutcome:
    """The result of a tuning.

    `methods` are sorted by expected speed and contain plain decoding. `prompts` is the number of prompts, `costs` are the round
    costs by kind, `acceptance_probability` is the mean probability that the target accepts a draft's token after accepted ones.
    `left_out` gives the reason for each method that was not tuned.
    """

    methods: Sequence[Candidate]
    sampling: SamplingParams
    prompts: int
    costs: Mapping[str, Any]
    speedup_model: SpeedupModel | None = None
    acceptance_probability: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def plain(self) -> Candidate:
        return plain_of(self.methods)

    @property
    def best(self) -> Candidate:
        """The fastest lossless method that speculates; plain decoding where there is none.

        Measured ones come first, by the lower end of their intervals: a method that is fast on some prompts and slow on others is
        not a safe choice for prompts that were not measured.
        """
        others = [method for method in self.methods if method.name != PLAIN and method.lossless]
        measured = [method for method in others if method.measured is not None]
        if measured and all(method.low is not None for method in measured):
            return max(measured, key=lambda method: method.low or 0.0)
        return max(measured or others or [self.plain], key=lambda method: method.measured or method.predicted)

    @property
    def verdict(self) -> Verdict:
        """Whether speculation pays: an interval that contains 1 is unclear, and without real runs nothing is confirmed."""
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
        """The method to decode with: the best one where it pays or, unconfirmed, where its expected speedup is large enough."""
        expected = self.verdict == "unconfirmed" and self.speedup_of(self.best) > EXPECTED_GAIN
        return self.best if expected or self.verdict == "pays" else self.plain

    def speedup_of(self, method: Candidate) -> float:
        """The measured speedup over plain decoding, else the expected one."""
        return 1.0 if method.name == PLAIN else method.speedup or method.predicted / self.plain.predicted

    @property
    def break_even_acceptance(self) -> float | None:
        """The acceptance from which drafts of one token pay; None where none is enough."""
        return None if self.speedup_model is None else self.speedup_model.break_even_acceptance(1)

    @property
    def break_even_draft_cost(self) -> float | None:
        """The longest time of a draft pass, in target passes, that pays at the acceptance found here; None where none does."""
        model, probability = self.speedup_model, self.acceptance_probability
        return None if model is None or probability is None else model.break_even_draft_cost(probability)

    @property
    def relative_draft_cost(self) -> float | None:
        """The time of a draft pass in target passes."""
        return None if self.speedup_model is None else self.speedup_model.relative_draft_cost


def plain_of(candidates: Sequence[Candidate]) -> Candidate:
    return next(candidate for candidate in candidates if candidate.name == PLAIN)


def nearest_to_default(tried: Sequence[Candidate]) -> Candidate:
    """A method's best settings: of those with about the best expected speed, the ones closest to the defaults. A small advantage
    on these prompts, at costs that were measured once, may not hold on others."""
    best = max(candidate.predicted for candidate in tried)
    fast = [candidate for candidate in tried if candidate.predicted >= AS_FAST * best]
    chosen = min(fast, key=lambda candidate: (distance_from_defaults(candidate.name, candidate.settings), -candidate.predicted))
    return replace(chosen, tried=len(tried))


def shortlist(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The methods worth a real run, the most promising first."""

    def possible(candidate: Candidate) -> float:
        return candidate.predicted * (PARALLEL_MARGIN if METHODS[candidate.name].is_parallel else 1.0)

    best = max((candidate.predicted for candidate in candidates), default=0.0)
    promising = [candidate for candidate in candidates if possible(candidate) >= SHORTLIST_SPEED * best]
    return sorted(promising, key=possible, reverse=True)[:SHORTLIST_SIZE]
