"""Charts over rounds: the tokens that each kept and threw away, and the posterior of a bandit policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from specgen.traces.statistics import Posterior
from specgen.types import Round, TokenStatus
from specgen.ui.html.charts import Axes, polyline, tick_step

MOST_COLUMNS = 200  # more rounds than this are drawn as means over neighbouring rounds


def rounds_chart(rounds: Sequence[Round]) -> dict[str, Any]:
    """The values of the macro `rounds_chart`: a column per round, tokens kept above the axis and thrown away below it."""
    group = math.ceil(len(rounds) / MOST_COLUMNS)
    groups = [rounds[start : start + group] for start in range(0, len(rounds), group)]
    counts = [_mean_counts(neighbours) for neighbours in groups]
    up = max(1.0, *(count["acc"] + count["own"] for count in counts))
    down = max(0.0, *(count["rej"] + count["dis"] for count in counts))
    unit = min(13.0, 200 / (up + down))  # pixels per token
    step = max(1, round(tick_step(up, 3)), math.ceil(24 / unit))
    axis = 12 + up * unit
    bottom = axis + down * unit + 4
    width = 1 / len(groups)
    levels = range(-(int(down + 0.01) // step * step), int(up + 0.01) + 1, step)
    every = max(1, round(tick_step(len(groups), 8)))
    axes = Axes(
        bottom + 22,
        [axis - level * unit for level in levels],
        [(axis - level * unit, str(abs(level))) for level in levels],
        [((index + 0.5) * width, f"{index * group:,}", "middle") for index in range(0, len(groups), every)],
    )
    mean = sum(len(round_.token_ids) for round_ in rounds) / len(rounds)
    columns = [
        {"title": _title(neighbours), "x": index * width, "bars": _bars(count, axis, unit)}
        for index, (neighbours, count) in enumerate(zip(groups, counts, strict=True))
    ]
    return {
        "axes": axes,
        "axis": axis,
        "bottom": bottom,
        "columns": columns,
        "width": width,
        "group": group,
        "mean": f"{mean:.2f}",
        "mean_y": axis - mean * unit,
    }


def _mean_counts(rounds: Sequence[Round]) -> dict[str, float]:
    """Mean tokens per round by CSS class: accepted, rejected, discarded, and chosen by the target."""
    statuses = [status for round_ in rounds for status in round_.statuses]
    counts = {
        "acc": statuses.count(TokenStatus.ACCEPTED),
        "own": sum(round_.verdict.token is not None for round_ in rounds),
        "rej": statuses.count(TokenStatus.REJECTED),
        "dis": statuses.count(TokenStatus.DISCARDED),
    }
    return {kind: count / len(rounds) for kind, count in counts.items()}


def _bars(counts: dict[str, float], axis: float, unit: float) -> list[tuple[str, float, float]]:
    """CSS class, y of the top and height (pixels) of each bar of a column: accepted tokens on the axis with the target's token
    above, rejected tokens under it with the discarded ones below."""
    gap = 1 if unit > 4 else 0
    tops = {
        "acc": axis - counts["acc"] * unit,
        "own": axis - (counts["acc"] + counts["own"]) * unit,
        "rej": axis + 1,
        "dis": axis + 1 + counts["rej"] * unit,
    }
    return [(kind, top, max(counts[kind] * unit - gap, 0.5)) for kind, top in tops.items() if counts[kind] > 0]


def _title(rounds: Sequence[Round]) -> str:
    """What happened in a round, or how many drafted tokens several rounds accepted."""
    drafted = sum(len(round_.draft.tokens) for round_ in rounds)
    accepted = f"{sum(len(round_.verdict.path) for round_ in rounds):,} of {drafted:,} accepted"
    first, verdict = rounds[0], rounds[0].verdict
    if len(rounds) > 1:
        return f"rounds {first.index:,} to {rounds[-1].index:,}: {accepted}"
    draft = accepted if drafted else "prompt processed" if first.mode == "prefill" else "nothing drafted"
    chosen = verdict.source or "target's"
    own = f", then the {chosen} token" if verdict.token is not None else ""
    return f"round {first.index:,}: {draft}{own}"


def posterior_chart(posteriors: Sequence[Posterior]) -> dict[str, Any] | None:
    """The values of the macro `posterior_chart`: mean and central 90 % of the posterior over rounds. None without a posterior."""
    if not posteriors:
        return None
    last, height = max(posteriors[-1].index, 1), 160.0

    def y(share: float) -> float:
        return 8 + (1 - share) * (height - 16)

    def line(points: Sequence[tuple[int, float]]) -> str:
        return polyline(((index / last, y(share)) for index, share in points), height)

    upper = [(posterior.index, posterior.high) for posterior in posteriors]
    lower = [(posterior.index, posterior.low) for posterior in reversed(posteriors)]
    marked = range(0, last + 1, max(1, round(tick_step(last, 8))))
    below = [(index / last, f"{index:,}", "start" if not index else "end" if index == last else "middle") for index in marked]
    return {
        "axes": Axes(height + 20, [y(0), y(0.5), y(1)], [(y(0), "0"), (y(0.5), "0.5"), (y(1), "1")], below),
        "height": height,
        "band": line([*upper, *lower]),
        "mean": line([(posterior.index, posterior.mean) for posterior in posteriors]),
        "final": posteriors[-1],
    }
