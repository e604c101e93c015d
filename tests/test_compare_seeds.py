"""The seeds of a comparison's runs: fresh for each prompt and repeat, the same for all methods, and repeatable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_helpers import parsed, run_main
from comparisons import PROMPTS, Compare, runs_of

Seeds = dict[tuple[int, int], set[int]]


def seeds_of(trace: Path, *specs: str) -> Seeds:
    """The seeds of the runs of these methods, by prompt and repeat."""
    found: Seeds = {}
    for spec in specs:
        for prompt, runs in runs_of(trace)[spec].items():
            for run in runs:
                found.setdefault((prompt, run["start"]["repeat"]), set()).add(run["start"]["sampling"]["seed"])
    return found


def thetas(run: dict[str, Any]) -> list[str]:
    """The reasons for which drafts ended, each with the acceptance rate that the bandit drew."""
    return [line["stop_reason"] for line in run["rounds"] if line["stop_reason"]]


def test_each_prompt_and_repeat_draws_afresh(compare: Compare, tmp_path: Path) -> None:
    measured = ["-n", "16", "--ignore-eos", "--seed", "5"]
    code, _, err = compare("-m", "beta-ts,sd:policy=beta-ts", *measured, "--repeats", "2", "--trace", str(tmp_path / "a.jsonl"))
    assert code == 0, err
    specs = ("ar", "beta-ts", "sd:policy=beta-ts")
    seeds = seeds_of(tmp_path / "a.jsonl", *specs)
    assert len(seeds) == 2 * len(PROMPTS)
    assert all(len(found) == 1 for found in seeds.values()), "all methods share a prompt's seed"
    assert len(set.union(*seeds.values())) == len(seeds), "and no other prompt or repeat has it"
    runs = runs_of(tmp_path / "a.jsonl")
    drawn = [tuple(thetas(run)) for runs in runs["beta-ts"].values() for run in runs]
    assert len(set(drawn)) == len(drawn)
    assert [thetas(run) for run in runs["beta-ts"][1]] == [thetas(run) for run in runs["sd:policy=beta-ts"][1]]
    # other methods and fewer prompts: the same seeds
    compare("-m", "sd", *measured, "--repeats", "1", "--limit", "2", "--trace", str(tmp_path / "b.jsonl"))
    again = seeds_of(tmp_path / "b.jsonl", "sd")
    assert again
    assert all(seeds[key] == found for key, found in again.items())
    compare("-m", "sd", *measured[:-1], "6", "--repeats", "1", "--limit", "2", "--trace", str(tmp_path / "c.jsonl"))
    assert all(seeds[key] != found for key, found in seeds_of(tmp_path / "c.jsonl", "sd").items())


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_generate_repeats_a_run_by_the_seed_in_its_trace(
    compare: Compare,
    pair: tuple[str, ...],
    tmp_path: Path,
    temperature: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = ["-n", "16", "--ignore-eos", "--temperature", temperature]
    assert compare("-m", "beta-ts", *options, "--repeats", "2", "--trace", str(tmp_path / "a.jsonl"))[0] == 0
    run = runs_of(tmp_path / "a.jsonl")["beta-ts"][3][1]
    seed = str(run["start"]["sampling"]["seed"])
    given = [PROMPTS[3], *pair, "--device", "cpu", "-m", "beta-ts", *options, "--seed", seed, "--json"]
    rounds = [line for line in parsed(run_main(monkeypatch, capfd, "generate", *given)[1]) if line["type"] == "round"]
    assert [(line["draft_ids"], line["stop_reason"], line["token_id"]) for line in rounds] == [
        (line["draft_ids"], line["stop_reason"], line["token_id"]) for line in run["rounds"]
    ]


def test_a_resumed_comparison_takes_the_recorded_seeds(compare: Compare, tmp_path: Path) -> None:
    """Without --seed, too: other methods on a prompt that was measured get its seed."""
    trace, measured = tmp_path / "a.jsonl", ["-n", "12", "--repeats", "1"]
    assert compare("-m", "beta-ts", *measured, "--limit", "2", "--trace", str(trace))[0] == 0
    before = seeds_of(trace, "beta-ts")
    code, _, err = compare("-m", "beta-ts,sd", *measured, "--limit", "3", "--resume", str(trace))
    assert code == 0, err
    after = seeds_of(trace, "ar", "beta-ts", "sd")
    assert len(after) == 3
    assert all(len(found) == 1 for found in after.values())
    assert before.items() <= after.items()
