"""The progress bar of a long prompt, and the reports that it shows."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from cli_helpers import run_main

from specgen.base.measuring import prefill_reports
from specgen.base.types import SamplingParams
from specgen.engine import cached_prefix
from specgen.pair.pair import Pair
from specgen.view import theme
from specgen.view.progress import PREFILL_DELAY, Progress, reading_prompt
from specgen.workers.process import DraftProcess
from specgen.workers.shared import SharedWords

PROMPT = [5 + token % 9 for token in range(23)]
ERASE = "\x1b[J"


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    monkeypatch.setattr(cached_prefix, "PREFILL_CHUNK", 10)
    return []


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_models_report_their_chunks(
    pair_of: Callable[..., Pair], demo_pair: Pair, reports: list[tuple[int, int, int]], backend: str
) -> None:
    """The target and the draft model, a head, an exit layer, and PEARL's worker."""
    pair = pair_of("llama", "near", backend)
    pair.forget()
    with prefill_reports.to(lambda *report: reports.append(report)):
        pair.generate(PROMPT, "sd", SamplingParams(max_new_tokens=12, ignore_eos=True))
        pair.generate(PROMPT[:9], "sd", SamplingParams(max_new_tokens=30, ignore_eos=True))
    target, draft = reports[0][0], reports[-1][0]
    assert target != draft
    assert reports[:4] == [(target, done, 23) for done in (0, 10, 20, 23)]
    assert reports[4:] == [(draft, done, reports[-1][2]) for done in (0, 10, 20, reports[-1][2])], "one pass each, then none"
    pair.forget()
    pair.generate(PROMPT, "sd", SamplingParams(max_new_tokens=2))  # after the block: nobody is told
    for method in ("eagle", "eesd-beta", "pearl") if backend == "native" else ():
        demo_pair.forget()
        reports.clear()
        with prefill_reports.to(lambda *report: reports.append(report)):
            demo_pair.generate(PROMPT, method, SamplingParams(max_new_tokens=3, ignore_eos=True))
        ends = {source: (done, total) for source, done, total in reports}
        assert len(ends) >= 2
        assert all(done == total for done, total in ends.values())


def test_the_bar_appears_after_two_seconds_and_is_erased_at_the_end() -> None:
    """And begins at the cursor, where an answer may have begun."""
    file, now = io.StringIO(), [0.0]
    progress = Progress(theme.console(file=file, force_terminal=True, width=80), quiet=False)

    def written(source: int, done: int, total: int, at: float | None = None) -> str:
        now[0] = now[0] if at is None else at
        file.truncate(file.seek(0))
        prefill_reports.report(source, done, total)
        return file.getvalue()

    with reading_prompt(progress, lambda: now[0]):
        assert written(1, 0, 32_000) == written(1, 1024, 32_000, PREFILL_DELAY - 0.01) == ""
        shown = written(1, 2048, 32_000, PREFILL_DELAY)
        assert "reading the prompt" in shown
        assert "2,048 of 32,000 tokens" in shown
        assert (shown[:2], shown[-2:]) == ("\x1b7", "\x1b8"), "the cursor is where it was"
        assert written(1, 32_000, 32_000) == ERASE
        assert "0 of 8,000 tokens" in written(2, 0, 8_000), "the draft's, at once: the user has waited before"
        assert "500 of 10,000 tokens" in written(3, 500, 2_000)
    assert file.getvalue().endswith(ERASE), "an interrupted prefill leaves no bar"
    assert written(2, 1, 2) == ""


def test_the_parent_passes_on_what_its_worker_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    process = object.__new__(DraftProcess)

    monkeypatch.setattr("specgen.workers.shared.mmap", lambda *_: bytearray(4096))
    process.words = SharedWords(0)
    seen: list[tuple[int, int]] = []
    with prefill_reports.to(lambda _, done, total: seen.append((done, total))):
        for step in ((1024, 5000), (5000, 5000), (0, 0)):
            process.words.prefill(*step)
            process._report_prefill()
    assert seen == [(1024, 5000)]


def test_ctrl_c_in_a_chunk_ends_the_command_cleanly(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cached_prefix, "PREFILL_CHUNK", 10)

    def press(_: int, done: int, __: int) -> None:
        if done:
            raise KeyboardInterrupt

    monkeypatch.setattr("specgen.view.progress.reading_prompt", lambda _: prefill_reports.to(press))
    code, out, err = run_main(monkeypatch, capfd, "generate", "hello abc " * 6, *pair, "-m", "sd")
    assert (code, out) == (130, "")
    assert "interrupted" in err
    assert "Traceback" not in err
