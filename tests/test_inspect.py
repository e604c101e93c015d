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


def test_bounds_ratios_and_lengths_as_text(inspect: Inspect, tmp_path: Path) -> None:
    """Two distributions of two tokens whose figures can be computed by hand, see `test_acceptance_bounds`."""
    rounds = traces.rounds_with_distributions()
    out, _ = inspect(traces.write(tmp_path / "t.jsonl", traces.start_line(), *rounds, traces.summary_line(rounds)))
    assert "accepted tokens of a draft, by its mean entropy  nats; number of drafts. Correlation 1.00." in out
    assert re.search(r"0\.25–0\.5 +0\.0 +1\n +0\.5–1 +2\.0 +1  ━{40}\n", out)
    table = [line.split() for line in out.partition("by how likely acceptance is")[2].splitlines()[2:5]]
    assert table == [
        ["0–33%", "0.20", "0.06", "0.09", "0.78"],
        ["33–67%", "0.70", "0.67", "0.55", "0.68"],
        ["67–100%", "0.70", "0.67", "0.55", "0.68"],
    ]
    overlap = "overlap Σ min(p, q) of both models' distributions, which is the probability of acceptance at temperature 1"
    assert f"true: the {overlap}." in " ".join(out.split()), "a greedy run's acceptance is another number"
    # (0.034 + 0.034 + 0.137) / 3 and (0.147 + 0.147 + 0.110) / 3
    said = "Pinsker 0.07, B–H 0.13. Pinsker's bound is 49% tighter, and the higher one for 67% of the tokens."
    assert said in " ".join(out.split())
    ratios = re.findall(r"  ([\d.]+–?\S*(?: and up)?) +(\d+%)", out.partition("cross-entropy over the draft's entropy")[2])
    assert ratios[3] == ("1.3–1.5", "67%")
    assert ratios[6] == ("3 and up", "33%")
    assert [share for _, share in ratios].count("0%") == 5
    assert "median 1.32: c would be 0.16; c = 0.15 assumes 1.3" in out
    assert "--record" not in out
    assert "predicted" not in out


