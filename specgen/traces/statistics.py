"""Statistics of recorded generations: acceptance rate and accepted length by draft entropy, lower bounds of the acceptance
probability, and how a bandit policy's posterior of the acceptance probability develops.

A drafted token is called verified if it was accepted or rejected; the tokens after a rejected one are not verified. p is the
target's distribution and q the draft's. Entropies and divergences are in nats. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import StatisticsError, correlation, fmean, median, pstdev
from typing import Any, NamedTuple, cast

from specgen.base.types import Round, TokenStatus
from specgen.pair.figures import Summary
from specgen.traces.acceptance import (
    ENTROPY_EDGES,
    AcceptanceBin,
    Bounds,
    Calibration,
    DraftedToken,
    Judged,
    acceptance_bins,
    bounds_of,
    calibration_of,
    grouped,
    judged_predictions,
)
from specgen.traces.reader import TracedRound, TracedRun

AUTHORS_C = 0.15  # the SVIP authors' constant c, used if a run has no setting c
_LARGEST = 1e12  # of a Beta distribution's parameters, which count tokens
_Z90 = 1.644854


class DraftOutcome(NamedTuple):
    """A draft after its verification: the mean entropy of its verified tokens, and its drafted and accepted tokens."""

    entropy: float
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class LengthBin:
    """How many tokens of a draft were accepted, over the drafts whose mean entropy, in nats, is at least `low` and below `high`.

    `drafts` is the number of drafts, `mean_entropy` the mean of their mean entropies; `mean`, `median` and `longest` are of the
    accepted tokens.
    """

    low: float
    high: float
    drafts: int
    mean_entropy: float
    mean: float
    median: float
    longest: int


@dataclass(frozen=True, slots=True)
class Posterior:
    """What a bandit policy believes about the acceptance probability after round `index`: the mean of its posterior, and both
    ends of the central 90 % interval."""

    index: int
    mean: float
    low: float
    high: float


def complete_runs(rounds: Iterable[Round]) -> Iterator[int]:
    """Yields the number of accepted tokens before each rejection of one output, as PEARL's authors count them.

    What follows the last rejection is no complete run: the output's end, not the target, ended it.
    """
    accepted = 0
    for round_ in rounds:
        accepted += len(round_.verdict.path)
        if round_.verdict.source == "correction":
            yield accepted
            accepted = 0


@dataclass(frozen=True, slots=True)
class AcceptedRuns:
    """The measured runs beside what PEARL's Theorem 2 expects of them.

    `alpha` is the probability that a token is accepted: accepted / judged tokens, where the judged ones are the accepted and the
    rejected ones. `mean` is the mean length of the `complete` runs with the token that corrects each, `expected` the same by
    Theorem 2: 1 / (1 - alpha). It may be larger than `mean`, because long runs are more often cut short by the output's end:
    `unfinished` counts the tokens that were accepted after the last rejection of their output.
    The theorem assumes that tokens are accepted independently and with the same probability. `deviation` is the standard
    deviation of the runs' lengths, `expected_deviation` its value under this assumption: sqrt(alpha) / (1 - alpha).

    `Summary.mean_accepted_run` is alpha / (1 - alpha) by its definition, so it cannot test the theorem.
    """

    complete: int
    alpha: float
    mean: float
    expected: float
    deviation: float
    expected_deviation: float
    longest: int
    unfinished: int


def accepted_runs(summary: Summary, lengths: Sequence[int]) -> AcceptedRuns | None:
    """Returns the statistics of the complete runs with these lengths; None if nothing was rejected.

    `summary` counts the accepted tokens and the rejections of the same outputs, unfinished runs included.
    """
    if not lengths:
        return None
    rejected = summary.rejections / (summary.accepted + summary.rejections)
    alpha = 1 - rejected
    deviations = pstdev(lengths), math.sqrt(alpha) / rejected
    unfinished = summary.accepted - sum(lengths)
    return AcceptedRuns(len(lengths), alpha, fmean(lengths) + 1, 1 / rejected, *deviations, max(lengths), unfinished)


class TraceStatistics:
    """Statistics over one or more recorded runs (generations) of one method."""

    def __init__(self, method: str) -> None:
        self.summary = Summary(method)
        self.tokens: list[DraftedToken] = []  # only of drafts with recorded entropies
        self.drafts: list[DraftOutcome] = []  # only those with recorded entropies
        self.has_distributions = False  # overlap and KL(q||p) were recorded for at least one round
        self.predictions: list[Judged] = []  # predicted acceptance probabilities of judged tokens
        self.runs = 0
        self.lengths, self.accepted_lengths = array("l"), array("l")  # tokens per round, without prefills
        self.accepted_runs = array("l")  # accepted tokens before each rejection
        self.branches = False  # drafts are trees, or several chains at once
        self.speeds: list[float] = []  # tokens per second of each run
        self.c = AUTHORS_C  # SVIP's constant: the first run's setting c, or if it has none AUTHORS_C

    def add(self, run: TracedRun) -> None:
        self.runs += 1
        if self.runs == 1:
            self.c = setting(run, "c") or AUTHORS_C
        tokens, seconds = self.summary.new_tokens, self.summary.seconds
        for traced in run.rounds:
            self.summary.add(traced.round)
            self._add_draft(traced)
        self.accepted_runs.extend(complete_runs(traced.round for traced in run.rounds))
        if not run.rounds and run.summary is not None:  # decoded by another program, which writes no rounds
            keys = ("drafts", "drafted", "accepted", "target_passes", "seconds")
            line: dict[str, Any] = {name: known_number(run.summary, name) for name in keys}
            line |= {"rounds": line["target_passes"], "token_ids": run.summary["token_ids"]}
            self.summary.include(line | {"phase_seconds": {"other": line["seconds"]}})
        if self.summary.seconds > seconds:
            self.speeds.append((self.summary.new_tokens - tokens) / (self.summary.seconds - seconds))

    def _add_draft(self, traced: TracedRound) -> None:
        draft = traced.round.draft
        self.branches |= not draft.is_chain
        if traced.round.index:
            self.lengths.append(len(draft.tokens))
            self.accepted_lengths.append(len(traced.round.verdict.path))
        self.predictions += judged_predictions(traced.round)
        if draft.entropies:
            self.has_distributions |= bool(traced.overlap)
            unknown = [math.nan] * len(draft.entropies)
            figures = zip(traced.round.statuses, draft.entropies, traced.overlap or unknown, traced.kl or unknown, strict=True)
            self.tokens += itertools.starmap(DraftedToken, figures)
            self._add_outcome(traced.round)

    def _add_outcome(self, round_: Round) -> None:
        """Adds a round's draft to `drafts`, unless one of the entropies of its verified tokens is unknown.

        Children of a node of a draft tree share a distribution, so of several rejected ones the first counts.
        """
        path, statuses = round_.verdict.path, round_.statuses
        rejected = [statuses.index(TokenStatus.REJECTED)] if TokenStatus.REJECTED in statuses else []
        entropies = [round_.draft.entropies[node] for node in (*path, *rejected)]
        if entropies and not math.isnan(mean := fmean(entropies)):
            self.drafts.append(DraftOutcome(mean, len(statuses), len(path)))

    @property
    def mean_accepted_length(self) -> float | None:
        """Accepted tokens per round that has a draft. None if no round has one."""
        return self.summary.accepted / self.summary.drafts if self.summary.drafts else None

    def runs_of_accepted(self) -> AcceptedRuns | None:
        """Compares the runs of accepted tokens with PEARL's Theorem 2. None if nothing was rejected."""
        return accepted_runs(self.summary, self.accepted_runs)

    def acceptance_by_entropy(self) -> list[AcceptanceBin]:
        """Returns the acceptance rate of verified tokens for each range of the draft's entropy (SVIP, Figure 2, top)."""
        verified = (token for token in self.tokens if token.status is not TokenStatus.DISCARDED)
        return acceptance_bins((Judged(each.entropy, each.status is TokenStatus.ACCEPTED) for each in verified), ENTROPY_EDGES)

    def accepted_length_by_entropy(self) -> list[LengthBin]:
        """Returns the accepted tokens per draft for each range of the draft's mean entropy (SVIP, Figures 2, bottom, and 8).

        The paper does not say which entropy of a draft it plots; this is the mean over its verified tokens. Ranges without drafts
        are left out.
        """
        found = []
        for low, high, drafts in grouped(self.drafts, lambda draft: draft.entropy, ENTROPY_EDGES):
            lengths = [draft.accepted for draft in drafts]
            entropy = fmean(draft.entropy for draft in drafts)
            found.append(LengthBin(low, high, len(drafts), entropy, fmean(lengths), median(lengths), max(lengths)))
        return found

    def length_correlation(self) -> float | None:
        """Returns Pearson's correlation of a draft's mean entropy and its number of accepted tokens.

        None for less than two drafts, or if either number is the same for all.
        """
        try:
            return correlation([draft.entropy for draft in self.drafts], [draft.accepted for draft in self.drafts])
        except StatisticsError:
            return None

    def bounds(self) -> Bounds | None:
        """Compares the recorded acceptance probabilities with their lower bounds and with SVIP's estimate of them.

        None unless the trace has the acceptance probability and KL(q||p) of at least one token."""
        return bounds_of(self.tokens, self.c)

    def calibration(self) -> Calibration | None:
        """Compares the acceptance that the length policy predicted with what happened. None if no predictions were recorded."""
        return calibration_of(self.predictions)

    def as_dict(self) -> dict[str, Any]:
        """The statistics as an object for `specgen inspect --json`."""
        figures = self.summary.as_dict("", "")
        for name in ("text", "token_ids", "finish_reason"):
            del figures[name]
        bounds, runs, calibration = self.bounds(), self.runs_of_accepted(), self.calibration()
        return {
            **figures,
            "mean_draft_length": self.summary.mean_draft_length,
            "mean_accepted_length": self.mean_accepted_length,
            "accepted_runs": None if runs is None else asdict(runs),
            "acceptance_by_entropy": [_without_infinity(found.as_dict().items()) for found in self.acceptance_by_entropy()],
            "accepted_length_by_entropy": [
                asdict(found, dict_factory=_without_infinity) for found in self.accepted_length_by_entropy()
            ],
            "length_correlation": self.length_correlation(),
            "calibration": None if calibration is None else calibration.as_dict(),
            "bounds": None
            if bounds is None
            else {**asdict(bounds, dict_factory=_without_infinity), "pinsker_tighter": bounds.pinsker_tighter},
        }


