"""The columns of a comparison's results (acceptance rate, speedup and so on), each defined once.
The terminal's table, the HTML page, the CSV file and the JSON output are all made from this
list."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from specgen.base.settings import written_value
from specgen.base.text import one_line, significant
from specgen.base.types import PHASES
from specgen.compare.results import MethodResult, ranked
from specgen.compare.verdict import OUTCOMES, outcome_text

_FORMULA = re.compile(r"(^|;)(?=[\s␀-␡⇥↵�]*[=+\-@＝＋－＠])")


def ranked_rows(
    results: Sequence[MethodResult], *, by_category: bool = False
) -> list[MethodResult]:
    """Returns the rows of the methods that ran: plain decoding, then lossless methods by speed,
    then the others (see `ranked`).

    With `by_category`, a method whose prompts have several categories also has a row for each
    category. Plain decoding has none, because its speedup is always 1.
    """
    rows = []
    for result in ranked(results):
        if result.prompts:
            is_split = by_category and len(result.by_category) > 1 and not result.is_reference
            rows += result.rows(by_category=is_split)
    return rows


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a comparison's results. `key` is its name in JSON and CSV. `value` reads its
    value from a row; None: the attribute `key` of the row's `summary`.

    Tables show only the columns with a `title`, which is two lines long. `form` makes a cell's
    text: it is a format string for the value, or a function from the row to the text. A narrow
    terminal drops the columns with the highest `priority` first. The HTML page shows only columns
    with a `label`, which is written after the value where there is no room for titles; the speedup
    and its confidence interval have cells of their own on that page.
    """

    key: str
    title: str = ""
    form: str | Callable[[Any], str] = "{}"
    priority: int = 0
    label: str = ""
    value: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    # shown only if at least one row has a value
    is_optional: bool = field(default=False, kw_only=True)
    # at the right end of the terminal's table, bold for the best method
    is_speed: bool = field(default=False, kw_only=True)
    is_interval: bool = field(default=False, kw_only=True)  # dim and left-aligned
    in_json: bool = field(default=True, kw_only=True)
    in_csv: bool = field(default=True, kw_only=True)

    def of(self, row: Any) -> Any:
        """The value of this column in a row."""
        return getattr(row.summary, self.key) if self.value is None else self.value(row)

    def text(self, row: Any) -> str:
        """The text of this column's cell in a row; empty if the value is None."""
        value = self.of(row)
        if value is None:
            return ""
        return self.form.format(value) if isinstance(self.form, str) else self.form(row)


def _draft_length(row: Any) -> str:
    """The mean number of drafted tokens of a draft; nodes, if drafts are trees or several chains,
    because the longest path has fewer."""
    mean = row.summary.mean_draft_length
    return f"{mean:.0f} nodes" if row.branches else f"{mean:.1f}"


def _joules(key: str) -> Callable[[Any], str]:
    return lambda row: significant(getattr(row.summary, key))


def _interval(row: MethodResult) -> str:
    return f"{row.low:.2f}–{row.high:.2f}"


def _perplexity_interval(row: MethodResult) -> str:
    low, high = row.perplexity_interval or (math.nan, math.nan)
    return f"{low:.2f}–{high:.2f}"


def _perplexity_end(end: int) -> Callable[[MethodResult], float | None]:
    return lambda row: None if row.perplexity_interval is None else row.perplexity_interval[end]


def _outcome(outcome: str) -> Callable[[MethodResult], int | None]:
    return lambda row: row.outcomes.get(outcome)


def _phases(row: MethodResult) -> dict[str, float] | None:
    """The method's seconds by phase (`types.PHASES`). None for transformers' own methods, which do
    not report phases."""
    return None if row.summary.unsplit_seconds else dict(row.summary.phase_seconds)


def _phase(phase: str) -> Callable[[MethodResult], float | None]:
    return lambda row: (_phases(row) or {}).get(phase) if row.prompts else None


def _prediction(name: str, title: str) -> Column:
    def value(row: MethodResult) -> float | None:
        return (row.predicted or {}).get(name)

    label = title.replace("\n", " ")
    return Column(
        f"predicted_{name}",
        title,
        "{:.2f}×",
        3,
        label,
        value=value,
        in_json=False,
        is_optional=True,
        is_speed=True,
    )


