"""The page of `specgen inspect --html`: one recorded generation, or those of several methods side by side, in one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specgen.base.settings import written_value
from specgen.traces.statistics import TraceStatistics, posteriors, setting
from specgen.traces.trace_reader import TracedRun
from specgen.view.html.bounds_charts import lengths_chart, ratios_chart, sorted_chart
from specgen.view.html.calibration_chart import calibration_chart
from specgen.view.html.entropy_chart import entropy_chart
from specgen.view.html.methods_table import Line, Scale
from specgen.view.html.page import render
from specgen.view.html.round_charts import posterior_chart, rounds_chart
from specgen.view.html.token_view import run_view
from specgen.view.recorded_methods import COLUMNS, ENDED, LOSSY, RecordedMethod, best, conditions, runs_until_rejection

MOST_SHOWN = 12  # runs whose text and charts are on the page; the table has all


def page(shown: Sequence[RecordedMethod], made_with: str) -> Iterator[str]:
    """Yields the HTML of the page in pieces. `shown` has the recorded methods, `made_with` the command that made the page."""
    versions = shown[0].run.start["versions"]
    return render(
        "trace_page.html.j2",
        headline=verdict(shown),
        subtitle=conditions(shown[0].run.start, sum(entry.statistics.runs for entry in shown)),
        table=_table(shown) if len(shown) > 1 else None,
        has_lossy=not all(entry.lossless for entry in shown),
        lossy=LOSSY,
        runs=(_run(entry, f"gone-{index}", is_only=len(shown) == 1) for index, entry in enumerate(shown[:MOST_SHOWN])),
        hidden_runs=max(0, len(shown) - MOST_SHOWN),
        versions=", ".join(f"{name} {versions[name]}" for name in ("specgen", "torch", "transformers") if name in versions),
        made_with=made_with,
        wide=len(shown) > 1,
    )


def verdict(shown: Sequence[RecordedMethod]) -> str:
    """Returns the page's headline: the acceptance and efficiency of a single method, or the fastest of several methods."""
    if len(shown) == 1:
        summary = shown[0].statistics.summary
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
    run, statistics, bounds = entry.run, entry.statistics, entry.statistics.bounds()
    if statistics.runs > 1:  # the statistics of the run shown alone
        statistics = TraceStatistics(run.method)
        statistics.add(run)
    settings = (
        f"{name} {written_value(value)}" + (f" ({entry.varying[name]} over all runs)" if name in entry.varying else "")
        for name, value in run.start["settings"].items()
    )
    rounds = [traced.round for traced in run.rounds]
    until_rejection = entry.statistics.runs_of_accepted() if statistics.summary.parallel else None
    texts = [text for traced in run.rounds if traced.round.draft.entropies for text in traced.draft_texts]
    return {
        **run_view(run, statistics.summary, name),
        "title": "How one answer was generated" if is_only else entry.label,
        "method": run.method,
        "settings": ", ".join(settings),
        "prompt_tokens": f"{len(run.start['prompt_ids']):,}",
        "end": ENDED[run.finish_reason] if run.finish_reason else "",
        "source": entry.source,
        "line": f"{run.first_line:,}",
        "is_lossy": not entry.lossless,
        "notes": run.notes,
        "rounds_chart": rounds_chart(rounds) if rounds and statistics.summary.drafted else None,
        "until_rejection": None if until_rejection is None else runs_until_rejection(until_rejection),
        "entropy_chart": entropy_chart(statistics, texts, stop_entropy(run)),
        "lengths_chart": lengths_chart(entry.statistics),
        "ratios_chart": ratios_chart(entry.statistics, bounds),
        "sorted_chart": sorted_chart(entry.statistics, bounds),
        "calibration_chart": calibration_chart(entry.statistics.calibration()),
        "posterior_chart": posterior_chart(posteriors(rounds)),
    }


def stop_entropy(run: TracedRun) -> float | None:
    """Returns the draft entropy H in nats above which svip stops drafting; None for other methods.

    The rule of svip is to stop where sqrt(c H) > threshold; c and threshold are settings of the method.
    """
    c, threshold = setting(run, "c"), setting(run, "threshold")
    return threshold**2 / c if c and threshold is not None else None


def _table(shown: Sequence[RecordedMethod]) -> dict[str, Any]:
    """Returns the values of the macro `methods_table`: per method, the tokens per second over all its recorded generations.

    The interval of a method reaches from its slowest to its fastest generation.
    """
    top, lines = best(shown), []
    for entry in shown:
        runs = entry.statistics
        kind = "m lossy" if not entry.lossless else "m best" if entry is top else "m ar" if runs.summary.method == "ar" else "m"
        low, high = min(runs.speeds, default=0.0), max(runs.speeds, default=0.0)
        lines.append(Line(kind, entry.label, entry=entry, speed=entry.speed, low=low, high=high))
    return {"lines": lines, "columns": COLUMNS, "scale": Scale.over(speed for line in lines for speed in (line.low, line.high))}
