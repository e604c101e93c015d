"""The progress line and the bar of a long prompt: drawn in place on a terminal, nothing elsewhere;
what each command shows."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from cli_helpers import run_main
from comparisons import report_of, usual

from specgen.base.measuring import prefill_reports
from specgen.base.types import SamplingParams
from specgen.compare.method_specs import parse_spec
from specgen.compare.prompts import ListedPrompt
from specgen.compare.runner import BenchmarkStep
from specgen.engine import cached_prefix
from specgen.engine.native import layer_stack, native_model
from specgen.pair.pair import Pair
from specgen.view import theme
from specgen.view.comparison import show_step
from specgen.view.progress import (
    PREFILL_DELAY,
    Progress,
    TrainingLine,
    TuneProgress,
    duration,
    reading_prompt,
)

ERASE = "\x1b[J"


class Screen:
    """A progress line on a console, and what was written since the last look, without colours."""

    def __init__(self, *, terminal: bool = True, quiet: bool = False, height: int = 24) -> None:
        self.file = io.StringIO()
        console = theme.console(
            file=self.file, force_terminal=terminal, no_color=True, width=80, height=height
        )
        self.progress = Progress(console, quiet=quiet)

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
        assert screen.written == ERASE
        line.bar("training", 0.5, "step 3", 100.0)
        assert "▸ ━━━━━━━━━━──────────  step 3  ~2 min left  training" in screen.written
        line.keep(theme.Text("done"))
        assert screen.written == f"{ERASE}done\n"
        line.bar("training", 0.5, "")
    assert screen.written.endswith(ERASE)
    assert [duration(seconds) for seconds in (9.2, 89, 200, 7500)] == [
        "9 s",
        "89 s",
        "3 min",
        "2 h 5 min",
    ]


def test_several_lines_scroll_the_terminal_before_the_cursor_is_saved() -> None:
    screen = Screen(height=7)
    step = BenchmarkStep(
        parse_spec("sd:k=8"), ListedPrompt(3, "x", "code", "a-name"), False, 5, 48, 83.0
    )
    show_step(screen.progress, report_of(usual()), step)
    text = screen.written
    assert text.startswith("\n" * 5 + "\x1b[5A\x1b7"), (
        "four lines of the table, a blank one, the bar"
    )
    assert "demo pair, cpu float32" in text
    assert re.search(r"▸ ━━──.*  5 of 48 runs  ~83 s left  sd:k=8, prompt 3 \(a-name\)", text)
    show_step(screen.progress, report_of(usual()), BenchmarkStep(step.spec, None, True, 1, 1, 3.0))
    assert "1 of 1 run  sd:k=8\x1b" in screen.written, "no time is left"


@pytest.mark.parametrize("options", [{"terminal": False}, {"quiet": True}, {"dumb": True}])
def test_nothing_is_shown_without_a_terminal_or_with_quiet(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if options.pop("dumb", False):  # a terminal that obeys no cursor movements
        monkeypatch.setenv("TERM", "dumb")
    screen = Screen(**options)
    with screen.progress as line:
        line.announce("loading")
        line.bar("x", 0.5, "y")
    assert screen.written == ""


def test_finished_steps_of_a_tuning_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("specgen.view.progress.time.perf_counter", lambda: now[0])
    screen = Screen()
    tuning = TuneProgress(screen.progress, 90.0, 60.0)
    tuning.doing("simulating")
    assert "~50 s left  simulating" in screen.written
    now[0] = 120.0
    tuning.done("80 shapes simulated")
    assert screen.written == f"{ERASE}✓ 80 shapes simulated  30 s\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_training_shows_both_stages(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("specgen.view.progress.time.monotonic", lambda: now[0])
    screen = Screen(terminal=terminal)
    line = TrainingLine(screen.progress)
    seen = []
    # half a minute between two lines
    for share, seconds in ((0.2, 1.0), (0.4, 11.0), (0.6, 21.0), (1.0, 41.0)):
        now[0] = seconds
        line.show("Generating text", share, "5,000 tokens")
        seen.append(screen.written)
    if terminal:
        assert "5,000 tokens  ~30 s left" in seen[1]
        assert "Generating text: 100%, 5,000 tokens" in seen[3]
    else:
        assert seen == [
            "Generating text: 20%, 5,000 tokens\n",
            "",
            "",
            "Generating text: 100%, 5,000 tokens\n",
        ]


PROMPT = [5 + token % 9 for token in range(23)]


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_models_report_their_chunks(
    pair_of: Callable[..., Pair], demo_pair: Pair, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The target and the draft model, a head, an exit layer, and PEARL's worker."""
    reports: list[tuple[int, int, int]] = []
    monkeypatch.setattr(cached_prefix, "PREFILL_CHUNK", 10)
    pair = pair_of("llama", "near", backend)
    pair.forget()
    with prefill_reports.to(lambda *report: reports.append(report)):
        pair.generate(PROMPT, "sd", SamplingParams(max_new_tokens=12, ignore_eos=True))
    target = reports[0][0]
    draft = reports[-1][0]
    total = reports[-1][2]
    assert target != draft
    for source, tokens in ((target, 23), (draft, total)):
        done = list(
            dict.fromkeys(each for who, each, of in reports if (who, of) == (source, tokens))
        )
        assert done == sorted(done)
        assert {0, 10, 20, tokens} <= set(done)
    order = [who for who, _, _ in reports]
    assert order == sorted(order, key=[target, draft].index), (
        "the target's prompt, then the draft's, then none"
    )
    for method in ("eagle", "eesd-beta", "pearl") if backend == "native" else ():
        demo_pair.forget()
        reports.clear()
        with prefill_reports.to(lambda *report: reports.append(report)):
            demo_pair.generate(PROMPT, method, SamplingParams(max_new_tokens=3, ignore_eos=True))
        ends = {source: done == total for source, done, total in reports}
        assert len(ends) >= 2
        assert all(ends.values())


