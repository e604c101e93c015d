"""Charts over rounds: what each kept and threw away, and what a bandit learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specgen.traces.statistics import Posterior
from specgen.types import Round, TokenStatus
from specgen.ui.html.charts import figure, gridline, keys, left_label, tick_step
from specgen.ui.html.page import text

MOST_COLUMNS = 200  # rounds that a chart shows one by one; more are drawn as means over neighbours


@dataclass(frozen=True, slots=True)
class _Column:
    """Tokens of one round, or their means over several."""

    title: str
    accepted: float
    own: float
    rejected: float
    discarded: float


def rounds_chart(rounds: Sequence[Round]) -> str:
    """Tokens kept (up) and thrown away (down), a column a round."""
    group = math.ceil(len(rounds) / MOST_COLUMNS) or 1
    columns = [_column(rounds[start : start + group]) for start in range(0, len(rounds), group)]
    up = max((column.accepted + column.own for column in columns), default=1.0)
    down = max((column.rejected + column.discarded for column in columns), default=0.0)
    unit = min(13.0, 200 / (up + down)) if up + down else 13.0
    step = max(1, round(tick_step(max(up, 1), 3)), math.ceil(24 / unit))
    mean = sum(column.accepted + column.own for column in columns) / len(columns) if columns else 0.0
    if group > 1:
        mean = sum(len(round_.token_ids) for round_ in rounds) / len(rounds)
    axis = 12 + max(up, 1) * unit
    height = axis + down * unit + 4
    width = 100 / max(len(columns), 1)
    parts = []
    for level in range(step, int(max(up, down)) + step, step):
        parts += [gridline(axis - level * unit)] if level <= up + 0.01 else []
        parts += [gridline(axis + level * unit)] if level <= down + 0.01 else []
    parts += [_drawn(column, position * width, width, axis, unit, height) for position, column in enumerate(columns)]
    parts.append(f'<line class="axis" x1="0" x2="100%" y1="{axis:.1f}" y2="{axis:.1f}"/>')
    parts.append(f'<line class="mean" x1="0" x2="100%" y1="{axis - mean * unit:.1f}" y2="{axis - mean * unit:.1f}"/>')
    for level in range(0, int(max(up, down)) + 1, step):
        parts += [left_label(axis - level * unit, str(level))] if level <= up + 0.01 else []
        parts += [left_label(axis + level * unit, str(level))] if 0 < level <= down + 0.01 else []
    every = max(1, round(tick_step(len(columns), 8))) if columns else 1
    for position in range(0, len(columns), every):
        middle = (position + 0.5) * width
        parts.append(f'<text x="{middle:.2f}%" y="{height + 16:.0f}" text-anchor="middle">{position * group:,}</text>')
    chart = (
        '<svg class="rounds gutter" role="img" aria-label="Tokens kept and thrown away in each round" width="100%" '
        f'height="{height + 22:.0f}">{"".join(parts)}</svg>'
    )
    caption = "Up: tokens kept. Down: tokens thrown away. Round 0 reads the prompt."
    if group > 1:
        caption += f" Each column is the mean of {group:,} rounds."
    return figure("Each round: what was kept, and what was thrown away", _rounds_keys(mean), chart, caption)


def _rounds_keys(mean: float) -> str:
    square = '<rect class="{}" x="5" width="12" y="1" height="12"/>'
    return keys(
        "rounds",
        (
            (square.format("acc"), "accepted"),
            (square.format("own"), "the target's own"),
            (square.format("rej"), "rejected"),
            ('<rect class="dis" x="5.5" width="11" y="1.5" height="11"/>', "discarded"),
            ('<line class="mean" x1="0" x2="22" y1="7" y2="7"/>', f"mean, {mean:.2f} a pass"),
        ),
    )


def _column(rounds: Sequence[Round]) -> _Column:
    statuses = [status for round_ in rounds for status in round_.statuses]
    own = sum(round_.verdict.token is not None for round_ in rounds)
    count = len(rounds)
    if count == 1:
        title = round_title(rounds[0])
    else:
        accepted = statuses.count(TokenStatus.ACCEPTED)
        title = f"rounds {rounds[0].index:,} to {rounds[-1].index:,}: {accepted:,} of {len(statuses):,} accepted"
    return _Column(
        title,
        statuses.count(TokenStatus.ACCEPTED) / count,
        own / count,
        statuses.count(TokenStatus.REJECTED) / count,
        statuses.count(TokenStatus.DISCARDED) / count,
    )


def round_title(round_: Round) -> str:
    """What happened in a round, in words."""
    drafted = len(round_.draft.tokens)
    title = f"round {round_.index:,}: "
    if drafted:
        title += f"{len(round_.verdict.path)} of {drafted} accepted"
    source = round_.verdict.source
    if round_.verdict.token is None:
        return title if drafted else f"{title}nothing drafted"
    own = (
        f"the target's {source}"
        if source
        else "the target's first token"
        if round_.mode == "prefill"
        else "the target's own token"
    )
    return f"{title}, then {own}" if drafted else title + own


def _drawn(column: _Column, start: float, width: float, axis: float, unit: float, height: float) -> str:
    left, inner = start + 0.14 * width, 0.72 * width
    gap = 1 if unit > 4 else 0

    def rect(kind: str, top: float, tokens: float) -> str:
        if tokens <= 0:
            return ""
        tall = max(tokens * unit - gap, 0.5)
        return f'<rect class="{kind}" x="{left:.3f}%" width="{inner:.3f}%" y="{top:.1f}" height="{tall:.1f}"/>'

    up, down = column.accepted * unit, column.rejected * unit
    return (
        f'<g class="col"><title>{text(column.title)}</title>'
        f'<rect class="hit" x="{start:.3f}%" width="{width:.3f}%" y="0" height="{height:.0f}"/>'
        + rect("acc", axis - up, column.accepted)
        + rect("own", axis - up - column.own * unit, column.own)
        + rect("rej", axis + 1, column.rejected)
        + rect("dis", axis + 1 + down, column.discarded)
        + "</g>"
    )


def posterior_chart(beliefs: Sequence[Posterior]) -> str:
    """The mean and the central 90 % of Thompson sampling's posterior, over rounds; empty without one."""
    if not beliefs:
        return ""
    last, tall = max(beliefs[-1].index, 1), 160.0

    def x(index: int) -> float:
        return 100 * index / last

    def y(share: float) -> float:
        return 8 + (1 - share) * (tall - 16)

    edge = [(x(found.index), y(found.high)) for found in beliefs] + [
        (x(found.index), y(found.low)) for found in reversed(beliefs)
    ]
    band = " ".join(f"{at:.2f},{100 * up / tall:.2f}" for at, up in edge)
    mean = " ".join(f"{x(found.index):.2f},{100 * y(found.mean) / tall:.2f}" for found in beliefs)
    parts = [gridline(y(share)) for share in (0, 0.5, 1)]
    parts.append(
        f'<svg x="0" y="0" width="100%" height="{tall:.0f}" viewBox="0 0 100 100" preserveAspectRatio="none">'
        f'<polygon class="band" points="{band}"/><polyline class="est mean" points="{mean}"/></svg>'
    )
    parts += [left_label(y(share), f"{share:g}") for share in (0, 0.5, 1)]
    step = max(1, round(tick_step(last, 8)))
    for index in range(0, last + 1, step):
        anchor = "start" if index == 0 else "end" if index == last else "middle"
        parts.append(f'<text x="{x(index):.2f}%" y="{tall + 14:.0f}" text-anchor="{anchor}">{index:,}</text>')
    chart = (
        '<svg class="posterior gutter" role="img" aria-label="Thompson sampling: the believed acceptance rate over rounds" '
        f'width="100%" height="{tall + 20:.0f}">{"".join(parts)}</svg>'
    )
    final = beliefs[-1]
    marks = [
        ('<line class="est mean" x1="0" x2="22" y1="7" y2="7"/>', "mean of the posterior"),
        ('<rect class="band" x="0" width="22" y="1" height="12"/>', "its central 90%"),
    ]
    caption = f"Behind round {final.index:,}: {final.mean:.2f}, between {final.low:.2f} and {final.high:.2f}."
    lead = "Up: the acceptance rate θ that Thompson sampling believed in. To the right: rounds."
    return figure("What the bandit learned", keys("posterior", marks), chart, caption, lead)
