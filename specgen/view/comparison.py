"""The output of `specgen compare` in the terminal: what was measured, the tables of speeds and
times, and the result in words.

The table of speeds has as many columns as fit, and a bar for each speedup and its confidence
interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from specgen.base.text import counted, one_line
from specgen.base.types import PHASES, SamplingParams
from specgen.compare.results import (
    LEAST_PROMPTS,
    LEAST_TOKENS,
    NOT_RUN,
    MethodResult,
    Results,
    as_fast_as,
    best,
    candidates,
    not_run,
    ranked,
)
from specgen.compare.verdict import Difference
from specgen.view.comparison_columns import (
    Column,
    output_text,
    ranked_rows,
    settings_text,
    shown_columns,
)
from specgen.view.progress import Progress
from specgen.view.theme import GAP, PIPED_WIDTH, labelled, svg, table, wrapped
from specgen.view.trace_report import LOSSY

if TYPE_CHECKING:
    from specgen.compare.runner import BenchmarkStep

MOST_EXPLAINED = 3  # ties with a sentence of their own; the rest are only counted
LONGEST_BAR = 24
SHORTEST_BAR = 6
_MAIN_PHASES = ("draft", "verify", "sample")  # of a narrow table of times
_NAME = Column("name", "\nmethod", value=lambda row: "  " * bool(row.category) + one_line(row.name))
_OUTPUT = Column("output", "\noutput", priority=1, value=output_text)
_BAR = Column("bar", "\n", priority=5)
_SETTINGS = Column(
    "settings",
    "\nsettings",
    priority=99,  # the first to be left out
    value=lambda row: None if row.category else one_line(settings_text(row)),
    is_interval=True,
)


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison of decoding methods, and how to show it.

    `results` has the measured runs, `methods` each method's figures, computed from them. `where`
    names the models, the device and the dtype. `by_category` adds a line per method and category of
    prompts, `phases` a table of times. `notes` is a last sentence, or empty.
    """

    results: Results
    methods: Sequence[MethodResult]
    where: str
    by_category: bool = False
    phases: bool = False
    notes: str = ""

    @property
    def measured_lossy(self) -> bool:
        return any(result.prompts and not result.spec.lossless for result in self.methods)


def page(report: Report, width: int) -> list[Text]:
    """Returns the report as lines of at most `width` cells, unless a method's name is longer."""
    lines, is_whole = headed_table(report, width)
    text = sentences(report)
    if not is_whole:
        hint = "A wider terminal shows more columns; --csv FILE has all of them."
        text.append(Text(hint, "quiet"))
    lines.append(Text())
    for sentence in text:
        lines += wrapped(sentence, width)
    if report.phases:
        lines += [Text(), *phases_table(report.methods, width)]
    return lines


def picture(report: Report) -> str:
    """Returns the report as an SVG picture, as wide as the table of speeds with all its columns."""
    lines = speed_table(report.methods, 1000, by_category=report.by_category, with_settings=False)[
        0
    ]
    width = max(PIPED_WIDTH, *(line.cell_len for line in lines))
    return svg(page(report, width), width)


def show_step(progress: Progress, report: Report, step: BenchmarkStep) -> None:
    """Shows the table of a comparison that is still running, cut to the console's height, with a
    line of progress below it.

    The line is such as `▸ ━━━━━━  5 of 48 runs  ~9 s left  svip, prompt 3 (code-retry)`.
    """
    console = progress.console
    name = "" if step.spec is None else step.spec.written
    if step.prompt is not None:
        name = f"warming up {name}" if step.warming_up else f"{name}, {step.prompt.label}"
    lines = headed_table(report, console.width)[0][: max(console.height - 3, 2)]
    left = step.seconds_left if step.done < step.total else None
    share = step.done / step.total if step.total else 1.0
    progress.bar(
        name, share, f"{step.done} of {counted(step.total, 'run')}", left, [*lines, Text()]
    )


