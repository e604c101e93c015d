"""The profile: written atomically by `specgen tune`, read strictly, used where its key matches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from tuning_helpers import CURVES, generated, outcome
from typer.testing import CliRunner

import specgen
from specgen import methods
from specgen.base import files
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.cli.app import app
from specgen.cli.tune import json_line
from specgen.compare.prompts import load_prompts
from specgen.pair.pair import Pair
from specgen.tune import profile as profiles


def opened(pair: tuple[str, ...]) -> Pair:
    return specgen.load(pair[1], pair[3], device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def key(pair: tuple[str, ...]) -> profiles.Conditions:
    with opened(pair) as loaded:
        return profiles.profile_key_of(loaded)


@pytest.fixture
def folder(key: profiles.Conditions, tmp_path: Path) -> Path:
    profiles.save(profiles.from_outcome(outcome(), key), tmp_path)
    return tmp_path


def test_a_profile_comes_back_as_it_was_written(folder: Path) -> None:
    found = profiles.load(folder)
    assert found.chosen.method == "svip"
    assert found.settings_of("svip") == {"threshold": 0.45, "c": 0.15, "max_draft": 12}
    assert found.settings_of("sd") == {"k": 3}
    lookup = methods.resolve(methods.find("lookup"), found.settings_of("lookup") or {})
    assert (lookup.policy, lookup.values["k"]) == ("fixed", 4), "as it was tuned before the method's own policy was adaptive"
    assert found.settings_of("pearl") is found.settings_of("eesd") is None
    early = found.model_copy(update={"methods": {"eesd-beta": found.methods["sd"]}})
    assert early.settings_of("eesd") == {"k": 3}
    chosen = profiles.Choice(method="sd", settings={"k": 7})
    assert found.model_copy(update={"chosen": chosen}).settings_of("sd") == {"k": 7}
    assert found.measured.costs["echo"].as_dict()["judging"] == CURVES["judging"]
    assert [path.name for path in folder.iterdir()] == ["profile.yaml"]
    again = folder / "again"
    profiles.save(found, again)
    assert (again / "profile.yaml").read_text() == (folder / "profile.yaml").read_text()


DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a document, inner ones before the mappings that contain them."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(entry, (*path, key))
    if path:
        yield path


def changed(document: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    position = copy = deepcopy(document)
    for key in path[:-1]:
        position = position[key]
    if value is None:
        del position[path[-1]]
    else:
        position[path[-1]] = value
    return copy


def test_each_field_broken_in_turn_gets_one_clear_line(folder: Path) -> None:
    """A profile contains no list of such a word; a missing field and an unknown field are errors."""
    path = folder / "profile.yaml"
    document = yaml.safe_load(path.read_text())
    positions = list(leaves(document))
    assert len(positions) > 60
    for position in positions:
        if (position[0] == "fits" and len(position) > 1) or position[-1] == "prompt_fingerprints":  # any will do
            continue
        free = position[0] == "methods" and (len(position) == 2 or (len(position) == 4 and position[2] == "settings"))
        free |= position[:2] == ("chosen", "settings") and len(position) == 3
        free |= position[-1] in ("perplexity", "learned")
        free |= "costs" in position and (isinstance(position[-1], int) or position[-1] in ("together", "echo", "parallel"))
        for value in (["broken"], None):
            if value is None and free:  # a profile without this method, setting or point is valid
                continue
            path.write_text(yaml.dump(changed(document, position, value), Dumper=DUMPER))
            with pytest.raises(SpecgenError) as caught:
                profiles.load(folder)
            message = str(caught.value)
            assert "\n" not in message
            assert str(path) in message
            assert "specgen tune" in message
            assert str(position[-1]) in message or str(position[0]) in message, (position, message)
    for position, value, said in (
        (("methods", "sd", "settings", "k"), 0, r"sd: k is 0\. "),
        (("chosen", "method"), "svipp", "did you mean svip"),
    ):
        path.write_text(yaml.safe_dump(changed(document, position, value)))
        with pytest.raises(SpecgenError, match=said):
            profiles.load(folder)
    for position in [(), ("chosen",), ("methods", "sd"), ("measured",), ("sampling",)]:
        path.write_text(yaml.safe_dump(changed(document, (*position, "surprise"), 1)))
        with pytest.raises(SpecgenError, match="surprise"):
            profiles.load(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is None"),
        ("a: [", "is not YAML"),
        ("a: &x 1\nb: *x", "aliases"),
        ("version: 2", "version: Input should be 1"),
    ],
)
def test_no_profile_at_all_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "profile.yaml").write_text(text)
    with pytest.raises(SpecgenError, match=said):
        profiles.load(tmp_path)


def test_a_process_killed_before_the_end_leaves_the_old_profile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile is written to another file first, and then renamed."""
    before = (folder / "profile.yaml").read_text()
    found = profiles.load(folder).model_copy(update={"speedup": 9.0})
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, step, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                profiles.save(found, folder)
        assert (folder / "profile.yaml").read_text() == before
    assert [path.name for path in folder.iterdir()] == ["profile.yaml"]


