"""`compare --html`: a comparison as one page to send to a colleague."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specgen.compare.predictions import Prediction
from specgen.compare.prompts import Prompt
from specgen.compare.results import Figures, Results, Row
from specgen.traces.statistics import TraceStatistics
from specgen.traces.trace_reader import TracedRun
from specgen.ui.html.charts import Scale, time_bar
from specgen.ui.html.page import code, document, facts, text
from specgen.ui.html.token_view import answer, rounds_list
from specgen.ui.sanitize import draft_length
from specgen.ui.terminal.comparison import Setting, View, headline, remarks, sentences
from specgen.ui.terminal.comparison_table import best, failed, hint_of, ordered, output_word, prediction_cells

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
    rows: Sequence[Row],
    setting: Setting,
    examples: Mapping[str, TracedRun],
    about: About,
    view: View = _PLAIN,
) -> Iterator[str]:
    """The page in pieces: the verdict, the table with its intervals, the same prompt by each method, machine and settings."""
    verdict = verdict_of(results, rows)
    foot = f"{text(about.versions)}. Intervals: bootstrap over prompts. Made with: {code(about.made_with)}"
    yield from document(
        f"specgen: {verdict}", verdict, headline(results, rows, setting), _body(results, rows, examples, about, view), foot
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
        return f"Nothing here is clearly faster than plain decoding; {top.spec.written} comes to {speedup:.2f} times"
    what = "the target's text" if results.greedy else "text of the target's distribution"
    return f"{top.spec.written} gives {what} {speedup:.2f} times as fast"


def _body(results: Results, rows: Sequence[Row], examples: Mapping[str, TracedRun], about: About, view: View) -> Iterator[str]:
    yield "<h2>Which method is fastest?</h2>\n"
    hollow = " Hollow: another text than the target's, by design, so not ranked."
    lossy = any(row.overall is not None and not row.spec.lossless for row in rows)
    against = f"Against plain decoding ({code('ar')}), with 95% intervals over prompts."
    yield f'<p class="note">{against}{hollow if lossy else ""}</p>\n'
    yield from _table(rows, view)
    for sentence in [*sentences(results, rows), *remarks(rows, view)]:
        yield f'<p class="note">{text(sentence.plain)}</p>\n'
    yield from _where_time_goes(rows)
    yield from _examples(results, rows, examples)
    yield "<h2>What it was measured on</h2>\n"
    for name, what in about.machine:
        yield f'<p class="note">{text(name)}: {text(what)}</p>\n'


def _table(rows: Sequence[Row], view: View) -> Iterator[str]:
    measured = [row.overall for row in rows if row.overall is not None]
    if view.by_category:
        measured += [figures for row in rows for figures in row.by_category.values()]
    values = [value for figures in measured for value in (figures.speedup, figures.low, figures.high) if value is not None]
    scale = Scale.over(values, "×", start=1.0)
    heads = [column for column in _COLUMNS if not column.optional or any(column.value(figures) for figures in measured)]
    if view.predictions:
        heads += _predicted(rows, view.predictions)
    yield (
        '<table class="methods"><thead><tr><th scope="col">method</th><th scope="col">output</th>'
        f'<th scope="col" class="plot">{scale.axis()}</th><th scope="col" class="x">speedup</th>'
        '<th scope="col" class="ci">95% interval</th>'
        + "".join(f'<th scope="col" class="n {head.kind}">{head.title}</th>' for head in heads)
    )
    yield "</tr></thead><tbody>"
    top = best(rows)
    alone, together = failed(rows)
    for row in ordered(rows):
        if row.overall is not None:
            kind = "m ar" if row.is_baseline else "m lossy" if not row.spec.lossless else "m best" if row is top else "m"
            yield _row(row.spec.written, row, row.overall, scale, heads, kind)
            if view.by_category and len(row.by_category) > 1:
                for name, figures in row.by_category.items():
                    yield _row(name, row, figures, scale, heads, f"{kind.removesuffix(' best')} cat", is_category=True)
        elif row in alone:
            why = "not measured" if row.failure is None else f"not run: {row.failure.message}. {hint_of(row.failure, rows)}"
            name = f'<th scope="row">{text(row.spec.written)}</th>'
            yield f'<tr class="off">{name}<td class="why" colspan="{4 + len(heads)}">{text(why.rstrip(". "))}</td></tr>'
    for names, why in together:
        told = f"{', '.join(names)} not run: {why}"
        yield f'<tr class="off"><td class="why" colspan="{5 + len(heads)}">{text(told)}</td></tr>'
    yield "</tbody></table>\n"


@dataclass(frozen=True, slots=True)
class _Column:
    """`kind` is its class, `meaning` what follows the figure where there is no room for heads."""

    kind: str
    title: str
    meaning: str
    value: Callable[[Figures], str]
    optional: bool = False  # only where some row has it


def _predicted(rows: Sequence[Row], predictions: Mapping[str, Prediction]) -> list[_Column]:
    by_formula, by_passes = prediction_cells(rows, predictions)
    return [
        _Column("eq14", "by<br>Eq. 14", "by Eq. 14", by_formula),
        _Column("costs", "by pass<br>costs", "by pass costs", by_passes),
    ]


def _row(
    name: str, row: Row, figures: Figures, scale: Scale, columns: Sequence[_Column], kind: str, *, is_category: bool = False
) -> str:
    speedup = figures.speedup or 0.0
    low = speedup if figures.low is None else figures.low
    high = speedup if figures.high is None else figures.high
    said = f"{speedup:.2f} times" + (f", 95% interval {low:.2f} to {high:.2f}" if figures.low is not None else "")
    return (
        f'<tr class="{kind}"><th scope="row">{text(name)}</th>'
        f'<td class="out">{text(output_word(row, figures, is_category=is_category))}</td>'
        f'<td class="plot">{scale.dot(speedup, low, high, said, reference=1.0)}</td><td class="x">{speedup:.2f}×</td>'
        f'<td class="ci">{"" if figures.low is None else f"{low:.2f}–{high:.2f}"}</td>'
        + "".join(f'<td class="n {column.kind}" data-l="{column.meaning}">{column.value(figures)}</td>' for column in columns)
        + "</tr>"
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


_COLUMNS = (
    _Column("rate", "accept-<br>ance", "accepted", lambda row: _number(row.summary.acceptance_rate, ".0%")),
    _Column("eff", "tokens<br>a pass", "a pass", lambda row: _number(row.summary.block_efficiency, ".2f")),
    _Column(
        "len",
        "draft<br>length",
        "drafted",
        lambda row: draft_length(row.summary.mean_draft_length, branches=row.branches),
    ),
    _Column("tps", "tokens<br>/s", "tokens/s", lambda row: _number(row.summary.tokens_per_second, ".1f")),
    _Column("ppl", "perp-<br>lexity", "perplexity", lambda row: _number(row.perplexity, ".2f"), optional=True),
    _Column("joules", "joules<br>a token", "joules a token", lambda row: _number(row.joules_per_token, ".3g"), optional=True),
)


def _where_time_goes(rows: Sequence[Row]) -> Iterator[str]:
    """A bar a method (EESD, Table 8); rivals tell no phases."""
    yield "<h2>Where the time goes</h2>\n"
    for row in ordered(rows):
        if row.overall is not None and not row.overall.summary.unsplit_seconds:
            yield f"<h3>{code(row.spec.written)}</h3>\n{time_bar(row.overall.summary.phase_seconds)}"


def _examples(results: Results, rows: Sequence[Row], examples: Mapping[str, TracedRun]) -> Iterator[str]:
    """The first prompt's answer by each method that drafts."""
    shown = [
        (row, examples[row.spec.written]) for row in ordered(rows) if row.spec.written in examples and row.overall is not None
    ]
    shown = [(row, run) for row, run in shown if run.rounds]
    if not shown:
        return
    prompt = next(prompt for prompt in results.prompts if prompt.index == shown[0][1].start["prompt_index"])
    yield f"<h2>One answer, by each method</h2>\n{_prompt(prompt)}"
    yield '<div class="runs">\n'
    for position, (row, run) in enumerate(shown):
        yield f"<article>\n<h3>{code(row.spec.written)}</h3>\n"
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
