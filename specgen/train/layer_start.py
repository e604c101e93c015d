"""Where the training of a head begins: a Llama layer of the target's sizes, with the weights of its last layer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from specgen.engine.native.architecture import Architecture, UnsupportedConfig
from specgen.engine.native.families import read_architecture, read_config
from specgen.engine.native.layer_weights import FINAL_NORM, bias_of, layer_shapes, layer_tensors

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel

DEVIATION = 0.02  # of random initial weights
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}  # in config.json
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


class LayerStart:
    """A decoder layer for a head of `target`: that of a Llama with the target's sizes, or of a Qwen with its biases or norms.

    `config` is its config.json, `architecture` what that describes. `last` has the weights of the target's last layer and final
    norm under the Llama's names, without the prefix `model.`; it is empty unless the target's layer is like a Llama's.
    """

    def __init__(self, target: LoadedModel) -> None:
        config, theirs, self.config = read_config(target.folder, target.name), None, _layer_config(target)
        with suppress(UnsupportedConfig):  # of a family that the native decoder does not know
            theirs = read_architecture(config)
            self.config |= _details(theirs)
            rope = {name: config[name] for name in _ROPE_FIELDS if config.get(name) is not None}
            read_architecture(self.config | rope)  # not all that a target can have
            self.config |= rope
        self.architecture = read_architecture(self.config)
        is_alike = theirs is not None and theirs.pre_norms and not theirs.post_norms and not theirs.mlp_bias
        self.last: dict[str, torch.Tensor] = {}
        if is_alike and theirs is not None and theirs.qk_norm in (None, "head"):
            self.last = _renamed(self.architecture, theirs, target.model.last_layers(target.folder, 1))

    def initial(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Returns the initial weights of layer 0 and of the final norm by name: from `last` or random."""
        made = {}
        for name, shape in (layer_shapes(self.architecture, 0) | {FINAL_NORM: (self.architecture.hidden_size,)}).items():
            if name in self.last:
                made[name] = self.last[name]
            elif len(shape) == 1:
                made[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            else:
                made[name] = torch.randn(shape, generator=generator) * DEVIATION
        return made


def _layer_config(target: LoadedModel) -> dict[str, Any]:
    """Returns the config of a Llama with one layer of the target's sizes."""
    shape = target.model.shape
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size or 4 * shape.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context_limit,
        "vocab_size": target.model.shape.vocab_size,
        "tie_word_embeddings": False,
    }


def _details(target: Architecture) -> dict[str, Any]:
    """Returns what else a layer's config has of the target's: a Llama's, or a Qwen's with its biases or norms."""
    with_norms, one_bias = target.qk_norm == "head", target.qkv_bias and not target.output_bias
    return {
        "model_type": "qwen3" if with_norms else "qwen2" if one_bias else "llama",
        "hidden_act": _ACTIVATIONS[target.activation],
        "intermediate_size": target.intermediate_size,
        "rms_norm_eps": target.norm_eps,
        "max_position_embeddings": target.context_limit,
        "vocab_size": target.vocab_size,
        "attention_bias": target.output_bias,
    }


def _renamed(own: Architecture, theirs: Architecture, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights `found` of the target's last layer under the names of the layer `own`, as this computes with them."""
    names, made = layer_tensors(theirs, 0), layer_tensors(own, 0)
    rows = [count * theirs.head_size for count in (theirs.num_heads, theirs.num_kv_heads, theirs.num_kv_heads)]
    weights = dict(zip(made.qkv, torch.split(torch.cat([found[name] for name in names.qkv]), rows), strict=True))
    if theirs.qkv_bias:
        biases = torch.split(torch.cat([found[bias_of(name)] for name in names.qkv]), rows)
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
            weights[new] = found[old] + theirs.norm_weight_offset
    scale = theirs.attention_scale * theirs.head_size**0.5  # a Llama's is 1 / sqrt(head size)
    for name in [made.q_norm] if made.q_norm is not None else [made.qkv[0], bias_of(made.qkv[0])]:
        if name in weights:
            weights[name] = weights[name] * scale
    return {name: weight.cpu().clone() for name, weight in weights.items()}
