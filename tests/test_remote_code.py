"""Models that bring Python code: refused by default, without running any of it, and run where the
user says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers.dynamic_module_utils
from cli_helpers import run_main
from families import make_model, make_tokenizer, plain, save

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own-kind"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
MAP = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The folder of a model with code of its own, and the file that this code writes when it is
    imported."""
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "model"
    marker = tmp_path / "was-run"
    save(make_model("llama"), folder)
    (folder / "own_code.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "own-kind", "auto_map": MAP})
    )
    yield folder, marker
    assert not (folder / "__pycache__").exists()


@pytest.mark.parametrize(
    "command",
    [("generate", "abc"), ("inspect",), ("generate", "abc", "--backend", "transformers")],
    ids=" ".join,
)
def test_a_model_with_code_is_refused_and_its_code_is_not_run(
    with_code: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    folder, marker = with_code
    code, out, err = run_main(monkeypatch, capfd, *command, "-t", str(folder), "--device", "cpu")
    assert (code, out) == (2, "")
    hint = "If you trust its authors with your machine, add --trust-remote-code"
    assert err.splitlines()[-1] == f"error: {folder} contains Python code. {hint}"
    assert not marker.exists()


def test_code_is_run_where_the_user_trusts_it(
    with_code: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, marker = with_code
    options = (
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--json",
        "-n",
        "8",
        "-q",
        "--trust-remote-code",
    )
    code, out, err = run_main(monkeypatch, capfd, "generate", "-t", str(folder), *options, "abc")
    assert (code, err) == (0, "")
    assert marker.exists()
    ids = make_tokenizer()("abc")["input_ids"]
    assert json.loads(out.splitlines()[-1])["token_ids"] == plain(make_model("llama"), ids, 8)


def test_a_known_family_needs_none_of_the_code_that_comes_with_it(
    with_code: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As transformers itself does, which takes its own class for a model_type that it knows."""
    folder, marker = with_code
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    code, out, _ = run_main(
        monkeypatch,
        capfd,
        "generate",
        "-t",
        str(folder),
        "--device",
        "cpu",
        "--json",
        "-n",
        "8",
        "abc",
    )
    assert (code, marker.exists()) == (0, False)
    assert json.loads(out.splitlines()[-1])["token_ids"] == plain(
        make_model("llama"), make_tokenizer()("abc")["input_ids"], 8
    )