def setting(run: TracedRun, name: str) -> float | None:
    """Returns the run's setting `name` if it is a finite number, otherwise None."""
    value = run.start["settings"].get(name)
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else None


def known_number(line: Mapping[str, Any], name: str) -> Any:
    """Returns the value of `name` in a summary line written by another program, 0 if it is missing or not a plausible number. The
    trace reader does not check these keys."""
    value = line.get(name)
    is_number = type(value) is int or (type(value) is float and name == "seconds")
    return value if is_number and 1e-30 <= cast(float, value) < 1e12 else 0


def _without_infinity(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the items as a dictionary in which infinity (the upper edge of the last entropy range) is replaced by None, because
    JSON has no infinity."""
    return {name: None if value == math.inf else value for name, value in items}


def posteriors(rounds: Iterable[Round], most: int = 120) -> list[Posterior]:
    """Returns a bandit policy's posterior after at most `most` evenly spaced rounds, the last round included. Empty if the run's
    policy is not a bandit with a normal or Beta posterior."""
    states = [(round_.index, round_.policy_state) for round_ in rounds if round_.policy_state]
    known = [(index, state) for index, state in states if _is_normal(state) or _is_beta(state)]
    step = max(1, math.ceil(len(known) / most))
    return [_posterior(index, state) for index, state in known[(len(known) - 1) % step :: step]]


def _is_normal(state: Mapping[str, float]) -> bool:
    """Whether a policy's recorded state has the parameters of a normal distribution (Cali-TS)."""
    return 0 <= state.get("mean", -1.0) <= 1 and state.get("deviation", -1.0) >= 0


def _is_beta(state: Mapping[str, float]) -> bool:
    """Whether a policy's recorded state has the parameters of a Beta distribution (Beta-TS)."""
    return 0 < state.get("alpha", 0.0) < _LARGEST and 0 < state.get("beta", 0.0) < _LARGEST


def _posterior(index: int, state: Mapping[str, float]) -> Posterior:
    if _is_normal(state):  # Cali-TS clips its samples to [0, 1]
        mean, half = state["mean"], _Z90 * state["deviation"]
        return Posterior(index, mean, max(mean - half, 0.0), min(mean + half, 1.0))
    alpha, beta = state["alpha"], state["beta"]
    return Posterior(index, alpha / (alpha + beta), beta_quantile(alpha, beta, 0.05), beta_quantile(alpha, beta, 0.95))


def beta_quantile(alpha: float, beta: float, share: float) -> float:
    """Computes the value below which Beta(alpha, beta) has the probability `share`, by bisection, with an error below 1e-6."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if _beta_below(alpha, beta, middle) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _beta_below(a: float, b: float, x: float) -> float:
    """The probability that Beta(a, b) is below x: the regularised incomplete beta function, computed by its continued fraction
    (Lentz's method)."""
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, 400):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c = (1 + term / c) or tiny
            d = 1 / ((1 + term * d) or tiny)
            value *= c * d
        if abs(c * d - 1) < 1e-10:
            break
    return value
