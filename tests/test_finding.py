"""What is found to draft for a target: what is searched, what is remembered, and what is left
out."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import native_models
import pytest
import torch
from families import make_model, make_tokenizer, save
from gguf_models import model_of, write_model
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from typer.testing import CliRunner

import specgen
from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.base.model_options import ModelOptions
from specgen.cli.app import app
from specgen.engine import weights
from specgen.engine.model_files import ModelSource, describe, find_model
from specgen.engine.model_runner import Runners
from specgen.models.loaded_models import LoadedModels
from specgen.pair import finding, loading, trial
from specgen.pair.finding import Search, search

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of models with the bundled target, `big`, and its draft, `small`. Beside it empty
    folders: the hub cache, and the folder of caches."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hub").mkdir()
    for name, role in (("big", "target"), ("small", "draft")):
        shutil.copytree(demo.folder(role), tmp_path / "models" / name)
    return tmp_path / "models"


def searched(place: Path) -> Search:
    devices = [torch.device("cpu")] * 2
    files = find_model(ModelSource(str(place / "big")), lambda _: None)
    return search(files, devices, ModelOptions(dtype="float32"))


def test_a_folder_of_links_is_a_folder_of_models(place: Path, tmp_path: Path) -> None:
    """The links lie in one folder, what they lead to in others."""
    links = tmp_path / "links"
    links.mkdir()
    for name in ("big", "small"):
        own = tmp_path / f"where {name} is"
        own.mkdir()
        (place / name).rename(own / name)
        (links / name).symlink_to(own / name)
    assert names(links) == ["small"]


def names(place: Path) -> list[str]:
    return [Path(each.name).name for each in searched(place).found]


def random_model(folder: Path) -> Path:
    """Saves a small model with the bundled tokenizer and random weights, of which the bundled
    target accepts nothing."""
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "vocab_size": 4096,
        "max_position_embeddings": 1024,
    }
    save(make_model("llama", **sizes, tie_word_embeddings=True), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.folder("draft") / name, folder)
    return folder


def generated(place: Path, *options: str) -> Any:
    arguments = ["generate", "-t", str(place / "big"), "-n", "6", "def f("]
    return CliRunner().invoke(app, [*arguments, "--device", "cpu", "--dtype", "float32", *options])


def raising(error: Exception) -> Callable[..., Any]:
    return Mock(side_effect=error)


# what is remembered


def test_a_second_search_opens_no_file_of_what_was_found(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = searched(place).found
    for name in ("read_config", "load_tokenizer", "describe", "open_model", "open_part"):
        monkeypatch.setattr(finding, name, raising(AssertionError(name)))
    assert searched(place).found == first
    assert [each.name for each in first] == [str(place / "small")]
    monkeypatch.chdir(place)
    by_name = searched(Path()).found
    assert [(each.name, each.folder) for each in by_name] == [("small", place / "small")]


@pytest.mark.parametrize(
    "change", ["a model more", "other contents", "a model less", "the target", "other versions"]
)
def test_a_changed_file_is_seen(place: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(place) == ["small"]
    if change == "a model more":
        shutil.copytree(place / "small", place / "more")
        assert sorted(names(place)) == ["more", "small"]
    elif change == "other contents":
        (place / "small" / "config.json").write_text("{}")
        assert names(place) == []
    elif change == "a model less":
        (place / "small" / "config.json").unlink()
        assert names(place) == []
    elif change == "the target":
        save(make_model("llama"), place / "big", make_tokenizer())
        assert names(place) == []
    else:
        monkeypatch.setattr(finding, "_judged", lambda *_: None)
        assert names(place) == ["small"], "remembered"
        monkeypatch.setattr("specgen.pair.found_cache.versions", lambda: {"torch": "3.0"})
        assert names(place) == []


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"state": 1}', '{"state": "STATE", "found": [{"kind": 1}]}']
)
def test_a_damaged_memory_is_made_anew(place: Path, content: str) -> None:
    state = searched(place).state
    (memory,) = (Path(os.environ["SPECGEN_CACHE"]) / "drafters").glob("*.json")
    memory.write_text(content.replace("STATE", state))
    assert names(place) == ([] if "kind" in content else ["small"])


def test_a_start_reads_the_weights_for_fingerprints_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = Mock(side_effect=weights._digests)
    monkeypatch.setattr(weights, "_digests", digests)
    monkeypatch.setattr(weights, "_known_digests", {})
    first = weights.weights_fingerprint(place / "big")
    assert weights.weights_fingerprint(place / "big") == first
    assert digests.call_count == 1
    shutil.copy(place / "small" / "model.safetensors", place / "big" / "model.safetensors")
    assert weights.weights_fingerprint(place / "big") != first


@pytest.mark.parametrize(
    "options",
    [("--backend", "transformers"), ("--dtype", "bfloat16"), ("--repetition-penalty", "1.3")],
)
def test_what_one_way_to_run_the_models_showed_is_not_taken_for_another(
    place: Path, options: Sequence[str]
) -> None:
    assert "tokens accepted in a short trial" in generated(place).stderr
    learned = searched(place).found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "with_found", raising(SpecgenError("not in this way", "")))
        ended = generated(place, *options)
    assert ended.exit_code == 0
    assert f"left out {place / 'small'}: not in this way" in ended.stderr

    assert searched(place).found == learned
    assert "left out" not in generated(place).stderr
    assert "left out" in generated(place, *options).stderr


# what is searched


def test_a_folder_that_holds_other_things_is_not_searched(place: Path) -> None:
    for name in ("music", "letters"):
        (place / name).mkdir()
    assert names(place) == ["small"]
    (place / "pictures").mkdir()
    assert names(place) == []
    assert generated(place).exit_code == 0


def test_what_cannot_be_read_is_no_drafter(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = place.parent / "hub" / "models--a--gone" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "x").symlink_to(place / "nowhere")
    shutil.copytree(place / "small", place.parent / "hub" / "models--a--small" / "snapshots" / "x")
    (place.parent / "hub" / "models--a--file").write_text("")
    (place / "loop").symlink_to(place / "loop")
    listdir = os.listdir

    def refuse(folder: Any) -> list[str]:
        if Path(folder) == place:
            raise PermissionError(13, "Permission denied", str(folder))
        return listdir(folder)

    assert sorted(names(place)) == ["small", "small"]
    monkeypatch.setattr(os, "listdir", refuse)
    assert [each.name for each in searched(place).found] == ["a/small"]


def test_a_model_with_other_tokens_is_no_drafter(place: Path) -> None:
    file = place / "small" / "tokenizer.json"
    tokens = json.loads(file.read_text())
    vocabulary = tokens["model"]["vocab"]
    one, other = list(vocabulary)[500:502]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(tokens))
    assert names(place) == []


@pytest.mark.parametrize(
    "layout", ["in one folder", "in folders of their own", "the folder is named"]
)
def test_a_smaller_gguf_file_beside_a_gguf_target_drafts(place: Path, layout: str) -> None:
    own = layout != "in one folder"
    folders = [place / name if own else place for name in ("large", "little")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    module = native_models.make({**model_of("qwen2").config.to_dict(), "intermediate_size": 4096})
    large = write_model(module, "qwen2", folders[0] / "large.gguf", "Q8_0")
    little = write_model(model_of("qwen2"), "qwen2", folders[1] / "little.gguf", "F32")
    twin = write_model(module, "qwen2", folders[0] / "twin.gguf", "Q4_0") if not own else None
    target = folders[0] if layout == "the folder is named" else large
    found = search(find_model(ModelSource(str(target)), lambda _: None)).found
    assert [each.folder for each in found] == [little]
    assert twin not in [each.folder for each in found], "as large, although its file is smaller"
    (place / "big" / "config.json").unlink()
    (place / "small" / "config.json").unlink()
    for name in ("music", "letters"):
        (place / name).mkdir()
    assert search(find_model(ModelSource(str(target)), lambda _: None)).found == []


def test_gguf_files_in_the_hub_cache_draft_if_they_fit(place: Path) -> None:
    """What is as large as the target, or no model, is left out."""
    module = native_models.make({**model_of("qwen2").config.to_dict(), "intermediate_size": 4096})
    snapshot = place.parent / "hub" / "models--lab--tiny-GGUF" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    little = write_model(model_of("qwen2"), "qwen2", snapshot / "tiny-Q8_0.gguf", "Q8_0")
    write_model(module, "qwen2", snapshot / "large.gguf", "Q8_0")
    write_model(model_of("qwen2"), "qwen2", snapshot / "mmproj-tiny.gguf", "F32")
    (snapshot / "damaged.gguf").write_bytes(b"GGUF" + bytes(9))
    alone = place.parent / "alone"
    alone.mkdir()
    target = write_model(module, "qwen2", alone / "target.gguf", "Q8_0")
    (found,) = search(find_model(ModelSource(str(target)), lambda _: None)).found
    assert (found.folder, found.kind, found.name) == (
        little,
        "draft model",
        "lab/tiny-GGUF:tiny-Q8_0.gguf",
    )


# what is left out


def test_a_model_that_lacks_a_tensor_is_left_out_with_one_line(place: Path) -> None:
    tensors = load_file(place / "small" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, place / "small" / "model.safetensors")
    assert len(searched(place).left_out) == 1, "known from the headers"
    ended = generated(place)
    assert ended.exit_code == 0
    line = (
        f"left out {place / 'small'}: {place / 'small'} lacks 1 of its tensors (the "
        "first: norm.weight)"
    )
    assert [each for each in ended.stderr.splitlines() if "left out" in each] == [line]
    assert ended.stdout == generated(place, "-d", "none").stdout


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("odd\nfile"), "odd file"), (SpecgenError("it is damaged", ""), "it is damaged")],
)
def test_a_model_that_does_not_load_is_left_out_and_the_next_one_drafts(
    place: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    random_model(place / "odd")  # expected to be the better one, for its size
    with_draft_model = LoadedModels.with_draft_model

    def load(models: LoadedModels) -> Runners | None:
        if models.draft is not None and models.draft.folder.name == "odd":
            raise error
        return with_draft_model(models)

    monkeypatch.setattr(LoadedModels, "with_draft_model", load)
    with specgen.load(str(place / "big"), find=True, **CPU) as pair:
        assert pair.draft is not None
        assert pair.draft.name == str(place / "small")
        assert pair.searched is not None
        assert pair.searched.left_out == [f"left out {place / 'odd'}: {text}"]
    is_remembered = isinstance(error, SpecgenError)
    assert [line.endswith(text) for line in searched(place).left_out] == [True] * is_remembered


def test_a_model_of_which_the_target_accepts_little_is_tried_once_and_does_not_draft(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(place / "small")
    random_model(place / "random")
    first = generated(place)
    monkeypatch.setattr(trial, "tried", raising(AssertionError("it is tried again")))
    monkeypatch.setattr(loading, "with_found", raising(AssertionError("it is loaded")))
    second = generated(place)
    for ended in (first, second):
        assert ended.exit_code == 0
        assert "0 of 6 tokens accepted in a short trial; too few, so it is not used" in ended.stderr
        assert "adaptive (no draft model)" in ended.stderr
        assert ended.stdout == generated(place, "-d", "none").stdout


def test_a_model_of_which_the_target_accepts_much_drafts(place: Path) -> None:
    ended = generated(place)
    assert ended.exit_code == 0
    found = searched(place).found[0]
    assert not found.is_assumed
    assert found.acceptance > 0.5
    assert f"found {place / 'small'}: {found.why}; -d none drafts without it" in ended.stderr
    assert ended.stdout == generated(place, "-d", "none").stdout


def test_a_sampled_run_with_a_seed_has_one_text_before_and_after_the_trial(place: Path) -> None:
    random_model(place / "random")
    options = "--temperature", "1", "--seed", "3"
    first = generated(place, *options)
    generated(place)
    assert generated(place, *options).stdout == first.stdout
    assert first.exit_code == 0


@pytest.mark.parametrize(
    ("method", "looks"),
    [
        ("ar", False),
        ("lookup", False),
        ("eagle", "heads"),
        ("sd", "untried"),
        ("pearl", "unloaded"),
    ],
)
def test_a_method_looks_for_what_it_can_use_only(
    place: Path, monkeypatch: pytest.MonkeyPatch, method: str, looks: bool | str
) -> None:
    load = Mock(side_effect=SpecgenError("enough", ""))
    monkeypatch.setattr(loading, "load_pair", load)
    generated(place, "-m", method)
    assert load.call_args.args[0].find == looks


# models of all types that transformers knows


def of_type(folder: Path, model_type: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    return folder


ALL_TYPES = sorted(CONFIG_MAPPING_NAMES)
SOME_TYPES = {"blt", "clip", "vit", "wav2vec2", "whisper", *random.Random(0).sample(ALL_TYPES, 20)}


@pytest.mark.parametrize(
    "types", [SOME_TYPES, pytest.param(ALL_TYPES, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_no_type_of_model_ends_a_run_as_a_neighbour_or_has_a_traceback_as_a_target(
    place: Path, types: Collection[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "MOST_FOLDERS", 2 * len(ALL_TYPES))
    for model_type in sorted(types):
        folder = of_type(
            place.parent / "hub" / f"models--a--{model_type}" / "snapshots" / "x", model_type
        )
        for use in (describe, lambda folder, source: find_model(source, lambda _: None)):
            with suppress(SpecgenError):
                use(folder, ModelSource(str(folder)))
        shutil.copytree(folder, place / model_type)
    assert names(place) == ["small"]


@pytest.mark.parametrize("model_type", ["vit", "mamba2"])
def test_such_a_target_is_one_line(place: Path, model_type: str) -> None:
    folder = of_type(place / "odd", model_type)
    shutil.copy(place / "big" / "tokenizer.json", folder)
    ended = CliRunner().invoke(app, ["generate", "-t", str(folder), "x"])
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("methods", "looks"), [("lookup,eagle", "heads"), ("lookup,adaptive", "untried")]
)
def test_compare_loads_a_model_that_was_found_only_for_methods_that_may_use_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, methods: str, looks: str
) -> None:
    load = Mock(side_effect=SpecgenError("enough", ""))
    monkeypatch.setattr(loading, "load_pair", load)
    CliRunner().invoke(app, ["compare", "-t", str(place / "big"), "-m", methods])
    assert load.call_args.args[0].find == looks
