"""The comparison's tables: as many columns as fit the window, names never cut, a bar for the speedup and its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.console import Console
from rich.text import Text

from specgen.compare.predictions import Prediction
from specgen.compare.results import Figures, Row
from specgen.errors import SpecgenError
from specgen.methods import WITHOUT_A_DRAFT
from specgen.types import PHASES
from specgen.ui.sanitize import draft_length, inline

GAP = 2
LONGEST_BAR, SHORTEST_BAR = 24, 6
WIDEST_NAME = 0.45  # of the window
NONE = ""
_PHASE_TITLES = {"prefill": "prefill", "draft": "draft", "verify": "verify", "sample": "sample", "other": "other"}
_SECONDS, _SHARES = 11, 7  # widths of a phase's cell with both, and with its share alone
_CONSOLE = Console(width=200)  # for wrapping alone


@dataclass(frozen=True, slots=True)
class Column:
    """`value` gives the text of a method's cell; those with the highest `goes` leave first where the window is narrow."""

    title: str  # two lines
    value: Callable[[Figures], str]
    goes: int
    style: str = "none"
    left: bool = False
    optional: bool = False  # only where some row has it


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _interval(figures: Figures) -> str:
    return NONE if figures.low is None or figures.high is None else f"{figures.low:.2f}–{figures.high:.2f}"


_SPEED = Column("tokens\n/s", lambda row: _number(row.summary.tokens_per_second, ",.1f"), 1)
_SPEEDUP = Column("\nspeedup", lambda row: NONE if row.speedup is None else f"{row.speedup:.2f}×", 0)
_COLUMNS = (
    Column("accep-\ntance", lambda row: _number(row.summary.acceptance_rate, ".0%"), 2),
    Column("draft\nshare", lambda row: _number(row.summary.draft_share, ".0%"), 10),
    Column("\nHM", lambda row: _number(row.summary.harmonic_mean, ".2f"), 11),
    Column("tokens\na pass", lambda row: _number(row.summary.block_efficiency, ".2f"), 9),
    Column("draft\nlength", lambda row: draft_length(row.summary.mean_draft_length, branches=row.branches), 8),
    Column("target\npasses", lambda row: f"{row.summary.target_passes:,}", 12),
    Column("perp-\nlexity", lambda row: _number(row.perplexity, ".2f"), 7, optional=True),
    Column("joules\na token", lambda row: _number(row.joules_per_token, ".3g"), 6, optional=True),
    _SPEED,
    _SPEEDUP,
    Column("95%\ninterval", _interval, 4, style="quiet", left=True),
)
_BAR_GOES, _PREDICTED_GOES = 5, 3


@dataclass(frozen=True, slots=True)
class _Line:
    """A row to be laid out: a method's, or one of its categories'."""

    name: str
    row: Row
    figures: Figures | None
    is_best: bool
    is_category: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Finished lines, and whether the window was too narrow for all columns."""

    lines: list[Text]
    is_cut: bool


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Plain decoding, the lossless by speed, the broken, the lossy by speed, and those that did not run."""

    def position(row: Row) -> tuple[int, float]:
        if row.is_baseline:
            return 0, 0.0
        kind = 4 if row.overall is None else 3 if not row.spec.lossless else 2 if row.is_broken else 1
        speedup = row.overall.speedup if row.overall is not None else None
        return kind, -(speedup or 0.0)

    return sorted(rows, key=position)


def best(rows: Sequence[Row]) -> Row | None:
    """The fastest that keeps its promise, plain decoding aside; None where there is none."""
    able = [row for row in rows if row.spec.lossless and not row.is_broken and not row.is_baseline and row.overall is not None]
    return max(able, key=lambda row: (row.overall.speedup if row.overall else None) or 0.0, default=None)