def test_predicted_against_observed_acceptance_as_text_and_on_the_page(inspect: Inspect, tmp_path: Path) -> None:
    """Five judged predictions: three of accepted tokens, two of rejected ones. The one after a rejected token does not count."""
    rounds = [
        traces.round_line(0),
        traces.round_line(1, (1, 2, 3), 3, 4, "bonus", predicted=[0.9, 0.6, None]),
        traces.round_line(2, (4, 5, 6), 1, 9, "correction", predicted=[0.8, 0.5, 0.1]),
        traces.round_line(3, (7,), 0, 9, "correction", predicted=[0.8], stop_reason="gain 0.12 < cost 0.22"),
        traces.round_line(4, (), 0, 9, None, stop_reason="no draft: gain 0.12 < cost 0.22"),
    ]
    path = traces.write(tmp_path / "t.jsonl", traces.start_line(), *rounds, traces.summary_line(rounds))
    out, _ = inspect(path)
    assert re.search(r"  3    0/1  .* gain 0\.12 < cost 0\.22\n  4 .* no draft: gain 0\.12 < cost 0\.22\n", out)
    table = re.findall(r"  ([\d.]+–[\d.]+) +(\d+%) +(\d+%) +(\d+)", out.partition("by the predicted acceptance")[2])
    assert table == [
        ("0.5–0.6", "50%", "0%", "1"),
        ("0.6–0.7", "60%", "100%", "1"),
        ("0.8–0.9", "80%", "50%", "2"),
        ("0.9–1", "90%", "100%", "1"),
    ]
    # (0.5 + 0.4 + 2 * 0.3 + 0.1) / 5
    assert "Predicted 72.0% of 5 tokens, accepted 60.0%. Calibration error 0.320: " in " ".join(out.split())
    inspect(path, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<title>1 of 2 accepted, 50%; predicted 80%</title>" in page
    assert "Calibration error 0.320" in page


def test_what_is_not_recorded_names_the_option_that_records_it(inspect: Inspect, tmp_path: Path) -> None:
    out, _ = inspect(traces.write(tmp_path / "t.jsonl", *traces.a_run()))
    assert "--record distributions adds to a trace how likely acceptance is, its lower bounds, and the" in out
    assert "accepted tokens of a draft, by its mean entropy" in out
    assert "cross-entropy over" not in out
    lookup = [line | {"entropies": []} if line["type"] == "round" else line for line in traces.a_run("lookup")]
    out, _ = inspect(traces.write(tmp_path / "t.jsonl", *lookup))
    assert "--record" not in out, "a draft without a model has no distributions"
    assert "by its mean entropy" not in out


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
    assert sum(found["tokens"] for found in first["bounds"]["by_acceptance"]) == drafted
    figures = [pair for line in rounds[1:] for pair in zip(line["kl"], line["entropies"], strict=True)]
    ratios = [1 + kl / entropy for kl, entropy in figures if entropy > 0.01]
    counts = [found["tokens"] for found in first["bounds"]["entropy_ratios"]]
    assert counts == [sum(found <= 10 * (ratio - 1) < found + 1 for ratio in ratios) for found in range(20)] + [0]
    assert 0 < first["bounds"]["pinsker_tighter"] < 1
    assert sum(found["drafts"] for found in first["accepted_length_by_entropy"]) == 199
    assert -1 < first["length_correlation"] < 0
    last = first["posterior"][-1]
    assert last["mean"] == pytest.approx(rounds[-1]["policy"]["alpha"] / sum(rounds[-1]["policy"].values()))
    assert last["low"] < last["mean"] < last["high"]
    assert first["calibration"]["judged"] == sum(found["judged"] for found in first["calibration"]["bins"])
    assert first["calibration"]["bins"][0].keys() == first["acceptance_by_entropy"][0].keys() | {"predicted"}
    assert second["bounds"] is second["calibration"] is None
    (bin_,) = second["accepted_length_by_entropy"]  # all entropies are 0.5
    assert (bin_["low"], bin_["drafts"], bin_["mean"], bin_["longest"]) == (0.5, 4, 2.5, 4)
    assert second["length_correlation"] is None
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
        (("t.jsonl", "--draft-dtype", "int8"), "--draft-dtype is for a pair of models"),
        (("--methods", "--device", "cpu"), "--methods lists the methods, and --device is given too"),
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

    monkeypatch.setattr("specgen.base.files.os.replace", fails)
    _, err = inspect(path, "--html", page, code=1)
    assert "No space left on device" in err
    assert page.read_text(encoding="utf-8") == before
    assert sorted(found.name for found in tmp_path.iterdir()) == ["page.html", "t.jsonl"]


@pytest.mark.parametrize("option", ["", *(pytest.param(option, marks=pytest.mark.slow) for option in ("--html", "--json"))])
def test_ten_thousand_rounds_take_seconds_and_no_torch(tmp_path: Path, option: str) -> None:
    path = traces.write(tmp_path / "t.jsonl", *traces.a_recorded_run(10_000))
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (500 << 20, 500 << 20))\n"
        "from specgen.cli.app import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    page = tmp_path / "page.html"
    options = {"": (), "--html": ("--html", str(page)), "--json": ("--json",)}[option]
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", limited, "inspect", "-q", str(path), *options], capture_output=True, text=True, check=False
    )
    after = os.times()  # processor time: as other tests run at the same time
    taken = after.children_user + after.children_system - before.children_user - before.children_system
    assert taken < 12, "a loose bound, for slow machines"
    assert (done.returncode, done.stderr) == (0, "False\n")
    assert page.exists() == (option == "--html")
    assert option != "--html" or page.stat().st_size < 20 << 20


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
