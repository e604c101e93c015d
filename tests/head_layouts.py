"""Writes trained heads with random weights in every published layout, from the descriptions of the
formats alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
FEATURE_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Sizes:
    """The target's sizes, and those of the head. `draft_vocab` is the number of tokens that a
    reduced vocabulary has.

    Without `tables`, a GliDe model has no embedding and LM head of its own. With `own_embedding`,
    an EAGLE head has an embedding other than the target's. If DFlash2's config `is_flat`, its
    fields are at the top level.
    """

    width: int
    layers: int
    heads: int
    head_size: int
    vocab: int
    embedding: torch.Tensor
    head_layers: int = 1
    head_heads: int = 4
    head_kv_heads: int = 2
    head_head_size: int = 12  # no width / heads
    inner: int = 40
    medusa_heads: int = 3
    medusa_layers: int = 1
    draft_vocab: int = 20
    bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    window: int | None = None
    block_rows: int = 5
    taps: int = 2
    causal: bool | None = None
    is_flat: bool = False
    scales: tuple[float, float, float] | None = None
    own_embedding: bool = False
    tables: bool = True
    lm_head: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        """Returns normal random numbers. Equal sequences of calls give equal numbers."""
        return torch.randn(*shape, generator=self.generator) * (
            0.5 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        )

    def norm(self, size: int | None = None) -> torch.Tensor:
        return 1 + self.random(size or self.width)

    @property
    def features(self) -> list[int]:
        """The numbers of the target's hidden states that EAGLE-3 reads; i is the input of layer i,
        as in transformers."""
        count = self.layers
        return [2, count // 2, count - 3] if count > 6 else [0, 1, 2]


def sizes_of(folder: Path, **changes: Any) -> Sizes:
    """Returns the sizes of the target in `folder`, and its embedding."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    name = next(
        name
        for name in weights
        if name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))
    )
    width = config.get("hidden_size") or config["n_embd"]
    heads = config.get("num_attention_heads") or config["n_head"]
    layers = config.get("num_hidden_layers") or config["n_layer"]
    head_size = config.get("head_dim") or width // heads
    lm_head = weights.get("lm_head.weight", weights[name])
    return Sizes(
        width,
        layers,
        heads,
        head_size,
        len(weights[name]),
        weights[name],
        lm_head=lm_head,
        **changes,
    )


def llama_config(sizes: Sizes, **more: Any) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.width,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.head_layers,
        "num_attention_heads": sizes.head_heads,
        "num_key_value_heads": sizes.head_kv_heads,
        "head_dim": sizes.head_head_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "vocab_size": sizes.vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        **more,
    }


def decoder_layer(
    sizes: Sizes, prefix: str, inputs: int | None = None, *, input_norm: bool = True
) -> Tensors:
    """Returns the weights of a decoder layer, with names that begin with `prefix`.

    Its attention reads `inputs` numbers per token (None: the width). Without `input_norm` it has no
    norm before the attention.
    """
    heads = {"q": sizes.head_heads, "k": sizes.head_kv_heads, "v": sizes.head_kv_heads}
    tensors: Tensors = {}
    for name, count in heads.items():
        tensors[f"self_attn.{name}_proj.weight"] = sizes.random(
            count * sizes.head_head_size, inputs or sizes.width
        )
        if sizes.qkv_bias:
            tensors[f"self_attn.{name}_proj.bias"] = sizes.random(count * sizes.head_head_size)
        if sizes.qk_norm and name != "v":
            tensors[f"self_attn.{name}_norm.weight"] = sizes.norm(sizes.head_head_size)
    tensors["self_attn.o_proj.weight"] = sizes.random(
        sizes.width, sizes.head_heads * sizes.head_head_size
    )
    tensors |= {
        f"mlp.{name}_proj.weight": sizes.random(sizes.inner, sizes.width) for name in ("gate", "up")
    }
    tensors["mlp.down_proj.weight"] = sizes.random(sizes.width, sizes.inner)
    tensors["post_attention_layernorm.weight"] = sizes.norm()
    if input_norm:
        tensors["input_layernorm.weight"] = sizes.norm()
    return {prefix + name: tensor for name, tensor in tensors.items()}