def headed_table(report: Report, width: int) -> tuple[list[Text], bool]:
    """Returns the headline with the table of speeds, and whether the terminal has room for all its
    columns."""
    lines, is_whole = speed_table(report.methods, width, by_category=report.by_category)
    return [*wrapped(Text(headline(report), "quiet"), width), Text(), *lines], is_whole


def headline(report: Report) -> str:
    """Returns what was measured, such as `demo pair, cpu float32 · 16 prompts × 3 repeats × 128
    tokens, greedy`."""
    config = report.results.config
    sampling = config.sampling
    measured = max((result.prompts for result in report.methods), default=0)
    total = config.available or len(config.prompts)
    total -= len(report.results.skipped)
    prompts = counted(total, "prompt") if measured == total else f"{measured} of {total} prompts"
    repeats = f" × {config.repeats} repeats" if config.repeats > 1 else ""
    limit = ("" if sampling.ignore_eos else "up to ") + counted(sampling.max_new_tokens, "token")
    return f"{report.where} · {prompts}{repeats} × {limit}, {sampling_in_words(sampling)}"


def sampling_in_words(sampling: SamplingParams) -> str:
    """Returns what changes the distribution, such as `temperature 0.7, top-p 0.9`, or `greedy`."""
    words = ["greedy"]
    if not sampling.greedy:
        words = [f"temperature {sampling.temperature:g}"]
        for name, value in sampling.active_filters.items():
            number = f"{value:g}" if isinstance(value, float) else str(value)
            words.append(f"{name.replace('_', '-')} {number}")
    if sampling.grammar is not None:
        words.append(sampling.grammar.in_words)
    return ", ".join(words)


# the result in words


def sentences(report: Report) -> list[Text]:
    """Returns the sentences below the table: the fastest method, the outputs that differ from plain
    decoding's, explanations of the table, on how many of the prompts `specgen tune` chose the
    settings, and the report's `notes`."""
    text = []
    conclusion = Text(_conclusion(report))
    top = best(report.methods)
    if conclusion:
        if top is not None:
            conclusion.highlight_words([top.spec.written], "strong")
        text.append(conclusion)
    text += _differences(report)
    text += [Text(remark, "quiet") for remark in _remarks(report)]
    text += _tuned(report)
    if report.notes:
        text.append(Text(report.notes, "strong"))
    return text


def _remarks(report: Report) -> Iterator[str]:
    """Yields sentences that explain the table."""
    if report.measured_lossy:
        yield LOSSY
    if not report.results.config.sampling.greedy:
        yield (
            "sampled: each run draws other text, so outputs are not compared; at temperature "
            "0 they are."
        )
    skipped = len(report.results.skipped)
    if skipped:
        yield f"{counted(skipped, 'later turn')} left out: the context had no room."
    if any(result.predicted for result in report.methods):
        yield (
            "Predicted speedups, for methods of specgen that draft chains between target "
            "passes: by EESD's formula (Eq. 14) from "
            "acceptance and pass costs, and by the costs of all passes."
        )


def verdict(report: Report) -> str:
    """Returns the page's headline: the result in words, or that a method which should be lossless
    gave other output."""
    broken = [result.spec.written for result in report.methods if result.broken]
    if broken:
        return f"{broken[0]} does not give the target's own output"
    return _conclusion(report).removesuffix(".") or "Nothing to compare with plain decoding"


def _conclusion(report: Report) -> str:
    """Returns which method is the fastest of those that keep the output; empty if nothing was
    measured beside plain decoding."""
    first = next(iter(candidates(report.methods)), None)
    if first is None or first.speedup is None:
        return ""
    name = first.spec.written
    gain = f"{first.speedup:.2f}×"
    caution = f" {_too_short(first)}" if first.is_too_short else ""
    if first.speedup <= 1:
        return (
            f"Nothing here is faster than plain decoding (ar); the best is {name} at "
            f"{gain}.{caution}"
        )
    if caution:
        return f"{name} came first here: {gain} plain decoding (ar).{caution}"
    if first.low is not None and first.low <= 1:
        unsure = f"{name} comes first at {gain}, but its interval reaches down to {first.low:.2f}×"
        return f"{unsure}: nothing here is clearly faster than plain decoding (ar)."
    kept = "output" if report.results.config.sampling.greedy else "distribution"
    conclusion = (
        f"{name} is the fastest that keeps the target's {kept}: {gain} plain decoding (ar)."
    )
    close = ", ".join(result.spec.written for result in as_fast_as(report.methods, first))
    if close:
        conclusion += f" Too close to call: {close}."
    return conclusion


