"""The charts of a recorded generation, and of all generations of its method in the trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specgen.base.types import Round, TokenStatus
from specgen.traces.acceptance import AcceptanceBin, Bounds, DraftedToken, bretagnolle_huber, estimate, pinsker
from specgen.traces.reader import TracedRun
from specgen.traces.statistics import TraceStatistics, posteriors, setting
from specgen.view.html.charts import Figure, Series, entropy_ticks, tick_step
from specgen.view.theme import counted
from specgen.view.trace_report import calibration_text, correlation_text, runs_until_rejection, span, tightness

MOST_COLUMNS = 200  # more rounds than this are drawn as means over neighbouring rounds
MOST_POINTS = 1500  # of more tokens or drafts every n-th is drawn, and the note says so
MOST_SORTED = 600  # the same for the tokens sorted by acceptance probability; each has four marks
_CURVE = 60  # segments of a curve
_BOUNDS = (("pinsker", "pinsker", "Pinsker's bound"), ("bh", "bretagnolle_huber", "Bretagnolle and Huber's bound"))
_QUARTERS = [(quarter / 4, f"{quarter / 4:g}" if quarter % 2 == 0 else "") for quarter in range(5)]  # of the left axis


def figures(run: TracedRun, own: TraceStatistics, all_runs: TraceStatistics) -> list[Figure]:
    """Returns the charts for which the trace has numbers. `own` are the statistics of `run`, `all_runs` those of its method."""
    bounds, rounds = all_runs.bounds(), [traced.round for traced in run.rounds]
    texts = [text for traced in run.rounds if traced.round.draft.entropies for text in traced.draft_texts]
    made = (
        _rounds(rounds) if rounds and own.summary.drafted else None,
        _until_rejection(all_runs) if own.summary.parallel else None,
        _entropy(own, texts, stop_entropy(run)),
        _lengths(all_runs),
        None if bounds is None else _sorted(all_runs, bounds),
        None if bounds is None else _ratios(all_runs, bounds),
        _calibration(all_runs),
        _posterior(rounds),
    )
    return [figure for figure in made if figure is not None]


def stop_entropy(run: TracedRun) -> float | None:
    """Returns the draft entropy H in nats above which svip stops drafting; None for other methods.

    The rule of svip is to stop where sqrt(c H) > threshold; c and threshold are settings of the method.
    """
    c, threshold = setting(run, "c"), setting(run, "threshold")
    return threshold**2 / c if c and threshold is not None else None


def _rounds(rounds: Sequence[Round]) -> Figure:
    """A column per round, its kept tokens above the axis, the others below it; of many rounds, per some neighbouring ones."""
    size = math.ceil(len(rounds) / MOST_COLUMNS)
    groups = [rounds[start : start + size] for start in range(0, len(rounds), size)]
    counts = [_mean_counts(group) for group in groups]
    up = max(1.0, *(count["acc"] + count["own"] for count in counts))
    down = max(0.0, *(count["rej"] + count["dis"] for count in counts))
    unit = min(13.0, 200 / (up + down))  # pixels per token
    axis = 12 + up * unit
    mean = sum(len(round_.token_ids) for round_ in rounds) / len(rounds)
    edge = axis + down * unit + 4
    step = max(1, round(tick_step(up, 3)), math.ceil(24 / unit))
    levels = range(-(int(down + 0.01) // step * step), int(up + 0.01) + 1, step)
    every, width = max(1, round(tick_step(len(groups), 8))), 1 / len(groups)
    columns = [
        (index * width, width, 0.14, _round_title(group), _bars(count, axis, unit, edge))
        for index, (group, count) in enumerate(zip(groups, counts, strict=True))
    ]
    kinds = {"acc": "accepted", "own": "chosen by the target", "rej": "rejected", "dis": "discarded"}
    means = f" Each column is the mean of {size} rounds." if size > 1 else ""
    return Figure(
        "rounds",
        [f"Up: tokens kept. Down: tokens thrown away. Round 0 processes the prompt.{means}"],
        [
            *(Series("square", kind, (), meaning) for kind, meaning in kinds.items()),
            Series("column", "", columns),
            Series("horizontal", "axis", [axis]),
            Series("horizontal", "mean", [axis - mean * unit], f"mean, {mean:.2f} tokens per pass"),
        ],
        [(1 - (axis - level * unit) / edge, str(abs(level))) for level in levels],
        [((index + 0.5) * width, f"{index * size:,}", "middle") for index in range(0, len(groups), every)],
        height=edge + 22,
        top=0.0,
        bottom=edge,
    )


def _mean_counts(rounds: Sequence[Round]) -> dict[str, float]:
    """Returns the mean number of tokens per round under their CSS class: accepted, chosen by the target, rejected, discarded."""
    statuses = [status for round_ in rounds for status in round_.statuses]
    counts = {
        "acc": statuses.count(TokenStatus.ACCEPTED),
        "own": sum(round_.verdict.token is not None for round_ in rounds),
        "rej": statuses.count(TokenStatus.REJECTED),
        "dis": statuses.count(TokenStatus.DISCARDED),
    }
    return {kind: count / len(rounds) for kind, count in counts.items()}


def _bars(counts: dict[str, float], axis: float, unit: float, edge: float) -> list[tuple[str, float, float]]:
    """Returns the bars of a column: upwards from the axis accepted tokens, then the target's own; downwards rejected, discarded.

    `counts` has the tokens by CSS class, `axis` is the y of the axis, `unit` the pixels per token, `edge` the y of the bottom.
    """
    gap = 1 if unit > 4 else 0
    tops = {
        "acc": axis - counts["acc"] * unit,
        "own": axis - (counts["acc"] + counts["own"]) * unit,
        "rej": axis + 1,
        "dis": axis + 1 + counts["rej"] * unit,
    }
    ends = {kind: top + max(counts[kind] * unit - gap, 0.5) for kind, top in tops.items()}
    return [(kind, 1 - top / edge, 1 - ends[kind] / edge) for kind, top in tops.items() if counts[kind] > 0]


def _round_title(rounds: Sequence[Round]) -> str:
    """Returns the tooltip of a column: what happened in its one round, or how many drafted tokens its several rounds accepted."""
    drafted = sum(len(round_.draft.tokens) for round_ in rounds)
    accepted = f"{sum(len(round_.verdict.path) for round_ in rounds):,} of {drafted:,} accepted"
    first, verdict = rounds[0], rounds[0].verdict
    if len(rounds) > 1:
        return f"rounds {first.index:,} to {rounds[-1].index:,}: {accepted}"
    draft = accepted if drafted else "prompt processed" if first.mode == "prefill" else "nothing drafted"
    chosen = verdict.source or "target's"
    own = f", then the {chosen} token" if verdict.token is not None else ""
    return f"round {first.index:,}: {draft}{own}"


def _until_rejection(statistics: TraceStatistics) -> Figure | None:
    if (runs := statistics.runs_of_accepted()) is None:
        return None
    texts = runs_until_rejection(runs)
    return Figure("until-rejection", [f"{name.title()}: {text}." for name, text in texts.items()])


def _entropy(statistics: TraceStatistics, texts: Sequence[str], stop: float | None) -> Figure | None:
    """Acceptance by the entropy of the draft's distribution (SVIP, Figure 2, top), with the bounds of Figure 4.

    If the trace has acceptance probabilities, the chart has a point per drafted token, and lower bounds of that probability. If
    not, it has the share of accepted tokens by entropy. `texts` has the text of each drafted token. `stop` is the entropy in nats
    above which svip stops drafting, None for other methods.
    """
    bounds, bins = statistics.bounds(), statistics.acceptance_by_entropy()
    recorded = [(token, text) for token, text in zip(statistics.tokens, texts, strict=True) if token.is_recorded]
    if bounds is None and not bins:
        return None
    drawn, thinned = _thinned(recorded, MOST_POINTS, "tokens")
    right = _right_end([token.entropy for token, _ in drawn] if bounds is not None else [found.mean for found in bins])
    curve = [(index / _CURVE) ** 2 for index in range(_CURVE + 1)]  # more points on the left, where it is steep
    estimated = Series("line", "est", [(x, estimate(x * right, statistics.c)) for x in curve], _svips(statistics.c))
    if bounds is not None:
        below = f"{bounds.below_estimate:.0%} of the tokens lie below the estimate (not a bound)."
        note = f"The bounds are medians by entropy. {below}{thinned}"
        lower, higher = (
            Series("line", kind, [(found.entropy / right, getattr(found, name)) for found in bounds.by_entropy], meaning)
            for kind, name, meaning in _BOUNDS
        )
        series = [*_token_series(drawn, right), estimated, lower, higher]
    else:
        note = "The trace has no acceptance probabilities of these tokens."
        if not statistics.has_distributions:
            note = (
                "With --record distributions a trace has each token's acceptance probability. This chart then shows it with its "
                "lower bounds, and two more show the bounds token by token and the cross-entropy."
            )
        series = [_intervals(bins, right, lambda found: f"entropy {span(found.low, found.high)}: {_accepted(found)}"), estimated]
    if stop is not None and 0 < (x := stop / right) < 1:
        side = {"dx": 6, "text_anchor": "start"} if x < 0.6 else {"dx": -6, "text_anchor": "end"}
        series += [Series("vertical", "stop", [x]), Series("text", "halo", [(x, "svip stops from here", {**side, "y": 20})])]
    words = "scatter" if bounds is not None else "bins"
    return Figure("scatter", [note], series, _QUARTERS, entropy_ticks(right), height=320.0, bottom=296.0, words=words)


def _token_series(drawn: Iterable[tuple[DraftedToken, str]], right: float) -> list[Series]:
    """Returns a series of the tokens of each status, on an axis of entropies up to `right` nats."""
    points: dict[TokenStatus, list[tuple[float, float, str]]] = {status: [] for status in TokenStatus}
    for token, text in drawn:
        title = f"“{text}”: {token.status.value}, entropy {token.entropy:.2f}, acceptance {token.overlap:.2f}"
        points[token.status].append((token.entropy / right, token.overlap, title))
    return [
        Series("dot", "acc", points[TokenStatus.ACCEPTED], "accepted"),
        Series("cross", "rej", points[TokenStatus.REJECTED], "rejected"),
        Series("small dot", "dis", points[TokenStatus.DISCARDED], "discarded"),
    ]


def _intervals(bins: Iterable[AcceptanceBin], right: float, title: Callable[[AcceptanceBin], str]) -> Series:
    points = [(found.mean / right, found.rate, *found.interval, title(found)) for found in bins]
    return Series("interval", "acc", points, "accepted, with its 95% interval")


def _accepted(found: AcceptanceBin) -> str:
    return f"{found.accepted:,} of {found.verified:,} accepted, {found.rate:.0%}"


def _svips(c: float) -> str:
    return f"svip's estimate, 1 − √({c:g} H)"


def _lengths(statistics: TraceStatistics) -> Figure | None:
    """A point per draft, and the mean accepted tokens by entropy as a line."""
    drafts = statistics.drafts
    if not drafts:
        return None
    drawn, thinned = _thinned(drafts, MOST_POINTS, "drafts")
    right, longest = _right_end(draft.entropy for draft in drafts), max(1, *(draft.accepted for draft in drafts))
    points = [
        (
            draft.entropy / right,
            draft.accepted / longest,
            f"{draft.accepted} of {draft.drafted} accepted, mean entropy {draft.entropy:.2f}",
        )
        for draft in drawn
    ]
    means = [(found.mean_entropy / right, found.mean / longest) for found in statistics.accepted_length_by_entropy()]
    return Figure(
        "lengths",
        [f"{counted(len(drafts), 'draft')}{_runs(statistics)}.{correlation_text(statistics)}{thinned}"],
        [Series("dot", "acc", points, "a draft"), Series("line", "mean", means, "mean by entropy")],
        [(tick / longest, str(tick)) for tick in range(0, longest + 1, max(1, round(tick_step(longest, 4))))],
        entropy_ticks(right),
    )


def _sorted(statistics: TraceStatistics, bounds: Bounds) -> Figure:
    """Tokens sorted by acceptance probability, with each one's bounds as marks (SVIP, Figure 4)."""
    tokens = sorted((token for token in statistics.tokens if token.is_recorded), key=lambda token: token.overlap)
    drawn, thinned = _thinned(tokens, MOST_SORTED, "tokens")
    shares = [(index + 0.5) / len(drawn) for index in range(len(drawn))]

    def placed(figure: Callable[[DraftedToken], float]) -> list[tuple[float, float]]:
        return [(x, figure(token)) for x, token in zip(shares, drawn, strict=True)]

    return Figure(
        "sorted",
        [tightness(bounds) + thinned],
        [
            Series("speck", "est", placed(lambda token: estimate(token.entropy, bounds.c)), _svips(bounds.c)),
            Series("speck", "pinsker", placed(lambda token: pinsker(token.kl)), "Pinsker's bound"),
            Series("stroke", "bh", placed(lambda token: bretagnolle_huber(token.kl)), "Bretagnolle and Huber's (B–H)"),
            Series("line", "true", placed(lambda token: token.overlap), "acceptance probability"),
        ],
        _QUARTERS,
        [(0.0, "least likely", "start"), (0.5, counted(bounds.tokens, "token"), "middle"), (1.0, "most likely", "end")],
    )