def test_generate_uses_the_profile_and_says_so(pair: tuple[str, ...], folder: Path) -> None:
    named = ("--profile", str(folder))
    assert "tuned: svip:threshold=0.45:c=0.15:max_draft=12  6 tokens" in generated(pair, *named)
    assert "tuned: sd:k=3" in generated(pair, *named, "-m", "sd")
    assert "tuned" not in generated(pair, *named, "-m", "sd", "--set", "k=2")
    assert "tuned" not in generated(pair, *named, "-m", "heuristic")
    assert "tuned" not in generated(pair, *named, "--set", "draft_cost=0.3")
    said = generated(pair, *named, "--temperature", "1")
    assert "was made for temperature 0, and this run has 1; it is not used" in said
    assert "tuned:" not in said
    found = profiles.load(folder)
    profiles.save(found.model_copy(update={"verdict": "unconfirmed"}), folder)
    assert "tuned, not confirmed: svip:threshold=0.45" in generated(pair, *named)
    chosen = profiles.Choice(method="pearl", settings={"window": 5})
    profiles.save(found.model_copy(update={"chosen": chosen}), folder)
    assert "tuned: pearl:window=5  6 tokens" in generated(pair, *named), "the window is shown once"
    assert "(window 5)" in generated(pair, "-m", "pearl", "--set", "window=5")


def test_generate_finds_the_profile_by_itself(
    pair: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    found = profiles.load(folder)
    own = profiles.default_folder(found.fits, SamplingParams())
    elsewhere = profiles.default_folder(changed(found.fits, ("draft", "device"), "cuda:1 GPU"), SamplingParams())
    assert elsewhere != own, "one profile does not overwrite the other"
    assert own.is_relative_to(tmp_path / "data")
    assert "tuned" not in generated(pair)
    profiles.save(found, own)
    assert "tuned: svip" in generated(pair)
    sampled = [SamplingParams(temperature=0.8, top_p=top_p, top_k=top_k) for top_p in (1.0, 0.9) for top_k in (0, 5)]
    assert len({own, *(profiles.default_folder(found.fits, sampling) for sampling in sampled)}) == 5
    (own / "profile.yaml").write_text("version: 1")
    said = generated(pair)
    assert "the profile " in said
    assert "it is not used" in said
    assert generated(pair, "-q") == ""


@pytest.mark.parametrize(
    ("position", "value", "said"),
    [
        (("fits", "versions", "torch"), "1.0", "version torch was 1.0, and is"),
        (("fits", "target", "device"), "cuda:0", "target device was cuda:0, and is cpu"),
        (("fits", "draft"), None, "draft name was none, and is"),
        (("fits", "exit_layer"), "0" * 16, "exit layer was"),
        (("fits", "heads"), {"eagle": "0" * 16}, "head eagle was 0000000000000000, and is none"),
    ],
)
def test_a_stale_profile_is_said_to_be(
    pair: tuple[str, ...], folder: Path, position: tuple[str, ...], value: Any, said: str
) -> None:
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(changed(yaml.safe_load(path.read_text()), position, value)))
    stderr = generated(pair, "--profile", str(folder))
    assert "is stale: " + said in stderr
    assert "it is not used" in stderr
    assert "tuned:" not in stderr


