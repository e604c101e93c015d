"""`specgen inspect` on traces: output fits its width, figures are right, mistakes get one line, large traces are fast."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import traces
from cli_helpers import parsed, run, run_main

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


def test_runs_that_a_comparison_wrote_as_one_method_are_one_group(inspect: Inspect, tmp_path: Path) -> None:
    runs = [traces.a_run("pearl", spec="pearl", settings={"window": window, "pre_verify": True}) for window in (8, 12, 10)]
    mine = traces.a_run("svip", spec="svip")
    lossy = traces.a_run("mtad", spec="mtad:k=3", lossless=False)
    for line in lossy[1:-1]:
        line["seconds"] = {phase: seconds / 4 for phase, seconds in line["seconds"].items()}
    trace = traces.write(tmp_path / "t.jsonl", *mine, *(line for run in runs for line in run), *lossy)
    out, _ = inspect(trace)
    table = out.split("\n\n")[0]
    assert [line.split("  ")[0] for line in table.splitlines()[1:4]] == ["svip", "pearl", "mtad:k=3 (lossy)"]
    assert "lossy: the output differs from the target's by design, so it is not ranked." in table
    assert "3 runs, window 8–12" in " ".join(out.split())
    page = tmp_path / "p.html"
    inspect(trace, "--html", page)
    written = page.read_text()
    assert "was the fastest lossless method" in written
    assert re.search(r'class="m best"><th scope="row">(svip|pearl)<', written)
    assert 'class="m lossy"><th scope="row">mtad:k=3 (lossy)<' in written
    assert "window 8 (8–12 over all runs)" in written
    lines = parsed(inspect(trace, "--json")[0])
    assert [(line["spec"], line["lossless"]) for line in lines[-2:]] == [("pearl", True), ("mtad:k=3", False)]


def test_lengths_cover_all_runs_and_trees_show_nodes(inspect: Inspect, tmp_path: Path) -> None:
    def run(*drafts: int, **changes: Any) -> list[Any]:
        rounds = [traces.round_line(0, token=10)]
        rounds += [traces.round_line(at, (4,) * size, 1, 9, "correction", **changes) for at, size in enumerate(drafts, 1)]
        return [traces.start_line(), *rounds, traces.summary_line(rounds)]

    out, _ = inspect(traces.write(tmp_path / "t.jsonl", *run(1, 1), *run(5, 1)))
    assert "draft length, accepted length  mean 2.0 and 1.0, longest 5" in out
    assert "drafted   ▂▂█▂" in out
    tree = run(3, parents=[-1, -1, 0])
    out, _ = inspect(traces.write(tmp_path / "tree.jsonl", *tree, *run(2)))
    assert "draft nodes, accepted length  mean 2.5 and 1.0, most 3" in out


def test_the_acceptance_of_another_program_is_shown(inspect: Inspect, tmp_path: Path) -> None:
    start = traces.start_line("transformers-assisted", spec="transformers-assisted")
    summary = {"type": "summary", "text": "abc", "token_ids": [1, 2, 3], "finish_reason": "length", "seconds": 1.5}
    summary |= {"target_passes": 2, "drafted": 4, "accepted": 1, "drafts": 2}
    out, _ = inspect(traces.write(tmp_path / "t.jsonl", start, summary))
    assert "25% accepted" in out
    assert "mean 2.0 and 0.5" in out
    assert "longest" not in out
    inspect(tmp_path / "t.jsonl", "--html", tmp_path / "p.html")


def test_the_methods_as_json(inspect: Inspect) -> None:
    from specgen import METHODS

    lines = parsed(inspect("--methods", "--json")[0])
    assert [line["name"] for line in lines] == list(METHODS)
    mtad = next(line for line in lines if line["name"] == "mtad")
    assert (mtad["lossless"], mtad["settings"]["tau"]["default"]) == (False, 0.1)
    assert mtad["settings"]["beam"]["choices"] == ["greedy", "sample"]


def test_a_trace_as_text(inspect: Inspect, tmp_path: Path) -> None:
    out, err = inspect(traces.write(tmp_path / "t.jsonl", *traces.a_run()))
    assert err == ""
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0].startswith("accepted   ✗rejected   discarded")
    assert re.fullmatch(r"  2    3/5  pencils\. 3 ✗packs of → baskets +√cH 0\.43 > 0\.40", lines[3])
    assert lines[6].rstrip().endswith("eos")
    assert "<eos>" in lines[6]
    # by hand: 15 tokens in 6 passes, 10 of 13 drafted accepted, 5 * 0.75 + 0.125 seconds
    assert "15 tokens  3.9 tokens/s  77% accepted  67% of the text from the draft  2.50 tokens a pass" in out
    assert "ended at the eos token" in out
    assert "where the time went  3.88 s" in out
    assert re.search(r"drafting +32%  ━+", out)
    assert "mean 3.2 and 2.5, longest 5" in out  # four drafts
    assert re.search(r"0\.5–1 +83% +12  ━+", out)  # all entropies are 0.5: 10 of 12 judged


@pytest.mark.parametrize("width", [40, 44, 60, 80, 100, 200])
@pytest.mark.parametrize("count", [1, 3])
def test_every_line_fits_its_width(inspect: Inspect, tmp_path: Path, width: int, count: int) -> None:
    paths = [
        traces.write(
            tmp_path / f"trace-{seed}.jsonl", *traces.a_recorded_run(30, seed, target="an-organisation/a-model-of-its-own")
        )
        for seed in range(count)
    ]
    out, _ = inspect(*paths, width=width)
    assert max(map(len, out.splitlines())) <= width
    assert out.count("where the time went") == count
    assert out.count("Thompson sampling") == count
    if count > 1:
        assert "beta-ts (trace-1)" in out
        columns = max(line.count("where the time went") for line in out.splitlines())
        assert columns == max(1, min(count, (width + 4) // 48))


def test_the_number_of_rounds_can_be_chosen(inspect: Inspect, tmp_path: Path) -> None:
    path = traces.write(tmp_path / "t.jsonl", *traces.a_recorded_run(100))
    assert "and 60 more rounds: --rounds 100" in inspect(path)[0]
    assert "more round" not in inspect(path, "--rounds", "100")[0]
    assert "✗rejected" not in inspect(path, "--rounds", "0")[0]
    out, _ = inspect(path, path, "--rounds", "2")
    assert out.count("and 98 more rounds") == 1  # the same file twice is the same run twice


def test_json_figures_recompute_from_the_trace(inspect: Inspect, tmp_path: Path) -> None:
    recorded = traces.a_recorded_run(200, prompt_index=3, category="code", repeat=1)
    path = traces.write(tmp_path / "t.jsonl", *recorded, *traces.a_run())
    first, second = parsed(inspect(path, "--json")[0])
    rounds = recorded[1:-1]
    assert (first["type"], first["line"], first["method"], first["category"]) == ("inspect", 1, "beta-ts", "code")
    assert (second["line"], second["method"], second["finish_reason"]) == (len(recorded) + 1, "svip", "eos")
    drafted = sum(len(line["draft_ids"]) for line in rounds)
    accepted = sum(len(line["accepted_ids"]) for line in rounds)
    seconds = sum(sum(line["seconds"].values()) for line in rounds)
    tokens = accepted + len(rounds)
    assert (first["drafted"], first["accepted"], first["new_tokens"], first["rounds"]) == (drafted, accepted, tokens, 200)
    assert first["acceptance_rate"] == pytest.approx(accepted / drafted)
    assert first["draft_share"] == pytest.approx(accepted / tokens)
    assert first["block_efficiency"] == pytest.approx(tokens / 200)
    assert first["seconds"] == pytest.approx(seconds)
    assert first["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert first["mean_draft_length"] == pytest.approx(drafted / 199)
    assert first["draft_lengths"] == [len(line["draft_ids"]) for line in rounds]
    assert first["accepted_lengths"] == [len(line["accepted_ids"]) for line in rounds]
    judged = sum(found["judged"] for found in first["acceptance_by_entropy"])
    assert judged == accepted + sum(line["source"] == "correction" for line in rounds)
    assert first["bounds"]["tokens"] == drafted
    last = first["posterior"][-1]
    assert last["mean"] == pytest.approx(rounds[-1]["policy"]["alpha"] / sum(rounds[-1]["policy"].values()))
    assert last["low"] < last["mean"] < last["high"]
    assert second["bounds"] is None
    assert second["posterior"] == []


def test_several_methods_of_one_trace_are_shown_side_by_side(inspect: Inspect, tmp_path: Path) -> None:
    runs = [
        traces.a_run("ar", prompt_index=0),
        traces.a_run("svip", prompt_index=0),
        traces.a_run("ar", prompt_index=1),
        traces.a_run("svip", prompt_index=1),
        traces.a_run("sd", settings={"k": 4, "policy": "fixed"}),
        traces.a_run("sd", settings={"k": 8, "policy": "fixed"}),
    ]
    path = traces.write(tmp_path / "t.jsonl", *(line for run in runs for line in run))
    out, _ = inspect(path, width=150)
    head, *rows = out.splitlines()
    assert head.split() == ["tokens/s", "accepted", "a", "pass", "drafted", "runs"]
    assert [row.split()[0] for row in rows[:4]] == ["ar", "svip", "sd:k=4", "sd:k=8"]
    assert [row.split()[-1] for row in rows[:4]] == ["2", "2", "1", "1"]
    _, err = inspect(path, "--run", "2", code=2)
    assert "has no run 2 of sd: it holds 1" in err


def test_a_truncated_trace_shows_its_complete_part(inspect: Inspect, tmp_path: Path) -> None:
    path = traces.write(tmp_path / "t.jsonl", *traces.a_run())
    *lines, fifth, _ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + fifth[:80])
    out, _ = inspect(path)
    assert "note: the trace is cut off in line 7: only what comes before is shown" in out
    assert "tokens/s" in out
    (line,) = parsed(inspect(path, "--json")[0])
    assert line["finish_reason"] is None
    assert line["rounds"] == 5


def test_control_characters_never_reach_the_output(inspect: Inspect, tmp_path: Path) -> None:
    start, first, *rest = traces.a_run(target="a\x1b[31mb\x07", draft="\x9b31m")
    page = tmp_path / "page.html"
    path = traces.write(tmp_path / "t.jsonl", start, first | {"token_text": "\x1b]0;title\x07\u202e"}, *rest)
    out, _ = inspect(path)
    assert "␛]0;title␇" in out
    inspect(path, "--html", page)
    out += inspect(path, "--json")[0] + page.read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)


def test_malformed_traces_get_one_line(inspect: Inspect, tmp_path: Path) -> None:
    path = traces.write(tmp_path / "t.jsonl", traces.start_line(), {"type": "round", "index": "x\x1b[31m"})
    for options in ((), ("--json",), ("--html", tmp_path / "page.html")):
        out, err = inspect(path, *options, code=2)
        assert out == ""
        assert len(err.splitlines()) == 1
        assert err.startswith(f"error: {path}, line 2: index: Input should be a valid integer (it is 'x")
        assert "\x1b" not in err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "nothing to inspect"),
        (("t.jsonl", "--pair"), "--pair is for a pair of models"),
        (("t.jsonl", "--target", "x"), "--target is for a pair of models"),
        (("t.jsonl", "--measure"), "--measure is for a pair of models"),
        (("--pair", "--html", "x.html"), "--html is given without a trace"),
        (("--pair", "--rounds", "3"), "--rounds is given without a trace"),
        (("--pair", "--target", "x"), "--pair is the bundled pair"),
        (("--draft", "x"), "--draft x is given without --target"),
        (("t.jsonl", "--rounds", "-1"), "--rounds is -1"),
        (("t.jsonl", "--run", "0"), "--run is 0"),
        (("nowhere.jsonl",), "cannot read the trace nowhere.jsonl"),
    ],
)
def test_options_that_contradict_are_refused(inspect: Inspect, arguments: tuple[str, ...], named: str) -> None:
    out, err = inspect(*arguments, code=2)
    assert out == ""
    assert named in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("position", ["a folder", "nowhere/page.html"])
def test_pages_that_cannot_be_written_are_refused_at_once(inspect: Inspect, tmp_path: Path, position: str) -> None:
    (tmp_path / "a folder").mkdir()
    _, err = inspect(tmp_path / "no-trace.jsonl", "--html", tmp_path / position, code=2)
    assert "cannot write the page" in err


def test_a_failed_write_leaves_the_old_page(inspect: Inspect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, page = traces.write(tmp_path / "t.jsonl", *traces.a_run()), tmp_path / "page.html"
    inspect(path, "--html", page)
    before = page.read_text(encoding="utf-8")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specgen.files.os.replace", fails)
    _, err = inspect(path, "--html", page, code=1)
    assert "No space left on device" in err
    assert page.read_text(encoding="utf-8") == before
    assert sorted(found.name for found in tmp_path.iterdir()) == ["page.html", "t.jsonl"]


def test_ten_thousand_rounds_take_seconds_and_no_torch(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "t.jsonl", *traces.a_recorded_run(10_000))
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (500 << 20, 500 << 20))\n"
        "from specgen.cli.app import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    for options in ((), ("--html", str(tmp_path / "page.html")), ("--json",)):
        before = os.times()
        done = subprocess.run(
            [sys.executable, "-c", limited, "inspect", "-q", str(path), *options], capture_output=True, text=True, check=False
        )
        after = os.times()  # processor time: as other tests run at the same time
        taken = after.children_user + after.children_system - before.children_user - before.children_system
        assert taken < 12, "a loose bound, for slow machines"
        assert (done.returncode, done.stderr) == (0, "False\n")
    assert (tmp_path / "page.html").stat().st_size < 20 << 20


def test_a_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "t.jsonl", *traces.a_recorded_run(3000))
    with open("/dev/full", "w") as full:
        code, _, err = run("inspect", str(path), "--rounds", "3000", stdout=full)
    assert (code, err) == (1, b"error: cannot write the output: No space left on device\n")


def test_the_output_contains_no_nan(inspect: Inspect, tmp_path: Path) -> None:
    start, first, second, *_ = traces.a_run()
    nulls = second | {"entropies": [None, 0.5, None], "overlap": [None, 0.5, 0.25], "kl": [0.5, None, 0.5], "top_probs": []}
    path = traces.write(tmp_path / "t.jsonl", start, first, nulls)
    page = tmp_path / "page.html"
    inspect(path, "--html", page)
    out = inspect(path)[0] + inspect(path, "--json")[0] + page.read_text(encoding="utf-8")
    assert not re.search(r"\bnan\b", out.lower())
    assert math.isfinite(parsed(inspect(path, "--json")[0])[0]["seconds"])


def test_runs_on_different_prompts_are_not_ranked(inspect: Inspect, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for prompt, headline in (([1, 2, 3], "was the fastest: "), ([9], "2 recordings side by side")):
        runs = traces.a_run("svip"), traces.a_run("ar", prompt_ids=prompt)
        inspect(traces.write(tmp_path / "t.jsonl", *runs[0], *runs[1]), "--html", page)
        assert headline in page.read_text(encoding="utf-8").partition("<h1>")[2].partition("</h1>")[0]
