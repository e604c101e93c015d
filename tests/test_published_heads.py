"""Heads in the published layouts: what is read of each, what is written, and mistakes, each named
in one line."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, make_model, save
from head_layouts import FEATURE_LAYERS, LAYOUTS, Config, Tensors, change_head, sizes_of, write_head
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from training_helpers import opened

from specgen.base.errors import SpecgenError
from specgen.engine.loaded_model import LoadedModel
from specgen.engine.parts.part import MedusaWeights
from specgen.engine.parts.trained_part import HeadDescription, describe_head, open_part, save_head
from specgen.engine.precision import Precision
from specgen.engine.weights import weights_fingerprint

WIDTH = 32
LAYERS = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return opened(
        save(
            make_model("llama", num_hidden_layers=LAYERS),
            tmp_path_factory.mktemp("heads") / "target",
        )
    )


def load(folder: Path, target: LoadedModel) -> Any:
    return open_part(folder, target, is_exit=False).load()


def equal(found: Tensors, expected: Tensors) -> bool:
    is_equal = {
        name: found[name].dtype == each.dtype and torch.equal(found[name], each)
        for name, each in expected.items()
    }
    return found.keys() == expected.keys() and all(is_equal.values())


def named(weights: Any) -> Tensors:
    """The tensors of weights by name; those of Medusa as in vLLM's layout."""
    if not isinstance(weights, MedusaWeights):
        return dict(weights.tensors)
    tensors = {
        f"lm_heads.{head}.weight": table for head, table in enumerate(weights.lm_heads or ())
    }
    for head, blocks in enumerate(weights.blocks):
        for layer, (matrix, bias) in enumerate(blocks):
            tensors |= {
                f"blocks.{head}.layers.{layer}.weight": matrix,
                f"blocks.{head}.layers.{layer}.bias": bias,
            }
    return tensors


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


ZEROS = {f"blocks.{head}.layers.0.bias": torch.zeros(WIDTH) for head in range(3)}
MEDUSA = {
    f"{head}.{layer}.linear.": f"blocks.{head}.layers.{layer}."
    for head in range(3)
    for layer in range(2)
}
# the target's own, and maps of vocabularies
COPIED = ("embed_tokens.weight", "d2t", "t2d", "token_map")
SCALES = (3.0, 0.5, 20.0)
# a layout with sizes; what its names become; what its config says
READ: list[tuple[str, Config, dict[str, str], Config]] = [
    (
        "medusa-v0.1",
        {"medusa_layers": 2},
        MEDUSA | {f"{head}.2.weight": f"lm_heads.{head}.weight" for head in range(3)},
        {},
    ),
    (
        "medusa-v1.0",
        {},
        {"medusa_head.": ""}
        | MEDUSA
        | {f"{head}.1.weight": f"lm_heads.{head}.weight" for head in range(3)},
        {},
    ),
    ("medusa-v2", {}, MEDUSA, {"lm_heads": None}),
    ("medusa-vllm", {}, {"medusa_heads.": ""}, {}),
    (
        "eagle1",
        {"bias": False, "own_embedding": True},
        {},
        {"version": 1, "base": 1e4, "model_type": "llama"},
    ),
    ("eagle1", {"qkv_bias": True}, {}, {"version": 1, "model_type": "qwen2"}),
    ("eagle1-sglang", {}, {"model.": ""}, {"version": 1, "base": 1e4}),
    ("eagle1-vllm", {"qk_norm": True}, {}, {"version": 1, "model_type": "qwen3"}),
    (
        "eagle1-speculators",
        {},
        {"transformer.": "layers.0.", "fusion_fc": "fc"},
        {"version": 1, "base": 5e4},
    ),
    (
        "eagle3",
        {},
        {"midlayer.": "layers.0."},
        {"version": 3, "base": 1e4, "norm_before_residual": False},
    ),
    (
        "eagle3",
        {"qkv_bias": True},
        {"midlayer.": "layers.0."},
        {"version": 3, "model_type": "qwen2"},
    ),
    (
        "eagle3-speculators",
        {},
        {},
        {"version": 3, "base": 5e5, "norm_before_residual": True, "feature_layers": (2, 4, 5)},
    ),
    (
        "eagle3.1",
        {"norm_output": True},
        {"midlayer.": "layers.0."},
        {"version": 3, "norm_output": True},
    ),
    ("eagle3.1-speculators", {}, {}, {"version": 3, "norm_output": True, "trial_ids": []}),
    ("glide", {"head_layers": 2}, {"model.": ""}, {"base": 1e4, "block_size": 7}),
    (
        "block-zlab",
        {"qk_norm": True, "head_layers": 2},
        {},
        {"block_size": 5, "feature_layers": (1, 3), "from_anchor": False},
    ),
    (
        "block-deepspec",
        {"qk_norm": True},
        {},
        {"block_size": 4, "feature_layers": (0, 2, 4), "from_anchor": True, "mask_id": 2},
    ),
    (
        "block-specforge",
        {},
        {},
        {"block_size": 3, "feature_layers": (2,), "from_anchor": True, "causal": True},
    ),
    (
        "block-speculators",
        {},
        {},
        {"base": 5e5, "feature_layers": (1, 3), "from_anchor": True, "causal": None},
    ),
    *(
        (
            "block-dflash2",
            {"head_layers": 2, "block_rows": 8, "causal": False, "scales": SCALES, "is_flat": flat},
            {},
            {"block_size": 8, "feature_layers": (1, 3), "from_anchor": False, "causal": False}
            | {"mask_id": 2, "conv_group": 8, "candidates": 4}
            | {"embedding_scale": 3.0, "logit_scale": 0.5, "logit_cap": 20.0},
        )
        for flat in (False, True)
    ),
    (
        "block-dflash2-speculators",
        {},
        {},
        {"base": 5e5, "block_size": 5, "causal": False, "conv_group": 8, "candidates": 4},
    ),
]


