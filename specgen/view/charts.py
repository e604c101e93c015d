"""The charts of a recorded method as data, drawn twice: as characters in a terminal, and by
`templates/charts.html.j2` as SVG on a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from rich.text import Text

from specgen.base.text import counted, significant
from specgen.base.types import Round
from specgen.compare.results import LEAST_PROMPTS
from specgen.pair.figures import Figures
from specgen.traces.reader import TracedRun
from specgen.traces.statistics import Bin, TraceStatistics, bounds_of, calibration_of, posteriors
from specgen.view.theme import table

LEAD = 10  # cells for a label in a terminal
_EIGHTHS = "▁▂▃▄▅▆▇█"
_PHASES = {
    "prefill": "prompt",
    "draft": "drafting",
    "policy": "policy",
    "verify": "verifying",
    "sample": "sampling",
    "other": "other",
}
_BOUNDS = {
    "acceptance": ("true", "acc"),
    "pinsker": ("Pinsker", "blue"),
    "bretagnolle_huber": ("B–H", "blue dotted"),
    "estimate": ("1−√cH", "dashed"),
}
_NO_DISTRIBUTIONS = (
    "--record distributions adds to a trace how likely acceptance is, "
    "its lower bounds, and the cross-entropy."
)


class Series(NamedTuple):
    """What a chart shows of one quantity: its name, and a number for each place on the x axis.

    `kind` is its look on a page, one or more CSS classes; `style` is its look in a terminal.
    """

    name: str
    kind: str
    values: Sequence[float]
    style: str = "bar"


@dataclass(slots=True)
class Chart:
    """A chart with a title above and notes below. `heading` follows the title in a terminal, `kind`
    names the caption on a page.

    y goes from 0 to `high`. The places on the x axis are rounds, or ranges of a number, which
    `labels` name. On a page, each series is a row of columns if there are `tips` (a tooltip for
    each place), otherwise a line. In a terminal, a chart with `numbers` has a bar and a number for
    each label; one with `labels` alone is a table; one with neither has a row of block characters
    for each series.
    """

    kind: str
    title: str
    heading: str = ""
    notes: Sequence[str] = ()
    series: Sequence[Series] = ()
    labels: Sequence[str] = ()
    numbers: Sequence[str] = ()
    tips: Sequence[str] = ()
    high: float = 1.0

    @property
    def size(self) -> int:
        """The number of places on the x axis."""
        return max((len(series.values) for series in self.series), default=0)

    def lines(self, width: int) -> Iterator[Text]:
        """Yields the chart for a terminal `width` cells wide; title and notes may be longer and are
        to be wrapped."""
        yield Text().append(self.title, "strong").append(f"  {self.heading}", "quiet")
        if self.numbers:
            yield from self._bars(width)
        elif self.labels:
            rows = [["  ", *(series.name for series in self.series)]]
            for place, label in enumerate(self.labels):
                rows.append([f"  {label}", *(f"{line.values[place]:.2f}" for line in self.series)])
            yield from table(rows, gap=1)
        else:
            yield from self._sparks(width)
        for note in self.notes:
            yield Text(note, "quiet")

    def _bars(self, width: int) -> Iterator[Text]:
        (series,) = self.series
        for label, number, value in zip(self.labels, self.numbers, series.values, strict=True):
            room = min(width - LEAD - len(number) - 6, 40)
            halves = round(2 * room * value / self.high) or (1 if value else 0)
            yield Text(f"  {label:<{LEAD}}{number}  ").append(
                "━" * (halves // 2) + "╸" * (halves % 2), series.style
            )

    def _sparks(self, width: int) -> Iterator[Text]:
        """Yields a line of characters for each series. With more values than cells a character is
        the mean of several."""
        for series in self.series:
            size = math.ceil(self.size / max(1, width - LEAD - 2))
            parts = (series.values[at : at + size] for at in range(0, self.size, size))
            means = [sum(part) / len(part) for part in parts]
            blocks = ""
            for mean in means:
                eighths = min(7, int(8 * mean / self.high))
                blocks += _EIGHTHS[eighths] if mean > 0 else " "
            yield Text(f"  {series.name:<{LEAD}}").append(blocks, series.style)


def ticks(high: float, most: int = 4) -> list[float]:
    """Returns places on an axis from 0 to `high`: multiples of 1, 2 or 5 times a power of ten, in
    at most `most` steps."""
    power = 10.0 ** math.floor(math.log10(high / most))
    step = next(
        power * factor for factor in (1, 2, 5, 10) if high / (power * factor) <= most + 1e-9
    )
    return [step * index for index in range(int(high / step + 1e-9) + 1)]


def time_shares(summary: Figures) -> list[tuple[str, str, float]]:
    """Returns for each phase that took time its key, its name in words, and its share of the whole
    time (0 to 1)."""
    shares = [(phase, name, summary.share_of_time(phase)) for phase, name in _PHASES.items()]
    return [(phase, name, share) for phase, name, share in shares if share]


def time_chart(summary: Figures) -> Chart:
    """Returns a chart of the phases' shares of the time, for a terminal. At least one phase must
    have taken time."""
    _, names, shares = zip(*time_shares(summary), strict=True)
    numbers = [f"{share:>4.0%}" for share in shares]
    series = [Series("share", "", shares)]
    return Chart(
        "times",
        "Where the time went",
        f"{significant(summary.seconds)} s",
        series=series,
        labels=names,
        numbers=numbers,
    )


def charts(run: TracedRun, statistics: TraceStatistics) -> Iterator[Chart]:
    """Yields the charts for which the trace has numbers. They show the `statistics` of all
    generations of the method, but for the charts of rounds and of a bandit policy's posterior,
    which show the one generation `run`."""
    bounds = bounds_of(statistics.tokens, statistics.c)
    rounds = [traced.round for traced in run.rounds[1:]]  # without the prefill
    if any(round_.draft.tokens for round_ in rounds):
        yield _rounds(rounds, statistics)
    if statistics.summary.parallel and statistics.accepted_runs:
        yield _until_rejection(statistics)
    if statistics.tokens:
        yield _entropy(statistics, bounds is not None)
    if bounds is not None:
        yield _bounds(bounds)
    if statistics.drafts:
        yield _lengths(statistics)
    if statistics.predictions:
        yield _calibration(statistics)
    if bounds is not None:
        yield _sorted(bounds)
        if bounds["entropy_ratios"]:
            yield _ratios(bounds)
    yield from _posterior(rounds)


def _rounds(rounds: Sequence[Round], statistics: TraceStatistics) -> Chart:
    """The drafted and accepted tokens of each round but the prefill; of a draft that is a tree, its
    nodes. The means are over all generations."""
    counts = [(len(round_.draft.tokens), len(round_.verdict.path)) for round_ in rounds]
    drafted, accepted = zip(*counts, strict=True)
    mean_drafted = statistics.summary.mean_draft_length or 0
    mean_accepted = statistics.mean_accepted_length or 0
    most = "most" if statistics.branches else "longest"
    return Chart(
        "rounds",
        "Tokens of each round, drafted and accepted",
        f"mean {mean_drafted:.1f} and {mean_accepted:.1f}, {most} {max(drafted)}",
        series=[
            Series("drafted", "dis", drafted, "bar.plain"),
            Series("accepted", "acc", accepted, "token.accepted"),
        ],
        tips=[
            f"round {index:,}: {accepted_tokens:,} of {tokens:,} accepted"
            for index, (tokens, accepted_tokens) in enumerate(counts, 1)
        ],
        high=max(drafted),
    )


def _until_rejection(statistics: TraceStatistics) -> Chart:
    """The lengths of PEARL's runs of accepted tokens, beside what its Theorem 2 expects, unless the
    generations are too few to compare a mean with an expectation."""
    runs = statistics.runs_of_accepted() or {}
    rest = ""
    if runs["unfinished"]:
        rest = f"; {counted(runs['unfinished'], 'token')} accepted after the last rejections"
    notes = [f"{counted(runs['complete'], 'complete run')}, longest {runs['longest']:,}{rest}."]
    mean = f"Mean: {runs['mean']:.1f} with the correction"
    deviation = f"Deviation: {runs['deviation']:.1f}"
    if statistics.runs < LEAST_PROMPTS:
        notes.append(f"{mean}. {deviation}.")
    else:
        notes += [
            (
                f"{mean}; 1/(1−α) = {runs['expected']:.1f} by Theorem 2, α {runs['alpha']:.0%} "
                "with unfinished runs."
            ),
            (
                f"{deviation}; {runs['expected_deviation']:.1f} if tokens were accepted "
                "independently."
            ),
        ]
    return Chart("until-rejection", "Tokens until a rejection", notes=notes)


def _entropy(statistics: TraceStatistics, is_recorded: bool) -> Chart:
    """The share of accepted tokens by the entropy of the draft's distribution (SVIP, Figure 2,
    top)."""
    bins = statistics.acceptance_by_entropy()
    return Chart(
        "entropy",
        "Draft entropy and acceptance",
        "share accepted by entropy in nats; number of tokens",
        notes=[] if is_recorded else [_NO_DISTRIBUTIONS],
        numbers=[f"{row['rate']:>4.0%} {row['judged']:>6,}" for row in bins],
        **_accepted(bins),
    )


def _accepted(bins: Sequence[Bin]) -> dict[str, Any]:
    """Returns the fields of a chart of acceptance rates."""
    tips = []
    for row in bins:
        interval = f"{row['rate_low']:.0%}–{row['rate_high']:.0%}"
        tips.append(
            f"{span(row)}: {row['accepted']:,} of {row['judged']:,} accepted, "
            f"{row['rate']:.0%} (95%: {interval})"
        )
    series = Series("accepted", "acc", [row["rate"] for row in bins], "token.accepted")
    return {"series": [series], "labels": [*map(span, bins)], "tips": tips}


def _bounds(bounds: Bin) -> Chart:
    """Medians of the acceptance probability and of its bounds, for ranges of the entropy (SVIP,
    Figure 2, top)."""
    below = (
        f"{bounds['below_estimate']:.0%} of {counted(bounds['tokens'], 'token')} lie "
        "below svip's estimate (no bound)"
    )
    bins = bounds["by_entropy"]
    return Chart(
        "bounds",
        "Draft entropy and the probability of acceptance",
        "medians by entropy",
        notes=[
            (
                "The overlap Σ min(p, q) (true), its lower bounds, and svip's estimate with "
                f"c = {bounds['c']:g}. {below}."
            )
        ],
        series=_medians(bins),
        labels=[*map(span, bins)],
    )


def _sorted(bounds: Bin) -> Chart:
    """Medians of tenths of the tokens, sorted by acceptance probability, and of their bounds (SVIP,
    Figure 4)."""
    bins = bounds["by_acceptance"]
    tighter = bounds["pinsker_tighter"]
    edges = [round(100 * number / len(bins)) for number in range(len(bins) + 1)]
    gaps = f"Pinsker {bounds['pinsker_gap']:.2f}, B–H {bounds['bretagnolle_huber_gap']:.2f}"
    notes = [f"Mean distance to the true probability: {gaps}."]
    if tighter is not None:
        tightness = f"{abs(tighter):.0%} {'tighter' if tighter >= 0 else 'looser'}"
        notes.append(
            f"Pinsker's bound is {tightness}, and the higher one for "
            f"{bounds['pinsker_higher']:.0%} of the tokens."
        )
    return Chart(
        "sorted",
        "Tokens sorted by acceptance probability",
        "medians of equal shares of the tokens",
        notes=notes,
        series=_medians(bins),
        labels=[f"{low}–{high}%" for low, high in pairwise(edges)],
    )


def _medians(bins: Sequence[Bin]) -> list[Series]:
    return [
        Series(label, kind, [row[name] for row in bins]) for name, (label, kind) in _BOUNDS.items()
    ]


def _lengths(statistics: TraceStatistics) -> Chart:
    """The mean of the accepted tokens per draft by the mean entropy of its verified tokens (SVIP,
    Figures 2, bottom, and 8)."""
    bins = statistics.accepted_length_by_entropy()
    correlation = statistics.length_correlation()
    means = [row["mean"] for row in bins]
    note = f"{counted(len(statistics.drafts), 'draft')}."
    if correlation is not None:
        note += f" Correlation {correlation:.2f}.".replace("-", "−")
    return Chart(
        "lengths",
        "Draft entropy and accepted length",
        "accepted tokens by mean entropy in nats; number of drafts",
        notes=[note],
        series=[Series("accepted", "acc", means, "token.accepted")],
        labels=[*map(span, bins)],
        numbers=[f"{row['mean']:>4.1f} {row['drafts']:>6,}" for row in bins],
        tips=[
            f"{span(row)}: {row['mean']:.1f} accepted in the mean of "
            f"{counted(row['drafts'], 'draft')}"
            for row in bins
        ],
        high=max(means) or 1.0,
    )


def _calibration(statistics: TraceStatistics) -> Chart:
    """The share of accepted tokens by the acceptance probability that the length policy
    predicted."""
    calibration = calibration_of(statistics.predictions) or {}
    bins = calibration["bins"]
    tokens = counted(calibration["judged"], "token")
    judged = (
        f"Predicted {calibration['predicted']:.1%} of {tokens}, accepted {calibration['rate']:.1%}."
    )
    return Chart(
        "calibration",
        "Predicted and observed acceptance",
        "mean prediction, share accepted; number of tokens",
        notes=[
            (
                f"{judged} Calibration error {calibration['error']:.3f}: the mean distance of "
                "both over the intervals."
            )
        ],
        numbers=[
            f"{row['predicted']:>4.0%} {row['rate']:>4.0%} {row['judged']:>6,}" for row in bins
        ],
        **_accepted(bins),
    )


def _ratios(bounds: Bin) -> Chart:
    """A histogram of the cross-entropy divided by the draft's entropy (SVIP, Figure 3). The last
    column has all larger ratios."""
    bins = bounds["entropy_ratios"]
    c = bounds["c"]
    tokens = sum(row["tokens"] for row in bins)
    shares = [row["tokens"] / tokens for row in bins]
    median = f"median {bounds['entropy_ratio']:.2f}: c would be {bounds['measured_c']:.2f}"
    return Chart(
        "ratios",
        "Cross-entropy over the draft's entropy",
        f"share of {counted(tokens, 'token')}",
        notes=[f"{median}; c = {c:g} assumes {1 + 2 * c:g}."],
        series=[Series("share", "blue", shares)],
        labels=[*map(span, bins)],
        numbers=[f"{share:>4.0%}" for share in shares],
        tips=[f"{span(row)}: {counted(row['tokens'], 'token')}" for row in bins],
        high=max(shares),
    )


def _posterior(rounds: Sequence[Round]) -> Iterator[Chart]:
    """What a bandit policy believes about the acceptance probability after each round: the mean and
    the central 90 %."""
    beliefs = posteriors(rounds)
    if not beliefs:
        return
    last = beliefs[-1]
    interval = f"{last['low']:.2f}–{last['high']:.2f}"
    looks = {
        "high": ("95% below", "blue dotted"),
        "mean": ("mean", "blue"),
        "low": ("5% below", "blue dotted"),
    }
    yield Chart(
        "posterior",
        "Thompson sampling: the posterior of the acceptance rate",
        f"θ {last['mean']:.2f} ({interval}) after round {last['round']:,}",
        series=[
            Series(label, kind, [belief[name] for belief in beliefs])
            for name, (label, kind) in looks.items()
        ],
    )


def span(row: Bin) -> str:
    """Returns the range of a bin as text, such as `0.1–0.25` or `3 and up`."""
    if row["high"] is None:
        return f"{row['low']:g} and up"
    return f"{row['low']:g}–{row['high']:g}"
