"""The charts of a recorded method, for the terminal's report and for the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from rich.text import Text

from specgen.base.types import Round, TokenStatus
from specgen.traces.acceptance import (
    AcceptanceBin,
    Bounds,
    BoundsBin,
    DraftedToken,
    bounds_of,
    bretagnolle_huber,
    calibration_of,
    estimate,
    pinsker,
)
from specgen.traces.reader import TracedRun
from specgen.traces.statistics import TraceStatistics, posteriors, setting
from specgen.view.charts import Bar, Chart, Label, Series, ticks
from specgen.view.theme import counted

MOST_COLUMNS = 200  # more rounds than this are drawn as means over neighbouring rounds
MOST_POINTS = 1500  # of more tokens or drafts every n-th is drawn, and the page says so
MOST_SORTED = 600  # the same for the tokens sorted by acceptance probability; each has four marks
_CURVE = 60  # segments of a curve
_KINDS = {"acc": "accepted", "own": "chosen by the target", "rej": "rejected", "dis": "discarded"}
_NO_DISTRIBUTIONS = "--record distributions adds to a trace how likely acceptance is, its lower bounds, and the cross-entropy."


def charts(run: TracedRun, found: TraceStatistics) -> Iterator[Chart]:
    """Yields the charts for which the trace has numbers. `found` has those of all generations of the method; the page's chart of
    rounds and the posterior are of `run` alone."""
    bounds, rounds = bounds_of(found.tokens, found.c), [traced.round for traced in run.rounds]
    if rounds and found.summary.drafted:
        yield _rounds(rounds, found)
    if (chart := _until_rejection(found)) is not None:
        yield chart
    if found.tokens:
        yield _entropy(found, bounds, stop_entropy(run))
    if found.drafts:
        yield _lengths(found)
    yield from _calibration(found)
    if bounds is not None:
        yield _sorted(found, bounds)
        yield from _ratios(found, bounds)
    yield from _posterior(rounds)


def stop_entropy(run: TracedRun) -> float | None:
    """Returns the draft entropy H in nats above which svip stops drafting; None for other methods.

    The rule of svip is to stop where sqrt(c H) > threshold; c and threshold are settings of the method.
    """
    c, threshold = setting(run, "c"), setting(run, "threshold")
    return threshold**2 / c if c and threshold is not None else None


def _rounds(rounds: Sequence[Round], found: TraceStatistics) -> Chart:
    """A column per round, its kept tokens above the axis, the others below it.

    In a terminal the rounds of all generations from left to right. The length of a draft that is a tree is its number of nodes.
    """
    drawn, thinned = _thinned(rounds, MOST_COLUMNS, "rounds")
    columns = [(at, 1, _round_title(round_), _bars(round_)) for at, round_ in enumerate(drawn)]
    up, down = max(1, *(bars[1][2] for *_, bars in columns)), -min(bars[3][1] for *_, bars in columns)
    kept = sum(len(round_.token_ids) for round_ in rounds) / len(rounds)
    lengths, accepted = ([each[part] for each in found.lengths] for part in (0, 1))
    means = f"mean {found.summary.mean_draft_length or 0:.1f} and {found.mean_accepted_length or 0:.1f}"
    if longest := max(lengths, default=0):
        means += f", {'most' if found.branches else 'longest'} {longest}"
    return Chart(
        "rounds",
        "Tokens of each round, drafted and accepted",
        means,
        sparks=[("drafted", lengths, "bar.plain"), ("accepted", accepted, "token.accepted")] if longest else [],
        top=longest,
        series=[
            *(Series("square", kind, (), meaning) for kind, meaning in _KINDS.items()),
            Series("column", "", columns),
            Series("horizontal", "axis", [0]),
            Series("horizontal", "mean", [kept], f"mean, {kept:.2f} tokens per pass"),
        ],
        left=[*ticks(up, 3, whole=True), *((-at, text) for at, text in ticks(down, 3, whole=True)[1:])],
        below=[(at + 0.5, f"{drawn[round(at)].index:,}") for at, _ in ticks(len(drawn) - 1, 8, whole=True)],
        thinned=thinned,
        end=len(drawn),
        low=-down,
        high=up,
        height=32 + min(13.0 * (up + down), 200.0),
    )


def _bars(round_: Round) -> list[tuple[str, int, int]]:
    """Returns the bars of a column: up from the axis accepted tokens, then the target's own; down rejected, then discarded."""
    accepted, rejected, discarded = (round_.statuses.count(status) for status in TokenStatus)
    top, bottom = accepted + (round_.verdict.token is not None), -rejected - discarded
    return [("acc", 0, accepted), ("own", accepted, top), ("rej", -rejected, 0), ("dis", bottom, -rejected)]