@pytest.mark.parametrize(
    ("layout", "sizes", "names", "said"), READ, ids=[f"{row[0]} {row[1]}" for row in READ]
)
def test_each_layout_is_read(
    target: LoadedModel,
    tmp_path: Path,
    layout: str,
    sizes: Config,
    names: dict[str, str],
    said: Config,
) -> None:
    found = load(write_head(tmp_path / "head", layout, target.folder, **sizes), target)
    said = dict(said)
    raw = LAYOUTS[layout](sizes_of(target.folder, **sizes))[1]
    expected = dict[str, torch.Tensor]()
    for name, tensor in raw.items():
        for published, own in names.items():
            name = own + name.removeprefix(published) if name.startswith(published) else name
        expected[name] = tensor
    if layout == "medusa-vllm":
        expected |= ZEROS
        assert torch.equal(found.vocabulary, raw["medusa_heads.token_map"])
    elif "t2d" in raw:
        assert torch.equal(found.vocabulary, raw["t2d"].nonzero()[:, 0])
    dropped = () if layout == "glide" or sizes.get("own_embedding") else COPIED
    dropped = (*dropped, "lm_head.weight") if layout == "block-deepspec" else dropped
    assert equal(
        named(found), {name: tensor for name, tensor in expected.items() if name not in dropped}
    )
    if not layout.startswith("medusa"):
        shape = found.architecture
        (rotary,) = found.architecture.rotary.values()
        assert (shape.hidden_size, shape.intermediate_size, shape.head_size, shape.norm_eps) == (
            WIDTH,
            40,
            12,
            1e-5,
        )
        assert (shape.num_heads, shape.num_kv_heads, shape.num_layers) == (
            4,
            2,
            sizes.get("head_layers", 1),
        )
        base = said.pop("base", None)
        assert base is None or rotary.inverse_frequencies[1] == pytest.approx(base ** (-1 / 6))
        assert shape.model_type == said.pop("model_type", shape.model_type)
    assert {name: getattr(found, name) for name in said} == said
    if layout == "eagle3":
        save_head(tmp_path / "saved", found, describe_head("eagle", target, {}, {}))
        assert load(tmp_path / "saved", target).architecture == found.architecture


