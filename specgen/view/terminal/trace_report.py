"""The report of `specgen inspect` on recorded generations: numbers and charts made of text, for at least 40 cells of width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from operator import attrgetter

from rich.console import Console
from rich.text import Text

from specgen.base.types import Round
from specgen.compare.columns import Column
from specgen.pair.accepted_runs import AcceptedRuns
from specgen.traces.acceptance_bounds import Bounds, BoundsBin
from specgen.traces.calibration import Calibration
from specgen.traces.statistics import Bin, TraceStatistics, posteriors
from specgen.view.recorded_methods import (
    COLUMNS,
    ENDED,
    LOSSY,
    OVERLAP,
    RecordedMethod,
    calibration_text,
    conditions,
    correlation_text,
    runs_until_rejection,
    tightness,
)
from specgen.view.terminal.rounds import MODES, RoundsView
from specgen.view.terminal.text_layout import labelled, wrapped

NARROWEST = 44  # cells for each method where several are shown side by side
_GAP = 4
_SPEED = Column("tokens_per_second", attrgetter("statistics.summary.tokens_per_second"), form="{:.1f}", label="tokens/s")
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


def show(console: Console, shown: Sequence[RecordedMethod], most_rounds: int | None) -> None:
    """Prints the rounds, the numbers and the charts of recorded methods, with several methods side by side.

    At most `most_rounds` rounds of each are listed. None means 40 rounds if there is one method, and none if there are several.
    """
    limit = most_rounds if most_rounds is not None else 40 if len(shown) == 1 else 0
    for entry in shown:
        if limit and entry.run.rounds:
            _show_rounds(console, entry, limit, is_only=len(shown) == 1)
    if len(shown) > 1:
        for line in _table(shown, console.width):
            console.print(line)
    columns = max(1, min(len(shown), (console.width + _GAP) // (NARROWEST + _GAP)))
    width = min((console.width + _GAP) // columns - _GAP, 100)
    for start in range(0, len(shown), columns):
        blocks = [list(block(entry, width)) for entry in shown[start : start + columns]]
        for cells in zip_longest(*blocks, fillvalue=Text()):
            console.print(_side_by_side(cells, width))


def _side_by_side(cells: Sequence[Text], width: int) -> Text:
    line = Text()
    for cell in cells[:-1]:
        line.append_text(cell).append(" " * (width - cell.cell_len + _GAP))
    line.append_text(cells[-1])
    line.rstrip()
    return line


def _show_rounds(console: Console, entry: RecordedMethod, limit: int, *, is_only: bool) -> None:
    run, texts = entry.run, entry.run.texts()
    if not is_only:
        console.print(Text(entry.label, "strong"))
    ended = {run.rounds[-1].round.token_ids[-1]} if run.finish_reason == "eos" and run.rounds[-1].round.token_ids else set()

    def text_of(ids: Sequence[int]) -> str:
        return "".join(texts[token] for token in ids)

    parallel = any(traced.round.mode in MODES for traced in run.rounds)
    view = RoundsView(
        console, text_of, ended, len(run.start["prompt_ids"]), parallel=parallel, branches=entry.statistics.branches
    )
    view.legend()
    for traced in run.rounds[:limit]:
        view.show(traced.round)
    if len(run.rounds) > limit:
        rest = len(run.rounds) - limit
        console.print(Text(f"and {rest:,} more round{'s' * (rest != 1)}: --rounds {len(run.rounds)}", "quiet"))
    console.print()


def block(entry: RecordedMethod, width: int) -> Iterator[Text]:
    """Yields the numbers and charts of a method in lines of at most `width` cells.

    They are computed over all generations of the method in the trace. Only the posterior of a bandit policy is that of the one
    generation `entry.run`.
    """
    statistics, run = entry.statistics, entry.run
    summary = statistics.summary
    where = conditions(run.start, statistics.runs) + "".join(f", {name} {values}" for name, values in entry.varying.items())
    yield from wrapped(Text().append(entry.label, "strong").append(f"  {where}", "quiet"), width)
    for note in run.notes:
        yield from wrapped(Text().append("note: ", "bad").append(note), width)
    yield from wrapped(Text("  ").join(_figures(statistics)), width)
    if run.finish_reason is not None and statistics.runs == 1:
        yield Text(f"ended {ENDED[run.finish_reason]}", "quiet")
    yield Text()
    if summary.seconds:
        yield from _titled("where the time went", f"{summary.seconds:.3g} s", width)
        for name, phase in _PHASES.items():
            if share := summary.share_of_time(phase):
                yield _bar(f"{name:<10}", share, f"{share:>4.0%}", width, "bar" if phase != "draft" else "token.accepted")
        yield Text()
    rounds = [traced.round for traced in run.rounds]
    if summary.drafted:
        yield from _lengths(statistics, width)
    if summary.parallel and (runs := statistics.runs_of_accepted()):
        yield from _accepted_runs(runs, width)
    if bins := statistics.acceptance_by_entropy():
        yield from _by_entropy(bins, width)
        yield from _accepted_lengths(statistics, width)
    if calibration := statistics.calibration():
        yield from _calibration(calibration, width)
    if bounds := statistics.bounds():
        yield from _bounds(bounds, width)
        yield from _ratios(bounds, width)
    elif bins and not statistics.has_distributions:
        hint = "--record distributions adds to a trace how likely acceptance is, its lower bounds, and the cross-entropy."
        yield from wrapped(Text(hint, "quiet"), width)
        yield Text()
    yield from _posterior(rounds, width)


def _figures(statistics: TraceStatistics) -> Iterator[Text]:
    summary = statistics.summary
    yield Text(f"{summary.new_tokens:,} tokens")
    if summary.tokens_per_second:
        yield Text(f"{summary.tokens_per_second:.1f} tokens/s")
    if summary.acceptance_rate is not None and summary.draft_share is not None:
        yield Text(f"{summary.acceptance_rate:.0%} ").append("accepted", "token.accepted")
        yield Text(f"{summary.draft_share:.0%} of the text from the draft")
    if summary.block_efficiency is not None:
        yield Text(f"{summary.block_efficiency:.2f} tokens a pass")


def _titled(title: str, figure: str, width: int) -> Iterator[Text]:
    yield from wrapped(Text().append(title, "strong").append(f"  {figure}" if figure else "", "quiet"), width)


def _bar(label: str, share: float, figure: str, width: int, style: str) -> Text:
    """Returns a line with a label, a number as text (`figure`) and a bar, which fills `share` of the remaining width."""
    room = min(width - len(label) - len(figure) - 6, 40)
    halves = round(2 * room * share) or (1 if share else 0)
    return Text(f"  {label}{figure}  ").append("━" * (halves // 2) + "╸" * (halves % 2), style)


def _lengths(statistics: TraceStatistics, width: int) -> Iterator[Text]:
    """Yields two small charts with the rounds from left to right: the draft length and the number of accepted tokens.

    The rounds of all generations of the method follow one another. The length of a draft that is a tree is its number of nodes.
    """
    means = f"mean {statistics.summary.mean_draft_length or 0:.1f} and {statistics.mean_accepted_length or 0:.1f}"
    longest = max(statistics.lengths, default=0)
    if longest:
        means += f", {'most' if statistics.branches else 'longest'} {longest}"
    yield from _titled("draft nodes, accepted length" if statistics.branches else "draft length, accepted length", means, width)
    courses = (("drafted", statistics.lengths, "bar.plain"), ("accepted", statistics.accepted_lengths, "token.accepted"))
    for name, lengths, style in courses if longest else ():
        yield Text(f"  {name:<10}").append(_spark(lengths, longest, width - 12), style)
    yield Text()


def _accepted_runs(runs: AcceptedRuns, width: int) -> Iterator[Text]:
    """Yields the lengths of the runs of accepted tokens, beside what PEARL's Theorem 2 expects."""
    texts = runs_until_rejection(runs)
    yield from _titled("tokens until a rejection", texts["count"], width)
    for name in ("mean", "deviation"):
        yield from labelled(Text(f"  {name}"), Text(texts[name]), width, 12)
    yield Text()


