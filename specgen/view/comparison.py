"""The output of `specgen compare` in the terminal: what was measured, the tables of speeds and times, and the result in words.

The table of speeds has as many columns as fit, and a bar for each speedup and its confidence interval.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.text import Text

from specgen.base.text import one_line
from specgen.base.types import PHASES
from specgen.compare.columns import Column, output_text, ranked_rows, shown_columns
from specgen.compare.results import NOT_RUN, MethodResult, Results, as_fast_as, best, not_run, ranked, too_few_prompts
from specgen.compare.verdict import Difference
from specgen.view.progress import Progress
from specgen.view.theme import GAP, PIPED_WIDTH, column_width, counted, labelled, svg, table, wrapped
from specgen.view.trace_report import LOSSY

if TYPE_CHECKING:
    from specgen.compare.runner import BenchmarkStep

MOST_EXPLAINED = 3  # ties (differences that rounding explains) with a sentence of their own; the rest are only counted

LONGEST_BAR, SHORTEST_BAR = 24, 6
WIDEST_NAME = 0.45  # of the terminal's width; longer names get a line of their own
_NAME = Column("name", "\nmethod", value=lambda row: "  " * bool(row.category) + one_line(row.name))
_OUTPUT = Column("output", "\noutput", value=output_text)
_BAR = Column("bar", "\n", priority=5, value=lambda row: None)
_MAIN_PHASES = ("draft", "verify", "sample")  # of a narrow table of times
_PREDICTIONS = {
    "predicted_eq14": "Eq. 14: EESD's formula from acceptance and pass costs",
    "predicted_pass_costs": "by pass costs: all passes added up",
}


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison of decoding methods, and how to show it.

    `results` has what was measured; `made` has the same summed up for each method. `where` names the models, the device and the
    dtype. `by_category` adds lines per category of prompts, `phases` a table of times. `notes` is a last sentence or empty.
    """

    results: Results
    made: Sequence[MethodResult]
    where: str
    by_category: bool = False
    phases: bool = False
    notes: str = ""

    @property
    def measured_lossy(self) -> bool:
        return any(result.prompts and not result.spec.lossless for result in self.made)


def page(report: Report, width: int) -> list[Text]:
    """Returns the whole output. Its lines have at most `width` cells, unless a method's name alone is longer."""
    lines, hidden = headed_table(report, width)
    said = sentences(report, hidden)
    if hidden:
        said.append(Text("A wider terminal shows more columns; --csv FILE has all of them.", "quiet"))
    lines.append(Text())
    for sentence in said:
        lines += wrapped(sentence, width)
    if report.phases:
        lines += [Text(), *phases_table(report.made, width)]
    return lines


def picture(report: Report) -> str:
    """Returns the whole output as an SVG picture, as wide as the table of speeds with all its columns."""
    full = speed_table(report.made, 1000, by_category=report.by_category)[0]
    width = max(PIPED_WIDTH, column_width(full))
    return svg(page(report, width), width)


def show_step(progress: Progress, report: Report, step: BenchmarkStep) -> None:
    """Shows the table of a comparison that is still running, cut to the console's height, with a line of progress below it.

    The line is such as `▸ svip, prompt 3 (code-retry)  ━━━━━━  5 of 48 runs  ~9 s left`.
    """
    console, name = progress.console, "" if step.spec is None else step.spec.written
    if step.prompt is not None:
        name = f"warming up {name}" if step.warming_up else f"{name}, {step.prompt.label}"
    lines = headed_table(report, console.width)[0][: max(console.height - 3, 2)]
    left = step.seconds_left if step.done < step.total else None
    share = step.done / step.total if step.total else 1.0
    progress.bar(name, share, f"{step.done} of {counted(step.total, 'run')}", left, [*lines, Text()])