def test_lm_heads_of_medusa_that_are_shared_or_have_all_tokens(
    target: LoadedModel, tmp_path: Path
) -> None:
    folder = write_head(tmp_path, "medusa-vllm", target.folder)
    whole = torch.randn(VOCAB, WIDTH)
    ids = load_file(folder / "model.safetensors")["medusa_heads.token_map"]
    change_head(
        folder,
        lambda raw: [raw.pop(f"medusa_heads.lm_heads.{head}.weight") for head in (1, 2)],
        original_lm_head=True,
    )
    change_head(folder, lambda raw: raw.update({"medusa_heads.lm_heads.0.weight": whole}))
    lm_heads = load(folder, target).lm_heads
    assert lm_heads[0] is lm_heads[2]
    assert torch.equal(lm_heads[0], whole[ids])


def test_a_fine_tuned_model_with_medusa_heads_is_its_own_target(
    target: LoadedModel, tmp_path: Path
) -> None:
    """Medusa-2: the heads are in the model's files, and fit no other model."""
    folder = Path(shutil.copytree(target.folder, tmp_path / "model"))
    heads = LAYOUTS["medusa-v1.0"](sizes_of(target.folder))[1]
    save_file({**load_file(folder / "model.safetensors"), **heads}, folder / "model.safetensors")
    with pytest.raises(
        SpecgenError,
        match=f"trained with the model in the same files. Take that as the target: -t {folder}",
    ):
        load(folder, target)
    assert len(load(folder, opened(folder)).blocks) == 3


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
    target: LoadedModel,
    tmp_path: Path,
    layout: str,
    ids: list[int] | None,
    expected: tuple[int, ...],
) -> None:
    folder = write_head(tmp_path, layout, target.folder)
    said = {FEATURE_LAYERS: ids}
    change_head(folder, **(said if layout == "eagle3-speculators" else {"eagle_config": said}))
    assert load(folder, target).feature_layers == expected


def test_what_may_be_missing(target: LoadedModel, tmp_path: Path) -> None:
    """Maps of a whole vocabulary; a LM head that is tied to the embedding; copies of the target's
    tables."""
    folder = write_head(tmp_path / "eagle", "eagle3", target.folder, draft_vocab=VOCAB)
    assert load(folder, target).vocabulary is None  # the maps are identities
    assert load(change_head(folder, without("d2t", "t2d")), target).vocabulary is None
    folder = write_head(tmp_path / "glide", "glide", target.folder)
    tied = load(
        change_head(folder, without("lm_head.weight"), tie_word_embeddings=True), target
    ).tensors
    assert tied["lm_head.weight"] is tied["embed_tokens.weight"]
    own = load_file(target.folder / "model.safetensors")["model.embed_tokens.weight"]
    shared = load(change_head(folder, put(model__embed_tokens__weight=own)), target).tensors
    assert shared.keys() == tied.keys() - {"embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_neox"])
def test_a_copy_of_the_targets_embedding_is_left_out(
    models_folder: Path, tmp_path: Path, family: str
) -> None:
    """Whatever the family calls it and scales it with, and also rounded to another dtype."""
    own = opened(save(make_model(family), models_folder / "heads" / family))
    folder = write_head(tmp_path, "eagle1", own.folder)
    change_head(
        folder, lambda raw: raw.update({name: tensor.bfloat16() for name, tensor in raw.items()})
    )
    assert "embed_tokens.weight" not in load(folder, own).tensors


# what is written

WRITTEN = {
    "medusa-v2": ["version", "medusa_num_heads"],
    "medusa-v0.1": ["medusa_num_layers"],
    "eagle3": [
        "architectures",
        "draft_vocab_size",
        "vocab_size",
        "num_key_value_heads",
        "eagle_config",
    ],
    "block-deepspec": [
        "architectures",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "markov_rank",
    ],
    "glide": [
        "model_type",
        "block_size",
        "large_hidden_size",
        "large_head_dim",
        "large_num_attention_heads",
    ],
}


