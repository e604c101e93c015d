"""Heads in the published layouts: what is read of each, what is written, and mistakes, each named in one line."""

from __future__ import annotations

import json
import shlex
import shutil
import struct
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, make_model, save
from head_layouts import LAYOUTS, Config, Tensors, change_head, features_of, sizes_of, weights_file, write_head
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from training_helpers import opened

from specgen.base.errors import SpecgenError
from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.part import HeadWeights, MedusaWeights
from specgen.engine.parts.trained_part import HeadDescription, describe_head, open_part, save_head
from specgen.engine.weights import weights_fingerprint

WIDTH, LAYERS = 32, 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return opened(save(make_model("llama", num_hidden_layers=LAYERS), tmp_path_factory.mktemp("heads") / "target"))


def load(folder: Path, target: LoadedModel) -> Any:
    return open_part(folder, target, is_exit=False).load()


def published(layout: str, target: LoadedModel, **sizes: Any) -> tuple[Config, Tensors]:
    return LAYOUTS[layout](sizes_of(target.folder, **sizes))


def equal(found: Any, expected: Any) -> bool:
    """Whether weights or parts of weights are equal, tensors by their values and dtypes."""
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[name], each) for name, each in expected.items())
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, HeadWeights):
        return all(equal(getattr(found, each.name), getattr(expected, each.name)) for each in fields(expected))
    return bool(found == expected)


def warning_of(folder: Path, target: LoadedModel) -> str | None:
    part = open_part(folder, target, is_exit=False)
    part.load()
    return part.warning


def refusal(folder: Path, target: LoadedModel) -> str:
    """Why a head cannot be loaded: one printable line that names the head."""
    with pytest.raises(SpecgenError) as caught:
        load(folder, target)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 700
    assert str(folder) in text
    assert caught.value.hint
    return text


@pytest.mark.parametrize("layout", ["medusa-v0.1", "medusa-v1.0", "medusa-v2"])
@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_heads_of_the_authors_layouts(target: LoadedModel, tmp_path: Path, layout: str, layers: int) -> None:
    raw = published(layout, target, medusa_layers=layers)[1]
    raw = {name.removeprefix("medusa_head."): tensor for name, tensor in raw.items()}
    found = load(write_head(tmp_path, layout, target.folder, medusa_layers=layers), target)
    names = [[f"{head}.{layer}.linear" for layer in range(layers)] for head in range(3)]
    assert equal(found.blocks, [[(raw[f"{name}.weight"], raw[f"{name}.bias"]) for name in each] for each in names])
    own = [raw[f"{head}.{layers}.weight"] for head in range(3)] if layout != "medusa-v2" else None
    assert equal(found.lm_heads, own)
    assert found.vocabulary is None
    (tmp_path / "config.json").unlink()
    assert equal(load(tmp_path, target), found)


def test_medusa_heads_of_vllms_layout(target: LoadedModel, tmp_path: Path) -> None:
    raw = {name.removeprefix("medusa_heads."): each for name, each in published("medusa-vllm", target)[1].items()}
    found = load(write_head(tmp_path, "medusa-vllm", target.folder), target)
    ids, order = raw["token_map"].sort()
    assert not torch.equal(ids, raw["token_map"])
    assert torch.equal(found.vocabulary, ids)
    assert equal(found.lm_heads, [raw[f"lm_heads.{head}.weight"][order] for head in range(3)])
    assert equal(found.blocks[2][0], (raw["blocks.2.layers.0.weight"], torch.zeros(WIDTH)))
    whole = torch.randn(VOCAB, WIDTH)
    rows = change_head(tmp_path, lambda raw: raw.update({"medusa_heads.lm_heads.1.weight": whole}))
    with pytest.raises(SpecgenError, match="its LM heads have different numbers of rows"):
        load(rows, target)
    shared = {f"medusa_heads.lm_heads.{head}.weight": whole for head in (1, 2)}
    change_head(tmp_path, lambda raw: [raw.pop(name) for name in shared], original_lm_head=True)
    change_head(tmp_path, lambda raw: raw.update({"medusa_heads.lm_heads.0.weight": whole}))
    lm_heads = load(tmp_path, target).lm_heads
    assert lm_heads[0] is lm_heads[2]
    assert torch.equal(lm_heads[0], whole[ids])


def test_a_fine_tuned_model_with_medusa_heads_is_its_own_target(target: LoadedModel, tmp_path: Path) -> None:
    """Medusa-2: the heads are in the model's files, and fit no other model."""
    folder = Path(shutil.copytree(target.folder, tmp_path / "model"))
    heads = published("medusa-v1.0", target)[1]
    save_file({**load_file(folder / "model.safetensors"), **heads}, folder / "model.safetensors")
    with pytest.raises(SpecgenError, match=f"trained with the model in the same files. Take that as the target: -t {folder}"):
        load(folder, target)
    assert len(load(folder, opened(folder)).blocks) == 3