def test_compare_says_how_many_of_its_prompts_chose_the_settings(
    pair: tuple[str, ...], key: profiles.Conditions, tmp_path: Path
) -> None:
    prompts, trace = tmp_path / "prompts.yaml", tmp_path / "trace.jsonl"
    prompts.write_text("prompts: [abc, bcd, {prompt: cde, tuning: true}]")
    profiles.save(profiles.from_outcome(outcome(), key, load_prompts(prompts, for_tuning=True)), tmp_path)

    def compared(*arguments: str, out: bool = False) -> str:
        given = ["--profile", str(tmp_path), "--repeats", "1", "-n", "4", *arguments]
        result = CliRunner().invoke(app, ["compare", *pair, "--device", "cpu", *given])
        assert result.exit_code == 0, result.stderr
        return " ".join(result.stdout.split())

    methods = "sd,sd:k=2,svip,sd:k=3"
    said = compared("--prompts", str(prompts), "-m", methods)
    assert re.search(r"None of these prompts chose the settings of (sd|svip|sd:k=3, )+.* \(specgen tune\)\.", said)
    assert "sd:k=2" not in said.partition("None of these")[2]
    prompts.write_text("prompts: [abc, bcd, cde]")
    both = ("--prompts", str(prompts), "-m", methods)
    assert "1 of 3 prompts chose the settings of" in compared(*both)
    lines = [json.loads(line) for line in compared(*both, "--json", "--trace", str(trace)).replace("} {", "}\n{").splitlines()]
    starts = [json.loads(line) for line in trace.read_text().splitlines()]
    ks = {line["spec"]: line["settings"].get("k") for line in starts if line["type"] == "start" and line["method"] == "sd"}
    assert ks == {"sd": 3, "sd:k=2": 2, "sd:k=3": 3}
    expected = {"ar": None, "sd": 1, "sd:k=2": None, "svip": 1, "sd:k=3": 1}  # sd:k=3: as tuned, but written by the user
    assert {line["method"]: line["tuned_on"] for line in lines} == expected
    assert "1 of 3 prompts chose" in compared("--prompts", str(prompts), "--resume", str(trace))
    profiles.save(profiles.from_outcome(outcome(), key), tmp_path)
    assert "prompts chose" not in compared(*both), "a profile of an older version does not know its prompts"


def test_the_command_tunes_and_writes_a_profile(pair: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "prompts.yaml").write_text("prompts: [abcabc, one two, '0123']")
    out = tmp_path / "out"
    given = ["-m", "sd,lookup", "--prompts", str(tmp_path / "prompts.yaml"), "--out", str(out), "-n", "16", "--budget", "6"]
    result = CliRunner().invoke(app, ["tune", *pair, "--device", "cpu", "--dtype", "float32", *given, "--json"])
    assert result.exit_code == 0, result.stderr
    line = json.loads(result.stdout)
    assert set(line) == {*json_line(outcome(), out), "objective"}
    assert line["profile"] == str(out / "profile.yaml")
    assert set(line["predicted"]) == set(line["settings"]) == {"ar", "sd", "lookup"}, line["left_out"]
    assert line["settings"]["ar"] == {}
    assert line["confirmed"] is (line["verdict"] != "unconfirmed") is (len(line["measured"]) > 1)
    assert all(speed > 0 for speed in (*line["predicted"].values(), *line["measured"].values()))
    assert all(set(costs) == {"drafting", "judging", "looking", "together"} for costs in line["costs"].values())
    saved = profiles.load(out)
    assert saved.chosen.model_dump() == line["chosen"]
    assert line["chosen"]["settings"] == line["settings"][line["chosen"]["method"]]
    assert (saved.verdict, saved.speedup) == (line["verdict"], pytest.approx(line["speedup"], rel=1e-4))
    assert {name: dict(entry.settings) for name, entry in saved.methods.items()} == line["settings"]
    assert "✓ plain decoding gives" in result.stderr
    assert "use it with --profile" in " ".join(result.stderr.split())
    assert f"tuned: {line['chosen']['method']}" in generated(pair, "--profile", str(out))
    again = CliRunner().invoke(
        app, ["tune", *pair, "--device", "cpu", "--dtype", "float32", "-n", "16", "--out", str(out), "--export", "mlx"]
    )
    assert again.exit_code == 0, again.stderr
    assert f"--num-draft-tokens {profiles.load(out).settings_of('sd')['k']}" in again.stdout  # type: ignore[index]
    assert "✓" not in again.stderr, "the existing profile is used"
