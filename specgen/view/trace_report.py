"""The report of `specgen inspect` on recorded generations: numbers and charts made of text, for at least 40 cells of width.

The HTML page of the same generations takes the recorded methods, the columns and the sentences from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.text import Text

from specgen.compare.columns import COLUMNS as COMPARED
from specgen.compare.columns import Column
from specgen.pair.figures import Summary
from specgen.traces.acceptance import Bounds, BoundsBin, Calibration
from specgen.traces.reader import TracedRun
from specgen.traces.statistics import AcceptedRuns, TraceStatistics, posteriors
from specgen.view.generation import MODES, RoundsView
from specgen.view.theme import counted, labelled, table, wrapped

LOSSY = "lossy: the output differs from the target's by design, so it is not ranked."
ENDED = {"length": "at the limit", "eos": "at the eos token", "stop": "at a stop text", "interrupted": "by an interruption"}
OVERLAP = "the overlap Σ min(p, q) of both models' distributions, which is the probability of acceptance at temperature 1"
NARROWEST = 44  # cells for each method where several are shown side by side
_GAP, _LEAD = 4, 10  # cells between methods, and for a label in a chart
_EIGHTHS = "▁▂▃▄▅▆▇█"
_PHASES = {
    "prompt": "prefill",
    "drafting": "draft",
    "policy": "policy",
    "verifying": "verify",
    "sampling": "sample",
    "other": "other",
}
_RATIO_EDGES = (1, 1.1, 1.2, 1.3, 1.5, 2, 3, math.inf)  # of the cross-entropy over the entropy
_Bar = tuple[str, str, float]  # the label, the number as text, the bar as a share of its room


@dataclass(frozen=True, slots=True)
class RecordedMethod:
    """A decoding method in a trace file, with the statistics of all its generations.

    `label` is its name in the report, `source` the name of the file. `figures` are the statistics of all its generations. `run`
    is the one generation to show in detail. `varying` has the settings that differed between generations, each as a range of
    values such as "4–7".
    """

    label: str
    source: str
    figures: TraceStatistics
    run: TracedRun
    varying: Mapping[str, str] = field(default_factory=dict)

    @property
    def lossless(self) -> bool:
        return self.run.start.get("lossless") is not False

    @property
    def speed(self) -> float:
        """The tokens per second over all generations of the method; 0 where no time was recorded."""
        return self.figures.summary.tokens_per_second or 0.0


_SHOWN = ("acceptance_rate", "block_efficiency", "mean_draft_length")
COLUMNS = (
    *(each for each in COMPARED if each.key in _SHOWN),
    Column("run_count", "runs", label="runs", value=attrgetter("runs")),
)
_SPEED = next(column for column in COMPARED if column.key == "tokens_per_second")


def best(shown: Sequence[RecordedMethod]) -> RecordedMethod | None:
    """Returns the fastest lossless method; None where all methods are lossy or no time was recorded."""
    return max((entry for entry in shown if entry.lossless and entry.speed), key=lambda entry: entry.speed, default=None)


def conditions(start: Mapping[str, Any], runs: int) -> str:
    """Returns in words the models, the device, the sampling and the number of recorded generations.

    `start` is the first line of a recorded generation in the trace, `runs` the number of generations.
    """
    models = f"{start['target']} with {start['draft']}" if start["draft"] else start["target"]
    temperature = start["sampling"].get("temperature")
    how = f"temperature {temperature:g}" if type(temperature) in (int, float) and temperature else "greedy"
    return f"{models}, {start['device']} {start['dtype']}, {how}" + (f", {runs} runs" if runs > 1 else "")


def correlation_text(statistics: TraceStatistics) -> str:
    """Returns in words how a draft's entropy and its accepted length correlate; an empty string where they do not vary."""
    correlation = statistics.length_correlation()
    return "" if correlation is None else f" Correlation {correlation:.2f}.".replace("-", "−")


