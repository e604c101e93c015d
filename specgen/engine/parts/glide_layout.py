"""Reads and writes GliDe draft models in the layout of their authors: a Llama with cross-attention in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specgen.engine.model_loading import LoadedModel
from specgen.engine.parts.head_tensors import HeadTensors, Shape
from specgen.engine.parts.layer_config import HeadConfig, check_vocabulary, matrix_shape, read_decoder_layers
from specgen.engine.parts.shared_tables import compare_embedding, compare_lm_head
from specgen.engine.parts.weights import GlideWeights

_BLOCK_SIZE = 5  # the default of the authors' code
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def read_glide(files: HeadTensors, config: Mapping[str, Any], target: LoadedModel) -> GlideWeights:
    """Reads a head whose tensors have GliDe's names. `config` is the content of its config.json.

    Raises SpecgenError for other variants, for damaged heads and for heads of other targets.
    """
    fields = HeadConfig(files, config)
    if fields.switch("use_remap") or any("remap_" in name for name in files.names):
        raise files.refuse("it maps the target's keys and values (use_remap), which specgen cannot run", "Take another head")
    shape = target.model.shape
    for name, what, expected in (
        ("large_hidden_size", "a hidden size of", shape.hidden_size),
        ("large_num_attention_heads", "this number of heads:", shape.num_heads),
        ("large_head_dim", "heads of a size of", shape.head_size),
    ):
        if fields.size(name, expected) != expected:
            raise files.refuse_target(name, what, fields.size(name), target.name, expected)
    query = "layers.0.cross_attn.q_proj.weight"
    rows, width = matrix_shape(files, query)
    crossed = shape.num_heads * shape.head_size
    if rows != crossed:
        raise files.refuse_target(query, "attention of a width of", rows, target.name, crossed)
    check_vocabulary(files, [_EMBEDDING, _HEAD], target, fields)
    layers = read_decoder_layers(files, fields, target, width, width)
    if layers.count > shape.num_layers:
        raise files.refuse(f"its {layers.count} layers read from as many of {target.name}, which has {shape.num_layers}")
    shapes: dict[str, Shape] = {**layers.shapes, "norm.weight": (width,)}
    for index in range(layers.count):
        shapes[f"layers.{index}.input_layernorm.weight"] = (width,)
        shapes[f"layers.{index}.cross_attn.q_proj.weight"] = (crossed, width)
        shapes[f"layers.{index}.cross_attn.o_proj.weight"] = (width, crossed)
    is_tied = bool(fields.switch("tie_word_embeddings")) and _EMBEDDING in files
    for name, count in ((_EMBEDDING, target.model.num_embeddings), (_HEAD, target.model.vocab_size)):
        needs_own = width != shape.hidden_size and not (name == _HEAD and is_tied)
        if name in files or needs_own:
            shapes[name] = (count, width)
    files.check_shapes(shapes)
    for name, compare in ((_EMBEDDING, compare_embedding), (_HEAD, compare_lm_head)):
        if name in files and compare(files, name, target) == "equal":
            del shapes[name]
    tensors = {name: files.take(name, may_be_zero=name.endswith(".bias")) for name in shapes}
    if is_tied and _HEAD not in files and _EMBEDDING in tensors:
        tensors[_HEAD] = tensors[_EMBEDDING]
    return GlideWeights(layers.config, tensors, fields.size("block_size", _BLOCK_SIZE))


def glide_layout(
    weights: GlideWeights, hidden_size: int, heads: int, head_size: int, vocab_size: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the content of config.json, and the tensors to write, in the layout of GliDe's authors.

    The sizes are the target's: its hidden size, the number and size of its heads, its number of logits.
    """
    large = {"large_hidden_size": hidden_size, "large_num_attention_heads": heads, "large_head_dim": head_size}
    config = {**weights.config, "architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size, "use_remap": False, **large}
    config["block_size"] = weights.block_size
    return config, {name if name == _HEAD else f"model.{name}": tensor for name, tensor in weights.tensors.items()}
