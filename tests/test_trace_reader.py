"""Traces read back: what was written comes out, what is malformed gets one clear line, what is whole in a cut trace is given."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import traces

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.types import TokenStatus
from specgen.pair import records as writing
from specgen.pair.figures import Summary
from specgen.traces.reader import read_trace

Change = Callable[[list[dict[str, Any]]], Any]


def test_what_was_written_comes_back_round_for_round(demo_pair: specgen.Pair, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    file = writing.TraceWriter(path)
    expected = []
    for repeat, method in enumerate(("svip", "ar", "beta-ts", "lookup")):
        sampling, given = specgen.SamplingParams(max_new_tokens=30, ignore_eos=True), {"k": 5} if method == "lookup" else {}
        request = demo_pair.request("def add(a, b):", method, sampling, **given)
        decoding = demo_pair.run(request)
        extra = {"prompt_index": 4, "category": "code", "repeat": repeat}
        start = writing.start_line(demo_pair, request, decoding) | extra
        file.write(start)
        rounds = list(decoding.rounds())
        for round_ in rounds:
            file.write(writing.round_line(round_, demo_pair.tokenizer.text_of))
        figures = Summary(method, rounds).as_dict("text", "length")
        file.write(writing.summary_line(figures))
        expected.append((start, rounds, figures))
    file.close()
    runs = list(read_trace(path))
    assert len(runs) == 4
    for run, (start, rounds, figures) in zip(runs, expected, strict=True):
        assert run.start == start
        assert [traced.round.index for traced in run.rounds] == [round_.index for round_ in rounds]
        for traced, round_ in zip(run.rounds, rounds, strict=True):
            assert traced.round.verdict == round_.verdict
            assert traced.round.statuses == round_.statuses
            assert traced.round.mode == round_.mode
            assert list(traced.round.draft.tokens) == list(round_.draft.tokens)
            assert list(traced.round.draft.entropies) == list(round_.draft.entropies)
            assert traced.round.seconds == round_.seconds
            assert traced.round.policy_state == round_.policy_state
            assert traced.draft_texts == tuple(demo_pair.tokenizer.text_of([token]) for token in round_.draft.tokens)
        assert run.fold().as_dict("text", "length") == figures
        assert run.finish_reason == "length"
        assert run.notes == []
    assert runs[-1].end == path.stat().st_size


def test_trees_come_back_with_the_path_that_was_accepted(tmp_path: Path) -> None:
    tree = traces.round_line(1, (1, 2, 1, 3, 3, 5), 0, 9, "correction", parents=[-1, -1, -1, 0, 2, 4], accepted_ids=[1, 3, 5])
    run = next(read_trace(traces.write(tmp_path / "t.jsonl", traces.start_line(), traces.round_line(0), tree)))
    round_ = run.rounds[1].round
    assert round_.verdict.path == (2, 4, 5)  # not by way of node 0, which holds the same token
    assert round_.accepted_ids == [1, 3, 5]
    assert round_.statuses[:3] == (TokenStatus.DISCARDED, TokenStatus.DISCARDED, TokenStatus.ACCEPTED)


def test_what_a_later_version_adds_is_let_through(tmp_path: Path) -> None:
    start, first, *rest = traces.a_run()
    first |= {"novelty": [1], "seconds": first["seconds"] | {"waiting": 2.0}, "policy": {"k": 3, "arms": [1, 2]}, "kl": None}
    run = next(read_trace(traces.write(tmp_path / "t.jsonl", start | {"energy": None}, first, *rest)))
    assert run.start["energy"] is None
    assert run.rounds[0].round.seconds["other"] == 2.0
    assert run.rounds[0].round.policy_state == {"k": 3.0}


def test_figures_of_unverified_tokens_may_be_null(tmp_path: Path) -> None:
    start, first, second, *_ = traces.a_run()
    run = next(read_trace(traces.write(tmp_path / "t.jsonl", start, first, second | {"overlap": [0.5, 1, None]})))
    assert run.rounds[1].overlap[:2] == (0.5, 1.0)
    assert math.isnan(run.rounds[1].overlap[2])


@pytest.mark.parametrize("bytes_left", [1, 40, 300])
def test_a_cut_trace_gives_what_is_whole(tmp_path: Path, bytes_left: int) -> None:
    path = traces.write(tmp_path / "t.jsonl", *traces.a_run(), *traces.a_run())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-3]) + lines[-3][:bytes_left])
    whole, cut = read_trace(path)
    assert (len(whole.rounds), whole.notes) == (6, [])
    assert (len(cut.rounds), cut.summary, cut.finish_reason) == (4, None, None)
    assert cut.notes == ["the trace is cut off in line 14: only what comes before is shown"]
    assert cut.end == len(b"".join(lines[:-3]))
    assert cut.fold().rounds == 4


def test_a_run_without_a_summary_says_so(tmp_path: Path) -> None:
    first, second = read_trace(traces.write(tmp_path / "t.jsonl", *traces.a_run()[:-1], *traces.a_run()))
    assert first.notes == ["the run has no summary: it was cut off"]
    assert second.notes == []


def test_a_summary_of_other_tokens_is_noted(tmp_path: Path) -> None:
    lines = traces.a_run()
    del lines[5]  # no draft stood in round 4, so the ids alone tell
    lines[5]["index"] = 4
    (run,) = read_trace(traces.write(tmp_path / "t.jsonl", *lines))
    assert "differ from those of the rounds" in run.notes[0]


def changed(position: int, **changes: Any) -> Change:
    return lambda lines: lines[position].update(changes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (changed(0, type="begin"), "line 1: the type 'begin' is unknown"),
        (lambda lines: lines[0].pop("type"), "line 1: not a line of a trace, because it has no type"),
        (changed(0, type=5), "line 1: the type 5 is unknown"),
        (changed(0, prompt_ids="abc"), "line 1: prompt_ids: Input should be a valid list (it is 'abc')"),
        (changed(0, method=None), "line 1: method: Input should be a valid string (it is None)"),
        (changed(0, settings=[]), "line 1: settings: "),
        (lambda lines: lines[0].pop("versions"), "line 1: versions: Field required"),
        (lambda lines: lines.pop(0), "line 1: a round comes before any start line"),
        (lambda lines: lines.pop(2), "line 3: this is round 2, where round 1 is expected"),
        (changed(2, index=True), "line 3: index: "),
        (lambda lines: lines.append(lines[3]), "line 9: a round comes after the run's summary"),
        (changed(2, mode="sideways"), "line 3: mode: "),
        (changed(2, source="guess"), "line 3: source: "),
        (changed(2, draft_ids=[1, 2, "x"]), "line 3: draft_ids.2: Input should be a valid integer (it is 'x')"),
        (changed(2, draft_ids=[1, 2, -3]), "line 3: draft_ids.2: "),
        (changed(2, draft_ids=[1, 2, True]), "line 3: draft_ids.2: "),
        (changed(2, draft_ids=[1, 2, 2**70]), "line 3: it is not JSON (1180591620717411303424 is too large)"),
        (changed(2, draft_texts=["a"]), "line 3: draft_texts has 1 values for 3 drafted tokens"),
        (changed(2, draft_texts=["a", "b", 3]), "line 3: draft_texts.2: "),
        (changed(2, parents=[-1, 0]), "line 3: parents has 2 values for 3 drafted tokens"),
        (changed(2, parents=[-1, 5, 0]), "line 3: parents has 5 for node 1"),
        (changed(2, parents=[-1, -2, 0]), "line 3: parents has -2 for node 1"),
        (changed(2, accepted_ids=[1, 3]), "line 3: accepted_ids has tokens that were not drafted"),
        (changed(2, parents=[-1, -1, -1], accepted_ids=[1, 2]), "line 3: accepted_ids has tokens that were not drafted"),
        (changed(2, token_id=4.5), "line 3: token_id: "),
        (changed(2, entropies=[1]), "line 3: entropies has 1 values for 3 drafted tokens"),
        (changed(2, entropies=["1", 1, 1]), "line 3: entropies.0: "),
        (changed(2, predicted=[0.5, 0.5]), "line 3: predicted has 2 values for 3 levels of drafted tokens"),
        (changed(2, predicted=[0.5] * 3, parents=[-1, 0, 0], accepted_ids=[1]), "line 3: predicted has 3 values for 2 levels"),
        (changed(2, predicted=[0.5, 1.5, 0.5]), "line 3: predicted.1: "),
        (changed(2, predicted=[0.5, -0.1, None]), "line 3: predicted.1: "),
        (changed(2, predicted=["0.5", 0.5, 0.5]), "line 3: predicted.0: "),
        (changed(2, overlap=[10**400, 1, 1]), "line 3: it is not JSON (10000000000000000000… is too large)"),
        (changed(2, seconds={"draft": -1}), "line 3: seconds.draft: "),
        (changed(2, seconds=None), "line 3: seconds: "),
        (changed(2, policy=[1]), "line 3: policy: "),
        (changed(7, finish_reason="tired"), "line 8: finish_reason: "),
        (changed(7, token_ids=None), "line 8: token_ids: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, change: Change, named: str) -> None:
    lines = traces.a_run()
    change(lines)
    path = traces.write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(SpecgenError) as caught:
        list(read_trace(path))
    assert f"{path}, {named}" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (b"\xff\xfe{}\n", "line 2: it is not JSON ('utf-8' codec can't decode"),
        (b"[" * 200_000 + b"\n", "line 2: it is not JSON (maximum recursion depth exceeded"),
        (b'{"type": "round", \n', "line 2: it is not JSON ("),
        (b'{"type": "round", "index": NaN}\n', "line 2: it is not JSON (NaN is not a number)"),
        (b'{"type": "round", "index": ' + b"9" * 5000 + b"}\n", "line 2: it is not JSON (99999999999999999999… is too large)"),
        (b'{"type": "ro\x1b[31mund"}\n', "line 2: it is not JSON (Invalid control character"),
        (b'"round"\n', "line 2: it is not JSON (an object is expected)"),
        (b'{"type": "\\ud800"}\n', "line 2: the type '?' is unknown"),
    ],
)
def test_lines_that_are_no_json(tmp_path: Path, second: bytes, named: str) -> None:
    path = traces.write(tmp_path / "t.jsonl", traces.start_line())
    path.write_bytes(path.read_bytes() + second + b"{}\n")
    with pytest.raises(SpecgenError) as caught:
        list(read_trace(path))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"), [(b"", "holds no run"), (b"\n\n", "holds no run"), (b"{", "line 1: it is not JSON")]
)
def test_files_without_a_run(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(SpecgenError, match=named):
        list(read_trace(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpecgenError, match=r"cannot read the trace .*nowhere.*: No such file"):
        list(read_trace(tmp_path / "nowhere.jsonl"))
    with pytest.raises(SpecgenError, match=r"cannot read the trace .*: Is a directory"):
        list(read_trace(tmp_path))


def test_half_characters_and_control_characters_come_through_as_text(tmp_path: Path) -> None:
    start, first, *_ = traces.a_run()
    path = traces.write(tmp_path / "t.jsonl", start, first | {"token_text": "a\x1b[31m\x9b\u202e"})
    path.write_bytes(path.read_bytes().replace(b"\\u001b", b"\\ud83d\\u001b"))
    (run,) = read_trace(path)
    assert run.rounds[0].token_text == "a?\x1b[31m\x9b\u202e"


_READ = r"""
import re, sys
from pathlib import Path
from specgen.pair.figures import Summary
from specgen.traces.reader import read_trace
from specgen.base.errors import SpecgenError
try:
    print(sum(len(run.rounds) for run in read_trace(Path(sys.argv[1]))))
