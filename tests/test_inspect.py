"""`specgen inspect` on traces as a user calls it; `test_views.py` has what it shows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import traces
from cli_helpers import run_main

from specgen.compare import results

Inspect = Callable[..., tuple[str, str]]


@pytest.fixture
def inspect(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Inspect:
    """Run `specgen inspect` in this process: its stdout and stderr."""

    def call(*arguments: str | Path, width: int = 100, code: int = 0) -> tuple[str, str]:
        monkeypatch.setenv("COLUMNS", str(width))
        found, out, err = run_main(monkeypatch, capfd, "inspect", *map(str, arguments))
        assert found == code, err
        return out, err

    return call


def written(path: Path, *runs: list[traces.Line]) -> Path:
    return traces.write(path / "t.jsonl", *(line for run in runs for line in run))


def test_runs_that_a_comparison_wrote_as_one_method_are_one_group(
    inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        traces.a_run("pearl", spec="pearl", settings={"window": window}) for window in (8, 12, 10)
    ]
    lossy = traces.a_run("mtad", spec="mtad:k=3", lossless=False)
    for line in lossy[1:-1]:
        line["seconds"] = {phase: seconds / 4 for phase, seconds in line["seconds"].items()}
    others = [traces.a_run("sd", settings={"k": k}) for k in (4, 8)]
    trace = written(tmp_path, traces.a_run(spec="svip"), *runs, lossy, *others)
    page = tmp_path / "p.html"
    out, _ = inspect(trace, width=150)
    head, *rows = out.split("\n\n")[0].splitlines()
    assert head.split() == ["tokens/s", "accepted", "a", "pass", "drafted", "recorded"]
    counts = {re.split(" {2,}", row)[0]: row.split()[-1] for row in rows[:5]}
    assert counts == {
        "svip": "1",
        "pearl": "3",
        "mtad:k=3 (lossy)": "1",
        "sd:k=4": "1",
        "sd:k=8": "1",
    }
    assert rows[5] == "lossy: the output differs from the target's by design, so it is not ranked."
    assert "3 runs, window 8–12" in " ".join(out.split())
    inspect(trace, "--html", page)
    assert "was the fastest" not in page.read_text(), "too few runs"
    monkeypatch.setattr(results, "LEAST_PROMPTS", 1)
    monkeypatch.setattr(results, "LEAST_TOKENS", 0)
    inspect(trace, "--html", page)
    html = page.read_text()
    assert "was the fastest lossless method" in html
    assert re.search(r'class="m best"><th scope="row">(svip|pearl|sd:k=\d)<', html)
    assert "window 8 (8–12 over all runs)" in html
    assert "has no run 2 of svip: it holds 1" in inspect(trace, "--run", "2", code=2)[1]
    out, _ = inspect(trace, trace)
    assert "svip (t)" not in out, "the same file twice is the same run twice"


def test_runs_of_other_programs_and_of_one_round_are_shown(
    inspect: Inspect, tmp_path: Path
) -> None:
    start = traces.start_line("transformers-assisted", spec="transformers-assisted")
    summary = {
        "type": "summary",
        "text": "abc",
        "token_ids": [1, 2, 3],
        "finish_reason": "length",
        "seconds": 1.5,
    }
    summary |= {"target_passes": 2, "drafted": 4, "accepted": 1, "drafts": 2}
    out, _ = inspect(written(tmp_path, [start, summary]))
    assert "25% accepted" in out
    assert "1.50 tokens a pass" in out
    inspect(tmp_path / "t.jsonl", "--html", tmp_path / "p.html")
    assert "the run has no rounds: another program decoded it" in (tmp_path / "p.html").read_text()


def test_the_number_of_rounds_can_be_chosen(inspect: Inspect, tmp_path: Path) -> None:
    path = written(tmp_path, traces.a_recorded_run(100))
    assert "and 60 more rounds: --rounds 100" in inspect(path)[0]
    assert "and 1 more round: --rounds 100" in inspect(path, "--rounds", "99")[0]
    assert "more round" not in inspect(path, "--rounds", "100")[0]
    assert "✗rejected" not in inspect(path, "--rounds", "0")[0]


def test_the_output_contains_no_nan(inspect: Inspect, tmp_path: Path) -> None:
    start, first, second, *_ = traces.a_run()
    nulls = second | {
        "entropies": [None, 0.5, None],
        "overlap": [None, 0.5, 0.25],
        "kl": [0.5, None, 0.5],
        "top_probs": [],
    }
    path, page = written(tmp_path, [start, first, nulls]), tmp_path / "page.html"
    inspect(path, "--html", page)
    lines = inspect(path, "--json")[0]
    assert not re.search(
        r"\bnan\b", (inspect(path)[0] + lines + page.read_text(encoding="utf-8")).lower()
    )
    assert math.isfinite(json.loads(lines)["seconds"])


def test_runs_on_different_prompts_are_not_ranked(
    inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "LEAST_PROMPTS", 1)
    monkeypatch.setattr(results, "LEAST_TOKENS", 0)
    page = tmp_path / "page.html"
    for prompt, headline in (([1, 2, 3], "was the fastest: "), ([9], "2 recordings side by side")):
        inspect(
            written(tmp_path, traces.a_run("svip"), traces.a_run("ar", prompt_ids=prompt)),
            "--html",
            page,
        )
        assert (
            headline in page.read_text(encoding="utf-8").partition("<h1>")[2].partition("</h1>")[0]
        )


def test_a_character_of_several_tokens_is_whole_in_the_text_of_a_page(
    inspect: Inspect, tmp_path: Path
) -> None:
    half = "\N{REPLACEMENT CHARACTER}"
    page = tmp_path / "page.html"
    texts = {0: " Hi", 1: half, 2: half, 3: " and", 4: half}
    rounds = [
        traces.round_line(index, token=1) | {"token_text": text} for index, text in texts.items()
    ]
    inspect(
        written(
            tmp_path,
            [traces.start_line(), *rounds, traces.summary_line(rounds) | {"text": "Hi🙂 andé"}],
        ),
        "--html",
        page,
    )
    shown = re.findall(r'data-tip="[^"]*"> ?<i>([^<]*)</i>', page.read_text(encoding="utf-8"))
    assert shown == ["Hi", "", "🙂", "and", "é"]


def test_theorem_2_is_not_compared_with_few_generations(inspect: Inspect, tmp_path: Path) -> None:
    lines = traces.a_run("pearl", spec="pearl")
    for line in lines[2:-1]:
        line["mode"] = "post-verify"

    def text(runs: int) -> str:
        return inspect(written(tmp_path, *[lines] * runs))[0]

    assert "Tokens until a rejection" in text(9)
    assert "Theorem 2" not in text(9)
    assert "Theorem 2" in text(10)