def _round_title(round_: Round) -> str:
    """Returns the tooltip of a column: what happened in its round."""
    drafted, verdict = len(round_.draft.tokens), round_.verdict
    draft = f"{len(verdict.path):,} of {drafted:,} accepted" if drafted else "nothing drafted"
    own = "" if verdict.token is None else f", then the {verdict.source or 'own'} token"
    return f"round {round_.index:,}: {'prompt processed' if round_.mode == 'prefill' else draft}{own}"


def _until_rejection(found: TraceStatistics) -> Chart | None:
    """The lengths of PEARL's runs of accepted tokens, beside what its Theorem 2 expects. None if nothing was rejected."""
    runs = found.runs_of_accepted() if found.summary.parallel else None
    if runs is None:
        return None
    rest = f"; {counted(runs.unfinished, 'token')} accepted after the last rejections" if runs.unfinished else ""
    expected = f"1/(1−α) = {runs.expected:.1f} by Theorem 2, α {runs.alpha:.0%} with unfinished runs"
    notes = [
        f"{counted(runs.complete, 'complete run')}, longest {runs.longest:,}{rest}.",
        f"Mean: {runs.mean:.1f} with the correction; {expected}.",
        f"Deviation: {runs.deviation:.1f}; {runs.expected_deviation:.1f} if tokens were accepted independently.",
    ]
    return Chart("until-rejection", "Tokens until a rejection", notes=notes)


def _entropy(found: TraceStatistics, bounds: Bounds | None, stop: float | None) -> Chart:
    """Acceptance by the entropy of the draft's distribution (SVIP, Figure 2, top), with the bounds of Figure 4.

    If the trace has acceptance probabilities, the page has a point per drafted token, and lower bounds of that probability. If
    not, it has the share of accepted tokens by entropy. `stop` is the entropy in nats above which svip stops drafting, None for
    other methods.
    """
    bins, thinned = found.acceptance_by_entropy(), ""
    if bounds is None:
        right = _right_end(each.mean for each in bins)
        series = [_intervals(bins, lambda each: f"entropy {span(each.low, each.high)}: {_accepted(each)}")]
        notes, rows = [_NO_DISTRIBUTIONS], []
    else:
        drawn, thinned = _thinned([token for token in found.tokens if token.is_recorded], MOST_POINTS, "tokens")
        right = _right_end(token.entropy for token in drawn)
        series = [*_token_series(drawn)]
        for kind, meaning in (("pinsker", "Pinsker's bound"), ("bretagnolle_huber", "Bretagnolle and Huber's bound")):
            series.append(Series("line", kind, [(each.entropy, getattr(each, kind)) for each in bounds.by_entropy], meaning))
        rows = _bounds_table("entropy", [span(each.low, each.high) for each in bounds.by_entropy], bounds.by_entropy)
        below = f"{bounds.below_estimate:.0%} of {counted(bounds.tokens, 'token')} lie below {_svips(bounds.c)} (no bound)."
        notes = [f"Medians by entropy of the overlap Σ min(p, q) (true) and of its lower bounds. {below}"]
    curve = (right * (index / _CURVE) ** 2 for index in range(_CURVE + 1))  # more points on the left, where it is steep
    series.append(Series("line", "est", [(x, estimate(x, found.c)) for x in curve], _svips(found.c)))
    if stop is not None and 0 < stop < right:
        series += [Series("vertical", "stop", [stop]), Series("text", "halo", [(stop, "svip stops from here")])]
    return Chart(
        "bins" if bounds is None else "scatter",
        "Draft entropy and acceptance",
        "share accepted by entropy in nats; number of tokens",
        notes=notes,
        bars=[_bar(each, f"{each.rate:>4.0%}") for each in bins],
        rows=rows,
        series=series,
        below=_entropies(right),
        thinned=thinned,
        end=right,
        height=320.0,
    )


