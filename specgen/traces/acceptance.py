"""How drafted tokens were accepted: by the draft's entropy, against what a length policy predicted, and against lower bounds of
the acceptance probability and SVIP's estimate of it.

p is the target's distribution and q the draft's, both at temperature 1 and without penalties. H(q) is q's entropy and H(q,p) =
H(q) + KL(q||p) the cross-entropy, in nats. A token's acceptance probability is sum(min(p, q)). Imports no torch.

The fields of the records are the keys of `specgen inspect --json`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from specgen.base.types import Round, TokenStatus

ENTROPY_EDGES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf)  # of the entropy ranges, in nats
LEAST_ENTROPY = 0.01  # nats; the ratio of cross-entropy to entropy is noise below
_TENTHS = tuple(number / 10 for number in range(11))  # of the predicted probability
_RATIO_EDGES = (*(1 + number / 10 for number in range(21)), math.inf)  # of H(q,p) / H(q)
_GROUPS = 10  # of tokens sorted by acceptance probability
_Z95 = 1.959964
_Item = TypeVar("_Item")
Judged = tuple[float, bool]
"""A number known before a token (or the level of a tree) was verified, and whether it was accepted."""


class DraftedToken(NamedTuple):
    """A drafted token: its status, the entropy of the draft's distribution q, the acceptance probability sum(min(p, q)) as
    `overlap`, and `kl` = KL(q||p), where p is the target's distribution. Numbers that the trace does not contain are NaN."""

    status: TokenStatus
    entropy: float
    overlap: float = math.nan
    kl: float = math.nan
    text: str = ""

    @property
    def is_recorded(self) -> bool:
        """Whether the trace contains all three numbers."""
        return not math.isnan(self.entropy + self.overlap + self.kl)


@dataclass(frozen=True, slots=True)
class AcceptanceBin:
    """How many of the `judged` tokens of a group were accepted.

    Tokens are grouped by a number, the draft's entropy in nats or the predicted acceptance, that is at least `low` and below
    `high`; `mean` is its mean. `rate` is the share that was accepted, `rate_low` and `rate_high` are the ends of its 95 % Wilson
    confidence interval.
    """

    low: float
    high: float
    judged: int
    accepted: int
    mean: float
    rate: float
    rate_low: float
    rate_high: float


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
    bins: list[AcceptanceBin]


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
    found = []
    for low, high, group in grouped(judged, lambda each: each[0], edges):
        n, accepted = len(group), sum(is_accepted for _, is_accepted in group)
        rate, square = accepted / n, _Z95 * _Z95 / n
        half = _Z95 * math.sqrt(rate * (1 - rate) / n + square / (4 * n))
        ends = (max(0.0, min(1.0, (rate + square / 2 + sign * half) / (1 + square))) for sign in (-1, 1))
        found.append(AcceptanceBin(low, high, n, accepted, fmean(number for number, _ in group), rate, *ends))
    return found


def judged_predictions(round_: Round) -> Iterator[Judged]:
    """Yields the round's predictions that were judged: those of accepted tokens and of the first rejected one.

    In a draft that is a tree, a level is judged: accepted if one of its tokens was.
    """
    accepted = len(round_.verdict.path)
    judged = accepted + (round_.verdict.source == "correction")
    for position, probability in enumerate(round_.draft.predicted[:judged]):
        if not math.isnan(probability):
            yield probability, position < accepted


def calibration_of(predictions: Sequence[Judged]) -> Calibration | None:
    """Compares predictions with what happened. Intervals without predictions are left out; None without predictions."""
    if not predictions:
        return None
    bins = acceptance_bins(predictions, _TENTHS)
    predicted, rate = (fmean(column) for column in zip(*predictions, strict=True))
    error = sum(found.judged * abs(found.mean - found.rate) for found in bins) / len(predictions)
    return Calibration(len(predictions), predicted, rate, error, bins)


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
    `pinsker_higher` is the share of tokens for which Pinsker's bound is the higher of the two (Appendix B). `pinsker_tighter`
    says how much smaller the mean distance of Pinsker's bound is: 0.1 is 10 % smaller. Negative if it is larger; None if
    Bretagnolle and Huber's bound is exact.
    """

    tokens: int
    c: float
    below_estimate: float
    entropy_ratio: float | None
    measured_c: float | None
    pinsker_gap: float
    bretagnolle_huber_gap: float
    pinsker_higher: float
    pinsker_tighter: float | None
    entropy_ratios: list[RatioBin]
    by_entropy: list[BoundsBin]
    by_acceptance: list[BoundsBin]


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
    count, groups = len(recorded), min(_GROUPS, len(recorded))
    ratios = [1 + token.kl / token.entropy for token in recorded if token.entropy > LEAST_ENTROPY]
    counts = {low: len(found) for low, _, found in grouped(ratios, lambda ratio: ratio, _RATIO_EDGES)}
    ratio = median(ratios) if ratios else None
    gap, other_gap = (fmean(token.overlap - bound(token.kl) for token in recorded) for bound in (pinsker, bretagnolle_huber))
    equal = [recorded[group * count // groups : (group + 1) * count // groups] for group in range(groups)]

    def medians(low: float, high: float, group: Sequence[DraftedToken]) -> BoundsBin:
        rows = (
            (token.entropy, token.overlap, pinsker(token.kl), bretagnolle_huber(token.kl), estimate(token.entropy, c))
            for token in group
        )
        return BoundsBin(low, high, len(group), *map(median, zip(*rows, strict=True)))

    return Bounds(
        tokens=count,
        c=c,
        below_estimate=fmean(token.overlap < estimate(token.entropy, c) for token in recorded),
        entropy_ratio=ratio,
        measured_c=None if ratio is None else (ratio - 1) / 2,
        pinsker_gap=gap,
        bretagnolle_huber_gap=other_gap,
        pinsker_higher=fmean(pinsker(token.kl) > bretagnolle_huber(token.kl) for token in recorded),
        pinsker_tighter=1 - gap / other_gap if other_gap > 0 else None,
        entropy_ratios=[RatioBin(low, high, counts.get(low, 0)) for low, high in pairwise(_RATIO_EDGES)] if ratios else [],
        by_entropy=[medians(*found) for found in grouped(recorded, lambda token: token.entropy, ENTROPY_EDGES)],
        by_acceptance=[medians(group[0].overlap, group[-1].overlap, group) for group in equal],
    )
