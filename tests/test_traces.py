"""Traces read back, and the figures of a trace: each computed a second time, in another way, or by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import traces
from scipy import stats

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.types import Draft, Mode, Round, TokenStatus, Verdict
from specgen.pair import records as writing
from specgen.pair.figures import Figures
from specgen.traces import reader
from specgen.traces.reader import TracedRound, TracedRun, read_trace
from specgen.traces.statistics import TraceStatistics, bounds_of, calibration_of, complete_runs, posteriors

Change = Callable[[list[dict[str, Any]]], Any]
ACCEPTED = TokenStatus.ACCEPTED


def read(path: Path, *lines: traces.Line) -> list[TracedRun]:
    return list(read_trace(traces.write(path / "t.jsonl", *lines)))


def statistics_of(*runs: TracedRun) -> TraceStatistics:
    found = TraceStatistics(runs[0].method)
    for run in runs:
        found.add(run)
    return found


# ------------------------------------------------------------------ reading


def test_what_was_written_comes_back_round_for_round(demo_pair: specgen.Pair, tmp_path: Path) -> None:
    path, expected = tmp_path / "trace.jsonl", []
    with writing.TraceWriter(path) as file:
        for repeat, method in enumerate(("svip", "ar", "beta-ts", "lookup")):
            sampling, given = specgen.SamplingParams(max_new_tokens=30, ignore_eos=True), {"k": 5} if method == "lookup" else {}
            request = demo_pair.request("def add(a, b):", method, sampling, **given)
            decoding = demo_pair.run(request)
            start = writing.start_line(demo_pair, request, decoding) | {"prompt_index": 4, "category": "code", "repeat": repeat}
            rounds = list(decoding.rounds())
            figures = Figures(method, rounds).as_dict("text", "length")
            lines = (writing.round_line(round_, demo_pair.tokenizer.text_of) for round_ in rounds)
            for line in (start, *lines, {"type": "summary", **figures}):
                file.write(line)
            expected.append((start, rounds, figures))
    runs = list(read_trace(path))
    for run, (start, rounds, figures) in zip(runs, expected, strict=True):
        assert (run.start, run.finish_reason, run.notes) == (start, "length", [])
        assert run.fold().as_dict("text", "length") == figures
        for traced, round_ in zip(run.rounds, rounds, strict=True):
            for name in ("index", "mode", "verdict", "statuses", "seconds", "policy_state"):
                assert getattr(traced.round, name) == getattr(round_, name)
            for name in ("tokens", "entropies"):
                assert list(getattr(traced.round.draft, name)) == list(getattr(round_.draft, name))
            assert traced.draft_texts == tuple(demo_pair.tokenizer.text_of([token]) for token in round_.draft.tokens)
    assert runs[-1].end == path.stat().st_size


def test_trees_come_back_with_the_path_that_was_accepted(tmp_path: Path) -> None:
    tree = traces.round_line(1, (1, 2, 1, 3, 3, 5), 0, 9, "correction", parents=[-1, -1, -1, 0, 2, 4], accepted_ids=[1, 3, 5])
    (run,) = read(tmp_path, traces.start_line(), traces.round_line(0), tree)
    round_ = run.rounds[1].round
    assert round_.verdict.path == (2, 4, 5)  # not by way of node 0, which holds the same token
    assert round_.accepted_ids == [1, 3, 5]
    assert round_.statuses[:3] == (TokenStatus.DISCARDED, TokenStatus.DISCARDED, TokenStatus.ACCEPTED)


def test_lines_of_earlier_and_later_versions_are_read(tmp_path: Path) -> None:
    start, first, second, *rest = traces.a_run()
    first |= {"novelty": [1], "policy": {"k": 3, "arms": [1, 2]}, "kl": None}
    first["seconds"] |= {"other": 1.0, "waiting": 2.0}
    second |= {"overlap": [0.5, 1, None], "kl": [0, 0, None]}
    (run,) = read(tmp_path, start | {"energy": None}, first, second, *rest)
    assert "predicted" not in first
    assert run.start["energy"] is None
    assert (run.rounds[0].round.seconds["other"], run.rounds[0].round.policy_state) == (3.0, {"k": 3.0})
    assert (run.rounds[0].round.target_passes, run.rounds[0].round.draft.predicted) == (1, ())
    agreement = run.rounds[1].round.verdict.agreement
    assert agreement is not None
    assert agreement.overlap[:2] == (0.5, 1.0)
    assert math.isnan(agreement.overlap[2])


@pytest.mark.parametrize("bytes_left", [1, 300])
def test_a_cut_trace_gives_what_is_whole(tmp_path: Path, bytes_left: int) -> None:
    path = traces.write(tmp_path / "t.jsonl", *traces.a_run(), *traces.a_run())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-3]) + lines[-3][:bytes_left])
    whole, cut = read_trace(path)
    assert (len(whole.rounds), whole.notes, whole.end) == (6, [], len(b"".join(lines[:8])))
    assert (len(cut.rounds), cut.fold().rounds, cut.summary, cut.finish_reason) == (4, 4, None, None)
    assert cut.notes == ["the trace is cut off in line 14: only what comes before is shown"]
    assert cut.end == len(b"".join(lines[:-3]))
    first, second = read(tmp_path, *traces.a_run()[:-1], *traces.a_run())
    assert (first.notes, second.notes) == (["the run has no summary: it was cut off"], [])
    changed = traces.a_run()
    del changed[5]  # no draft stood in round 4, so the ids alone tell
    changed[5]["index"] = 4
    assert "differ from those of the rounds" in read(tmp_path, *changed)[0].notes[0]


def changed(position: int, **changes: Any) -> Change:
    return lambda lines: lines[position].update(changes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda lines: lines[0].pop("versions"), "line 1: start.versions: Field required"),
        (lambda lines: lines.pop(0), "line 1: a round comes before any start line"),
        (lambda lines: lines.pop(2), "line 3: this is round 2, where round 1 is expected"),
        (lambda lines: lines.append(lines[3]), "line 9: a round comes after the run's summary"),
        (changed(2, draft_ids=[1, 2, "x"]), "line 3: round.draft_ids.2: Input should be a valid integer (it is 'x')"),
        (changed(2, draft_texts=["a"]), "line 3: draft_texts has 1 values for 3 drafted tokens"),
        (changed(2, parents=[-1, 0]), "line 3: parents has 2 values for 3 drafted tokens"),
        (changed(2, parents=[-1, 5, 0]), "line 3: parents has 5 for node 1"),
        (changed(2, parents=[-1, -1, -1], accepted_ids=[1, 2]), "line 3: accepted_ids has tokens that were not drafted"),
        (changed(2, entropies=[1]), "line 3: entropies has 1 values for 3 drafted tokens"),
        (changed(2, predicted=[0.5, 0.5]), "line 3: predicted has 2 values for 3 levels of drafted tokens"),
        (changed(2, predicted=[0.5] * 3, parents=[-1, 0, 0], accepted_ids=[1]), "line 3: predicted has 3 values for 2 levels"),
        (changed(2, seconds={"draft": -1}), "line 3: round.seconds.draft: "),
        (changed(7, finish_reason="tired"), "line 8: summary.finish_reason: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, change: Change, named: str) -> None:
    lines = traces.a_run()
    change(lines)
    with pytest.raises(SpecgenError) as caught:
        read(tmp_path, *lines)
    assert f"{tmp_path / 't.jsonl'}, {named}" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (b"\xff\xfe{}\n", "line 2 is not JSON"),
        (b'"round"\n', "line 2: Input should be an object"),
        (b'{"type": "\\ud800"}\n', "line 2 is not JSON"),
        (b"[" * 2000, "line 2: it is longer than 0 MiB"),
    ],
)
def test_lines_that_are_no_json(tmp_path: Path, second: bytes, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = traces.write(tmp_path / "t.jsonl", traces.start_line())
    monkeypatch.setattr(reader, "LONGEST_LINE", 2000 if len(second) == 2000 else 1 << 20)
    path.write_bytes(path.read_bytes() + second + b"{}\n" * second.endswith(b"\n"))
    with pytest.raises(SpecgenError) as caught:
        list(read_trace(path))
    assert named in str(caught.value)


def test_files_without_a_run(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for content, named in ((b"\n\n", "holds no run"), (b"{", "line 1 is not JSON")):
        path.write_bytes(content)
        with pytest.raises(SpecgenError, match=named):
            list(read_trace(path))


def test_control_characters_come_through_as_text(tmp_path: Path) -> None:
    start, first, *_ = traces.a_run()
    (run,) = read_trace(traces.write(tmp_path / "t.jsonl", start, first | {"token_text": "a\x1b[31m\x9b\u202e"}))
    assert run.rounds[0].token_text == "a\x1b[31m\x9b\u202e"


def test_traces_are_read_and_shown_without_torch(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "t.jsonl", *traces.a_recorded_run(20))
    script = "import sys\nfrom specgen.cli.app import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", script, "inspect", "-q", str(path), "--json"]
    line, loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert (json.loads(line)["rounds"], loaded) == (20, "False")


# ------------------------------------------------------------------ figures of tokens


@pytest.fixture
def recorded(tmp_path: Path) -> TracedRun:
    return read(tmp_path, *traces.a_recorded_run(300))[0]


def columns(run: TracedRun) -> np.ndarray[Any, Any]:
    """A row a drafted token: entropy, overlap, KL, prediction, whether it was accepted, whether it was judged."""
    rows = []
    for round_ in (traced.round for traced in run.rounds[1:]):
        accepted, agreement = len(round_.verdict.path), round_.verdict.agreement
        assert agreement is not None
        judged = accepted + (round_.verdict.source == "correction")
        figures = zip(round_.draft.entropies, agreement.overlap, agreement.kl, round_.draft.predicted, strict=True)
        rows += [(*each, position < accepted, position < judged) for position, each in enumerate(figures)]
    return np.array(rows, dtype=float)


@pytest.mark.parametrize("by", ["entropy", "prediction"])
def test_acceptance_by_a_number_known_before_counts_judged_tokens_only(recorded: TracedRun, by: str) -> None:
    found, table = statistics_of(recorded), columns(recorded)
    table = table[(table[:, 5] == 1) & ~np.isnan(table[:, 0 if by == "entropy" else 3])]
    numbers, accepted = table[:, 0 if by == "entropy" else 3], table[:, 4]
    calibration = calibration_of(found.predictions)
    assert calibration is not None
    bins, mean = (found.acceptance_by_entropy(), "mean") if by == "entropy" else (calibration["bins"], "predicted")
    assert sum(each["judged"] for each in bins) == len(table) > 300
    errors = 0.0
    for each in bins:
        inside = (numbers >= each["low"] - 1e-12) & (numbers < (each["high"] or math.inf))
        assert (each["judged"], each["accepted"]) == (inside.sum(), accepted[inside].sum())
        assert (each["rate"], each[mean]) == pytest.approx((accepted[inside].mean(), numbers[inside].mean()))
        wilson = stats.binomtest(each["accepted"], each["judged"]).proportion_ci(0.95, method="wilson")
        assert (each["rate_low"], each["rate_high"]) == pytest.approx((wilson.low, wilson.high), abs=1e-5)
        errors += inside.sum() * abs(each["rate"] - each[mean])
    if by == "prediction":
        whole = {"judged": len(table), "predicted": numbers.mean(), "rate": accepted.mean(), "error": errors / len(table)}
        assert {name: calibration[name] for name in whole} == pytest.approx(whole)


def test_bounds_are_medians_of_each_tokens_own(recorded: TracedRun) -> None:
    table = columns(recorded)
    entropy, overlap, kl = table[:, :3].T
    bounds = bounds_of(statistics_of(recorded).tokens, 0.15)
    assert bounds is not None
    each = np.array([entropy, overlap, 1 - np.sqrt(kl / 2), 1 - np.sqrt(1 - np.exp(-kl)), 1 - np.sqrt(0.15 * entropy)]).clip(0)
    ratio = float(np.median(1 + kl[entropy > 0.01] / entropy[entropy > 0.01]))
    expected = {
        "tokens": len(table),
        "c": 0.15,
        "below_estimate": (overlap < each[4]).mean(),
        "entropy_ratio": ratio,
        "measured_c": (ratio - 1) / 2,
        "pinsker_gap": (overlap - each[2]).mean(),
        "bretagnolle_huber_gap": (overlap - each[3]).mean(),
    }
    assert {name: bounds[name] for name in expected} == pytest.approx(expected)
    groups = [(found, (entropy >= found["low"]) & (entropy < (found["high"] or math.inf))) for found in bounds["by_entropy"]]
    tenths = np.array_split(np.argsort(overlap, kind="stable"), 10)
    groups += zip(bounds["by_acceptance"], tenths if len(table) % 10 == 0 else [], strict=False)
    for name in ("by_entropy", "by_acceptance"):
        assert sum(found["tokens"] for found in bounds[name]) == len(table)
    for found, inside in groups:
        shown = [found[name] for name in ("entropy", "acceptance", "pinsker", "bretagnolle_huber", "estimate")]
        assert shown == pytest.approx(list(np.median(each[:, inside], axis=1)))


# ------------------------------------------------------------------ figures of drafts and runs


def drafted(path: Path, *drafts: tuple[Sequence[float | None], int, dict[str, Any]]) -> TraceStatistics:
    """The statistics of a trace with these drafts: entropies, number of accepted tokens, and changes to the round's line."""
    rounds = [traces.round_line(0)]
    for index, (entropies, accepted, changes) in enumerate(drafts, 1):
        source = "bonus" if accepted == len(entropies) else "correction"
        line = traces.round_line(index, [5] * len(entropies), accepted, 9, source, entropies=entropies)
        rounds.append(line | changes)
    return statistics_of(*read(path, traces.start_line(), *rounds, traces.summary_line(rounds)))


