"""The terminal's tables of a comparison: as many columns as fit, complete names, a bar for the speedup and its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from specgen.compare.columns import Column, Entry, entries, output_text, shown_columns
from specgen.compare.ranking import NOT_RUN, best, not_run, ranked
from specgen.compare.results import MethodResult
from specgen.types import PHASES
from specgen.ui.sanitize import inline
from specgen.ui.terminal.text_layout import labelled

GAP = 2
LONGEST_BAR, SHORTEST_BAR = 24, 6
WIDEST_NAME = 0.45  # of the terminal's width; longer names get a line of their own
_BAR = Column("bar", lambda entry: None, "\n", priority=5)
_SECONDS, _SHARE = 11, 7  # widths of a phase's cell with seconds and share, and with the share alone


@dataclass(frozen=True, slots=True)
class Layout:
    """Finished lines, and whether the terminal was too narrow for all columns."""

    lines: list[Text]
    is_cut: bool


def speed_table(results: Sequence[MethodResult], width: int, *, by_category: bool = False) -> Layout:
    """The comparison's main table, at most `width` cells wide where names allow."""
    shown: list[Entry] = []
    for result in ranked(results):
        if result.overall is not None:
            shown += entries(result, by_category=by_category and len(result.by_category) > 1)
    absent = not_run(results)
    names = ["  " * bool(entry.category) + inline(entry.name) for entry in shown]
    outputs = [output_text(entry) for entry in shown]
    columns = shown_columns(shown)
    columns = [*sorted(columns, key=lambda column: column.is_speed), _BAR]
    cells = {column.key: [column.text(entry) for entry in shown] for column in columns}
    sizes = {column.key: max(map(len, [*column.title.split("\n"), *cells[column.key]])) for column in columns}
    sizes[_BAR.key] = SHORTEST_BAR

    alone = [inline(absentees[0]) for absentees, _ in absent if len(absentees) == 1]
    name_width, output_width = _longest("method", names + alone), _longest("output", outputs)
    if name_width > width * WIDEST_NAME:
        name_width = 0
    kept, room = _fitting(columns, sizes, width - name_width - GAP - output_width)
    if name_width and room < 0:  # not even the speedup fits beside a name
        name_width = 0
        kept, room = _fitting(columns, sizes, width - GAP - output_width)
    grid = _Grid(kept, sizes | {_BAR.key: min(LONGEST_BAR, room + SHORTEST_BAR)}, name_width, output_width)
    lines = grid.titles()
    top = best(results)
    fastest = max((entry.figures.high or entry.figures.speedup or 0.0 for entry in shown), default=0.0)
    for position, entry in enumerate(shown):
        values = {column.key: cells[column.key][position] for column in kept}
        lines += grid.entry(entry, names[position], outputs[position], values, fastest, is_best=entry.result is top)
    for absentees, reason in absent:
        lines += labelled(Text(inline(", ".join(absentees))), _reason(inline(reason)), width, name_width + GAP)
    return Layout(lines, any(column not in kept for column in columns if column is not _BAR))


def _longest(title: str, texts: Sequence[str]) -> int:
    return max(cell_len(text) for text in (title, *texts))


def _fitting(columns: Sequence[Column], sizes: Mapping[str, int], room: int) -> tuple[list[Column], int]:
    """The columns that fit into `room` cells, and the cells left. Columns of priority 0 stay in any case."""
    kept = list(columns)
    while (left := room - sum(GAP + sizes[column.key] for column in kept)) < 0 and any(column.priority for column in kept):
        kept.remove(max(kept, key=lambda column: column.priority))
    return kept, left


def _reason(reason: str) -> Text:
    if not reason.startswith(NOT_RUN):
        return Text(reason, "quiet")
    return Text().append(NOT_RUN, "strong").append(reason.removeprefix(NOT_RUN))


