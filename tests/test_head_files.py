"""Trained heads in all published layouts: what is read from them, what is refused and how, and what specgen writes itself."""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
import struct
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from families import VOCAB, make_model, save
from head_layouts import LAYOUTS, Config, Tensors, features_of, sizes_of, write_head
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from training_helpers import opened

from specgen import demo, paths
from specgen.engine.fingerprint import weights_fingerprint
from specgen.engine.heads.head_description import HeadDescription, describe_head
from specgen.engine.heads.head_files import FoundHead, check_head_folder, find_head, load_head, save_head
from specgen.engine.heads.head_tensors import HeadTensors
from specgen.engine.heads.weights import EagleWeights, GlideWeights, MedusaWeights
from specgen.engine.model_loading import LoadedModel
from specgen.errors import SpecgenError

WIDTH, LAYERS = 32, 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return opened(save(make_model("llama", num_hidden_layers=LAYERS), tmp_path_factory.mktemp("heads") / "target"))


def weights_file(folder: Path) -> Path:
    return next(path for path in (folder / "medusa_lm_head.safetensors", folder / "model.safetensors") if path.exists())


def change(folder: Path, tensors: Callable[[Tensors], Any] = lambda _: None, **config: Any) -> Path:
    """Changes a head's tensors in place, and sets fields of its config; None removes one."""
    stored = load_file(weights_file(folder))
    tensors(stored)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, weights_file(folder))
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({name: each for name, each in {**old, **config}.items() if each is not None}))
    return folder


def published(layout: str, target: LoadedModel, **sizes: Any) -> tuple[Config, Tensors]:
    return LAYOUTS[layout](sizes_of(target.folder, **sizes))


def eagle_of(folder: Path, target: LoadedModel) -> EagleWeights:
    weights = load_head(folder, target).weights
    assert isinstance(weights, EagleWeights)
    return weights


def medusa_of(folder: Path, target: LoadedModel) -> MedusaWeights:
    weights = load_head(folder, target).weights
    assert isinstance(weights, MedusaWeights)
    return weights


def equal(found: Any, expected: Any) -> bool:
    """Whether weights or parts of weights are equal, tensors by their values and dtypes."""
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[name], each) for name, each in expected.items())
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, EagleWeights | GlideWeights | MedusaWeights):
        return all(equal(getattr(found, name), getattr(expected, name)) for name in type(expected).__slots__ if name != "kind")
    return bool(found == expected)


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
    rows = change(tmp_path, lambda raw: raw.update({"medusa_heads.lm_heads.1.weight": whole}))
    with pytest.raises(SpecgenError, match="its LM heads have different numbers of rows"):
        load_head(rows, target)
    shared = {f"medusa_heads.lm_heads.{head}.weight": whole for head in (1, 2)}
    change(tmp_path, lambda raw: [raw.pop(name) for name in shared], original_lm_head=True)
    change(tmp_path, lambda raw: raw.update({"medusa_heads.lm_heads.0.weight": whole}))
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
    assert eagle_of(change(folder, **fields), target).feature_layers == expected


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
    change(folder, lambda raw: [raw.pop(name) for name in ("d2t", "t2d")])
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
    change(folder, lambda raw: (raw.pop("lm_head.weight"), raw.update({"model.embed_tokens.weight": embedding})))
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
    change(folder, lambda raw: raw.update({name: tensor.to(dtype) for name, tensor in raw.items()}))
    assert "embed_tokens.weight" not in eagle_of(folder, own).tensors


def test_an_embedding_that_was_trained_on_is_kept_and_another_models_refused(target: LoadedModel, tmp_path: Path) -> None:
    folder, name = write_head(tmp_path / "1", "eagle1", target.folder), "embed_tokens.weight"

    def tune(raw: Tensors) -> None:
        raw[name] = raw[name] * 1.1 + 0.02 * torch.randn(VOCAB, WIDTH)

    tuned = load_file(weights_file(change(folder, tune)))[name]
    assert equal(eagle_of(folder, target).tensors[name], tuned)
    change(folder, lambda raw: raw.update({name: torch.randn(VOCAB, WIDTH)}))
    with pytest.raises(SpecgenError, match="its copy of the embedding is not that of "):
        load_head(folder, target)
    own = write_head(tmp_path / "3", "eagle3-speculators", target.folder, own_embedding=True)
    assert name in eagle_of(own, target).tensors  # heads of EAGLE-3 may have their own
    assert "may have been made for another target" in str(load_head(own, target).warning)
    assert load_head(write_head(tmp_path / "4", "eagle3-speculators", target.folder), target).warning is None


# ------------------------------------------------------------------ mistakes