def test_accepted_length_by_the_mean_entropy_of_verified_tokens(tmp_path: Path) -> None:
    tree = {"parents": [-1, -1, 0, 0], "draft_ids": [5, 6, 7, 8], "accepted_ids": [5]}
    found = drafted(
        tmp_path,
        ([0.1, 0.2, 0.3], 3, {}),
        ([0.1, 0.3, 0.5, 1.2, 9.0], 3, {}),  # the last token is discarded: (0.1 + 0.3 + 0.5 + 1.2) / 4
        ([2.4], 0, {}),
        ([0.4, 0.4, 0.6, 0.6], 1, tree),  # node 0, and the first of its rejected children
        ([0.3, None, None], 0, {}),  # only the first was verified
        ([None, 0.5], 1, {}),
        ([], 0, {"source": None}),
    )
    drafts = [(0.2, 3), (0.525, 3), (2.4, 0), (0.5, 1), (0.3, 0)]
    assert [draft.accepted for draft in found.drafts] == [draft[1] for draft in drafts]
    assert [draft.entropy for draft in found.drafts] == pytest.approx([draft[0] for draft in drafts])
    bins = found.accepted_length_by_entropy()
    expected_bins = [(0.1, 0.25, 1, 3), (0.25, 0.5, 1, 0), (0.5, 1.0, 2, 3), (2.0, 3.0, 1, 0)]
    assert [(each["low"], each["high"], each["drafts"], each["longest"]) for each in bins] == expected_bins
    assert (bins[2]["mean"], bins[2]["median"], bins[2]["mean_entropy"]) == pytest.approx((2.0, 2.0, 0.5125))
    expected = np.corrcoef(*zip(*drafts, strict=True))[0, 1]
    assert found.length_correlation() == pytest.approx(expected)
    assert drafted(tmp_path, ([0.1], 1, {}), ([0.3], 1, {})).length_correlation() is None
    assert drafted(tmp_path).length_correlation() is None


