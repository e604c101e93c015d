"""Charts with the rounds of a recorded generation on the x axis; a round is one draft and its verification by the target.

One shows the tokens that each round kept and threw away. The other shows the posterior of a bandit policy (a policy that learns
the acceptance probability by Thompson sampling).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from specgen.base.types import Round, TokenStatus
from specgen.traces.statistics import Posterior
from specgen.view.html.charts import Axes, polyline, tick_step

MOST_COLUMNS = 200  # more rounds than this are drawn as means over neighbouring rounds


def rounds_chart(rounds: Sequence[Round]) -> dict[str, Any]:
    """Returns the values of the macro `rounds_chart`: a column per round, its kept tokens above the axis, the others below it.

    If there are more than `MOST_COLUMNS` rounds, a column shows the means of several neighbouring rounds.
    """
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
    """Returns the mean number of tokens per round under their CSS class.

    The classes are acc (accepted), own (chosen by the target), rej (rejected) and dis (discarded, drafted after a rejected
    token).
    """
    statuses = [status for round_ in rounds for status in round_.statuses]
    counts = {
        "acc": statuses.count(TokenStatus.ACCEPTED),
        "own": sum(round_.verdict.token is not None for round_ in rounds),
        "rej": statuses.count(TokenStatus.REJECTED),
        "dis": statuses.count(TokenStatus.DISCARDED),
    }
    return {kind: count / len(rounds) for kind, count in counts.items()}


def _bars(counts: dict[str, float], axis: float, unit: float) -> list[tuple[str, float, float]]:
    """Returns (CSS class, y of the top, height) of each bar in one column of the chart, in pixels.

    Upwards from the axis: accepted tokens, then the target's own token. Downwards: rejected tokens, then discarded ones. `counts`
    has the tokens by CSS class, `axis` is the y of the axis, `unit` the pixels per token.
    """
    gap = 1 if unit > 4 else 0
    tops = {
        "acc": axis - counts["acc"] * unit,
        "own": axis - (counts["acc"] + counts["own"]) * unit,
        "rej": axis + 1,
        "dis": axis + 1 + counts["rej"] * unit,
    }
    return [(kind, top, max(counts[kind] * unit - gap, 0.5)) for kind, top in tops.items() if counts[kind] > 0]


def _title(rounds: Sequence[Round]) -> str:
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


def posterior_chart(posteriors: Sequence[Posterior]) -> dict[str, Any] | None:
    """Returns the values of the macro `posterior_chart`: the posterior of the acceptance probability after each round.

    The chart shows its mean and its central 90 % interval. Returns None where `posteriors` is empty (no bandit policy).
    """
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
