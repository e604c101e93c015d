"""Traces read back, and the figures of a trace: each computed a second time, in another way, or by
hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
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
from specgen.traces.reader import TracedRound, TracedRun, read_trace
from specgen.traces.statistics import TraceStatistics, acceptance_bins, complete_runs, posteriors
from specgen.traces.writer import TraceWriter

Change = Callable[[list[dict[str, Any]]], Any]


def read(path: Path, *lines: traces.Line) -> list[TracedRun]:
    return list(read_trace(traces.write(path / "t.jsonl", *lines)))


def statistics_of(*runs: TracedRun) -> TraceStatistics:
    found = TraceStatistics(runs[0].method)
    for run in runs:
        found.add(run)
    return found


# ------------------------------------------------------------------ reading


def test_what_was_written_comes_back_round_for_round(
    demo_pair: specgen.Pair, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    expected = []
    with closing(TraceWriter(path)) as file:
        for method in ("svip", "ar", "beta-ts"):
            request = demo_pair.request(
                "def add(a, b):", method, specgen.SamplingParams(max_new_tokens=30, ignore_eos=True)
            )
            decoding = demo_pair.run(request)
            start = writing.start_line(demo_pair, request, decoding) | {
                "prompt_index": 4,
                "category": "code",
            }
            rounds = list(decoding.rounds())
            figures = Figures(method, rounds).as_dict("text", "length")
            lines = (writing.round_line(round_, demo_pair.tokenizer.text_of) for round_ in rounds)
            for line in (start, *lines, {"type": "summary", **figures}):
                file.write(line)
            expected.append((start, rounds, figures))
    for run, (start, rounds, figures) in zip(read_trace(path), expected, strict=True):
        assert (run.start, run.finish_reason, run.notes) == (start, "length", [])
        assert run.fold().as_dict("text", "length") == figures
        for traced, round_ in zip(run.rounds, rounds, strict=True):
            for name in ("index", "mode", "verdict", "statuses", "seconds", "policy_state"):
                assert getattr(traced.round, name) == getattr(round_, name)
            assert list(traced.round.draft.entropies) == list(round_.draft.entropies)
            assert traced.draft_texts == tuple(
                demo_pair.tokenizer.text_of([token]) for token in round_.draft.tokens
            )
    assert run.end == path.stat().st_size


def test_trees_come_back_with_the_path_that_was_accepted(tmp_path: Path) -> None:
    tree = traces.round_line(
        1,
        (1, 2, 1, 3, 3, 5),
        0,
        9,
        "correction",
        parents=[-1, -1, -1, 0, 2, 4],
        accepted_ids=[1, 3, 5],
    )
    (run,) = read(tmp_path, traces.start_line(), traces.round_line(0), tree)
    round_ = run.rounds[1].round
    assert round_.verdict.path == (2, 4, 5)  # not by way of node 0, which holds the same token
    assert round_.statuses[:3] == (
        TokenStatus.DISCARDED,
        TokenStatus.DISCARDED,
        TokenStatus.ACCEPTED,
    )


def test_lines_of_earlier_and_later_versions_are_read(tmp_path: Path) -> None:
    start, first, second, *rest = traces.a_run()
    first |= {"novelty": [1], "policy": {"k": 3, "arms": [1, 2]}, "kl": None}
    first["seconds"] |= {"other": 1.0, "waiting": 2.0}
    second |= {"overlap": [0.5, 1, None], "kl": [0, 0, None]}
    (run,) = read(tmp_path, start | {"energy": None}, first, second, *rest)
    round_ = run.rounds[0].round
    agreement = run.rounds[1].round.verdict.agreement
    assert (round_.seconds["other"], round_.policy_state) == (3.0, {"k": 3.0})
    assert (round_.target_passes, round_.draft.predicted) == (1, ())
    assert agreement is not None
    assert agreement.overlap == pytest.approx((0.5, 1.0, math.nan), nan_ok=True)


@pytest.mark.parametrize("bytes_left", [1, 300])
def test_a_cut_trace_gives_what_is_whole(tmp_path: Path, bytes_left: int) -> None:
    path = traces.write(tmp_path / "t.jsonl", *traces.a_run(), *traces.a_run())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-3]) + lines[-3][:bytes_left])
    whole, cut = read_trace(path)
    assert (len(whole.rounds), whole.notes, whole.end) == (6, [], len(b"".join(lines[:8])))
    assert (len(cut.rounds), cut.fold().rounds, cut.finish_reason) == (4, 4, None)
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
        (lambda lines: lines[0].pop("versions"), "line 1: start.versions: it is missing"),
        (lambda lines: lines.pop(0), "line 1: a round comes before any start line"),
        (lambda lines: lines.pop(2), "line 3: this is round 2, where round 1 is expected"),
        (lambda lines: lines.append(lines[3]), "line 9: a round comes after the run's summary"),
        (
            changed(2, draft_ids=[1, "x"]),
            "line 3: round.draft_ids.1: it has to be a valid integer (it is 'x')",
        ),
        (changed(2, parents=[-1, 0]), "line 3: parents has 2 values for 3 drafted tokens"),
        (changed(2, parents=[-1, 5, 0]), "line 3: parents has 5 for node 1"),
        (
            changed(2, parents=[-1, -1, -1], accepted_ids=[1, 2]),
            "line 3: accepted_ids has tokens that were not drafted",
        ),
        (changed(2, entropies=[1]), "line 3: entropies has 1 values for 3 drafted tokens"),
        (
            changed(2, predicted=[0.5, 0.5]),
            "line 3: predicted has 2 values for 3 levels of drafted tokens",
        ),
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


# ------------------------------------------------------------------ figures


def test_acceptance_in_ranges_of_a_number_has_wilsons_interval() -> None:
    rng = np.random.default_rng(3)
    numbers = rng.random(400)
    accepted = rng.random(400) < 0.7
    bins = acceptance_bins([*zip(numbers, accepted, strict=True)], (0.0, 0.1, 0.5, 1.0), "mean")
    assert [each["low"] for each in bins] == [0.0, 0.1, 0.5]
    for each in bins:
        inside = (numbers >= each["low"]) & (numbers < each["high"])
        wilson = stats.binomtest(int(accepted[inside].sum()), int(inside.sum())).proportion_ci(
            0.95, method="wilson"
        )
        found = (each["mean"], each["rate"], each["rate_low"], each["rate_high"])
        assert found == pytest.approx(
            (numbers[inside].mean(), accepted[inside].mean(), *wilson), abs=1e-5
        )


def drafted(
    path: Path, *drafts: tuple[Sequence[float | None], int, dict[str, Any]]
) -> TraceStatistics:
    """The statistics of a trace with these drafts: entropies, number of accepted tokens, and
    changes to the round's line."""
    rounds = [traces.round_line(0)]
    for index, (entropies, accepted, changes) in enumerate(drafts, 1):
        source = "bonus" if accepted == len(entropies) else "correction"
        line = traces.round_line(
            index, [5] * len(entropies), accepted, 9, source, entropies=entropies
        )
        rounds.append(line | changes)
    return statistics_of(*read(path, traces.start_line(), *rounds, traces.summary_line(rounds)))