def tightness(bounds: Bounds) -> str:
    """Returns a sentence that compares how tight the two lower bounds of the acceptance probability are (SVIP, Appendix B)."""
    gaps = f"Mean distance to the true probability: Pinsker {bounds.pinsker_gap:.2f}, B–H {bounds.bretagnolle_huber_gap:.2f}."
    if bounds.pinsker_tighter is None:
        return gaps
    how = "tighter" if bounds.pinsker_tighter >= 0 else "looser"
    higher = f"the higher one for {bounds.pinsker_higher:.0%} of the tokens"
    return f"{gaps} Pinsker's bound is {abs(bounds.pinsker_tighter):.0%} {how}, and {higher}."


def calibration_text(calibration: Calibration) -> str:
    """Returns sentences that compare the predicted with the observed acceptance of all judged tokens."""
    return (
        f"Predicted {calibration.predicted:.1%} of {counted(calibration.judged, 'token')}, accepted {calibration.rate:.1%}. "
        f"Calibration error {calibration.error:.3f}: the mean distance of both over the intervals."
    )


def runs_until_rejection(runs: AcceptedRuns) -> dict[str, str]:
    """Returns in words the `count`, the `mean` and the `deviation` of the runs of accepted tokens.

    Mean and deviation come with what PEARL's Theorem 2 expects.
    """
    expected = f"1/(1−α) = {runs.expected:.1f} by Theorem 2, α {runs.alpha:.0%} with unfinished runs"
    rest = f"; {counted(runs.unfinished, 'token')} accepted after the last rejections" if runs.unfinished else ""
    return {
        "count": f"{counted(runs.complete, 'complete run')}, longest {runs.longest:,}{rest}",
        "mean": f"{runs.mean:.1f} with the correction; {expected}",
        "deviation": f"{runs.deviation:.1f}; {runs.expected_deviation:.1f} if tokens were accepted independently",
    }


def span(low: float, high: float) -> str:
    """Returns a range of numbers as text; `high` may be infinite."""
    return f"{low:g}–{high:g}" if math.isfinite(high) else f"{low:g} and up"