def medusa_blocks(sizes: Sizes, name: str, *, bias: bool = True) -> Tensors:
    tensors: Tensors = {}
    for head in range(sizes.medusa_heads):
        for layer in range(sizes.medusa_layers):
            tensors[f"{name.format(head, layer)}.weight"] = sizes.random(sizes.width, sizes.width)
            if bias:
                tensors[f"{name.format(head, layer)}.bias"] = sizes.random(sizes.width)
    return tensors


def medusa_v01(sizes: Sizes, prefix: str = "") -> tuple[Config, Tensors]:
    """The Medusa authors' first layout, with an LM head per Medusa head. The config has a wrong
    number of heads, as published ones do."""
    config = {
        "base_model_name_or_path": "some/model",
        "medusa_num_heads": 2,
        "medusa_num_layers": sizes.medusa_layers,
    }
    heads = {
        f"{head}.{sizes.medusa_layers}.weight": sizes.random(sizes.vocab, sizes.width)
        for head in range(sizes.medusa_heads)
    }
    return config, {
        prefix + name: tensor
        for name, tensor in (medusa_blocks(sizes, "{}.{}.linear") | heads).items()
    }


def medusa_v2(sizes: Sizes) -> tuple[Config, Tensors]:
    return {"version": "2", "medusa_num_heads": sizes.medusa_heads}, medusa_blocks(
        sizes, "{}.{}.linear"
    )


def medusa_vllm(sizes: Sizes) -> tuple[Config, Tensors]:
    """vLLM's layout of Medusa with a reduced vocabulary, whose ids are not sorted (published ones
    are sorted by frequency)."""
    ids = torch.randperm(sizes.vocab, generator=sizes.generator)[: sizes.draft_vocab]
    config = {
        "model_type": "medusa",
        "num_heads": sizes.medusa_heads,
        "num_hidden_layers": sizes.medusa_layers,
    }
    config |= {
        "hidden_size": sizes.width,
        "vocab_size": sizes.vocab,
        "truncated_vocab_size": sizes.draft_vocab,
    }
    tensors = medusa_blocks(sizes, "blocks.{}.layers.{}", bias=False)
    for head in range(sizes.medusa_heads):
        tensors[f"lm_heads.{head}.weight"] = sizes.random(sizes.draft_vocab, sizes.width)
    return config, {
        f"medusa_heads.{name}": tensor for name, tensor in {**tensors, "token_map": ids}.items()
    }


def eagle1(sizes: Sizes) -> tuple[Config, Tensors]:
    """The EAGLE authors' layout, with a copy of the target's embedding."""
    tensors = {
        "embed_tokens.weight": embedding(sizes),
        "fc.weight": sizes.random(sizes.width, 2 * sizes.width),
    }
    if sizes.bias:
        tensors["fc.bias"] = sizes.random(sizes.width)
    for index in range(sizes.head_layers):
        tensors |= decoder_layer(sizes, f"layers.{index}.", input_norm=index > 0)
    flags = ({} if sizes.bias else {"bias": False}) | ({"qkv_bias": True} if sizes.qkv_bias else {})
    return llama_config(sizes, **flags), tensors


def embedding(sizes: Sizes) -> torch.Tensor:
    return sizes.random(*sizes.embedding.shape) if sizes.own_embedding else sizes.embedding.clone()


def eagle1_sglang(sizes: Sizes) -> tuple[Config, Tensors]:
    config, tensors = eagle1(sizes)
    return {**config, "architectures": ["LlamaForCausalLMEagle"]}, {
        f"model.{name}": each for name, each in tensors.items()
    }


def eagle1_vllm(sizes: Sizes) -> tuple[Config, Tensors]:
    config, tensors = eagle1(sizes)
    outer = {
        "model_type": "eagle",
        "architectures": ["EAGLEModel"],
        "model": config,
        "eagle_fc_bias": sizes.bias,
    }
    return outer | {"vocab_size": sizes.vocab, "num_lookahead_tokens": 5}, tensors


def eagle1_speculators(sizes: Sizes) -> tuple[Config, Tensors]:
    """The early EAGLE layout of the library speculators, without a copy of the embedding."""
    _, tensors = eagle1(sizes)
    del tensors["embed_tokens.weight"]
    inner = {
        **llama_config(sizes),
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    }
    config = {
        "speculators_model_type": "eagle",
        "architectures": ["EagleSpeculator"],
        "fusion_bias": sizes.bias,
    }
    renamed = {
        name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc.", 1): each
        for name, each in tensors.items()
    }
    return {**config, "layernorms": False, "transformer_layer_config": inner}, renamed


