"""The output of `specgen compare` in the terminal: what was measured, the table, and the result in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.text import Text

from specgen.compare.ranking import as_fast_as, best, ranked, too_few_prompts
from specgen.compare.results import MethodResult, Prediction, Results
from specgen.compare.verdict import Difference
from specgen.view.recorded_methods import LOSSY
from specgen.view.terminal.comparison_table import phases_table, speed_table
from specgen.view.terminal.text_layout import wrapped

MOST_EXPLAINED = 3  # ties (differences that rounding explains) with a sentence of their own; the rest are only counted

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
        return any(result.overall is not None and not result.spec.lossless for result in self.made)


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


def headed_table(report: Report, width: int) -> tuple[list[Text], list[str]]:
    """Returns the headline with the table of speeds, and the keys of the columns that a narrow terminal has no room for."""
    lines, hidden = speed_table(report.made, width, by_category=report.by_category)
    return [*wrapped(Text(headline(report), "quiet"), width), Text(), *lines], hidden


def headline(report: Report) -> str:
    """Returns what was measured, such as `demo pair, cpu float32 · 16 prompts × 3 repeats × 128 tokens, greedy`."""
    config = report.results.config
    sampling = config.sampling
    measured = max((result.overall.prompts for result in report.made if result.overall is not None), default=0)
    total = len(config.prompts) - len(report.results.skipped)
    prompts = f"{total} prompt{'s' * (total != 1)}" if measured == total else f"{measured} of {total} prompts"
    repeats = f" × {config.repeats} repeats" if config.repeats > 1 else ""
    limit = f"{'' if sampling.ignore_eos else 'up to '}{sampling.max_new_tokens} token{'s' * (sampling.max_new_tokens != 1)}"
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
        said.append(Text(f"{count} later turn{'s' * (count > 1)} left out: the context had no room.", "quiet"))
    said += _predictions(report, hidden)
    said += _tuned(report)
    if report.notes:
        said.append(Text(report.notes, "strong"))
    return said


def _conclusion(report: Report) -> Text | None:
    made, greedy = report.made, report.results.config.sampling.greedy
    top = best(made)
    if top is None or top.overall is None or top.speedup is None:
        return None
    name, speedup, low = Text().append(top.spec.written, "strong"), top.speedup, top.overall.low
    few = too_few_prompts(top)
    caution = f" {few}" if few else ""
    if speedup <= 1:
        return Text("Nothing here is faster than plain decoding (ar); the best is ") + name + f" at {speedup:.2f}×.{caution}"
    if low is not None and low <= 1:
        name.append(f" comes first at {speedup:.2f}×, but its interval reaches down to {low:.2f}×: ")
        return name.append("nothing here is clearly faster than plain decoding (ar).")
    is_only = sum(result.overall is not None and result.spec.lossless for result in made) == 2
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
        for difference in result.differences:
            if not difference.is_broken:
                found.setdefault((difference.prompt_index, difference.position), {})[result.spec.written] = difference
    ties = [sentence(next(iter(by_method.values())), list(by_method), "quiet") for by_method in found.values()]
    more = len(ties) - MOST_EXPLAINED
    if more > 0:
        ties[MOST_EXPLAINED:] = [Text(f"{more} more tie{'s' * (more > 1)}: see --json.", "quiet")]
    return broken + ties


def _tuned(report: Report) -> list[Text]:
    """Returns a sentence that says how many of the prompts chose the settings that come from a profile."""
    config = report.results.config
    tuned = {result.spec.written: config.tuned_on(result.spec) for result in ranked(report.made) if result.overall is not None}
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
    predicted = [result for result in ranked(report.made) if result.prediction is not None and result.overall is not None]
    if not predicted:
        return []
    said = [text for key, text in _PREDICTIONS.items() if key not in hidden]
    said = [f"{'; '.join(said)}."] if said else []
    without = [result for result in predicted if result.prediction == Prediction() and not result.is_reference]
    if without:
        names = ", ".join(result.spec.written for result in without)
        said.append(f"No prediction for {names}: only for specgen's own methods that draft chains between target passes.")
    return [Text(sentence, "quiet") for sentence in said]
