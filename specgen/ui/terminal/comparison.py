"""A comparison as a page of the terminal: what was measured, the table, and what it says in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from specgen.compare.predictions import Prediction
from specgen.compare.results import Figures, Results, Row
from specgen.compare.verdict import Difference
from specgen.types import SamplingParams
from specgen.ui.sanitize import inline
from specgen.ui.terminal.comparison_table import best, ordered, phases_table, speed_table

NAMED_TIES = 3  # more are only counted


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs had in common, in words. `seed` is the user's."""

    models: str
    machine: str
    repeats: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class View:
    """What was asked to be shown."""

    by_category: bool = False
    phases: bool = False
    predictions: Mapping[str, Prediction] | None = None
    interrupted: str = ""  # how to go on, where the comparison was broken off
    is_live: bool = False  # not finished: no conclusions yet


def page(results: Results, rows: Sequence[Row], setting: Setting, view: View, width: int) -> list[Text]:
    """The whole of it, line by line, none longer than `width` where names allow."""
    lines = [*_wrapped(Text(headline(results, rows, setting), "quiet"), width), Text()]
    table = speed_table(rows, width, by_category=view.by_category, predictions=view.predictions)
    lines += table.lines
    if view.is_live:
        return lines
    lines.append(Text())
    said = sentences(results, rows)
    if table.is_cut:
        said.append(Text("More columns fit a wider window; all are in --csv FILE.", "quiet"))
    said += remarks(rows, view)
    for sentence in said:
        lines += _wrapped(sentence, width)
    if view.phases:
        lines += [Text(), *phases_table(rows, width)]
    return lines


def remarks(rows: Sequence[Row], view: View) -> list[Text]:
    """What is to be said of predictions, of a broken-off comparison and of energy."""
    said = []
    if view.predictions:
        said.append(Text("Eq. 14: EESD's formula from acceptance and pass costs; by pass costs: all passes added up.", "quiet"))
        known = {name for name, told in view.predictions.items() if (told.formula, told.pass_costs) != (None, None)}
        without = [row for row in ordered(rows) if row.overall is not None and not row.is_baseline]
        names = [inline(row.spec.written) for row in without if row.spec.written not in known]
        if names:
            why = "both take chains, drafted in turn with the target's passes"  # no trees, no PEARL, no rivals
            said.append(Text(f"No prediction for {', '.join(names)}: {why}.", "quiet"))
    if view.interrupted:
        said.append(Text(view.interrupted, "strong"))
    return said


def headline(results: Results, rows: Sequence[Row], setting: Setting) -> str:
    """`demo pair, cpu float32 · 16 prompts × 3 repeats × 128 tokens, greedy`"""
    sampling = setting.sampling
    measured = max((row.overall.prompts for row in rows if row.overall is not None), default=0)
    asked = len(results.prompts) - len(results.skipped)
    prompts = f"{asked} prompt{'s' * (asked != 1)}" if measured == asked else f"{measured} of {asked} prompts"
    repeats = f" × {setting.repeats} repeats" if setting.repeats > 1 else ""
    limit = f"{'' if sampling.ignore_eos else 'up to '}{sampling.max_new_tokens} token{'s' * (sampling.max_new_tokens != 1)}"
    how = "greedy"
    if not sampling.greedy:
        cuts = [f"top-p {sampling.top_p:g}"] * (sampling.top_p < 1) + [f"top-k {sampling.top_k}"] * (sampling.top_k > 0)
        how = ", ".join([f"temperature {sampling.temperature:g}", *cuts])
    return f"{inline(setting.models)}, {setting.machine} · {prompts}{repeats} × {limit}, {how}"


def sentences(results: Results, rows: Sequence[Row]) -> list[Text]:
    """The result in plain words, and whatever needs one: differences, ties, lossy methods, prompts left out."""
    said = [_difference(results, row) for row in rows if row.is_broken]
    conclusion = _conclusion(results, rows)
    if conclusion is not None:
        said.insert(0, conclusion)
    said += _ties(results, rows)
    if any(row.overall is not None and not row.spec.lossless for row in rows):
        said.append(Text("lossy: other text than the target's, by design; not ranked.", "quiet"))
    if not results.greedy:
        said.append(Text("sampled: each run draws other text, so outputs are not compared; at temperature 0 they are.", "quiet"))
    if results.skipped:
        count = len(results.skipped)
        said.append(Text(f"{count} later turn{'s' * (count > 1)} left out: the context had no room.", "quiet"))
    return said


