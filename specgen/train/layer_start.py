"""Where the training of a head begins: a Llama layer of the target's sizes, with the weights of its last layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specgen.engine.native.architecture import Architecture, UnsupportedConfig
from specgen.engine.native.families import read_architecture
from specgen.engine.native.layer_weights import FINAL_NORM, bias_of, layer_shapes, layer_tensors
from specgen.train.heads import HeadObjective

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}  # in config.json
DEVIATION = 0.02  # of random initial weights
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


def layer_config(target: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a Llama with one layer of the target's sizes, or of a Qwen with its biases or norms.

    Its rotary embedding is that of the target's `config`, if a Llama can have it.
    """
    with_norms, one_bias = target.qk_norm == "head", target.qkv_bias and not target.output_bias
    made = {
        "model_type": "qwen3" if with_norms else "qwen2" if one_bias else "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_size,
        "hidden_act": _ACTIVATIONS[target.activation],
        "rms_norm_eps": target.norm_eps,
        "max_position_embeddings": target.context_limit,
        "vocab_size": target.vocab_size,
        "attention_bias": target.output_bias,
        "tie_word_embeddings": False,
    }
    rope = {name: config[name] for name in _ROPE_FIELDS if config.get(name) is not None}
    try:
        read_architecture({**made, **rope})
    except UnsupportedConfig:
        return made
    return {**made, **rope}


def last_layer(own: Architecture, theirs: Architecture, target: HeadObjective) -> dict[str, torch.Tensor]:
    """Returns the weights of the target's last layer and final norm under a Llama's names, without the prefix `model.`.

    `own` is the architecture of the result's config, `theirs` the target's. Empty unless the target's layer is like a Llama's.
    """
    is_alike = theirs.pre_norms and not theirs.post_norms and not theirs.mlp_bias
    if not is_alike or theirs.qk_norm not in (None, "head"):
        return {}
    found, offset = target.last_layers(1), theirs.norm_weight_offset
    names, made = layer_tensors(theirs, 0), layer_tensors(own, 0)
    heads = [theirs.num_heads, theirs.num_kv_heads, theirs.num_kv_heads]
    qkv = torch.split(torch.cat([found[name] for name in names.qkv]), [count * theirs.head_size for count in heads])
    weights = dict(zip(made.qkv, qkv, strict=True))
    if theirs.qkv_bias:
        biases = torch.split(torch.cat([found[bias_of(name)] for name in names.qkv]), [len(part) for part in qkv])
        weights |= dict(zip(map(bias_of, made.qkv), biases, strict=True))
    weights |= dict(zip(made.gate_up, torch.cat([found[name] for name in names.gate_up]).chunk(2), strict=True))
    weights[made.output] = found[names.output] * theirs.residual_scale
    weights[made.down] = found[names.down] * theirs.residual_scale
    if theirs.output_bias:
        weights[bias_of(made.output)] = found[bias_of(names.output)] * theirs.residual_scale
    news = made.attention_norm, made.mlp_norm, made.q_norm, made.k_norm, FINAL_NORM
    olds = names.attention_norm, names.mlp_norm, names.q_norm, names.k_norm, FINAL_NORM
    for new, old in zip(news, olds, strict=True):
        if new is not None and old is not None:
            weights[new] = found[old] + offset
    scale = theirs.attention_scale * theirs.head_size**0.5  # a Llama's is 1 / sqrt(head size)
    for name in [made.q_norm] if made.q_norm is not None else [made.qkv[0], bias_of(made.qkv[0])]:
        if name in weights:
            weights[name] = weights[name] * scale
    return {name: weight.cpu().clone() for name, weight in weights.items()}


def initial_layer(own: Architecture, start: Mapping[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns the initial weights of layer 0 and of the final norm by name: from `start` or random.

    `own` is the architecture of the result of `layer_config`, `start` the result of `last_layer`.
    """
    made = {}
    for name, shape in (layer_shapes(own, 0) | {FINAL_NORM: (own.hidden_size,)}).items():
        if name in start:
            made[name] = start[name]
        elif len(shape) == 1:
            made[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            made[name] = torch.randn(shape, generator=generator) * DEVIATION
    return made
