"""What the README says: names of methods, options and keys, its example in Python, and its output
of `generate --json`."""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import parsed, run_main
from comparisons import Compare
from tuning_helpers import outcome

import specgen
from specgen.base.types import SamplingParams
from specgen.cli.app import with_options
from specgen.cli.options import COMMANDS
from specgen.cli.tune import json_line
from specgen.engine.native.families import FAMILIES
from specgen.methods import METHODS
from specgen.pair import profile as profiles
from specgen.pair import profile_place
from specgen.pair.pair import Pair
from specgen.pair.profile_place import ProfileSource
from specgen.tune.exports.engines import ENGINES
from specgen.tune.profile import from_outcome

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
JSON_LINES = (ROOT / ".github" / "JSON_LINES.md").read_text(encoding="utf-8")
# vLLM's, torchrun's, and an option of tests/benchmark.py
NOT_OURS = {"--speculative-config", "--nproc-per-node", "--threads"}


def section(title: str) -> str:
    return re.split(r"^##+ ", README.partition(f"# {title}\n")[2], flags=re.MULTILINE)[0]


def keys_after(beginning: str) -> set[str]:
    """The names in code style in the line that begins so."""
    line = next(line for line in JSON_LINES.splitlines() if line.startswith(beginning))
    return set(re.findall(r"`(\w+)`", line.removeprefix(beginning)))


def test_the_table_has_every_method_and_says_which_are_lossy() -> None:
    rows = [
        line.split(" | ")[0]
        for line in section("Methods").splitlines()
        if line.startswith("`") and " | " in line
    ]
    lossy = {name: "(lossy)" in row for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert lossy == {name: not method.lossless for name, method in METHODS.items()}
    assert f"{len(METHODS) - 1} methods" in README, "plain decoding is not counted"


def test_every_option_exists() -> None:
    known = {
        name
        for command in COMMANDS
        for option in with_options(command).params
        for name in option.opts
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert len(named) > 30
    assert named - NOT_OURS - known <= {"--help"}
    text = section("Your own models")
    assert set(re.search(r"--export (\S+)`", text)[1].split("|")) == set(ENGINES)  # type: ignore[index]


def test_the_native_families_are_named() -> None:
    page = (ROOT / ".github" / "MODELS.md").read_text(encoding="utf-8")
    words = re.search(r"specgen runs (.*) with its own decoder", page)
    assert words is not None
    named = set(
        re.split(
            r", | and ",
            words[1]
            .replace("Gemma 1 to 3 (text)", "Gemma, Gemma 2, Gemma 3 text")
            .replace("(text)", "text"),
        )
    )
    assert {re.sub(r"\W", "", name).lower() for name in named} == {
        family.replace("_", "") for family in FAMILIES
    }


def test_the_keys_of_json_lines_are_there(compare: Compare, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    options = (
        "-m",
        "sd",
        "-n",
        "8",
        "--limit",
        "2",
        "--repeats",
        "1",
        "--json",
        "--record",
        "distributions",
    )
    code, out, _ = compare(*options, "--trace", str(trace))
    assert code == 0
    lines = {line["type"]: line for line in parsed(trace.read_text())}
    for kind, line in lines.items():
        named = keys_after(f"- `{kind}`:") - {"correction", "bonus"}
        assert len(named) > 10
        assert named <= set(line), kind
    (own,) = parsed(out)[1:]
    of_compare, _, of_tune = JSON_LINES.partition("`compare --json`")[2].partition("`tune --json`")
    for text, line in (
        (of_compare, own),
        (of_tune.partition("```")[0], json_line(outcome(), trace)),
    ):
        named = set(re.findall(r"`(\w+)`", text)) - {"method"}
        assert len(named) >= 5
        assert named <= set(line)


def test_its_example_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", section("Python"), flags=re.DOTALL)
    exec(code, {})
    out = capsys.readouterr().out
    answer, rate, rounds = re.fullmatch(
        r"(.*) (0\.\d+)\n((?:\(.*\) \[.*\] (?:\d+|None)\n)+)", out, flags=re.DOTALL
    ).groups()  # type: ignore[union-attr]
    assert '"""' in answer
    assert 0.3 < float(rate) < 1
    assert len(rounds.splitlines()) > 2


def test_the_example_in_the_packages_docstring_is_valid() -> None:
    code = textwrap.dedent((specgen.__doc__ or "").partition("\n\n")[2])
    assert len(ast.parse(code).body) == 3


def test_profiles_are_for_the_commands_and_for_calls_without_a_method(
    demo_pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path))
    key = profile_place.profile_key_of(demo_pair)
    profiles.save(from_outcome(outcome(), key), profile_place.default_folder(key, SamplingParams()))
    options = ("--device", "cpu", "--dtype", "float32", "--json", "-n", "4", "abc")
    start: dict[str, Any] = parsed(run_main(monkeypatch, capfd, "generate", *options)[1])[0]
    assert start["settings"]["threshold"] == 0.45
    assert demo_pair.run(demo_pair.request("abc", "svip")).settings.values["threshold"] == 0.4
    demo_pair._profiles.clear()  # what other tests found
    monkeypatch.setattr(demo_pair, "profile_from", ProfileSource())
    assert (
        demo_pair.generate("abc", sampling=SamplingParams(max_new_tokens=2)).summary["method"]
        == "svip"
    )
    demo_pair._profiles.clear()


def test_the_layers_are_those_that_imports_obey() -> None:
    (picture,) = re.findall(r"```text\n(cli.*?)```", section("How it works"), flags=re.DOTALL)
    drawn = [re.findall(r"\w+", line) for line in picture.splitlines()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    assert drawn == [re.split(r" [:|] ", layer) for layer in layers]


def test_files_and_names_in_the_page_for_contributors_are_there() -> None:
    page = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = {
        path.as_posix(): path.read_text(encoding="utf-8")
        for folder in ("specgen", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    files = set(re.findall(r"(?<![\w/])[\w/]+\.py\b", page + README))
    assert len(files) > 30
    for name in files:
        is_example = re.search(r"\b(NAME|KIND|mymodule)\b", name)
        assert is_example or any(path.endswith(f"/{name}") for path in code), name
    defined = set(re.findall(r"^(?:class )?(_?[A-Z]\w+)\b", "\n".join(code.values()), re.MULTILINE))
    names = set(re.findall(r"`(_?[A-Z]\w+)`", page))
    assert len(names) > 30
    assert names - {"NAME", "KIND"} <= defined