def _spark(values: Sequence[float], top: float, columns: int) -> str:
    """Returns a chart one line high: a character per value whose height is the value as a share of `top`; a blank is zero.

    If there are more values than `columns`, a character stands for the mean of several neighbouring values.
    """
    group = math.ceil(len(values) / max(1, columns)) or 1  # a terminal may be narrower than the titles
    means = [sum(part) / len(part) for part in (values[at : at + group] for at in range(0, len(values), group))]
    return "".join(" " if mean <= 0 else _EIGHTHS[min(7, int(8 * mean / top))] for mean in means)


def _by_entropy(bins: Sequence[Bin], width: int) -> Iterator[Text]:
    yield from _titled("how often the draft was right, by its entropy", "nats; number of tokens", width)
    for found in bins:
        yield _bar(
            f"{_span(found.low, found.high):<10}", found.rate, f"{found.rate:>4.0%} {found.verified:>6,}", width, "token.accepted"
        )
    yield Text()


def _span(low: float, high: float) -> str:
    return f"{low:g}–{high:g}" if math.isfinite(high) else f"{low:g} and up"


def _accepted_lengths(statistics: TraceStatistics, width: int) -> Iterator[Text]:
    """Yields the mean number of accepted tokens per draft, for each range of the mean entropy of the draft's verified tokens."""
    bins = statistics.accepted_length_by_entropy()
    figure = f"nats; number of drafts.{correlation_text(statistics)}"
    yield from _titled("accepted tokens of a draft, by its mean entropy", figure, width)
    top = max((found.mean for found in bins), default=0.0) or 1.0
    for found in bins:
        label = f"{_span(found.low, found.high):<10}"
        yield _bar(label, found.mean / top, f"{found.mean:>4.1f} {found.drafts:>6,}", width, "token.accepted")
    yield Text()


