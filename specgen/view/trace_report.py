"""The report of `specgen inspect` on recorded generations: numbers and charts made of text, for at
least 40 cells of width.

The HTML page of the same generations takes the recorded methods, the columns and the sentences from
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.text import Text

from specgen.base.text import counted
from specgen.compare.results import is_too_short
from specgen.pair.figures import Figures
from specgen.traces.reader import TracedRun
from specgen.traces.statistics import TraceStatistics
from specgen.view.charts import charts, time_chart, time_shares
from specgen.view.comparison_columns import COLUMNS as COMPARED
from specgen.view.comparison_columns import Column
from specgen.view.generation import MODES, RoundsView
from specgen.view.theme import table, wrapped

LOSSY = "lossy: the output differs from the target's by design, so it is not ranked."
ENDED = {
    "length": "at the limit",
    "eos": "at the eos token",
    "stop": "at a stop text",
    "interrupted": "by an interruption",
}
NARROWEST = 44  # cells for each method where several are shown side by side
_GAP = 4  # cells between methods


@dataclass(frozen=True, slots=True)
class RecordedMethod:
    """A decoding method in a trace file.

    `label` is its name in the report, `source` the name of the file. `figures` are the statistics
    of all its generations, `run` is the one to show in detail. `varying` has the settings that
    differed between generations, each as a range of values such as "4–7".
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
        """The tokens per second over all generations of the method; 0 where no time was
        recorded."""
        return self.figures.summary.tokens_per_second or 0.0


_SHOWN = ("acceptance_rate", "block_efficiency", "mean_draft_length")
_SPEED = next(column for column in COMPARED if column.key == "tokens_per_second")
COLUMNS = (
    *(column for column in COMPARED if column.key in _SHOWN),
    Column("run_count", "runs", label="recorded", value=attrgetter("runs")),
)


def best(shown: Sequence[RecordedMethod]) -> RecordedMethod | None:
    """Returns the fastest lossless method; None where all methods are lossy, no time was recorded
    or what was recorded is too short to name one."""
    timed = [entry for entry in shown if entry.lossless and entry.speed]
    if any(is_too_short(entry.figures.runs, entry.figures.summary.new_tokens) for entry in timed):
        return None
    return max(timed, key=lambda entry: entry.speed, default=None)


def conditions(start: Mapping[str, Any], runs: int) -> str:
    """Returns in words the models, the device and the sampling of a start line of a trace, and the
    number of recorded generations, `runs`."""
    models = f"{start['target']} with {start['draft']}" if start["draft"] else start["target"]
    sampling = "greedy"
    temperature = start["sampling"].get("temperature")
    if type(temperature) in (int, float) and temperature:
        sampling = f"temperature {temperature:g}"
    words = f"{models}, {start['device']} {start['dtype']}, {sampling}"
    return f"{words}, {runs} runs" if runs > 1 else words


def show(console: Console, shown: Sequence[RecordedMethod], most_rounds: int | None) -> None:
    """Prints the rounds, the numbers and the charts of recorded methods, several side by side. At
    most `most_rounds` rounds of each are listed; None: 40 of a single method, none of several."""
    limit = 40 if len(shown) == 1 else 0
    if most_rounds is not None:
        limit = most_rounds
    for entry in shown:
        if limit and entry.run.rounds:
            _show_rounds(console, entry, limit)
    if len(shown) > 1:
        _show_methods(console, shown)
    columns = max(1, min(len(shown), (console.width + _GAP) // (NARROWEST + _GAP)))
    width = min((console.width + _GAP) // columns - _GAP, 100)
    for start in range(0, len(shown), columns):
        blocks = [
            [line for text in block(entry, width) for line in wrapped(text, width)]
            for entry in shown[start:][:columns]
        ]
        for cells in zip_longest(*blocks, fillvalue=Text()):
            line = Text()
            for place, cell in enumerate(cells):
                line.pad_right(place * (width + _GAP) - line.cell_len)
                line.append_text(cell)
            line.rstrip()
            console.print(line)


def _show_rounds(console: Console, entry: RecordedMethod, limit: int) -> None:
    run = entry.run
    texts = run.texts()
    console.print(Text(entry.label, "strong"))
    eos_ids = set(run.rounds[-1].round.token_ids[-1:]) if run.finish_reason == "eos" else set()
    view = RoundsView(
        console,
        lambda ids: "".join(texts[token] for token in ids),
        eos_ids,
        len(run.start["prompt_ids"]),
        parallel=any(traced.round.mode in MODES for traced in run.rounds),
        branches=entry.figures.branches,
    )
    view.legend()
    for traced in run.rounds[:limit]:
        view.show(traced.round)
    if len(run.rounds) > limit:
        more = counted(len(run.rounds) - limit, "more round")
        console.print(Text(f"and {more}: --rounds {len(run.rounds)}", "quiet"))
    console.print()


def _show_methods(console: Console, shown: Sequence[RecordedMethod]) -> None:
    """Prints a table with a line per method, of as many columns as the terminal has room for."""
    names = max(len(entry.label) for entry in shown)
    columns = (_SPEED, *COLUMNS)[: max(1, (console.width - names) // 10)]
    rows = [["", *(column.label.rjust(8) for column in columns)]]
    for entry in shown:
        rows.append([entry.label, *(column.text(entry.figures) for column in columns)])
    for line in table(rows):
        console.print(line)
    if not all(entry.lossless for entry in shown):
        for line in wrapped(Text(LOSSY, "quiet"), console.width):
            console.print(line)
    console.print()


def block(entry: RecordedMethod, width: int) -> Iterator[Text]:
    """Yields the numbers and the `charts` of a method for `width` cells; longer texts are to be
    wrapped."""
    run = entry.run
    summary = entry.figures.summary
    words = conditions(run.start, entry.figures.runs)
    for name, values in entry.varying.items():
        words += f", {name} {values}"
    yield Text().append(entry.label, "strong").append(f"  {words}", "quiet")
    for note in run.notes:
        yield Text().append("note: ", "bad").append(note)
    figures = Text("  ".join(" ".join(pair) for pair in main_figures(summary)))
    figures.highlight_words(["accepted"], "token.accepted")
    yield figures
    if run.finish_reason is not None and entry.figures.runs == 1:
        yield Text(f"ended {ENDED[run.finish_reason]}", "quiet")
    yield Text()
    drawn = [*charts(run, entry.figures)]
    if time_shares(summary):
        drawn.insert(0, time_chart(summary))
    for chart in drawn:
        yield from chart.lines(width)
        yield Text()


def main_figures(summary: Figures) -> list[tuple[str, str]]:
    """Returns the main numbers of a generation as (number, meaning) pairs, such as ("85%",
    "accepted")."""
    figures = [(f"{summary.new_tokens:,}", "token" if summary.new_tokens == 1 else "tokens")]
    if summary.tokens_per_second:
        figures.append((f"{summary.tokens_per_second:.1f}", "tokens/s"))
    if summary.acceptance_rate is not None and summary.draft_share is not None:
        figures.append((f"{summary.acceptance_rate:.0%}", "accepted"))
        figures += summary.by_source
        figures.append((f"{summary.draft_share:.0%}", "of the text from the draft"))
    return [*figures, (f"{summary.block_efficiency or 0:.2f}", "tokens a pass")]
