"""How drafted tokens were accepted: by the draft's entropy, against what a length policy predicted, and against lower bounds of
the acceptance probability and SVIP's estimate of it.

p is the target's distribution and q the draft's, both at temperature 1 and without penalties. H(q) is q's entropy and H(q,p) =
H(q) + KL(q||p) the cross-entropy, in nats. A token's acceptance probability is sum(min(p, q)). Imports no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

from specgen.base.types import Round, TokenStatus

ENTROPY_EDGES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf)  # of the entropy ranges, in nats
LEAST_ENTROPY = 0.01  # nats; the ratio of cross-entropy to entropy is noise below
_TENTHS = tuple(number / 10 for number in range(11))  # of the predicted probability
_RATIO_EDGES = (*(1 + number / 10 for number in range(21)), math.inf)  # of H(q,p) / H(q)
_GROUPS = 10  # of tokens sorted by acceptance probability
_Z95 = 1.959964
_Item = TypeVar("_Item")


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


class Judged(NamedTuple):
    """A number known before a token (or the level of a tree) was verified, and whether it was accepted."""

    number: float
    accepted: bool


@dataclass(frozen=True, slots=True)
class AcceptanceBin:
    """How many of the `verified` tokens of a group were accepted.

    Tokens are grouped by a number, the draft's entropy in nats or the predicted acceptance, that is at least `low` and below
    `high`; `mean` is its mean.
    """

    low: float
    high: float
    verified: int
    accepted: int
    mean: float

    @property
    def rate(self) -> float:
        return self.accepted / self.verified

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends of the 95 % Wilson confidence interval of the acceptance rate."""
        n, p, z = self.verified, self.rate, _Z95
        centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))

    def as_dict(self) -> dict[str, Any]:
        """The numbers for `specgen inspect --json`."""
        low, high = self.interval
        counts = {"low": self.low, "high": self.high, "judged": self.verified, "accepted": self.accepted}
        return {**counts, "rate": self.rate, "rate_low": low, "rate_high": high}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predicted against observed acceptance, over `judged` predictions.

    `predicted` is the mean prediction and `rate` the share that was accepted. `error` is the expected calibration error: the
    mean distance of the two over the `bins`, weighted by their numbers of tokens.
    """

    judged: int
    predicted: float
    rate: float
    error: float
    bins: tuple[AcceptanceBin, ...]

    def as_dict(self) -> dict[str, Any]:
        """The numbers for `specgen inspect --json`."""
        bins = [{**found.as_dict(), "predicted": found.mean} for found in self.bins]
        return {"judged": self.judged, "predicted": self.predicted, "rate": self.rate, "error": self.error, "bins": bins}


def grouped(
    items: Iterable[_Item], value: Callable[[_Item], float], edges: Sequence[float]
) -> Iterator[tuple[float, float, list[_Item]]]:
    """Groups items by a number between edges. Yields the lower edge, the upper edge and the items of each group that has any.

    Items whose number is NaN are left out; a number outside all edges counts to the group at that end.
    """
    bins: dict[int, list[_Item]] = {}
    for item in items:
        if not math.isnan(number := value(item)):
            bins.setdefault(bisect_right(edges, number, 1, len(edges) - 1), []).append(item)
    for position in sorted(bins):
        yield edges[position - 1], edges[position], bins[position]


def acceptance_bins(judged: Iterable[Judged], edges: Sequence[float]) -> list[AcceptanceBin]:
    """Returns the acceptance rate in each range of the judged tokens' numbers. Ranges without tokens are left out."""
    return [
        AcceptanceBin(low, high, len(group), sum(each.accepted for each in group), fmean(each.number for each in group))
        for low, high, group in grouped(judged, lambda each: each.number, edges)
    ]


def judged_predictions(round_: Round) -> Iterator[Judged]:
    """Yields the round's predictions that were judged: those of accepted tokens and of the first rejected one.

    In a draft that is a tree, a level is judged: accepted if one of its tokens was.
    """
    accepted = len(round_.verdict.path)
    judged = accepted + (round_.verdict.source == "correction")
    for position, probability in enumerate(round_.draft.predicted[:judged]):
        if not math.isnan(probability):
            yield Judged(probability, position < accepted)


def calibration_of(predictions: Sequence[Judged]) -> Calibration | None:
    """Compares predictions with what happened. Intervals without predictions are left out; None without predictions."""
    if not predictions:
        return None
    bins = tuple(acceptance_bins(predictions, _TENTHS))
    return Calibration(
        len(predictions),
        fmean(prediction.number for prediction in predictions),
        fmean(prediction.accepted for prediction in predictions),
        sum(found.verified * abs(found.mean - found.rate) for found in bins) / len(predictions),
        bins,
    )


