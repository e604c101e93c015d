"""Trained heads in all published layouts: what is read from them."""

from __future__ import annotations

import json
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import VOCAB, make_model, save
from head_checks import eagle_of, equal, published
from head_layouts import Tensors, change_head, weights_file, write_head
from safetensors.torch import load_file, save_file
from specgen.engine.parts.head_description import describe_head
from specgen.engine.parts.head_files import load_head, save_head
from training_helpers import opened

from specgen.base.errors import SpecgenError
from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.weights import GlideWeights, MedusaWeights

WIDTH, LAYERS = 32, 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return opened(save(make_model("llama", num_hidden_layers=LAYERS), tmp_path_factory.mktemp("heads") / "target"))


def medusa_of(folder: Path, target: LoadedModel) -> MedusaWeights:
    weights = load_head(folder, target).weights
    assert isinstance(weights, MedusaWeights)
    return weights


# ------------------------------------------------------------------ layouts


@pytest.mark.parametrize("layout", ["medusa-v0.1", "medusa-v1.0", "medusa-v2"])
@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_heads_of_the_authors_layouts(target: LoadedModel, tmp_path: Path, layout: str, layers: int) -> None:
    raw = published(layout, target, medusa_layers=layers)[1]
    raw = {name.removeprefix("medusa_head."): tensor for name, tensor in raw.items()}
    found = medusa_of(write_head(tmp_path, layout, target.folder, medusa_layers=layers), target)
    names = [[f"{head}.{layer}.linear" for layer in range(layers)] for head in range(3)]
    assert equal(found.blocks, [[(raw[f"{name}.weight"], raw[f"{name}.bias"]) for name in each] for each in names])
    own = [raw[f"{head}.{layers}.weight"] for head in range(3)] if layout != "medusa-v2" else None
    assert equal(found.lm_heads, own)
    assert found.vocabulary is None
    (tmp_path / "config.json").unlink()
    assert equal(medusa_of(tmp_path, target), found)


def test_medusa_heads_of_vllms_layout(target: LoadedModel, tmp_path: Path) -> None:
    raw = {name.removeprefix("medusa_heads."): each for name, each in published("medusa-vllm", target)[1].items()}
    found = medusa_of(write_head(tmp_path, "medusa-vllm", target.folder), target)
    ids, order = raw["token_map"].sort()
    assert not torch.equal(ids, raw["token_map"])
    assert found.vocabulary is not None
    assert torch.equal(found.vocabulary, ids)
    assert equal(found.lm_heads, [raw[f"lm_heads.{head}.weight"][order] for head in range(3)])
    assert equal(found.blocks[2][0], (raw["blocks.2.layers.0.weight"], torch.zeros(WIDTH)))
    whole = torch.randn(VOCAB, WIDTH)
    rows = change_head(tmp_path, lambda raw: raw.update({"medusa_heads.lm_heads.1.weight": whole}))
    with pytest.raises(SpecgenError, match="its LM heads have different numbers of rows"):
        load_head(rows, target)
    shared = {f"medusa_heads.lm_heads.{head}.weight": whole for head in (1, 2)}
    change_head(tmp_path, lambda raw: [raw.pop(name) for name in shared], original_lm_head=True)
    change_head(tmp_path, lambda raw: raw.update({"medusa_heads.lm_heads.0.weight": whole}))
    lm_heads = medusa_of(tmp_path, target).lm_heads
    assert lm_heads is not None
    assert lm_heads[0] is lm_heads[2]
    assert torch.equal(lm_heads[0], whole[ids])


def test_a_fine_tuned_model_with_medusa_heads_is_its_own_target(target: LoadedModel, tmp_path: Path) -> None:
    """Medusa-2: the heads are in the model's files, and fit no other model."""
    folder = Path(shutil.copytree(target.folder, tmp_path / "model"))
    heads = published("medusa-v1.0", target)[1]
    save_file({**load_file(folder / "model.safetensors"), **heads}, folder / "model.safetensors")
    with pytest.raises(SpecgenError, match=f"trained with the model in the same files. Take that as the target: -t {folder}"):
        load_head(folder, target)
    assert len(medusa_of(folder, opened(folder)).blocks) == 3