def _ratios(statistics: TraceStatistics, bounds: Bounds) -> Figure | None:
    """A histogram of the cross-entropy divided by the draft's entropy (SVIP, Figure 3). The last column has all larger ratios."""
    if bounds.entropy_ratio is None or bounds.measured_c is None:
        return None
    bins = bounds.entropy_ratios
    count, width, last = sum(found.tokens for found in bins), 1 / len(bins), bins[-1].low
    highest = max(found.tokens for found in bins) / count
    step, assumed = tick_step(highest, 4), 1 + 2 * bounds.c

    def x(ratio: float) -> float:
        return min((ratio - bins[0].low) / (bins[0].high - bins[0].low) * width, 1 - width / 2)

    columns = []
    for index, found in enumerate(bins):
        is_last = math.isinf(found.high)
        values = f"{found.low:g} and more" if is_last else f"{found.low:g} to {found.high:g}"
        title = f"{values}: {counted(found.tokens, 'token')}, {found.tokens / count:.0%}"
        columns.append(
            (index * width, width, 0.08, title, [("bar rest" if is_last else "bar", found.tokens / count / highest, 0.0)])
        )
    left_out = bounds.tokens - count
    few = f" Left out: {counted(left_out, 'token')} with almost no entropy." if left_out else ""
    return Figure(
        "ratios",
        [f"{counted(count, 'token')}{_runs(statistics)}.{few}"],
        [
            Series("column", "", columns),
            Series("vertical", "assumed", [x(assumed)], f"1 + 2c = {assumed:g}, which c = {bounds.c:g} assumes"),
            Series(
                "vertical",
                "median",
                [x(bounds.entropy_ratio)],
                f"median, {bounds.entropy_ratio:.2f}: c would be {bounds.measured_c:.2f}",
            ),
        ],
        [(step * number / highest, f"{step * number:.0%}") for number in range(int(highest / step + 1e-9) + 1)],
        [
            (0.0, "1", "middle"),
            *((x(ratio), f"{ratio:g}", "middle") for ratio in (1.5, 2, 2.5)),
            (1 - width / 2, f"over {last:g}", "end" if width < 0.1 else "middle"),
        ],
    )


