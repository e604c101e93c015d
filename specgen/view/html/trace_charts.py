"""The charts of a recorded generation, and of all generations of its method in the trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specgen.base.types import Round, TokenStatus
from specgen.traces.acceptance import AcceptanceBin, Bounds, DraftedToken, bretagnolle_huber, estimate, pinsker
from specgen.traces.reader import TracedRun
from specgen.traces.statistics import TraceStatistics, posteriors, setting
from specgen.view.html.charts import Chart, Figure, element, entropy_ticks, percent, tick_step
from specgen.view.theme import counted
from specgen.view.trace_report import OVERLAP, calibration_text, correlation_text, runs_until_rejection, span, tightness

MOST_COLUMNS = 200  # more rounds than this are drawn as means over neighbouring rounds
MOST_POINTS = 1500  # of more tokens or drafts every n-th is drawn, and the note says so
MOST_SORTED = 600  # the same for the tokens sorted by acceptance probability; each has four marks
_CURVE = 60  # segments of a curve
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
    return [chart for chart in made if chart is not None]


def stop_entropy(run: TracedRun) -> float | None:
    """Returns the draft entropy H in nats above which svip stops drafting; None for other methods.

    The rule of svip is to stop where sqrt(c H) > threshold; c and threshold are settings of the method.
    """
    c, threshold = setting(run, "c"), setting(run, "threshold")
    return threshold**2 / c if c and threshold is not None else None


def _rounds(rounds: Sequence[Round]) -> Chart:
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
    chart = Chart(
        "rounds",
        "Each round: tokens kept and tokens thrown away",
        "Tokens kept and thrown away in each round",
        height=edge + 22,
        top=0.0,
        bottom=edge,
    )
    step = max(1, round(tick_step(up, 3)), math.ceil(24 / unit))
    levels = range(-(int(down + 0.01) // step * step), int(up + 0.01) + 1, step)
    every, width = max(1, round(tick_step(len(groups), 8))), 1 / len(groups)
    below = [((index + 0.5) * width, f"{index * size:,}", "middle") for index in range(0, len(groups), every)]
    chart.axes([(1 - (axis - level * unit) / edge, str(abs(level))) for level in levels], below)
    for index, (group, count) in enumerate(zip(groups, counts, strict=True)):
        chart.column(_round_title(group), index * width, width, _bars(count, axis, unit), 0.14)
    chart.horizontal("axis", axis)
    chart.horizontal("mean", axis - mean * unit)
    for kind, meaning in {"acc": "accepted", "own": "chosen by the target", "rej": "rejected", "dis": "discarded"}.items():
        chart.square_key(kind, meaning)
    chart.line_key("mean", f"mean, {mean:.2f} tokens per pass")
    means = f" Each column is the mean of {size} rounds." if size > 1 else ""
    chart.notes = [f"Up: tokens kept. Down: tokens thrown away. Round 0 processes the prompt.{means}"]
    return chart


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


def _bars(counts: dict[str, float], axis: float, unit: float) -> list[tuple[str, float, float]]:
    """Returns the bars of a column: upwards from the axis accepted tokens, then the target's own; downwards rejected, discarded.

    `counts` has the tokens by CSS class, `axis` is the y of the axis, `unit` the pixels per token.
    """
    gap = 1 if unit > 4 else 0
    tops = {
        "acc": axis - counts["acc"] * unit,
        "own": axis - (counts["acc"] + counts["own"]) * unit,
        "rej": axis + 1,
        "dis": axis + 1 + counts["rej"] * unit,
    }
    return [(kind, top, max(counts[kind] * unit - gap, 0.5)) for kind, top in tops.items() if counts[kind] > 0]


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
    caption = "The drafted tokens that the target accepts between two rejections, beside what PEARL's Theorem 2 expects: "
    notes = [f"Mean: {texts['mean']}.", f"Deviation: {texts['deviation']}."]
    return Figure("until-rejection", "Tokens until a rejection", f"{caption}{texts['count']}.", notes)


def _entropy(statistics: TraceStatistics, texts: Sequence[str], stop: float | None) -> Chart | None:
    """Acceptance by the entropy of the draft's distribution (SVIP, Figure 2, top), with the bounds of Figure 4.

    If the trace has acceptance probabilities, the chart has a point per drafted token, and lower bounds of that probability. If
    not, it has the share of accepted tokens by entropy. `texts` has the text of each drafted token. `stop` is the entropy in nats
    above which svip stops drafting, None for other methods.
    """
    bounds, bins = statistics.bounds(), statistics.acceptance_by_entropy()
    recorded = [(token, text) for token, text in zip(statistics.tokens, texts, strict=True) if token.is_recorded]
    drawn, thinned = _thinned(recorded, MOST_POINTS, "tokens")
    if bounds is None and not bins:
        return None
    right = _right_end([token.entropy for token, _ in drawn] if bounds is not None else [found.mean for found in bins])
    caption = "The draft's entropy (to the right) and the share of the verified tokens that the target accepted (up)."
    if bounds is not None:
        caption = f"Each drafted token: the draft's entropy (to the right) and {OVERLAP} (up)."
    chart = Chart(
        "scatter", "Draft entropy and acceptance", "Acceptance by the draft's entropy", caption, height=320.0, bottom=296.0
    )
    chart.axes(_QUARTERS, entropy_ticks(right))
    shown_stop = stop / right if stop is not None and 0 < stop < right else None
    if shown_stop is not None:
        chart.vertical("stop", shown_stop)
    if bounds is not None:
        _token_keys(chart)
        for kind in ("bretagnolle_huber", "pinsker"):
            points = ((found.entropy / right, getattr(found, kind)) for found in bounds.by_entropy)
            chart.line("bh" if kind == "bretagnolle_huber" else kind, points)
    else:
        chart.interval_key("accepted, with its 95% interval")
    curve = [(index / _CURVE) ** 2 for index in range(_CURVE + 1)]  # more points on the left, where it is steep
    chart.line("est", ((x, estimate(x * right, statistics.c)) for x in curve))
    chart.line_key("est", f"svip's estimate, 1 − √({statistics.c:g} H)")
    if bounds is not None:
        chart.line_key("pinsker", "Pinsker's bound")
        chart.line_key("bh", "Bretagnolle and Huber's bound")
        for token, text in drawn:
            _add_token(chart, token, text, right)
        below = f"{bounds.below_estimate:.0%} of the tokens lie below the estimate (not a bound)."
        chart.notes = [f"The bounds are medians by entropy. {below}{thinned}"]
    else:
        _add_bins(chart, bins, right)
        chart.notes = [
            "The trace has no acceptance probabilities of these tokens."
            if statistics.has_distributions
            else "With --record distributions a trace has each token's acceptance probability. This chart then shows it with its "
            "lower bounds, and two more show the bounds token by token and the cross-entropy."
        ]
    if shown_stop is not None:
        side = {"dx": 6, "text_anchor": "start"} if shown_stop < 0.6 else {"dx": -6, "text_anchor": "end"}
        chart.add(element("text", "svip stops from here", class_="halo", x=percent(shown_stop), **side, y=20))
    return chart


def _token_keys(chart: Chart) -> None:
    chart.dot_key("acc", "accepted")
    chart.key("rejected", element("path", class_="rej", d="M7 3L15 11M7 11L15 3"))
    chart.dot_key("dis", "discarded", 3)


def _add_token(chart: Chart, token: DraftedToken, text: str, right: float) -> None:
    status = token.status.value
    title = f"“{text}”: {status}, entropy {token.entropy:.2f}, acceptance {token.overlap:.2f}"
    if token.status is TokenStatus.REJECTED:
        chart.cross("rej", token.entropy / right, token.overlap, title)
    else:
        chart.point(status[:3], token.entropy / right, token.overlap, title, 4 if token.status is TokenStatus.ACCEPTED else 3)


def _add_bins(chart: Chart, bins: Sequence[AcceptanceBin], right: float) -> None:
    for found in bins:
        title = f"entropy {span(found.low, found.high)}: {found.accepted:,} of {found.verified:,} accepted, {found.rate:.0%}"
        chart.interval(found.mean / right, found.rate, *found.interval, title)


def _lengths(statistics: TraceStatistics) -> Chart | None:
    """A point per draft, and the mean accepted tokens by entropy as a line."""
    drafts = statistics.drafts
    if not drafts:
        return None
    drawn, thinned = _thinned(drafts, MOST_POINTS, "drafts")
    right = _right_end(draft.entropy for draft in drafts)
    longest = max(1, *(draft.accepted for draft in drafts))
    caption = "Each draft: the mean entropy of its verified tokens (to the right) and how many tokens the target accepted (up)."
    chart = Chart("lengths", "Draft entropy and accepted length", "Accepted tokens of a draft by its entropy", caption)
    step = max(1, round(tick_step(longest, 4)))
    chart.axes([(tick / longest, str(tick)) for tick in range(0, longest + 1, step)], entropy_ticks(right))
    for draft in drawn:
        title = f"{draft.accepted} of {draft.drafted} accepted, mean entropy {draft.entropy:.2f}"
        chart.point("acc", draft.entropy / right, draft.accepted / longest, title)
    bins = statistics.accepted_length_by_entropy()
    chart.line("mean", ((found.mean_entropy / right, found.mean / longest) for found in bins))
    chart.dot_key("acc", "a draft")
    chart.line_key("mean", "mean by entropy")
    chart.notes = [f"{counted(len(drafts), 'draft')}{_runs(statistics)}.{correlation_text(statistics)}{thinned}"]
    return chart


def _sorted(statistics: TraceStatistics, bounds: Bounds) -> Chart:
    """Tokens sorted by acceptance probability, with each one's bounds as marks (SVIP, Figure 4)."""
    tokens = sorted((token for token in statistics.tokens if token.is_recorded), key=lambda token: token.overlap)
    drawn, thinned = _thinned(tokens, MOST_SORTED, "tokens")
    caption = "Each drafted token: the probability of acceptance at temperature 1 (the overlap Σ min(p, q)), two lower bounds of "
    label = "Bounds of the acceptance probability, token by token"
    chart = Chart("sorted", "Tokens sorted by acceptance probability", label, f"{caption}it and svip's estimate (up).")
    ends = [(0.0, "least likely", "start"), (0.5, counted(bounds.tokens, "token"), "middle"), (1.0, "most likely", "end")]
    chart.axes(_QUARTERS, ends)
    chart.line_key("true", "acceptance probability")
    shares = [(index + 0.5) / len(drawn) for index in range(len(drawn))]
    marks: tuple[tuple[str, str, Callable[[DraftedToken], float]], ...] = (
        ("est", f"svip's estimate, 1 − √({bounds.c:g} H)", lambda token: estimate(token.entropy, bounds.c)),
        ("pinsker", "Pinsker's bound", lambda token: pinsker(token.kl)),
        ("bh", "Bretagnolle and Huber's (B–H)", lambda token: bretagnolle_huber(token.kl)),
    )
    for kind, meaning, bound in marks:
        # a vertical stroke of 5 pixels, or a line without length, which round line caps show as a dot
        stroke = "v5" if kind == "bh" else "h0"
        up, drawn_stroke = (250 / chart.height, f"v{500 / chart.height:.1f}") if kind == "bh" else (0.0, "h0")
        places = ((x, 100 * chart.y(bound(token)) / chart.height - up) for x, token in zip(shares, drawn, strict=True))
        chart.stretched(element("path", class_=kind, d="".join(f"M{100 * x:.2f},{y:.1f}{drawn_stroke}" for x, y in places)))
        path = "".join(f"M{x},{4.5 if kind == 'bh' else 7}{stroke}" for x in (5, 11, 17))
        chart.key(meaning, element("path", class_=kind, d=path))
    chart.line("true", ((x, token.overlap) for x, token in zip(shares, drawn, strict=True)))
    chart.notes = [tightness(bounds) + thinned]
    return chart


