"""Heads that specgen trained: written in published layouts, described, found without being named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_model, save
from head_checks import equal, published, refusal
from head_layouts import LAYOUTS, features_of, sizes_of, weights_file, write_head
from safetensors import safe_open
from safetensors.torch import load_file
from specgen.engine.parts.head_description import describe_head
from specgen.engine.parts.head_files import FoundHead, check_head_folder, find_head, load_head, save_head
from training_helpers import invoke, opened, train_command

from specgen import demo
from specgen.base import paths
from specgen.base.errors import SpecgenError
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.weights import EagleWeights, MedusaWeights

WIDTH, LAYERS = 32, 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return opened(save(make_model("llama", num_hidden_layers=LAYERS), tmp_path_factory.mktemp("heads") / "target"))


def rounded(weights: Any) -> Any:
    """The weights as a file in bfloat16 holds them."""
    if isinstance(weights, torch.Tensor):
        return weights.bfloat16() if weights.is_floating_point() else weights
    if isinstance(weights, dict):
        return {name: rounded(each) for name, each in weights.items()}
    return [rounded(each) for each in weights] if isinstance(weights, list | tuple) else weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_read_back(target: LoadedModel, tmp_path: Path, layout: str) -> None:
    weights = load_head(write_head(tmp_path / "published", layout, target.folder), target).weights
    if isinstance(weights, MedusaWeights):
        weights = replace(weights, rank_accuracies=[[0.5, 0.25], [0.125]])
    if isinstance(weights, EagleWeights) and weights.version == 3:
        weights = replace(weights, feature_layers=(1, 3, 7))  # which the config alone does not express
    described = describe_head(weights.kind, target, {"agreement": 0.123456}, {"steps": 7})
    path = save_head(tmp_path / "saved", weights, described)
    found = load_head(tmp_path / "saved", target)
    for name in type(weights).__slots__:
        assert name == "kind" or equal(getattr(found.weights, name), type_of(rounded(getattr(weights, name))))
    assert found.description is not None
    assert found.description.figures == {"agreement": 0.1235}
    assert found.description.weights == weights_fingerprint(path.parent)
    assert len(found.description.digest) == 16
    content = path.read_bytes()
    assert save_head(tmp_path / "saved", weights, described).read_bytes() == content
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it, transformers refuses a file


def type_of(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) and value and isinstance(value[0], int) else value


WRITTEN = {
    "medusa-v2": ("medusa-v2", ["version", "medusa_num_heads"]),
    "medusa-v0.1": ("medusa-v0.1", ["medusa_num_layers"]),
    "medusa-vllm": ("medusa-vllm", ["model_type", "num_heads", "num_hidden_layers", "vocab_size", "truncated_vocab_size"]),
    "eagle1": ("eagle1-speculators", ["architectures", "model_type", "hidden_size", "num_attention_heads", "head_dim"]),
    "eagle3": ("eagle3", ["architectures", "draft_vocab_size", "vocab_size", "num_key_value_heads"]),
    "glide": ("glide", ["model_type", "block_size", "large_hidden_size", "large_head_dim", "large_num_attention_heads"]),
}


@pytest.mark.parametrize("layout", WRITTEN)
def test_what_is_written_has_a_published_layout(target: LoadedModel, tmp_path: Path, layout: str) -> None:
    """The names, shapes and settings are those of the layout as the tests describe it, not only what this code reads back."""
    source, fields = WRITTEN[layout]
    weights = load_head(write_head(tmp_path / "published", source, target.folder), target).weights
    folder = save_head(tmp_path / "saved", weights, describe_head(weights.kind, target, {}, {})).parent
    config, raw = published(layout, target)
    raw.pop("embed_tokens.weight", None)  # a copy of the target's
    written, described = load_file(weights_file(folder)), json.loads((folder / "config.json").read_text())
    biases = {name for name in written if layout == "medusa-vllm" and name.endswith(".bias")}  # zeros
    assert {name.removeprefix("medusa_heads.") for name in raw} == written.keys() - biases
    assert {name.removeprefix("medusa_heads."): each.shape for name, each in raw.items()}.items() <= {
        name: each.shape for name, each in written.items()
    }.items()
    assert {name: described[name] for name in fields} == {name: {**config, "medusa_num_heads": 3}[name] for name in fields}
    if layout == "eagle3":
        assert torch.equal(written["d2t"], raw["d2t"])
        assert torch.equal(written["t2d"], raw["t2d"])
        assert described["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == features_of(sizes_of(target.folder))


def test_a_head_is_not_written_over_a_model(target: LoadedModel, tmp_path: Path, corpus: Path) -> None:
    model = Path(shutil.copytree(target.folder, tmp_path / "model"))
    weights = load_head(write_head(tmp_path / "head", "medusa-v2", target.folder), target).weights
    described = describe_head("medusa", target, {}, {})
    before = (model / "config.json").read_bytes()
    with pytest.raises(SpecgenError, match=r"has a config.json that does not belong to a head trained by specgen"):
        save_head(model, weights, described)
    result = invoke([*train_command("eagle", corpus, model, "-t", str(target.folder)), "-q"])  # before it trains
    assert (result.exit_code, "Name another folder" in result.stderr) == (2, True)
    assert (model / "config.json").read_bytes() == before
    save_head(tmp_path / "saved", weights, described)
    check_head_folder(tmp_path / "saved")
    glide = load_head(write_head(tmp_path / "glide", "glide", target.folder), target).weights
    save_head(tmp_path / "saved", glide, replace(described, kind="glide"))  # replaces the other head's files
    assert load_head(tmp_path / "saved", target).weights.kind == "glide"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format: 1", "format: 7", "format: Input should be 1"),
        ("kind: medusa", "kind: eagle", "it is of the kind medusa, and its head.yaml says eagle"),
        ("kind: medusa", "kind: [", "cannot read"),
        ("kind: medusa", "kind: hydra", "kind: Input should be 'medusa', 'eagle' or 'glide'"),
        ("target: ", "zebra: 1\ntarget: ", "zebra: Unexpected keyword argument"),
        ("fingerprint: ", "fingerprint: '0'  # ", r"was trained for .*target \(0\), not for"),
        ("weights: ", "weights: '0'  # ", "do not belong together"),
        ("rank_accuracies: []", "rank_accuracies: [[1.5]]", "less than or equal to 1"),
        ("rank_accuracies: []", "rank_accuracies: [[.nan]]", "rank_accuracies"),
        ("figures: {}", "figures: 3", "figures: Input should be"),
    ],
)
def test_a_wrong_description_is_refused(target: LoadedModel, tmp_path: Path, old: str, new: str, message: str) -> None:
    weights = load_head(write_head(tmp_path / "published", "medusa-v2", target.folder), target).weights
    save_head(tmp_path / "head", weights, describe_head("medusa", target, {}, {}))
    path = tmp_path / "head" / "head.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    found = refusal(tmp_path / "head", target)
    with pytest.raises(SpecgenError, match=message):
        raise SpecgenError(found)


def test_the_head_trained_here_is_found_without_being_named(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECGEN_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(demo, "_PACKAGE", tmp_path / "package")
    own = weights_fingerprint(target.folder)
    weights = load_head(write_head(tmp_path / "published", "medusa-v2", target.folder), target).weights
    described = describe_head("medusa", target, {}, {})
    assert find_head("medusa", target.name, target.folder, is_bundled=True) is None
    assert FoundHead("medusa", target, is_bundled=False).load() is None
    bundled = save_head(demo.head_folder("medusa"), weights, described).parent
    assert find_head("medusa", target.name, target.folder, is_bundled=True) == bundled
    assert find_head("medusa", target.name, target.folder, is_bundled=False) is None
    other = save_head(paths.head_folder("medusa", "another/name", own), weights, described).parent
    assert find_head("medusa", target.name, target.folder, is_bundled=True) == other
    kept = save_head(paths.head_folder("medusa", target.name, own), weights, described).parent
    assert find_head("medusa", target.name, target.folder, is_bundled=True) == kept
    assert find_head("eagle", target.name, target.folder, is_bundled=True) is None
    found = FoundHead("medusa", target, is_bundled=False)
    assert found.description == replace(described, weights=weights_fingerprint(kept), rank_accuracies=[])
    loaded = found.load()
    assert loaded is not None
    assert loaded.path == kept
    (kept / "medusa_lm_head.safetensors").unlink()
    found = FoundHead("medusa", target, is_bundled=False)
    assert found.load() is None
    assert "do not belong together" in str(found.refusal)
