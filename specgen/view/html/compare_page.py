"""The page of `specgen compare --html`: one HTML file with the results of a comparison of decoding methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specgen.compare.columns import output_text, ranked_rows, shown_columns
from specgen.compare.results import MethodResult, best, not_run, ranked, too_few_prompts
from specgen.view.comparison import Report, headline, sentences
from specgen.view.html.charts import time_bar
from specgen.view.html.page import Line, Scale, render
from specgen.view.html.run_view import run_view


def page(report: Report, machine: Sequence[tuple[str, str]], versions: str, made_with: str) -> Iterator[str]:
    """Yields the HTML of the page in pieces.

    `machine` describes the computer as (heading, text) pairs. `versions` names the software versions. `made_with` is the command
    that made the page.
    """
    results, made = report.results, report.made
    measured = [(result.name, result.summary) for result in ranked(made) if result.prompts]
    runs = [(name, results.examples[name]) for name, _ in measured if name in results.examples and results.examples[name].rounds]
    prompts = {prompt.index: prompt for prompt in results.config.prompts}
    return render(
        "compare_page.html.j2",
        headline=verdict_of(report),
        subtitle=headline(report),
        has_lossy=report.measured_lossy,
        table=_table(report),
        sentences=[sentence.plain for sentence in sentences(report)],
        times=[(name, time_bar(summary.phase_seconds)) for name, summary in measured if not summary.unsplit_seconds],
        prompt=prompts[runs[0][1].start["prompt_index"]] if runs else None,
        examples=[(name, run_view(run, run.fold(), f"gone-{index}")) for index, (name, run) in enumerate(runs)],
        machine=machine,
        versions=versions,
        made_with=made_with,
        wide=False,
    )


def verdict_of(report: Report) -> str:
    """Returns the page's headline: which method is fastest, or that none is faster than plain decoding.

    If a method that should be lossless gave other output than the target, the headline says so instead.
    """
    broken = [result for result in report.made if result.broken]
    if broken:
        return f"{broken[0].spec.written} does not give the target's own output"
    top = best(report.made)
    if top is None or top.speedup is None:
        return "Nothing to compare with plain decoding"
    speedup, low = top.speedup, top.low
    if speedup <= 1 or (low is not None and low <= 1):
        return f"No method is clearly faster than plain decoding; the best, {top.spec.written}, is {speedup:.2f} times as fast"
    what = "the target's text" if report.results.config.sampling.greedy else "text of the target's distribution"
    few = too_few_prompts(top).removesuffix(".")
    return f"{top.spec.written} gives {what} {speedup:.2f} times as fast" + (f". {few}" if few else "")


def _table(report: Report) -> dict[str, Any]:
    """Returns the values of the macro `methods_table`: a line per method in order of rank.

    Where requested, a line for each category of prompts follows its method. Methods that could not run come last, with the
    reason.
    """
    shown, top = ranked_rows(report.made, by_category=report.by_category), best(report.made)
    lines = [_line(row, is_best=row is top) for row in shown]
    speeds = [speed for line in lines for speed in (line.speed, line.low, line.high)]
    lines += [Line("off", ", ".join(names), why=reason) for names, reason in not_run(report.made)]
    columns = [column for column in shown_columns(shown) if column.label]
    return {"lines": lines, "columns": columns, "scale": Scale(speeds, "×", reference=1.0)}


def _line(row: MethodResult, *, is_best: bool) -> Line:
    """Returns the table line of a method: its results over all prompts, or over the prompts of one category."""
    kind = "m ar" if row.is_reference else "m lossy" if not row.spec.lossless else "m"
    kind += " cat" if row.category else " best" if is_best else ""
    speedup = row.speedup or 0.0
    low, high = (speedup if end is None else end for end in (row.low, row.high))
    return Line(kind, row.name, entry=row, speed=speedup, low=low, high=high, output=output_text(row))