def eagle3_parts(sizes: Sizes, prefix: str) -> Tensors:
    tensors = {"fc.weight": sizes.random(sizes.width, 3 * sizes.width)} | decoder_layer(
        sizes, prefix, 2 * sizes.width
    )
    tensors |= {f"{prefix}hidden_norm.weight": sizes.norm(), "norm.weight": sizes.norm()}
    tensors["lm_head.weight"] = sizes.random(sizes.draft_vocab, sizes.width)
    ids = torch.randperm(sizes.vocab, generator=sizes.generator)[: sizes.draft_vocab].sort().values
    used = torch.zeros(sizes.vocab, dtype=torch.bool)
    used[ids] = True
    return {**tensors, "d2t": ids - torch.arange(sizes.draft_vocab), "t2d": used}


def eagle3(sizes: Sizes) -> tuple[Config, Tensors]:
    """The EAGLE-3 layout of the authors, SpecForge and SGLang. Its config names layers by the
    number of the layer whose output is read, unless the head reads the input of layer 0."""
    ids = [each - (sizes.features[0] == 2) for each in sizes.features]
    config = llama_config(
        sizes, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=sizes.draft_vocab
    )
    return config | {
        "eagle_config": {"use_aux_hidden_state": True, FEATURE_LAYERS: ids}
    }, eagle3_parts(sizes, "midlayer.")