@dataclass(frozen=True, slots=True)
class _Grid:
    """The columns of a table and their widths in cells; `name` is 0 where names have lines of their own."""

    columns: Sequence[Column]
    sizes: Mapping[str, int]
    name: int
    output: int

    def titles(self) -> list[Text]:
        lines = []
        for level, (name, output) in enumerate((("", ""), ("method", "output"))):
            line = self._start(name if self.name else "", "quiet", output, "quiet")
            for column in self.columns:
                line.append(" " * GAP).append(self._aligned(column, column.title.split("\n")[level]), "quiet")
            line.rstrip()
            lines.append(line)
        return [line for line in lines if line]

    def entry(
        self, entry: Entry, name: str, output: str, cells: Mapping[str, str], fastest: float, *, is_best: bool
    ) -> list[Text]:
        """One line for an entry, or two where names have lines of their own. `fastest` is the speedup of the longest bar."""
        quiet = "quiet" if entry.category else "none"
        is_best = is_best and not entry.category
        name_style = "strong" if is_best else quiet
        broken = any(difference.outcome.is_broken for difference in entry.figures.differences or ())
        output_style = "quiet" if entry.result.is_reference else "bad" if broken and not entry.category else quiet
        line = self._start(name if self.name else "", name_style, output, output_style)
        for column in self.columns:
            line.append(" " * GAP)
            if column is _BAR:
                line.append_text(_bar(entry, self.sizes[_BAR.key], fastest, is_best=is_best))
            else:
                style = "quiet" if column.is_interval else "strong" if is_best and column.is_speed else quiet
                line.append(self._aligned(column, cells[column.key]), style)
        line.rstrip()
        return [line] if self.name else [Text(name, name_style), line]

    def _start(self, name: str, name_style: str, output: str, output_style: str) -> Text:
        line = Text().append(name, name_style).append(" " * (self.name - cell_len(name) + GAP))
        return line.append(set_cell_size(output, self.output), output_style)

    def _aligned(self, column: Column, text: str) -> str:
        width = self.sizes[column.key]
        return text.ljust(width) if column.is_interval else text.rjust(width)


def _bar(entry: Entry, cells: int, fastest: float, *, is_best: bool) -> Text:
    """A bar for the speedup: heavy up to the interval's low end, light from there to its high end, in halves of a cell."""
    figures = entry.figures
    if figures.speedup is None or fastest <= 0:
        return Text()
    low = figures.speedup if figures.low is None else figures.low
    high = figures.speedup if figures.high is None else figures.high
    heavy, light = (round(2 * cells * value / fastest) for value in (low, high))
    halves = "H" * heavy + "L" * (light - heavy)
    glyphs = {"HH": "━", "HL": "╾", "H": "╸", "LL": "─", "L": "╴"}
    drawn = "".join(glyphs[left + right] for left, right in zip_longest(halves[::2], halves[1::2], fillvalue=""))
    plain = entry.result.is_reference or not entry.result.spec.lossless or entry.category
    return Text(drawn, "bar.plain" if plain else "bar.best" if is_best else "bar")


def phases_table(results: Sequence[MethodResult], width: int) -> list[Text]:
    """Where each method's time went (EESD, Table 8): seconds and shares, or shares alone where the terminal is narrow."""
    shown = [entries(result)[0] for result in ranked(results) if result.overall is not None]
    names = [inline(entry.name) for entry in shown]
    name_width, phases = _longest("method", names), list(PHASES)
    if name_width + (len(phases) + 1) * (_SHARE + GAP) > width:
        name_width = 0  # names get lines of their own
        phases = phases if (len(phases) + 1) * (_SHARE + GAP) <= width else ["draft", "verify", "sample"]
    with_seconds = name_width + (len(phases) + 1) * (_SECONDS + GAP) <= width
    size = GAP + (_SECONDS if with_seconds else _SHARE)
    lines = [Text(f"Where the time goes{', in seconds and shares' * with_seconds}"), Text()]
    lines.append(Text("method"[:name_width].ljust(name_width) + "".join(f"{head:>{size}}" for head in [*phases, "all"]), "quiet"))
    for entry, name in zip(shown, names, strict=True):
        summary, cells = entry.figures.summary, []
        for phase in phases:
            share = f"{summary.share_of_time(phase):.0%}"
            cell = f"{summary.phase_seconds[phase]:.2f} {share:>4}" if with_seconds else share
            cells.append("" if summary.unsplit_seconds else cell)  # transformers reports no phases
        line = "".join(f"{cell:>{size}}" for cell in [*cells, f"{summary.seconds:.2f} s"])
        lines += [Text(set_cell_size(name, name_width) + line)] if name_width else [Text(name), Text(line)]
    return lines