def _calibration(statistics: TraceStatistics) -> Figure | None:
    """The share of accepted tokens by the acceptance probability that the length policy predicted, with 95 % intervals."""
    if (found := statistics.calibration()) is None:
        return None
    return Figure(
        "calibration",
        [calibration_text(found)],
        [
            Series("line", "est", [(0.0, 0.0), (1.0, 1.0)], "exact predictions"),
            _intervals(found.bins, 1.0, lambda each: f"{_accepted(each)}; predicted {each.mean:.0%}"),
        ],
        [(share, f"{share:.0%}" if text else "") for share, text in _QUARTERS],
        [(quarter / 4, f"{quarter / 4:.0%}", _anchor(quarter, 4)) for quarter in range(5)],
    )


def _posterior(rounds: Sequence[Round]) -> Figure | None:
    """What a bandit policy believes about the acceptance probability after each round: the mean and the central 90 %."""
    found = posteriors(rounds)
    if not found:
        return None
    last, final = max(found[-1].index, 1), found[-1]
    highs, lows = [(each.index / last, each.high) for each in found], [(each.index / last, each.low) for each in found]
    return Figure(
        "posterior",
        [f"After round {final.index:,}: {final.mean:.2f}, between {final.low:.2f} and {final.high:.2f}."],
        [
            Series("area", "band", [*highs, *reversed(lows)], "its central 90%"),
            Series("line", "est mean", [(each.index / last, each.mean) for each in found], "mean of the posterior"),
        ],
        [(0, "0"), (0.5, "0.5"), (1, "1")],
        [(at / last, f"{at:,}", _anchor(at, last)) for at in range(0, last + 1, max(1, round(tick_step(last, 8))))],
        height=180.0,
        bottom=152.0,
    )


def _anchor(position: int, last: int) -> str:
    """Returns the SVG text-anchor of a label at this position of an axis, so that the outermost labels stay inside."""
    return "start" if not position else "end" if position == last else "middle"


def _right_end(entropies: Iterable[float]) -> float:
    return max(0.5, max(entropies, default=0.0) * 1.02)


def _thinned(items: Sequence[Any], most: int, name: str) -> tuple[Sequence[Any], str]:
    """Returns at most `most` of the items, evenly spaced, and a sentence about it; an empty one if all of them are returned."""
    step = max(1, math.ceil(len(items) / most))
    return items[::step], f" One in {step:,} of {len(items):,} {name} is drawn." if step > 1 else ""


def _runs(statistics: TraceStatistics) -> str:
    return f" of {statistics.runs:,} runs" if statistics.runs > 1 else ""