def put(**tensors: torch.Tensor) -> Callable[[Tensors], None]:
    """Replaces tensors; `__` in a name is a dot."""
    return lambda raw: raw.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})


def without(*names: str) -> Callable[[Tensors], None]:
    return lambda raw: [raw.pop(name) for name in names] and None


def scaled(name: str, factor: float) -> Callable[[Tensors], None]:
    return lambda raw: raw.update({name: raw[name] * factor})


def spoiled(name: str, value: float) -> Callable[[Tensors], None]:
    def spoil(raw: Tensors) -> None:
        raw[name].view(-1)[3] = value

    return spoil


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    return lambda raw: raw.update({new: raw.pop(old)})


def same(raw: Tensors) -> None:
    """Leaves the tensors as they are."""


ONES = torch.ones(WIDTH)
FIRST = "layers.0.self_attn.q_proj.weight"
MISTAKES: list[tuple[str, Callable[[Tensors], None], Config, str]] = [
    # tensors that are missing, unknown or have other shapes
    ("eagle1", without("layers.0.mlp.up_proj.weight"), {}, "lacks 1 of its tensors (the first: layers.0.mlp.up_proj.weight)"),
    ("eagle1", without("fc.bias"), {"bias": True}, "lacks 1 of its tensors (the first: fc.bias)"),
    ("eagle1", same, {"bias": False}, "a tensor that such a head does not have (the first: fc.bias)"),
    ("eagle1", same, {"qkv_bias": True}, "lacks 3 of its tensors (the first: layers.0.self_attn.q_proj.bias)"),
    ("eagle1", put(layers__0__input_layernorm__weight=ONES), {}, "does not have (the first: layers.0.input_layernorm.weight)"),
    ("eagle1", put(norm__weight=ONES), {}, "does not have (the first: norm.weight)"),
    ("eagle1", put(layers__0__mlp__down_proj__weight=torch.ones(WIDTH, 41)), {}, "down_proj.weight is 32 x 41 in its file, but"),
    ("eagle1", put(**{FIRST: torch.ones(48)}), {}, f"{FIRST} is no matrix"),
    ("eagle1", same, {"num_attention_heads": 5}, f"rows of {FIRST} are not divisible"),
    ("eagle1", same, {"num_attention_heads": None}, "its config.json does not say num_attention_heads"),
    ("eagle1", same, {"num_attention_heads": "four"}, "num_attention_heads = 'four' in its config.json is not supported"),
    ("eagle1", same, {"intermediate_size": 41}, "gate_proj.weight is 40 x 32 in its file, but has to be 41 x 32"),
    ("eagle1", same, {"hidden_act": "tanh"}, "hidden_act = 'tanh' in its config.json is not supported"),
    ("eagle1", same, {"rope_scaling": {"type": "magic"}}, "in its config.json is not supported"),
    ("eagle1-sglang", put(fc__bias=ONES), {}, "are its fc.bias"),
    ("eagle3", without("midlayer.hidden_norm.weight"), {}, "lacks 1 of its tensors (the first: layers.0.hidden_norm.weight)"),
    ("eagle3", without("lm_head.weight"), {}, "lacks 1 of its tensors (the first: lm_head.weight)"),
    ("eagle3", without("d2t", "t2d"), {}, "lacks 1 of its tensors (the first: d2t)"),
    ("eagle3", put(layers__1__mlp__x=ONES), {}, "it has 2 decoder layers"),
    ("medusa-v0.1", without("1.0.linear.weight"), {}, "the first: blocks.1.layers.0.weight"),
    ("medusa-v0.1", without("2.1.weight"), {}, "the first: lm_heads.2.weight"),
    ("medusa-v2", renamed("2.0.linear.weight", "7.0.linear.weight"), {}, "the first: blocks.2.layers.0.weight"),
    ("medusa-v2", put(**{"1.0.linear.bias": torch.ones(31)}), {}, "1.0.linear.bias is 31 in its file, but has to be 32"),
    ("medusa-vllm", put(token_map=torch.tensor([5, 5])), {}, "are its token_map"),
    ("medusa-vllm", put(**{"medusa_heads.token_map": torch.tensor([1] * 20)}), {}, "does not hold different ids of tokens"),
    ("medusa-vllm", put(**{"medusa_heads.token_map": torch.tensor([*range(19), VOCAB])}), {}, "does not hold different ids"),
    ("glide", without("model.layers.0.cross_attn.o_proj.weight"), {}, "the first: layers.0.cross_attn.o_proj.weight"),
    ("glide", without("model.norm.weight"), {}, "lacks 1 of its tensors (the first: norm.weight)"),
    # values
    ("eagle1", spoiled("layers.0.mlp.up_proj.weight", float("nan")), {}, "layers.0.mlp.up_proj.weight holds NaN or infinities"),
    ("eagle3", spoiled("lm_head.weight", float("inf")), {}, "lm_head.weight holds NaN or infinities"),
    ("medusa-v2", spoiled("0.0.linear.bias", float("nan")), {}, "0.0.linear.bias holds NaN"),
    ("eagle3", scaled("fc.weight", 0), {}, "fc.weight holds only zeros"),
    ("glide", scaled("lm_head.weight", 0), {}, "lm_head.weight holds only zeros"),
    ("eagle1", put(fc__weight=torch.ones(WIDTH, 2 * WIDTH, dtype=torch.int8)), {}, "fc.weight is stored as int8"),
    ("eagle3", put(d2t=torch.arange(20, 0, -1)), {}, "d2t does not map its ids to rising ids"),
    ("eagle3", put(d2t=torch.full((20,), VOCAB - 19)), {}, "d2t does not map its ids to rising ids"),
    ("eagle3", put(d2t=torch.full((20,), -1)), {}, "d2t does not map its ids to rising ids"),
    ("eagle3", put(d2t=torch.tensor([0, 2**63 - 2, -(2**62), *range(17)])), {}, "d2t does not map its ids to rising ids"),
    ("eagle3", put(d2t=torch.ones(20)), {}, "d2t has to be a vector of integers, not 1-dimensional float32"),
    ("eagle3", put(d2t=torch.zeros(20, dtype=torch.int64)), {}, "t2d and d2t contradict each other"),
    ("eagle3", put(t2d=torch.ones(VOCAB, 1, dtype=torch.bool)), {}, "t2d is 96 x 1 in its file, but has to be 96"),
    # heads of other targets
    ("eagle1", put(fc__weight=torch.ones(48, 96)), {}, "for another target: fc.weight is for a hidden size of 48, "),
    ("eagle1", put(embed_tokens__weight=torch.ones(99, WIDTH)), {}, "embed_tokens.weight is for a vocabulary of 99, "),
    ("eagle1-speculators", same, {"transformer_layer_config": {"vocab_size": 99}}, "config.json is for a vocabulary of 99, "),
    ("eagle3", put(fc__weight=torch.ones(WIDTH, 3 * 48)), {}, "fc.weight is for three features of 48, "),
    ("eagle3", put(t2d=torch.ones(99, dtype=torch.bool)), {}, "t2d is for a vocabulary of 99, "),
    ("medusa-v2", put(**{"0.0.linear.weight": torch.ones(48, 48)}), {}, "0.0.linear.weight is for a hidden size of 48, "),
    ("medusa-v0.1", lambda raw: raw.update({f"{k}.1.weight": torch.ones(99, WIDTH) for k in range(3)}), {}, "vocabulary of 99, "),
    ("glide", same, {"large_hidden_size": 48}, "config.json: large_hidden_size is for a hidden size of 48, "),
    ("glide", put(**{"model.layers.0.cross_attn.q_proj.weight": torch.ones(48, WIDTH)}), {}, "attention of a width of 48, "),
    # feature layers
    ("eagle3", same, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, "does not fit "),
    ("eagle3", same, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}, "eagle_aux_hidden_state_layer_ids = [2, 4]"),
    ("eagle3", same, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}}, "does not fit "),
    ("eagle3", same, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
    # kinds that specgen cannot run
    ("eagle3", put(fc_norm__0__weight=ONES), {}, "it is an EAGLE-3.1 head, which specgen cannot run"),
    ("eagle3-speculators", same, {"norm_output": True}, "a variant that specgen cannot run (norm_output in its config.json)"),
    ("eagle3-speculators", same, {"norm_before_fc": True}, "a variant that specgen cannot run (norm_before_fc"),
    ("eagle3-speculators", same, {"transformer_layer_config": {"model_type": "gemma2"}}, "model_type = 'gemma2'"),
    ("eagle1-speculators", put(embedding_layernorm__weight=ONES), {}, "with further norms (HASS), which specgen cannot run"),
    (
        "eagle1",
        renamed("fc.weight", "eh_proj.weight"),
        {},
        "it is an MTP layer (multi-token prediction), which specgen cannot run",
    ),
    ("eagle1", without("fc.weight", "fc.bias"), {}, "it is a model, not a head"),
    (
        "eagle1",
        renamed(FIRST, "layers.0.self_attn.q_a_proj.weight"),
        {},
        "it is of no kind that specgen knows (its first tensor: ",
    ),
    ("glide", same, {"use_remap": True}, "maps the target's keys and values (use_remap)"),
    # text of the file in a message
    ("eagle1", put(**{"\x1b]0;evil\x07\n\u202e": ONES}), {}, "does not have (the first: ␛]0;evil␇↵�)"),
    ("eagle1", put(**{"x" * 5000: ONES}), {}, f"does not have (the first: {'x' * 79}…)"),
    ("eagle1", same, {"hidden_act": "\x1b[31m\n" + "y" * 5000}, "hidden_act = '\\x1b[31m\\ny"),
]


