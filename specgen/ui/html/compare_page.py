"""`compare --html`: a comparison as one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specgen.compare.predictions import Prediction
from specgen.compare.results import Figures, Results, Row
from specgen.traces.trace_reader import TracedRun
from specgen.ui.html.charts import time_shares
from specgen.ui.html.methods_table import Column, Line, Scale, number
from specgen.ui.html.page import render
from specgen.ui.html.token_view import run_view
from specgen.ui.sanitize import draft_length
from specgen.ui.terminal.comparison import Setting, View, headline, remarks, sentences
from specgen.ui.terminal.comparison_table import best, failed, hint_of, ordered, output_word, prediction_cells

PROMPT_SHOWN = 600  # characters


@dataclass(frozen=True, slots=True)
class About:
    """How the comparison was made: the machine as pairs of a name and a description, versions, and the command."""

    machine: Sequence[tuple[str, str]]
    versions: str
    made_with: str


def page(
    results: Results, rows: Sequence[Row], setting: Setting, examples: Mapping[str, TracedRun], about: About, view: View
) -> Iterator[str]:
    """The page in pieces. `examples` are runs of the same prompt, by method."""
    measured = [(row, row.overall) for row in ordered(rows) if row.overall is not None]
    runs = [(row.spec.written, examples[row.spec.written]) for row, _ in measured if row.spec.written in examples]
    runs = [(name, run) for name, run in runs if run.rounds]
    prompts = {prompt.index: prompt for prompt in results.prompts}
    return render(
        "compare_page.html.j2",
        headline=verdict_of(results, rows),
        subtitle=headline(results, rows, setting),
        has_lossy=any(not row.spec.lossless for row, _ in measured),
        table=_table(rows, view),
        sentences=[sentence.plain for sentence in [*sentences(results, rows), *remarks(rows, view)]],
        times=[
            (row.spec.written, time_shares(overall.summary.phase_seconds))
            for row, overall in measured
            if not overall.summary.unsplit_seconds
        ],
        prompt=prompts[runs[0][1].start["prompt_index"]] if runs else None,
        prompt_shown=PROMPT_SHOWN,
        examples=[(name, run_view(run, run.fold(), f"gone-{index}")) for index, (name, run) in enumerate(runs)],
        machine=about.machine,
        versions=about.versions,
        made_with=about.made_with,
        wide=False,
    )


def verdict_of(results: Results, rows: Sequence[Row]) -> str:
    """The result as a headline."""
    broken = [row for row in rows if row.is_broken]
    if broken:
        return f"{broken[0].spec.written} does not give the target's own output"
    top = best(rows)
    if top is None or top.overall is None or top.overall.speedup is None:
        return "Nothing to compare with plain decoding"
    speedup, low = top.overall.speedup, top.overall.low
    if speedup <= 1 or (low is not None and low <= 1):
        return f"No method is clearly faster than plain decoding; the best, {top.spec.written}, is {speedup:.2f} times as fast"
    what = "the target's text" if results.greedy else "text of the target's distribution"
    return f"{top.spec.written} gives {what} {speedup:.2f} times as fast"


_COLUMNS = (
    Column("acceptance_rate", "accept-\nance", "accepted", lambda row: number(row.summary.acceptance_rate, ".0%")),
    Column("block_efficiency", "tokens\na pass", "a pass", lambda row: number(row.summary.block_efficiency, ".2f")),
    Column(
        "mean_draft_length",
        "draft\nlength",
        "drafted",
        lambda row: draft_length(row.summary.mean_draft_length, branches=row.branches),
    ),
    Column("tokens_per_second", "tokens\n/s", "tokens/s", lambda row: number(row.summary.tokens_per_second, ".1f")),
    Column("perplexity", "perp-\nlexity", "perplexity", lambda row: number(row.perplexity, ".2f"), is_optional=True),
    Column("joules", "joules\na token", "joules a token", lambda row: number(row.joules_per_token, ".3g"), is_optional=True),
)


def _predicted(rows: Sequence[Row], predictions: Mapping[str, Prediction]) -> list[Column]:
    """The columns of predicted speedups: by EESD's formula, and by adding up the measured costs of all passes."""
    by_formula, by_passes = prediction_cells(rows, predictions)
    return [
        Column("predicted_eq14", "by\nEq. 14", "by Eq. 14", by_formula),
        Column("predicted_pass_costs", "by pass\ncosts", "by pass costs", by_passes),
    ]


def _table(rows: Sequence[Row], view: View) -> dict[str, Any]:
    """The methods in order, each with its categories where they are asked for, and last those that could not run."""
    top = best(rows)
    alone, together = failed(rows)
    lines = []
    for row in ordered(rows):
        if row.overall is not None:
            kind = "m ar" if row.is_baseline else "m lossy" if not row.spec.lossless else "m best" if row is top else "m"
            lines.append(_line(kind, row.spec.written, row, row.overall))
            if view.by_category and len(row.by_category) > 1:
                kind = f"{kind.removesuffix(' best')} cat"
                lines += [_line(kind, name, row, part, is_category=True) for name, part in row.by_category.items()]
        elif row in alone:
            why = "not measured" if row.failure is None else f"not run: {row.failure.message}. {hint_of(row.failure, rows)}"
            lines.append(Line("off", row.spec.written, why=why.rstrip(". ")))
    lines += [Line("off", "", why=f"{', '.join(names)} not run: {why}") for names, why in together]
    measured = [line for line in lines if not line.why]
    columns = [column for column in _COLUMNS if not column.is_optional or any(column.text(line.entry) for line in measured)]
    columns += _predicted(rows, view.predictions) if view.predictions else []
    speeds = [speed for line in measured for speed in (line.speed, line.low, line.high)]
    return {"lines": lines, "columns": columns, "scale": Scale.over(speeds, "×", reference=1.0)}


def _line(kind: str, name: str, row: Row, figures: Figures, *, is_category: bool = False) -> Line:
    """The line of a method, or of its figures in one category."""
    speedup = figures.speedup or 0.0
    low, high = (speedup if end is None else end for end in (figures.low, figures.high))
    output = output_word(row, figures, is_category=is_category)
    return Line(kind, name, entry=figures, speed=speedup, low=low, high=high, output=output)
