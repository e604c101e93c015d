"""`compare --html`: a comparison as one page to send to a colleague."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specgen.compare.columns import Column, Entry, entries, output_text, shown_columns
from specgen.compare.prompts import Prompt
from specgen.compare.ranking import best, not_run, ranked
from specgen.compare.results import MethodResult, Results
from specgen.traces.statistics import TraceStatistics
from specgen.traces.trace_reader import TracedRun
from specgen.ui.html.charts import Scale, time_bar
from specgen.ui.html.page import code, document, facts, text
from specgen.ui.html.token_view import answer, rounds_list
from specgen.ui.terminal.comparison import Conditions, View, headline, remarks, sentences

PROMPT_SHOWN = 600  # characters
_PLAIN = View()


@dataclass(frozen=True, slots=True)
class About:
    """What was measured on: pairs of a name and what it is, and the command that made the page."""

    machine: Sequence[tuple[str, str]]
    versions: str
    made_with: str


def page(
    results: Results,
    made: Sequence[MethodResult],
    conditions: Conditions,
    examples: Mapping[str, TracedRun],
    about: About,
    view: View = _PLAIN,
) -> Iterator[str]:
    """The page in pieces: the verdict, the table with its intervals, the same prompt by each method, machine and settings."""
    verdict = verdict_of(results, made)
    foot = f"{text(about.versions)}. Intervals: bootstrap over prompts. Made with: {code(about.made_with)}"
    yield from document(
        f"specgen: {verdict}", verdict, headline(results, made, conditions), _body(results, made, examples, about, view), foot
    )


def verdict_of(results: Results, made: Sequence[MethodResult]) -> str:
    """The result as a headline."""
    broken = [result for result in made if result.broken]
    if broken:
        return f"{broken[0].spec.written} does not give the target's own output"
    top = best(made)
    if top is None or top.overall is None or top.speedup is None:
        return "Nothing to compare with plain decoding"
    speedup, low = top.speedup, top.overall.low
    if speedup <= 1 or (low is not None and low <= 1):
        return f"Nothing here is clearly faster than plain decoding; {top.spec.written} comes to {speedup:.2f} times"
    what = "the target's text" if results.greedy else "text of the target's distribution"
    return f"{top.spec.written} gives {what} {speedup:.2f} times as fast"


def _body(
    results: Results, made: Sequence[MethodResult], examples: Mapping[str, TracedRun], about: About, view: View
) -> Iterator[str]:
    yield "<h2>Which method is fastest?</h2>\n"
    hollow = " Hollow: another text than the target's, by design, so not ranked."
    lossy = any(result.overall is not None and not result.spec.lossless for result in made)
    against = f"Against plain decoding ({code('ar')}), with 95% intervals over prompts."
    yield f'<p class="note">{against}{hollow if lossy else ""}</p>\n'
    yield from _table(made, view)
    for sentence in [*sentences(results, made), *remarks(made, view)]:
        yield f'<p class="note">{text(sentence.plain)}</p>\n'
    yield from _where_time_goes(made)
    yield from _examples(results, made, examples)
    yield "<h2>What it was measured on</h2>\n"
    for name, what in about.machine:
        yield f'<p class="note">{text(name)}: {text(what)}</p>\n'


def _table(made: Sequence[MethodResult], view: View) -> Iterator[str]:
    shown = [
        entry
        for result in ranked(made)
        if result.overall is not None
        for entry in entries(result, by_category=view.by_category and len(result.by_category) > 1)
    ]
    edges = [(entry.figures.speedup, entry.figures.low, entry.figures.high) for entry in shown]
    scale = Scale.over([value for values in edges for value in values if value is not None], "×", start=1.0)
    columns = [column for column in shown_columns(shown) if column.label]
    yield (
        '<table class="methods"><thead><tr><th scope="col">method</th><th scope="col">output</th>'
        f'<th scope="col" class="plot">{scale.axis()}</th><th scope="col" class="x">speedup</th>'
        '<th scope="col" class="ci">95% interval</th>'
        + "".join(f'<th scope="col" class="n {column.key}">{_heading(column)}</th>' for column in columns)
    )
    yield "</tr></thead><tbody>"
    top = best(made)
    for entry in shown:
        result = entry.result
        kind = "m ar" if result.is_reference else "m lossy" if not result.spec.lossless else "m"
        kind += " cat" if entry.category else " best" if result is top else ""
        yield _row(entry, scale, columns, kind)
    for names, reason in not_run(made):
        why = f'<td class="why" colspan="{4 + len(columns)}">{text(reason)}</td>'
        yield f'<tr class="off"><th scope="row">{text(", ".join(names))}</th>{why}</tr>'
    yield "</tbody></table>\n"


def _heading(column: Column) -> str:
    return column.title.replace("\n", "<br>")


def _row(entry: Entry, scale: Scale, columns: Sequence[Column], kind: str) -> str:
    figures = entry.figures
    speedup = figures.speedup or 0.0
    low = speedup if figures.low is None else figures.low
    high = speedup if figures.high is None else figures.high
    said = f"{speedup:.2f} times" + (f", 95% interval {low:.2f} to {high:.2f}" if figures.low is not None else "")
    return (
        f'<tr class="{kind}"><th scope="row">{text(entry.name)}</th><td class="out">{text(output_text(entry))}</td>'
        f'<td class="plot">{scale.dot(speedup, low, high, said, reference=1.0)}</td><td class="x">{speedup:.2f}×</td>'
        f'<td class="ci">{"" if figures.low is None else f"{low:.2f}–{high:.2f}"}</td>'
        + "".join(f'<td class="n {column.key}" data-l="{column.label}">{column.text(entry)}</td>' for column in columns)
        + "</tr>"
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _where_time_goes(made: Sequence[MethodResult]) -> Iterator[str]:
    """A bar for each method (EESD, Table 8); transformers reports no phases."""
    yield "<h2>Where the time goes</h2>\n"
    for result in ranked(made):
        if result.overall is not None and not result.overall.summary.unsplit_seconds:
            yield f"<h3>{code(result.spec.written)}</h3>\n{time_bar(result.overall.summary.phase_seconds)}"


def _examples(results: Results, made: Sequence[MethodResult], examples: Mapping[str, TracedRun]) -> Iterator[str]:
    """The first prompt's answer by each method that drafts."""
    measured = [result.spec.written for result in ranked(made) if result.overall is not None and result.spec.written in examples]
    shown = [(written, examples[written]) for written in measured if examples[written].rounds]
    if not shown:
        return
    prompt = next(prompt for prompt in results.prompts if prompt.index == shown[0][1].start["prompt_index"])
    yield f"<h2>One answer, by each method</h2>\n{_prompt(prompt)}"
    yield '<div class="runs">\n'
    for position, (written, run) in enumerate(shown):
        yield f"<article>\n<h3>{code(written)}</h3>\n"
        yield from _example(run, f"gone-{position}")
        yield "</article>\n"
    yield "</div>\n"


def _prompt(prompt: Prompt) -> str:
    shown = prompt.text if len(prompt.text) <= PROMPT_SHOWN else prompt.text[: PROMPT_SHOWN - 2] + " …"
    return f'<p class="note">{text(prompt.label)}: {code(shown)}</p>\n'


def _example(run: TracedRun, switch: str) -> Iterator[str]:
    one = TraceStatistics(run.method)
    one.add(run)
    summary = one.summary
    entries = [(f"{summary.new_tokens:,}", "tokens"), (_number(summary.tokens_per_second, ".1f"), "tokens a second")]
    if summary.acceptance_rate is not None:
        entries.append((f"{summary.acceptance_rate:.0%}", "of the draft accepted"))
    entries.append((_number(summary.block_efficiency, ".2f"), "tokens a target pass"))
    yield facts(entries)
    yield from answer(run, switch)
    yield from rounds_list(run)