def headed_table(report: Report, width: int) -> tuple[list[Text], list[str]]:
    """Returns the headline with the table of speeds, and the keys of the columns that a narrow terminal has no room for."""
    lines, hidden = speed_table(report.made, width, by_category=report.by_category)
    return [*wrapped(Text(headline(report), "quiet"), width), Text(), *lines], hidden


def headline(report: Report) -> str:
    """Returns what was measured, such as `demo pair, cpu float32 · 16 prompts × 3 repeats × 128 tokens, greedy`."""
    config = report.results.config
    sampling = config.sampling
    measured = max((result.prompts for result in report.made), default=0)
    total = len(config.prompts) - len(report.results.skipped)
    prompts = counted(total, "prompt") if measured == total else f"{measured} of {total} prompts"
    repeats = f" × {config.repeats} repeats" if config.repeats > 1 else ""
    limit = ("" if sampling.ignore_eos else "up to ") + counted(sampling.max_new_tokens, "token")
    how = "greedy"
    if not sampling.greedy:
        cuts = [f"top-p {sampling.top_p:g}"] * (sampling.top_p < 1) + [f"top-k {sampling.top_k}"] * (sampling.top_k > 0)
        how = ", ".join([f"temperature {sampling.temperature:g}", *cuts])
    return f"{report.where} · {prompts}{repeats} × {limit}, {how}"


def sentences(report: Report, hidden: Collection[str] = ()) -> list[Text]:
    """Returns the sentences below the table, in this order.

    The fastest method; the outputs that differ from plain decoding's; remarks on the table; which prompts chose the settings; the
    report's `notes`. Columns whose keys are in `hidden` are not explained.
    """
    conclusion = _conclusion(report)
    said = [] if conclusion is None else [conclusion]
    said += _differences(report)
    if report.measured_lossy:
        said.append(Text(LOSSY, "quiet"))
    if not report.results.config.sampling.greedy:
        said.append(Text("sampled: each run draws other text, so outputs are not compared; at temperature 0 they are.", "quiet"))
    if count := len(report.results.skipped):
        said.append(Text(f"{counted(count, 'later turn')} left out: the context had no room.", "quiet"))
    said += _predictions(report, hidden)
    said += _tuned(report)
    if report.notes:
        said.append(Text(report.notes, "strong"))
    return said


def verdict(report: Report) -> str:
    """Returns the page's headline: the result in words, or that a method which should be lossless gave other output."""
    broken = [result.spec.written for result in report.made if result.broken]
    if broken:
        return f"{broken[0]} does not give the target's own output"
    found = _conclusion(report)
    return "Nothing to compare with plain decoding" if found is None else found.plain.removesuffix(".")


def _conclusion(report: Report) -> Text | None:
    made, greedy = report.made, report.results.config.sampling.greedy
    top = best(made)
    if top is None or top.speedup is None:
        return None
    name, speedup, low = Text().append(top.spec.written, "strong"), top.speedup, top.low
    few = too_few_prompts(top)
    caution = f" {few}" if few else ""
    if speedup <= 1:
        return Text("Nothing here is faster than plain decoding (ar); the best is ") + name + f" at {speedup:.2f}×.{caution}"
    if low is not None and low <= 1:
        name.append(f" comes first at {speedup:.2f}×, but its interval reaches down to {low:.2f}×: ")
        return name.append("nothing here is clearly faster than plain decoding (ar).")
    is_only = sum(result.prompts > 0 and result.spec.lossless for result in made) == 2
    kept = "the target's output" if greedy else "the target's distribution"
    first = f" comes first of the methods that keep {kept}:" if few else f" is the fastest that keeps {kept}:"
    name.append(f" keeps {kept} at" if is_only else first).append(f" {speedup:.2f}× plain decoding (ar).{caution}")
    close = [result.spec.written for result in as_fast_as(made, top)]
    return name.append(f" Too close to call: {', '.join(close)}." if close else "")


