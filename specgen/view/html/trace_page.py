"""The page of `specgen inspect --html`: one recorded generation, or those of several methods side by side, in one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specgen.base.settings import written_value
from specgen.traces.statistics import TraceStatistics
from specgen.view.html.page import Line, Scale, render
from specgen.view.html.run_view import run_view
from specgen.view.html.trace_charts import figures
from specgen.view.theme import counted
from specgen.view.trace_report import COLUMNS, ENDED, LOSSY, RecordedMethod, best, conditions

MOST_SHOWN = 12  # runs whose text and charts are on the page; the table has all


def page(shown: Sequence[RecordedMethod], made_with: str) -> Iterator[str]:
    """Yields the HTML of the page in pieces. `shown` has the recorded methods, `made_with` the command that made the page."""
    versions = shown[0].run.start["versions"]
    return render(
        "trace_page.html.j2",
        headline=verdict(shown),
        subtitle=conditions(shown[0].run.start, sum(entry.figures.runs for entry in shown)),
        table=_table(shown) if len(shown) > 1 else None,
        has_lossy=not all(entry.lossless for entry in shown),
        lossy=LOSSY,
        runs=(_run(entry, f"gone-{index}", is_only=len(shown) == 1) for index, entry in enumerate(shown[:MOST_SHOWN])),
        hidden_runs=counted(len(shown) - MOST_SHOWN, "more run") if len(shown) > MOST_SHOWN else "",
        versions=", ".join(f"{name} {versions[name]}" for name in ("specgen", "torch", "transformers") if name in versions),
        made_with=made_with,
        wide=len(shown) > 1,
    )


def verdict(shown: Sequence[RecordedMethod]) -> str:
    """Returns the page's headline: the acceptance and efficiency of a single method, or the fastest of several methods."""
    if len(shown) == 1:
        summary = shown[0].figures.summary
        if summary.acceptance_rate is None:
            return f"{shown[0].label}: nothing was drafted, {shown[0].speed:.1f} tokens per second"
        accepted = f"{summary.acceptance_rate:.0%} of drafted tokens accepted"
        return f"{shown[0].label}: {accepted}, {summary.block_efficiency or 0:.2f} tokens per target pass"
    top = best(shown)
    prompts = {tuple(entry.run.start["prompt_ids"]) for entry in shown}
    if top is None or len(prompts) > 1:  # speeds on different prompts cannot be compared
        return f"{len(shown)} recordings side by side"
    what = "the fastest" if all(entry.lossless for entry in shown) else "the fastest lossless method"
    return f"{top.label} was {what}: {top.speed:.1f} tokens per second"


def _run(entry: RecordedMethod, name: str, *, is_only: bool) -> dict[str, Any]:
    """Returns one generation for the page: its main numbers, text and charts.

    `name` is an HTML id, unique on the page. `is_only` says that the page shows no other method.
    """
    run, own = entry.run, entry.figures
    if own.runs > 1:  # the statistics of the run shown alone
        own = TraceStatistics(run.method)
        own.add(run)
    settings = (
        f"{name} {written_value(value)}" + (f" ({entry.varying[name]} over all runs)" if name in entry.varying else "")
        for name, value in run.start["settings"].items()
    )
    return {
        **run_view(run, own.summary, name),
        "title": "How one answer was generated" if is_only else entry.label,
        "method": run.method,
        "settings": ", ".join(settings),
        "prompt_tokens": counted(len(run.start["prompt_ids"]), "token"),
        "end": ENDED[run.finish_reason] if run.finish_reason else "",
        "source": entry.source,
        "line": f"{run.first_line:,}",
        "is_lossy": not entry.lossless,
        "notes": run.notes,
        "figures": figures(run, own, entry.figures),
    }


def _table(shown: Sequence[RecordedMethod]) -> dict[str, Any]:
    """Returns the values of the macro `methods_table`: per method, the tokens per second over all its recorded generations.

    The interval of a method reaches from its slowest to its fastest generation.
    """
    top, lines = best(shown), []
    for entry in shown:
        runs = entry.figures
        kind = "m lossy" if not entry.lossless else "m best" if entry is top else "m ar" if runs.summary.method == "ar" else "m"
        low, high = min(runs.speeds, default=0.0), max(runs.speeds, default=0.0)
        lines.append(Line(kind, entry.label, entry=runs, speed=entry.speed, low=low, high=high))
    return {"lines": lines, "columns": COLUMNS, "scale": Scale(speed for line in lines for speed in (line.low, line.high))}