def _too_short(result: MethodResult) -> str:
    """Returns a sentence that says why so short a measurement does not tell the fastest method."""
    measured = (
        f"{counted(result.prompts, 'prompt')} and {counted(result.summary.new_tokens, 'token')}"
    )
    return (
        f"{measured} are too few to tell the fastest method: at least {LEAST_PROMPTS} and "
        f"{LEAST_TOKENS} are needed."
    )


def _differences(report: Report) -> list[Text]:
    """Returns sentences on outputs that differ from plain greedy decoding: one for each broken
    method, whose difference rounding does not explain, then one for each tie (a position where two
    tokens have equal logits up to rounding), which names all methods that differ there, then one
    for each baseline that may differ."""

    def sentence(difference: Difference, names: Iterable[str], style: str) -> Text:
        prompt = report.results.label(difference.prompt_index)
        return Text(difference.explanation(", ".join(names), prompt), style)

    broken = [
        sentence(result.broken, [result.spec.written], "bad")
        for result in report.methods
        if result.broken
    ]

    differences_by_tie: dict[tuple[int, int], dict[str, Difference]] = {}
    for result in ranked(report.methods):
        for difference in result.differences or ():
            if not difference.is_broken:
                tie = (difference.prompt_index, difference.position)
                differences_by_tie.setdefault(tie, {})[result.spec.written] = difference
    ties = []
    for by_method in differences_by_tie.values():
        ties.append(sentence(next(iter(by_method.values())), by_method, "quiet"))
    more = len(ties) - MOST_EXPLAINED
    if more > 0:
        ties[MOST_EXPLAINED:] = [Text(f"{counted(more, 'more tie')}: see --json.", "quiet")]
    others = [
        Text(
            f"{result.name}: it computes otherwise than the target, and so may give other tokens.",
            "quiet",
        )
        for result in report.methods
        if result.diverged and not result.broken
    ]
    return broken + ties + others


def _tuned(report: Report) -> list[Text]:
    """Returns a sentence that says on how many of the prompts `specgen tune` chose the settings;
    none without such settings."""
    config = report.results.config
    tuned = {
        result.spec.written: config.tuned_on(result.spec)
        for result in ranked(report.methods)
        if result.prompts
    }
    counts = {name: count for name, count in tuned.items() if count is not None}
    if not counts:
        return []
    most = max(counts.values())
    sentence = (
        f"specgen tune chose the settings of {', '.join(counts)} on {most} of these "
        f"{len(config.prompts)} prompts"
    )
    if not most:
        return [Text(f"{sentence}.", "quiet")]
    return [Text(f"{sentence}: on other prompts they may be less good.", "strong")]


# tables


def speed_table(
    results: Sequence[MethodResult],
    width: int,
    *,
    by_category: bool = False,
    with_settings: bool = True,
) -> tuple[list[Text], bool]:
    """Returns the table of speeds, and whether it has all columns (but for the settings, which need
    a very wide terminal).

    Its lines have at most `width` cells, unless a method's name alone is longer. Columns with the
    highest `priority` are left out first, and columns of priority 0 never. With `by_category` each
    method also has a line per category of prompts.
    """
    shown = ranked_rows(results, by_category=by_category)
    top = best(results)
    speeds_last = sorted(shown_columns(shown), key=lambda column: column.is_speed)
    columns = [_NAME, _OUTPUT, *speeds_last, _BAR]
    kept = [*columns, _SETTINGS] if with_settings else columns
    lines = _table(shown, kept, top, SHORTEST_BAR)
    while _widest(lines) > width and any(column.priority for column in kept):
        first = max(kept, key=lambda column: column.priority)
        kept = [column for column in kept if column is not first]
        lines = _table(shown, kept, top, SHORTEST_BAR)
    room = max(width - _widest(lines), 0)
    lines = _table(shown, kept, top, min(LONGEST_BAR, SHORTEST_BAR + room))

    absent = not_run(results)
    names = [*map(_NAME.text, shown), *(written[0] for written, _ in absent)]
    lead = GAP + max(map(len, names), default=0)
    for written, reason in absent:
        why = Text(reason, "quiet")
        why.highlight_words([NOT_RUN], "strong")
        lines += labelled(Text(", ".join(written)), why, width, lead)
    return lines, len(kept) >= len(columns)


