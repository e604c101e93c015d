"""Entropy against acceptance: does the draft know when it is wrong? (SVIP, Figures 2 to 4)"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from specgen.traces.statistics import Bin, Bounds, DraftedTokens, TraceStatistics, estimate
from specgen.types import TokenStatus
from specgen.ui.html.charts import figure, gridline, keys, left_label, tick_step
from specgen.ui.html.page import text

MOST_POINTS = 1500  # tokens that are drawn; of more every n-th is, and the caption says so
_TOP, _HEIGHT, _FLOOR = 8.0, 320.0, 296.0


def _y(share: float) -> float:
    return _TOP + (1 - share) * (_FLOOR - _TOP)


def entropy_chart(anatomy: TraceStatistics, texts: Sequence[str], stop: float | None) -> str:
    """SVIP Figures 2 to 4: tokens by entropy and true acceptance probability with the bounds, where both distributions were
    recorded; else how often tokens were accepted, by entropy. `texts` are the tokens' (as many as there are, or none); `stop` is
    the entropy from which svip stops. Empty where the draft has no entropies."""
    bounds = anatomy.bounds()
    if bounds is not None:
        return _scatter(anatomy.tokens, texts, bounds, stop)
    bins = anatomy.acceptance_by_entropy()
    return _binned(bins, anatomy.c, stop, asked=anatomy.tokens.recording) if bins else ""


def _scatter(tokens: DraftedTokens, texts: Sequence[str], bounds: Bounds, stop: float | None) -> str:
    positions = list(tokens.recorded())
    step = math.ceil(len(positions) / MOST_POINTS)
    drawn = positions[::step]
    right = _right_end([tokens.entropies[position] for position in drawn])
    points = "".join(_point(tokens, position, texts[position] if texts else None, right) for position in drawn)
    lines = (
        _polyline("bh", [(found.entropy, found.bretagnolle_huber) for found in bounds.by_entropy], right)
        + _polyline("pinsker", [(found.entropy, found.pinsker) for found in bounds.by_entropy], right)
        + _estimate_line(bounds.c, right)
    )
    label = "Acceptance probability against draft entropy, with three lower bounds"
    chart = _plot(label, lines, points, right, stop)
    notes = [
        "Both bounds are medians by entropy.",
        "The estimate is no bound:",
        f"{bounds.below_estimate:.0%} of the tokens lie below it.",
    ]
    if bounds.entropy_ratio is not None and bounds.measured_c is not None:
        notes.append(
            f"The cross-entropy is {bounds.entropy_ratio:.2f} times the entropy (median): c would be {bounds.measured_c:.2f}."
        )
    if step > 1:
        notes.append(f"Every {_ordinal(step)} of {len(positions):,} tokens is drawn.")
    marks = [
        ('<circle class="acc" cx="11" cy="7" r="4"/>', "accepted"),
        ('<path class="rej" d="M7 3L15 11M7 11L15 3"/>', "rejected"),
        ('<circle class="dis" cx="11" cy="7" r="3"/>', "discarded"),
        ('<line class="est" x1="0" x2="22" y1="7" y2="7"/>', f"svip's estimate, 1 − √({bounds.c:g} H)"),
        ('<line class="pinsker" x1="0" x2="22" y1="7" y2="7"/>', "Pinsker's bound"),
        ('<line class="bh" x1="0" x2="22" y1="7" y2="7"/>', "Bretagnolle and Huber's"),
    ]
    lead = "Each drafted token: the draft's entropy (to the right), and how likely the target was to accept it (up)."
    return figure("Does the draft know when it is wrong?", keys("scatter", marks), chart, " ".join(notes), lead)


def _binned(bins: Sequence[Bin], c: float, stop: float | None, *, asked: bool) -> str:
    right = _right_end([found.mean_entropy for found in bins])
    points = []
    for found in bins:
        low, high = found.interval
        x = f"{100 * found.mean_entropy / right:.2f}%"
        title = f"entropy {_span(found.low, found.high)}: {found.accepted:,} of {found.verified:,} accepted, {found.rate:.0%}"
        points.append(
            f'<g class="bin"><title>{text(title)}</title>'
            f'<line class="ci" x1="{x}" x2="{x}" y1="{_y(high):.1f}" y2="{_y(low):.1f}"/>'
            f'<circle class="acc" cx="{x}" cy="{_y(found.rate):.1f}" r="5"/></g>'
        )
    chart = _plot("Share of accepted tokens against draft entropy", _estimate_line(c, right), "".join(points), right, stop)
    marks = [
        (
            '<line class="ci" x1="11" x2="11" y1="0" y2="14"/><circle class="acc" cx="11" cy="7" r="4"/>',
            "accepted, with its 95% interval",
        ),
        ('<line class="est" x1="0" x2="22" y1="7" y2="7"/>', f"svip's estimate, 1 − √({c:g} H)"),
    ]
    lead = "The draft's entropy (to the right), and the share of the judged tokens that the target accepted (up)."
    caption = "With --record distributions a trace holds each token's true acceptance probability, and its bounds stand here too."
    if asked:
        caption = "The trace tells no true acceptance probability of these tokens."
    return figure("Does the draft know when it is wrong?", keys("scatter", marks), chart, caption, lead)


def _right_end(entropies: Sequence[float]) -> float:
    return max(0.5, max(entropies, default=0.0) * 1.02)


def _point(tokens: DraftedTokens, position: int, token: str | None, right: float) -> str:
    entropy, overlap, status = tokens.entropies[position], tokens.overlaps[position], tokens.status(position)
    x, y = f"{100 * entropy / right:.2f}%", f"{_y(overlap):.1f}"
    named = f"“{token}”: " if token is not None else ""
    title = f"<title>{text(f'{named}{status.value}, entropy {entropy:.2f}, acceptance {overlap:.2f}')}</title>"
    if status is TokenStatus.REJECTED:
        return f'<svg x="{x}" y="{y}" overflow="visible" class="x"><path class="rej" d="M-4-4L4 4M-4 4L4-4"/>{title}</svg>'
    kind, radius = ("acc", 4) if status is TokenStatus.ACCEPTED else ("dis", 3)
    return f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}">{title}</circle>'


def _polyline(kind: str, points: Iterable[tuple[float, float]], right: float) -> str:
    positions = " ".join(f"{100 * x / right:.2f},{100 * _y(y) / _HEIGHT:.2f}" for x, y in points)
    return f'<polyline class="{kind}" points="{positions}"/>'


def _estimate_line(c: float, right: float) -> str:
    """Drawn densely where it is steep."""
    return _polyline("est", ((x, estimate(x, c)) for x in (right * (position / 60) ** 2 for position in range(61))), right)


def _plot(label: str, lines: str, points: str, right: float, stop: float | None) -> str:
    step = tick_step(right, 4)
    parts = [gridline(_y(share / 4)) for share in range(5)]
    for position in range(1, int(right / step - 0.5) + 1):
        x = f"{100 * position * step / right:.2f}%"
        parts.append(f'<text x="{x}" y="314" text-anchor="middle">{position * step:g}</text>')
    parts.append('<text x="100%" y="314" text-anchor="end">nats</text><text x="0" y="314" text-anchor="middle">0</text>')
    has_stop = stop is not None and 0 < stop < right
    if has_stop and stop is not None:
        x = f"{100 * stop / right:.2f}%"
        parts.append(f'<line class="stop" x1="{x}" x2="{x}" y1="8" y2="296"/>')
    parts.append(f'<svg x="0" y="0" width="100%" height="320" viewBox="0 0 100 100" preserveAspectRatio="none">{lines}</svg>')
    parts.append(points)
    if has_stop and stop is not None:
        x, left = f"{100 * stop / right:.2f}%", stop < 0.6 * right
        parts.append(
            f'<text class="halo" x="{x}" dx="{6 if left else -6}" y="20" text-anchor="{"start" if left else "end"}">'
            "svip stops from here</text>"
        )
    parts += [left_label(_y(share), f"{share:g}") for share in (0, 0.5, 1)]
    return f'<svg class="scatter gutter" role="img" aria-label="{label}" width="100%" height="320">{"".join(parts)}</svg>'


def _span(low: float, high: float) -> str:
    return f"{low:g} to {high:g}" if math.isfinite(high) else f"above {low:g}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"
