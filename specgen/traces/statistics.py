"""Statistics of recorded generations: acceptance rate by draft entropy, lower bounds of the acceptance probability, and how a
bandit policy's belief about the acceptance probability develops.

A drafted token is called verified if it was accepted or rejected; the tokens after a rejected one are not verified. p is the
target's distribution and q the draft's. Entropies and divergences are in nats. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from specgen.traces.accepted_runs import AcceptedRuns, accepted_runs, complete_runs
from specgen.traces.summary import Summary
from specgen.traces.trace_reader import TracedRound, TracedRun
from specgen.types import Round, TokenStatus

EDGES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf)  # of the entropy bins, in nats
AUTHORS_C = 0.15  # the SVIP authors' constant c, used if a run has no setting c
_Z95 = 1.959964
_Z90 = 1.644854


class DraftedToken(NamedTuple):
    """A drafted token: its status, the entropy of the draft's distribution q, the acceptance probability sum(min(p, q)) as
    `overlap`, and `kl` = KL(q||p), where p is the target's distribution. Numbers that the trace does not contain are NaN."""

    status: TokenStatus
    entropy: float
    overlap: float
    kl: float

    @property
    def is_recorded(self) -> bool:
        """Whether the trace contains all three numbers."""
        return not math.isnan(self.entropy + self.overlap + self.kl)


@dataclass(frozen=True, slots=True)
class Bin:
    """How many tokens were accepted among the verified (accepted or rejected) tokens whose draft entropy, in nats, is at least
    `low` and below `high`."""

    low: float
    high: float
    verified: int
    accepted: int
    mean_entropy: float

    @property
    def rate(self) -> float:
        return self.accepted / self.verified

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends of the 95 % Wilson confidence interval of the acceptance rate."""
        n, p, z = self.verified, self.rate, _Z95
        centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


@dataclass(frozen=True, slots=True)
class BoundsBin:
    """Medians over the drafted tokens whose draft entropy, in nats, is at least `low` and below `high`: of the entropy, of the
    acceptance probability sum(min(p, q)), of its lower bounds by Pinsker and by Bretagnolle-Huber, and of SVIP's estimate of it.
    """

    low: float
    high: float
    tokens: int
    entropy: float
    acceptance: float
    pinsker: float
    bretagnolle_huber: float
    estimate: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """How well SVIP's estimate 1 - sqrt(c H(q)) predicts the acceptance probability (the numbers of SVIP's Figures 3 and 4); p is
    the target's distribution and q the draft's.

    `below_estimate` is the share of tokens whose acceptance probability is below the estimate. `entropy_ratio` is the median of
    H(q,p) / H(q), and `measured_c` is the constant c that follows from this median; both are None if every entropy is close to 0.
    `by_entropy` has medians for ranges of the entropy.
    """

    tokens: int
    c: float
    below_estimate: float
    entropy_ratio: float | None
    measured_c: float | None
    by_entropy: tuple[BoundsBin, ...]


@dataclass(frozen=True, slots=True)
class Posterior:
    """What a bandit policy believes about the acceptance probability after round `index`: the mean of its posterior, and both
    ends of the central 90 % interval."""

    index: int
    mean: float
    low: float
    high: float


def pinsker(divergence: float) -> float:
    """Pinsker's lower bound of the acceptance probability: 1 - sqrt(KL(q||p) / 2), at least 0 (SVIP Eq. 5). `divergence` is
    KL(q||p) in nats, with the target's p and the draft's q."""
    return max(0.0, 1 - math.sqrt(max(divergence, 0.0) / 2))


def bretagnolle_huber(divergence: float) -> float:
    """The Bretagnolle-Huber lower bound of the acceptance probability: 1 - sqrt(1 - exp(-KL(q||p))) (SVIP, Appendix B).
    `divergence` is KL(q||p) in nats, with the target's p and the draft's q."""
    return max(0.0, 1 - math.sqrt(-math.expm1(-max(divergence, 0.0))))


def estimate(entropy: float, c: float) -> float:
    """SVIP's estimate of the acceptance probability: 1 - sqrt(c H(q)), at least 0 (Eq. 6). `entropy` is H(q), the entropy of the
    draft's distribution in nats.

    It is not a lower bound, because it assumes that the ratio of cross-entropy to entropy is constant.
    """
    return max(0.0, 1 - math.sqrt(max(c * entropy, 0.0)))


class TraceStatistics:
    """Statistics over one or more recorded runs (generations) of one method."""

    def __init__(self, method: str) -> None:
        self.summary = Summary(method)
        self.tokens: list[DraftedToken] = []  # only of drafts with recorded entropies
        self.has_distributions = False  # overlap and KL(q||p) were recorded for at least one round
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
            known = {
                name: known_number(run.summary, name) for name in ("drafts", "drafted", "accepted", "target_passes", "seconds")
            }
            self.summary.include(
                {
                    **known,
                    "rounds": known["target_passes"],
                    "token_ids": run.summary["token_ids"],
                    "phase_seconds": {"other": known["seconds"]},
                }
            )
        if self.summary.seconds > seconds:
            self.speeds.append((self.summary.new_tokens - tokens) / (self.summary.seconds - seconds))

    def _add_draft(self, traced: TracedRound) -> None:
        draft = traced.round.draft
        self.branches |= not draft.is_chain
        if traced.round.index:
            self.lengths.append(len(draft.tokens))
            self.accepted_lengths.append(len(traced.round.verdict.path))
        if draft.entropies:
            self.has_distributions |= bool(traced.overlap)
            unknown = [math.nan] * len(draft.entropies)
            figures = zip(traced.round.statuses, draft.entropies, traced.overlap or unknown, traced.kl or unknown, strict=True)
            self.tokens += itertools.starmap(DraftedToken, figures)

    @property
    def mean_accepted_length(self) -> float | None:
        """Accepted tokens per round that has a draft. None if no round has one."""
        return self.summary.accepted / self.summary.drafts if self.summary.drafts else None

    def runs_of_accepted(self) -> AcceptedRuns | None:
        """Compares the runs of accepted tokens with PEARL's Theorem 2. None if nothing was rejected."""
        return accepted_runs(self.summary, self.accepted_runs)

    def acceptance_by_entropy(self) -> list[Bin]:
        """Returns the acceptance rate for each range of the draft's entropy (SVIP, Figure 2). Ranges without verified tokens are
        left out."""
        bins = _by_entropy(token for token in self.tokens if token.status is not TokenStatus.DISCARDED)
        return [
            Bin(
                low,
                high,
                len(tokens),
                sum(token.status is TokenStatus.ACCEPTED for token in tokens),
                fmean(token.entropy for token in tokens),
            )
            for low, high, tokens in bins
        ]

    def bounds(self) -> Bounds | None:
        """Compares SVIP's estimate of the acceptance probability, and the lower bounds on it, with the recorded probabilities.

        None unless the trace has the acceptance probability and KL(q||p) of at least one token."""
        tokens = [token for token in self.tokens if token.is_recorded]
        if not tokens:
            return None
        below = sum(token.overlap < estimate(token.entropy, self.c) for token in tokens)
        ratios = [1 + token.kl / token.entropy for token in tokens if token.entropy > 0.01]  # the ratio is noise below
        ratio = median(ratios) if ratios else None
        return Bounds(
            len(tokens),
            self.c,
            below / len(tokens),
            ratio,
            None if ratio is None else (ratio - 1) / 2,
            tuple(self._bounds_bin(*found) for found in _by_entropy(tokens)),
        )

    def _bounds_bin(self, low: float, high: float, tokens: Sequence[DraftedToken]) -> BoundsBin:
        return BoundsBin(
            low,
            high,
            len(tokens),
            median(token.entropy for token in tokens),
            median(token.overlap for token in tokens),
            median(pinsker(token.kl) for token in tokens),
            median(bretagnolle_huber(token.kl) for token in tokens),
            median(estimate(token.entropy, self.c) for token in tokens),
        )

    def as_dict(self) -> dict[str, Any]:
        """The statistics as an object for `specgen inspect --json`."""
        figures = self.summary.as_dict("", "")
        for name in ("text", "token_ids", "finish_reason"):
            del figures[name]
        bounds, runs = self.bounds(), self.runs_of_accepted()
        return {
            **figures,
            "mean_draft_length": self.summary.mean_draft_length,
            "mean_accepted_length": self.mean_accepted_length,
            "accepted_runs": None if runs is None else asdict(runs),
            "acceptance_by_entropy": [_bin_dict(found) for found in self.acceptance_by_entropy()],
            "bounds": None if bounds is None else asdict(bounds, dict_factory=_without_infinity),
        }


