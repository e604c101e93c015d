"""Which tensors of the safetensors files hold the weights of each part of a model.

The names have no "model." prefix. In the files all have it but `HEAD`; files of models without a head may lack it.
"""

from __future__ import annotations

from dataclasses import dataclass

from specgen.engine.native.description import Architecture

EMBEDDING = "embed_tokens.weight"
FINAL_NORM = "norm.weight"
HEAD = "lm_head.weight"
EXIT_HEAD = "head.weight"  # the name of an exit layer's own LM head in its file


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The names of one layer's weights. The bias of a weight is called `bias_of(name)`.

    `attention_norm` and `mlp_norm` norm the input, `attention_post_norm` and `mlp_post_norm` the output; None: there is no such
    norm. `qkv` names the weights of queries, keys and values, or one weight with all their rows in this order; `gate_up` those of
    gate and up projection, or one with the rows of both, or the only input projection of an MLP without gate. `q_norm` and
    `k_norm` are one name, or one for each head.
    """

    attention_norm: str | None
    mlp_norm: str | None
    attention_post_norm: str | None
    mlp_post_norm: str | None
    qkv: tuple[str, ...]
    q_norm: str | tuple[str, ...] | None
    k_norm: str | tuple[str, ...] | None
    output: str
    gate_up: tuple[str, ...]
    down: str


def bias_of(weight: str) -> str:
    """Returns the name of the bias that belongs to a weight."""
    return weight.removesuffix("weight") + "bias"


def layer_tensors(architecture: Architecture, index: int) -> LayerTensors:
    """Returns the names of the weights of layer `index`."""
    layer = f"layers.{index}."
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    pre, post = architecture.pre_norms, architecture.post_norms
    mlp_norm = "pre_feedforward_layernorm" if post else "post_attention_layernorm"
    qkv = ("qkv_proj",) if architecture.model_type == "phi3" else ("q_proj", "k_proj", "v_proj")
    gate_up = ("gate_up_proj",) if architecture.model_type == "phi3" else ("gate_proj", "up_proj")
    return LayerTensors(
        attention_norm=f"{layer}input_layernorm.weight" if pre else None,
        mlp_norm=f"{layer}{mlp_norm}.weight" if pre and not architecture.parallel else None,
        attention_post_norm=f"{layer}post_attention_layernorm.weight" if post else None,
        mlp_post_norm=f"{layer}post_feedforward_layernorm.weight" if post else None,
        qkv=tuple(f"{attention}{name}.weight" for name in qkv),
        q_norm=_head_norm(architecture, attention, "q", architecture.num_heads),
        k_norm=_head_norm(architecture, attention, "k", architecture.num_kv_heads),
        output=f"{attention}o_proj.weight",
        gate_up=tuple(f"{mlp}{name}.weight" for name in (gate_up if architecture.gated_mlp else ("c_fc",))),
        down=f"{mlp}{'down_proj' if architecture.gated_mlp else 'c_proj'}.weight",
    )


def _head_norm(architecture: Architecture, attention: str, which: str, heads: int) -> str | tuple[str, ...] | None:
    if architecture.qk_norm is None:
        return None
    if architecture.model_type == "stablelm":
        return tuple(f"{attention}{which}_layernorm.norms.{head}.weight" for head in range(heads))
    return f"{attention}{which}_norm.weight"