@pytest.mark.parametrize("layout", WRITTEN)
def test_what_is_written_has_a_published_layout_and_is_read_back(
    target: LoadedModel, tmp_path: Path, layout: str
) -> None:
    """The names, shapes and settings are those of the layout as the tests describe it. Weights are
    rounded to bfloat16."""
    # those that are trained have the target's
    sizes = {"tables": layout not in ("glide", "block-deepspec")}
    config, raw = LAYOUTS[layout](sizes_of(target.folder, **sizes))
    weights = load(write_head(tmp_path / "published", layout, target.folder, **sizes), target)
    if isinstance(weights, MedusaWeights):
        weights = replace(weights, rank_accuracies=[[0.5, 0.25], [0.125]])
        config["medusa_num_heads"] = 3
    described = describe_head(
        layout[:6].rstrip("1-3"), target, {"agreement": 0.123456}, {"steps": 7}
    )  # type: ignore[arg-type]
    path = save_head(tmp_path / "saved", weights, described)
    written = load_file(path)
    made = json.loads((path.parent / "config.json").read_text())
    assert {name: each.shape for name, each in raw.items()} == {
        name: each.shape for name, each in written.items()
    }
    assert all(torch.equal(written[name], raw[name]) for name in ("d2t", "t2d") if name in raw)
    if layout == "eagle3":  # ours are named by the layers' inputs
        config["eagle_config"][FEATURE_LAYERS] = sizes_of(target.folder).features
    assert {name: made[name] for name in WRITTEN[layout]} == {
        name: config[name] for name in WRITTEN[layout]
    }
    part = open_part(tmp_path / "saved", target, is_exit=False)
    found = part.load()
    assert equal(named(found), {name: each.bfloat16() for name, each in named(weights).items()})
    others = [
        each.name for each in fields(weights) if each.name not in ("blocks", "lm_heads", "tensors")
    ]
    assert repr([getattr(found, name) for name in others]) == repr(
        [getattr(weights, name) for name in others]
    )
    assert isinstance(part.description, HeadDescription)
    assert part.description.figures == {"agreement": 0.1235}
    assert part.description.weights == weights_fingerprint(path.parent)
    content = path.read_bytes()
    assert save_head(tmp_path / "saved", weights, described).read_bytes() == content
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it, transformers refuses a file


# mistakes


