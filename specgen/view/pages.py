"""HTML pages, each in one file: of `specgen compare --html`, and of recorded generations for `specgen inspect --html`.

The pages contain no script and load no other file. Their colours follow the mode of the system, light or dark. They are jinja2
templates in `templates/`. Every value that a template prints has its control characters replaced by `_visible` and is then
escaped, so text from a model or a file cannot become HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any

from specgen.base.settings import written_value
from specgen.base.text import inline, streamed
from specgen.base.types import Round, TokenStatus
from specgen.compare.columns import output_text, ranked_rows, shown_columns
from specgen.compare.results import MethodResult, not_run, ranked
from specgen.compare.results import best as best_result
from specgen.traces.reader import TracedRun
from specgen.traces.statistics import TraceStatistics
from specgen.view.charts import Chart, ticks, time_shares
from specgen.view.comparison import Report, headline, sentences, verdict
from specgen.view.generation import MODES, parts, reason
from specgen.view.theme import counted
from specgen.view.trace_charts import charts
from specgen.view.trace_report import COLUMNS, ENDED, LOSSY, RecordedMethod, best, conditions, main_figures

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

MOST_SHOWN = 12  # recorded methods whose text and charts are on the page; the table has all
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a token shows that holds only some bytes of a character
_EOS = "⟨eos⟩"
_SIGNALS = (("entropy", "{:.2f}"), ("top probability", "{:.0%}"), ("overlap", "{:.2f}"), ("divergence", "{:.2f}"))
_CLASSES = {"accepted": "acc", "rejected": "rej", "discarded": "dis"}


def comparison_page(report: Report, machine: Sequence[tuple[str, str]], versions: str, made_with: str) -> Iterator[str]:
    """Yields the HTML page of a comparison in pieces.

    `machine` describes the computer as (heading, text) pairs. `versions` names the software versions. `made_with` is the command
    that made the page.
    """
    results, made = report.results, report.made
    measured = [(result.name, result.summary) for result in ranked(made) if result.prompts]
    runs = [(name, results.examples[name]) for name, _ in measured if name in results.examples and results.examples[name].rounds]
    prompts = {prompt.index: prompt for prompt in results.config.prompts}
    return _render(
        "compare_page.html.j2",
        headline=verdict(report),
        subtitle=headline(report),
        has_lossy=report.measured_lossy,
        table=_compared(report),
        sentences=[sentence.plain for sentence in sentences(report)],
        times=[(name, shares) for name, summary in measured if (shares := time_shares(summary))],
        prompt=prompts[runs[0][1].start["prompt_index"]] if runs else None,
        examples=[(name, _run_view(run, f"gone-{index}")) for index, (name, run) in enumerate(runs)],
        machine=machine,
        versions=versions,
        made_with=made_with,
        wide=False,
    )


def trace_page(shown: Sequence[RecordedMethod], made_with: str) -> Iterator[str]:
    """Yields the HTML page of recorded methods in pieces. `made_with` is the command that made the page."""
    start, is_only = shown[0].run.start, len(shown) == 1
    versions = start["versions"]
    return _render(
        "trace_page.html.j2",
        headline=_fastest(shown),
        subtitle=conditions(start, sum(entry.figures.runs for entry in shown)),
        table=None if is_only else _recorded(shown),
        has_lossy=not all(entry.lossless for entry in shown),
        lossy=LOSSY,
        runs=(_method_view(entry, f"gone-{index}", is_only=is_only) for index, entry in enumerate(shown[:MOST_SHOWN])),
        hidden_runs=counted(len(shown) - MOST_SHOWN, "more run") if len(shown) > MOST_SHOWN else "",
        versions=", ".join(f"{name} {versions[name]}" for name in ("specgen", "torch", "transformers") if name in versions),
        made_with=made_with,
        wide=not is_only,
    )


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
    return environment


def _visible(value: object) -> object:
    """Returns a value that a template prints as one line of text without control characters (↵ for a line feed).

    HTML that a macro has made is returned unchanged.
    """
    return value if hasattr(value, "__html__") else inline(str(value))


@lru_cache(1 << 16)  # a long text has few different tokens
def _marked(token: str, kind: str = "") -> Markup:
    """The template filter `marked`: puts a token's text into an `<i>` element with the CSS class `kind`.

    White space around the text stays outside the element. Line feeds and tabs are kept.
    """
    from markupsafe import Markup

    text = streamed(token)
    core = text.strip(" \n\t")
    before, _, after = text.partition(core) if core else (text, "", "")
    html = Markup('{}<i class="{}">{}</i>{}') if kind else Markup("{}<i{}>{}</i>{}")
    return html.format(before, kind, core, after)


# the table of methods


def _compared(report: Report) -> dict[str, Any]:
    """Returns the values of the macro `methods_table`: a line per method in order of rank, with a dot at its speedup and a line
    over its interval.

    Where requested, a line for each category of prompts follows its method. Methods that could not run come last, with the
    reason.
    """
    shown, top, lines = ranked_rows(report.made, by_category=report.by_category), best_result(report.made), []
    for entry in shown:
        kind = "m ar" if entry.is_reference else "m lossy" if not entry.spec.lossless else "m"
        kind += " cat" if entry.category else " best" if entry is top else ""
        speedup = entry.speedup or 0.0
        ends = (speedup if end is None else end for end in (entry.low, entry.high))
        lines.append(_line(kind, entry.name, entry, speedup, *ends) | {"output": output_text(entry)})
    columns = [column for column in shown_columns(shown) if column.label]
    off = [{"kind": "off", "name": ", ".join(names), "why": reason} for names, reason in not_run(report.made)]
    return {"lines": [*lines, *off], "columns": columns, "scale": _scale(lines, "×", 1.0), "origin": 1.0, "unit": "×"}


def _recorded(shown: Sequence[RecordedMethod]) -> dict[str, Any]:
    """Returns the values of the macro `methods_table`: per method, the tokens per second over all its recorded generations.

    The interval of a method reaches from its slowest to its fastest generation.
    """
    top, lines = best(shown), []
    for entry in shown:
        runs = entry.figures
        kind = "m lossy" if not entry.lossless else "m best" if entry is top else "m ar" if runs.summary.method == "ar" else "m"
        lines.append(_line(kind, entry.label, runs, entry.speed, min(runs.speeds, default=0.0), max(runs.speeds, default=0.0)))
    return {"lines": lines, "columns": COLUMNS, "scale": _scale(lines), "origin": 0.0, "unit": ""}


def _line(kind: str, name: str, entry: MethodResult | TraceStatistics, speed: float, low: float, high: float) -> dict[str, Any]:
    """Returns a method's line of the table. `kind` holds CSS classes, `low` to `high` is the interval of `speed`."""
    return {"kind": kind, "name": name, "why": "", "entry": entry, "speed": speed, "low": low, "high": high}


