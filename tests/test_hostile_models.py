"""Model folders with files that are damaged, do not belong together or hold impossible values are refused in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import POSIX, run_main
from runner_checks import every
from safetensors.torch import load_file, save_file

from specgen.base.errors import SpecgenError
from specgen.engine.extra_tensors import check_no_extra
from specgen.engine.hub import model_folder
from specgen.engine.text import template_process
from specgen.engine.text.template_process import Limits

Refusal = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, pair: tuple[str, ...]) -> Path:
    return Path(shutil.copytree(pair[1], tmp_path / "model"))


@pytest.fixture
def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refusal:
    """Runs `generate` with the model in `folder` and returns its message, which is one line."""

    def call(*options: str) -> str:
        command = ("generate", "abc", "-m", "ar", "-n", "3", "-q", "-t", str(folder), "--device", "cpu", *options)
        code, out, err = run_main(monkeypatch, capfd, *command)
        assert (code, out) == (2, ""), err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert len(err) < 500
        return err

    return call


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


# ------------------------------------------------------------------ generation_config.json

UNREADABLE = ['{"repetition_penalty": 5', "", "[]", "null", "\xff", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize("content", UNREADABLE, ids=[text[:12] or "empty" for text in UNREADABLE])
def test_an_unreadable_generation_config_is_refused(folder: Path, refusal: Refusal, content: str) -> None:
    (folder / "generation_config.json").write_bytes(content.encode("latin-1"))
    assert f"{folder}/generation_config.json is no" in refusal()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("repetition_penalty", value) for value in ("abc", 0, -1, float("nan"), float("inf"), 1e300, 1e-300, 10**400, True)),
        *(("eos_token_id", value) for value in (1.5, [[1]], -1, "x", True, {})),
        *(("no_repeat_ngram_size", value) for value in (-3, 1.5, "x", True)),
        *(("suppress_tokens", value) for value in ("x", [-1], [1.5], [[1]], 5)),
        *(("sequence_bias", value) for value in ([[[1], 1e300]], [[[1], float("inf")]], [[[1], "x"]], {"x": 1})),
    ],
)
def test_an_impossible_value_is_named(folder: Path, refusal: Refusal, name: str, value: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({name: value}))
    assert f"generation_config.json: {name}" in refusal()


def test_a_config_that_forbids_all_tokens_is_refused(folder: Path, refusal: Refusal) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": list(range(5000))}))
    assert "forbids all tokens" in refusal()


@pytest.mark.parametrize(("backend", "ids"), [("native", [10**9, 10**30]), ("transformers", [10**9])])
def test_ids_beyond_the_vocabulary_change_nothing(
    folder: Path,
    pair: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    backend: str,
    ids: list[int],
) -> None:
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ids, "suppress_tokens": ids, "begin_suppress_tokens": ids, "min_length": 10**30})
    )
    command = ("generate", "abc", "-m", "ar", "-n", "3", "-q", "--device", "cpu", "--ignore-eos", "--backend", backend, "-t")
    found, expected = (run_main(monkeypatch, capfd, *command, model) for model in (str(folder), pair[1]))
    assert found == expected
    assert found[0] == 0


# ------------------------------------------------------------------ config.json, tokenizer_config.json


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "text_config"])
def test_a_model_of_countless_layers_is_not_built(folder: Path, refusal: Refusal, key: str) -> None:
    change_config(folder, **{key: 2**64 if key != "text_config" else {"num_layers": 2**64}})
    message = refusal("--backend", "transformers")
    assert f"has a {key if key != 'text_config' else 'num_layers'} above 4,096" in message


def test_errors_of_transformers_are_shown_without_pythons_names(folder: Path, refusal: Refusal) -> None:
    change_config(folder, sliding_window="x")
    message = refusal("--backend", "transformers")
    assert "forward passes after a rollback fail (" in message
    assert "Error" not in message
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": "x", "unusual_field": 1}))
    assert "cannot read the tokenizer of " in refusal()


# ------------------------------------------------------------------ tensors

backends = pytest.mark.parametrize("backend", ["native", "transformers"])


@backends
def test_weights_of_more_layers_than_the_config_has_are_refused(folder: Path, refusal: Refusal, backend: str) -> None:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    change_config(folder, num_hidden_layers=layers - 1)
    message = refusal("--backend", backend)
    assert " tensors that its config.json does not describe (the first: " in message
    assert f"layers.{layers - 1}." in message


@backends
def test_missing_unexpected_and_mismatched_tensors_are_named(folder: Path, refusal: Refusal, backend: str) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    name = "model.layers.0.self_attn.q_proj.bias"
    add_tensors(folder, **{name: torch.ones(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert f"has a tensor that its config.json does not describe (the first: {name})" in refusal("--backend", backend)
    (folder / "model.safetensors").write_bytes(whole)
    add_tensors(folder, **{"model.norm.weight": torch.ones(3)})
    assert "model.norm.weight is 3 in its file, but " in refusal("--backend", backend)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 of its tensors (the first: model.norm.weight)" in refusal("--backend", backend)


def test_layers_that_predict_several_tokens_are_expected_where_the_config_has_them() -> None:
    names = ["model.layers.2.a.weight", "model.layers.2.b.weight"]
    check_no_extra(names, "m", 2, prediction_layers=1)
    for layers, prediction_layers in ((2, 0), (1, 1), (3, 1)):
        with pytest.raises(SpecgenError, match=r"m has 2 tensors .* \(the first: model.layers.2.a.weight\)"):
            check_no_extra(names, "m", layers, prediction_layers)


@backends
def test_headers_and_indices_of_brackets_are_refused(folder: Path, refusal: Refusal, backend: str) -> None:
    header = b"[" * 100_000
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "cannot read the weights" in refusal("--backend", backend)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(header)
    assert "cannot read the weights" in refusal("--backend", backend)


@POSIX
def test_weights_that_are_a_fifo_are_not_waited_for(folder: Path, refusal: Refusal) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert "model.safetensors is not a file" in refusal()


# ------------------------------------------------------------------ chat templates

CUT_OFF = {
    "more than 16 MiB of text": "{{ 'a' * 100000000 }}",
    "maximum recursion depth": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "more than 16 MiB": "{% for i in range(9999) %}{% for j in range(9999) %}" + "a" * 500 + "{% endfor %}{% endfor %}",
    "no↵way␛": "{{ raise_exception('no\nway\x1b') }}",
}


@pytest.fixture
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that never ends is cut off after any time; the others end before."""
    monkeypatch.setattr(template_process, "LIMITS", Limits(seconds=100.0))


@pytest.mark.usefixtures("_patience")
@pytest.mark.parametrize("why", every(2, CUT_OFF))
def test_a_template_that_takes_too_much_is_refused(folder: Path, refusal: Refusal, why: str) -> None:
    (folder / "chat_template.jinja").write_text(CUT_OFF[why])
    message = refusal("--chat")
    assert "the model's chat template refuses these turns: " in message
    assert why in message


def test_a_template_that_never_ends_is_cut_off(folder: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "LIMITS", Limits(seconds=0.5))
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loop)
    assert "it takes more than 0.5 seconds" in refusal("--chat")


@pytest.mark.usefixtures("_patience")
def test_a_template_of_a_tokenizer_of_transformers_is_limited_too(folder: Path, refusal: Refusal) -> None:
    (folder / "chat_template.jinja").write_text("{{ 'a' * 100000000 }}")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "unusual_field": 1}))
    assert "more than 16 MiB of text" in refusal("--chat")


@POSIX
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"])
def test_a_fifo_in_a_models_folder_is_refused(folder: Path, name: str) -> None:
    """Reading it would wait for another program."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(SpecgenError, match=f"{name} is not a file"):
        model_folder(str(folder), None, True, False, pytest.fail)
