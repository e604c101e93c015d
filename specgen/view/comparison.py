"""The output of `specgen compare` in the terminal: what was measured, the tables of speeds and
times, and the result in words.

The table of speeds has as many columns as fit, and a bar for each speedup and its confidence
interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from specgen.base.text import counted, one_line
from specgen.base.types import PHASES
from specgen.compare.results import (
    NOT_RUN,
    MethodResult,
    Results,
    as_fast_as,
    best,
    not_run,
    ranked,
    too_few_prompts,
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

# ties (differences that rounding explains) with a sentence of their own; the rest are only counted
MOST_EXPLAINED = 3
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
    """Returns the report as lines of at most `width` cells; longer only where a method's name alone
    is longer."""
    lines, is_whole = headed_table(report, width)
    said = sentences(report)
    if not is_whole:
        said.append(
            Text("A wider terminal shows more columns; --csv FILE has all of them.", "quiet")
        )
    lines.append(Text())
    for sentence in said:
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
    total = len(config.prompts) - len(report.results.skipped)
    prompts = counted(total, "prompt") if measured == total else f"{measured} of {total} prompts"
    repeats = f" × {config.repeats} repeats" if config.repeats > 1 else ""
    limit = ("" if sampling.ignore_eos else "up to ") + counted(sampling.max_new_tokens, "token")
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}"
    how += f", top-p {sampling.top_p:g}" if not sampling.greedy and sampling.top_p < 1 else ""
    how += f", min-p {sampling.min_p:g}" if not sampling.greedy and sampling.min_p else ""
    how += f", top-k {sampling.top_k}" if not sampling.greedy and sampling.top_k > 0 else ""
    return f"{report.where} · {prompts}{repeats} × {limit}, {how}"


# the result in words


def sentences(report: Report) -> list[Text]:
    """Returns the sentences below the table.

    In this order, they name the fastest method and the outputs that differ from plain decoding's,
    explain the table, say on how many of the prompts `specgen tune` chose the settings, and end
    with the report's `notes`.
    """
    conclusion = _conclusion(report)
    top = best(report.methods)
    said = [Text(conclusion)] if conclusion else []
    if said and top is not None:
        said[0].highlight_words([top.spec.written], "strong")
    said += _differences(report)
    remarks = {
        LOSSY: report.measured_lossy,
        (
            "sampled: each run draws other text, so outputs are not compared; at temperature "
            "0 they are."
        ): (not report.results.config.sampling.greedy),
        (
            f"{counted(len(report.results.skipped), 'later turn')} left out: the context had "
            "no room."
        ): report.results.skipped,
        "Predicted speedups, for methods of specgen that draft chains between target "
        "passes: by EESD's formula (Eq. 14) from "
        "acceptance and pass costs, and by the costs of all passes.": any(
            result.predicted for result in report.methods
        ),
    }
    said += [Text(remark, "quiet") for remark, is_made in remarks.items() if is_made]
    said += _tuned(report)
    if report.notes:
        said.append(Text(report.notes, "strong"))
    return said


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
    made, top = report.methods, best(report.methods)
    if top is None or top.speedup is None:
        return ""
    name = top.spec.written
    gain = f"{top.speedup:.2f}×"
    few = too_few_prompts(top)
    caution = f" {few}" if few else ""
    if top.speedup <= 1:
        return (
            f"Nothing here is faster than plain decoding (ar); the best is {name} at "
            f"{gain}.{caution}"
        )
    if top.low is not None and top.low <= 1:
        unsure = f"{name} comes first at {gain}, but its interval reaches down to {top.low:.2f}×"
        return f"{unsure}: nothing here is clearly faster than plain decoding (ar)."
    kept = (
        "the target's output"
        if report.results.config.sampling.greedy
        else "the target's distribution"
    )
    how = (
        f"comes first of the methods that keep {kept}:"
        if few
        else f"is the fastest that keeps {kept}:"
    )
    close = ", ".join(result.spec.written for result in as_fast_as(made, top))
    return f"{name} {how} {gain} plain decoding (ar).{caution}" + (
        f" Too close to call: {close}." if close else ""
    )


def _differences(report: Report) -> list[Text]:
    """Returns sentences on outputs that differ from plain greedy decoding.

    First comes a sentence per broken method: rounding errors do not explain its difference. Then
    comes a sentence per tie (a position where two tokens have equal logits up to rounding), which
    names all methods that differ there.
    """

    def sentence(difference: Difference, names: Sequence[str], style: str) -> Text:
        return Text(
            difference.explanation(", ".join(names), report.results.label(difference.prompt_index)),
            style,
        )

    broken = [
        sentence(result.broken, [result.spec.written], "bad")
        for result in report.methods
        if result.broken
    ]
    found: dict[tuple[int, int], dict[str, Difference]] = {}
    for result in ranked(report.methods):
        for difference in result.differences or ():
            if not difference.is_broken:
                found.setdefault((difference.prompt_index, difference.position), {})[
                    result.spec.written
                ] = difference
    ties = [
        sentence(next(iter(by_method.values())), list(by_method), "quiet")
        for by_method in found.values()
    ]
    more = len(ties) - MOST_EXPLAINED
    if more > 0:
        ties[MOST_EXPLAINED:] = [Text(f"{counted(more, 'more tie')}: see --json.", "quiet")]
    return broken + ties


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
    said = (
        f"specgen tune chose the settings of {', '.join(counts)} on {most} of these "
        f"{len(config.prompts)} prompts"
    )
    return [
        Text(
            f"{said}: on other prompts they may be less good." if most else f"{said}.",
            "strong" if most else "quiet",
        )
    ]


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
    columns = [
        _NAME,
        _OUTPUT,
        *sorted(shown_columns(shown), key=lambda column: column.is_speed),
        _BAR,
    ]
    kept = [*columns, *([_SETTINGS] if with_settings else [])]
    fastest = max((entry.high or entry.speedup or 0.0 for entry in shown), default=0.0)

    def lines(cells: int) -> list[Text]:
        rows = [[Text(column.title.split("\n")[level]) for column in kept] for level in (0, 1)]
        for entry in shown:
            bar = _bar(entry, cells, fastest, is_best=entry is top)
            rows.append([bar if column is _BAR else _cell(column, entry, top) for column in kept])
        for cell in rows[1]:
            cell.stylize("quiet")
        return table(
            rows,
            [
                number
                for number, each in enumerate(kept)
                if each.is_interval or each in (_NAME, _OUTPUT, _BAR)
            ],
        )

    while (room := width - max(line.cell_len for line in lines(SHORTEST_BAR))) < 0 and any(
        each.priority for each in kept
    ):
        first = max(kept, key=lambda column: column.priority)
        kept = [each for each in kept if each is not first]
    made = lines(min(LONGEST_BAR, SHORTEST_BAR + max(room, 0)))
    absent = not_run(results)
    lead = GAP + max(
        map(len, [*map(_NAME.text, shown), *(written[0] for written, _ in absent)]), default=0
    )
    for written, reason in absent:
        why = Text(reason, "quiet")
        why.highlight_words([NOT_RUN], "strong")
        made += labelled(Text(", ".join(written)), why, width, lead)
    return made, len(kept) >= len(columns)


def _cell(column: Column, entry: MethodResult, top: MethodResult | None) -> Text:
    style = (
        "quiet"
        if entry.category or column.is_interval or (column is _OUTPUT and entry.is_reference)
        else "none"
    )
    if entry is top and (column.is_speed or column is _NAME) and not column.is_interval:
        style = "strong"
    elif column is _OUTPUT and not entry.category and entry.broken:
        style = "bad"
    return Text(column.text(entry), style)


def _bar(entry: MethodResult, cells: int, fastest: float, *, is_best: bool) -> Text:
    """Returns a bar for a method's speedup, at most `cells` cells long; `fastest` is the speedup at
    its full length.

    The bar is thick up to the low end of the speedup's interval and thin from there to the high
    end.
    """
    speedup = entry.speedup or 0.0
    low, high = (speedup if end is None else end for end in (entry.low, entry.high))
    heavy, light = (round(cells * value / (fastest or 1.0)) for value in (low, high))
    plain = entry.is_reference or not entry.spec.lossless or entry.category
    return Text(
        "━" * heavy + "─" * (light - heavy),
        "bar.plain" if plain else "bar.best" if is_best else "bar",
    )


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
            summary = entry.summary
            taken = (
                (summary.phase_seconds[phase], f"{summary.share_of_time(phase):.0%}")
                for phase in phases
            )
            cells = [
                f"{seconds:.2f} {share:>4}" if with_seconds else share for seconds, share in taken
            ]
            rows.append(
                [
                    entry.name,
                    *("" if summary.unsplit_seconds else cell for cell in cells),
                    f"{summary.seconds:.2f} s",
                ]
            )
        lines = [
            Text(f"Where the time goes{', in seconds and shares' if with_seconds else ''}"),
            Text(),
            *table(rows),
        ]
        if max(line.cell_len for line in lines) <= width:
            break
    return lines
