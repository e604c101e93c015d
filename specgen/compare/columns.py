"""The columns of a comparison's results (acceptance rate, speedup and so on), each defined once. The terminal's table, the HTML
page, the CSV file and the JSON output are all made from this list."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from specgen.base.text import one_line
from specgen.base.types import PHASES
from specgen.compare.ranking import ranked
from specgen.compare.results import Figures, MethodResult, Prediction
from specgen.compare.verdict import OUTCOMES, outcome_text
from specgen.pair.figures import Summary

_FORMULA = re.compile(r"(^|;)(?=[\s␀-␡⇥↵�]*[=+\-@＝＋－＠])")


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a results table: a method with its measured numbers (`figures`), over all prompts or over the prompts of one
    category. `category` is empty in the row over all prompts."""

    result: MethodResult
    figures: Figures
    category: str = ""

    @property
    def name(self) -> str:
        return self.category or self.result.spec.written

    @property
    def prediction(self) -> Prediction:
        """The method's predicted speedups over all prompts; empty in the row of a category or without predictions."""
        return Prediction() if self.category or self.result.prediction is None else self.result.prediction


def entries(result: MethodResult, *, by_category: bool = False) -> list[Entry]:
    """Returns a method's rows: the row over all prompts (its numbers are empty if the method did not run), then with
    `by_category` one row for each category."""
    overall = Entry(result, result.overall or Figures(Summary(result.spec.name), 0))
    categories = result.by_category.items() if by_category else ()
    return [overall, *(Entry(result, figures, category) for category, figures in categories)]


def ranked_entries(results: Sequence[MethodResult], *, by_category: bool = False) -> list[Entry]:
    """Returns the rows of the methods that ran, in the order of `ranked`. With `by_category`, a method whose prompts have several
    categories also has a row for each category."""
    return [
        entry
        for result in ranked(results)
        if result.overall is not None
        for entry in entries(result, by_category=by_category and len(result.by_category) > 1)
    ]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a comparison's results. `key` is its name in JSON and CSV; `value` reads its value from an `Entry` (a row).

    Tables show only the columns with a `title`, which is two lines long. `form` makes a cell's text: it is a format string for
    the value, or a function from the row to the text. A narrow terminal drops the columns with the highest `priority` first. The
    HTML page shows only columns with a `label`, which is written after the value where there is no room for titles; the speedup
    and its confidence interval have cells of their own on that page.
    """

    key: str
    value: Callable[[Any], Any]
    title: str = ""
    form: str | Callable[[Any], str] = "{}"
    priority: int = 0
    label: str = ""
    is_optional: bool = field(default=False, kw_only=True)  # shown only if at least one row has a value
    is_speed: bool = field(default=False, kw_only=True)  # at the right end of the terminal's table, bold for the best method
    is_interval: bool = field(default=False, kw_only=True)  # dim and left-aligned
    in_json: bool = field(default=True, kw_only=True)
    in_csv: bool = field(default=True, kw_only=True)

    def text(self, entry: Any) -> str:
        """The text of this column's cell in the row `entry`; empty if the value is None."""
        value = self.value(entry)
        return "" if value is None else self.form.format(value) if isinstance(self.form, str) else self.form(entry)


def draft_length(mean: float | None, *, branches: bool) -> str:
    """The mean number of drafted tokens per draft as text; empty if `mean` is None. With `branches` (drafts are trees or several
    chains) these tokens are called nodes, because there are more of them than tokens on the longest path."""
    return "" if mean is None else f"{mean:.0f} nodes" if branches else f"{mean:.1f}"


def _draft_length(entry: Entry) -> str:
    return draft_length(entry.figures.summary.mean_draft_length, branches=entry.figures.branches)


def _interval(entry: Entry) -> str:
    return f"{entry.figures.low:.2f}–{entry.figures.high:.2f}"


def _outcome(outcome: str) -> Callable[[Entry], int | None]:
    return lambda entry: entry.figures.outcomes.get(outcome)


def _phase(phase: str) -> Callable[[Entry], float | None]:
    return lambda entry: (_phases(entry) or {}).get(phase) if entry.figures.prompts else None


def _phases(entry: Entry) -> dict[str, float] | None:
    """The method's seconds by phase (`types.PHASES`). None for transformers' own methods, which do not report phases."""
    return None if entry.figures.summary.unsplit_seconds else dict(entry.figures.summary.phase_seconds)


def _figure(name: str) -> Callable[[Entry], Any]:
    return attrgetter(f"figures.{name}")


def _summary(name: str) -> Callable[[Entry], Any]:
    return attrgetter(f"figures.summary.{name}")