COLUMNS = (
    Column("prompts", value=attrgetter("prompts")),
    *(Column(outcome, value=_outcome(outcome)) for outcome in OUTCOMES),
    Column("acceptance_rate", "accep-\ntance", "{:.0%}", 2, "accepted"),
    Column("draft_share", "draft\nshare", "{:.0%}", 10),
    Column("harmonic_mean", "harm.\nmean", "{:.2f}", 11),
    Column("block_efficiency", "tokens\na pass", "{:.2f}", 9, "a pass"),
    Column("mean_draft_length", "draft\nlength", _draft_length, 8, "drafted"),
    Column("mean_accepted_run", "accepted per\nrejection", "{:.1f}", 13, "accepted per rejection"),
    Column("target_passes", "target\npasses", "{:,}", 12),
    Column("ties", in_csv=False),
    *map(
        Column,
        ("rounds", "drafted", "accepted", "copied", "copied_accepted", "new_tokens", "seconds"),
    ),
    Column("tokens_per_second", "tokens\n/s", "{:,.1f}", 1, "tokens/s", is_speed=True),
    *map(Column, ("decode_tokens_per_second", "prompt_tokens_per_second")),
    Column("speedup", "\nspeedup", "{:.2f}×", value=attrgetter("speedup"), is_speed=True),
    Column(
        "speedup_low",
        "95%\ninterval",
        _interval,
        4,
        value=attrgetter("low"),
        is_optional=True,
        is_speed=True,
        is_interval=True,
    ),
    Column("speedup_high", value=attrgetter("high")),
    Column("perplexity", "perp-\nlexity", "{:.2f}", 7, "perplexity", is_optional=True),
    Column(
        "perplexity_low",
        "95%\ninterval",
        _perplexity_interval,
        7,
        value=_perplexity_end(0),
        is_optional=True,
        is_interval=True,
    ),
    Column("perplexity_high", value=_perplexity_end(1)),
    Column(
        "joules_per_token",
        "joules\na token",
        _joules("joules_per_token"),
        6,
        "joules a token",
        is_optional=True,
    ),
    Column(
        "gross_joules_per_token",
        "with\nidle",
        _joules("gross_joules_per_token"),
        6,
        "joules a token with idle power",
        is_optional=True,
    ),
    Column("energy", in_csv=False),
    Column("phase_seconds", value=_phases, in_csv=False),
    *(Column(f"{phase}_seconds", value=_phase(phase), in_json=False) for phase in PHASES),
    _prediction("eq14", "by\nEq. 14"),
    _prediction("pass_costs", "by pass\ncosts"),
)


def shown_columns(rows: Sequence[MethodResult]) -> list[Column]:
    """Returns the columns to show in a table with these rows, in the order of `COLUMNS`. Optional
    columns are left out if no row has a value for them."""
    return [
        column
        for column in COLUMNS
        if column.title and (not column.is_optional or any(map(column.text, rows)))
    ]


def output_text(row: MethodResult) -> str:
    """The text of the cell that says how a method's output compares with the output of plain
    decoding."""
    if row.is_reference:
        return "reference"
    if not row.spec.lossless:
        return "lossy"
    return "sampled" if row.differences is None else outcome_text(row.differences)


def settings_text(row: MethodResult) -> str:
    """All settings of a method, as users write them behind its name: `k=5:policy=fixed`."""
    return ":".join(f"{name}={written_value(value)}" for name, value in row.spec.resolved.items())


def as_json(result: MethodResult) -> dict[str, Any]:
    """Returns a method's results as an object for the JSON output. `by_category` in it maps each
    category to the same numbers over the prompts of this category."""
    rows = {
        row.category: {column.key: column.of(row) for column in COLUMNS if column.in_json}
        for row in result.rows(by_category=True)
    }
    return {
        "type": "method",
        "method": result.spec.written,
        "settings": result.spec.resolved,
        "lossless": result.spec.lossless,
        **rows.pop(""),
        "differences": [difference.as_dict() for difference in result.differences or ()],
        "error": None if result.failure is None else str(result.failure),
        "by_category": rows,
    }


def csv_text(results: Sequence[MethodResult], *, by_category: bool = False) -> str:
    """Returns the results as CSV: one row for each method, over all prompts (its category cell is
    empty), and with `by_category` one more row for each category."""
    columns = [column for column in COLUMNS if column.in_csv]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["method", "category", "lossless", *(column.key for column in columns), "settings", "error"]
    )
    for result in results:
        error = None if result.failure is None else str(result.failure)
        for row in result.rows(by_category=by_category):
            values = [column.of(row) for column in columns]
            cells = [
                result.spec.written,
                row.category,
                result.spec.lossless,
                *values,
                settings_text(result),
                error,
            ]
            writer.writerow([_text_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return out.getvalue()


def _text_cell(text: str) -> str:
    """Returns text as a CSV file may hold it: on one line, without control characters, and with an
    apostrophe before each character that would make a spreadsheet compute a formula, as OWASP
    advises ("CSV Injection"). A semicolon begins a cell in some countries."""
    return _FORMULA.sub(r"\1'", one_line(text))
