"""Runs that name their exit layer: `eesd:exit=FILE`, `--set exit=FILE` and `pair.generate(..., exit=FILE)`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import LETTERS, make_model, make_tokenizer, random_predictor, save
from specgen.engine.parts.exit_files import DESCRIPTION, WEIGHTS, Description, save_exit
from training_helpers import opened
from typer.testing import CliRunner

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.cli.app import app
from specgen.compare.method_specs import parse_specs
from specgen.engine.fingerprint import weights_fingerprint
from specgen.pair.pair import Pair

PROMPT = [1, 5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and exits after its layers 1 (with a predictor) and 2 (without)."""
    parent = tmp_path_factory.mktemp("named")
    target = save(make_model("llama", num_hidden_layers=4), parent / "target", make_tokenizer(LETTERS))
    model = opened(target).model
    for name, after in (("first", 1), ("second", 2)):
        predictor = random_predictor(model.shape.hidden_size) if after == 1 else None
        described = Description(target, weights_fingerprint(Path(target)), after, predictor=predictor is not None)
        save_exit(parent / name, model.trainable_exit(Path(target), 1).module, predictor, described)
    return parent


@pytest.fixture
def pair(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    return specgen.load(str(folder / "target"), device="cpu", dtype="float32")


def called(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--dtype", "float32"])
    return result.exit_code, result.stdout, result.stderr


def test_each_run_has_the_exit_that_it_names(folder: Path, pair: Pair) -> None:
    sampling = SamplingParams(16, ignore_eos=True, seed=1)
    expected = pair.generate(PROMPT, "ar", sampling).token_ids
    for name, policy in (("first", "cali-ts"), ("second", "beta-ts")):
        run = pair.run(pair.request(PROMPT, "eesd", sampling, exit=folder / name))
        assert run.settings.policy == policy, "the policy fits the named exit's predictor"
        assert run.settings.values["exit"] == str(folder / name)
        assert [token for round_ in run.rounds() for token in round_.token_ids] == expected
    with pytest.raises(SpecgenError, match="needs an exit layer trained for the target, and there is none"):
        pair.generate(PROMPT, "eesd", sampling)
    pair.exits.default = pair.exits.get(str(folder / "second"))  # type: ignore[assignment]
    assert pair.run(pair.request(PROMPT, "eesd-fixed", sampling)).settings.values["exit"] == "auto"


def test_an_exit_is_loaded_once_and_has_its_own_caches(folder: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    method = specgen.METHODS["eesd"]
    names = [folder / "first", folder / "first" / WEIGHTS, folder / "first" / DESCRIPTION, folder / "." / "first"]
    assert len({id(pair.exits.get(str(name))) for name in names}) == 1
    first, second = (pair.exits.runners(method, str(folder / name)) for name in ("first", "second"))
    assert pair.exits.runners(method, str(names[1])) is first
    caches = [early.target.cache for early in (first, second)] + [early.draft.cache for early in (first, second)]
    assert len({id(cache) for cache in caches}) == 4
    monkeypatch.chdir(folder)
    assert pair.exits.get("first") is pair.exits.get(str(names[0]))
    pair.generate(PROMPT, "eesd", SamplingParams(4), exit="first")
    pair.forget()
    assert first.target._cached.length == 0


def test_two_exits_in_one_comparison(folder: Path, tmp_path: Path) -> None:
    prompts, trace = tmp_path / "prompts.jsonl", tmp_path / "t.jsonl"
    prompts.write_text('{"prompt": "abc abc"}\n')
    specs = f"eesd-fixed:k=2:exit={folder}/first,eesd-fixed:exit={folder}/second/{WEIGHTS}:k=2"
    measured = ["--prompts", str(prompts), "--repeats", "1", "-n", "8", "--ignore-eos", "--json", "--trace", str(trace)]
    code, out, err = called("compare", "-t", str(folder / "target"), "-m", specs, *measured)
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["method"] for line in lines] == ["ar", *specs.split(",")]
    assert all(line["error"] is None and line["diverged"] == 0 for line in lines)
    starts = [json.loads(line) for line in trace.read_text().splitlines() if '"start"' in line]
    assert [start["settings"].get("exit") for start in starts] == [None, f"{folder}/first", f"{folder}/second/{WEIGHTS}"]
    resumed = ["-t", str(folder / "target"), "-m", specs, *measured[:-2], "--resume", str(trace)]
    assert called("compare", *resumed)[0] == 0


def test_generate_takes_an_exit(folder: Path) -> None:
    code, _, err = called(
        "generate", "abc", "-t", str(folder / "target"), "-m", "eesd", "-n", "4", "--set", f"exit={folder}/first"
    )
    assert code == 0, err


def test_what_the_option_refuses_the_setting_refuses_alike(folder: Path, tmp_path: Path) -> None:
    """Before anything is measured, with the same line and exit code."""
    model, missing, damaged = ["-t", str(folder / "target")], tmp_path / "none", tmp_path / "damaged"
    damaged.mkdir()
    (damaged / DESCRIPTION).write_text((folder / "first" / DESCRIPTION).read_text())
    (damaged / WEIGHTS).write_bytes(b"no weights")
    for wrong in (missing, damaged):
        code, _, err = called("generate", "abc", *model, "-m", "eesd", "--exit-layer", str(wrong))
        assert (code, len(err.strip().splitlines())) == (2, 1)
        assert called("generate", "abc", *model, "-m", "eesd", "--set", f"exit={wrong}")[::2] == (2, err)
        assert called("compare", *model, "-m", f"ar,eesd:exit={wrong}", "--limit", "1", "-n", "2") == (2, "", err)


@pytest.mark.parametrize("path", ["a:b", "a,b", "C:/exits/exit.yaml", "a,b:k=3"])
def test_a_path_that_cannot_be_written_after_a_name_is_refused(path: str) -> None:
    with pytest.raises(SpecgenError, match="cannot read") as refused:
        parse_specs([f"eesd-fixed:exit={path}"])
    assert "cannot hold a comma or a colon" in str(refused.value.hint)
    assert parse_specs(["eesd:exit=a+b,svip"])[1].settings == {"exit": "a+b"}


@pytest.mark.parametrize(("layers", "depth"), [(80, 5), (40, 3), (32, 2), (28, 2), (10, 1), (4, 1), (2, 1)])
def test_the_exits_depth_is_the_papers(layers: int, depth: int) -> None:
    """5 of 80 and 3 of 40 layers (EESD, section 4.1), and always 5 to 10 % of them (section 5.4)."""
    from specgen.engine.exit_parts import default_exit_depth

    assert default_exit_depth(layers) == depth
    assert all(0.05 <= default_exit_depth(count) / count <= 0.1 for count in range(10, 200))