def _conclusion(results: Results, rows: Sequence[Row]) -> Text | None:
    top = best(rows)
    if top is None or top.overall is None or top.overall.speedup is None:
        return None
    name, speedup = Text().append(inline(top.spec.written), "strong"), top.overall.speedup
    if speedup <= 1:
        return (
            Text("Nothing here is faster than plain decoding (ar); the best is ").append_text(name).append(f" at {speedup:.2f}×.")
        )
    if top.overall.low is not None and top.overall.low <= 1:
        name.append(f" comes first at {speedup:.2f}×, but its interval reaches down to {top.overall.low:.2f}×: ")
        return name.append("nothing here is clearly faster than plain decoding (ar).")
    alone = sum(row.overall is not None and row.spec.lossless for row in rows) == 2
    keeps = "keeps the target's output" if results.greedy else "keeps the target's distribution"
    lead = f" {keeps} at" if alone else f" is the fastest that {keeps}:"
    name.append(f"{lead} {speedup:.2f}× plain decoding (ar).")
    close = [inline(row.spec.written) for row in ordered(rows) if _overlaps(row, top)]
    if close:
        name.append(f" Too close to call: {', '.join(close)}.")
    return name


def _overlaps(row: Row, top: Row) -> bool:
    """Whether a method's interval reaches the best one's speedup."""
    if row is top or row.is_baseline or row.is_broken or not row.spec.lossless or row.overall is None or top.overall is None:
        return False
    return row.overall.high is not None and top.overall.speedup is not None and row.overall.high >= top.overall.speedup


def _difference(results: Results, row: Row) -> Text:
    difference = next(difference for difference in row.differences if not difference.is_tie)
    return Text(difference_in_words(results, row, difference), "bad")


def difference_in_words(results: Results, row: Row, difference: Difference) -> str:
    """Where a method left plain decoding's output, and how sure that is."""
    where = f"{inline(row.spec.written)} differs from plain decoding at {difference.position} of {_label(results, difference)}"
    if difference.gap is None:
        return f"{where}: one answer ends there, and the other goes on."
    side = "lower" if difference.gap > 0 else "higher"
    return (
        f"{where}: the target scores its token {abs(difference.gap):.3g} {side} than ar's, "
        f"and rounding explains {difference.threshold:.3g} at most."
    )


def _label(results: Results, difference: Difference) -> str:
    return inline(next(prompt.label for prompt in results.prompts if prompt.index == difference.prompt_index))


def _ties(results: Results, rows: Sequence[Row]) -> list[Text]:
    """One sentence a tie, the same tie of several methods or repeats told once."""
    told: dict[tuple[int, int], tuple[Difference, list[str]]] = {}
    for row in ordered(rows):
        for difference in row.differences:
            if difference.is_tie:
                names = told.setdefault((difference.prompt_index, difference.position), (difference, []))[1]
                if row.spec.written not in names:
                    names.append(row.spec.written)
    said = [
        Text(
            f"tie at {difference.position} of {_label(results, difference)} ({inline(', '.join(names))}): "
            f"the two tokens' logits are {abs(difference.gap or 0):.2g} apart; rounding explains {difference.threshold:.2g}.",
            "quiet",
        )
        for difference, names in told.values()
    ]
    more = len(said) - NAMED_TIES
    return said if more <= 0 else [*said[:NAMED_TIES], Text(f"{more} more tie{'s' * (more > 1)}: see --json.", "quiet")]


def _wrapped(text: Text, width: int) -> list[Text]:
    from rich.console import Console

    lines = list(text.wrap(Console(width=width), width))
    for line in lines:
        line.rstrip()
    return lines


CSV_COLUMNS = (
    "method",
    "category",
    "lossless",
    "prompts",
    "identical",
    "tied",
    "diverged",
    "acceptance_rate",
    "draft_share",
    "harmonic_mean",
    "block_efficiency",
    "mean_draft_length",
    "target_passes",
    "rounds",
    "drafted",
    "accepted",
    "new_tokens",
    "seconds",
    "tokens_per_second",
    "speedup",
    "speedup_low",
    "speedup_high",
    "perplexity",
    "joules_per_token",
    "prefill_seconds",
    "draft_seconds",
    "verify_seconds",
    "sample_seconds",
    "other_seconds",
    "predicted_eq14",
    "predicted_pass_costs",
    "error",
)


def csv_text(rows: Sequence[Row], *, by_category: bool, predictions: Mapping[str, Prediction] | None) -> str:
    """All figures, a line a method, and with `by_category` one for each of its categories; an empty one means all prompts."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        told = row.as_dict()
        prediction = (predictions or {}).get(row.spec.written)
        more = {} if prediction is None else {"predicted_eq14": prediction.formula, "predicted_pass_costs": prediction.pass_costs}
        writer.writerow({**told, **_phase_columns(row.overall), **more, "category": ""})
        for category, figures in (row.by_category if by_category else {}).items():
            own = {"method": row.spec.written, "lossless": row.spec.lossless, "category": category}
            writer.writerow({**figures.as_dict(), **_phase_columns(figures), **own})
    return out.getvalue()


def _phase_columns(figures: Figures | None) -> dict[str, float]:
    if figures is None or figures.summary.unsplit_seconds:
        return {}
    return {f"{phase}_seconds": seconds for phase, seconds in figures.summary.phase_seconds.items()}