def _calibration(calibration: Calibration, width: int) -> Iterator[Text]:
    """Yields how often tokens were accepted, by the acceptance probability that the length policy predicted for them."""
    title = "how often tokens were accepted, by the predicted acceptance"
    yield from _titled(title, "mean prediction, share accepted; number of tokens", width)
    for found in calibration.bins:
        figure = f"{found.predicted:>4.0%} {found.rate:>4.0%} {found.verified:>6,}"
        yield _bar(f"{_span(found.low, found.high):<10}", found.rate, figure, width, "token.accepted")
    yield from wrapped(Text(calibration_text(calibration), "quiet"), width)
    yield Text()


def _bounds(bounds: Bounds, width: int) -> Iterator[Text]:
    """Yields the acceptance probability with its lower bounds, by entropy and for tenths of the tokens sorted by it."""
    title = "how likely acceptance is at temperature 1, and its lower bounds"
    yield from _titled(title, f"medians by entropy, {bounds.tokens:,} tokens", width)
    yield from _bounds_table("entropy", [(_span(found.low, found.high), found) for found in bounds.by_entropy])
    below = f"{bounds.below_estimate:.0%} lie below the estimate, c = {bounds.c:g}"
    yield from wrapped(Text(f"true: {OVERLAP}. {below}", "quiet"), width)
    yield Text()
    yield from _titled("the same, by how likely acceptance is", "medians of equal shares of the tokens", width)
    shares = [round(100 * number / len(bounds.by_acceptance)) for number in range(len(bounds.by_acceptance) + 1)]
    labels = [f"{low}–{high}%" for low, high in pairwise(shares)]
    yield from _bounds_table("tokens", zip(labels, bounds.by_acceptance, strict=True))
    yield from wrapped(Text(tightness(bounds), "quiet"), width)
    yield Text()


def _bounds_table(heading: str, rows: Iterable[tuple[str, BoundsBin]]) -> Iterator[Text]:
    yield Text(f"  {heading:<10}{'true':>6}{'Pinsker':>8}{'B–H':>6}{'1−√cH':>7}", "quiet")
    for label, found in rows:
        line = Text(f"  {label:<10}").append(f"{found.acceptance:>6.2f}", "token.accepted")
        yield line.append(f"{found.pinsker:>8.2f}{found.bretagnolle_huber:>6.2f}{found.estimate:>7.2f}")


def _ratios(bounds: Bounds, width: int) -> Iterator[Text]:
    """Yields the distribution of the cross-entropy divided by the entropy, which SVIP takes to be constant."""
    if bounds.entropy_ratio is None or bounds.measured_c is None:
        return
    count = sum(found.tokens for found in bounds.entropy_ratios)
    yield from _titled("cross-entropy over the draft's entropy", f"share of {count:,} tokens", width)
    for low, high in pairwise(_RATIO_EDGES):
        share = sum(found.tokens for found in bounds.entropy_ratios if low <= found.low < high) / count
        yield _bar(f"{_span(low, high):<10}", share, f"{share:>4.0%}", width, "bar")
    text = f"median {bounds.entropy_ratio:.2f}: c would be {bounds.measured_c:.2f}; c = {bounds.c:g} assumes {1 + 2 * bounds.c:g}"
    yield from wrapped(Text(text, "quiet"), width)
    yield Text()


def _posterior(rounds: Sequence[Round], width: int) -> Iterator[Text]:
    found = posteriors(rounds, max(width - 12, 1))
    if not found:
        return
    last = found[-1]
    yield from _titled(
        "Thompson sampling", f"θ {last.mean:.2f} ({last.low:.2f}–{last.high:.2f}) after round {last.index:,}", width
    )
    for name, figure in _EDGES:
        yield Text(f"  {name:<10}").append(_spark([figure(belief) for belief in found], 1.0, width - 12), "bar")
    yield Text()


_EDGES: tuple[tuple[str, Callable[..., float]], ...] = (
    ("95% below", lambda belief: belief.high),
    ("mean", lambda belief: belief.mean),
    ("5% below", lambda belief: belief.low),
)


def _table(shown: Sequence[RecordedMethod], width: int) -> Iterator[Text]:
    """Yields a table with a line per method. If `width` is too small for all columns, the rightmost ones are left out."""
    names = min(max(6, *(len(entry.label) for entry in shown)), max(6, width - 11))
    columns = (_SPEED, *COLUMNS)[: max(1, (width - names) // 10)]
    yield Text(" " * names + "".join(f"{column.label:>10}" for column in columns), "quiet")
    for entry in shown:
        label = Text(entry.label)
        label.truncate(names, overflow="ellipsis", pad=True)
        yield label.append("".join(f"{column.text(entry):>10}" for column in columns))
    if not all(entry.lossless for entry in shown):
        yield from wrapped(Text(LOSSY, "quiet"), width)
    yield Text()
