"""`inspect --html`: what happened in a run, or in several side by side, as one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from specgen.traces.statistics import TraceStatistics, posteriors, setting
from specgen.traces.trace_reader import TracedRun
from specgen.ui.html.charts import Scale, time_bar
from specgen.ui.html.entropy_chart import entropy_chart
from specgen.ui.html.page import code, document, facts, text
from specgen.ui.html.round_charts import posterior_chart, rounds_chart
from specgen.ui.html.token_view import answer, rounds_list
from specgen.ui.sanitize import draft_length

LOSSY = "lossy: other text than the target's, by design; not ranked."
MOST_SHOWN = 12  # runs whose text and charts stand on the page; the table holds all


ENDED = {"length": "at the limit", "eos": "by itself", "stop": "at a stop text", "interrupted": "by an interruption"}


@dataclass(frozen=True, slots=True)
class Shown:
    """A method in a trace: `label` names it, `anatomy` has the figures over all its runs, `run` is the one to look at. `varying`
    are settings that were not the same in all runs, as ranges."""

    label: str
    source: str
    anatomy: TraceStatistics
    run: TracedRun
    varying: Mapping[str, str] = field(default_factory=dict)

    @property
    def lossless(self) -> bool:
        return self.run.start.get("lossless") is not False


def best(shown: Sequence[Shown]) -> Shown | None:
    """The fastest of those that give the target's own output; None where none does, or nobody tells the time."""
    timed = [entry for entry in shown if entry.lossless and entry.anatomy.summary.tokens_per_second]
    return max(timed, key=lambda entry: entry.anatomy.summary.tokens_per_second or 0.0, default=None)


def page(shown: Sequence[Shown], made_with: str) -> Iterator[str]:
    """The page in pieces, to be written one after the other."""
    versions = shown[0].run.start["versions"]
    names = ", ".join(f"{name} {versions[name]}" for name in ("specgen", "torch", "transformers") if name in versions)
    foot = f"{text(names)}. Made with: {code(made_with)}"
    headline = verdict(shown)
    yield from document(f"specgen: {headline}", headline, _setting_of(shown), _body(shown), foot, wide=len(shown) > 1)


def verdict(shown: Sequence[Shown]) -> str:
    """What the trace says, in one sentence."""
    if len(shown) == 1:
        summary = shown[0].anatomy.summary
        if summary.acceptance_rate is None:
            return f"{shown[0].label}: nothing was drafted, {_speed(shown[0])} tokens a second"
        kept = f"{summary.acceptance_rate:.0%} of the draft was right"
        return f"{shown[0].label}: {kept}, {summary.block_efficiency:.2f} tokens a target pass"
    top = best(shown)
    prompts = {tuple(entry.run.start["prompt_ids"]) for entry in shown}
    if top is None or len(prompts) > 1:  # speeds on different prompts decide nothing
        return f"{len(shown)} recordings side by side"
    what = "the fastest here" if all(entry.lossless for entry in shown) else "the fastest lossless one here"
    return f"{top.label} was {what}: {_speed(top)} tokens a second"


def _speed(entry: Shown) -> str:
    return f"{entry.anatomy.summary.tokens_per_second or 0:.1f}"


def _setting_of(shown: Sequence[Shown]) -> str:
    start = shown[0].run.start
    models = f"{start['target']} with {start['draft']}" if start["draft"] else start["target"]
    runs = sum(entry.anatomy.runs for entry in shown)
    how = "greedy" if not start["sampling"].get("temperature") else f"temperature {start['sampling']['temperature']:g}"
    return f"{models}, {start['device']} {start['dtype']}, {runs} run{'s' * (runs != 1)}, {how}"


def _body(shown: Sequence[Shown]) -> Iterator[str]:
    if len(shown) > 1:
        yield from _table(shown)
    columns = shown[:MOST_SHOWN]
    yield '<div class="runs">\n'
    for position, entry in enumerate(columns):
        yield "<article>\n"
        yield from _article(entry, f"gone-{position}", is_only=len(shown) == 1)
        yield "</article>\n"
    yield "</div>\n"
    if len(shown) > MOST_SHOWN:
        yield f'<p class="note">{len(shown) - MOST_SHOWN} more runs stand in the table only.</p>\n'