COLUMNS = (
    Column("prompts", _figure("prompts")),
    *(Column(outcome, _outcome(outcome)) for outcome in OUTCOMES),
    Column("acceptance_rate", _summary("acceptance_rate"), "accep-\ntance", "{:.0%}", 2, "accepted"),
    Column("draft_share", _summary("draft_share"), "draft\nshare", "{:.0%}", 10),
    Column("harmonic_mean", _summary("harmonic_mean"), "\nHM", "{:.2f}", 11),
    Column("block_efficiency", _summary("block_efficiency"), "tokens\na pass", "{:.2f}", 9, "a pass"),
    Column("mean_draft_length", _summary("mean_draft_length"), "draft\nlength", _draft_length, 8, "drafted"),
    Column("mean_accepted_run", _summary("mean_accepted_run"), "accepted per\nrejection", "{:.1f}", 13, "accepted per rejection"),
    Column("target_passes", _summary("target_passes"), "target\npasses", "{:,}", 12),
    Column("ties", _summary("ties"), in_csv=False),
    Column("rounds", _summary("rounds")),
    Column("drafted", _summary("drafted")),
    Column("accepted", _summary("accepted")),
    Column("new_tokens", _summary("new_tokens")),
    Column("seconds", _summary("seconds")),
    Column("tokens_per_second", _summary("tokens_per_second"), "tokens\n/s", "{:,.1f}", 1, "tokens/s", is_speed=True),
    Column("speedup", _figure("speedup"), "\nspeedup", "{:.2f}×", is_speed=True),
    Column("speedup_low", _figure("low"), "95%\ninterval", _interval, 4, is_speed=True, is_interval=True),
    Column("speedup_high", _figure("high")),
    Column("perplexity", _summary("perplexity"), "perp-\nlexity", "{:.2f}", 7, "perplexity", is_optional=True),
    Column("joules_per_token", _summary("joules_per_token"), "joules\na token", "{:.3g}", 6, "joules a token", is_optional=True),
    Column(
        "gross_joules_per_token",
        _summary("gross_joules_per_token"),
        "with\nidle",
        "{:.3g}",
        6,
        "joules a token with idle power",
        is_optional=True,
    ),
    Column("energy", _summary("energy"), in_csv=False),
    Column("phase_seconds", _phases, in_csv=False),
    *(Column(f"{phase}_seconds", _phase(phase), in_json=False) for phase in PHASES),
    *(
        Column(
            key, attrgetter(path), title, "{:.2f}×", 3, title.replace("\n", " "), in_json=False, is_optional=True, is_speed=True
        )
        for key, path, title in (
            ("predicted_eq14", "prediction.formula", "by\nEq. 14"),
            ("predicted_pass_costs", "prediction.pass_costs", "by pass\ncosts"),
        )
    ),
)


def shown_columns(lines: Iterable[Entry]) -> list[Column]:
    """Returns the columns to show in a table with the rows `lines`, in the order of `COLUMNS`. Optional columns are left out if
    no row has a value for them."""
    lines = list(lines)
    return [column for column in COLUMNS if column.title and (not column.is_optional or any(map(column.text, lines)))]


def output_text(entry: Entry) -> str:
    """The text of the cell that says how a method's output compares with the output of plain decoding."""
    if entry.result.is_reference:
        return "reference"
    if not entry.result.spec.lossless:
        return "lossy"
    return "sampled" if entry.figures.differences is None else outcome_text(entry.figures.differences)


def as_json(result: MethodResult) -> dict[str, Any]:
    """Returns a method's results as an object for the JSON output. `by_category` in it maps each category to the same numbers
    over the prompts of this category."""
    overall, *categories = entries(result, by_category=True)
    return {
        "type": "method",
        "method": result.spec.written,
        "lossless": result.spec.lossless,
        **_json_figures(overall),
        "differences": [difference.as_dict() for difference in result.differences],
        "error": None if result.failure is None else str(result.failure),
        "by_category": {entry.category: _json_figures(entry) for entry in categories},
    }


def _json_figures(entry: Entry) -> dict[str, Any]:
    return {column.key: column.value(entry) for column in COLUMNS if column.in_json}


def csv_text(results: Sequence[MethodResult], *, by_category: bool = False) -> str:
    """Returns the results as CSV: one row for each method, over all prompts (its category cell is empty), and with `by_category`
    one more row for each category."""
    columns = [column for column in COLUMNS if column.in_csv]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "category", "lossless", *(column.key for column in columns), "error"])
    for result in results:
        error = None if result.failure is None else str(result.failure)
        for entry in entries(result, by_category=by_category):
            values = [column.value(entry) for column in columns]
            row = [result.spec.written, entry.category, result.spec.lossless, *values, error]
            writer.writerow([_text_cell(value) if isinstance(value, str) else value for value in row])
    return out.getvalue()


def _text_cell(text: str) -> str:
    """Returns text as a CSV file may hold it: on one line, without control characters, and with an apostrophe before each
    character that would make a spreadsheet compute a formula, as OWASP advises ("CSV Injection"). A semicolon begins a cell in
    some countries."""
    return _FORMULA.sub(r"\1'", one_line(text))