@pytest.mark.parametrize("layout", ["eagle1", "eagle1-sglang", "eagle1-vllm", "eagle1-speculators"])
@pytest.mark.parametrize("bias", [True, False])
def test_eagle_1_heads(target: LoadedModel, tmp_path: Path, layout: str, bias: bool) -> None:
    raw = published("eagle1", target, bias=bias)[1]  # the same weights in all layouts
    del raw["embed_tokens.weight"]  # the target's own
    found = load(write_head(tmp_path, layout, target.folder, bias=bias), target)
    assert found.version == 1
    assert equal(found.tensors, raw)
    (rotary,) = found.architecture.rotary.values()
    base = 50_000 if layout == "eagle1-speculators" else 10_000
    assert rotary.inverse_frequencies[1] == pytest.approx(base ** (-2 / 12))
    assert (found.config["hidden_size"], found.config["intermediate_size"], found.config["head_dim"]) == (WIDTH, 40, 12)
    assert (found.config["num_attention_heads"], found.config["num_key_value_heads"]) == (4, 2)
    assert (found.config["model_type"], found.config["rms_norm_eps"]) == ("llama", 1e-5)


@pytest.mark.parametrize("layout", ["eagle3", "eagle3-speculators"])
def test_eagle_3_heads(target: LoadedModel, tmp_path: Path, layout: str) -> None:
    raw = published(layout, target)[1]
    found = load(write_head(tmp_path, layout, target.folder), target)
    assert found.version == 3
    own = {name.replace("midlayer.", "layers.0."): each for name, each in raw.items()}
    assert equal(found.tensors, {name: each for name, each in own.items() if name not in ("embed_tokens.weight", "d2t", "t2d")})
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
    assert load(change_head(folder, **fields), target).feature_layers == expected


@pytest.mark.parametrize(("qk_norm", "qkv_bias", "model_type"), [(True, False, "qwen3"), (False, True, "qwen2")])
@pytest.mark.parametrize("layout", ["eagle1", "eagle3-speculators"])
def test_layers_with_norms_or_biases_of_queries_and_keys(
    target: LoadedModel, tmp_path: Path, layout: str, qk_norm: bool, qkv_bias: bool, model_type: str
) -> None:
    folder = write_head(tmp_path / "head", layout, target.folder, qk_norm=qk_norm, qkv_bias=qkv_bias)
    found = load(folder, target)
    assert found.config["model_type"] == model_type
    assert ("layers.0.self_attn.q_norm.weight" in found.tensors) == qk_norm
    assert ("layers.0.self_attn.k_proj.bias" in found.tensors) == qkv_bias
    if found.version == 3:
        save_head(tmp_path / "saved", found, describe_head("eagle", target, {}, {}))
        assert load(tmp_path / "saved", target).config == found.config


def test_a_whole_draft_vocabulary_needs_no_maps(target: LoadedModel, tmp_path: Path) -> None:
    folder = write_head(tmp_path, "eagle3", target.folder, draft_vocab=VOCAB)
    assert load(folder, target).vocabulary is None  # the maps are identities
    change_head(folder, lambda raw: [raw.pop(name) for name in ("d2t", "t2d")])
    assert load(folder, target).vocabulary is None


def test_glide_models(target: LoadedModel, tmp_path: Path) -> None:
    raw = published("glide", target)[1]
    folder = write_head(tmp_path, "glide", target.folder)
    found = load(folder, target)
    assert equal(found.tensors, {name.removeprefix("model."): each for name, each in raw.items()})
    assert found.block_size == 7
    assert found.config["rope_theta"] == 10_000
    embedding = load_file(target.folder / "model.safetensors")["model.embed_tokens.weight"]
    change_head(folder, lambda raw: (raw.pop("lm_head.weight"), raw.update({"model.embed_tokens.weight": embedding})))
    shared = load(folder, target)
    assert shared.tensors.keys() == found.tensors.keys() - {"embed_tokens.weight", "lm_head.weight"}


def test_a_head_in_several_files(target: LoadedModel, tmp_path: Path) -> None:
    expected = load(write_head(tmp_path, "eagle3", target.folder), target)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / part)
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    assert equal(load(tmp_path, target), expected)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(SpecgenError, match="has 2 weight files and no index of them"):
        load(tmp_path, target)