def output_word(row: Row, figures: Figures, *, is_category: bool = False) -> str:
    """What is known of the output, in the fewest words."""
    if row.is_baseline:
        return "reference"
    if not row.spec.lossless:
        return "lossy"
    if figures.identical is None:
        return "sampled"
    positions = [difference.position for difference in row.differences if difference.is_tie is (not figures.diverged)]
    if figures.diverged:
        return f"{figures.diverged} differ" if is_category or figures.diverged > 1 else f"differs at {positions[0]}"
    if figures.tied:
        many = is_category or figures.tied > 1
        return f"{figures.tied} tie{'s' * (figures.tied > 1)}" if many else f"tie at {positions[0]}"
    return "same"


def speed_table(
    rows: Sequence[Row], width: int, *, by_category: bool = False, predictions: Mapping[str, Prediction] | None = None
) -> Layout:
    """The comparison's main table, `width` cells wide at most."""
    top = best(rows)
    lines = []
    alone, together = failed(rows)
    for row in ordered(rows):
        if row.overall is None and row not in alone:
            continue
        lines.append(_Line(inline(row.spec.written), row, row.overall, row is top))
        if by_category and len(row.by_category) > 1:
            lines += [_Line("  " + inline(name), row, part, False, True) for name, part in row.by_category.items()]
    columns = [column for column in _COLUMNS if not column.optional or any(_has(line, column) for line in lines)]
    if predictions:
        columns += _prediction_columns(rows, predictions)
    cures = {row.spec.written: hint_of(row.failure, rows) for row in alone if row.failure is not None}
    made = _laid_out(lines, columns, width, cures)
    for names, why in together:
        said = Text(inline(", ".join(names))).append(" not run", "strong").append(f": {why}")
        for part in said.wrap(_CONSOLE, width):
            part.rstrip()
            made.lines.append(part)
    return made


def failed(rows: Sequence[Row]) -> tuple[list[Row], list[tuple[list[str], str]]]:
    """The methods without figures: those that get a row of their own, and names with a reason that several share."""
    reasons: dict[str, list[Row]] = {}
    alone = []
    for row in ordered(rows):
        if row.overall is None and row.failure is None:
            alone.append(row)
        elif row.overall is None and row.failure is not None:
            hint = hint_of(row.failure, rows)
            told = f"{_reason(row)}{'; ' + inline(hint[:1].lower() + hint[1:]) if hint else ''}"
            reasons.setdefault(told, []).append(row)
    alone += [same[0] for same in reasons.values() if len(same) == 1]
    return alone, [([row.spec.written for row in same], why) for why, same in reasons.items() if len(same) > 1]


def _reason(row: Row) -> str:
    return "" if row.failure is None else inline(row.failure.message).removeprefix(f"{row.spec.name} ")


def hint_of(error: SpecgenError, rows: Sequence[Row]) -> str:
    """What to do, less what the table has already."""
    has_lookup = any(row.spec.name == "lookup" for row in rows)
    return error.hint.removesuffix(WITHOUT_A_DRAFT) if has_lookup else error.hint


def _has(line: _Line, column: Column) -> bool:
    return line.figures is not None and column.value(line.figures) != NONE


def _prediction_columns(rows: Sequence[Row], predictions: Mapping[str, Prediction]) -> list[Column]:
    by_formula, by_passes = prediction_cells(rows, predictions)
    return [
        Column("by\nEq. 14", by_formula, _PREDICTED_GOES),
        Column("by pass\ncosts", by_passes, _PREDICTED_GOES),
    ]


def prediction_cells(
    rows: Sequence[Row], predictions: Mapping[str, Prediction]
) -> tuple[Callable[[Figures], str], Callable[[Figures], str]]:
    """The speedup that EESD's formula gives, and the one that measured passes give. A category has none."""
    written = {id(row.overall): row.spec.written for row in rows if row.overall is not None}

    def told(figures: Figures) -> Prediction:
        return predictions.get(written.get(id(figures), ""), Prediction(None, None))

    def shown(speedup: float | None) -> str:
        return NONE if speedup is None else f"{speedup:.2f}×"

    return (lambda figures: shown(told(figures).formula)), (lambda figures: shown(told(figures).pass_costs))


