"""What tuning found, as the report, the JSON line and the profile are made from it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specgen.cost_model import SpeedupModel
from specgen.methods import METHODS
from specgen.tuning.candidates import Given, distance_from_defaults, written
from specgen.types import SamplingParams

Verdict = Literal["pays", "does not pay", "unclear"]
PLAIN = "ar"
AS_GOOD = 0.97
FINALISTS = 3  # methods that are really run, plain decoding aside
CLOSE = 0.75  # of the best one's expected speed: what is slower is not run
HOPE = 1.25  # PEARL was off by as much, either way: two processes get their cores well in one minute, badly in another


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method with its best settings: expected tokens a second, and the measured ones where it was confirmed by real runs, with
    the speedup over plain decoding in the same turns and its 95 % interval. `tried` settings were replayed. `perplexity` is of a
    lossy method's output."""

    name: str
    settings: Given
    lossless: bool
    predicted: float
    tried: int
    acceptance: float | None = None
    measured: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    perplexity: float | None = None

    @property
    def written(self) -> str:
        return written(self.name, self.settings)


@dataclass(frozen=True, slots=True)
class TuningOutcome:
    """`methods` are in the order of their expected speed, plain decoding among them. `left_out` says of other methods why they
    were not tuned. `acceptance` is how often the target takes a draft's token, those before it being right."""

    methods: Sequence[Candidate]
    chosen: Candidate
    verdict: Verdict
    sampling: SamplingParams
    prompts: int
    costs: Mapping[str, Any]
    speedup_model: SpeedupModel | None = None
    acceptance: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def plain(self) -> Candidate:
        return next(found for found in self.methods if found.name == PLAIN)

    @property
    def best(self) -> Candidate:
        """The fastest of the methods that speculate and keep the output: as measured, where it was, and then by the lower end of
        its interval. What is fast on some prompts and slow on others is no safe choice for those that nobody has seen."""
        others = [found for found in self.methods if found.name != PLAIN and found.lossless]
        measured = [found for found in others if found.measured is not None]
        if measured and all(found.low is not None for found in measured):
            return max(measured, key=lambda found: found.low or 0.0)
        return max(measured or others or [self.plain], key=lambda found: found.measured or found.predicted)

    @property
    def speedup(self) -> float:
        """The chosen method's over plain decoding, measured where it was."""
        if self.chosen.name == PLAIN:
            return 1.0
        return self.chosen.speedup or self.chosen.predicted / self.plain.predicted

    @property
    def break_even_acceptance(self) -> float | None:
        """The acceptance from which drafts of one token pay; None where no acceptance is enough."""
        return None if self.speedup_model is None else self.speedup_model.break_even_acceptance(1)

    @property
    def break_even_draft_cost(self) -> float | None:
        """How long a draft pass may take, in target passes, to pay at the acceptance found here; None where nothing helps."""
        if self.speedup_model is None or self.acceptance is None:
            return None
        return self.speedup_model.break_even_draft_cost(self.acceptance)

    @property
    def relative_draft_cost(self) -> float | None:
        """What a draft pass takes, in target passes."""
        return None if self.speedup_model is None else self.speedup_model.relative_draft_cost


def judged(best: Candidate, plain: Candidate) -> Verdict:
    """Whether speculation pays. An interval that holds 1 tells nothing; without real runs a tenth has to be gained at least."""
    if best.name == PLAIN:
        return "does not pay"
    if best.speedup is None:
        return "pays" if best.predicted > 1.1 * plain.predicted else "does not pay"
    low, high = best.low or best.speedup, best.high or best.speedup
    if low > 1:
        return "pays"
    return "does not pay" if high < 1 or best.speedup < 1 else "unclear"


def nearest_to_default(tried: Sequence[Candidate]) -> Candidate:
    """A method's best settings: the most usual of those that are expected to be as good as the best. What is a hair faster on
    these prompts, by costs that were measured once, need not be on others."""
    best = max(entry.predicted for entry in tried)
    good = [entry for entry in tried if entry.predicted >= AS_GOOD * best]
    chosen = min(good, key=lambda entry: (distance_from_defaults(entry.name, entry.settings), -entry.predicted))
    return replace(chosen, tried=len(tried))


def better(chain: Candidate, tree: Candidate, tried: int) -> Candidate:
    """The faster of a method's chains and its trees, of which so many were tried besides."""
    best = max(chain, tree, key=lambda entry: entry.predicted)
    return replace(best, tried=chain.tried + tried)


def shortlist(rivals: Sequence[Candidate]) -> list[Candidate]:
    """Those that are really run, the most hopeful first."""

    def hoped(entry: Candidate) -> float:
        return entry.predicted * (HOPE if METHODS[entry.name].is_parallel else 1.0)

    best = max((entry.predicted for entry in rivals), default=0.0)
    return sorted((entry for entry in rivals if hoped(entry) >= CLOSE * best), key=hoped, reverse=True)[:FINALISTS]
