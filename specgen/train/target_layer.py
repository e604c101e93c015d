"""The decoder layer with which the training of a head begins, with the weights of the target's last
one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from specgen.engine.loaded_model import LoadedModel
from specgen.engine.native.architecture import Architecture, UnsupportedConfig
from specgen.engine.native.attention import AttentionFiles
from specgen.engine.native.config_reading import read_architecture, read_config
from specgen.engine.native.experts import ExpertFiles
from specgen.engine.native.layer_files import FINAL_NORM, layer_files
from specgen.engine.native.mlp import MLPFiles
from specgen.engine.native.tensors import LinearFiles, stacked, tensor_shapes, walk

# in config.json
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")


def layer_config(target: LoadedModel, layers: int = 1) -> dict[str, Any]:
    """Returns the config of a Llama with `layers` layers of the target's sizes.

    It is a Qwen's if the target has the biases or the norms of queries and keys that a Llama lacks.
    """
    shape = target.model.shape
    config = {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size or 4 * shape.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context_limit,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
    }
    if isinstance(shape, Architecture):
        if shape.qk_norm == "head":
            config["model_type"] = "qwen3"
        elif shape.qkv_bias and not shape.output_bias:
            config["model_type"] = "qwen2"
        config["hidden_act"] = _ACTIVATIONS[shape.activation]
        config["rms_norm_eps"] = shape.norm_eps
        config["attention_bias"] = shape.output_bias
        theirs = read_config(target.folder, target.name)
        rope = {name: theirs[name] for name in _ROPE_FIELDS if theirs.get(name) is not None}
        with suppress(UnsupportedConfig):  # a Llama cannot have all that a target can
            read_architecture(config | rope)
            config |= rope
    return config


def last_layers(target: LoadedModel, own: Architecture) -> dict[str, Tensor]:
    """Returns the weights of the target's last layers and final norm, with the names that the
    layers of the architecture `own` have.

    They are rescaled so that these layers compute the same. Empty unless the target's layers are
    built like a Llama's.
    """
    theirs = target.model.shape
    if (
        not isinstance(theirs, Architecture)
        or theirs.qk_norm not in (None, "head")
        or not theirs.pre_norms
    ):
        return {}
    if theirs.post_norms or theirs.mlp_bias or theirs.fixed_parts is not None:
        return {}
    weights = target.model.last_layers(target.folder, own.num_layers)
    made = {FINAL_NORM: (weights[FINAL_NORM] + theirs.norm_weight_offset).cpu()}
    for index in range(own.num_layers):
        made |= _converted(weights, theirs, own, index)
    return made


def output_names(architecture: Architecture, index: int) -> list[str]:
    """Returns the names of the weights with which attention and MLP of a layer add to the residual
    stream."""
    files = layer_files(architecture, index)
    assert isinstance(files.mixer, AttentionFiles)
    outputs: list[Any] = [files.mixer.output]
    if isinstance(files.mlp, ExpertFiles):
        outputs += [expert[-1] for expert in files.mlp.experts]
        outputs += [] if files.mlp.shared is None else [files.mlp.shared.down]
    else:
        outputs.append(files.mlp.down)
    return [tensor.name for tensor in walk(tuple(outputs))]


def silence(weights: Mapping[str, Tensor], architecture: Architecture, index: int) -> None:
    """Changes the weights of a layer so that attention and MLP add nothing to the residual stream.

    The output projections become zero, or where norms of their output follow, these: behind a norm,
    the smallest output would be as large as any.
    """
    files = layer_files(architecture, index)
    norms = [norm for norm in (files.attention_post_norm, files.mlp_post_norm) if norm is not None]
    for norm in norms:
        weights[norm.name].fill_(-architecture.norm_weight_offset)
    for name in output_names(architecture, index) if not norms else ():
        weights[name].zero_()


def _converted(
    weights: Mapping[str, Tensor], theirs: Architecture, own: Architecture, index: int
) -> dict[str, Tensor]:
    """Returns the weights of one layer of the target with the names, and in the form, of a layer of
    the architecture `own`."""
    attention, mlp = _blocks(theirs, index)
    own_attention, own_mlp = _blocks(own, index)
    converted = _split(weights, attention.projections, own_attention.projections)
    converted |= _split(weights, mlp.gate_up, own_mlp.gate_up)
    for name in tensor_shapes(layer_files(own, index)):
        if name not in converted:
            offset = theirs.norm_weight_offset if "norm" in name else 0
            converted[name] = weights[name] + offset

    factors = {}
    for tensor in walk((own_attention.output, own_mlp.down.weight)):
        factors[tensor.name] = theirs.residual_scale
    scale = theirs.attention_scale * theirs.head_size**0.5  # a Llama's is 1 / sqrt(head size)
    for tensor in walk(own_attention.q_norm or own_attention.projections[0]):
        factors[tensor.name] = scale
    return {name: (weight * factors.get(name, 1.0)).cpu() for name, weight in converted.items()}


def _blocks(architecture: Architecture, index: int) -> tuple[AttentionFiles, MLPFiles]:
    files = layer_files(architecture, index)
    assert isinstance(files.mixer, AttentionFiles)
    assert isinstance(files.mlp, MLPFiles)
    return files.mixer, files.mlp


def _split(
    weights: Mapping[str, Tensor], theirs: Sequence[LinearFiles], own: Sequence[LinearFiles]
) -> dict[str, Tensor]:
    """Returns the weights of the linear layers `own`, which have the rows of `theirs` in the same
    order."""
    stacked_weights, biases = stacked(theirs, weights.__getitem__)
    rows = [layer.weight.shape[0] for layer in own]
    split = dict(
        zip((layer.weight.name for layer in own), torch.split(stacked_weights, rows), strict=True)
    )
    if biases is not None:
        names = [layer.bias.name for layer in own if layer.bias is not None]
        split |= zip(names, torch.split(biases, rows), strict=True)
    return split
