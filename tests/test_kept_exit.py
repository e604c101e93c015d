"""An exit layer that was trained on this machine is found without being named, and ignored if it cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import LETTERS, make_model, make_tokenizer, near_copy, save
from specgen.engine.parts.exit_files import DESCRIPTION, WEIGHTS, Description, save_exit
from training_helpers import opened
from typer.testing import CliRunner

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.files import exit_folder, kept_exit
from specgen.cli.app import app
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.hub import model_folder

ON_CPU = ["--device", "cpu", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    parent = tmp_path_factory.mktemp("kept")
    model, tokenizer = make_model("llama"), make_tokenizer(LETTERS)
    return save(model, parent / "target", tokenizer), save(near_copy(model), parent / "draft", tokenizer)


def keep_untrained(target: str, fingerprint: str | None = None) -> Path:
    own = weights_fingerprint(Path(target))
    described = Description(target, fingerprint or own, 1)
    module = opened(target).model.trainable_exit(Path(target), 1).module
    return save_exit(exit_folder(target, own), module, None, described).parent


def called(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*arguments, *ON_CPU])
    return result.exit_code, result.stdout, result.stderr


def readiness(*named: str) -> dict[str, object]:
    code, out, err = called("inspect", *named, "--json")
    assert code == 0, err
    found: dict[str, object] = json.loads(out)["methods"]["eesd-beta"]
    return found


def test_a_trained_exit_is_found_with_any_draft(pair: tuple[str, str], tmp_path: Path) -> None:
    target, draft = pair
    run = ["generate", "abc", "-t", target, "-m", "eesd", "-n", "5"]
    assert called(*run)[0] == 2
    assert readiness("-t", target)["ready"] is False
    (tmp_path / "corpus.txt").write_text("hello spec\n" * 100)
    options = ["--corpus", str(tmp_path / "corpus.txt"), "--steps", "1", "--window", "24", "--batch-size", "4", "-q"]
    code, out, err = called("tune", "--train", "-t", target, "-d", draft, *options)
    assert code == 0, err
    assert Path(out.strip()).parent == kept_exit(target, weights_fingerprint(Path(target)))
    for named in (["-t", target], ["-t", target, "-d", draft]):
        assert readiness(*named)["ready"] is True
        code, _, err = called("generate", "abc", *named, "-m", "eesd", "-n", "5")
        assert code == 0, err
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc abc"}\n')
    shown = ["--prompts", str(tmp_path / "prompts.jsonl"), "--repeats", "1", "-n", "5", "--json"]
    code, out, err = called("compare", "-t", target, "-m", "eesd", *shown)
    assert code == 0, err
    assert '"eesd' in out


def test_the_same_weights_under_another_name_find_it(pair: tuple[str, str], tmp_path: Path) -> None:
    keep_untrained(pair[0])
    (tmp_path / "other").symlink_to(pair[0])
    loaded = specgen.load(str(tmp_path / "other"), device="cpu", dtype="float32")
    assert loaded.exit_layer is not None


def test_an_unusable_exit_counts_as_none(pair: tuple[str, str]) -> None:
    folder = keep_untrained(pair[0])
    weights, description = (folder / WEIGHTS).read_bytes(), (folder / DESCRIPTION).read_text()
    breaks = (
        (weights[:1000], description, "cannot read the exit layer"),
        (weights, "format: [", "cannot read"),
        (weights, description.replace(weights_fingerprint(Path(pair[0])), "f" * 16), "was trained for"),
    )
    for bytes_, text, message in breaks:
        (folder / WEIGHTS).write_bytes(bytes_)
        (folder / DESCRIPTION).write_text(text)
        loaded = specgen.load(pair[0], device="cpu", dtype="float32")
        assert len(loaded.generate("abc", "lookup").token_ids) > 0
        with pytest.raises(SpecgenError, match=message):
            loaded.generate("abc", "eesd-beta")
        code, _, err = called("generate", "abc", "-t", pair[0], "-m", "eesd-beta")
        assert code == 2
        assert message in err
        assert len(err.strip().splitlines()) == 1
    assert "was trained for" in str(readiness("-t", pair[0])["why"])


def test_the_users_exit_comes_before_the_bundled_one(demo_pair: specgen.Pair) -> None:
    assert demo_pair.exits.default is not None
    bundled = model_folder(str(demo_pair.target.folder), None, True, False, lambda _: None)
    own = exit_folder("demo/target", weights_fingerprint(bundled))
    described = Description("demo/target", weights_fingerprint(bundled), 2)
    save_exit(own, demo_pair.target.model.trainable_exit(demo_pair.target.folder, 1).module, None, described)
    with specgen.load(device="cpu", dtype="float32") as loaded:
        assert loaded.exit_layer is not None
        assert loaded.exit_layer.description.after == 2
