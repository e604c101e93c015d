"""The tables of `specgen compare` in the terminal: speeds of the methods, and where their time goes.

The table of speeds has as many columns as fit, and a bar for each speedup and its confidence interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from specgen.base.sanitize import one_line
from specgen.base.types import PHASES
from specgen.compare.columns import Column, Entry, output_text, ranked_entries, shown_columns
from specgen.compare.ranking import NOT_RUN, best, not_run
from specgen.compare.results import MethodResult
from specgen.view.terminal.text_layout import labelled

GAP = 2
LONGEST_BAR, SHORTEST_BAR = 24, 6
WIDEST_NAME = 0.45  # of the terminal's width; longer names get a line of their own
_NAME = Column("name", lambda entry: "  " * bool(entry.category) + one_line(entry.name), "\nmethod")
_OUTPUT = Column("output", output_text, "\noutput")
_BAR = Column("bar", lambda entry: None, "\n", priority=5)
_SECONDS, _SHARE = 11, 7  # widths of a phase's cell with seconds and share, and with the share alone


def speed_table(results: Sequence[MethodResult], width: int, *, by_category: bool = False) -> tuple[list[Text], list[str]]:
    """Returns the table of speeds, and the keys of the columns that were left out because the terminal is narrow.

    Its lines have at most `width` cells, unless a method's name alone is longer. With `by_category` each method also has a line
    per category of prompts.
    """
    shown, absent = ranked_entries(results, by_category=by_category), not_run(results)
    columns = [_NAME, _OUTPUT, *sorted(shown_columns(shown), key=lambda column: column.is_speed), _BAR]
    sizes = {column.key: _longest(column.title.split("\n") + [column.text(entry) for entry in shown]) for column in columns}
    sizes[_BAR.key] = SHORTEST_BAR
    sizes[_NAME.key] = max(sizes[_NAME.key], _longest(one_line(names[0]) for names, _ in absent if len(names) == 1))
    if sizes[_NAME.key] > width * WIDEST_NAME:
        sizes[_NAME.key] = 0
    kept, room = _fitting(columns, sizes, width)
    if sizes[_NAME.key] and room < 0:  # not even the speedup fits beside a name
        sizes[_NAME.key] = 0
        kept, room = _fitting(columns, sizes, width)
    sizes[_BAR.key] = min(LONGEST_BAR, room + SHORTEST_BAR)
    lines = [_line([Text(column.title.split("\n")[level], "quiet") for column in kept], kept, sizes) for level in (0, 1)]
    top = best(results)
    fastest = max((entry.figures.high or entry.figures.speedup or 0.0 for entry in shown), default=0.0)
    for entry in shown:
        is_best = entry.result is top and not entry.category
        cells = [Text(column.text(entry), _style(column, entry, is_best=is_best)) for column in kept]
        if _BAR in kept:
            cells[-1] = _bar(entry, sizes[_BAR.key], fastest, is_best=is_best)
        lines += [] if sizes[_NAME.key] else [cells[0].copy()]
        lines.append(_line(cells, kept, sizes))
    for names, reason in absent:
        lines += labelled(Text(", ".join(names)), _reason(reason), width, sizes[_NAME.key] + GAP)
    return lines, [column.key for column in columns if column not in kept and column is not _BAR]


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _fitting(columns: Sequence[Column], sizes: Mapping[str, int], width: int) -> tuple[list[Column], int]:
    """Returns the columns that fit into `width` cells, and the number of cells left over (negative where they do not fit).

    Columns with the highest `priority` are left out first, and columns of priority 0 never. `sizes` has each column's width.
    """
    kept = list(columns)
    while (room := width + GAP - sum(GAP + sizes[column.key] for column in kept)) < 0 and any(column.priority for column in kept):
        kept.remove(max(kept, key=lambda column: column.priority))
    return kept, room


def _line(cells: Sequence[Text], columns: Sequence[Column], sizes: Mapping[str, int]) -> Text:
    """Returns a line of the table, in which each cell is cut or padded to the width of its column in `sizes`."""
    for cell, column in zip(cells, columns, strict=True):
        is_left = column.is_interval or column in (_NAME, _OUTPUT, _BAR)
        cell.align("left" if is_left else "right", sizes[column.key])
    line = Text(" " * GAP).join(cells)
    line.rstrip()
    return line


def _style(column: Column, entry: Entry, *, is_best: bool) -> str:
    if is_best and (column.is_speed or column is _NAME) and not column.is_interval:
        return "strong"
    if column is _OUTPUT and not entry.category and any(found.is_broken for found in entry.figures.differences or ()):
        return "bad"
    is_quiet = entry.category or column.is_interval or (column is _OUTPUT and entry.result.is_reference)
    return "quiet" if is_quiet else "none"


def _reason(reason: str) -> Text:
    if not reason.startswith(NOT_RUN):
        return Text(reason, "quiet")
    return Text().append(NOT_RUN, "strong").append(reason.removeprefix(NOT_RUN))


def _bar(entry: Entry, cells: int, fastest: float, *, is_best: bool) -> Text:
    """Returns a bar for a method's speedup, at most `cells` cells long; `fastest` is the speedup at its full length.

    The bar is thick up to the low end of the speedup's interval and thin from there to the high end.
    """
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
    """Returns a table of the time that each method spent in each phase, such as drafting and verifying (EESD, Table 8).

    Cells have seconds and the share of the whole time, or the share alone where `width` is small.
    """
    shown = ranked_entries(results)
    names = [one_line(entry.name) for entry in shown]
    name_width, phases = _longest(["method", *names]), list(PHASES)
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
