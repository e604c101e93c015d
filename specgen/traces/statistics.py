"""Statistics of recorded generations: acceptance by the draft's entropy and against predictions,
lower bounds of the acceptance probability and SVIP's estimate of it, runs of accepted tokens, and
the posterior of a bandit policy.

A drafted token is called verified if it was accepted or rejected; the tokens after a rejected one
are not verified. p is the target's distribution and q the draft's, both at temperature 1 and
without penalties. H(q) is q's entropy and H(q,p) = H(q) + KL(q||p) the cross-entropy, in nats. A
token's acceptance probability is sum(min(p, q)). Imports no torch.

Results are mappings as `specgen inspect --json` prints them. A bin is such a mapping for a range of
a number: at least `low` and below `high` (None: no upper end).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import StatisticsError, correlation, fmean, median, pstdev
from typing import Any, NamedTuple, TypeVar

from specgen.base.types import Round, TokenStatus
from specgen.pair.figures import Figures
from specgen.traces.reader import TracedRound, TracedRun

AUTHORS_C = 0.15  # the SVIP authors' constant c, used if a run has no setting c
_ENTROPIES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, math.inf)  # edges of the bins, in nats
_TENTHS = tuple(number / 10 for number in range(11))  # of the predicted probability
_RATIOS = (*(1 + number / 10 for number in range(21)), math.inf)  # of H(q,p) / H(q)
_LEAST_ENTROPY = 0.01  # nats; the ratio of cross-entropy to entropy is noise below
_GROUPS = 10  # of tokens sorted by acceptance probability
_Z90 = 1.644854
_Z95 = 1.959964
_Item = TypeVar("_Item")
Bin = dict[str, Any]
# A number known before a token (or the level of a tree) was verified, and whether it was accepted.
Judged = tuple[float, bool]


class DraftedToken(NamedTuple):
    """A drafted token: its status, the entropy of the draft's distribution q, the acceptance
    probability sum(min(p, q)) as `overlap`, and `kl` = KL(q||p), where p is the target's
    distribution. Numbers that the trace does not contain are NaN."""

    status: TokenStatus
    entropy: float
    overlap: float = math.nan
    kl: float = math.nan


class DraftOutcome(NamedTuple):
    """A draft after its verification: the mean entropy (nats) of its accepted tokens and its first
    rejected one, and the number of accepted tokens."""

    entropy: float
    accepted: int


def binned(
    items: Iterable[_Item],
    number: Callable[[_Item], float],
    edges: Sequence[float],
    figures: Callable[[list[_Item]], Bin],
) -> list[Bin]:
    """Groups items by the range between two neighbouring `edges` (ascending) in which
    `number(item)` lies.

    Returns a bin for each range that has items: its ends `low` and `high`, and what `figures`
    returns for its items. Items whose number is NaN are left out. A number below all edges counts
    in the first range, one above all edges in the last.
    """
    groups: dict[int, list[_Item]] = {}
    for item in items:
        value = number(item)
        if not math.isnan(value):
            groups.setdefault(bisect_right(edges, value, 1, len(edges) - 1), []).append(item)
    bins = []
    for place, group in sorted(groups.items()):
        high = edges[place]
        bins.append(
            {
                "low": edges[place - 1],
                "high": high if math.isfinite(high) else None,
                **figures(group),
            }
        )
    return bins


# acceptance by a number that was known before


def acceptance_bins(judged: Iterable[Judged], edges: Sequence[float], name: str) -> list[Bin]:
    """Returns how many drafted tokens were accepted, by ranges of a number such as the entropy. The
    ranges lie between `edges`.

    `judged` has for each token the number, and whether it was accepted. The bin of a range has the
    counts `judged` and `accepted`, the acceptance `rate` with its 95 % Wilson confidence interval
    from `rate_low` to `rate_high`, and under `name` the mean of the numbers.
    """

    def figures(group: list[Judged]) -> Bin:
        count = len(group)
        accepted = sum(is_accepted for _, is_accepted in group)
        rate = accepted / count
        square = _Z95**2 / count
        middle = rate + square / 2
        half = _Z95 * math.sqrt(rate * (1 - rate) / count + square / (4 * count))
        return {
            "judged": count,
            "accepted": accepted,
            name: fmean(number for number, _ in group),
            "rate": rate,
            "rate_low": max(0.0, (middle - half) / (1 + square)),
            "rate_high": min(1.0, (middle + half) / (1 + square)),
        }

    return binned(judged, lambda each: each[0], edges, figures)


def judged_predictions(round_: Round) -> Iterator[Judged]:
    """Yields the predicted acceptance probabilities of the accepted tokens and of the first
    rejected one, each with whether its token was accepted.

    In a draft that is a tree, a prediction is for a level, which is accepted if one of its tokens
    is. Tokens without a prediction are left out.
    """
    accepted = len(round_.verdict.path)
    judged = accepted + (round_.verdict.source == "correction")
    for position, probability in enumerate(round_.draft.predicted[:judged]):
        if not math.isnan(probability):
            yield probability, position < accepted


def calibration_of(predictions: Sequence[Judged]) -> dict[str, Any] | None:
    """Compares predicted acceptance probabilities with what verification accepted; None without
    predictions.

    `judged` is the number of predictions, `predicted` their mean, and `rate` the share of their
    tokens that was accepted. `error` is the expected calibration error: the mean over `bins`
    (tenths of the predicted probability) of the distance between `predicted` and `rate`, weighted
    by the bins' numbers of tokens.
    """
    if not predictions:
        return None
    bins = acceptance_bins(predictions, _TENTHS, "predicted")
    predicted, rate = (fmean(column) for column in zip(*predictions, strict=True))
    error = sum(each["judged"] * abs(each["predicted"] - each["rate"]) for each in bins) / len(
        predictions
    )
    return {
        "judged": len(predictions),
        "predicted": predicted,
        "rate": rate,
        "error": error,
        "bins": bins,
    }


# bounds of the acceptance probability


def pinsker(divergence: float) -> float:
    """Pinsker's lower bound of the acceptance probability: 1 - sqrt(KL(q||p) / 2), at least 0
    (SVIP, Eq. 4 and 5). `divergence` is KL(q||p) in nats, with the target's p and the draft's q."""
    return max(0.0, 1 - math.sqrt(max(divergence, 0.0) / 2))


def bretagnolle_huber(divergence: float) -> float:
    """The Bretagnolle-Huber lower bound of the acceptance probability: 1 - sqrt(1 - exp(-KL(q||p)))
    (SVIP, Eq. 9, Appendix B). `divergence` is KL(q||p) in nats, with the target's p and the draft's
    q."""
    return max(0.0, 1 - math.sqrt(-math.expm1(-max(divergence, 0.0))))


def estimate(entropy: float, c: float) -> float:
    """SVIP's estimate of the acceptance probability: 1 - sqrt(c H(q)), at least 0 (SVIP, Eq. 6).
    `entropy` is H(q), the entropy of the draft's distribution in nats.

    It is not a lower bound, because it assumes that the ratio of cross-entropy to entropy is
    constant.
    """
    return max(0.0, 1 - math.sqrt(max(c * entropy, 0.0)))


def bounds_of(tokens: Iterable[DraftedToken], c: float) -> dict[str, Any] | None:
    """Compares the acceptance probabilities of drafted tokens with their lower bounds and with
    SVIP's estimate with constant c.

    Reads the tokens whose entropy, overlap and KL divergence were recorded; returns None if there
    are none.

    `below_estimate` is the share of tokens whose acceptance probability is below the estimate.
    `entropy_ratio` is the median of H(q,p) / H(q), cross-entropy by entropy, `measured_c` the
    constant c that follows from it, and `entropy_ratios` the histogram of this ratio (SVIP, Figure
    3). If every entropy is close to 0, `entropy_ratio` and `measured_c` are None and the histogram
    is empty. `by_entropy` has medians for ranges of the entropy (Figure 2, top), `by_acceptance`
    for groups of equal size of the tokens sorted by their acceptance probability, lowest first
    (Figure 4). `pinsker_gap` and `bretagnolle_huber_gap` are the mean distances from the bounds up
    to the acceptance probability, `pinsker_higher` is the share of tokens for which Pinsker's bound
    is the higher of the two (Appendix B), and `pinsker_tighter` says how much smaller its mean
    distance is: 0.1 is 10 % smaller, negative is larger; None if Bretagnolle and Huber's bound is
    exact.
    """
    recorded = [
        token for token in tokens if not math.isnan(token.entropy + token.overlap + token.kl)
    ]
    if not recorded:
        return None
    recorded.sort(key=lambda token: token.overlap)
    count = len(recorded)
    groups = min(_GROUPS, len(recorded))
    ratios = [1 + token.kl / token.entropy for token in recorded if token.entropy > _LEAST_ENTROPY]
    ratio = median(ratios) if ratios else None
    gap = fmean(token.overlap - pinsker(token.kl) for token in recorded)
    other_gap = fmean(token.overlap - bretagnolle_huber(token.kl) for token in recorded)
    equal = [
        recorded[group * count // groups : (group + 1) * count // groups] for group in range(groups)
    ]

    def medians(group: Sequence[DraftedToken]) -> Bin:
        return {
            "tokens": len(group),
            "entropy": median(token.entropy for token in group),
            "acceptance": median(token.overlap for token in group),
            "pinsker": median(pinsker(token.kl) for token in group),
            "bretagnolle_huber": median(bretagnolle_huber(token.kl) for token in group),
            "estimate": median(estimate(token.entropy, c) for token in group),
        }

    return {
        "tokens": count,
        "c": c,
        "below_estimate": fmean(token.overlap < estimate(token.entropy, c) for token in recorded),
        "entropy_ratio": ratio,
        "measured_c": None if ratio is None else (ratio - 1) / 2,
        "pinsker_gap": gap,
        "bretagnolle_huber_gap": other_gap,
        "pinsker_higher": fmean(
            pinsker(token.kl) > bretagnolle_huber(token.kl) for token in recorded
        ),
        "pinsker_tighter": 1 - gap / other_gap if other_gap > 0 else None,
        "entropy_ratios": binned(ratios, float, _RATIOS, lambda group: {"tokens": len(group)}),
        "by_entropy": binned(recorded, lambda token: token.entropy, _ENTROPIES, medians),
        "by_acceptance": [
            {"low": group[0].overlap, "high": group[-1].overlap, **medians(group)}
            for group in equal
        ],
    }


# runs


def complete_runs(rounds: Iterable[Round]) -> Iterator[int]:
    """Yields, for each rejection in the rounds of one output, the number of tokens accepted since
    the rejection before it, as PEARL's authors count them.

    What follows the last rejection is no complete run: the output's end, not the target, ended it.
    """
    accepted = 0
    for round_ in rounds:
        accepted += len(round_.verdict.path)
        if round_.verdict.source == "correction":
            yield accepted
            accepted = 0


class TraceStatistics:
    """Statistics over one or more recorded runs (generations) of one method."""

    def __init__(self, method: str) -> None:
        self.summary = Figures(method)
        self.tokens: list[DraftedToken] = []  # only of drafts with recorded entropies
        self.drafts: list[DraftOutcome] = []  # only those with recorded entropies
        self.predictions: list[Judged] = []  # predicted acceptance probabilities of judged tokens
        self.runs = 0
        self.accepted_runs: list[int] = []  # accepted tokens before each rejection
        self.branches = False  # drafts are trees, or several chains at once
        self.speeds: list[float] = []  # tokens per second of each run
        # SVIP's constant: the first run's setting c, or if it has none AUTHORS_C
        self.c = AUTHORS_C

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
        """Adds a round's draft to the statistics; to `drafts` only if the entropies of all its
        verified tokens are known.

        The rejected children of a node of a draft tree share one distribution, so only the first of
        them counts as verified.
        """
        draft = traced.round.draft
        path = traced.round.verdict.path
        statuses = traced.round.statuses
        self.branches |= not draft.is_chain
        self.predictions += judged_predictions(traced.round)
        if not draft.entropies:
            return
        agreement = traced.round.verdict.agreement
        known = () if agreement is None else (agreement.overlap, agreement.kl)
        self.tokens += map(DraftedToken, statuses, draft.entropies, *known)
        rejected = (
            [statuses.index(TokenStatus.REJECTED)] if TokenStatus.REJECTED in statuses else []
        )
        entropies = [draft.entropies[node] for node in (*path, *rejected)]
        if entropies and not math.isnan(mean := fmean(entropies)):
            self.drafts.append(DraftOutcome(mean, len(path)))

    @property
    def mean_accepted_length(self) -> float | None:
        """Accepted tokens per round that has a draft. None if no round has one."""
        return self.summary.accepted / self.summary.drafts if self.summary.drafts else None

    def runs_of_accepted(self) -> dict[str, Any] | None:
        """Compares the runs of accepted tokens with PEARL's Theorem 2. None if nothing was
        rejected.

        A run is complete if a rejection ends it. `complete` is the number of such runs, and `mean`
        their mean length, counting the token that corrects each. `alpha` is the share of accepted
        tokens among the accepted and the rejected ones. `expected` is the mean length by Theorem 2:
        1 / (1 - alpha). `expected` may exceed `mean`, because long runs are more often cut short by
        the output's end: `unfinished` counts the tokens that were accepted after the last rejection
        of their output. The theorem assumes that tokens are accepted independently and with the
        same probability. `deviation` is the standard deviation of the lengths of complete runs,
        `expected_deviation` its value under this assumption: sqrt(alpha) / (1 - alpha). `longest`
        is their maximum.

        `Figures.mean_accepted_run` is alpha / (1 - alpha) by its definition, so it cannot test the
        theorem.
        """
        if not (lengths := self.accepted_runs):
            return None
        rejected = self.summary.rejections / (self.summary.accepted + self.summary.rejections)
        return {
            "complete": len(lengths),
            "alpha": 1 - rejected,
            "mean": fmean(lengths) + 1,
            "expected": 1 / rejected,
            "deviation": pstdev(lengths),
            "expected_deviation": math.sqrt(1 - rejected) / rejected,
            "longest": max(lengths),
            "unfinished": self.summary.accepted - sum(lengths),
        }

    def acceptance_by_entropy(self) -> list[Bin]:
        """Returns the acceptance rate of verified tokens for each range of the draft's entropy
        (SVIP, Figure 2, top)."""
        verified = [token for token in self.tokens if token.status is not TokenStatus.DISCARDED]
        judged = ((token.entropy, token.status is TokenStatus.ACCEPTED) for token in verified)
        return acceptance_bins(judged, _ENTROPIES, "mean")

    def accepted_length_by_entropy(self) -> list[Bin]:
        """Returns the accepted tokens per draft for each range of the draft's mean entropy (SVIP,
        Figures 2, bottom, and 8).

        The paper does not say which entropy of a draft it plots; this is the mean over its verified
        tokens.
        """

        def figures(drafts: list[DraftOutcome]) -> Bin:
            entropies, lengths = zip(*drafts, strict=True)
            averages = {
                "mean_entropy": fmean(entropies),
                "mean": fmean(lengths),
                "median": median(lengths),
            }
            return {"drafts": len(drafts), **averages, "longest": max(lengths)}

        return binned(self.drafts, lambda draft: draft.entropy, _ENTROPIES, figures)

    def length_correlation(self) -> float | None:
        """Returns Pearson's correlation of a draft's mean entropy and its number of accepted
        tokens.

        None for less than two drafts, if all have the same mean entropy, or if all have the same
        number of accepted tokens.
        """
        try:
            return correlation(
                [draft.entropy for draft in self.drafts], [draft.accepted for draft in self.drafts]
            )
        except StatisticsError:
            return None

    def as_dict(self) -> dict[str, Any]:
        """The statistics as an object for `specgen inspect --json`."""
        figures = self.summary.as_dict("", "")
        for name in ("text", "token_ids", "finish_reason"):
            del figures[name]
        return {
            **figures,
            "mean_draft_length": self.summary.mean_draft_length,
            "mean_accepted_length": self.mean_accepted_length,
            "accepted_runs": self.runs_of_accepted(),
            "acceptance_by_entropy": self.acceptance_by_entropy(),
            "accepted_length_by_entropy": self.accepted_length_by_entropy(),
            "length_correlation": self.length_correlation(),
            "calibration": calibration_of(self.predictions),
            "bounds": bounds_of(self.tokens, self.c),
        }


def setting(run: TracedRun, name: str) -> float | None:
    """Returns the run's setting `name` if it is a finite number, otherwise None."""
    value = run.start["settings"].get(name)
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else None