def _widest(lines: Sequence[Text]) -> int:
    return max(line.cell_len for line in lines)


def _table(
    entries: Sequence[MethodResult],
    columns: Sequence[Column],
    top: MethodResult | None,
    bar_length: int,
) -> list[Text]:
    """Returns the lines of the table: the headings, and a line for each entry. `bar_length` is in
    cells."""
    rows = [[Text(column.title.split("\n")[level]) for column in columns] for level in (0, 1)]
    for heading in rows[1]:
        heading.stylize("quiet")
    fastest = max((entry.high or entry.speedup or 0.0 for entry in entries), default=0.0)
    for entry in entries:
        bar = _bar(entry, bar_length, fastest, is_best=entry is top)
        rows.append([bar if column is _BAR else _cell(column, entry, top) for column in columns])
    left = []
    for number, column in enumerate(columns):
        if column.is_interval or column in (_NAME, _OUTPUT, _BAR):
            left.append(number)
    return table(rows, left)


def _cell(column: Column, entry: MethodResult, top: MethodResult | None) -> Text:
    style = "none"
    if entry.category or column.is_interval or (column is _OUTPUT and entry.is_reference):
        style = "quiet"
    if entry is top and (column.is_speed or column is _NAME) and not column.is_interval:
        style = "strong"
    elif column is _OUTPUT and not entry.category and entry.broken:
        style = "bad"
    return Text(column.text(entry), style)


def _bar(entry: MethodResult, cells: int, fastest: float, *, is_best: bool) -> Text:
    """Returns a bar for a method's speedup: thick up to the low end of its interval, thin from
    there to the high end. The speedup `fastest` has the full length of `cells` cells."""
    speedup = entry.speedup or 0.0
    low, high = (speedup if end is None else end for end in (entry.low, entry.high))
    heavy, light = (round(cells * value / (fastest or 1.0)) for value in (low, high))
    style = "bar.best" if is_best else "bar"
    if entry.is_reference or not entry.spec.lossless or entry.category:
        style = "bar.plain"
    return Text("━" * heavy + "─" * (light - heavy), style)


def phases_table(results: Sequence[MethodResult], width: int) -> list[Text]:
    """Returns a table of the time that each method spent in each phase, such as drafting and
    verifying (EESD, Table 8).

    A cell has the seconds and their share of the whole time. If `width` (cells) is too small for
    that, it has the share alone, and if it is still too small, only three phases are shown. The
    cells of transformers' own methods, which report no phases, are empty.
    """
    lines: list[Text] = []
    for with_seconds, phases in ((True, PHASES), (False, PHASES), (False, _MAIN_PHASES)):
        rows = [["method", *phases, "all"]]
        for entry in ranked_rows(results):
            cells = [_phase_cell(entry, phase, with_seconds=with_seconds) for phase in phases]
            rows.append([entry.name, *cells, f"{entry.summary.seconds:.2f} s"])
        unit = ", in seconds and shares" if with_seconds else ""
        lines = [Text(f"Where the time goes{unit}"), Text(), *table(rows)]
        if _widest(lines) <= width:
            break
    return lines


def _phase_cell(entry: MethodResult, phase: str, *, with_seconds: bool) -> str:
    summary = entry.summary
    if summary.unsplit_seconds:
        return ""
    share = f"{summary.share_of_time(phase):.0%}"
    return f"{summary.phase_seconds[phase]:.2f} {share:>4}" if with_seconds else share