def eagle3_speculators(sizes: Sizes) -> tuple[Config, Tensors]:
    tensors = eagle3_parts(sizes, "layers.0.") | {"embed_tokens.weight": embedding(sizes)}
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": sizes.draft_vocab,
    }
    config |= {
        "norm_before_residual": True,
        "norm_before_fc": False,
        FEATURE_LAYERS: sizes.features,
    }
    inner = llama_config(
        sizes, model_type="qwen3" if sizes.qk_norm else "llama", rope_theta=500000.0
    )
    if sizes.window:
        inner |= {
            "layer_types": ["sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": sizes.window,
        }
    return {**config, "target_hidden_size": None, "transformer_layer_config": inner}, tensors


def eagle31(sizes: Sizes) -> tuple[Config, Tensors]:
    """EAGLE-3.1 in SpecForge's layout: a norm of each feature."""
    config, tensors = eagle3(sizes)
    return config | {"fc_norm": True, "norm_output": sizes.norm_output}, tensors | {
        f"fc_norm.{tap}.weight": sizes.norm() for tap in range(3)
    }


def eagle31_speculators(sizes: Sizes) -> tuple[Config, Tensors]:
    """One norm of all features, or with `fc_norm` one of each. States are fed back after the
    norm."""
    config, tensors = eagle3_speculators(sizes)
    norms = {f"fc_norm.{tap}.weight": sizes.norm() for tap in range(3)}
    norms = norms if sizes.fc_norm else {"input_norm.weight": sizes.norm(3 * sizes.width)}
    return config | {
        "norm_output": True,
        "fc_norm": sizes.fc_norm,
        "norm_before_fc": not sizes.fc_norm,
    }, tensors | norms


def glide(sizes: Sizes) -> tuple[Config, Tensors]:
    """The GliDe authors' layout: the config of a Llama, and a cross-attention in each layer."""
    crossed = sizes.heads * sizes.head_size
    tensors = {"norm.weight": sizes.norm()}
    for index in range(sizes.head_layers):
        tensors |= decoder_layer(sizes, f"layers.{index}.")
        tensors[f"layers.{index}.cross_attn.q_proj.weight"] = sizes.random(crossed, sizes.width)
        tensors[f"layers.{index}.cross_attn.o_proj.weight"] = sizes.random(sizes.width, crossed)
    if sizes.tables:
        tensors |= {
            name: sizes.random(sizes.vocab, sizes.width)
            for name in ("embed_tokens.weight", "lm_head.weight")
        }
    large = {
        "large_hidden_size": sizes.width,
        "large_head_dim": sizes.head_size,
        "large_num_attention_heads": sizes.heads,
    }
    named = {
        name if name == "lm_head.weight" else f"model.{name}": each
        for name, each in tensors.items()
    }
    return llama_config(sizes, block_size=7, use_remap=False, **large), named


def block_parts(sizes: Sizes, taps: int, rank: int = 0) -> Tensors:
    """The tensors of DFlash; with a `rank` those of DSpark's Markov head too."""
    tensors = {
        "fc.weight": sizes.random(sizes.width, taps * sizes.width),
        "hidden_norm.weight": sizes.norm(),
    }
    tensors["norm.weight"] = sizes.norm()
    for index in range(sizes.head_layers):
        tensors |= decoder_layer(sizes, f"layers.{index}.")
    if rank:
        tensors |= {
            f"markov_head.markov_w{number}.weight": sizes.random(sizes.vocab, rank)
            for number in (1, 2)
        }
    return tensors


def block_config(sizes: Sizes, **more: Any) -> Config:
    return llama_config(
        sizes,
        model_type="qwen3" if sizes.qk_norm else "qwen2" if sizes.qkv_bias else "llama",
        **more,
    )


def scale_fields(sizes: Sizes) -> Config:
    names = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
    return dict(zip(names, sizes.scales, strict=True)) if sizes.scales else {}


def block_zlab(sizes: Sizes) -> tuple[Config, Tensors]:
    """DFlash's authors' layout; the last of several layers has a sliding window. Layers are named
    by their outputs."""
    own: Config = {"mask_token_id": 2, "target_layer_ids": [0, 2]}
    own |= scale_fields(sizes)
    config = block_config(
        sizes,
        architectures=["DFlashDraftModel"],
        block_size=5,
        num_target_layers=4,
        dflash_config=own,
    )
    if sizes.head_layers > 1:
        types = ["full_attention"] * (sizes.head_layers - 1) + ["sliding_attention"]
        config |= {"layer_types": types, "sliding_window": 4, "max_window_layers": 0}
    return config | {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}, block_parts(sizes, 2)


def block_deepspec(sizes: Sizes) -> tuple[Config, Tensors]:
    """DSpark's authors' layout, with frozen copies of the target's tables (`tables`). Layer -1 is
    the embedding."""
    assert sizes.lm_head is not None
    own = {
        "block_size": 4,
        "mask_token_id": 2,
        "target_layer_ids": [-1, 1, 3],
        "markov_rank": 6,
        "markov_head_type": "vanilla",
    }
    own |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    tensors = block_parts(sizes, 3, 6)
    tensors |= {
        "confidence_head.proj.weight": sizes.random(1, sizes.width + 6),
        "confidence_head.proj.bias": sizes.random(1),
    }
    if sizes.tables:
        tensors |= {
            "embed_tokens.weight": embedding(sizes),
            "lm_head.weight": sizes.lm_head.clone(),
        }
    return block_config(sizes, architectures=["Qwen3DSparkModel"], **own), tensors


def block_specforge(sizes: Sizes) -> tuple[Config, Tensors]:
    own = {
        "projector_type": "dspark",
        "block_size": 3,
        "mask_token_id": 2,
        "target_layer_ids": [1],
        "markov_rank": 5,
    }
    own |= {"markov_head_type": "vanilla", "causal": True}
    return block_config(sizes, architectures=["DFlashDraftModel"], dflash_config=own), block_parts(
        sizes, 1, 5
    )


def dflash2_parts(sizes: Sizes, taps: int) -> Tensors:
    """The tensors of DFlash2, with groups of 8 channels and a selector of rank 6."""
    tensors = block_parts(sizes, taps)
    width = sizes.width
    for index in range(sizes.head_layers):
        for name in ("attention_conv", "mlp_conv"):
            base = 0.3 * torch.randn(2, sizes.taps, width, generator=sizes.generator)
            base[:, 0] += 1
            tensors[f"layers.{index}.{name}.base_kernel"] = base
            tensors[f"layers.{index}.{name}.kernel_projection.weight"] = 0.3 * sizes.random(
                2 * sizes.taps * width // 8, width
            )
    selector = "candidate_selector."
    tensors[f"{selector}hidden_projection.weight"] = sizes.random(6, width)
    for name in ("predecessor_codebook", "successor_codebook"):
        tensors[selector + name] = 2 * sizes.random(sizes.vocab, 6)
    return tensors


def dflash2_fields(sizes: Sizes) -> Config:
    fields: Config = {"block_size": sizes.block_rows, "mask_token_id": 2}
    fields |= {"conv_kernel_size": sizes.taps, "conv_group_size": 8}
    return fields | {"selector_rank": 6, "selector_top_k": 4}


def sliding(sizes: Sizes) -> Config:
    return {
        "layer_types": ["sliding_attention"] * sizes.head_layers,
        "sliding_window": sizes.window or 4,
        "use_sliding_window": True,
        "max_window_layers": sizes.head_layers,
    }


def block_dflash2(sizes: Sizes) -> tuple[Config, Tensors]:
    """The layout of DFlash2's authors, whose layers are Qwen3's, all with a sliding window."""
    sizes.qk_norm = True
    own = dflash2_fields(sizes) | {"target_layer_ids": [0, 2]}
    own |= scale_fields(sizes)
    config = block_config(
        sizes,
        architectures=["DFlash2DraftModel"],
        num_target_layers=4,
        **sliding(sizes),
        **(own if sizes.is_flat else {"dflash_config": own}),
    )
    if sizes.causal is not None:
        config["is_causal"] = sizes.causal
    config["torch_dtype"] = "bfloat16"
    return config, dflash2_parts(sizes, 2)


def block_dflash2_speculators(sizes: Sizes) -> tuple[Config, Tensors]:
    """The layout of speculators, which also writes the fields of experts that a head lacks."""
    sizes.qk_norm = True
    config = {
        "speculators_model_type": "dflash2",
        "architectures": ["DFlash2DraftModel"],
        "draft_vocab_size": sizes.vocab,
        "aux_hidden_state_layer_ids": [1, 3],
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "draft_ffn_type": "dense",
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "moe_experts_implementation": "grouped_mm",
    }
    layers = block_config(sizes, rope_theta=500000.0, **sliding(sizes))
    config |= dflash2_fields(sizes) | {"transformer_layer_config": layers}
    return config, dflash2_parts(sizes, 2)


def block_speculators(sizes: Sizes) -> tuple[Config, Tensors]:
    """The layout of speculators and vLLM: layers are named by the hidden states' numbers; with a
    vocabulary of its own."""
    reduced = eagle3_parts(sizes, "layers.0.")
    tensors = block_parts(sizes, 2) | {
        name: reduced[name] for name in ("lm_head.weight", "d2t", "t2d")
    }
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "draft_vocab_size": sizes.draft_vocab,
    }
    config |= {
        "block_size": 4,
        "mask_token_id": 2,
        "aux_hidden_state_layer_ids": [1, 3],
        "sample_from_anchor": True,
    }
    return config | {"transformer_layer_config": block_config(sizes, rope_theta=500000.0)}, tensors


