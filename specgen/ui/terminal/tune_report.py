"""How tuning goes and what it found, on stderr. Nothing is drawn while anything is timed, and no thread redraws."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from specgen.tuning.outcome import PLAIN, Candidate, TuningOutcome
from specgen.ui.sanitize import inline
from specgen.ui.terminal.live_table import BAR, duration

_LEAD = 11  # columns before what a line of the verdict says
_PIPED_WIDTH = 100
_OFTEN = 0.2  # seconds between two drawings


class TuneProgress:
    """A context manager: a line with ✓ for each step that is over, and on a terminal a bar with the time that is left."""

    def __init__(self, console: Console, begun: float, budget: float, *, quiet: bool) -> None:
        self._console, self._begun, self._budget, self._quiet = console, begun, budget, quiet
        self._live: Live | None = None
        self._drawn = 0.0
        if not quiet and console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)

    def done(self, what: str, seconds: float) -> None:
        if self._quiet:
            return
        line = Text("✓ ", "good").append(inline(what), "none")
        if self._console.is_terminal and self._console.width - line.cell_len > 8:
            line.append(f"{duration(seconds):>{self._console.width - line.cell_len - 1}}", "quiet")
        else:
            line.append(f"  {duration(seconds)}", "quiet")
        self._console.print(line, soft_wrap=True)

    def doing(self, what: str, seconds_left: float) -> None:
        now = time.perf_counter()
        if self._live is None or now - self._drawn < _OFTEN:
            return
        self._drawn = now
        filled = min(BAR, round(BAR * (now - self._begun) / self._budget))
        tail = Text("  ").append("━" * filled, "bar").append("─" * (BAR - filled), "quiet")
        tail.append(f"  ~{duration(max(0.0, seconds_left))} left")
        line = Text("▸ ").append(inline(what))
        line.truncate(max(self._console.width - tail.cell_len - 1, 2), overflow="ellipsis", pad=True)
        self._live.update(line.append_text(tail), refresh=True)

    def __enter__(self) -> TuneProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.update(Text(), refresh=True)
            self._live.stop()


def report(console: Console, outcome: TuningOutcome, path: Path) -> None:
    width = console.width if console.is_terminal else _PIPED_WIDTH
    for line in (Text(), *_table(outcome, width), Text(), *_verdict(outcome, path, width)):
        console.print(line, soft_wrap=True)


def _table(outcome: TuningOutcome, width: int) -> Iterator[Text]:
    """A row a method: its settings, tokens a second as expected and as measured. Narrow windows lose the settings."""
    rows = [_row(found, outcome) for found in outcome.methods]
    names = max(len(row[0]) for row in rows)
    room = width - names - 2 - 36
    settings = max(len("settings"), *(len(row[1]) for row in rows))
    with_settings = settings <= room
    lead = names + 2 + (settings + 2 if with_settings else 0)
    yield Text(" " * lead + f"{'expected':>8}  {'measured':>8}  {'speedup':>7}", "quiet")
    for found, row in zip(outcome.methods, rows, strict=True):
        line = Text(f"{row[0]:{names}}  ", "strong" if found == outcome.chosen else "none")
        if with_settings:
            line.append(f"{row[1]:{settings}}  ", "quiet")
        yield line.append(f"{row[2]:>8}  {row[3]:>8}  {row[4]:>7}  ", "none").append(row[5], "quiet")


def _row(found: Candidate, outcome: TuningOutcome) -> tuple[str, ...]:
    settings = ", ".join(f"{name} {_number(value)}" for name, value in found.settings.items())
    measured = "" if found.measured is None else f"{found.measured:.1f}"
    speedup = "" if found.speedup is None else f"{found.speedup:.2f}×"
    interval = f"{found.low:.2f}–{found.high:.2f}" if found.low is not None and found.high is not None else ""
    lossy = [] if found.lossless else ["lossy", *([f"perplexity {found.perplexity:.2f}"] if found.perplexity else [])]
    remarks = ", ".join([*([interval] if interval else []), *lossy])
    return found.name, settings, f"{found.predicted:.1f}", measured, speedup, remarks


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _verdict(outcome: TuningOutcome, path: Path, width: int) -> Iterator[Text]:
    best, times = outcome.best, _times(outcome.best, outcome)
    if outcome.verdict == "pays":
        yield Text(f"Speculation pays here: {times} with {best.name}.", "strong")
        yield from _said("best", f"{_named(best)}: {times} plain decoding{_interval(best)}, the same output", width)
        others = [found for found in outcome.methods if found.name not in (PLAIN, best.name) and found.lossless]
        others.sort(key=lambda found: -(found.speedup or found.predicted / outcome.plain.predicted))
        if others:
            said = " · ".join(f"{_named(found)}: {_times(found, outcome)}" for found in others[:3])
            yield from _said("next", said, width)
        yield from _why(outcome, width)
    elif best.name == PLAIN:
        lossy = [found for found in outcome.methods if not found.lossless]
        why = "Nothing that keeps the output was tuned." if lossy else "There is nothing here to speculate with."
        yield Text(f"{why} So generate decodes plainly.", "strong")
        if lossy:
            yield from _said("lossy", " · ".join(f"{_named(found)}: -m {found.name} takes these" for found in lossy), width)
    elif outcome.verdict == "unclear":
        yield Text(f"No clear gain here: {times} at best{_interval(best)}. So generate decodes plainly.", "strong")
        yield from _why(outcome, width)
        yield from _said("would tell", f"more repeats: specgen compare --methods {best.written} --repeats 10", width)
    else:
        yield Text(f"Speculation does not pay here: {times} at best. So generate decodes plainly for this pair.", "strong")
        slower = ", so slower" if (best.speedup or 1) < 1 else ""
        yield from _said("best found", f"{_named(best)}: {times} plain decoding{_interval(best)}{slower}", width)
        yield from _why(outcome, width)
        yield from _said("would help", _help(outcome), width)
    for reason, names in _by_reason(outcome).items():
        yield from _said("not tuned", f"{', '.join(names)}: {reason}", width)
    yield from _said("saved", f"{_home(path.parent)}, used from now on", width)


def _why(outcome: TuningOutcome, width: int) -> Iterator[Text]:
    if outcome.relative_draft_cost is None:
        return
    said = f"a draft token costs {outcome.relative_draft_cost:.2f} of a target pass"
    pays_from = outcome.break_even_acceptance
    said += ": no acceptance makes one pay" if pays_from is None else f": pays from {pays_from:.0%} acceptance"
    if outcome.acceptance is not None:
        said += f", here {outcome.acceptance:.0%}"
    yield from _said("why", said, width)


def _help(outcome: TuningOutcome) -> str:
    ways = []
    needed = outcome.break_even_draft_cost
    if needed is not None and outcome.relative_draft_cost is not None and needed < outcome.relative_draft_cost:
        ways.append(f"a faster draft (under {needed:.2f} of a target pass)")
    pays_from = outcome.break_even_acceptance
    if pays_from is not None and outcome.acceptance is not None and outcome.acceptance < pays_from:
        ways.append(f"one closer to the target (an acceptance above {pays_from:.0%})")
    if outcome.speedup_model is None:
        ways.append("a draft model of the target's family: --draft MODEL")
    return ", or ".join(ways) or "another draft model: a smaller one, or one closer to the target"


def _by_reason(outcome: TuningOutcome) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in outcome.left_out.items():
        found.setdefault(reason, []).append(name)
    return found


def _named(found: Candidate) -> str:
    return ", ".join([found.name, *(f"{name} {_number(value)}" for name, value in found.settings.items())])


def _times(found: Candidate, outcome: TuningOutcome) -> str:
    return f"{found.speedup or found.predicted / outcome.plain.predicted:.2f}×"


def _interval(found: Candidate) -> str:
    if found.speedup is None:
        return " (expected, not measured)"
    return f" (95%: {found.low:.2f}–{found.high:.2f})" if found.low is not None and found.high is not None else ""


def _said(lead: str, what: str, width: int) -> Iterator[Text]:
    lines = Text(inline(what)).wrap(Console(width=width), max(20, min(width, _PIPED_WIDTH) - _LEAD))
    for number, line in enumerate(lines):
        line.rstrip()
        yield Text().append(f"{lead if number == 0 else '':{_LEAD}}", "quiet").append_text(line)


def _home(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