def round_of(accepted: int, *, rejects: bool = False, mode: Mode = "post-verify") -> Round:
    verdict = Verdict(tuple(range(accepted)), 9 if rejects else None, "correction" if rejects else None)
    return Round(1, mode, Draft.chain([7] * (accepted + rejects)), verdict)


def runs_of(*outputs: Sequence[Round]) -> Any:
    found = TraceStatistics("pearl")
    for rounds in outputs:
        found.add(TracedRun({"method": "pearl", "settings": {}}, 1, [TracedRound(round_, ("",) * 9, None) for round_ in rounds]))
    return found.runs_of_accepted()


def test_runs_of_accepted_tokens_go_over_rounds_and_not_over_outputs() -> None:
    """By hand: runs of 5, 0 and 1 tokens; 2 and 4 tokens more, which the ends of the two outputs cut short."""
    first = [round_of(3), round_of(2, rejects=True), round_of(0, rejects=True), round_of(2)]
    runs = runs_of(first, [round_of(1, rejects=True), round_of(4)])
    assert list(complete_runs(first)) == [5, 0]
    expected = {"complete": 3, "longest": 5, "mean": 2 + 1, "unfinished": 6, "alpha": 12 / 15, "expected": 1 / (1 - 12 / 15)}
    assert runs == pytest.approx(expected | {"deviation": (14 / 3) ** 0.5, "expected_deviation": 0.8**0.5 / 0.2})
    assert runs_of([round_of(4), round_of(3)]) is None, "nothing was rejected"
    none = runs_of([round_of(0, rejects=True)] * 3)
    assert [none[name] for name in ("alpha", "mean", "expected", "deviation", "expected_deviation")] == [0, 1, 1, 0, 0]


