"""The chart of acceptance by the entropy of the draft's distribution (SVIP, Figure 2, top), with the bounds of Figure 4."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from specgen.traces.acceptance_bounds import Bounds, DraftedToken, estimate
from specgen.traces.statistics import Bin, TraceStatistics
from specgen.view.html.charts import Axes, polyline, tick_step

MOST_POINTS = 1500  # of more tokens every n-th is drawn, and the caption says so
_TOP, _BOTTOM, _HEIGHT = 8.0, 296.0, 320.0  # pixels: acceptance 1, acceptance 0, the whole chart
_ESTIMATE_SEGMENTS = 60


def entropy_chart(statistics: TraceStatistics, texts: Sequence[str], stop: float | None) -> dict[str, Any] | None:
    """Returns the values of the macro `entropy_chart`; None where no entropies of the draft's distributions were recorded.

    If the trace has acceptance probabilities, sum(min(p, q)) with p the target's and q the draft's probabilities, the chart has
    a point per drafted token, and lower bounds of that probability. If not, it has the share of accepted tokens by entropy.
    `texts` has the text of each drafted token, or is empty. `stop` is the entropy in nats above which the method svip stops
    drafting, None for other methods.
    """
    bounds = statistics.bounds()
    if bounds is not None:
        return _tokens_chart(statistics.tokens, texts, bounds, stop)
    bins = statistics.acceptance_by_entropy()
    return _bins_chart(bins, statistics.c, stop, was_recorded=statistics.has_distributions) if bins else None


def _tokens_chart(tokens: Sequence[DraftedToken], texts: Sequence[str], bounds: Bounds, stop: float | None) -> dict[str, Any]:
    positions = [position for position, token in enumerate(tokens) if token.is_recorded]
    step = math.ceil(len(positions) / MOST_POINTS)
    drawn = positions[::step]
    right = _right_end(tokens[position].entropy for position in drawn)
    caption = (
        f"The bounds are medians by entropy. {bounds.below_estimate:.0%} of the tokens lie below the estimate (not a bound)."
    )
    if step > 1:
        caption += f" One in {step:,} of {len(positions):,} tokens is drawn."
    lines = {
        "bh": polyline(((found.entropy / right, _y(found.bretagnolle_huber)) for found in bounds.by_entropy), _HEIGHT),
        "pinsker": polyline(((found.entropy / right, _y(found.pinsker)) for found in bounds.by_entropy), _HEIGHT),
    }
    points = [_point(tokens[position], texts[position] if texts else None, right) for position in drawn]
    return {**_frame(right, bounds.c, stop), "lines": lines, "points": points, "caption": caption}


def _bins_chart(bins: Sequence[Bin], c: float, stop: float | None, *, was_recorded: bool) -> dict[str, Any]:
    right = _right_end(found.mean_entropy for found in bins)
    caption = (
        "With --record distributions a trace has each token's acceptance probability. This chart then shows it with its lower "
        "bounds, and two more show the bounds token by token and the cross-entropy."
    )
    if was_recorded:
        caption = "The trace has no acceptance probabilities of these tokens."
    return {**_frame(right, c, stop), "lines": {}, "bins": [_bin(found, right) for found in bins], "caption": caption}


def _frame(right: float, c: float, stop: float | None) -> dict[str, Any]:
    """Returns what both charts share: the axes, the curve of SVIP's estimate, and the position of `stop`.

    The entropy axis goes from 0 to `right` nats. The estimate of the acceptance probability is 1 - sqrt(c H(q)), where H(q) is
    the entropy of the draft's probabilities q. `stop` is the entropy above which svip stops drafting. Its position is None where
    it lies outside the chart.
    """
    step = tick_step(right, 4)
    ticks = [step * index for index in range(1, int(right / step - 0.5) + 1)]
    below = [(tick / right, f"{tick:g}", "middle") for tick in ticks]
    axes = Axes(
        _HEIGHT,
        [_y(share / 4) for share in range(5)],
        [(_y(share), f"{share:g}") for share in (0, 0.5, 1)],
        [*below, (1.0, "nats", "end"), (0.0, "0", "middle")],
    )
    # more points on the left, where the curve is steep
    curve = [right * (index / _ESTIMATE_SEGMENTS) ** 2 for index in range(_ESTIMATE_SEGMENTS + 1)]
    return {
        "axes": axes,
        "c": f"{c:g}",
        "estimate": polyline(((entropy / right, _y(estimate(entropy, c))) for entropy in curve), _HEIGHT),
        "stop": stop / right if stop is not None and 0 < stop < right else None,
        "points": [],
        "bins": [],
    }


def _right_end(entropies: Iterable[float]) -> float:
    return max(0.5, max(entropies, default=0.0) * 1.02)


def _y(share: float) -> float:
    return _TOP + (1 - share) * (_BOTTOM - _TOP)


def _point(token: DraftedToken, text: str | None, right: float) -> dict[str, Any]:
    entropy, overlap, status = token.entropy, token.overlap, token.status.value
    name = "" if text is None else f"“{text}”: "
    title = f"{name}{status}, entropy {entropy:.2f}, acceptance {overlap:.2f}"
    return {"x": entropy / right, "y": _y(overlap), "status": status, "title": title}


def _bin(found: Bin, right: float) -> dict[str, Any]:
    low, high = found.interval
    span = f"{found.low:g} to {found.high:g}" if math.isfinite(found.high) else f"above {found.low:g}"
    title = f"entropy {span}: {found.accepted:,} of {found.verified:,} accepted, {found.rate:.0%}"
    return {"x": found.mean_entropy / right, "y": _y(found.rate), "low": _y(low), "high": _y(high), "title": title}
