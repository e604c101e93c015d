"""The sweep of the generation length: which runs it makes, in which order, and the figures it prints."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import cast

import measure_joint
import measure_lengths
import pytest

import specgen
from specgen.base.types import Draft, Round, SamplingParams, Verdict
from specgen.pair.figures import Summary

SECONDS = {"ar": 4.0, "sd:k=5": 2.0, "svip": 1.0}  # for 8 tokens, on the first prompt


def summary_of(name: str, tokens: int, seconds: float) -> Summary:
    """Rounds of a draft of three tokens with two accepted, or of one token for plain decoding."""
    rounds, left = [Round(0, "prefill", Draft(), Verdict((), 1), {"prefill": 0.0})], tokens - 1
    while left:
        size = min(3, left) if name != "ar" else 1
        draft = Draft() if size == 1 else Draft.chain((1, 1, 1))
        verdict = Verdict(tuple(range(size - 1)), 1, None if size == 1 else "correction")
        rounds.append(Round(len(rounds), "sequential", draft, verdict, {"verify": 0.0}))
        left -= size
    rounds[-1] = Round(rounds[-1].index, "sequential", rounds[-1].draft, rounds[-1].verdict, {"verify": seconds})
    return Summary(name, rounds)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    made: list[tuple[str, str, int]] = []

    def run(_: object, name: str, text: str, sampling: SamplingParams) -> Summary:
        assert sampling.ignore_eos
        made.append((name, text, sampling.max_new_tokens))
        slower = 1.5 if text == "second" and name != "ar" else 1.0
        return summary_of(name, sampling.max_new_tokens, SECONDS[name] * slower * sampling.max_new_tokens / 8)

    monkeypatch.setattr(measure_lengths, "run", run)
    return made


def test_methods_run_in_turn_and_speedups_are_of_the_same_prompt(
    runs: list[tuple[str, str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    names, lengths = list(SECONDS), [4, 7]
    cells = measure_lengths.measure(cast("specgen.Pair", None), names, ["first", "second", "third"], lengths, 0.0, 0)
    assert runs[:3] == [(name, "first", 4) for name in names], "one round warms up"
    assert runs[3:] == [(name, text, length) for text in ("first", "second", "third") for length in lengths for name in names]
    assert [cells["svip", length].speedups for length in lengths] == [pytest.approx([4, 4 / 1.5, 4])] * 2
    measure_lengths.print_tables(cells, names, lengths)
    tables = [[line.split() for line in table.splitlines()] for table in capsys.readouterr().out.strip().split("\n\n")]
    assert [table[1] for table in tables] == [["new", "tokens", "4", "7"]] * 4
    assert [tables[0][2], tables[0][3]] == [["sd:k=5", "2.00", "2.00"], ["svip", "4.00", "4.00"]]
    # a prefill and one or two rounds of 3 tokens; each drafts 3 and accepts 2
    assert [table[3][1:] for table in tables[1:]] == [["2.00", "2.33"], ["3.00", "3.00"], ["0.67", "0.67"]]


def test_other_output_than_plain_decodings_is_said(
    runs: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = measure_lengths.run

    def wrong(pair: specgen.Pair, name: str, text: str, sampling: SamplingParams) -> Summary:
        found = right(pair, name, text, sampling)
        if (name, text, sampling.max_new_tokens) == ("svip", "second", 7):
            found.token_ids[3] = 9
        return found

    monkeypatch.setattr(measure_lengths, "run", wrong)
    for temperature, said in (0.0, "NOT the same output at 7 tokens of prompt 2: svip\n"), (1.0, ""):
        measure_lengths.measure(cast("specgen.Pair", None), list(SECONDS), ["first", "second"], [4, 7], temperature, 0)
        assert capsys.readouterr().out == said


def test_a_run_has_the_settings_that_are_written_after_the_method() -> None:
    with specgen.load(device="cpu", dtype="float32") as pair:
        sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
        found = measure_lengths.run(pair, "sd:k=2", "def mean(numbers):", sampling)
    assert (found.new_tokens, found.method) == (12, "sd")
    assert found.mean_draft_length is not None
    assert found.mean_draft_length <= 2


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        (measure_lengths, ["--methods", "nope"], "error: --methods: there is no method 'nope'"),
        (measure_joint, ["nope"], "error: there is no table 'nope'"),
    ],
)
def test_a_wrong_name_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: ModuleType, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert len(err.splitlines()) == 1