except SpecgenError as error:
    print(error)
peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())  # getrusage would count the parent's, until exec
print(int(peak[1]) >> 10, "torch" in sys.modules)
"""


def read_apart(path: Path) -> tuple[str, int, bool]:
    """What a process of its own reads, the MiB that it took, and whether it imported torch."""
    out = subprocess.run([sys.executable, "-c", _READ, str(path)], capture_output=True, text=True, check=True).stdout
    said, last = out.splitlines()
    return said, int(last.split()[0]), last.endswith("True")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_a_hundred_megabytes_in_one_line_are_refused_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with path.open("wb") as file:
        file.write(json.dumps(traces.start_line()).encode() + b"\n")
        for _ in range(100):
            file.write(b"[" * (1 << 20))
    said, megabytes, has_torch = read_apart(path)
    assert "line 2: it is longer than 16 MiB" in said
    assert megabytes < 120
    assert not has_torch


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_ten_thousand_rounds_are_read_in_seconds_run_by_run(tmp_path: Path) -> None:
    run = traces.a_recorded_run(2000)
    path = traces.write(tmp_path / "t.jsonl", *run, *run, *run, *run, *run)
    before = os.times()
    said, megabytes, _ = read_apart(path)
    assert said == "10000"
    after = os.times()  # processor time: other tests run beside this one
    assert after.children_user + after.children_system - before.children_user - before.children_system < 5
    assert megabytes < 200