def test_accepted_length_by_the_mean_entropy_of_verified_tokens(tmp_path: Path) -> None:
    tree = {"parents": [-1, -1, 0, 0], "draft_ids": [5, 6, 7, 8], "accepted_ids": [5]}
    found = drafted(
        tmp_path,
        ([0.1, 0.2, 0.3], 3, {}),
        # the last token is discarded: (0.1 + 0.3 + 0.5 + 1.2) / 4
        ([0.1, 0.3, 0.5, 1.2, 9.0], 3, {}),
        ([2.4], 0, {}),
        ([0.4, 0.4, 0.6, 0.6], 1, tree),  # node 0, and the first of its rejected children
        ([0.3, None, None], 0, {}),  # only the first was verified
        ([None, 0.5], 1, {}),
        ([], 0, {"source": None}),
    )
    drafts = [(0.2, 3), (0.525, 3), (2.4, 0), (0.5, 1), (0.3, 0)]
    assert [draft.accepted for draft in found.drafts] == [draft[1] for draft in drafts]
    assert [draft.entropy for draft in found.drafts] == pytest.approx(
        [draft[0] for draft in drafts]
    )
    bins = found.accepted_length_by_entropy()
    assert [(each["low"], each["drafts"], each["longest"]) for each in bins] == [
        (0.1, 1, 3),
        (0.25, 1, 0),
        (0.5, 2, 3),
        (2, 1, 0),
    ]
    assert found.length_correlation() == pytest.approx(
        np.corrcoef(*zip(*drafts, strict=True))[0, 1]
    )
    assert drafted(tmp_path, ([0.1], 1, {}), ([0.3], 1, {})).length_correlation() is None