def show(console: Console, shown: Sequence[RecordedMethod], most_rounds: int | None) -> None:
    """Prints the rounds, the numbers and the charts of recorded methods, with several methods side by side.

    At most `most_rounds` rounds of each are listed. None means 40 rounds if there is one method, and none if there are several.
    """
    limit = most_rounds if most_rounds is not None else 40 if len(shown) == 1 else 0
    for entry in shown:
        if limit and entry.run.rounds:
            _show_rounds(console, entry, limit, is_only=len(shown) == 1)
    if len(shown) > 1:
        for line in _methods(shown, console.width):
            console.print(line)
    columns = max(1, min(len(shown), (console.width + _GAP) // (NARROWEST + _GAP)))
    width = min((console.width + _GAP) // columns - _GAP, 100)
    for start in range(0, len(shown), columns):
        blocks = [list(block(entry, width)) for entry in shown[start : start + columns]]
        for cells in zip_longest(*blocks, fillvalue=Text()):
            padded = [Text().append_text(cell) for cell in cells]
            for cell in padded[:-1]:
                cell.pad_right(width - cell.cell_len)
            console.print(Text(" " * _GAP).join(padded))


def _show_rounds(console: Console, entry: RecordedMethod, limit: int, *, is_only: bool) -> None:
    run, texts = entry.run, entry.run.texts()
    if not is_only:
        console.print(Text(entry.label, "strong"))
    ended = {run.rounds[-1].round.token_ids[-1]} if run.finish_reason == "eos" and run.rounds[-1].round.token_ids else set()

    def text_of(ids: Sequence[int]) -> str:
        return "".join(texts[token] for token in ids)

    parallel = any(traced.round.mode in MODES for traced in run.rounds)
    prompt_length = len(run.start["prompt_ids"])
    view = RoundsView(console, text_of, ended, prompt_length, parallel=parallel, branches=entry.figures.branches)
    view.legend()
    for traced in run.rounds[:limit]:
        view.show(traced.round)
    if len(run.rounds) > limit:
        console.print(Text(f"and {counted(len(run.rounds) - limit, 'more round')}: --rounds {len(run.rounds)}", "quiet"))
    console.print()


def _methods(shown: Sequence[RecordedMethod], width: int) -> Iterator[Text]:
    """Yields a table with a line per method. If `width` is too small for all columns, the rightmost ones are left out."""
    names = min(max(6, *(len(entry.label) for entry in shown)), max(6, width - 11))
    columns = (_SPEED, *COLUMNS)[: max(1, (width - names) // 10)]
    rows: list[list[str | Text]] = [["", *(column.label.rjust(8) for column in columns)]]
    for entry in shown:
        label = Text(entry.label)
        label.truncate(names, overflow="ellipsis")
        rows.append([label, *(column.text(entry.figures) for column in columns)])
    yield from table(rows)
    if not all(entry.lossless for entry in shown):
        yield from wrapped(Text(LOSSY, "quiet"), width)
    yield Text()


def block(entry: RecordedMethod, width: int) -> Iterator[Text]:
    """Yields the numbers and charts of a method in lines of at most `width` cells.

    They are computed over all generations of the method in the trace. Only the posterior of a bandit policy is that of the one
    generation `entry.run`.
    """
    run = entry.run
    where = conditions(run.start, entry.figures.runs) + "".join(f", {name} {values}" for name, values in entry.varying.items())
    yield from wrapped(Text().append(entry.label, "strong").append(f"  {where}", "quiet"), width)
    for note in run.notes:
        yield from wrapped(Text().append("note: ", "bad").append(note), width)
    figures = Text("  ".join(" ".join(pair) for pair in main_figures(entry.figures.summary)))
    figures.highlight_words(["accepted"], "token.accepted")
    yield from wrapped(figures, width)
    if run.finish_reason is not None and entry.figures.runs == 1:
        yield Text(f"ended {ENDED[run.finish_reason]}", "quiet")
    yield Text()
    for section in _Sections(entry, width).all():
        yield from [*section, Text()] if section else []


def main_figures(summary: Summary) -> list[tuple[str, str]]:
    """Returns the main numbers of a generation as (number, meaning) pairs, such as ("85%", "accepted")."""
    figures = [(f"{summary.new_tokens:,}", "token" if summary.new_tokens == 1 else "tokens")]
    if summary.tokens_per_second:
        figures.append((f"{summary.tokens_per_second:.1f}", "tokens/s"))
    if summary.acceptance_rate is not None and summary.draft_share is not None:
        figures.append((f"{summary.acceptance_rate:.0%}", "accepted"))
        figures.append((f"{summary.draft_share:.0%}", "of the text from the draft"))
    return [*figures, (f"{summary.block_efficiency or 0:.2f}", "tokens a pass")]


class _Sections:
    """The sections of a method's report: each is a title and lines below it, or nothing where the trace lacks what it shows."""

    def __init__(self, entry: RecordedMethod, width: int) -> None:
        self._figures, self._run, self._width = entry.figures, entry.run, width

    def all(self) -> Iterator[list[Text]]:
        figures = self._figures
        bounds, bins = figures.bounds(), figures.acceptance_by_entropy()
        yield self._times()
        yield self._lengths() if figures.summary.drafted else []
        yield self._runs_of_accepted()
        if bins:
            rows = [(span(each.low, each.high), f"{each.rate:>4.0%} {each.verified:>6,}", each.rate) for each in bins]
            yield self._bars("how often the draft was right, by its entropy", "nats; number of tokens", rows)
            yield self._accepted_lengths()
        yield self._calibration()
        if bounds is not None:
            yield from self._bounds(bounds)
            yield self._ratios(bounds)
        elif bins and not figures.has_distributions:
            hint = "--record distributions adds to a trace how likely acceptance is, its lower bounds, and the cross-entropy."
            yield self._quiet(hint)
        yield self._posterior()

    def _titled(self, title: str, figure: str) -> list[Text]:
        return wrapped(Text().append(title, "strong").append(f"  {figure}", "quiet"), self._width)

    def _quiet(self, text: str) -> list[Text]:
        return wrapped(Text(text, "quiet"), self._width)

    def _bars(self, title: str, figure: str, rows: Iterable[_Bar], *styles: str) -> list[Text]:
        """Returns lines with a label, a number as text, and a bar. `styles` are those of the bars; the last is of all others."""
        lines = self._titled(title, figure)
        for position, (label, number, share) in enumerate(rows):
            room = min(self._width - _LEAD - len(number) - 6, 40)
            halves = round(2 * room * share) or (1 if share else 0)
            style = (styles or ("token.accepted",))[min(position, len(styles) - 1)]
            lines.append(Text(f"  {label:<{_LEAD}}{number}  ").append("━" * (halves // 2) + "╸" * (halves % 2), style))
        return lines

    def _sparks(self, title: str, figure: str, rows: Iterable[tuple[str, Sequence[float], str]], top: float) -> list[Text]:
        """Returns lines with a label and a chart one line high: a character per value whose height is the value as a share of
        `top`; a blank is zero. If there are more values than cells, a character stands for the mean of several neighbours."""
        lines, room = self._titled(title, figure), self._width - _LEAD - 2
        for label, values, style in rows:
            group = math.ceil(len(values) / max(1, room)) or 1  # a terminal may be narrower than the titles
            means = [sum(part) / len(part) for part in (values[at : at + group] for at in range(0, len(values), group))]
            drawn = "".join(" " if mean <= 0 else _EIGHTHS[min(7, int(8 * mean / top))] for mean in means)
            lines.append(Text(f"  {label:<{_LEAD}}").append(drawn, style))
        return lines

    def _times(self) -> list[Text]:
        summary = self._figures.summary
        shares = {name: share for name, phase in _PHASES.items() if (share := summary.share_of_time(phase))}
        rows = [(name, f"{share:>4.0%}", share) for name, share in shares.items()]
        styles = ["token.accepted" if name == "drafting" else "bar" for name in shares]
        return self._bars("where the time went", f"{summary.seconds:.3g} s", rows, *styles) if summary.seconds else []

    def _lengths(self) -> list[Text]:
        """The draft lengths and the numbers of accepted tokens, with the rounds of all generations from left to right.

        The length of a draft that is a tree is its number of nodes.
        """
        figures, longest = self._figures, max(self._figures.lengths, default=0)
        means = f"mean {figures.summary.mean_draft_length or 0:.1f} and {figures.mean_accepted_length or 0:.1f}"
        if longest:
            means += f", {'most' if figures.branches else 'longest'} {longest}"
        rows = [("drafted", figures.lengths, "bar.plain"), ("accepted", figures.accepted_lengths, "token.accepted")]
        title = "draft nodes, accepted length" if figures.branches else "draft length, accepted length"
        return self._sparks(title, means, rows if longest else (), longest)

    def _runs_of_accepted(self) -> list[Text]:
        """The lengths of the runs of accepted tokens, beside what PEARL's Theorem 2 expects."""
        runs = self._figures.runs_of_accepted() if self._figures.summary.parallel else None
        if runs is None:
            return []
        texts = runs_until_rejection(runs)
        lines = self._titled("tokens until a rejection", texts["count"])
        for name in ("mean", "deviation"):
            lines += labelled(Text(f"  {name}"), Text(texts[name]), self._width, _LEAD + 2)
        return lines

    def _accepted_lengths(self) -> list[Text]:
        """The mean number of accepted tokens per draft, for each range of the mean entropy of the draft's verified tokens."""
        bins = self._figures.accepted_length_by_entropy()
        top = max((found.mean for found in bins), default=0.0) or 1.0
        rows = [(span(each.low, each.high), f"{each.mean:>4.1f} {each.drafts:>6,}", each.mean / top) for each in bins]
        figure = f"nats; number of drafts.{correlation_text(self._figures)}"
        return self._bars("accepted tokens of a draft, by its mean entropy", figure, rows)

    def _calibration(self) -> list[Text]:
        """How often tokens were accepted, by the acceptance probability that the length policy predicted for them."""
        if (found := self._figures.calibration()) is None:
            return []
        rows = [
            (span(each.low, each.high), f"{each.mean:>4.0%} {each.rate:>4.0%} {each.verified:>6,}", each.rate)
            for each in found.bins
        ]
        title = "how often tokens were accepted, by the predicted acceptance"
        lines = self._bars(title, "mean prediction, share accepted; number of tokens", rows)
        return [*lines, *self._quiet(calibration_text(found))]

    def _bounds(self, bounds: Bounds) -> Iterator[list[Text]]:
        """The acceptance probability with its lower bounds, by entropy and for tenths of the tokens sorted by it."""
        below = f"{bounds.below_estimate:.0%} lie below the estimate, c = {bounds.c:g}"
        yield [
            *self._titled(
                "how likely acceptance is at temperature 1, and its lower bounds",
                f"medians by entropy, {counted(bounds.tokens, 'token')}",
            ),
            *_bounds_table("entropy", [span(each.low, each.high) for each in bounds.by_entropy], bounds.by_entropy),
            *self._quiet(f"true: {OVERLAP}. {below}"),
        ]
        groups = len(bounds.by_acceptance)
        labels = [f"{low}–{high}%" for low, high in pairwise(round(100 * number / groups) for number in range(groups + 1))]
        yield [
            *self._titled("the same, by how likely acceptance is", "medians of equal shares of the tokens"),
            *_bounds_table("tokens", labels, bounds.by_acceptance),
            *self._quiet(tightness(bounds)),
        ]

    def _ratios(self, bounds: Bounds) -> list[Text]:
        """The distribution of the cross-entropy divided by the entropy, which SVIP takes to be constant."""
        if bounds.entropy_ratio is None or bounds.measured_c is None:
            return []
        count = sum(found.tokens for found in bounds.entropy_ratios)
        rows = []
        for low, high in pairwise(_RATIO_EDGES):
            share = sum(found.tokens for found in bounds.entropy_ratios if low <= found.low < high) / count
            rows.append((span(low, high), f"{share:>4.0%}", share))
        said = f"median {bounds.entropy_ratio:.2f}: c would be {bounds.measured_c:.2f}; "
        said += f"c = {bounds.c:g} assumes {1 + 2 * bounds.c:g}"
        title, figure = "cross-entropy over the draft's entropy", f"share of {counted(count, 'token')}"
        return [*self._bars(title, figure, rows, "bar"), *self._quiet(said)]

    def _posterior(self) -> list[Text]:
        found = posteriors((traced.round for traced in self._run.rounds), max(self._width - _LEAD - 2, 1))
        if not found:
            return []
        last = found[-1]
        rows = [
            ("95% below", [each.high for each in found], "bar"),
            ("mean", [each.mean for each in found], "bar"),
            ("5% below", [each.low for each in found], "bar"),
        ]
        figure = f"θ {last.mean:.2f} ({last.low:.2f}–{last.high:.2f}) after round {last.index:,}"
        return self._sparks("Thompson sampling", figure, rows, 1.0)


def _bounds_table(heading: str, labels: Iterable[str], bins: Iterable[BoundsBin]) -> list[Text]:
    rows: list[list[str | Text]] = [[f"  {heading:<{_LEAD}}", "true", "Pinsker", "B–H", "1−√cH"]]
    for label, found in zip(labels, bins, strict=True):
        figures = [f"{number:.2f}" for number in (found.pinsker, found.bretagnolle_huber, found.estimate)]
        rows.append([f"  {label}", Text(f"{found.acceptance:.2f}", "token.accepted"), *figures])
    return table(rows, gap=1)