def _article(entry: Shown, switch: str, *, is_only: bool) -> Iterator[str]:
    run, start = entry.run, entry.run.start
    one = entry.anatomy
    if one.runs > 1:
        one = TraceStatistics(run.method)
        one.add(run)
    settings = ", ".join(
        f"{name} {value}" + (f" ({entry.varying[name]} over all runs)" if name in entry.varying else "")
        for name, value in start["settings"].items()
    )
    yield f"<h2>{text('How one answer came about' if is_only else entry.label)}</h2>\n"
    about = f"{code(run.method)}{text(', ' + settings) if settings else ''}. {len(start['prompt_ids']):,} tokens of prompt."
    where = f" From {code(entry.source)}, line {run.first_line:,}."
    ended = f" Ended {ENDED[run.finish_reason]}." if run.finish_reason else ""
    yield f'<p class="note">{about}{ended}{where}</p>\n'
    if not entry.lossless:
        yield f'<p class="note"><b>{text(LOSSY.partition(":")[0].capitalize())}:</b>{text(LOSSY.partition(":")[2])}</p>\n'
    for note in run.notes:
        yield f'<p class="note warn"><b>Note:</b> {text(note)}.</p>\n'
    summary = one.summary
    entries = [(f"{summary.new_tokens:,}", "tokens"), (f"{summary.tokens_per_second or 0:.1f}", "tokens a second")]
    if summary.acceptance_rate is not None and summary.draft_share is not None:
        entries.append((f"{summary.acceptance_rate:.0%}", "of the draft accepted"))
        entries.append((f"{summary.draft_share:.0%}", "of the text from the draft"))
    entries.append((f"{summary.block_efficiency or 0:.2f}", "tokens a target pass"))
    yield facts(entries)
    yield time_bar(summary.phase_seconds)
    yield "<h3>The text</h3>\n"
    yield from answer(run, switch)
    rounds = [traced.round for traced in run.rounds]
    if summary.drafted and rounds:
        yield rounds_chart(rounds)
    words = [word for traced in run.rounds if traced.round.draft.entropies for word in traced.draft_texts]
    yield entropy_chart(one, words, stop_entropy(run))
    yield posterior_chart(posteriors(rounds))
    yield from rounds_list(run)


def stop_entropy(run: TracedRun) -> float | None:
    """The entropy from which svip stops, sqrt(c H) > threshold; None for other methods."""
    c, threshold = setting(run, "c"), setting(run, "threshold")
    return threshold**2 / c if c and threshold is not None else None


def _table(shown: Sequence[Shown]) -> Iterator[str]:
    """A line a method, with tokens a second: of all its runs together, and from the slowest to the fastest."""
    speeds = [speed for entry in shown for speed in entry.anatomy.speeds]
    scale = Scale.over(speeds)
    top = best(shown)
    yield "<h2>Side by side</h2>\n"
    yield (
        '<p class="note">Tokens a second over all runs, and from the slowest run to the fastest. Other prompts or machines '
        "make other figures: specgen compare measures them fairly.</p>\n"
    )
    heads = ("runs", "accept-<br>ance", "tokens<br>a pass", "draft<br>length")
    yield (
        '<table class="methods"><thead><tr><th scope="col">method</th>'
        f'<th scope="col" class="plot">{scale.axis()}</th><th scope="col" class="x">tokens/s</th>'
        + "".join(f'<th scope="col" class="n">{head}</th>' for head in heads)
        + "</tr></thead><tbody>"
    )
    for entry in shown:
        yield _row(entry, scale, is_best=entry is top)
    yield "</tbody></table>\n"
    if not all(entry.lossless for entry in shown):
        yield f'<p class="note">{text(LOSSY)}</p>\n'


def _row(entry: Shown, scale: Scale, *, is_best: bool) -> str:
    anatomy, summary = entry.anatomy, entry.anatomy.summary
    kind = "m lossy" if not entry.lossless else "m best" if is_best else "m ar" if summary.method == "ar" else "m"
    low, high = min(anatomy.speeds, default=0.0), max(anatomy.speeds, default=0.0)
    speed = summary.tokens_per_second or 0.0
    dot = scale.dot(speed, low, high, f"{speed:.1f} tokens a second, from {low:.1f} to {high:.1f}")
    length = anatomy.summary.mean_draft_length
    cells = (
        (f"{anatomy.runs}", "runs"),
        ("" if summary.acceptance_rate is None else f"{summary.acceptance_rate:.0%}", "accepted"),
        (f"{summary.block_efficiency or 0:.2f}", "a pass"),
        (draft_length(length, branches=anatomy.branches), "drafted"),
    )
    return (
        f'<tr class="{kind}"><th scope="row">{text(entry.label)}</th><td class="plot">{dot}</td><td class="x">{speed:.1f}</td>'
        + "".join(f'<td class="n" data-l="{meaning}">{figure}</td>' for figure, meaning in cells)
        + "</tr>"
    )
