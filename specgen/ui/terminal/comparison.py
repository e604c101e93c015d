"""A comparison as lines for the terminal: its conditions, the table, and the result in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from specgen.compare.ranking import as_fast_as, best, ranked
from specgen.compare.results import MethodResult, Prediction, Results
from specgen.compare.verdict import Difference
from specgen.types import SamplingParams
from specgen.ui.sanitize import inline
from specgen.ui.terminal.comparison_table import phases_table, speed_table
from specgen.ui.terminal.text_layout import wrapped

MOST_EXPLAINED = 3  # further ties are only counted


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all runs had in common, the models and the machine in words."""

    models: str
    machine: str
    repeats: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class View:
    """What to show. `notes` is a last sentence; a live view has no conclusions yet."""

    by_category: bool = False
    phases: bool = False
    notes: str = ""
    is_live: bool = False


def page(results: Results, made: Sequence[MethodResult], conditions: Conditions, view: View, width: int) -> list[Text]:
    """The whole comparison in lines of at most `width` cells where names allow."""
    lines = [*wrapped(Text(headline(results, made, conditions), "quiet"), width), Text()]
    table = speed_table(made, width, by_category=view.by_category)
    lines += table.lines
    if view.is_live:
        return lines
    lines.append(Text())
    said = sentences(results, made)
    if table.is_cut:
        said.append(Text("A wider terminal shows more columns; --csv FILE has all of them.", "quiet"))
    for sentence in [*said, *remarks(made, view)]:
        lines += wrapped(sentence, width)
    if view.phases:
        lines += [Text(), *phases_table(made, width)]
    return lines


def headline(results: Results, made: Sequence[MethodResult], conditions: Conditions) -> str:
    """`demo pair, cpu float32 · 16 prompts × 3 repeats × 128 tokens, greedy`"""
    sampling = conditions.sampling
    measured = max((result.overall.prompts for result in made if result.overall is not None), default=0)
    total = len(results.prompts) - len(results.skipped)
    prompts = f"{total} prompt{'s' * (total != 1)}" if measured == total else f"{measured} of {total} prompts"
    repeats = f" × {conditions.repeats} repeats" if conditions.repeats > 1 else ""
    limit = f"{'' if sampling.ignore_eos else 'up to '}{sampling.max_new_tokens} token{'s' * (sampling.max_new_tokens != 1)}"
    how = "greedy"
    if not sampling.greedy:
        cuts = [f"top-p {sampling.top_p:g}"] * (sampling.top_p < 1) + [f"top-k {sampling.top_k}"] * (sampling.top_k > 0)
        how = ", ".join([f"temperature {sampling.temperature:g}", *cuts])
    return f"{inline(conditions.models)}, {conditions.machine} · {prompts}{repeats} × {limit}, {how}"


def sentences(results: Results, made: Sequence[MethodResult]) -> list[Text]:
    """The result in words, then differences, ties, lossy methods and prompts that were left out."""
    conclusion = _conclusion(results, made)
    said = [] if conclusion is None else [conclusion]
    said += _differences(results, made)
    if any(result.overall is not None and not result.spec.lossless for result in made):
        said.append(Text("lossy: other text than the target's, by design; not ranked.", "quiet"))
    if not results.greedy:
        said.append(Text("sampled: each run draws other text, so outputs are not compared; at temperature 0 they are.", "quiet"))
    if results.skipped:
        count = len(results.skipped)
        said.append(Text(f"{count} later turn{'s' * (count > 1)} left out: the context had no room.", "quiet"))
    return said


def _conclusion(results: Results, made: Sequence[MethodResult]) -> Text | None:
    top = best(made)
    if top is None or top.overall is None or top.speedup is None:
        return None
    name, speedup, low = Text().append(inline(top.spec.written), "strong"), top.speedup, top.overall.low
    if speedup <= 1:
        return Text("Nothing here is faster than plain decoding (ar); the best is ") + name + f" at {speedup:.2f}×."
    if low is not None and low <= 1:
        name.append(f" comes first at {speedup:.2f}×, but its interval reaches down to {low:.2f}×: ")
        return name.append("nothing here is clearly faster than plain decoding (ar).")
    is_only = sum(result.overall is not None and result.spec.lossless for result in made) == 2
    keeps = "keeps the target's output" if results.greedy else "keeps the target's distribution"
    name.append(f" {keeps} at" if is_only else f" is the fastest that {keeps}:").append(f" {speedup:.2f}× plain decoding (ar).")
    close = [inline(result.spec.written) for result in as_fast_as(made, top)]
    return name.append(f" Too close to call: {', '.join(close)}." if close else "")


def _differences(results: Results, made: Sequence[MethodResult]) -> list[Text]:
    """A sentence for each broken method, then one for each tie, with all methods that have it."""

    def sentence(difference: Difference, names: Sequence[str], style: str) -> Text:
        return Text(inline(difference.explanation(", ".join(names), results.label(difference.prompt_index))), style)

    broken = [sentence(result.broken, [result.spec.written], "bad") for result in made if result.broken]
    found: dict[tuple[int, int], tuple[Difference, dict[str, None]]] = {}
    for result in ranked(made):
        for difference in result.differences:
            if not difference.outcome.is_broken:
                _, names = found.setdefault((difference.prompt_index, difference.position), (difference, {}))
                names[result.spec.written] = None
    ties = [sentence(difference, list(names), "quiet") for difference, names in found.values()]
    more = len(ties) - MOST_EXPLAINED
    if more > 0:
        ties[MOST_EXPLAINED:] = [Text(f"{more} more tie{'s' * (more > 1)}: see --json.", "quiet")]
    return broken + ties


def remarks(made: Sequence[MethodResult], view: View) -> list[Text]:
    """Sentences on predictions, then the view's notes."""
    said = []
    predicted = [result for result in ranked(made) if result.prediction is not None and result.overall is not None]
    if predicted:
        said.append(Text("Eq. 14: EESD's formula from acceptance and pass costs; by pass costs: all passes added up.", "quiet"))
        without = [result for result in predicted if result.prediction == Prediction() and not result.is_reference]
        if without:
            names = [inline(result.spec.written) for result in without]
            why = "both take chains, drafted in turn with the target's passes"  # no trees, PEARL or transformers
            said.append(Text(f"No prediction for {', '.join(names)}: {why}.", "quiet"))
    if view.notes:
        said.append(Text(view.notes, "strong"))
    return said