def _scale(lines: Iterable[Mapping[str, Any]], unit: str = "", origin: float = 0.0) -> Chart:
    """Returns the horizontal axis of the dots in the table, with a few grid lines. It contains all speeds and `origin`."""
    held = [origin, *(line[end] for line in lines for end in ("speed", "low", "high"))]
    low, high = min(held), max(held)
    high = high if high > low else low + 1
    step, margin = ticks(high - low, 4)[1][0], 0.04 * (high - low)
    places = [step * index for index in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)]
    below = [(place, f"{place:g}{unit}") for place in places]
    return Chart("methods", "", below=below, start=low - margin if low < origin else low, end=high + margin)


# recorded generations


def _fastest(shown: Sequence[RecordedMethod]) -> str:
    """Returns the headline of recorded methods: acceptance and efficiency of a single one, or the fastest of several."""
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


def _method_view(entry: RecordedMethod, name: str, *, is_only: bool) -> dict[str, Any]:
    """Returns a recorded method for the page: one of its generations, and the charts.

    `name` is an HTML id, unique on the page. `is_only` says that the page shows no other method.
    """
    run = entry.run
    settings = (
        f"{key} {written_value(value)}" + (f" ({entry.varying[key]} over all runs)" if key in entry.varying else "")
        for key, value in run.start["settings"].items()
    )
    return {
        **_run_view(run, name),
        "title": "How one answer was generated" if is_only else entry.label,
        "method": run.method,
        "settings": ", ".join(settings),
        "prompt_tokens": counted(len(run.start["prompt_ids"]), "token"),
        "end": ENDED[run.finish_reason] if run.finish_reason else "",
        "source": entry.source,
        "line": f"{run.first_line:,}",
        "is_lossy": not entry.lossless,
        "notes": run.notes,
        "figures": charts(run, entry.figures),
    }


def _run_view(run: TracedRun, name: str) -> dict[str, Any]:
    """Returns a recorded generation for the macros of `run.html.j2`: its main numbers, its text as tokens with tooltips, and the
    list of rounds. `name` is the HTML id of the checkbox that shows rejected and discarded tokens."""
    figures = run.fold()
    return {
        "name": name,
        "facts": main_figures(figures),
        "times": time_shares(figures),
        "has_drafts": any(traced.round.draft.tokens for traced in run.rounds),
        "tokens": _tokens(run),
        "rounds": _rounds(run),
        "round_count": counted(len(run.rounds), "round"),
    }