@pytest.mark.parametrize(
    ("layout", "tensors", "config", "message"), MISTAKES, ids=[f"{row[0]}: {row[3][:40]}" for row in MISTAKES]
)
def test_a_mistake_is_named_in_one_line(
    target: LoadedModel, tmp_path: Path, layout: str, tensors: Callable[[Tensors], None], config: Config, message: str
) -> None:
    folder = change(write_head(tmp_path, layout, target.folder), tensors, **config)
    assert message in refusal(folder, target)


def refusal(folder: Path, target: LoadedModel) -> str:
    """Why a head cannot be loaded: one printable line that names the head."""
    with pytest.raises(SpecgenError) as caught:
        load_head(folder, target)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 700
    assert str(folder) in text
    assert caught.value.hint
    return text


def test_shapes_are_checked_before_a_tensor_is_read(target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadTensors, "_read", lambda *_: pytest.fail("read a tensor"))
    for layout in LAYOUTS:
        folder = write_head(tmp_path / layout, layout, target.folder)
        refused = change(folder, put(further__weight=ONES))
        assert "further.weight" in refusal(refused, target)


def test_damaged_files_are_refused(target: LoadedModel, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", "eagle1", target.folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    whole = weights.read_bytes()
    (header,) = struct.unpack("<Q", whole[:8])
    huge = struct.pack("<Q", 1 << 60) + whole[8:]
    for content in (b"", whole[:5], whole[: 8 + header], whole[:-1], huge, b"version https://git-lfs.github.com/spec/v1\n"):
        weights.write_bytes(content)
        assert "cannot read the weights of the head" in refusal(folder, target)
    weights.write_bytes(whole)
    for text in ("", "{", "[]", "[" * 100_000, '{"num_hidden_layers": ' + "9" * 5000 + "}", '{"num_hidden_layers": 99999}'):
        config.write_text(text)
        assert str(folder) in refusal(folder, target)
    config.unlink()
    assert "it has no config.json" in refusal(folder, target)
    weights.unlink()
    assert "it has no safetensors file" in refusal(folder, target)
    assert "there is no folder" in refusal(tmp_path / "none", target)
    (tmp_path / "file").touch()
    assert "is a file" in refusal(tmp_path / "file", target)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt", "a head's.pth"])
def test_a_pickle_is_not_read_and_the_command_in_the_message_converts_it(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = write_head(tmp_path / "the head", "eagle1", target.folder)
    expected = eagle_of(folder, target)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors["fc.weight"] = tensors["fc.weight"].t().contiguous().t()  # not contiguous, as weights may be saved
    torch.save(tensors, folder / name)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: pytest.fail("read a pickle"))
        message = refusal(folder, target)
    assert f"only {name}, which can run code" in message
    python, option, program, *arguments = shlex.split(message.split("Convert it: ")[1])
    assert (python, option) == ("python", "-c")
    monkeypatch.setattr("sys.argv", ["-c", *arguments])
    exec(program, {})
    assert equal(eagle_of(folder, target), expected)


# ------------------------------------------------------------------ heads that specgen writes


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


def test_a_head_is_not_written_over_a_model(target: LoadedModel, tmp_path: Path) -> None:
    model = Path(shutil.copytree(target.folder, tmp_path / "model"))
    weights = load_head(write_head(tmp_path / "head", "medusa-v2", target.folder), target).weights
    described = describe_head("medusa", target, {}, {})
    before = (model / "config.json").read_bytes()
    with pytest.raises(SpecgenError, match=r"has a config.json that does not belong to a head trained by specgen"):
        save_head(model, weights, described)
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


def test_a_description_survives_its_file(target: LoadedModel) -> None:
    described = describe_head("eagle", target, {"x": 0.5}, {"y": "z"})
    again = yaml.safe_load(yaml.safe_dump(json.loads(json.dumps(asdict(described)))))
    assert HeadDescription(**{**again, "sizes": described.sizes, "feature_layers": ()}) == described


def test_the_script_writes_a_head(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--target", str(target.folder), "--layout", "eagle3-speculators", str(out)]
    monkeypatch.setattr("sys.argv", ["head_layouts.py", *arguments])
    runpy.run_path(str(Path(__file__).with_name("head_layouts.py")), run_name="__main__")
    assert capsys.readouterr().out.strip() == str(out)
    assert eagle_of(out, target).version == 3
