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
    per series.
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
        return max((len(each.values) for each in self.series), default=0)

    def lines(self, width: int) -> Iterator[Text]:
        """Yields the chart for a terminal `width` cells wide; title and notes may be longer and are
        to be wrapped."""
        yield Text().append(self.title, "strong").append(f"  {self.heading}", "quiet")
        if self.numbers:
            yield from self._bars(width)
        elif self.labels:
            columns = zip(
                *([f"{value:.2f}" for value in each.values] for each in self.series), strict=True
            )
            rows = [
                [f"  {label}", *numbers]
                for label, numbers in zip(self.labels, columns, strict=True)
            ]
            yield from table([["  ", *(each.name for each in self.series)], *rows], gap=1)
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
            drawn = "".join(
                " " if mean <= 0 else _EIGHTHS[min(7, int(8 * mean / self.high))] for mean in means
            )
            yield Text(f"  {series.name:<{LEAD}}").append(drawn, series.style)


def ticks(high: float, most: int = 4) -> list[float]:
    """Returns places on an axis from 0 to `high`: multiples of 1, 2 or 5 times a power of ten, in
    at most `most` steps."""
    power = 10.0 ** math.floor(math.log10(high / most))
    step = next(
        power * factor for factor in (1, 2, 5, 10) if high / (power * factor) <= most + 1e-9
    )
    return [step * index for index in range(int(high / step + 1e-9) + 1)]


def time_shares(summary: Figures) -> list[tuple[str, str, float]]:
    """Returns, for each phase that took time, its key in `PHASES`, its name for people, and its
    share of the whole time (0 to 1)."""
    return [
        (phase, name, share)
        for phase, name in _PHASES.items()
        if (share := summary.share_of_time(phase))
    ]


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


def charts(run: TracedRun, found: TraceStatistics) -> Iterator[Chart]:
    """Yields the charts for which the trace has numbers. Most are of all generations of the method,
    whose statistics are `found`; the charts of rounds and of a bandit policy's posterior are of the
    one generation `run`."""
    bounds = bounds_of(found.tokens, found.c)
    rounds = [traced.round for traced in run.rounds[1:]]  # without the prefill
    if any(round_.draft.tokens for round_ in rounds):
        yield _rounds(rounds, found)
    if found.summary.parallel and found.accepted_runs:
        yield _until_rejection(found)
    if found.tokens:
        yield _entropy(found, bounds is not None)
    if bounds is not None:
        yield _bounds(bounds)
    if found.drafts:
        yield _lengths(found)
    if found.predictions:
        yield _calibration(found)
    if bounds is not None:
        yield _sorted(bounds)
        if bounds["entropy_ratios"]:
            yield _ratios(bounds)
    yield from _posterior(rounds)


def _rounds(rounds: Sequence[Round], found: TraceStatistics) -> Chart:
    """The drafted and accepted tokens of each round but the prefill. The length of a draft that is
    a tree is its number of nodes; the means are over all generations."""
    counts = [(len(round_.draft.tokens), len(round_.verdict.path)) for round_ in rounds]
    drafted, accepted = zip(*counts, strict=True)
    means = (
        f"mean {found.summary.mean_draft_length or 0:.1f} and {found.mean_accepted_length or 0:.1f}"
    )
    return Chart(
        "rounds",
        "Tokens of each round, drafted and accepted",
        f"{means}, {'most' if found.branches else 'longest'} {max(drafted)}",
        series=[
            Series("drafted", "dis", drafted, "bar.plain"),
            Series("accepted", "acc", accepted, "token.accepted"),
        ],
        tips=[
            f"round {index:,}: {each[1]:,} of {each[0]:,} accepted"
            for index, each in enumerate(counts, 1)
        ],
        high=max(drafted),
    )


def _until_rejection(found: TraceStatistics) -> Chart:
    """The lengths of PEARL's runs of accepted tokens, beside what its Theorem 2 expects."""
    runs = found.runs_of_accepted() or {}
    rest = (
        f"; {counted(runs['unfinished'], 'token')} accepted after the last rejections"
        if runs["unfinished"]
        else ""
    )
    expected = (
        f"1/(1−α) = {runs['expected']:.1f} by Theorem 2, α {runs['alpha']:.0%} with unfinished runs"
    )
    notes = [
        f"{counted(runs['complete'], 'complete run')}, longest {runs['longest']:,}{rest}.",
        f"Mean: {runs['mean']:.1f} with the correction; {expected}.",
        (
            f"Deviation: {runs['deviation']:.1f}; {runs['expected_deviation']:.1f} if tokens "
            "were accepted independently."
        ),
    ]
    return Chart("until-rejection", "Tokens until a rejection", notes=notes)