def _token_series(drawn: Iterable[DraftedToken]) -> Iterator[Series]:
    """Yields a series of the tokens of each status."""
    points: dict[TokenStatus, list[tuple[float, float, str]]] = {status: [] for status in TokenStatus}
    for token in drawn:
        title = f"“{token.text}”: {token.status.value}, entropy {token.entropy:.2f}, acceptance {token.overlap:.2f}"
        points[token.status].append((token.entropy, token.overlap, title))
    yield Series("dot", "acc", points[TokenStatus.ACCEPTED], "accepted")
    yield Series("cross", "rej", points[TokenStatus.REJECTED], "rejected")
    yield Series("small dot", "dis", points[TokenStatus.DISCARDED], "discarded")


def _intervals(bins: Iterable[AcceptanceBin], title: Callable[[AcceptanceBin], str]) -> Series:
    points = [(each.mean, each.rate, each.rate_low, each.rate_high, title(each)) for each in bins]
    return Series("interval", "acc", points, "accepted, with its 95% interval")


def _accepted(found: AcceptanceBin) -> str:
    return f"{found.accepted:,} of {found.judged:,} accepted, {found.rate:.0%}"


def _bar(found: AcceptanceBin, number: str) -> Bar:
    return span(found.low, found.high), f"{number} {found.judged:>6,}", found.rate, "token.accepted"


def _svips(c: float) -> str:
    return f"svip's estimate, 1 − √({c:g} H)"


def _bounds_table(heading: str, labels: Iterable[str], bins: Iterable[BoundsBin]) -> list[list[str | Text]]:
    rows: list[list[str | Text]] = [[f"  {heading:<10}", "true", "Pinsker", "B–H", "1−√cH"]]
    for label, found in zip(labels, bins, strict=True):
        figures = [f"{number:.2f}" for number in (found.pinsker, found.bretagnolle_huber, found.estimate)]
        rows.append([f"  {label}", Text(f"{found.acceptance:.2f}", "token.accepted"), *figures])
    return rows


def _lengths(found: TraceStatistics) -> Chart:
    """The accepted tokens per draft by the mean entropy of its verified tokens: a point per draft, and means by entropy."""
    drawn, thinned = _thinned(found.drafts, MOST_POINTS, "drafts")
    right, longest = _right_end(draft.entropy for draft in drawn), max(1, *(draft.accepted for draft in found.drafts), 1)
    bins, correlation = found.accepted_length_by_entropy(), found.length_correlation()
    top = max((each.mean for each in bins), default=0.0) or 1.0
    said = "" if correlation is None else f" Correlation {correlation:.2f}.".replace("-", "−")
    title = "{0.accepted} of {0.drafted} accepted, mean entropy {0.entropy:.2f}"
    return Chart(
        "lengths",
        "Draft entropy and accepted length",
        "accepted tokens by mean entropy in nats; number of drafts",
        notes=[f"{counted(len(found.drafts), 'draft')}{_runs(found)}.{said}"],
        bars=[
            (span(each.low, each.high), f"{each.mean:>4.1f} {each.drafts:>6,}", each.mean / top, "token.accepted")
            for each in bins
        ],
        series=[
            Series("dot", "acc", [(draft.entropy, draft.accepted, title.format(draft)) for draft in drawn], "a draft"),
            Series("line", "mean", [(each.mean_entropy, each.mean) for each in bins], "mean by entropy"),
        ],
        left=ticks(longest, 4, whole=True),
        below=_entropies(right),
        thinned=thinned,
        end=right,
        high=longest,
    )