def setting(run: TracedRun, name: str) -> float | None:
    """Returns the run's setting `name` if it is a finite number, otherwise None."""
    value = run.start["settings"].get(name)
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def known_number(line: Mapping[str, Any], name: str) -> Any:
    """Returns the value of `name` in a summary line written by another program, 0 if it is missing or not a plausible number. The
    trace reader does not check these keys."""
    value = line.get(name)
    return value if isinstance(value, int | float) and 0 <= value < 1e12 else 0


def _by_entropy(tokens: Iterable[DraftedToken]) -> Iterator[tuple[float, float, list[DraftedToken]]]:
    """Groups tokens by the entropy of the draft's distribution. Yields the lower edge and the upper edge in nats, and the tokens
    between them, for each group that has tokens."""
    bins: dict[int, list[DraftedToken]] = {}
    for token in tokens:
        if not math.isnan(token.entropy):
            bins.setdefault(bisect_right(EDGES, token.entropy, 1, len(EDGES) - 1), []).append(token)
    for number in sorted(bins):
        yield EDGES[number - 1], EDGES[number], bins[number]


def _bin_dict(found: Bin) -> dict[str, Any]:
    low, high = found.interval
    counts = {"low": found.low, "high": found.high, "judged": found.verified, "accepted": found.accepted}
    return _without_infinity([*counts.items(), ("rate", found.rate), ("rate_low", low), ("rate_high", high)])


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
    return state.get("alpha", 0.0) > 0 and state.get("beta", 0.0) > 0


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