def posteriors(rounds: Iterable[Round]) -> list[Bin]:
    """Returns what a bandit policy believes about the acceptance probability after each `round`:
    the `mean` of its posterior, and with `low` and `high` the central 90 % of the normal
    distribution with its mean and variance, clipped to probabilities.

    Empty if the run's policy is not a bandit with a normal posterior (Cali-TS) or a Beta posterior
    (Beta-TS).
    """
    found = []
    for round_ in rounds:
        moments = _moments(round_.policy_state or {})
        if moments is not None:
            mean, deviation = moments
            low = max(mean - _Z90 * deviation, 0.0)
            high = min(mean + _Z90 * deviation, 1.0)
            found.append({"round": round_.index, "mean": mean, "low": low, "high": high})
    return found


def _moments(state: Mapping[str, float]) -> tuple[float, float] | None:
    """Returns mean and standard deviation of the distribution whose parameters are in a policy's
    state; None if it has none."""
    if 0 <= state.get("mean", -1.0) <= 1 and state.get("deviation", -1.0) >= 0:
        return state["mean"], state["deviation"]
    alpha = state.get("alpha", 0.0)
    beta = state.get("beta", 0.0)
    if min(alpha, beta) <= 0:
        return None
    mean = alpha / (alpha + beta)
    return mean, math.sqrt(mean * (1 - mean) / (alpha + beta + 1))
