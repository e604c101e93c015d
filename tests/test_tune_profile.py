"""The profile: written atomically by `specgen tune`, read strictly, used where its key matches."""

from __future__ import annotations

import csv
import json
import re
import signal
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.request import Request, urlopen

import pytest
import yaml
from pair_helpers import case_of, knowledge
from processes import Forked
from tuning_helpers import CURVES, generated, outcome
from typer.testing import CliRunner

import specgen
from specgen import methods
from specgen.base import files
from specgen.base.errors import SpecgenError
from specgen.base.machine import ARITHMETIC
from specgen.base.types import SamplingParams
from specgen.cli.app import app
from specgen.cli.opening import tuned_specs
from specgen.cli.tune import json_line
from specgen.compare.method_specs import parse_spec
from specgen.compare.prompts import load_prompts
from specgen.decoding.costs import CostTable, Curve, RoundCosts, SpeedupModel
from specgen.methods.learned_drafting import DraftingCosts
from specgen.pair import profile as profiles
from specgen.pair import profile_place
from specgen.pair.pair import Pair
from specgen.tune.outcome import Candidate
from specgen.tune.profile import from_outcome


def opened(pair: tuple[str, ...]) -> Pair:
    return specgen.load(pair[1], pair[3], device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def key(pair: tuple[str, ...]) -> profile_place.Conditions:
    with opened(pair) as loaded:
        return profile_place.profile_key_of(loaded)


@pytest.fixture
def folder(key: profile_place.Conditions, tmp_path: Path) -> Path:
    profiles.save(from_outcome(outcome(), key), tmp_path)
    return tmp_path


def test_a_profile_comes_back_as_it_was_written(folder: Path) -> None:
    found = profiles.load(folder)
    assert found.chosen.method == "svip"
    assert found.settings_of("svip") == {"threshold": 0.45, "c": 0.15, "max_draft": 12}
    assert found.settings_of("sd") == {"k": 3}
    lookup = methods.resolve(methods.find("lookup"), found.settings_of("lookup") or {})
    assert (lookup.policy, lookup.values["k"]) == ("fixed", 4), (
        "as it was tuned before the method's own policy was adaptive"
    )
    assert found.settings_of("pearl") is found.settings_of("eesd") is None
    chosen = profiles.Choice(method="sd", settings={"k": 7})
    assert found.model_copy(update={"chosen": chosen}).settings_of("sd") == {"k": 7}
    assert found.measured.costs["echo"].as_dict()["judging"] == CURVES["judging"]
    assert [path.name for path in folder.iterdir()] == ["profile.yaml"]
    again = folder / "again"
    profiles.save(found, again)
    assert (again / "profile.yaml").read_text() == (folder / "profile.yaml").read_text()


def changed(document: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at this path; None: without it."""
    position = copy = deepcopy(document)
    for key in path[:-1]:
        position = position[key]
    if value is None:
        del position[path[-1]]
    else:
        position[path[-1]] = value
    return copy


BROKEN: list[tuple[tuple[str, ...], Any, str]] = [
    (("methods", "sd", "settings", "k"), 0, r"sd: k is 0\. "),
    (("chosen", "method"), "svipp", "did you mean svip"),
    (("chosen", "settings"), ["broken"], "settings"),
    (("speedup",), None, "speedup"),
    (("speedup",), -1.0, "speedup"),
    (("verdict",), "broken", "verdict"),
    (("fits", "target"), ["broken"], "fits.target"),
    (("sampling", "top_p"), 2.0, "top_p"),
    (("sampling", "top_z"), 2.0, "sampling: it has to have temperature"),
    (("measured", "costs", "echo"), ["broken"], "another form"),
    (("measured", "costs", "echo", "judging"), None, "another form"),
    (("measured", "costs", "echo", "looking"), -1.0, "not positive"),
    *(
        (path, 1, "surprise")
        for path in [("surprise",), ("chosen", "surprise"), ("methods", "sd", "surprise")]
    ),
]


@pytest.mark.parametrize(("path", "value", "said"), BROKEN)
def test_a_broken_field_gets_one_clear_line(
    folder: Path, path: tuple[str, ...], value: Any, said: str
) -> None:
    file = folder / "profile.yaml"
    file.write_text(yaml.safe_dump(changed(yaml.safe_load(file.read_text()), path, value)))
    with pytest.raises(SpecgenError, match=said) as caught:
        profiles.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(file) in message
    assert "specgen tune" in message


def test_a_process_killed_before_the_end_leaves_the_old_profile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile is written to another file first, and then renamed."""
    before = (folder / "profile.yaml").read_text()
    found = profiles.load(folder).model_copy(update={"speedup": 9.0})
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, step, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                profiles.save(found, folder)
    assert (folder / "profile.yaml").read_text() == before
    assert [path.name for path in folder.iterdir()] == ["profile.yaml"]


def test_generate_uses_the_profile_and_says_so(pair: tuple[str, ...], folder: Path) -> None:
    named = ("--profile", str(folder))
    assert "tuned: svip:threshold=0.45:c=0.15:max_draft=12  stopped at 6 tokens" in generated(
        pair, *named
    )
    assert "tuned, not confirmed: sd:k=3" in generated(pair, *named, "-m", "sd"), (
        "it was only simulated"
    )
    assert "tuned" not in generated(pair, *named, "-m", "sd", "--set", "k=2")
    assert "tuned" not in generated(pair, *named, "-m", "heuristic")
    assert "tuned" not in generated(pair, *named, "--set", "draft_cost=0.3")
    said = generated(pair, *named, "--temperature", "1")
    assert "was made for temperature 0, and this run has 1; it is not used" in said
    assert "tuned:" not in said
    found = profiles.load(folder)
    chosen = profiles.Choice(method="pearl", settings={"window": 5})
    profiles.save(found.model_copy(update={"chosen": chosen}), folder)
    assert "tuned: pearl:window=5  stopped at 6 tokens" in generated(pair, *named), (
        "the window is shown once"
    )
    assert "(window 5)" in generated(pair, "-m", "pearl", "--set", "window=5")


def test_the_server_uses_the_profile_and_says_so(pair: tuple[str, ...], folder: Path) -> None:
    process = Forked("serve", "--port", "0", *pair, "--profile", str(folder))
    lines = []
    for line in process.stderr:
        lines.append(line.decode())
        if line.startswith(b"curl "):
            break
    (address,) = re.findall(r"serving at (\S+)/v1,", "".join(lines))
    body = {"prompt": "hello", "max_tokens": 12, "specgen": {"rounds": True}}
    asked = Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(asked, timeout=60) as answer:
        found = json.load(answer)["specgen"]
    process.send_signal(signal.SIGTERM)
    process.communicate(60)
    assert process.returncode == 0
    assert "tuned: svip:threshold=0.45:c=0.15:max_draft=12\n" in lines
    assert found["summary"]["method"] == "svip"
    assert "> 0.45" in "".join(round_["stop_reason"] or "" for round_ in found["rounds"])


def test_generate_finds_the_profile_by_itself(
    pair: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    found = profiles.load(folder)
    own = profile_place.default_folder(found.fits, SamplingParams())
    elsewhere = profile_place.default_folder(
        changed(found.fits, ("draft", "device"), "cuda:1 GPU"), SamplingParams()
    )
    assert elsewhere != own, "one profile does not overwrite the other"
    assert own.is_relative_to(tmp_path / "data")
    assert "tuned" not in generated(pair)
    profiles.save(found, own)
    assert "tuned: svip" in generated(pair)
    sampled = [
        SamplingParams(temperature=0.8, top_p=top_p, top_k=top_k)
        for top_p in (1.0, 0.9)
        for top_k in (0, 5)
    ]
    assert (
        len({own, *(profile_place.default_folder(found.fits, sampling) for sampling in sampled)})
        == 5
    )
    (own / "profile.yaml").write_text("version: 1")
    said = generated(pair)
    assert "the profile " in said
    assert "it is not used" in said
    assert generated(pair, "-q") == ""


@pytest.mark.parametrize(
    ("position", "value", "said"),
    [
        (("fits", "versions", "torch"), "1.0", "version torch was 1.0, and is"),
        (("fits", "versions", "arithmetic"), "0", f"version arithmetic was 0, and is {ARITHMETIC}"),
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
    pair: tuple[str, ...], key: profile_place.Conditions, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.yaml"
    trace = tmp_path / "trace.jsonl"
    prompts.write_text("prompts: [abc, bcd, {prompt: cde, tuning: true}]")
    profiles.save(from_outcome(outcome(), key, load_prompts(prompts, for_tuning=True)), tmp_path)

    def compared(*more: str) -> str:
        given = [
            "--prompts",
            str(prompts),
            "--profile",
            str(tmp_path),
            "--repeats",
            "1",
            "-n",
            "4",
            *more,
        ]
        result = CliRunner().invoke(app, ["compare", *pair, "--device", "cpu", *given])
        assert result.exit_code == 0, result.stderr
        return result.stdout

    methods = ("-m", "sd,sd:k=2,svip,sd:k=3")
    said = " ".join(compared(*methods).split())
    names = r"(sd:k=3|svip:threshold=0\.45\S+), (sd:k=3|svip:threshold=0\.45\S+)"
    assert re.search(
        rf"specgen tune chose the settings of {names} on 0 of these \d+ prompts\.", said
    )
    assert "sd:k=2" not in said.partition("tune chose the settings")[2]
    prompts.write_text("prompts: [abc, bcd, cde]")
    lines = [
        json.loads(line)
        for line in compared(*methods, "--json", "--trace", str(trace)).splitlines()
    ]
    starts = [json.loads(line) for line in trace.read_text().splitlines()]
    ks = {
        line["spec"]: line["settings"].get("k")
        for line in starts
        if line["type"] == "start" and line["method"] == "sd"
    }
    assert ks == {"sd:k=2": 2, "sd:k=3": 3}, "sd is tuned to what sd:k=3 is"
    expected = {
        "ar": None,
        "sd:k=2": None,
        "svip:threshold=0.45:c=0.15:max_draft=12": 1,
        "sd:k=3": 1,
    }
    assert {line["method"]: line["tuned_on"] for line in lines} == expected
    assert {
        line["method"]: line["settings"].get("k") for line in lines if line["method"][:2] == "sd"
    } == ks
    assert "on 1 of these 3 prompts" in " ".join(compared("--resume", str(trace)).split())


def test_documented_defaults_do_not_count_as_tuned(folder: Path) -> None:
    found = profiles.load(folder)
    measured = found.measured.model_copy(update={"prompt_fingerprints": ["a"]})
    for ngram, expected in ((3, None), (2, frozenset("a"))):
        lookup = found.methods["lookup"].model_copy(update={"settings": {"ngram": ngram}})
        changed_one = found.model_copy(update={"methods": {"lookup": lookup}, "measured": measured})
        (spec,), _ = tuned_specs(changed_one, [parse_spec(f"lookup:ngram={ngram}")], keep=True)
        assert spec.tuned_on == expected


def test_named_methods_keep_their_defaults_in_compare(
    pair: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With --tuned or --profile they have the profile's settings, and are written so in every row
    and file."""
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    found = profiles.load(folder)
    profiles.save(found, profile_place.default_folder(found.fits, SamplingParams()))
    (tmp_path / "prompts.yaml").write_text("prompts: [abc]")

    def compared(*more: str, code: int = 0) -> tuple[dict[str, Any], str]:
        models = [*pair, "--device", "cpu", "--dtype", "float32"]
        given = [
            "--prompts",
            str(tmp_path / "prompts.yaml"),
            "--repeats",
            "1",
            "-n",
            "4",
            "--json",
            *more,
        ]
        result = CliRunner().invoke(app, ["compare", *models, *given])
        assert result.exit_code == code, result.stderr
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        return {line["method"]: line["settings"] for line in lines}, result.stderr

    default, said = compared("-m", "sd,svip")
    assert set(default) == {"ar", "sd", "svip"}
    assert (default["sd"]["k"], default["svip"]["threshold"]) == (5, 0.4)
    assert "tuned" not in said
    for option in (("--tuned",), ("--profile", str(folder))):
        tuned, said = compared("-m", "sd,svip", *option, "--csv", str(tmp_path / "figures.csv"))
        assert set(tuned) == {"ar", "sd:k=3", "svip:threshold=0.45:c=0.15:max_draft=12"}
        assert (
            tuned["sd:k=3"]["k"],
            tuned["svip:threshold=0.45:c=0.15:max_draft=12"]["threshold"],
        ) == (3, 0.45)
        assert "tuned: sd:k=3; svip:threshold=0.45" in said
    rows = list(csv.DictReader((tmp_path / "figures.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == list(tuned)
    assert "k=3" in rows[1]["settings"].split(":")
    assert set(compared("-m", "sd", "--profile", "none")[0]) == {"ar", "sd"}
    assert (
        "--tuned and --profile none are given"
        in compared("-m", "sd", "--profile", "none", "--tuned", code=2)[1]
    )
    assert (
        "there is no tuned profile"
        in compared("-m", "sd", "--tuned", "--temperature", "1", code=2)[1]
    )


def test_a_profile_for_another_dtype_or_sampling_is_said_not_to_be_used(
    pair: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its folder is another one than that of this run; a run that wants no profile says nothing."""
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    found = profiles.load(folder)
    other = changed(
        changed(found.fits, ("target", "dtype"), "bfloat16"), ("draft", "dtype"), "bfloat16"
    )
    profiles.save(
        found.model_copy(update={"fits": other}),
        profile_place.default_folder(other, SamplingParams()),
    )
    assert "target dtype was bfloat16, and is float32; it is not used" in generated(pair)
    assert "it is not used" not in generated(pair, "--profile", "none")
    profiles.save(found, profile_place.default_folder(found.fits, SamplingParams()))
    assert "it is not used" not in generated(pair)
    assert "tuned: svip" not in generated(pair, "--profile", "none")
    assert "was made for temperature 0, and this run has 1; it is not used" in generated(
        pair, "--temperature", "1"
    )
    assert "it is not used" not in generated(pair, "--temperature", "1", "-m", "sd"), (
        "the user chose"
    )


def test_in_python_calls_without_a_method_take_the_profile_that_fits(
    pair: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))

    def method(loaded: Pair, **given: Any) -> str:
        return str(loaded.generate("abcabc", max_new_tokens=3, **given).summary["method"])

    with opened(pair) as untuned:
        assert method(untuned) == "adaptive"
    found = profiles.load(folder)
    profiles.save(found, profile_place.default_folder(found.fits, SamplingParams()))
    with opened(pair) as loaded:
        request = loaded.request("abcabc")
        assert (request.method.name, request.settings.values["threshold"]) == ("svip", 0.45)
        assert method(loaded) == "svip"
        assert not loaded.measurements.tuned_costs, (
            "a call must not change what later seeded ones give"
        )
        assert loaded.request("abcabc", "svip").settings.values["threshold"] == 0.4, (
            "a named method keeps its defaults"
        )
        assert method(loaded, exploration=3.0) == "adaptive", "settings are the default method's"
        assert method(loaded, temperature=0.7) == "adaptive", "the profile is for greedy decoding"
    models = {"target": pair[1], "draft": pair[3], "device": "cpu", "dtype": "float32"}
    chosen = profiles.Choice(method="sd", settings={"k": 7})
    profiles.save(found.model_copy(update={"chosen": chosen}), tmp_path / "mine")
    with specgen.load(**models, profile=tmp_path / "mine") as named:
        assert (
            named.request("abcabc").method.name,
            named.request("abcabc").settings.values["k"],
        ) == ("sd", 7)
        assert named.measurements.tuned_costs.keys() == found.measured.costs.keys()
    with specgen.load(**models, profile="none") as without:
        assert method(without) == "adaptive"
    stale = found.model_copy(update={"fits": changed(found.fits, ("versions", "torch"), "1.0")})
    profiles.save(stale, tmp_path / "stale")
    with pytest.raises(SpecgenError, match="is stale: version torch was 1"):
        specgen.load(**models, profile=tmp_path / "stale")
    with pytest.raises(SpecgenError, match="profile"):
        specgen.load(**models, profile=tmp_path / "missing")


def test_seeded_drafts_follow_from_the_costs_of_the_profile_named_or_found(
    pair: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same seed gives the same text either way; calls with settings of their own do not take
    the costs."""
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    models = {"target": pair[1], "draft": pair[3], "device": "cpu", "dtype": "float32"}
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0, seed=3)
    found = profiles.load(folder)
    cheap = RoundCosts(
        CostTable({8: Curve({0: 0.0, 1: 1e-5})}), CostTable({8: Curve({1: 0.01, 2: 0.01})}), 0.0
    )
    saved = found.model_copy(
        update={
            "measured": found.measured.model_copy(
                update={"costs": {"model": cheap, "echo": cheap}}
            ),
            "chosen": profiles.Choice(method="sd", settings={"policy": "adaptive"}),
            "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        }
    )
    profiles.save(saved, profile_place.default_folder(found.fits, sampling))
    profiles.save(saved, tmp_path / "named")

    def costs(loaded: Pair, *method: str, **settings: Any) -> DraftingCosts:
        request = loaded.request("abcabc", *method, sampling=sampling, **settings)
        return knowledge(loaded).inputs(case_of(loaded, request)).costs

    with (
        specgen.load(**models) as by_call,
        specgen.load(**models, profile=tmp_path / "named") as named,
    ):
        assert (
            costs(by_call)
            == costs(named)
            == DraftingCosts.of_rounds(cheap, by_call.request("abcabc").typical_length)
        )
        assert costs(by_call, "sd", policy="adaptive") != costs(by_call)


def test_the_command_tunes_and_writes_a_profile(pair: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "prompts.yaml").write_text("prompts: [abcabc, one two, '0123']")
    out = tmp_path / "out"
    given = [
        "-m",
        "sd,lookup",
        "--prompts",
        str(tmp_path / "prompts.yaml"),
        "--out",
        str(out),
        "-n",
        "16",
        "--budget",
        "6",
    ]
    result = CliRunner().invoke(
        app, ["tune", *pair, "--device", "cpu", "--dtype", "float32", *given, "--json"]
    )
    assert result.exit_code == 0, result.stderr
    line = json.loads(result.stdout)
    assert set(line) == {*json_line(outcome(), out), "objective"}
    assert line["profile"] == str(out / "profile.yaml")
    assert set(line["predicted"]) == set(line["settings"]) == {"ar", "adaptive", "sd", "lookup"}, (
        line["left_out"]
    )
    assert line["settings"]["ar"] == {}
    assert line["confirmed"] is (line["verdict"] not in ("unconfirmed", "no time"))
    assert {"ar", "adaptive"} <= set(line["measured"])
    assert all(speed > 0 for speed in (*line["predicted"].values(), *line["measured"].values()))
    assert all(
        set(costs) == {"drafting", "judging", "looking", "together"}
        for costs in line["costs"].values()
    )
    saved = profiles.load(out)
    assert saved.chosen.model_dump() == line["chosen"]
    assert line["chosen"]["settings"] == line["settings"][line["chosen"]["method"]]
    assert (saved.verdict, saved.speedup) == (
        line["verdict"],
        pytest.approx(line["speedup"], rel=1e-4),
    )
    assert {name: dict(entry.settings) for name, entry in saved.methods.items()} == line["settings"]
    assert "✓ really run, tokens/s: ar" in result.stderr
    assert "use it with --profile" in " ".join(result.stderr.split())
    assert f": {line['chosen']['method']}" in generated(pair, "--profile", str(out))

    def exported(method: str) -> str:
        choice = profiles.Choice(method=method, settings=dict(saved.settings_of(method) or {}))
        profiles.save(saved.model_copy(update={"chosen": choice}), out)
        again = [
            "tune",
            *pair,
            "--device",
            "cpu",
            "--dtype",
            "float32",
            *given[:-2],
            "--export",
            "mlx",
        ]
        result = CliRunner().invoke(app, again)
        assert result.exit_code == 0, result.stderr
        assert "✓" not in result.stderr, "the existing profile is used"
        return f"{result.stdout}{result.stderr}"

    assert f"--num-draft-tokens {saved.settings_of('sd')['k']}" in exported("sd")  # type: ignore[index]
    plain = exported("ar")
    assert plain.startswith("mlx_lm.generate --model ")
    assert "--draft-model" not in plain
    assert (
        "plain decoding is the fastest here, so mlx decodes plainly; the best of what it has is sd"
        in " ".join(plain.split())
    )


def test_the_json_line_of_a_tuning_that_does_not_pay(tmp_path: Path) -> None:
    """A target pass over two tokens takes 12 ms, a draft pass 2 ms, plain decoding 10 ms: drafts of
    one token pay from 40 %."""
    found = replace(
        outcome(),
        speedup_model=SpeedupModel({1: 0.01, 2: 0.012}, 0.002, 256),
        left_out={"pearl": "no time"},
    )
    line = json_line(found, tmp_path / "profile.yaml")
    assert (line["chosen"]["method"], line["verdict"], line["speedup"], line["speedup_low"]) == (
        "svip",
        "pays",
        1.4,
        1.2,
    )
    assert line["pays_from"] == pytest.approx(0.4)
    assert (line["measured"], line["left_out"]) == (
        {"svip": 118.0, "ar": 84.0},
        {"pearl": "no time"},
    )
    slow = [
        replace(entry, speedup=0.9, low=0.8, high=0.97) if entry.name == "svip" else entry
        for entry in found.methods
    ]
    slow = [replace(entry, predicted=80.0) if entry.measured is None else entry for entry in slow]
    slow.append(Candidate("adaptive", {}, 70.0, 70.0, 0.8, 0.7, 0.9))
    line = json_line(replace(found, methods=slow), tmp_path)
    assert (line["chosen"], line["verdict"], line["speedup"]) == (
        {"method": "ar", "settings": {}},
        "does not pay",
        1.0,
    )
    assert (line["speedup_low"], line["speedup_high"], line["confirmed"]) == (None, None, True)