def _calibration(found: TraceStatistics) -> Iterator[Chart]:
    """The share of accepted tokens by the acceptance probability that the length policy predicted, with 95 % intervals."""
    if (calibration := calibration_of(found.predictions)) is None:
        return
    judged = f"Predicted {calibration.predicted:.1%} of {counted(calibration.judged, 'token')}, accepted {calibration.rate:.1%}."
    yield Chart(
        "calibration",
        "Predicted and observed acceptance",
        "mean prediction, share accepted; number of tokens",
        notes=[f"{judged} Calibration error {calibration.error:.3f}: the mean distance of both over the intervals."],
        bars=[_bar(each, f"{each.mean:>4.0%} {each.rate:>4.0%}") for each in calibration.bins],
        series=[
            Series("line", "est", [(0.0, 0.0), (1.0, 1.0)], "exact predictions"),
            _intervals(calibration.bins, lambda each: f"{_accepted(each)}; predicted {each.mean:.0%}"),
        ],
        left=ticks(1.0, 4, "{:.0%}"),
        below=ticks(1.0, 4, "{:.0%}"),
    )


def _sorted(found: TraceStatistics, bounds: Bounds) -> Chart:
    """Tokens sorted by acceptance probability, with each one's bounds as marks (SVIP, Figure 4); in a terminal tenths of them."""
    tokens = sorted((token for token in found.tokens if token.is_recorded), key=lambda token: token.overlap)
    drawn, thinned = _thinned(tokens, MOST_SORTED, "tokens")
    groups, gaps = len(bounds.by_acceptance), f"Pinsker {bounds.pinsker_gap:.2f}, B–H {bounds.bretagnolle_huber_gap:.2f}"
    labels = [f"{low}–{high}%" for low, high in pairwise(round(100 * number / groups) for number in range(groups + 1))]
    said, tighter = f"Mean distance to the true probability: {gaps}.", bounds.pinsker_tighter
    if tighter is not None:
        how = f"{abs(tighter):.0%} {'tighter' if tighter >= 0 else 'looser'}"
        said += f" Pinsker's bound is {how}, and the higher one for {bounds.pinsker_higher:.0%} of the tokens."

    def placed(shape: Any, kind: str, meaning: str, figure: Callable[[DraftedToken], float]) -> Series:
        return Series(shape, kind, [(index + 0.5, figure(token)) for index, token in enumerate(drawn)], meaning)

    return Chart(
        "sorted",
        "Tokens sorted by acceptance probability",
        "medians of equal shares of the tokens",
        notes=[said],
        rows=_bounds_table("tokens", labels, bounds.by_acceptance),
        series=[
            placed("speck", "est", _svips(bounds.c), lambda token: estimate(token.entropy, bounds.c)),
            placed("speck", "pinsker", "Pinsker's bound", lambda token: pinsker(token.kl)),
            placed("stroke", "bh", "Bretagnolle and Huber's (B–H)", lambda token: bretagnolle_huber(token.kl)),
            placed("line", "true", "acceptance probability", lambda token: token.overlap),
        ],
        below=[(0, "least likely"), (len(drawn) / 2, counted(bounds.tokens, "token")), (len(drawn), "most likely")],
        thinned=thinned,
        end=len(drawn),
    )


