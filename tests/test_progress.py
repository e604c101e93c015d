"""The progress line: drawn in place on a terminal, nothing elsewhere; what each command shows on it."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from comparisons import report_of, usual

from specgen.compare.method_specs import parse_spec
from specgen.compare.prompts import Prompt
from specgen.compare.runner import BenchmarkStep
from specgen.train.task import TrainingProgress
from specgen.view import theme
from specgen.view.comparison import show_step
from specgen.view.progress import Progress, TrainingLine, TuneProgress, bar_line, duration


class Screen:
    """A progress line on a console, and what was written since the last look, without colours."""

    def __init__(self, *, terminal: bool = True, quiet: bool = False, width: int = 80, height: int = 24) -> None:
        self.file = io.StringIO()
        size = {"width": width, "height": height}
        self.progress = Progress(theme.console(file=self.file, force_terminal=terminal, no_color=True, **size), quiet=quiet)

    @property
    def written(self) -> str:
        text = self.file.getvalue()
        self.file.truncate(self.file.seek(0))
        return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_lines_are_drawn_in_place_and_erased_at_the_end() -> None:
    screen = Screen()
    with screen.progress as line:
        line.announce("loading a\x1b[2Jmodel")
        assert screen.written == "\x1b7\x1b[?7l\x1b[J▸ loading a␛[2Jmodel\x1b[?7h\x1b8"
        line.announce("downloading")  # which has a bar of its own
        assert screen.written == "\x1b[J"
        line.bar("training", 0.5, "step 3", 100.0)
        assert "━━━━━━━━━━──────────  step 3  ~2 min left" in screen.written
        line.keep(theme.Text("done"))
        assert screen.written == "\x1b[Jdone\n"
        line.bar("training", 0.5, "")
    assert screen.written.endswith("\x1b[J")


def test_several_lines_scroll_the_terminal_before_the_cursor_is_saved() -> None:
    screen = Screen(height=7)
    step = BenchmarkStep(parse_spec("sd:k=8"), Prompt(3, "x", "code", "a-name"), False, 5, 48, 83.0)
    show_step(screen.progress, report_of(usual()), step)
    text = screen.written
    assert text.startswith("\n" * 5 + "\x1b[5A\x1b7"), "four lines of the table, a blank one, the bar"
    assert "demo pair, cpu float32" in text
    assert re.search(r"▸ sd:k=8, prompt 3 \(a-name\) +━━──.*  5 of 48 runs  ~83 s left", text)
    show_step(screen.progress, report_of(usual()), BenchmarkStep(step.spec, None, True, 1, 1, 3.0))
    assert "1 of 1 run\x1b" in screen.written, "nothing is left"


@pytest.mark.parametrize("options", [{"terminal": False}, {"quiet": True}])
def test_nothing_is_shown_without_a_terminal_or_with_quiet(options: dict[str, Any]) -> None:
    screen = Screen(**options)
    with screen.progress as line:
        line.announce("loading")
        line.bar("x", 0.5, "y")
        show_step(line, report_of(usual()), BenchmarkStep(None, None, False, 3, 9, 4.0))
    assert screen.written == ""


@pytest.mark.parametrize("width", [100, 60, 40, 20])
def test_a_bar_fits_its_width(width: int) -> None:
    line = bar_line("sd:k=8, prompt 3 (a-long-name-of-a-prompt)", 0.5, "5 of 48 runs", width).plain
    assert len(line) <= width
    assert line.endswith("5 of 48 runs")
    assert ("▸" in line) == (width > 30)
    assert [duration(seconds) for seconds in (9.2, 89, 200, 7500)] == ["9 s", "89 s", "3 min", "2 h 5 min"]


@pytest.mark.parametrize("terminal", [True, False])
def test_finished_steps_of_a_tuning_stay(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("specgen.view.progress.time.perf_counter", lambda: now[0])
    screen = Screen(terminal=terminal, width=60)
    tuning = TuneProgress(screen.progress, 90.0, 60.0)
    tuning.doing("simulating")
    assert ("~50 s left" in screen.written) == terminal
    now[0] = 120.0
    tuning.done("80 shapes of trees, drafts and beams simulated; best: mtad:k=4")
    *lines, last = screen.written.removeprefix("\x1b[J").splitlines()
    assert (last.split()[-2:], "✓ " in (lines or [last])[0]) == (["30", "s"], True)
    assert max(len(line) for line in [*lines, last]) <= (59 if terminal else 100)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_training_shows_both_stages(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("specgen.view.progress.time.monotonic", lambda: now[0])
    screen = Screen(terminal=terminal, width=100)
    line = TrainingLine(screen.progress, lambda: False)
    seen = []
    for share, seconds in ((0.2, 1.0), (0.4, 11.0), (0.6, 21.0), (1.0, 41.0)):  # half a minute between two lines
        now[0] = seconds
        line.generating(1, share, 5000)
        seen.append(screen.written)
    line.training(TrainingProgress(7, 900, 0.5, 1.25, 0.5, 3.0))
    seen.append(screen.written)
    figures = "5,000 tokens"
    if terminal:
        assert f"{figures}  ~30 s left" in seen[1]
        assert f"Generating text: 100%, {figures}" in seen[3]
        assert "step 7, loss 1.250, greedy agreement 50%" in seen[4]
    else:
        lines = [f"Generating text: 20%, {figures}\n", "", "", f"Generating text: 100%, {figures}\n"]
        assert seen == [*lines, "Training: 50%, step 7, loss 1.250, greedy agreement 50%\n"]