def _entropy(found: TraceStatistics, is_recorded: bool) -> Chart:
    """The share of accepted tokens by the entropy of the draft's distribution (SVIP, Figure 2,
    top)."""
    bins = found.acceptance_by_entropy()
    return Chart(
        "entropy",
        "Draft entropy and acceptance",
        "share accepted by entropy in nats; number of tokens",
        notes=[] if is_recorded else [_NO_DISTRIBUTIONS],
        numbers=[f"{each['rate']:>4.0%} {each['judged']:>6,}" for each in bins],
        **_accepted(bins),
    )


def _accepted(bins: Sequence[Bin]) -> dict[str, Any]:
    """Returns the fields of a chart of acceptance rates."""
    tips = []
    for each in bins:
        interval = f"{each['rate_low']:.0%}–{each['rate_high']:.0%}"
        tips.append(
            f"{span(each)}: {each['accepted']:,} of {each['judged']:,} accepted, "
            f"{each['rate']:.0%} (95%: {interval})"
        )
    series = Series("accepted", "acc", [each["rate"] for each in bins], "token.accepted")
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
        how = f"{abs(tighter):.0%} {'tighter' if tighter >= 0 else 'looser'}"
        notes.append(
            f"Pinsker's bound is {how}, and the higher one for "
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
        Series(label, kind, [each[name] for each in bins])
        for name, (label, kind) in _BOUNDS.items()
    ]


def _lengths(found: TraceStatistics) -> Chart:
    """The mean of the accepted tokens per draft by the mean entropy of its verified tokens (SVIP,
    Figures 2, bottom, and 8)."""
    bins = found.accepted_length_by_entropy()
    correlation = found.length_correlation()
    means = [each["mean"] for each in bins]
    said = "" if correlation is None else f" Correlation {correlation:.2f}.".replace("-", "−")
    return Chart(
        "lengths",
        "Draft entropy and accepted length",
        "accepted tokens by mean entropy in nats; number of drafts",
        notes=[f"{counted(len(found.drafts), 'draft')}.{said}"],
        series=[Series("accepted", "acc", means, "token.accepted")],
        labels=[*map(span, bins)],
        numbers=[f"{each['mean']:>4.1f} {each['drafts']:>6,}" for each in bins],
        tips=[
            (
                f"{span(each)}: {each['mean']:.1f} accepted in the mean of "
                f"{counted(each['drafts'], 'draft')}"
            )
            for each in bins
        ],
        high=max(means) or 1.0,
    )


def _calibration(found: TraceStatistics) -> Chart:
    """The share of accepted tokens by the acceptance probability that the length policy
    predicted."""
    calibration = calibration_of(found.predictions) or {}
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
            f"{each['predicted']:>4.0%} {each['rate']:>4.0%} {each['judged']:>6,}" for each in bins
        ],
        **_accepted(bins),
    )


def _ratios(bounds: Bin) -> Chart:
    """A histogram of the cross-entropy divided by the draft's entropy (SVIP, Figure 3). The last
    column has all larger ratios."""
    bins = bounds["entropy_ratios"]
    c = bounds["c"]
    tokens = sum(each["tokens"] for each in bins)
    shares = [each["tokens"] / tokens for each in bins]
    median = f"median {bounds['entropy_ratio']:.2f}: c would be {bounds['measured_c']:.2f}"
    return Chart(
        "ratios",
        "Cross-entropy over the draft's entropy",
        f"share of {counted(tokens, 'token')}",
        notes=[f"{median}; c = {c:g} assumes {1 + 2 * c:g}."],
        series=[Series("share", "blue", shares)],
        labels=[*map(span, bins)],
        numbers=[f"{share:>4.0%}" for share in shares],
        tips=[f"{span(each)}: {counted(each['tokens'], 'token')}" for each in bins],
        high=max(shares),
    )


def _posterior(rounds: Sequence[Round]) -> Iterator[Chart]:
    """What a bandit policy believes about the acceptance probability after each round: the mean and
    the central 90 %."""
    found = posteriors(rounds)
    if found:
        last = found[-1]
        named = {
            "high": ("95% below", "blue dotted"),
            "mean": ("mean", "blue"),
            "low": ("5% below", "blue dotted"),
        }
        yield Chart(
            "posterior",
            "Thompson sampling: the posterior of the acceptance rate",
            (
                f"θ {last['mean']:.2f} ({last['low']:.2f}–{last['high']:.2f}) after round "
                f"{last['round']:,}"
            ),
            series=[
                Series(label, kind, [each[name] for each in found])
                for name, (label, kind) in named.items()
            ],
        )


def span(found: Bin) -> str:
    """Returns the range of a bin as text, such as `0.1–0.25` or `3 and up`."""
    return (
        f"{found['low']:g} and up"
        if found["high"] is None
        else f"{found['low']:g}–{found['high']:g}"
    )
