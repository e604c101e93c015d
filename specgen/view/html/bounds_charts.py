"""Charts of what SVIP's rule assumes: accepted length by entropy, cross-entropy over entropy, and bounds token by token.

They show all recorded generations of a method, not only the one whose text is on the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specgen.traces.acceptance_bounds import Bounds, DraftedToken, bretagnolle_huber, estimate, pinsker
from specgen.traces.statistics import TraceStatistics
from specgen.view.html.charts import Axes, polyline, tick_step
from specgen.view.recorded_methods import correlation_text, tightness

MOST_DRAFTS = 1500  # of more drafts every n-th is drawn, and the caption says so
MOST_SORTED = 600  # the same for the tokens sorted by acceptance probability; each has four marks
_TOP, _BOTTOM, _HEIGHT = 8.0, 216.0, 240.0  # pixels: the highest value, zero, the whole chart


def lengths_chart(statistics: TraceStatistics) -> dict[str, Any] | None:
    """Returns the values of the macro `lengths_chart`: a point per draft, and the mean accepted tokens by entropy as a line.

    None where no entropies of verified tokens were recorded.
    """
    drafts = statistics.drafts
    if not drafts:
        return None
    drawn, of = _thinned(drafts, MOST_DRAFTS, "drafts")
    right = max(0.5, max(draft.entropy for draft in drafts) * 1.02)
    longest = max(1, *(draft.accepted for draft in drafts))
    bins = statistics.accepted_length_by_entropy()
    points = [
        {
            "x": draft.entropy / right,
            "y": _y(draft.accepted / longest),
            "title": f"{draft.accepted} of {draft.drafted} accepted, mean entropy {draft.entropy:.2f}",
        }
        for draft in drawn
    ]
    step = max(1, round(tick_step(longest, 4)))
    return {
        "axes": _axes([(tick / longest, str(tick)) for tick in range(0, longest + 1, step)], _entropy_ticks(right)),
        "points": points,
        "mean": polyline(((found.mean_entropy / right, _y(found.mean / longest)) for found in bins), _HEIGHT),
        "caption": f"{len(drafts):,} drafts{_runs(statistics)}.{correlation_text(statistics)}{of}",
    }


def ratios_chart(statistics: TraceStatistics, bounds: Bounds | None) -> dict[str, Any] | None:
    """Returns the values of the macro `ratios_chart`: a histogram of the cross-entropy divided by the draft's entropy.

    The last column has all larger ratios. `bounds` are those of the statistics. None without recorded ratios.
    """
    if bounds is None or bounds.entropy_ratio is None or bounds.measured_c is None:
        return None
    bins = bounds.entropy_ratios
    count, width = sum(found.tokens for found in bins), 1 / len(bins)
    top = max(found.tokens for found in bins) / count
    step = tick_step(top, 4)

    def x(ratio: float) -> float:
        return min((ratio - bins[0].low) / (bins[0].high - bins[0].low) * width, 1 - width / 2)

    last = bins[-1].low
    columns = [
        {
            "x": index * width,
            "y": _y(found.tokens / count / top),
            "kind": "bar" if math.isfinite(found.high) else "bar rest",
            "height": _BOTTOM - _y(found.tokens / count / top),
            "title": f"{_range(found.low, found.high)}: {found.tokens:,} tokens, {found.tokens / count:.0%}",
        }
        for index, found in enumerate(bins)
    ]
    below = [(x(ratio), f"{ratio:g}", "middle") for ratio in (1.5, 2, 2.5)]
    assumed = 1 + 2 * bounds.c
    left_out = bounds.tokens - count
    few = f" {left_out:,} tokens with almost no entropy are left out." if left_out else ""
    return {
        "axes": _axes(
            [(step * number / top, f"{step * number:.0%}") for number in range(int(top / step + 1e-9) + 1)],
            [(0.0, "1", "middle"), *below, (1 - width / 2, f"over {last:g}", "end" if width < 0.1 else "middle")],
        ),
        "columns": columns,
        "width": width,
        "assumed": x(assumed),
        "median": x(bounds.entropy_ratio),
        "assumed_text": f"1 + 2c = {assumed:g}, which c = {bounds.c:g} assumes",
        "median_text": f"median, {bounds.entropy_ratio:.2f}: c would be {bounds.measured_c:.2f}",
        "top": _TOP,
        "bottom": _BOTTOM,
        "caption": f"{count:,} tokens{_runs(statistics)}.{few}",
    }


def sorted_chart(statistics: TraceStatistics, bounds: Bounds | None) -> dict[str, Any] | None:
    """Returns the values of the macro `sorted_chart`: tokens sorted by acceptance probability, with each one's bounds as marks.

    `bounds` are those of the statistics. None without recorded acceptance probabilities.
    """
    if bounds is None:
        return None
    tokens = sorted((token for token in statistics.tokens if token.is_recorded), key=lambda token: token.overlap)
    drawn, of = _thinned(tokens, MOST_SORTED, "tokens")
    kinds: dict[str, Callable[[DraftedToken], float]] = {
        "bh": lambda token: bretagnolle_huber(token.kl),
        "pinsker": lambda token: pinsker(token.kl),
        "est": lambda token: estimate(token.entropy, bounds.c),
    }
    shares = [(index + 0.5) / len(drawn) for index in range(len(drawn))]
    below = [(0.0, "least likely", "start"), (0.5, f"{bounds.tokens:,} tokens", "middle"), (1.0, "most likely", "end")]
    return {
        "axes": _axes([(share / 4, f"{share / 4:g}" if share % 2 == 0 else "") for share in range(5)], below),
        "marks": {kind: _marks(kind, shares, map(bound, drawn)) for kind, bound in kinds.items()},
        "true": polyline(((x, _y(token.overlap)) for x, token in zip(shares, drawn, strict=True)), _HEIGHT),
        "c": f"{bounds.c:g}",
        "caption": tightness(bounds) + of,
    }


def _marks(kind: str, shares: Iterable[float], values: Iterable[float]) -> str:
    """Returns an SVG path, in percent of width and height, with a mark at each point: a vertical stroke of 5 pixels for `bh`.

    Otherwise a line without length, which round line caps show as a dot.
    """
    mark = f"v{500 / _HEIGHT:.1f}" if kind == "bh" else "h0"
    up = 250 / _HEIGHT if kind == "bh" else 0.0
    return "".join(f"M{100 * x:.2f},{100 * _y(value) / _HEIGHT - up:.1f}{mark}" for x, value in zip(shares, values, strict=True))


def _axes(left: Sequence[tuple[float, str]], below: Sequence[tuple[float, str, str]]) -> Axes:
    """Returns the axes. A label in `left` is (share of the highest value, text), one in `below` (x, text, SVG text-anchor)."""
    labels = [(_y(share), text) for share, text in left]
    return Axes(_HEIGHT, [y for y, _ in labels], labels, below)


def _entropy_ticks(right: float) -> list[tuple[float, str, str]]:
    step = tick_step(right, 4)
    ticks = [step * index for index in range(1, int(right / step - 0.5) + 1)]
    return [(0.0, "0", "middle"), *((tick / right, f"{tick:g}", "middle") for tick in ticks), (1.0, "nats", "end")]


def _thinned(items: Sequence[Any], most: int, name: str) -> tuple[Sequence[Any], str]:
    """Returns at most `most` of the items, evenly spaced, and a sentence about it; an empty one if all of them are returned."""
    step = math.ceil(len(items) / most)
    return items[::step], f" One in {step:,} of {len(items):,} {name} is drawn." if step > 1 else ""


def _range(low: float, high: float) -> str:
    return f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} and more"


def _runs(statistics: TraceStatistics) -> str:
    return f" of {statistics.runs:,} runs" if statistics.runs > 1 else ""


def _y(share: float) -> float:
    return _TOP + (1 - share) * (_BOTTOM - _TOP)