@dataclass(frozen=True, slots=True)
class BoundsBin:
    """Medians over a group of drafted tokens: of the entropy H(q), of the acceptance probability sum(min(p, q)), of its lower
    bounds by Pinsker and by Bretagnolle-Huber, and of SVIP's estimate of it.

    `low` and `high` are the limits of the number by which tokens were grouped: entropy in nats, or acceptance probability.
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
class RatioBin:
    """The number of tokens whose ratio H(q,p) / H(q) is at least `low` and below `high`."""

    low: float
    high: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """The acceptance probabilities of drafted tokens, their lower bounds, and SVIP's estimate 1 - sqrt(c H(q)) of them.

    `below_estimate` is the share of tokens whose acceptance probability is below the estimate. `entropy_ratio` is the median of
    H(q,p) / H(q), and `measured_c` is the constant c that follows from this median; both are None if every entropy is close to 0.
    `entropy_ratios` is the histogram of this ratio (SVIP, Figure 3), of the tokens with an entropy above `LEAST_ENTROPY`.
    `by_entropy` has medians for ranges of the entropy (Figure 2, top). `by_acceptance` has medians for groups of equal size of
    the tokens sorted by their acceptance probability, lowest first (Figure 4).
    `pinsker_gap` and `bretagnolle_huber_gap` are the mean distances from the bounds up to the acceptance probability, and
    `pinsker_higher` is the share of tokens for which Pinsker's bound is the higher of the two (Appendix B).
    """

    tokens: int
    c: float
    below_estimate: float
    entropy_ratio: float | None
    measured_c: float | None
    pinsker_gap: float
    bretagnolle_huber_gap: float
    pinsker_higher: float
    entropy_ratios: tuple[RatioBin, ...]
    by_entropy: tuple[BoundsBin, ...]
    by_acceptance: tuple[BoundsBin, ...]

    @property
    def pinsker_tighter(self) -> float | None:
        """How much smaller the mean distance of Pinsker's bound is than that of Bretagnolle and Huber's: 0.1 is 10 % smaller.

        Negative if it is larger; None if Bretagnolle and Huber's bound is exact.
        """
        return 1 - self.pinsker_gap / self.bretagnolle_huber_gap if self.bretagnolle_huber_gap > 0 else None


def pinsker(divergence: float) -> float:
    """Pinsker's lower bound of the acceptance probability: 1 - sqrt(KL(q||p) / 2), at least 0 (SVIP, Eq. 4 and 5). `divergence`
    is KL(q||p) in nats, with the target's p and the draft's q."""
    return max(0.0, 1 - math.sqrt(max(divergence, 0.0) / 2))


def bretagnolle_huber(divergence: float) -> float:
    """The Bretagnolle-Huber lower bound of the acceptance probability: 1 - sqrt(1 - exp(-KL(q||p))) (SVIP, Eq. 9, Appendix B).
    `divergence` is KL(q||p) in nats, with the target's p and the draft's q."""
    return max(0.0, 1 - math.sqrt(-math.expm1(-max(divergence, 0.0))))


def estimate(entropy: float, c: float) -> float:
    """SVIP's estimate of the acceptance probability: 1 - sqrt(c H(q)), at least 0 (SVIP, Eq. 6). `entropy` is H(q), the entropy
    of the draft's distribution in nats.

    It is not a lower bound, because it assumes that the ratio of cross-entropy to entropy is constant.
    """
    return max(0.0, 1 - math.sqrt(max(c * entropy, 0.0)))


def bounds_of(tokens: Iterable[DraftedToken], c: float) -> Bounds | None:
    """Compares the acceptance probabilities of drafted tokens with their lower bounds and with SVIP's estimate with constant c.

    None unless all three numbers of at least one token were recorded.
    """
    recorded = sorted((token for token in tokens if token.is_recorded), key=lambda token: token.overlap)
    if not recorded:
        return None
    count = len(recorded)
    ratios = [1 + token.kl / token.entropy for token in recorded if token.entropy > LEAST_ENTROPY]
    ratio = median(ratios) if ratios else None
    groups = min(_GROUPS, count)
    sorted_groups = [recorded[group * count // groups : (group + 1) * count // groups] for group in range(groups)]
    return Bounds(
        tokens=count,
        c=c,
        below_estimate=fmean(token.overlap < estimate(token.entropy, c) for token in recorded),
        entropy_ratio=ratio,
        measured_c=None if ratio is None else (ratio - 1) / 2,
        pinsker_gap=fmean(token.overlap - pinsker(token.kl) for token in recorded),
        bretagnolle_huber_gap=fmean(token.overlap - bretagnolle_huber(token.kl) for token in recorded),
        pinsker_higher=fmean(pinsker(token.kl) > bretagnolle_huber(token.kl) for token in recorded),
        entropy_ratios=_histogram(ratios),
        by_entropy=tuple(_bounds_bin(*found, c) for found in grouped(recorded, lambda token: token.entropy, ENTROPY_EDGES)),
        by_acceptance=tuple(_bounds_bin(group[0].overlap, group[-1].overlap, group, c) for group in sorted_groups),
    )


def _bounds_bin(low: float, high: float, tokens: Sequence[DraftedToken], c: float) -> BoundsBin:
    return BoundsBin(
        low,
        high,
        len(tokens),
        median(token.entropy for token in tokens),
        median(token.overlap for token in tokens),
        median(pinsker(token.kl) for token in tokens),
        median(bretagnolle_huber(token.kl) for token in tokens),
        median(estimate(token.entropy, c) for token in tokens),
    )


def _histogram(ratios: Sequence[float]) -> tuple[RatioBin, ...]:
    """Counts ratios of cross-entropy to entropy in ranges of 0.1; empty without ratios."""
    counts = {low: len(found) for low, _, found in grouped(ratios, lambda ratio: ratio, _RATIO_EDGES)}
    return tuple(RatioBin(low, high, counts.get(low, 0)) for low, high in pairwise(_RATIO_EDGES)) if ratios else ()