def _ratios(found: TraceStatistics, bounds: Bounds) -> Iterator[Chart]:
    """A histogram of the cross-entropy divided by the draft's entropy (SVIP, Figure 3). The last column has all larger ratios."""
    if (median := bounds.entropy_ratio) is None:
        return
    bins, assumed = bounds.entropy_ratios, 1 + 2 * bounds.c
    count, last, width = sum(each.tokens for each in bins), bins[-1].low, bins[0].high - bins[0].low
    shares = [(each, each.tokens / count, span(each.low, each.high)) for each in bins]
    highest, left_out = max(share for _, share, _ in shares), bounds.tokens - count
    said = f"median {median:.2f}: c would be {bounds.measured_c:.2f}"
    few = f" Left out: {counted(left_out, 'token')} with almost no entropy." if left_out else ""
    columns = [
        (each.low, width, f"{label}: {counted(each.tokens, 'token')}, {share:.0%}", [("bar", 0.0, share)])
        for each, share, label in shares
    ]
    yield Chart(
        "ratios",
        "Cross-entropy over the draft's entropy",
        f"share of {counted(count, 'token')}",
        notes=[f"{counted(count, 'token')}{_runs(found)}; {said}; c = {bounds.c:g} assumes {assumed:g}.{few}"],
        bars=[(label, f"{share:>4.0%}", share, "bar") for each, share, label in shares if each.tokens],
        series=[
            Series("column", "", columns),
            Series("vertical", "assumed", [min(assumed, last + width / 2)], f"{assumed:g}, which c = {bounds.c:g} assumes"),
            Series("vertical", "median", [min(median, last + width / 2)], said),
        ],
        left=ticks(highest, 4, "{:.0%}"),
        below=[(1, "1"), (1.5, "1.5"), (2, "2"), (2.5, "2.5"), (last + width, f"over {last:g}")],
        start=1,
        end=last + width,
        high=highest,
    )


def _posterior(rounds: Sequence[Round]) -> Iterator[Chart]:
    """What a bandit policy believes about the acceptance probability after each round: the mean and the central 90 %."""
    if not (found := posteriors(rounds)):
        return
    last, end = found[-1], max(found[-1].round, 1)
    highs, lows, means = ([(each.round, getattr(each, name)) for each in found] for name in ("high", "low", "mean"))
    sparks = [("95% below", highs, "bar"), ("mean", means, "bar"), ("5% below", lows, "bar")]
    yield Chart(
        "posterior",
        "Thompson sampling: the posterior of the acceptance rate",
        f"θ {last.mean:.2f} ({last.low:.2f}–{last.high:.2f}) after round {last.round:,}",
        sparks=[(label, [value for _, value in values], style) for label, values, style in sparks],
        series=[
            Series("area", "band", [*highs, *reversed(lows)], "its central 90%"),
            Series("line", "est mean", means, "mean of the posterior"),
        ],
        below=ticks(end, 8, "{:,}", whole=True),
        end=end,
        height=180.0,
    )


def span(low: float, high: float) -> str:
    """Returns a range of numbers as text; `high` may be infinite."""
    return f"{low:g}–{high:g}" if math.isfinite(high) else f"{low:g} and up"


def _entropies(right: float) -> list[Label]:
    """Returns the labels of an axis of entropies from 0 to `right` nats."""
    return [*(each for each in ticks(right, 4) if each[0] < 0.9 * right), (right, "nats")]


def _right_end(entropies: Iterable[float]) -> float:
    return max(0.5, max(entropies, default=0.0) * 1.02)


def _thinned(items: Sequence[Any], most: int, name: str) -> tuple[Sequence[Any], str]:
    """Returns at most `most` of the items, evenly spaced, and a sentence about it; an empty one if all of them are returned."""
    step = max(1, math.ceil(len(items) / most))
    return items[::step], f"One in {step:,} of {len(items):,} {name} is drawn." if step > 1 else ""


def _runs(statistics: TraceStatistics) -> str:
    return f" of {statistics.runs:,} runs" if statistics.runs > 1 else ""