def _ratios(statistics: TraceStatistics, bounds: Bounds) -> Chart | None:
    """A histogram of the cross-entropy divided by the draft's entropy (SVIP, Figure 3). The last column has all larger ratios."""
    if bounds.entropy_ratio is None or bounds.measured_c is None:
        return None
    bins = bounds.entropy_ratios
    count, width, last = sum(found.tokens for found in bins), 1 / len(bins), bins[-1].low
    highest = max(found.tokens for found in bins) / count
    caption = (
        "The cross-entropy H(q,p) divided by the draft's entropy H(q) (to the right) and the share of the tokens (up). svip "
    )
    label = "Cross-entropy divided by entropy: share of tokens"
    chart = Chart("ratios", "Cross-entropy and entropy", label, f"{caption}takes this ratio to be the same everywhere.")

    def x(ratio: float) -> float:
        return min((ratio - bins[0].low) / (bins[0].high - bins[0].low) * width, 1 - width / 2)

    step = tick_step(highest, 4)
    left = [(step * number / highest, f"{step * number:.0%}") for number in range(int(highest / step + 1e-9) + 1)]
    right = (1 - width / 2, f"over {last:g}", "end" if width < 0.1 else "middle")
    chart.axes(left, [(0.0, "1", "middle"), *((x(ratio), f"{ratio:g}", "middle") for ratio in (1.5, 2, 2.5)), right])
    for index, found in enumerate(bins):
        top, kind = chart.y(found.tokens / count / highest), "bar" if math.isfinite(found.high) else "bar rest"
        values = f"{found.low:g} to {found.high:g}" if math.isfinite(found.high) else f"{found.low:g} and more"
        title = f"{values}: {counted(found.tokens, 'token')}, {found.tokens / count:.0%}"
        chart.column(title, index * width, width, [(kind, top, chart.bottom - top)], 0.08)
    assumed = 1 + 2 * bounds.c
    chart.vertical("assumed", x(assumed))
    chart.vertical("median", x(bounds.entropy_ratio))
    chart.line_key("assumed", f"1 + 2c = {assumed:g}, which c = {bounds.c:g} assumes")
    chart.line_key("median", f"median, {bounds.entropy_ratio:.2f}: c would be {bounds.measured_c:.2f}")
    left_out = bounds.tokens - count
    few = f" Left out: {counted(left_out, 'token')} with almost no entropy." if left_out else ""
    chart.notes = [f"{counted(count, 'token')}{_runs(statistics)}.{few}"]
    return chart


