"""Statistics of recorded generations: acceptance rate and accepted length by draft entropy, lower bounds of the acceptance
probability, and how a bandit policy's posterior of the acceptance probability develops.

A drafted token is called verified if it was accepted or rejected; the tokens after a rejected one are not verified. p is the
target's distribution and q the draft's. Entropies and divergences are in nats. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import StatisticsError, correlation, fmean, median, pstdev
from typing import Any, NamedTuple

from specgen.base.types import Round, TokenStatus
from specgen.pair.figures import Figures
from specgen.traces.acceptance import (
    ENTROPY_EDGES,
    AcceptanceBin,
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
_LARGEST = 1e6  # of a Beta distribution's parameters, which count tokens
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
    """What a bandit policy believes about the acceptance probability after a round: the mean of its posterior, and both ends of
    the central 90 % interval."""

    round: int
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

    `Figures.mean_accepted_run` is alpha / (1 - alpha) by its definition, so it cannot test the theorem.
    """

    complete: int
    alpha: float
    mean: float
    expected: float
    deviation: float
    expected_deviation: float
    longest: int
    unfinished: int


class TraceStatistics:
    """Statistics over one or more recorded runs (generations) of one method."""

    def __init__(self, method: str) -> None:
        self.summary = Figures(method)
        self.tokens: list[DraftedToken] = []  # only of drafts with recorded entropies
        self.drafts: list[DraftOutcome] = []  # only those with recorded entropies
        self.predictions: list[Judged] = []  # predicted acceptance probabilities of judged tokens
        self.runs = 0
        self.lengths: list[tuple[int, int]] = []  # drafted and accepted tokens of each round that is no prefill
        self.accepted_runs: list[int] = []  # accepted tokens before each rejection
        self.branches = False  # drafts are trees, or several chains at once
        self.speeds: list[float] = []  # tokens per second of each run
        self.c = AUTHORS_C  # SVIP's constant: the first run's setting c, or if it has none AUTHORS_C

    def add(self, run: TracedRun) -> None:
        self.runs += 1
        if self.runs == 1:
            self.c = setting(run, "c") or AUTHORS_C
        run.add_to(self.summary)
        self.accepted_runs += complete_runs(traced.round for traced in run.rounds)
        if speed := run.fold().tokens_per_second:
            self.speeds.append(speed)
        for traced in run.rounds:
            self._add_draft(traced)

    def _add_draft(self, traced: TracedRound) -> None:
        """Adds a round's draft: to `drafts` unless one of the entropies of its verified tokens is unknown.

        Children of a node of a draft tree share a distribution, so of several rejected ones the first counts.
        """
        draft, path, statuses = traced.round.draft, traced.round.verdict.path, traced.round.statuses
        self.branches |= not draft.is_chain
        if traced.round.index:
            self.lengths.append((len(statuses), len(path)))
        self.predictions += judged_predictions(traced.round)
        if not draft.entropies:
            return
        unknown = [math.nan] * len(statuses)
        figures = statuses, draft.entropies, traced.overlap or unknown, traced.kl or unknown, traced.draft_texts
        self.tokens += map(DraftedToken, *figures)
        rejected = [statuses.index(TokenStatus.REJECTED)] if TokenStatus.REJECTED in statuses else []
        entropies = [draft.entropies[node] for node in (*path, *rejected)]
        if entropies and not math.isnan(mean := fmean(entropies)):
            self.drafts.append(DraftOutcome(mean, len(statuses), len(path)))

    @property
    def mean_accepted_length(self) -> float | None:
        """Accepted tokens per round that has a draft. None if no round has one."""
        return self.summary.accepted / self.summary.drafts if self.summary.drafts else None

    def runs_of_accepted(self) -> AcceptedRuns | None:
        """Compares the runs of accepted tokens with PEARL's Theorem 2. None if nothing was rejected."""
        if not (lengths := self.accepted_runs):
            return None
        rejected = self.summary.rejections / (self.summary.accepted + self.summary.rejections)
        alpha = 1 - rejected
        deviations = pstdev(lengths), math.sqrt(alpha) / rejected
        unfinished = self.summary.accepted - sum(lengths)
        return AcceptedRuns(len(lengths), alpha, fmean(lengths) + 1, 1 / rejected, *deviations, max(lengths), unfinished)

    def acceptance_by_entropy(self) -> list[AcceptanceBin]:
        """Returns the acceptance rate of verified tokens for each range of the draft's entropy (SVIP, Figure 2, top)."""
        verified = (token for token in self.tokens if token.status is not TokenStatus.DISCARDED)
        return acceptance_bins(((each.entropy, each.status is TokenStatus.ACCEPTED) for each in verified), ENTROPY_EDGES)

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

    def as_dict(self) -> dict[str, Any]:
        """The statistics as an object for `specgen inspect --json`."""
        figures = self.summary.as_dict("", "")
        for name in ("text", "token_ids", "finish_reason"):
            del figures[name]
        calibration = _plain(calibration_of(self.predictions))
        for found in calibration["bins"] if calibration else ():
            found["predicted"] = found.pop("mean")
        return {
            **figures,
            "mean_draft_length": self.summary.mean_draft_length,
            "mean_accepted_length": self.mean_accepted_length,
            "accepted_runs": _plain(self.runs_of_accepted()),
            "acceptance_by_entropy": _plain(self.acceptance_by_entropy()),
            "accepted_length_by_entropy": _plain(self.accepted_length_by_entropy()),
            "length_correlation": self.length_correlation(),
            "calibration": calibration,
            "bounds": _plain(bounds_of(self.tokens, self.c)),
        }


def _plain(found: Any) -> Any:
    """Returns a record or a list of records as JSON values. JSON has no infinity: the upper edge of the last range is None."""
    if isinstance(found, list):
        return [_plain(each) for each in found]
    return None if found is None else asdict(found, dict_factory=_finite)


def _finite(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: None if value == math.inf else value for name, value in items}


def setting(run: TracedRun, name: str) -> float | None:
    """Returns the run's setting `name` if it is a finite number, otherwise None."""
    value = run.start["settings"].get(name)
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else None


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
        low, high = (middle, high) if _beta_below(alpha, beta, middle) < share else (low, middle)
    return (low + high) / 2


def _beta_below(a: float, b: float, x: float) -> float:
    """The probability that Beta(a, b) is below x: the regularised incomplete beta function, by its power series, whose terms fall
    from the first one on below the mean (Abramowitz and Stegun, 26.5.4)."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_below(b, a, 1 - x)
    log_term = math.lgamma(a + b) - math.lgamma(a + 1) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    total = term = math.exp(log_term)
    number = 0
    while term > 1e-9 * total:
        term *= x * (a + b + number) / (a + 1 + number)
        total += term
        number += 1
    return total