def _differences(report: Report) -> list[Text]:
    """Returns sentences on outputs that differ from plain greedy decoding.

    First comes a sentence per broken method: rounding errors do not explain its difference. Then comes a sentence per tie (a
    position where two tokens have equal logits up to rounding), which names all methods that differ there.
    """

    def sentence(difference: Difference, names: Sequence[str], style: str) -> Text:
        return Text(difference.explanation(", ".join(names), report.results.label(difference.prompt_index)), style)

    broken = [sentence(result.broken, [result.spec.written], "bad") for result in report.made if result.broken]
    found: dict[tuple[int, int], dict[str, Difference]] = {}
    for result in ranked(report.made):
        for difference in result.differences or ():
            if not difference.is_broken:
                found.setdefault((difference.prompt_index, difference.position), {})[result.spec.written] = difference
    ties = [sentence(next(iter(by_method.values())), list(by_method), "quiet") for by_method in found.values()]
    more = len(ties) - MOST_EXPLAINED
    if more > 0:
        ties[MOST_EXPLAINED:] = [Text(f"{counted(more, 'more tie')}: see --json.", "quiet")]
    return broken + ties


def _tuned(report: Report) -> list[Text]:
    """Returns a sentence that says how many of the prompts chose the settings that come from a profile."""
    config = report.results.config
    tuned = {result.spec.written: config.tuned_on(result.spec) for result in ranked(report.made) if result.prompts}
    names = [name for name, count in tuned.items() if count is not None]
    if not names:
        return []
    count, total = max(count for count in tuned.values() if count is not None), len(config.prompts)
    settings = f"the settings of {', '.join(names)} (specgen tune)"
    if count:
        return [Text(f"{count} of {total} prompts chose {settings}: on other prompts they may be less good.", "strong")]
    return [Text(f"None of these prompts chose {settings}.", "quiet")]


def _predictions(report: Report, hidden: Collection[str]) -> list[Text]:
    """Returns sentences that say how the predicted speedups were computed, and which methods have no prediction."""
    predicted = [result for result in ranked(report.made) if result.predicted is not None and result.prompts]
    if not predicted:
        return []
    said = [text for key, text in _PREDICTIONS.items() if key not in hidden]
    said = [f"{'; '.join(said)}."] if said else []
    without = [result for result in predicted if not any((result.predicted or {}).values()) and not result.is_reference]
    if without:
        names = ", ".join(result.spec.written for result in without)
        said.append(f"No prediction for {names}: only for specgen's own methods that draft chains between target passes.")
    return [Text(sentence, "quiet") for sentence in said]


def speed_table(results: Sequence[MethodResult], width: int, *, by_category: bool = False) -> tuple[list[Text], list[str]]:
    """Returns the table of speeds, and the keys of the columns that were left out because the terminal is narrow.

    Its lines have at most `width` cells, unless a method's name alone is longer. Columns with the highest `priority` are left out
    first, and columns of priority 0 never; names that take much of the width get lines of their own. With `by_category` each
    method also has a line per category of prompts.
    """
    shown, absent, top = ranked_rows(results, by_category=by_category), not_run(results), best(results)
    columns = [_NAME, _OUTPUT, *sorted(shown_columns(shown), key=lambda column: column.is_speed), _BAR]
    longest = column_width([*map(_NAME.text, shown), "method", *(one_line(names[0]) for names, _ in absent if len(names) == 1)])
    fastest = max((entry.high or entry.speedup or 0.0 for entry in shown), default=0.0)

    def lines(kept: Sequence[Column], cells: int) -> list[Text]:
        rows = [[Text(column.title.split("\n")[level], "quiet") for column in kept] for level in (0, 1)]
        for entry in shown:
            rows.append([_cell(column, entry, top) for column in kept if column is not _BAR])
            if _BAR in kept:
                rows[-1].append(_bar(entry, cells, fastest, is_best=entry is top))
        for row in rows if _NAME in kept else ():
            row[0].align("left", longest)
        return table(rows, [number for number, each in enumerate(kept) if each.is_interval or each in (_NAME, _OUTPUT, _BAR)])

    for kept in (columns, columns[1:]) if longest <= width * WIDEST_NAME else (columns[1:],):
        indent = 0 if _NAME in kept else GAP
        while (room := width - indent - column_width(lines(kept, SHORTEST_BAR))) < 0 and any(each.priority for each in kept):
            first = max(kept, key=lambda column: column.priority)
            kept = [each for each in kept if each is not first]
        if room >= 0:
            break
    made = lines(kept, min(LONGEST_BAR, SHORTEST_BAR + max(room, 0)))
    if indent:
        own = [Text(), Text(), *(_cell(_NAME, entry, top) for entry in shown)]
        pairs = zip(own, (Text(" " * GAP).append_text(line) for line in made), strict=True)
        made = [each for number, pair in enumerate(pairs) for each in pair[number < 2 :]]
    for written, reason in absent:
        why = Text(reason, "quiet")
        why.highlight_words([NOT_RUN], "strong")
        made += labelled(Text(", ".join(written)), why, width, GAP if indent else longest + GAP)
    return made, [column.key for column in columns if column not in (*kept, _BAR, _NAME)]