@pytest.mark.parametrize("layout", ["eagle1", "eagle1-sglang", "eagle1-vllm", "eagle1-speculators"])
@pytest.mark.parametrize("bias", [True, False])
def test_eagle_1_heads(target: LoadedModel, tmp_path: Path, layout: str, bias: bool) -> None:
    raw = published("eagle1", target, bias=bias)[1]  # the same weights in all layouts
    del raw["embed_tokens.weight"]  # the target's own
    found = eagle_of(write_head(tmp_path, layout, target.folder, bias=bias), target)
    assert found.version == 1
    assert equal(found.tensors, raw)
    assert found.config["rope_theta"] == (50_000 if layout == "eagle1-speculators" else 10_000)
    assert (found.config["hidden_size"], found.config["intermediate_size"], found.config["head_dim"]) == (WIDTH, 40, 12)
    assert (found.config["num_attention_heads"], found.config["num_key_value_heads"]) == (4, 2)
    assert (found.config["model_type"], found.config["rms_norm_eps"]) == ("llama", 1e-5)


@pytest.mark.parametrize("layout", ["eagle3", "eagle3-speculators"])
def test_eagle_3_heads(target: LoadedModel, tmp_path: Path, layout: str) -> None:
    raw = published(layout, target)[1]
    found = eagle_of(write_head(tmp_path, layout, target.folder), target)
    assert found.version == 3
    own = {name.replace("midlayer.", "layers.0."): each for name, each in raw.items()}
    assert equal(found.tensors, {name: each for name, each in own.items() if name not in ("embed_tokens.weight", "d2t", "t2d")})
    assert found.vocabulary is not None
    assert torch.equal(found.vocabulary, raw["t2d"].nonzero()[:, 0])
    assert found.feature_layers == (2, 4, 5)
    assert found.norm_before_residual == (layout == "eagle3-speculators")
    assert found.config["rope_theta"] == (500_000 if layout == "eagle3-speculators" else 10_000)


@pytest.mark.parametrize(
    ("layout", "ids", "expected"),
    [
        ("eagle3", [1, 3, 4], (2, 4, 5)),  # outputs of layers, as in SpecForge
        ("eagle3", [2, 4, 5], (2, 4, 5)),  # inputs
        ("eagle3", [0, 3, 7], (0, 3, 7)),
        ("eagle3", None, (2, 4, 5)),
        ("eagle3-speculators", [1, 3, 4], (1, 3, 4)),  # always inputs
        ("eagle3-speculators", None, (2, 4, 5)),
    ],
)
def test_the_two_conventions_of_feature_layers(
    target: LoadedModel, tmp_path: Path, layout: str, ids: list[int] | None, expected: tuple[int, ...]
) -> None:
    folder = write_head(tmp_path, layout, target.folder)
    name = "eagle_aux_hidden_state_layer_ids"
    fields = {name: ids} if layout == "eagle3-speculators" else {"eagle_config": {"use_aux_hidden_state": True, name: ids}}
    assert eagle_of(change_head(folder, **fields), target).feature_layers == expected


@pytest.mark.parametrize(("qk_norm", "qkv_bias", "model_type"), [(True, False, "qwen3"), (False, True, "qwen2")])
@pytest.mark.parametrize("layout", ["eagle1", "eagle3-speculators"])
def test_layers_with_norms_or_biases_of_queries_and_keys(
    target: LoadedModel, tmp_path: Path, layout: str, qk_norm: bool, qkv_bias: bool, model_type: str
) -> None:
    folder = write_head(tmp_path / "head", layout, target.folder, qk_norm=qk_norm, qkv_bias=qkv_bias)
    found = eagle_of(folder, target)
    assert found.config["model_type"] == model_type
    assert ("layers.0.self_attn.q_norm.weight" in found.tensors) == qk_norm
    assert ("layers.0.self_attn.k_proj.bias" in found.tensors) == qkv_bias
    save_head(tmp_path / "saved", replace(found), describe_head("eagle", target, {}, {}))
    assert eagle_of(tmp_path / "saved", target).config == found.config