def _laid_out(lines: Sequence[_Line], columns: list[Column], width: int, cures: Mapping[str, str]) -> Layout:
    outputs = [output_word(line.row, line.figures, is_category=line.is_category) if line.figures else NONE for line in lines]
    named = max(6, *(Text(line.name).cell_len for line in lines))
    output = max(6, *(len(word) for word in outputs))
    cells = {column.title: [column.value(line.figures) if line.figures else NONE for line in lines] for column in columns}
    widths = {
        column.title: max(max(map(len, column.title.split("\n"))), *(len(cell) for cell in cells[column.title]))
        for column in columns
    }
    stacked = named > width * WIDEST_NAME  # names get a line of their own
    beside = GAP if stacked else named + GAP
    kept, bar = _fitting(columns, widths, beside + output, width)
    if not stacked and beside + output + _room(kept, widths, bar=bar) > width:  # not even the speedup fits beside a name
        stacked, beside = True, GAP
        kept, bar = _fitting(columns, widths, beside + output, width)
    taken = beside + output + _room(kept, widths, bar=bar)
    grid = _Grid(kept, widths, output, beside, width, stacked)
    bars = min(LONGEST_BAR, width - taken + SHORTEST_BAR) if bar else 0
    highest = max((line.figures.high or line.figures.speedup or 0 for line in lines if line.figures), default=0)
    made = grid.titles()
    for position, line in enumerate(lines):
        if line.figures is None:
            made += grid.not_run(line, cures.get(line.row.spec.written, ""))
        else:
            values = [cells[column.title][position] for column in kept]
            made += grid.figures(line, outputs[position], values, _bar(line, bars, highest))
    return Layout(made, len(kept) < len(columns))


def _room(columns: Sequence[Column], widths: Mapping[str, int], *, bar: bool) -> int:
    return sum(widths[column.title] + GAP for column in columns) + bar * (GAP + SHORTEST_BAR)


def _fitting(columns: Sequence[Column], widths: Mapping[str, int], beside: int, width: int) -> tuple[list[Column], bool]:
    """The columns that fit, and whether the bar does. The speedup stays whatever happens."""
    kept, bar = list(columns), True
    while beside + _room(kept, widths, bar=bar) > width and (bar or any(column.goes for column in kept)):
        next_to_go = max(kept, key=lambda column: column.goes)
        if bar and next_to_go.goes < _BAR_GOES:
            bar = False
        else:
            kept.remove(next_to_go)
    return kept, bar


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where the cells of the kept columns stand."""

    columns: Sequence[Column]
    widths: Mapping[str, int]
    output: int
    indent: int
    width: int
    stacked: bool

    def titles(self) -> list[Text]:
        heads = [column.title.split("\n") for column in self.columns]
        made = []
        for level in range(2):
            words = ("method", "output") if level else ("", "")
            line = Text(" " * self.indent if self.stacked else words[0].ljust(self.indent), "quiet")
            line.append(words[1].ljust(self.output), "quiet")
            for column, head in zip(self.columns, heads, strict=True):
                line.append(" " * GAP).append(self._aligned(column, head[level]), "quiet")
            line.rstrip()
            made.append(line)
        return [line for line in made if line]

    def figures(self, line: _Line, output: str, cells: Sequence[str], bar: Text) -> list[Text]:
        style = "quiet" if line.is_category else "strong" if line.is_best else "none"
        word = "quiet" if line.row.is_baseline or line.is_category else "bad" if line.row.is_broken else "none"
        row = Text(" " * self.indent) if self.stacked else self._name(line.name, style)
        row.append(output.ljust(self.output), word)
        for column, cell in zip(self.columns, cells, strict=True):
            strong = line.is_best and column in (_SPEED, _SPEEDUP)
            own = "quiet" if line.is_category else column.style
            row.append(" " * GAP).append(self._aligned(column, cell), "strong" if strong else own)
        if bar:
            row.append(" " * GAP).append_text(bar)
        row.rstrip()
        return [Text(line.name, style), row] if self.stacked else [row]

    def not_run(self, line: _Line, hint: str) -> list[Text]:
        """Why, and what to do, in the place of the figures."""
        said = Text("not measured yet", "quiet")
        if line.row.failure is not None:
            advice = "; " + inline(hint[:1].lower() + hint[1:]) if hint else ""
            said = Text().append("not run", "strong").append(f": {_reason(line.row)}{advice}")
        wrapped = said.wrap(_CONSOLE, max(self.width - self.indent, 16))
        for part in wrapped:
            part.rstrip()
        first = Text(line.name) if self.stacked else self._name(line.name, "none").append_text(wrapped[0])
        rest = list(wrapped) if self.stacked else wrapped[1:]
        return [first, *(Text(" " * self.indent).append_text(part) for part in rest)]

    def _name(self, name: str, style: str) -> Text:
        text = Text().append(name, style)  # as a part: the style of a whole text would reach what is appended
        return text.append(" " * (self.indent - text.cell_len))

    def _aligned(self, column: Column, text: str) -> str:
        width = self.widths[column.title]
        return text.ljust(width) if column.left else text.rjust(width)


def _bar(line: _Line, cells: int, highest: float) -> Text:
    """Heavy up to the interval's low end, light from there to its high end, in halves of a cell."""
    figures = line.figures
    if not cells or figures is None or figures.speedup is None or highest <= 0:
        return Text()
    low = figures.speedup if figures.low is None else figures.low
    high = figures.speedup if figures.high is None else figures.high
    heavy, light = (round(2 * cells * value / highest) for value in (low, high))
    halves = "H" * heavy + "L" * (light - heavy)
    glyphs = {"HH": "━", "HL": "╾", "H": "╸", "LL": "─", "L": "╴"}
    drawn = "".join(glyphs[left + right] for left, right in zip_longest(halves[::2], halves[1::2], fillvalue=""))
    plain = line.row.is_baseline or not line.row.spec.lossless or line.is_category
    return Text(drawn, "bar.plain" if plain else "bar.best" if line.is_best else "bar")