def round_of(accepted: int, *, rejects: bool = False, mode: Mode = "post-verify") -> Round:
    verdict = Verdict(
        tuple(range(accepted)), 9 if rejects else None, "correction" if rejects else None
    )
    return Round(1, mode, Draft.chain([7] * (accepted + rejects)), verdict)


def runs_of(*outputs: Sequence[Round]) -> Any:
    runs = [[TracedRound(round_, ("",) * 9, None) for round_ in rounds] for rounds in outputs]
    return statistics_of(
        *(TracedRun({"method": "pearl", "settings": {}}, 1, rounds) for rounds in runs)
    ).runs_of_accepted()


def test_runs_of_accepted_tokens_go_over_rounds_and_not_over_outputs() -> None:
    """By hand: runs of 5, 0 and 1 tokens; 2 and 4 tokens more, which the ends of the two outputs
    cut short."""
    first = [round_of(3), round_of(2, rejects=True), round_of(0, rejects=True), round_of(2)]
    runs = runs_of(first, [round_of(1, rejects=True), round_of(4)])
    assert list(complete_runs(first)) == [5, 0]
    expected = {
        "complete": 3,
        "longest": 5,
        "mean": 2 + 1,
        "unfinished": 6,
        "alpha": 12 / 15,
        "expected": 1 / (1 - 12 / 15),
    }
    assert runs == pytest.approx(
        expected | {"deviation": (14 / 3) ** 0.5, "expected_deviation": 0.8**0.5 / 0.2}
    )
    assert runs_of([round_of(4), round_of(3)]) is None, "nothing was rejected"
    none = runs_of([round_of(0, rejects=True)] * 3)
    assert [
        none[name] for name in ("alpha", "mean", "expected", "deviation", "expected_deviation")
    ] == [0, 1, 1, 0, 0]


def test_a_posterior_is_normal_or_beta_with_possible_parameters() -> None:
    normals = [
        {"mean": mean, "deviation": deviation}
        for mean, deviation in ((0.6, 0.1), (0.95, 0.2), (1.1, 0.1), (0.5, -0.1))
    ]
    betas = [
        {"alpha": alpha, "beta": beta}
        for alpha, beta in ((5e-324, 1.0), (1.0, 1e25), (0.0, 1.0), (3.0, 2.0))
    ]
    states = [{"theta_hat": 0.7, "rounds": 0}, *normals, *betas]
    rounds = [
        Round(index, "sequential", Draft(), Verdict(), policy_state=state)
        for index, state in enumerate(states)
    ]
    found = {
        each["round"]: (each["mean"], each["low"], each["high"]) for each in posteriors(rounds)
    }
    assert list(found) == [1, 2, 5, 6, 8]
    assert found[1] == pytest.approx((0.6, *stats.norm.ppf((0.05, 0.95), 0.6, 0.1)), abs=1e-5)
    assert found[2][2] == 1.0
    assert found[8] == pytest.approx(
        (0.6, *stats.norm.ppf((0.05, 0.95), 0.6, stats.beta(3, 2).std())), abs=1e-5
    )