def put(**tensors: torch.Tensor) -> Callable[[Tensors], None]:
    """Replaces tensors; `__` in a name is a dot."""
    return lambda raw: raw.update(
        {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    )


def without(*names: str) -> Callable[[Tensors], Any]:
    return lambda raw: [raw.pop(name) for name in names]


ONES = torch.ones(WIDTH)
NAN = torch.full((40, WIDTH), float("nan"))
UP = "layers.0.mlp.up_proj.weight"
CODEBOOK = "candidate_selector.predecessor_codebook"
CROSS = "model.layers.0.cross_attn.q_proj.weight"
OTHERS = put(**{f"{head}.1.weight": torch.ones(99, WIDTH) for head in range(3)})
EVIL = put(**{"\x1b]0;evil\x07\n\u202e": ONES})
GEMMA = {"num_attention_heads": 4, "model_type": "gemma2"}
MISTAKES: list[tuple[str, Callable[[Tensors], Any], Config, str]] = [
    ("eagle1", without(UP), {}, f"lacks 1 of its tensors (the first: {UP})"),
    (
        "eagle1",
        put(layers__0__mlp__down_proj__weight=torch.ones(WIDTH, 41)),
        {},
        "down_proj.weight is 32 x 41 in its file, but",
    ),
    ("eagle1", EVIL, {}, "does not have (the first: ␛]0;evil␇↵�)"),
    ("eagle1", put(**{UP: NAN}), {}, f"{UP} holds NaN or infinities"),
    (
        "eagle1",
        put(fc__weight=torch.ones(WIDTH, 2 * WIDTH, dtype=torch.int8)),
        {},
        "fc.weight is stored as int8",
    ),
    (
        "eagle1",
        put(fc__weight=torch.ones(48, 96)),
        {},
        "for another target: fc.weight is for a hidden size of 48, ",
    ),
    (
        "eagle1",
        put(),
        {"num_attention_heads": 5},
        "num_key_value_heads = 2 in its config.json is not supported",
    ),
    (
        "eagle3",
        put(fc__weight=torch.ones(WIDTH, 3 * 48)),
        {},
        "fc.weight is for three features of 48, ",
    ),
    ("eagle3", put(d2t=torch.arange(20, 0, -1)), {}, "d2t does not map its ids to rising ids"),
    (
        "eagle3",
        put(d2t=torch.zeros(20, dtype=torch.int64)),
        {},
        "t2d and d2t contradict each other",
    ),
    (
        "eagle3",
        put(layers__1__mlp__x=ONES),
        {},
        "num_hidden_layers = 2 in its config.json is not supported",
    ),
    ("eagle3", put(), {"eagle_config": {FEATURE_LAYERS: [1, 3, 7]}}, "do not fit "),
    (
        "eagle3.1-speculators",
        without("input_norm.weight"),
        {},
        "lacks 1 of its tensors (the first: input_norm.weight)",
    ),
    (
        "eagle3.1",
        put(),
        {"use_sliding_window": True},
        "use_sliding_window = True in its config.json is not supported",
    ),
    (
        "eagle3.1",
        put(input_norm__weight=torch.ones(3 * WIDTH)),
        {},
        "norms of each feature and one of all",
    ),
    ("eagle3-speculators", put(), {"transformer_layer_config": GEMMA}, "model_type = 'gemma2'"),
    ("glide", put(), {"use_remap": True}, "use_remap = True in its config.json is not supported"),
    ("glide", put(**{CROSS: torch.ones(48, WIDTH)}), {}, "attention of a width of 48, "),
    (
        "glide",
        without(CROSS),
        {},
        "it is of no kind that specgen knows (its first tensor: model.embed_tokens.weight)",
    ),
    (
        "block-zlab",
        put(),
        {"causal_window": 3},
        "causal_window = 3 in its config.json is not supported",
    ),
    (
        "block-zlab",
        put(),
        {"dflash_config": {"mask_token_id": 2, "blur": 1}},
        "blur = 1 in its config.json is not supported",
    ),
    ("block-zlab", put(), {"use_swa": True}, "use_swa = True in its config.json is not supported"),
    ("block-zlab", put(mask_embedding=ONES), {}, "does not have (the first: mask_embedding)"),
    (
        "block-zlab",
        put(fc__weight=torch.ones(48, 96)),
        {},
        "for another target: fc.weight is for a hidden size of 48, ",
    ),
    (
        "block-deepspec",
        put(),
        {"markov_head_type": "gated"},
        "markov_head_type = 'gated' in its config.json is not supported",
    ),
    ("block-deepspec", put(), {"model_type": "gemma4_text"}, "model_type = 'gemma4_text'"),
    ("block-deepspec", put(), {"target_layer_ids": [1, 9]}, "target_layer_ids = [1, 9]"),
    ("block-deepspec", put(), {"mask_token_id": 999}, "mask_token_id = 999"),
    (
        "block-zlab",
        put(),
        {"architectures": ["LiLiCorrDraftModel"]},
        "it is a head of LiLiCorr, which specgen does not run",
    ),
    ("block-zlab", put(), {"dflash_config": {"lilicorr_enabled": True}}, "a head of LiLiCorr, "),
    ("block-zlab", put(), {"architectures": ["Qwen3XPressModel"]}, "a head of XPress, "),
    ("block-dflash2", put(), {"xpress_topc": 512}, "a head of XPress, "),
    ("block-specforge", put(), {"dflash_config": {"projector_type": "domino"}}, "head of Domino, "),
    ("block-zlab", put(), {"projector_type": "weaver"}, "projector_type = 'weaver'"),
    ("block-zlab", put(), {"model_type": "laguna"}, "a head of Laguna's variant of DFlash, "),
    ("block-zlab", put(), {"uno_mask_token_id": 7}, "a head of UNO, "),
    ("block-zlab", put(), {"architectures": ["UNODraftModel"]}, "a head of UNO, "),
    ("block-dflash2", without(CODEBOOK), {}, f"lacks 1 of its tensors (the first: {CODEBOOK})"),
    (
        "block-dflash2",
        lambda raw: raw.update({f"{CODEBOOK}.weight": raw.pop(CODEBOOK)}),
        {},
        f"lacks 1 of its tensors (the first: {CODEBOOK})",
    ),
    (
        "block-dflash2",
        lambda raw: raw.update({name: each.half() for name, each in raw.items()}),
        {},
        "its weights are stored in float16, in which DFlash2's activations overflow",
    ),
    ("block-dflash2-speculators", put(), {"selector_rank": None}, "selector_top_k without sel"),
    ("block-dflash2-speculators", put(), {"selector_top_k": None}, "selector_rank without sel"),
    ("block-dflash2-speculators", put(), {"conv_group_size": None}, "kernel_size without conv_gr"),
    ("block-dflash2-speculators", put(), {"conv_kernel_size": None}, "group_size without conv_ke"),
    (
        "block-dflash2-speculators",
        put(),
        {"selector_rank": None, "selector_top_k": None},
        "its config.json lacks selector_rank and selector_top_k",
    ),
    ("block-dflash2-speculators", put(), {"sample_from_anchor": True}, "sample_from_anchor = True"),
    ("block-dflash2-speculators", put(), {"draft_ffn_type": "moe"}, "draft_ffn_type = 'moe'"),
    ("block-dflash2-speculators", put(), {"draft_ffn_type": None}, "num_experts = 256"),
    ("block-dflash2-speculators", put(), {"selector_top_k": 999}, "selector_top_k = 999"),
    ("block-dflash2-speculators", put(), {"conv_group_size": 7}, "conv_group_size = 7"),
    ("block-dflash2", put(), {"runtime_block_size": 8}, "runtime_block_size = 8"),
    ("block-dflash2", put(), {"attention_sink_bias": True}, "attention_sink_bias = True"),
    ("medusa-v0.1", without("1.0.linear.weight"), {}, "the first: blocks.1.layers.0.weight"),
    ("medusa-v0.1", OTHERS, {}, "0.1.weight is for a vocabulary of 99, "),
    (
        "medusa-vllm",
        put(**{"medusa_heads.token_map": torch.tensor([1] * 20)}),
        {},
        "does not hold different ids of tokens",
    ),
]


@pytest.mark.parametrize(
    ("layout", "tensors", "config", "message"), MISTAKES, ids=[row[3][:60] for row in MISTAKES]
)
def test_a_mistake_is_named_in_one_line(
    target: LoadedModel,
    tmp_path: Path,
    layout: str,
    tensors: Callable[[Tensors], Any],
    config: Config,
    message: str,
) -> None:
    folder = change_head(write_head(tmp_path, layout, target.folder), tensors, **config)
    assert message in refusal(folder, target)


def test_what_stands_beside_a_head_may_refuse_it(target: LoadedModel, tmp_path: Path) -> None:
    """A mask's embedding in a pickle, which is not read, and a target that runs in float16."""
    folder = write_head(tmp_path / "head", "block-dflash2", target.folder)
    load(folder, target)
    in_half = LoadedModel(target.files, Precision(torch.float16), [torch.device("cpu")])
    assert "runs in float16, in which DFlash2's activations overflow" in refusal(folder, in_half)
    (folder / "mask_embedding.pt").write_bytes(b"")
    assert "has its mask's embedding in mask_embedding.pt, a pickle" in refusal(folder, target)


def test_an_adapter_of_a_target_is_no_head(target: LoadedModel, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(4, WIDTH)}, tmp_path / "adapter_model.safetensors")
    assert "it is an adapter of a target (as UNO has)" in refusal(tmp_path, target)