def phases_table(rows: Sequence[Row], width: int) -> list[Text]:
    """Where each method's time went (EESD, Table 8): seconds and shares, or shares alone where the window is narrow."""
    shown = [row for row in ordered(rows) if row.overall is not None]
    named = max(6, *(Text(inline(row.spec.written)).cell_len for row in shown)) if shown else 6
    phases = list(PHASES)
    stacked = named + (len(phases) + 1) * (_SHARES + GAP) > width
    if stacked:
        named = 0
        phases = phases if (len(phases) + 1) * (_SHARES + GAP) <= width else ["draft", "verify", "sample"]
    with_seconds = named + (len(phases) + 1) * (_SECONDS + GAP) <= width
    size = _SECONDS if with_seconds else _SHARES
    heads = "".join(f"{'':{GAP}}{head:>{size}}" for head in [*(_PHASE_TITLES[phase] for phase in phases), "all"])
    lines = [Text("Where the time goes, in seconds and shares" if with_seconds else "Where the time goes"), Text()]
    lines.append(Text(("" if stacked else "method").ljust(named) + heads, "quiet"))
    for row in shown:
        assert row.overall is not None
        name = inline(row.spec.written)
        cells = _phase_cells(row.overall, phases, size, with_seconds=with_seconds)
        lines += [Text(name), Text(cells)] if stacked else [Text(name + " " * (named - Text(name).cell_len) + cells)]
    return lines


def _phase_cells(figures: Figures, phases: Sequence[str], size: int, *, with_seconds: bool) -> str:
    summary = figures.summary
    cells = []
    for phase in phases:
        share = f"{summary.share_of_time(phase):.0%}"
        cell = f"{summary.phase_seconds[phase]:.2f} {share:>4}" if with_seconds else share
        cells.append(NONE if summary.unsplit_seconds else cell)  # a rival tells its seconds alone
    return "".join(f"{'':{GAP}}{cell:>{size}}" for cell in [*cells, f"{summary.seconds:.2f} s"])