def _cell(column: Column, entry: MethodResult, top: MethodResult | None) -> Text:
    style = "quiet" if entry.category or column.is_interval or (column is _OUTPUT and entry.is_reference) else "none"
    if entry is top and (column.is_speed or column is _NAME) and not column.is_interval:
        style = "strong"
    elif column is _OUTPUT and not entry.category and entry.broken:
        style = "bad"
    return Text(column.text(entry), style)


def _bar(entry: MethodResult, cells: int, fastest: float, *, is_best: bool) -> Text:
    """Returns a bar for a method's speedup, at most `cells` cells long; `fastest` is the speedup at its full length.

    The bar is thick up to the low end of the speedup's interval and thin from there to the high end.
    """
    speedup = entry.speedup or 0.0
    low, high = (speedup if end is None else end for end in (entry.low, entry.high))
    heavy, light = (round(2 * cells * value / (fastest or 1.0)) for value in (low, high))
    halves = "H" * heavy + "L" * (light - heavy)
    glyphs = {"HH": "━", "HL": "╾", "H": "╸", "LL": "─", "L": "╴"}
    drawn = "".join(glyphs[left + right] for left, right in zip_longest(halves[::2], halves[1::2], fillvalue=""))
    plain = entry.is_reference or not entry.spec.lossless or entry.category
    return Text(drawn, "bar.plain" if plain else "bar.best" if is_best else "bar")


def phases_table(results: Sequence[MethodResult], width: int) -> list[Text]:
    """Returns a table of the time that each method spent in each phase, such as drafting and verifying (EESD, Table 8).

    Cells have seconds and the share of the whole time, or the share alone where `width` is small, and fewer phases where it is
    smaller. transformers reports no phases. Names that take much of the width get lines of their own.
    """
    shown = ranked_rows(results)
    for with_seconds, phases in ((True, PHASES), (False, PHASES), (False, _MAIN_PHASES)):
        rows: list[list[str | Text]] = [[*phases, "all"]]
        for entry in shown:
            summary = entry.summary
            taken = ((summary.phase_seconds[phase], f"{summary.share_of_time(phase):.0%}") for phase in phases)
            cells = [f"{seconds:.2f} {share:>4}" if with_seconds else share for seconds, share in taken]
            rows.append([*("" if summary.unsplit_seconds else cell for cell in cells), f"{summary.seconds:.2f} s"])
        named = table([[name, *row] for name, row in zip(["method", *(entry.name for entry in shown)], rows, strict=True)])
        lines = table(rows, ())
        if column_width(named) <= width:
            lines = named
            break
        lines = [lines[0], *(each for entry, line in zip(shown, lines[1:], strict=True) for each in (Text(entry.name), line))]
        if column_width(lines) <= width:
            break
    return [Text(f"Where the time goes{', in seconds and shares' * with_seconds}"), Text(), *lines]