def committed_texts(run: TracedRun) -> list[str]:
    """Returns the text of each committed token (a token of the answer: accepted, or chosen by the target).

    Where several tokens make up one character, the last of these tokens has the character, taken from the text of the whole
    answer, and the ones before it are empty. Tokens whose place in it cannot be found stay as they are.
    """
    texts: list[str] = []
    for traced in run.rounds:
        texts += [traced.draft_texts[node] for node in traced.round.verdict.path]
        texts += [traced.token_text or ""] if traced.round.verdict.token is not None else []
    whole, start, found = run.summary["text"] if run.summary is not None else "", 0, []
    groups = [(is_part, list(group)) for is_part, group in groupby(texts, key=lambda text: _REPLACEMENT in text)]
    for (is_part, group), following in zip_longest(groups, groups[1:], fillvalue=(False, [""])):
        if is_part:
            end = whole.find(following[1][0], start + 1) if following[1][0] else len(whole)
            if start < end <= start + 2 * len(group):
                group, start = [*[""] * (len(group) - 1), whole[start:end]], end
        else:
            text = "".join(group)
            text = text if start or whole.startswith(" ") else text.removeprefix(" ")  # a tokenizer may drop the first space
            start += len(text) if whole.startswith(text, start) else 0
        found += group
    return found


def _tokens(run: TracedRun) -> Iterator[dict[str, Any]]:
    """Yields each token, round by round, with the CSS classes `kind`, its `text` and what the template's tooltip says of it.

    Within a round the accepted tokens come first, then the rejected and discarded tokens, then the token that the target chose.
    Of a draft that is a tree, discarded tokens are left out.
    """
    texts = iter(committed_texts(run))
    for traced in run.rounds:
        round_, draft, verdict, statuses = traced.round, traced.round.draft, traced.round.verdict, traced.round.statuses
        is_end = run.finish_reason == "eos" and traced is run.rounds[-1]
        gone = [node for node, status in enumerate(statuses) if status is TokenStatus.REJECTED or draft.is_chain]
        for node in (*verdict.path, *(node for node in gone if node not in verdict.path)):
            kind, text = _CLASSES[statuses[node].value], inline(traced.draft_texts[node])
            if node in verdict.path:
                kind, text = (
                    ("acc eos", _EOS) if is_end and verdict.token is None and node == verdict.path[-1] else (kind, next(texts))
                )
            figures = (draft.entropies, draft.top_probs, traced.overlap, traced.kl)
            known = {name: form.format(values[node]) for (name, form), values in zip(_SIGNALS, figures, strict=True) if values}
            signals = ", ".join(f"{name} {value}" for name, value in known.items() if value not in ("nan", "nan%"))
            yield {
                "kind": kind if node in verdict.path else f"gone {kind}",
                "text": text,
                "own": inline(traced.draft_texts[node]),
                "id": draft.tokens[node],
                "what": f"drafted, {statuses[node].value}",
                "place": f"{round_.index}, {node + 1} of {len(draft.tokens)}",
                "signals": signals[:1].upper() + signals[1:],
            }
        if verdict.token is not None:
            text = next(texts)
            rejected = [inline(traced.draft_texts[node]) for node in gone if statuses[node] is TokenStatus.REJECTED]
            yield {
                "kind": "own eos" if is_end else "own",
                "text": _EOS if is_end else text,
                "own": inline(text),
                "id": verdict.token,
                "what": _chosen(round_, rejected),
                "place": round_.index,
                "signals": "",
            }


def _chosen(round_: Round, rejected: Sequence[str]) -> str:
    """Returns in words why the target chose the token of a round, in which it rejected drafted tokens with these texts."""
    if round_.verdict.source == "bonus":
        return "bonus token after a completely accepted draft"
    if rejected:
        return f"correction of the draft's {' or '.join(f'“{text}”' for text in rejected[:4])}"
    return "chosen by the target" + " after the prompt" * (round_.mode == "prefill")


def _rounds(run: TracedRun) -> Iterator[dict[str, Any]]:
    """Yields the values of one line per round, with the same content as the lines of `--rounds` in the terminal."""
    texts = run.texts()
    for traced in run.rounds:
        round_, drafted = traced.round, len(traced.round.draft.tokens)
        mode = f"{MODES[round_.mode]}, " if round_.mode in MODES else ""  # PEARL's
        pieces = parts(round_, lambda ids: inline("".join(texts[token] for token in ids)))
        yield {
            "index": round_.index,
            "kept": f"{len(round_.verdict.path)}/{drafted}" if drafted else "",
            "pieces": [(_CLASSES.get(part.kind, part.kind), part.text) for part in pieces],
            "reason": mode + reason(round_, len(run.start["prompt_ids"])),
        }
