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
    """Groups items by the range between two of the `edges` (ascending) in which `number(item)`
    lies.

    Returns a bin for each range that has items: its ends `low` and `high`, and what `figures`
    returns for its items. Items whose number is NaN are left out. A number below all edges counts
    to the first range, one above all edges to the last.
    """
    groups: dict[int, list[_Item]] = {}
    for item in items:
        value = number(item)
        if not math.isnan(value):
            edge = bisect_right(edges, value, 1, len(edges) - 1)
            groups.setdefault(edge, []).append(item)

    bins = []
    for edge, group in sorted(groups.items()):
        high = edges[edge] if math.isfinite(edges[edge]) else None
        bins.append({"low": edges[edge - 1], "high": high, **figures(group)})
    return bins


# acceptance by a number that was known before


def acceptance_bins(judged: Iterable[Judged], edges: Sequence[float], name: str) -> list[Bin]:
    """Returns how many drafted tokens were accepted, by ranges (between `edges`) of a number such
    as the entropy.

    `judged` has for each token the number, and whether it was accepted. A bin has the counts
    `judged` and `accepted`, the acceptance `rate` with its 95 % Wilson confidence interval from
    `rate_low` to `rate_high`, and under `name` the mean of the numbers.
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

    return binned(judged, lambda pair: pair[0], edges, figures)


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
    """Compares predicted acceptance probabilities with what was accepted; None without predictions.

    `judged` is the number of predictions, `predicted` their mean, and `rate` the share of their
    tokens that was accepted. `error` is the expected calibration error: the mean distance of
    `predicted` and `rate` over `bins` (tenths of the predicted probability), weighted by the bins'
    numbers of tokens.
    """
    if not predictions:
        return None
    bins = acceptance_bins(predictions, _TENTHS, "predicted")
    count = len(predictions)
    predicted, rate = (fmean(column) for column in zip(*predictions, strict=True))
    distances = (row["judged"] * abs(row["predicted"] - row["rate"]) for row in bins)
    return {
        "judged": count,
        "predicted": predicted,
        "rate": rate,
        "error": sum(distances) / count,
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
    SVIP's estimate with constant c. None if no token's entropy, overlap and KL divergence were
    recorded.

    - `tokens`: the number of tokens compared, those with all three numbers; `c`: the constant.
    - `below_estimate`: the share of tokens whose acceptance probability is below the estimate.
    - `entropy_ratio`: the median of H(q,p) / H(q), cross-entropy by entropy; `measured_c`: the
      constant c that follows from it; both None if every entropy is close to 0. `entropy_ratios`:
      the histogram of this ratio (SVIP, Figure 3).
    - `by_entropy`: medians for ranges of the entropy (Figure 2, top). `by_acceptance`: medians for
      groups of equal size of the tokens sorted by acceptance probability, lowest first (Figure 4).
    - `pinsker_gap`, `bretagnolle_huber_gap`: the mean distances from the bounds up to the
      acceptance probability. `pinsker_higher`: the share of tokens for which Pinsker's bound is the
      higher one (Appendix B). `pinsker_tighter`: how much smaller its mean distance is (0.1: 10 %
      smaller; negative: larger), None if the other bound is exact.
    """
    recorded = [
        token for token in tokens if not math.isnan(token.entropy + token.overlap + token.kl)
    ]
    if not recorded:
        return None
    ratios = [1 + token.kl / token.entropy for token in recorded if token.entropy > _LEAST_ENTROPY]
    ratio = median(ratios) if ratios else None
    gap = fmean(token.overlap - pinsker(token.kl) for token in recorded)
    other_gap = fmean(token.overlap - bretagnolle_huber(token.kl) for token in recorded)

    def medians(group: Sequence[DraftedToken]) -> Bin:
        return _medians(group, c)

    by_acceptance = []
    for group in _equal_groups(sorted(recorded, key=lambda token: token.overlap)):
        by_acceptance.append({"low": group[0].overlap, "high": group[-1].overlap, **medians(group)})
    return {
        "tokens": len(recorded),
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
        "by_acceptance": by_acceptance,
    }


def _medians(group: Sequence[DraftedToken], c: float) -> Bin:
    return {
        "tokens": len(group),
        "entropy": median(token.entropy for token in group),
        "acceptance": median(token.overlap for token in group),
        "pinsker": median(pinsker(token.kl) for token in group),
        "bretagnolle_huber": median(bretagnolle_huber(token.kl) for token in group),
        "estimate": median(estimate(token.entropy, c) for token in group),
    }