# copies of the target's tables


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_neox"])
def test_a_copy_of_the_targets_embedding_is_left_out(models_folder: Path, tmp_path: Path, family: str) -> None:
    """Whatever the family calls it and scales it with, and also rounded to another dtype."""
    own = opened(save(make_model(family), models_folder / "heads" / family))
    folder = write_head(tmp_path, "eagle1", own.folder)
    change_head(folder, lambda raw: raw.update({name: tensor.bfloat16() for name, tensor in raw.items()}))
    assert "embed_tokens.weight" not in load(folder, own).tensors


def test_an_embedding_that_was_trained_on_is_kept_and_another_models_refused(target: LoadedModel, tmp_path: Path) -> None:
    folder, name = write_head(tmp_path / "1", "eagle1", target.folder), "embed_tokens.weight"

    def tune(raw: Tensors) -> None:
        raw[name] = raw[name] * 1.1 + 0.02 * torch.randn(VOCAB, WIDTH)

    tuned = load_file(weights_file(change_head(folder, tune)))[name]
    assert equal(load(folder, target).tensors[name], tuned)
    change_head(folder, lambda raw: raw.update({name: torch.randn(VOCAB, WIDTH)}))
    assert "its embedding is not that of" in str(warning_of(folder, target))
    own = write_head(tmp_path / "3", "eagle3-speculators", target.folder, own_embedding=True)
    assert name in load(own, target).tensors  # heads of EAGLE-3 may have their own
    assert "may have been made for another target" in str(warning_of(own, target))
    assert warning_of(write_head(tmp_path / "4", "eagle3-speculators", target.folder), target) is None


# what is written

WRITTEN = {
    "medusa-v2": ["version", "medusa_num_heads"],
    "medusa-v0.1": ["medusa_num_layers"],
    "eagle3": ["architectures", "draft_vocab_size", "vocab_size", "num_key_value_heads", "eagle_config"],
    "glide": ["model_type", "block_size", "large_hidden_size", "large_head_dim", "large_num_attention_heads"],
}


@pytest.mark.parametrize("layout", WRITTEN)
def test_what_is_written_has_a_published_layout_and_is_read_back(target: LoadedModel, tmp_path: Path, layout: str) -> None:
    """The names, shapes and settings are those of the layout as the tests describe it. Weights are rounded to bfloat16."""
    config, raw = published(layout, target)
    folder = write_head(tmp_path / "published", layout, target.folder)
    if layout == "glide":
        for name in ("model.embed_tokens.weight", "lm_head.weight"):  # those that are trained have the target's
            del raw[name]
            change_head(folder, without(name))
    weights = load(folder, target)
    if isinstance(weights, MedusaWeights):
        weights, config["medusa_num_heads"] = replace(weights, rank_accuracies=[[0.5, 0.25], [0.125]]), 3
    described = describe_head(weights.kind, target, {"agreement": 0.123456}, {"steps": 7})
    path = save_head(tmp_path / "saved", weights, described)
    written, made = load_file(path), json.loads((path.parent / "config.json").read_text())
    assert {name: each.shape for name, each in raw.items()} == {name: each.shape for name, each in written.items()}
    assert all(torch.equal(written[name], raw[name]) for name in ("d2t", "t2d") if name in raw)
    if layout == "eagle3":  # ours are named by the layers' inputs
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = features_of(sizes_of(target.folder))
    assert {name: made[name] for name in WRITTEN[layout]} == {name: config[name] for name in WRITTEN[layout]}
    part = open_part(tmp_path / "saved", target, is_exit=False)
    found = part.load()
    for each in fields(weights):
        assert equal(getattr(found, each.name), rounded(getattr(weights, each.name))), each.name
    assert isinstance(part.description, HeadDescription)
    assert part.description.figures == {"agreement": 0.1235}
    assert part.description.weights == part.digest == weights_fingerprint(path.parent)
    content = path.read_bytes()
    assert save_head(tmp_path / "saved", weights, described).read_bytes() == content
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it, transformers refuses a file


def rounded(weights: Any) -> Any:
    """The weights as a file in bfloat16 holds them."""
    if isinstance(weights, torch.Tensor):
        return weights.bfloat16() if weights.is_floating_point() else weights
    if isinstance(weights, dict):
        return {name: rounded(each) for name, each in weights.items()}
    return type(weights)(rounded(each) for each in weights) if isinstance(weights, list | tuple) else weights


# mistakes


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


def under_another_name(raw: Tensors) -> None:
    for name in list(raw):
        raw[f"mlp.{name}"] = raw.pop(name)


def same(raw: Tensors) -> None:
    """Leaves the tensors as they are."""