def test_layers_of_a_pass_report_shares_of_its_tokens(
    pair_of: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that there is progress while the first pass runs."""
    reports: list[tuple[int, int]] = []
    monkeypatch.setattr(cached_prefix, "PREFILL_CHUNK", 10)
    for module in (layer_stack, native_model):
        monkeypatch.setattr(module, "SHORT_PASS", 2)
    pair = pair_of("llama", "near", "native")
    layers = pair.target.model.shape.num_layers
    pair.forget()
    with prefill_reports.to(lambda _, done, total: reports.append((done, total))):
        pair.generate(PROMPT, "ar", SamplingParams(max_new_tokens=3, ignore_eos=True))
    passes = [(0, 10), (10, 10), (20, 3)]
    within = [before + size * done // layers for before, size in passes for done in range(layers)]
    assert [done for done, total in reports if total == 23] == sorted([*within, 0, 10, 20, 23])
    assert not [each for each in reports if each[1] != 23], "later passes report nothing"
    reports.clear()
    pair.forget()
    with prefill_reports.to(lambda _, done, total: reports.append((done, total))):
        pair.generate(PROMPT[:9], "ar", SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert not reports, "a short prompt"


def test_the_bar_appears_after_a_second_and_is_erased_at_the_end() -> None:
    """And begins at the cursor, where an answer may have begun."""
    screen = Screen()
    now = [0.0]

    def written(source: int, done: int, total: int, at: float) -> str:
        now[0] = at
        prefill_reports.report(source, done, total)
        return screen.written

    with reading_prompt(screen.progress, lambda: now[0]):
        assert written(1, 0, 32_000, 0) == written(1, 1024, 32_000, PREFILL_DELAY - 0.01) == ""
        assert "2,048 of 32,000 tokens  reading the prompt" in written(
            1, 2048, 32_000, PREFILL_DELAY
        )
        assert written(1, 2049, 32_000, PREFILL_DELAY + 0.1) == "", "not so often"
        assert written(1, 32_000, 32_000, 9) == ERASE
        assert "0 of 8,000 tokens" in written(2, 0, 8_000, 9), (
            "the draft's, at once: the user has waited before"
        )
        assert "500 of 10,000 tokens" in written(3, 500, 2_000, 10)
    assert screen.written == ERASE, "an interrupted prefill leaves no bar"
    assert written(2, 1, 2, 9) == ""


def test_ctrl_c_in_a_chunk_ends_the_command_cleanly(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cached_prefix, "PREFILL_CHUNK", 10)

    def press(_: int, done: int, __: int) -> None:
        if done:
            raise KeyboardInterrupt

    monkeypatch.setattr(
        "specgen.cli.output_writers.reading_prompt", lambda _: prefill_reports.to(press)
    )
    code, out, err = run_main(monkeypatch, capfd, "generate", "hello abc " * 6, *pair, "-m", "sd")
    assert (code, out) == (130, "")
    assert "interrupted" in err
    assert "Traceback" not in err
