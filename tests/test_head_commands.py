"""Methods with trained heads, and those that draft without a model, in the commands: one comparison, traces, reports, errors."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Lines, parsed
from families import EOS
from head_checks import eagle_of
from head_layouts import write_head
from training_helpers import opened
from typer.testing import CliRunner

import specgen
from specgen.base.types import SamplingParams
from specgen.cli.app import app
from specgen.pair.pair import Pair

PROMPT = [1, 5, 6, 7, 8, 9]
LAYOUTS = {"eagle": "eagle3", "other": "eagle1", "medusa": "medusa-v2", "glide": "glide"}


@pytest.fixture(scope="module")
def heads(pair: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random heads for the tiny target: folders `eagle`, `other` (EAGLE-1), `medusa` and `glide`."""
    folder = tmp_path_factory.mktemp("heads")
    for name, layout in LAYOUTS.items():
        write_head(folder / name, layout, Path(pair[1]))
    return folder


@pytest.fixture(scope="module")
def headed(pair: tuple[str, ...], heads: Path) -> Pair:
    return specgen.load(pair[1], device="cpu", dtype="float32", head=heads / "eagle")


def called(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--dtype", "float32"])
    return result.exit_code, result.stdout, result.stderr


def compared(pair: tuple[str, ...], heads: Path, folder: Path) -> tuple[list[str], Lines, Path]:
    """The methods of a comparison of all new methods, its lines, and its trace."""
    (folder / "prompts.jsonl").write_text('{"prompt": "abc abc abc"}\n')
    of_heads = ["eagle", "eagle:policy=svip", "eagle:width=1:cape=true:k=2", "eagle:policy=adaptive"]
    others = [f"eagle:head={heads}/other:k=3", f"medusa:head={heads}/medusa", f"glide:head={heads}/glide:policy=svip"]
    specs = [*of_heads, *others, "lookahead", "ouroboros", "suffix"]
    files = {"trace": folder / "t.jsonl", "csv": folder / "t.csv", "html": folder / "t.html"}
    written = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    measured = ["--prompts", str(folder / "prompts.jsonl"), "--repeats", "1", "-n", "10", "--ignore-eos", "--phases"]
    options = [*pair, "-m", ",".join(specs), "--head", str(heads / "eagle"), *measured, "--record", "distributions"]
    code, out, err = called("compare", *options, *written, "--json")
    assert code == 0, err
    assert all(path.stat().st_size for path in files.values())
    code, again, err = called("compare", *options, "--json", "--resume", str(files["trace"]))
    assert (code, again) == (0, out), err
    return specs, parsed(out), files["trace"]


def test_one_comparison_has_all_methods_and_its_trace_can_be_inspected(
    pair: tuple[str, ...], heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    specs, lines, trace = compared(pair, heads, tmp_path)
    assert [line["method"] for line in lines] == ["ar", *specs]
    assert all(line["error"] is None and line["diverged"] == 0 for line in lines)
    drafted = dict.fromkeys(specs, 0)
    spec = ""
    for line in parsed(trace.read_text()):
        spec = line.get("spec", spec)
        if line["type"] == "round" and line["draft_ids"]:
            drafted[spec] += len(line["draft_ids"])
            is_head = spec.startswith(("eagle", "medusa", "glide"))
            measured: list[Any] = [*line["overlap"], *line["kl"]]
            assert not is_head or all(value is not None and math.isfinite(value) for value in measured)
            assert not is_head or len(line["entropies"]) == len(line["top_probs"]) == len(line["draft_ids"])
    assert all(count for name, count in drafted.items() if name not in ("suffix", "eagle:policy=adaptive")), drafted
    result = CliRunner().invoke(app, ["inspect", str(trace), "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.stderr
    result = CliRunner().invoke(app, ["inspect", str(trace), "--json"])
    assert [each["spec"] for each in parsed(result.stdout) if each.get("spec")] in ([], ["ar", *specs])
    assert result.exit_code == 0, result.stderr


def test_what_is_missing_or_does_not_fit_is_one_line(pair: tuple[str, ...], heads: Path, tmp_path: Path) -> None:
    command = ["generate", "abc", *pair[:2], "-n", "2"]
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    eagle = str(heads / "eagle")
    for more, said in (
        (["-m", "eagle"], "eagle needs a head trained for the target, and there is none. Train one with specgen tune --train"),
        (["-m", "medusa", "--head", eagle], f"the head {eagle} is for eagle, not for medusa"),
        (["-m", "medusa", "--head", eagle], "Use -m eagle. Or: train one with specgen tune --train --methods medusa"),
        (["-m", "glide", "--set", f"head={eagle}"], f"the head {eagle} is for eagle, not for glide"),
        (["-m", "eagle", "--head", str(tmp_path)], "only pytorch_model.bin"),
        (["-m", "eagle", "--head", str(tmp_path / "none")], "there is no folder"),
    ):
        code, out, err = called(*command, *more)
        assert (code, out, len(err.strip().splitlines())) == (2, "", 1), err
        assert said in err


def test_a_head_that_can_draft_suppressed_tokens_only_is_refused(pair: tuple[str, ...], tmp_path: Path) -> None:
    target = Path(shutil.copytree(pair[1], tmp_path / "target"))
    head = write_head(tmp_path / "head", "eagle3", target)
    vocabulary = eagle_of(head, opened(target)).vocabulary
    assert vocabulary is not None
    for suppressed, code in ((vocabulary.tolist(), 2), (vocabulary.tolist()[1:], 0)):
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "suppress_tokens": suppressed}))
        ended, _, err = called("generate", "abc", "-t", str(target), "-m", "eagle", "-n", "3", "-q", "--head", str(head))
        assert ended == code, err
        assert (err == "") == (code == 0)
        assert code == 0 or err.startswith(f"error: the target's generation config suppresses all {len(vocabulary)} tokens")


def test_a_head_in_the_hubs_cache_is_found_by_its_id(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "a" * 40
    repository = tmp_path / "models--lab--eagle"
    folder = write_head(repository / "snapshots" / commit, "eagle1", Path(pair[1]))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    command = ["generate", "abc", *pair[:2], "-m", "eagle", "-n", "3", "--offline", "--json", "--head"]
    (code, found, err), named = called(*command, "lab/eagle"), called(*command, str(folder))
    assert code == 0, err
    assert [line["token_ids"] for line in (parsed(found)[-1], parsed(named[1])[-1])] == [parsed(found)[-1]["token_ids"]] * 2
    assert parsed(found)[0]["settings"] == parsed(named[1])[0]["settings"]
    code, _, err = called(*command, "lab/none")
    assert (code, err.count("\n"), "lab/none" in err) == (2, 1, True)


@pytest.mark.parametrize(("own_embedding", "times"), [(True, 1), (False, 0)])
def test_a_doubtful_head_is_used_with_one_warning(pair: tuple[str, ...], tmp_path: Path, own_embedding: bool, times: int) -> None:
    folder = write_head(tmp_path / "head", "eagle3-speculators", Path(pair[1]), own_embedding=own_embedding)
    code, _, err = called("generate", "abc", *pair[:2], "-m", "eagle", "-n", "2", "--head", str(folder))
    assert code == 0, err
    assert err.count(f"warning: {folder}: its embedding is not that of") == times


def test_the_report_on_a_pair_knows_the_named_head(pair: tuple[str, ...], heads: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", *pair[:2], "--head", str(heads / "glide"), "--json"])
    assert result.exit_code == 0, result.stderr
    methods = json.loads(result.stdout)["methods"]
    assert methods["glide"]["ready"] is True
    for name in ("eagle", "medusa"):
        assert (methods[name]["ready"], methods[name]["why"]) == (False, "no head")
        assert f"--methods {name}" in methods[name]["cure"]


POLICIES = [("eagle", {}), ("eagle", {"width": 1}), ("medusa", {}), ("glide", {})]


@pytest.mark.parametrize(("name", "given"), POLICIES)
def test_adaptive_soon_stops_drafting_with_a_head_that_is_never_right(
    headed: Pair, heads: Path, name: str, given: dict[str, object]
) -> None:
    """A drafted level costs a fifth of a target pass, a token of a pass 5 %: at most 7 passes are lost, as it is set to."""
    sampling = SamplingParams(max_new_tokens=160, ignore_eos=True)
    settings = {**given, "policy": "adaptive", "draft_cost": 0.2, "verify_cost": 0.05, "exploration": 4}
    if name != "eagle":
        settings["head"] = str(heads / name)
    rounds = list(headed.rounds(PROMPT, name, sampling, **settings))
    lost = sum(0.2 * each.draft.levels + 0.05 * len(each.draft.tokens) - len(each.accepted_ids) for each in rounds)
    assert any(each.draft.tokens for each in rounds)
    assert lost < 7


def test_adaptive_measures_each_head(headed: Pair, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    for folder in ("auto", str(heads / "other")):
        headed.generate(PROMPT, "eagle", sampling, policy="adaptive", head=folder)
    assert len(headed.measurements._known) == 2
    assert len(json.loads((tmp_path / "cache" / "measurements.json").read_text())["rounds"]) == 2


def test_a_head_that_the_method_does_not_use_is_named(pair: tuple[str, ...], heads: Path) -> None:
    command = "generate", "abc", *pair, "-n", "4"
    for method, note in (("sd", f"--head is not used by sd: for {heads}/eagle take -m eagle\n"), ("eagle", "")):
        code, _, err = called(*command, "-m", method, "--head", str(heads / "eagle"))
        assert code == 0, err
        assert err.startswith(note) if note else "--head" not in err


def test_inspect_checks_a_head_as_loading_does(pair: tuple[str, ...], heads: Path) -> None:
    """Published heads have no description: their tensors must fit the target."""
    code, out, err = called("inspect", *pair, "--head", str(heads / "glide"))
    assert code == 0, err
    assert f"--head {heads}/glide --device cpu --dtype" in " ".join(out.split())
    code, _, err = called("inspect", "--pair", "--head", str(heads / "other"))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "other was made for another target" in err