def test_a_whole_draft_vocabulary_needs_no_maps(target: LoadedModel, tmp_path: Path) -> None:
    folder = write_head(tmp_path, "eagle3", target.folder, draft_vocab=VOCAB)
    assert eagle_of(folder, target).vocabulary is None  # the maps are identities
    change_head(folder, lambda raw: [raw.pop(name) for name in ("d2t", "t2d")])
    assert eagle_of(folder, target).vocabulary is None


def test_glide_models(target: LoadedModel, tmp_path: Path) -> None:
    raw = published("glide", target)[1]
    folder = write_head(tmp_path, "glide", target.folder)
    found = load_head(folder, target).weights
    assert isinstance(found, GlideWeights)
    assert equal(found.tensors, {name.removeprefix("model."): each for name, each in raw.items()})
    assert found.block_size == 7
    assert found.config["rope_theta"] == 10_000
    embedding = load_file(target.folder / "model.safetensors")["model.embed_tokens.weight"]
    change_head(folder, lambda raw: (raw.pop("lm_head.weight"), raw.update({"model.embed_tokens.weight": embedding})))
    shared = load_head(folder, target).weights
    assert isinstance(shared, GlideWeights)
    assert shared.tensors.keys() == found.tensors.keys() - {"embed_tokens.weight", "lm_head.weight"}


def test_a_head_in_several_files(target: LoadedModel, tmp_path: Path) -> None:
    expected = eagle_of(write_head(tmp_path, "eagle3", target.folder), target)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / part)
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    assert equal(eagle_of(tmp_path, target), expected)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(SpecgenError, match="has 2 weight files and no index of them"):
        load_head(tmp_path, target)


# ------------------------------------------------------------------ copies of the target's tables


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_targets_embedding_is_left_out(
    models_folder: Path, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """Whatever the family calls it and scales it with, and also rounded to another dtype."""
    own = opened(save(make_model(family), models_folder / "heads" / family))
    folder = write_head(tmp_path, "eagle1", own.folder)
    change_head(folder, lambda raw: raw.update({name: tensor.to(dtype) for name, tensor in raw.items()}))
    assert "embed_tokens.weight" not in eagle_of(folder, own).tensors


def test_an_embedding_that_was_trained_on_is_kept_and_another_models_refused(target: LoadedModel, tmp_path: Path) -> None:
    folder, name = write_head(tmp_path / "1", "eagle1", target.folder), "embed_tokens.weight"

    def tune(raw: Tensors) -> None:
        raw[name] = raw[name] * 1.1 + 0.02 * torch.randn(VOCAB, WIDTH)

    tuned = load_file(weights_file(change_head(folder, tune)))[name]
    assert equal(eagle_of(folder, target).tensors[name], tuned)
    change_head(folder, lambda raw: raw.update({name: torch.randn(VOCAB, WIDTH)}))
    with pytest.raises(SpecgenError, match="its copy of the embedding is not that of "):
        load_head(folder, target)
    own = write_head(tmp_path / "3", "eagle3-speculators", target.folder, own_embedding=True)
    assert name in eagle_of(own, target).tensors  # heads of EAGLE-3 may have their own
    assert "may have been made for another target" in str(load_head(own, target).warning)
    assert load_head(write_head(tmp_path / "4", "eagle3-speculators", target.folder), target).warning is None


def test_the_script_writes_a_head(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--target", str(target.folder), "--layout", "eagle3-speculators", str(out)]
    monkeypatch.setattr("sys.argv", ["head_layouts.py", *arguments])
    runpy.run_path(str(Path(__file__).with_name("head_layouts.py")), run_name="__main__")
    assert capsys.readouterr().out.strip() == str(out)
    assert eagle_of(out, target).version == 3