def _equal_groups(tokens: Sequence[DraftedToken]) -> Iterator[Sequence[DraftedToken]]:
    """Yields the tokens in `_GROUPS` groups of equal size, as nearly as their number allows."""
    count = len(tokens)
    groups = min(_GROUPS, count)
    for group in range(groups):
        yield tokens[group * count // groups : (group + 1) * count // groups]


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
        self.predictions: list[Judged] = []  # predicted acceptance probabilities
        self.runs = 0
        self.accepted_runs: list[int] = []  # accepted tokens before each rejection
        self.branches = False  # whether a draft was a tree or several chains
        self.speeds: list[float] = []  # tokens per second of each run
        # SVIP's constant: the first run's setting c, or if it has none AUTHORS_C
        self.c = AUTHORS_C

    def add(self, run: TracedRun) -> None:
        self.runs += 1
        if self.runs == 1:
            self.c = setting(run, "c") or AUTHORS_C
        run.add_to(self.summary)
        self.accepted_runs += complete_runs(traced.round for traced in run.rounds)
        speed = run.fold().tokens_per_second
        if speed:
            self.speeds.append(speed)
        for traced in run.rounds:
            self._add_draft(traced)

    def _add_draft(self, traced: TracedRound) -> None:
        """Adds a round's draft; to `drafts` only if the entropies of all its verified tokens are
        known.

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
        overlaps = () if agreement is None else (agreement.overlap, agreement.kl)
        self.tokens += map(DraftedToken, statuses, draft.entropies, *overlaps)

        rejected = []
        if TokenStatus.REJECTED in statuses:
            rejected.append(statuses.index(TokenStatus.REJECTED))
        entropies = [draft.entropies[node] for node in (*path, *rejected)]
        mean = fmean(entropies) if entropies else math.nan
        if not math.isnan(mean):
            self.drafts.append(DraftOutcome(mean, len(path)))

    @property
    def mean_accepted_length(self) -> float | None:
        """Accepted tokens per round that has a draft. None if no round has one."""
        return self.summary.accepted / self.summary.drafts if self.summary.drafts else None

    def runs_of_accepted(self) -> dict[str, Any] | None:
        """Compares the runs of accepted tokens with PEARL's Theorem 2, which assumes that tokens
        are accepted independently, with the same probability. None if nothing was rejected.

        - `complete`: the number of runs that a rejection ends. Of their lengths, `mean` is the mean
          (with the token that corrects each), `deviation` the standard deviation, `longest` the
          maximum.
        - `unfinished`: the tokens accepted after the last rejections of the outputs.
        - `alpha`: the share of accepted tokens among the accepted and the rejected ones.
        - `expected`: the mean length by the theorem, 1 / (1 - alpha); `expected_deviation`:
          sqrt(alpha) / (1 - alpha). `expected` may exceed `mean`, because long runs are more often
          cut short by the output's end.

        `Figures.mean_accepted_run` is alpha / (1 - alpha) by its definition, so it cannot test the
        theorem.
        """
        lengths = self.accepted_runs
        if not lengths:
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
        """Returns the acceptance rate of verified tokens for each range of the entropy of the
        draft's distribution (SVIP, Figure 2, top). See `acceptance_bins`; `mean` is the mean
        entropy."""
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
            lengths = [draft.accepted for draft in drafts]
            return {
                "drafts": len(drafts),
                "mean_entropy": fmean(draft.entropy for draft in drafts),
                "mean": fmean(lengths),
                "median": median(lengths),
                "longest": max(lengths),
            }

        return binned(self.drafts, lambda draft: draft.entropy, _ENTROPIES, figures)

    def length_correlation(self) -> float | None:
        """Returns Pearson's correlation of the drafts' mean entropies and numbers of accepted
        tokens. None for fewer than two drafts, and if all entropies or all numbers are equal."""
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
    the `mean` of its posterior, and from `low` to `high` the central 90 % of the normal
    distribution with its mean and variance, clipped to probabilities.

    Empty if the policy is no bandit with a normal posterior (Cali-TS) or a Beta posterior
    (Beta-TS).
    """
    beliefs = []
    for round_ in rounds:
        moments = _moments(round_.policy_state or {})
        if moments is not None:
            mean, deviation = moments
            low = max(mean - _Z90 * deviation, 0.0)
            high = min(mean + _Z90 * deviation, 1.0)
            beliefs.append({"round": round_.index, "mean": mean, "low": low, "high": high})
    return beliefs


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