LAYOUTS: Mapping[str, Callable[[Sizes], tuple[Config, Tensors]]] = {
    "medusa-v0.1": medusa_v01,
    "medusa-v1.0": lambda sizes: medusa_v01(sizes, "medusa_head."),
    "medusa-v2": medusa_v2,
    "medusa-vllm": medusa_vllm,
    "eagle1": eagle1,
    "eagle1-sglang": eagle1_sglang,
    "eagle1-vllm": eagle1_vllm,
    "eagle1-speculators": eagle1_speculators,
    "eagle3": eagle3,
    "eagle3-speculators": eagle3_speculators,
    "eagle3.1": eagle31,
    "eagle3.1-speculators": eagle31_speculators,
    "glide": glide,
    "block-zlab": block_zlab,
    "block-deepspec": block_deepspec,
    "block-specforge": block_specforge,
    "block-speculators": block_speculators,
    "block-dflash2": block_dflash2,
    "block-dflash2-speculators": block_dflash2_speculators,
}


def write_head(out: Path, layout: str, target: Path, **sizes: Any) -> Path:
    """Writes a random head for the model in the folder `target` into the folder `out`, and returns
    `out`. `sizes`: see `Sizes`."""
    config, tensors = LAYOUTS[layout](sizes_of(target, **sizes))
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    name = (
        "medusa_lm_head.safetensors"
        if layout in ("medusa-v0.1", "medusa-v2")
        else "model.safetensors"
    )
    save_file(tensors, out / name)
    return out


def change_head(
    folder: Path, tensors: Callable[[Tensors], Any] = lambda _: None, **config: Any
) -> Path:
    """Changes the head in `folder`: `tensors` changes its tensors in place, `config` sets fields of
    its config (None removes one).

    Returns the folder.
    """
    (file,) = folder.glob("*.safetensors")
    stored = load_file(file)
    tensors(stored)
    save_file(stored, file)
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({name: each for name, each in {**old, **config}.items() if each is not None})
    )
    return folder