def _calibration(statistics: TraceStatistics) -> Chart | None:
    """The share of accepted tokens by the acceptance probability that the length policy predicted, with 95 % intervals."""
    if (found := statistics.calibration()) is None:
        return None
    caption = "The acceptance probability that the length policy predicted for the verified tokens (to the right) and the share "
    label = "Observed acceptance by predicted acceptance"
    chart = Chart("calibration", "Predicted and observed acceptance", label, f"{caption}that the target accepted (up).")
    anchors = ("start", "middle", "middle", "middle", "end")
    left = [(share, f"{share:.0%}" if text else "") for share, text in _QUARTERS]
    chart.axes(left, [(quarter / 4, f"{quarter / 4:.0%}", anchor) for quarter, anchor in enumerate(anchors)])
    chart.line("est", [(0.0, 0.0), (1.0, 1.0)])
    for each in found.bins:
        title = f"{each.accepted:,} of {each.verified:,} accepted, {each.rate:.0%}; predicted {each.mean:.0%}"
        chart.interval(each.mean, each.rate, *each.interval, title)
    chart.interval_key("accepted, with its 95% interval")
    chart.line_key("est", "exact predictions")
    chart.notes = [calibration_text(found)]
    return chart


def _posterior(rounds: Sequence[Round]) -> Chart | None:
    """What a bandit policy believes about the acceptance probability after each round: the mean and the central 90 %."""
    found = posteriors(rounds)
    if not found:
        return None
    last, final = max(found[-1].index, 1), found[-1]
    label = "Thompson sampling: the posterior of the acceptance rate over rounds"
    caption = "Up: the acceptance rate θ. To the right: rounds."
    title = "Thompson sampling: the posterior of the acceptance rate"
    chart = Chart("posterior", title, label, caption, height=180.0, bottom=152.0)
    marked = range(0, last + 1, max(1, round(tick_step(last, 8))))
    below = [(index / last, f"{index:,}", "start" if not index else "end" if index == last else "middle") for index in marked]
    chart.axes([(0, "0"), (0.5, "0.5"), (1, "1")], below)
    upper = [(each.index / last, each.high) for each in found]
    chart.line("band", [*upper, *((each.index / last, each.low) for each in reversed(found))], "polygon")
    chart.line("est mean", ((each.index / last, each.mean) for each in found))
    chart.line_key("est mean", "mean of the posterior")
    chart.square_key("band", "its central 90%")
    chart.notes = [f"After round {final.index:,}: {final.mean:.2f}, between {final.low:.2f} and {final.high:.2f}."]
    return chart


def _right_end(entropies: Iterable[float]) -> float:
    return max(0.5, max(entropies, default=0.0) * 1.02)


def _thinned(items: Sequence[Any], most: int, name: str) -> tuple[Sequence[Any], str]:
    """Returns at most `most` of the items, evenly spaced, and a sentence about it; an empty one if all of them are returned."""
    step = max(1, math.ceil(len(items) / most))
    return items[::step], f" One in {step:,} of {len(items):,} {name} is drawn." if step > 1 else ""


def _runs(statistics: TraceStatistics) -> str:
    return f" of {statistics.runs:,} runs" if statistics.runs > 1 else ""
