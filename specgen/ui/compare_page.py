"""`compare --html`: a comparison as one page to send to a colleague."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specgen.bench.anatomy import Anatomy
from specgen.bench.figures import Figures, Results, Row
from specgen.bench.prompts import Prompt
from specgen.bench.trace_reader import TracedRun
from specgen.ui.charts import Scale, time_bar
from specgen.ui.comparison import Setting, headline, sentences
from specgen.ui.page import code, document, facts, text
from specgen.ui.page_tokens import answer, rounds_list
from specgen.ui.tables import best, draft_length, ordered, output_word

PROMPT_SHOWN = 600  # characters


@dataclass(frozen=True, slots=True)
class About:
    """What was measured on: pairs of a name and what it is, and the command that made the page."""

    machine: Sequence[tuple[str, str]]
    versions: str
    made_with: str


def page(
    results: Results, rows: Sequence[Row], setting: Setting, examples: Mapping[str, TracedRun], about: About
) -> Iterator[str]:
    """The page in pieces: the verdict, the table with its intervals, the same prompt by each method, machine and settings."""
    verdict = verdict_of(results, rows)
    foot = f"{text(about.versions)}. Intervals: bootstrap over prompts. Made with: {code(about.made_with)}"
    yield from document(
        f"specgen: {verdict}", verdict, headline(results, rows, setting), _body(results, rows, examples, about), foot
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


def _body(results: Results, rows: Sequence[Row], examples: Mapping[str, TracedRun], about: About) -> Iterator[str]:
    yield "<h2>Which method is fastest?</h2>\n"
    hollow = " Hollow: another text than the target's, by design, so not ranked."
    lossy = any(row.overall is not None and not row.spec.lossless for row in rows)
    against = f"Against plain decoding ({code('ar')}), with 95% intervals over prompts."
    yield f'<p class="note">{against}{hollow if lossy else ""}</p>\n'
    yield from _table(rows)
    for sentence in sentences(results, rows):
        yield f'<p class="note">{text(sentence.plain)}</p>\n'
    yield from _where_time_goes(rows)
    yield from _examples(results, rows, examples)
    yield "<h2>What it was measured on</h2>\n"
    for name, what in about.machine:
        yield f'<p class="note">{text(name)}: {text(what)}</p>\n'


def _table(rows: Sequence[Row]) -> Iterator[str]:
    measured = [row.overall for row in rows if row.overall is not None]
    values = [value for figures in measured for value in (figures.speedup, figures.low, figures.high) if value is not None]
    scale = Scale.over(values, "×", start=1.0)
    with_perplexity = any(figures.perplexity is not None for figures in measured)
    with_joules = any(figures.joules_per_token is not None for figures in measured)
    heads = ["accept-<br>ance", "tokens<br>a pass", "draft<br>length", "tokens<br>/s"]
    heads += ["perp-<br>lexity"] * with_perplexity + ["joules<br>a token"] * with_joules
    yield (
        '<table class="methods"><thead><tr><th scope="col">method</th><th scope="col">output</th>'
        f'<th scope="col" class="plot">{scale.axis()}</th><th scope="col" class="x">speedup</th>'
        '<th scope="col" class="ci">95% interval</th>' + "".join(f'<th scope="col" class="n">{head}</th>' for head in heads)
    )
    yield "</tr></thead><tbody>"
    top = best(rows)
    for row in ordered(rows):
        if row.overall is None:
            why = "not measured" if row.failure is None else f"not run: {row.failure.message}. {row.failure.cure}"
            name = f'<th scope="row">{text(row.spec.written)}</th>'
            yield f'<tr class="off">{name}<td class="why" colspan="{3 + len(heads)}">{text(why.rstrip(". "))}</td></tr>'
        else:
            yield _row(row, row.overall, scale, is_best=row is top, perplexity=with_perplexity, joules=with_joules)
    yield "</tbody></table>\n"


def _row(row: Row, figures: Figures, scale: Scale, *, is_best: bool, perplexity: bool, joules: bool) -> str:
    kind = "m ar" if row.is_baseline else "m lossy" if not row.spec.lossless else "m best" if is_best else "m"
    speedup = figures.speedup or 0.0
    low = speedup if figures.low is None else figures.low
    high = speedup if figures.high is None else figures.high
    said = f"{speedup:.2f} times" + (f", 95% interval {low:.2f} to {high:.2f}" if figures.low is not None else "")
    summary = figures.summary
    cells = [
        ("rate", _number(summary.acceptance_rate, ".0%"), "accepted"),
        ("eff", _number(summary.block_efficiency, ".2f"), "a pass"),
        ("len", draft_length(summary.mean_draft_length, branches=figures.branches), "drafted"),
        ("tps", _number(summary.tokens_per_second, ".1f"), "tokens/s"),
    ]
    cells += [("ppl", _number(figures.perplexity, ".2f"), "perplexity")] * perplexity
    cells += [("joules", _number(figures.joules_per_token, ".3g"), "joules a token")] * joules
    return (
        f'<tr class="{kind}"><th scope="row">{text(row.spec.written)}</th>'
        f'<td class="out">{text(output_word(row, figures))}</td>'
        f'<td class="plot">{scale.dot(speedup, low, high, said, reference=1.0)}</td><td class="x">{speedup:.2f}×</td>'
        f'<td class="ci">{"" if figures.low is None else f"{low:.2f}–{high:.2f}"}</td>'
        + "".join(f'<td class="n {name}" data-l="{meaning}">{value}</td>' for name, value, meaning in cells)
        + "</tr>"
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


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
    for place, (row, run) in enumerate(shown):
        yield f"<article>\n<h3>{code(row.spec.written)}</h3>\n"
        yield from _example(run, f"gone-{place}")
        yield "</article>\n"
    yield "</div>\n"


def _prompt(prompt: Prompt) -> str:
    shown = prompt.text if len(prompt.text) <= PROMPT_SHOWN else prompt.text[: PROMPT_SHOWN - 2] + " …"
    return f'<p class="note">{text(prompt.label)}: {code(shown)}</p>\n'


def _example(run: TracedRun, switch: str) -> Iterator[str]:
    one = Anatomy(run.method)
    one.add(run)
    summary = one.summary
    entries = [(f"{summary.new_tokens:,}", "tokens"), (_number(summary.tokens_per_second, ".1f"), "tokens a second")]
    if summary.acceptance_rate is not None:
        entries.append((f"{summary.acceptance_rate:.0%}", "of the draft accepted"))
    entries.append((_number(summary.block_efficiency, ".2f"), "tokens a target pass"))
    yield facts(entries)
    yield from answer(run, switch)
    yield from rounds_list(run)
