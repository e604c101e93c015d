"""Runs of accepted tokens between two rejections: PEARL's Theorem 2 and Table 4, in summaries, `inspect` and `compare`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import parsed, run_main
from comparisons import Compare
from measure_pearl import PassLog, allowed_seconds, measure, sweep, table
from traces import Line, round_line, start_line, summary_line, write

from specgen.base.types import Draft, Mode, Round, SamplingParams, Verdict
from specgen.compare.prompts import Prompt
from specgen.decoding.costs.pearl_window import ParallelCosts
from specgen.pair.accepted_runs import AcceptedRuns, accepted_runs, complete_runs
from specgen.pair.figures import Summary
from specgen.pair.pair import Pair


def round_of(accepted: int, *, rejects: bool = False, index: int = 1, mode: Mode = "post-verify") -> Round:
    verdict = Verdict(tuple(range(accepted)), 9 if rejects else None, "correction" if rejects else None)
    return Round(index, mode, Draft.chain([7] * (accepted + rejects)), verdict)


def summed(outputs: Sequence[Sequence[Round]]) -> tuple[Summary, AcceptedRuns | None]:
    summary = Summary("pearl", [round_ for rounds in outputs for round_ in rounds])
    return summary, accepted_runs(summary, [length for rounds in outputs for length in complete_runs(rounds)])


def test_runs_go_over_rounds_and_not_over_outputs() -> None:
    """By hand: runs of 5, 0 and 1 tokens; 2 and 4 tokens more, which the ends of the two outputs cut short."""
    first = [round_of(3), round_of(2, rejects=True), round_of(0, rejects=True), round_of(2)]
    second = [round_of(1, rejects=True), round_of(4)]
    assert list(complete_runs(first)) == [5, 0]
    summary, runs = summed([first, second])
    assert runs is not None
    assert summary.mean_accepted_run == pytest.approx(12 / 3)
    assert (runs.complete, runs.longest, runs.mean, runs.unfinished) == (3, 5, pytest.approx(2 + 1), 6)
    assert runs.alpha == pytest.approx(12 / 15)
    assert runs.expected == pytest.approx(1 / (1 - 12 / 15)) == summary.mean_accepted_run + 1
    assert runs.deviation == pytest.approx((14 / 3) ** 0.5)
    assert runs.expected_deviation == pytest.approx(0.8**0.5 / 0.2)


def test_without_a_rejection_there_is_no_figure() -> None:
    summary, runs = summed([[round_of(4), round_of(3)]])
    assert summary.mean_accepted_run is None
    assert runs is None


@pytest.mark.parametrize("alpha", [0.2, 0.8])
def test_independent_acceptance_gives_what_the_theorem_expects(alpha: float) -> None:
    """And a draft that is right in whole passages and wrong in others gives a larger deviation."""
    rng = random.Random(5)
    rounds = [round_of(1) if rng.random() < alpha else round_of(0, rejects=True) for _ in range(40_000)]
    _, runs = summed([rounds])
    assert runs is not None
    assert runs.mean == pytest.approx(1 / (1 - alpha), rel=0.05)
    assert runs.mean == pytest.approx(runs.expected, rel=0.01)
    assert runs.deviation == pytest.approx(runs.expected_deviation, rel=0.05)
    mixed = [round_of(40, rejects=True)] + [round_of(0, rejects=True)] * 9
    _, mixed_runs = summed([mixed])
    assert mixed_runs is not None
    assert mixed_runs.deviation > 2 * mixed_runs.expected_deviation


def pearl_trace(path: Path) -> Path:
    """The rounds of the first test, as a trace of PEARL."""
    shapes = [(3, None), (2, "correction"), (0, "correction"), (2, None)]
    rounds: list[Line] = [round_line(0)]
    for index, (accepted, source) in enumerate(shapes, 1):
        drafted = [2] * (accepted + (source is not None))
        token = 10 if source else None
        rounds.append(round_line(index, drafted, accepted, token, source, mode="post-verify"))
    return write(path, start_line("pearl"), *rounds, summary_line(rounds))


def test_inspect_shows_the_theorem_beside_the_measured_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = pearl_trace(tmp_path / "t.jsonl")
    expected = {"complete": 2, "alpha": 7 / 9, "mean": 3.5, "expected": 4.5, "deviation": 2.5, "longest": 5, "unfinished": 2}
    code, out, _ = run_main(monkeypatch, capfd, "inspect", str(path), "--json")
    (line,) = parsed(out)
    assert code == 0
    assert line["accepted_runs"] == pytest.approx(expected | {"expected_deviation": (7 / 9) ** 0.5 * 4.5})
    assert line["mean_accepted_run"] == pytest.approx(3.5)
    code, out, _ = run_main(monkeypatch, capfd, "inspect", str(path))
    shown = " ".join(out.split())
    assert "tokens until a rejection 2 complete runs, longest 5; 2 tokens accepted after the last rejections" in shown
    assert "mean 3.5 with the correction; 1/(1−α) = 4.5 by Theorem 2, α 78% with unfinished runs" in shown
    assert "deviation 2.5; 4.0 if tokens were accepted independently" in shown
    page = tmp_path / "page.html"
    assert run_main(monkeypatch, capfd, "inspect", "-q", str(path), "--html", str(page))[0] == 0
    html = page.read_text()
    assert "expects: 2 complete runs, longest 5; 2 tokens accepted after the last rejections.</figcaption>" in html
    assert "<p>Mean: 3.5 with the correction; 1/(1−α) = 4.5 by Theorem 2, α 78% with unfinished runs.</p>" in html
    assert "<p>Deviation: 2.5; 4.0 if tokens were accepted independently.</p>" in html


def test_compare_gives_each_method_its_mean_accepted_tokens(compare: Compare, tmp_path: Path) -> None:
    """Accepted tokens over rejections of the rounds in the trace, for a sequential method too; none for plain decoding."""
    trace = tmp_path / "t.jsonl"
    options = ("-m", "sd:k=3", "-n", "30", "--ignore-eos", "--repeats", "1", "--trace", str(trace))
    code, out, _ = compare(*options, "--json", "--csv", str(tmp_path / "t.csv"))
    assert code == 0
    plain, sd = parsed(out)
    rounds: list[Any] = [line for line in parsed(trace.read_text()) if line["type"] == "round"]
    accepted = sum(len(line["accepted_ids"]) for line in rounds)
    rejections = sum(line["source"] == "correction" for line in rounds)
    assert plain["mean_accepted_run"] is None
    assert sd["mean_accepted_run"] == pytest.approx(accepted / rejections)
    assert ",mean_accepted_run," in (tmp_path / "t.csv").read_text().splitlines()[0]


def test_the_figures_have_no_infinity() -> None:
    """Where every token is rejected, alpha is 0: no run, and a deviation of 0."""
    _, runs = summed([[round_of(0, rejects=True)] * 3])
    assert runs is not None
    assert asdict(runs) == {
        "complete": 3,
        "alpha": 0.0,
        "mean": 1.0,
        "expected": 1.0,
        "deviation": 0.0,
        "expected_deviation": 0.0,
        "longest": 0,
        "unfinished": 0,
    }


def test_the_sweep_of_windows_measures_each_on_the_same_prompts(
    pair_of: Callable[..., Pair], capsys: pytest.CaptureFixture[str]
) -> None:
    """The benchmark for PEARL's Tables 5 and 6: outputs equal plain decoding's, with a line for each window."""
    assert (sweep(1), sweep(5), sweep(60)[0], sweep(60)[-1], len(sweep(60))) == ([1], [1, 2, 3, 4, 5], 1, 60, 12)
    prompts = [Prompt(0, "the cat sat", "prose"), Prompt(1, "a b c a b", "code")]
    names = ["ar", "pearl", "pearl:window=1", "pearl:window=3", "pearl:post_verify=false"]
    figures = measure(pair_of("llama", "near"), names, prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert [found.overall.new_tokens for found in figures.values()] == [24] * 5
    assert [len(found.ratios) for found in figures.values()] == [2] * 5
    said = capsys.readouterr().out
    assert "NOT the same" not in said
    assert "pearl reaches" in said
    heading, *lines = table(figures)
    assert heading.split() == ["tokens/s", "x", "ar", "mean", "accepted", "a", "pass", "code", "prose"]
    assert [line.split()[0] for line in lines] == names


def test_what_passes_allow_by_hand() -> None:
    """Passes of 10 + width seconds, draft passes of 3: two are waited for; then five drafts are shorter; then longer."""
    log = PassLog()
    for drafted, width in ((6, 3), (4, 5), (8, 1)):
        log.add(drafted, 0.0, width, 0.0)
    rounds = [round_of(1, mode="pre-verify"), round_of(1), round_of(1)]
    assert allowed_seconds(rounds, log, ParallelCosts(3.0, 20.0, 11.0, 10, 50)) == (2 * 3 + 13) + 15 + 24
