"""HTML pages, each in one file: of `specgen compare --html`, and of recorded generations for
`specgen inspect --html`.

The pages contain no script and load no other file. Their colours follow the mode of the system,
light or dark. They are jinja2 templates in `templates/`. Every value that a template prints has its
control characters replaced by `_visible` and is then escaped, so text from a model or a file cannot
become HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specgen.base.settings import written_value
from specgen.base.text import counted, inline, streamed
from specgen.base.types import TokenStatus
from specgen.compare.results import MethodResult, not_run, ranked
from specgen.compare.results import best as best_result
from specgen.traces.reader import TracedRound, TracedRun
from specgen.view.charts import charts, ticks, time_shares
from specgen.view.comparison import Report, headline, sentences, verdict
from specgen.view.comparison_columns import (
    Column,
    output_text,
    ranked_rows,
    settings_text,
    shown_columns,
)
from specgen.view.generation import MODES, reason, segments
from specgen.view.trace_report import (
    COLUMNS,
    ENDED,
    LOSSY,
    RecordedMethod,
    best,
    conditions,
    main_figures,
)

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # in a token that holds some bytes of a character
_EOS = "⟨eos⟩"
_SIGNALS = (
    ("entropy", "{:.2f}"),
    ("top probability", "{:.0%}"),
    ("overlap", "{:.2f}"),
    ("divergence", "{:.2f}"),
)
_CLASSES = {"accepted": "acc", "rejected": "rej", "discarded": "dis"}
_CHOSEN = {
    "bonus": "bonus token after a completely accepted draft",
    "correction": "correction of the rejected token",
    None: "chosen by the target",
}


def comparison_page(
    report: Report, machine: Sequence[tuple[str, str]], versions: str, made_with: str
) -> Iterator[str]:
    """Yields the HTML page of a comparison in pieces.

    `machine` has (heading, text) pairs about the computer, `versions` names the versions of the
    software, and `made_with` is the command that made the page.
    """
    results = report.results
    measured = [result for result in ranked(report.methods) if result.prompts]
    times = [(result.name, time_shares(result.summary)) for result in measured]
    examples = []
    for result in measured:
        run = results.examples.get(result.spec.written)
        if run is not None and run.rounds:
            examples.append((result.name, run))
    prompts = {prompt.index: prompt for prompt in results.config.prompts}
    return _render(
        "compare_page.html.j2",
        headline=verdict(report),
        subtitle=headline(report),
        has_lossy=report.measured_lossy,
        table=_compared(report),
        sentences=[sentence.plain for sentence in sentences(report)],
        times=[(name, shares) for name, shares in times if shares],
        prompt=prompts[examples[0][1].start["prompt_index"]] if examples else None,
        examples=examples,
        machine=machine,
        versions=versions,
        made_with=made_with,
        wide=False,
    )


def trace_page(shown: Sequence[RecordedMethod], made_with: str) -> Iterator[str]:
    """Yields the HTML page of recorded methods in pieces. `made_with` is the command that made the
    page."""
    start = shown[0].run.start
    return _render(
        "trace_page.html.j2",
        headline=_headline(shown),
        subtitle=conditions(start, sum(entry.figures.runs for entry in shown)),
        table=_recorded(shown) if len(shown) > 1 else None,
        has_lossy=not all(entry.lossless for entry in shown),
        shown=shown,
        versions=", ".join(f"{name} {version}" for name, version in start["versions"].items()),
        made_with=made_with,
        wide=len(shown) > 1,
    )


def _headline(shown: Sequence[RecordedMethod]) -> str:
    """Returns the headline of recorded methods: the main numbers of a single one, or the fastest of
    several."""
    if len(shown) == 1:
        figures = main_figures(shown[0].figures.summary)
        return f"{shown[0].label}: {', '.join(' '.join(figure) for figure in figures)}"
    top = best(shown)
    prompts = {tuple(entry.run.start["prompt_ids"]) for entry in shown}
    if top is None or len(prompts) > 1:  # speeds on different prompts cannot be compared
        return f"{len(shown)} recordings side by side"
    rank = "the fastest"
    if not all(entry.lossless for entry in shown):
        rank = "the fastest lossless method"
    return f"{top.label} was {rank}: {top.speed:.1f} tokens per second"


# rendering


def _render(template: str, **values: Any) -> Iterator[str]:
    stream = _environment().get_template(template).stream(values)
    stream.enable_buffering(500)
    return stream


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("specgen.view"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["marked"] = _marked
    for function in (charts, counted, main_figures, settings_text, ticks, time_shares):
        environment.globals[function.__name__] = function
    environment.globals |= {
        "tokens": _tokens,
        "rounds": _rounds,
        "settings": _settings,
        "ended": ENDED,
        "lossy": LOSSY,
    }
    return environment


def _visible(value: object) -> object:
    """Returns a value that a template prints as one line of text without control characters (↵ for
    a line feed); HTML that a macro has made unchanged."""
    return value if hasattr(value, "__html__") else inline(str(value))


@lru_cache(1 << 16)  # a long text has few different tokens
def _marked(token: str, kind: str = "") -> Markup:
    """The template filter `marked`: puts a token's text into an `<i>` element with the CSS class
    `kind`, without the white space around it. Line feeds and tabs are kept."""
    from markupsafe import Markup

    text = streamed(token)
    core = text.strip(" \n\t")
    before = text
    after = ""
    if core:
        before, _, after = text.partition(core)
    html = Markup('{}<i class="{}">{}</i>{}') if kind else Markup("{}<i{}>{}</i>{}")
    return html.format(before, kind, core, after)


# the table of methods


def _compared(report: Report) -> dict[str, Any]:
    """Returns the values of the macro `methods_table`: a line for each method by rank, followed by
    one for each category if requested, with a dot at the speedup and a line over its interval. The
    methods that could not run come last, with the reason."""
    shown = ranked_rows(report.methods, by_category=report.by_category)
    top = best_result(report.methods)
    lines = []
    for entry in shown:
        speedup = entry.speedup or 0.0
        lines.append(
            {
                "kind": _look(entry, is_best=entry is top),
                "name": entry.name,
                "entry": entry,
                "speed": speedup,
                "output": output_text(entry),
                "low": entry.low or speedup,
                "high": entry.high or speedup,
            }
        )
    columns = [column for column in shown_columns(shown) if column.label]
    table = _table(lines, columns, 1.0, "×")
    table["off"] = [
        {"kind": "off", "name": ", ".join(names), "why": why}
        for names, why in not_run(report.methods)
    ]
    return table


def _look(entry: MethodResult, *, is_best: bool) -> str:
    """Returns the CSS classes of a line of the table."""
    classes = "" if entry.spec.lossless else "lossy"
    if entry.is_reference:
        classes = "ar"
    if entry.category:
        return f"{classes} cat"
    return f"{classes} best" if is_best else classes


def _recorded(shown: Sequence[RecordedMethod]) -> dict[str, Any]:
    """Returns the values of the macro `methods_table`: for each method the tokens per second over
    all its recorded generations, with an interval from the slowest to the fastest one."""
    top = best(shown)
    lines = []
    for entry in shown:
        look = entry.run.method  # `ar` has its own
        if not entry.lossless:
            look = "lossy"
        elif entry is top:
            look = "best"
        speeds = entry.figures.speeds or [0.0]
        lines.append(
            {
                "kind": look,
                "name": entry.label,
                "entry": entry.figures,
                "speed": entry.speed,
                "low": min(speeds),
                "high": max(speeds),
            }
        )
    return _table(lines, COLUMNS, 0.0, "")


def _table(
    lines: Sequence[dict[str, Any]], columns: Sequence[Column], origin: float, unit: str
) -> dict[str, Any]:
    end = max((line["high"] for line in lines), default=0.0) or 1.0
    return {
        "lines": lines,
        "columns": columns,
        "end": 1.04 * end,
        "ticks": ticks(end),
        "origin": origin,
        "unit": unit,
        "off": [],
    }


# recorded generations


def _settings(entry: RecordedMethod) -> str:
    """Returns the settings of the recorded generation in words, with the ranges of those that
    differ between generations."""
    text = ""
    for name, value in entry.run.start["settings"].items():
        text += f", {name} {written_value(value)}"
        if name in entry.varying:
            text += f" ({entry.varying[name]} over all runs)"
    return text


def committed_texts(run: TracedRun) -> list[str]:
    """Returns the text of each token of the answer, accepted or chosen by the target.

    Where several tokens make up one character, the last one has it, taken from the text of the
    whole answer, and the ones before are empty. A token whose place in the answer cannot be found
    keeps its own text.
    """
    texts: list[str] = []
    for traced in run.rounds:
        texts += [traced.draft_texts[node] for node in traced.round.verdict.path]
        if traced.token_text is not None:
            texts.append(traced.token_text)
    whole = run.summary["text"] if run.summary is not None else ""
    start = 0
    if texts and not whole.startswith(" "):  # a tokenizer may drop the first space
        texts[0] = texts[0].removeprefix(" ")
    for number, (text, following) in enumerate(pairwise([*texts, ""])):
        if _REPLACEMENT not in text:
            if whole.startswith(text, start):
                start += len(text)
        elif _REPLACEMENT in following:
            texts[number] = ""
        else:
            end = whole.find(following, start + 1) if following else len(whole)
            if start < end:
                texts[number] = whole[start:end]
                start = end
    return texts


def _tokens(run: TracedRun) -> Iterator[tuple[str, str, str]]:
    """Yields the CSS classes, the text and the tooltip of each token. Of a round come the accepted
    tokens, the rejected and the discarded ones (not of a tree), and the one that the target
    chose."""
    texts = iter(committed_texts(run))
    for traced in run.rounds:
        draft = traced.round.draft
        verdict = traced.round.verdict
        statuses = traced.round.statuses
        ends = run.finish_reason == "eos" and traced is run.rounds[-1]
        for node in verdict.path:
            is_eos = ends and verdict.token is None and node == verdict.path[-1]
            text = next(texts)
            yield "acc eos" if is_eos else "acc", _EOS if is_eos else text, _tooltip(traced, node)
        gone = [TokenStatus.REJECTED]
        if draft.is_chain:
            gone.append(TokenStatus.DISCARDED)
        for node, status in enumerate(statuses):
            if status in gone:
                text = inline(traced.draft_texts[node])
                yield f"gone {_CLASSES[status.value]}", text, _tooltip(traced, node)
        if verdict.token is not None:
            text = next(texts)
            tip = (
                f"“{inline(text)}”, id {verdict.token}: {_CHOSEN[verdict.source]}. "
                f"Round {traced.round.index}."
            )
            yield "own eos" if ends else "own", _EOS if ends else text, tip


def _tooltip(traced: TracedRound, node: int) -> str:
    """Returns what is known about a drafted token."""
    round_ = traced.round
    draft = traced.round.draft
    agreement = traced.round.verdict.agreement
    figures = [draft.entropies, draft.top_probs]
    if agreement is not None:
        figures += [agreement.overlap, agreement.kl]
    signals = []
    for (name, form), values in zip(_SIGNALS, figures, strict=False):
        if node < len(values) and not math.isnan(values[node]):
            signals.append(f"{name} {form.format(values[node])}")
    tip = (
        f"“{inline(traced.draft_texts[node])}”, id {draft.tokens[node]}: drafted, "
        f"{round_.statuses[node].value}. Round {round_.index}, {node + 1} of {len(draft.tokens)}."
    )
    if signals:
        tip += f" {', '.join(signals).capitalize()}."
    return tip


def _rounds(run: TracedRun) -> Iterator[dict[str, Any]]:
    """Yields the values of one line per round, with the same content as the lines of `--rounds` in
    the terminal."""
    texts = run.texts()
    for traced in run.rounds:
        round_ = traced.round
        drafted = len(traced.round.draft.tokens)
        mode = f"{MODES[round_.mode]}, " if round_.mode in MODES else ""  # PEARL's
        pieces = segments(round_, lambda ids: inline("".join(texts[token] for token in ids)))
        yield {
            "index": round_.index,
            "kept": f"{len(round_.verdict.path)}/{drafted}" if drafted else "",
            "pieces": [(_CLASSES.get(part.kind, part.kind), part.text) for part in pieces],
            "reason": mode + reason(round_, len(run.start["prompt_ids"])),
        }
