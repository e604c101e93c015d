"""Shows the result of `specgen tune`."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.text import Text

from specgen.tune.outcome import PLAIN, TuningOutcome
from specgen.view import theme
from specgen.view.theme import column_width, labelled, table, wrapped

_LEAD = 11  # cells for the label before each text below the table
_FIGURES = 38  # cells of the table to the right of the method's name


def report(console: Console, outcome: TuningOutcome, path: Path | None, *, is_default: bool = True) -> None:
    """Prints the result of a tuning. `path` is the profile in which it was saved, None if that failed.

    `is_default`: the profile is in the folder where other commands look for it without `--profile`.
    """
    width = theme.width(console)
    headline, details = _verdict(outcome)
    for reason in dict.fromkeys(outcome.left_out.values()):
        names = ", ".join(name for name, other in outcome.left_out.items() if other == reason)
        details.append(("not tuned", f"{names}: {reason}"))
    if path is not None:
        use = "used from now on" if is_default else f"use it with --profile {shlex.quote(str(path.parent))}"
        details.append(("saved", f"{_home(path.parent)}, {use}"))
    paragraphs = [
        line for lead, text in details for line in labelled(Text(lead, "quiet"), Text(text), min(width, theme.PIPED_WIDTH), _LEAD)
    ]
    for line in (Text(), *_table(outcome, width), Text(), *wrapped(Text(headline, "strong"), width), *paragraphs):
        console.print(line, soft_wrap=True)


def _table(outcome: TuningOutcome, width: int) -> list[Text]:
    """Returns a line per method: its expected and its measured tokens per second, and its speedup over plain decoding.

    If a method's name with its settings is too long for `width` cells, the settings are left out. Remarks that do not fit
    follow on lines of their own.
    """
    rows: list[list[str | Text]] = [["", "expected", "measured", "speedup"]]
    remarks = [""]
    for method in outcome.methods:
        name = method.written if len(method.written) <= width - _FIGURES else method.name
        measured = "" if method.measured is None else f"{method.measured:.1f}"
        speedup = "" if method.speedup is None else f"{method.speedup:.2f}×"
        label = Text(name, "strong" if method == outcome.chosen else "none")
        rows.append([label, f"{method.predicted:.1f}", measured, speedup])
        said = [] if method.low is None or method.high is None else [f"{method.low:.2f}–{method.high:.2f}"]
        said += [] if method.lossless else ["lossy"]
        said += [f"perplexity {method.perplexity:.2f}"] if method.perplexity else []
        remarks.append(", ".join(said))
    lines: list[Text] = []
    tabled = table(rows)
    size = column_width(tabled)
    for line, remark in zip(tabled, remarks, strict=True):
        fits = size + len(remark) + 2 <= width
        beside = Text(f"  {remark}", "quiet")
        lines += [Text.assemble(line, " " * (size - line.cell_len), beside)] if fits and remark else [line]
        lines += [beside] if remark and not fits else []
    return lines


def _verdict(outcome: TuningOutcome) -> tuple[str, list[tuple[str, str]]]:
    """Returns the result of a tuning: a headline, and (label, text) pairs that explain it, such as ("next", "svip: 1.40×")."""
    best, speedup = outcome.best, f"{outcome.speedup_of(outcome.best):.2f}×"
    if best.name == PLAIN:
        lossy = [f"{method.written}: -m {method.name} uses these settings" for method in outcome.methods if not method.lossless]
        reason = "No method that keeps the output was tuned." if lossy else "No method here can speculate."
        return f"{reason} So generate decodes plainly.", [("lossy", " · ".join(lossy))] if lossy else []
    interval = f" (95%: {best.low:.2f}–{best.high:.2f})" if best.low is not None and best.high is not None else ""
    best_line = f"{best.written}: {speedup} plain decoding{interval}"
    if outcome.verdict == "unconfirmed":
        use = "generate decodes plainly" if outcome.chosen.name == PLAIN else f"generate uses {best.name}"
        headline = f"Not confirmed by real runs: {speedup} expected with {best.name}. Until then {use}."
        return headline, [("best found", f"{best_line}, expected"), *_reasons(outcome), ("would help", "a larger --budget")]
    if outcome.verdict == "pays":
        others = [method for method in outcome.methods if method.name not in (PLAIN, best.name) and method.lossless]
        others.sort(key=lambda method: -outcome.speedup_of(method))
        rest = " · ".join(f"{method.written}: {outcome.speedup_of(method):.2f}×" for method in others[:3])
        details = [("best", f"{best_line}, the same output"), *([("next", rest)] if rest else []), *_reasons(outcome)]
        return f"Speculation pays here: {speedup} with {best.name}.", details
    if outcome.verdict == "unclear":
        headline = f"No clear gain here: {speedup} at best{interval}. So generate decodes plainly."
        return headline, [*_reasons(outcome), ("would tell", f"specgen compare --methods {best.written} --repeats 10")]
    headline = f"Speculation does not pay here: {speedup} at best. So generate decodes plainly for this pair."
    return headline, [("best found", best_line), *_reasons(outcome), ("would help", _help(outcome))]


def _reasons(outcome: TuningOutcome) -> list[tuple[str, str]]:
    if outcome.speedup_model is None:
        return []
    text = f"a draft token costs {outcome.speedup_model.relative_draft_cost:.2f} of a target pass"
    needed = outcome.speedup_model.break_even_acceptance(1)
    text += ": no acceptance makes it pay" if needed is None else f": pays from {needed:.0%} acceptance"
    if outcome.acceptance_probability is not None:
        text += f", here {outcome.acceptance_probability:.0%}"
    return [("why", text)]


def _help(outcome: TuningOutcome) -> str:
    model, acceptance, ways = outcome.speedup_model, outcome.acceptance_probability, list[str]()
    if model is None:
        ways.append("a draft model of the target's family: --draft MODEL")
    elif acceptance is not None:
        cost, needed = model.break_even_draft_cost(acceptance), model.break_even_acceptance(1)
        if cost is not None and cost < model.relative_draft_cost:
            ways.append(f"a faster draft (under {cost:.2f} of a target pass)")
        if needed is not None and acceptance < needed:
            ways.append(f"one closer to the target (an acceptance above {needed:.0%})")
    return ", or ".join(ways) or "another draft model: a smaller one, or one closer to the target"


def _home(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