ONES = torch.ones(WIDTH)
FIRST = "layers.0.self_attn.q_proj.weight"
MISTAKES: list[tuple[str, Callable[[Tensors], None], Config, str]] = [
    ("eagle1", without("layers.0.mlp.up_proj.weight"), {}, "lacks 1 of its tensors (the first: layers.0.mlp.up_proj.weight)"),
    ("eagle1", put(layers__0__input_layernorm__weight=ONES), {}, "does not have (the first: layers.0.input_layernorm.weight)"),
    ("eagle1", put(layers__0__mlp__down_proj__weight=torch.ones(WIDTH, 41)), {}, "down_proj.weight is 32 x 41 in its file, but"),
    ("eagle1", put(**{FIRST: torch.ones(48)}), {}, f"{FIRST} is no matrix"),
    ("eagle1", same, {"num_attention_heads": 5}, "num_key_value_heads = 2 in its config.json is not supported"),
    ("eagle3", put(layers__1__mlp__x=ONES), {}, "num_hidden_layers = 2"),
    ("medusa-v0.1", without("1.0.linear.weight"), {}, "the first: blocks.1.layers.0.weight"),
    ("medusa-vllm", put(**{"medusa_heads.token_map": torch.tensor([1] * 20)}), {}, "does not hold different ids of tokens"),
    ("eagle1", spoiled("layers.0.mlp.up_proj.weight", float("nan")), {}, "layers.0.mlp.up_proj.weight holds NaN or infinities"),
    ("eagle3", scaled("fc.weight", 0), {}, "fc.weight holds only zeros"),
    ("eagle1", put(fc__weight=torch.ones(WIDTH, 2 * WIDTH, dtype=torch.int8)), {}, "fc.weight is stored as int8"),
    ("eagle3", put(d2t=torch.arange(20, 0, -1)), {}, "d2t does not map its ids to rising ids"),
    ("eagle3", put(d2t=torch.zeros(20, dtype=torch.int64)), {}, "t2d and d2t contradict each other"),
    ("eagle1", put(fc__weight=torch.ones(48, 96)), {}, "for another target: fc.weight is for a hidden size of 48, "),
    (
        "eagle1-speculators",
        same,
        {"transformer_layer_config": {"vocab_size": 99, "num_attention_heads": 4}},
        "config.json is for a vocabulary of 99, ",
    ),
    ("eagle3", put(fc__weight=torch.ones(WIDTH, 3 * 48)), {}, "fc.weight is for three features of 48, "),
    ("eagle3", put(t2d=torch.ones(99, dtype=torch.bool)), {}, "t2d is for a vocabulary of 99, "),
    ("medusa-v0.1", lambda raw: raw.update({f"{k}.1.weight": torch.ones(99, WIDTH) for k in range(3)}), {}, "vocabulary of 99, "),
    ("glide", put(**{"model.layers.0.cross_attn.q_proj.weight": torch.ones(48, WIDTH)}), {}, "attention of a width of 48, "),
    ("eagle3", same, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, "do not fit "),
    ("eagle3", same, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
    ("eagle3", same, {"norm_before_fc": True}, "norm_before_fc = True in its config.json is not supported"),
    ("glide", same, {"use_remap": True}, "use_remap = True in its config.json is not supported"),
    ("eagle3-speculators", same, {"norm_output": True}, "norm_output = True in its config.json is not supported"),
    (
        "eagle3-speculators",
        same,
        {"transformer_layer_config": {"model_type": "gemma2", "num_attention_heads": 4}},
        "model_type = 'gemma2'",
    ),
    ("glide", without(*(f"model.layers.0.cross_attn.{name}_proj.weight" for name in "qo")), {}, "it is a model, not a head"),
    ("medusa-v2", under_another_name, {}, "it is of no kind that specgen knows (its first tensor: mlp.0.0.linear.bias)"),
    ("eagle1", put(**{"\x1b]0;evil\x07\n\u202e": ONES}), {}, "does not have (the first: ␛]0;evil␇↵�)"),
    ("eagle1", same, {"hidden_act": "\x1b[31m\n" + "y" * 5000}, "hidden_act = '\\x1b[31m\\ny"),
]


@pytest.mark.parametrize(
    ("layout", "tensors", "config", "message"), MISTAKES, ids=[f"{row[0]}: {row[3][:40]}" for row in MISTAKES]
)
def test_a_mistake_is_named_in_one_line(
    target: LoadedModel, tmp_path: Path, layout: str, tensors: Callable[[Tensors], None], config: Config, message: str
) -> None:
    folder = change_head(write_head(tmp_path, layout, target.folder), tensors, **config)
    assert message in refusal(folder, target)


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


@pytest.mark.parametrize("name", ["pytorch_model.bin", "a head's.pth"])
def test_a_pickle_is_not_read_and_the_command_in_the_message_converts_it(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = write_head(tmp_path / "the head", "eagle1", target.folder)
    expected = load(folder, target)
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
    assert equal(load(folder, target), expected)