@pytest.mark.parametrize("layout", ["block-zlab", "block-dflash2"])
def test_a_field_of_a_block_head_may_stand_in_either_place_and_the_nested_one_counts(
    target: LoadedModel, tmp_path: Path, layout: str
) -> None:
    folder = write_head(tmp_path / "head", layout, target.folder, causal=False)
    config = json.loads((folder / "config.json").read_text())
    nested = {**config["dflash_config"], "block_size": 8, "causal": False}
    change_head(folder, block_size=12, is_causal=None, dflash_config=nested)
    assert load(folder, target).block_size == 8
    assert load(folder, target).causal is False
    del nested["block_size"], nested["causal"]
    change_head(folder, dflash_config=nested)
    assert (load(folder, target).block_size, load(folder, target).causal) == (12, None)
    change_head(folder, block_size=None)
    assert load(folder, target).block_size == 16


def test_damaged_files_are_refused(target: LoadedModel, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", "eagle1", target.folder)
    config = folder / "config.json"
    weights = folder / "model.safetensors"
    for text in ("{", "[]", '{"num_hidden_layers": ' + "9" * 5000 + "}"):
        config.write_text(text)
        refusal(folder, target)
    config.unlink()
    assert "it has no config.json" in refusal(folder, target)
    weights.unlink()
    assert "it has no safetensors file" in refusal(folder, target)
    assert "there is no folder" in refusal(tmp_path / "none", target)
    assert "is a file" in refusal(target.folder / "config.json", target)


BLOCK_LAYOUTS = [layout for layout in LAYOUTS if layout.startswith("block-")]
VALUES = (None, 0, -1, 1, 7, 1 << 40, 1.5, True, "x", [], [1], ["x"], {}, {"a": 1})


@pytest.mark.parametrize("layout", BLOCK_LAYOUTS)
def test_random_damages_of_block_heads_are_refused_in_one_line_or_change_nothing_that_is_read(
    target: LoadedModel, tmp_path: Path, layout: str
) -> None:
    """75 damages of each layout: fields of config.json with other values, tensors that are missing
    or have other shapes."""
    rng = random.Random(layout)
    messages = list[str]()
    config, tensors = LAYOUTS[layout](sizes_of(target.folder))
    for number in range(75):
        made = deepcopy(config)
        kept = dict(tensors)
        parts = [made, *(part for part in made.values() if isinstance(part, dict))]
        part = rng.choice(parts)
        name = rng.choice(sorted(kept))
        if number % 3 == 0:
            del kept[name]
        elif number % 3 == 1:
            kept[name] = rng.choice(
                (
                    kept[name][:-1],
                    kept[name][None],
                    kept[name].to(torch.int8),
                    kept[name].float() * NAN[0, 0],
                )
            )
        else:
            part[rng.choice(sorted(part))] = rng.choice(VALUES)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(made))
        save_file(
            {key: each.contiguous() for key, each in kept.items()}, folder / "model.safetensors"
        )
        try:
            load(folder, target)
        except SpecgenError as error:
            messages.append(error.message)
    assert all("\n" not in message and len(message) < 700 for message in messages)
    assert len(messages) >= 50, "all damages of tensors that are needed"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "a head's.pth"])
def test_a_pickle_is_not_read_and_the_command_in_the_message_converts_it(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = write_head(tmp_path / "the head", "eagle1", target.folder)
    expected = load(folder, target).tensors
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    # not contiguous, as weights may be saved
    tensors["fc.weight"] = tensors["fc.weight"].t().contiguous().t()
    torch.save(tensors, folder / name)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: pytest.fail("read a pickle"))
        message = refusal(folder, target)
    assert f"only {name}, which can run code" in message
    python, option, program, *arguments = shlex.split(message.split("Convert it: ")[1])
    assert (python, option) == ("python", "-c")
    monkeypatch.setattr("sys.argv", ["-c", *arguments])
    exec(program, {})
    assert equal(load(folder, target).tensors, expected)