def test_a_posterior_is_normal_or_beta_with_possible_parameters() -> None:
    normals = [{"mean": mean, "deviation": deviation} for mean, deviation in ((0.6, 0.1), (0.95, 0.2), (1.1, 0.1), (0.5, -0.1))]
    betas = [{"alpha": alpha, "beta": beta} for alpha, beta in ((5e-324, 1.0), (1.0, 1e25), (0.0, 1.0), (3.0, 2.0))]
    states = [{"theta_hat": 0.7, "rounds": 0}, *normals, *betas]
    rounds = [Round(index, "sequential", Draft(), Verdict(), policy_state=state) for index, state in enumerate(states)]
    first, second, *_, last = found = posteriors(rounds)
    assert [each["round"] for each in found] == [1, 2, 5, 6, 8]
    normal = stats.norm(*(stats.beta(3, 2).mean(), stats.beta(3, 2).std()))
    assert (last["mean"], last["low"], last["high"]) == pytest.approx((0.6, normal.ppf(0.05), normal.ppf(0.95)), abs=1e-5)
    assert (first["mean"], first["low"], first["high"]) == pytest.approx((0.6, *stats.norm.ppf((0.05, 0.95), 0.6, 0.1)), abs=1e-5)
    assert (second["low"], second["high"]) == pytest.approx((stats.norm.ppf(0.05, 0.95, 0.2), 1.0), abs=1e-5)
