"""Reads the decoder layers of a head from its config.json and its tensors' shapes, in the layouts that others publish."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specgen.base.errors import SpecgenError
from specgen.engine.model_loading import LoadedModel
from specgen.engine.native.architecture import UnsupportedConfig
from specgen.engine.native.families import read_architecture
from specgen.engine.parts.head_tensors import HeadTensors, Shape, shown

_ROPE_BASE = 10_000.0  # where the config has none: that of the code of EAGLE's and GliDe's authors, whatever the target's is
_NORM_EPSILON = 1e-6  # transformers' default for Llama
_MOST_LAYERS = 64


class HeadConfig:
    """The fields of a head's config.json. A null field counts as missing. Errors name the field and the head."""

    def __init__(self, files: HeadTensors, values: Mapping[str, Any]) -> None:
        self.files = files
        self.values = {name: value for name, value in values.items() if value is not None}

    def refuse(self, name: str, problem: str = "is not supported") -> SpecgenError:
        """Returns the error to raise for a field's value."""
        value = shown(repr(self.values.get(name)), 40)
        return self.files.refuse(f"{shown(name)} = {value} in its config.json {problem}", "Correct its config.json")

    def size(self, name: str, default: int | None = None) -> int:
        """Returns a number of at least 1. If `default` is None, the field has to be there."""
        value = self.values.get(name, default)
        if value is None:
            raise self.files.refuse(f"its config.json does not say {name}")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 31:
            raise self.refuse(name)
        return value

    def switch(self, name: str) -> bool | None:
        """Returns a flag, or None if it is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name)
        return value

    def section(self, name: str) -> dict[str, Any]:
        """Returns the fields of an object, none if it is missing."""
        value = self.values.get(name, {})
        if not isinstance(value, dict):
            raise self.refuse(name)
        return value

    def check_off(self, *names: str) -> None:
        """Raises SpecgenError for the flags of variants that specgen cannot run."""
        for name in names:
            if self.switch(name):
                raise self.files.refuse(
                    f"it is of a variant that specgen cannot run ({name} in its config.json)", "Take another head"
                )


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    """The decoder layers of a head: `config` describes them as in `EagleWeights`, `shapes` are those of their tensors, without
    the norms of their inputs."""

    config: dict[str, Any]
    shapes: dict[str, Shape]

    @property
    def count(self) -> int:
        count: int = self.config["num_hidden_layers"]
        return count


def read_decoder_layers(files: HeadTensors, config: HeadConfig, target: LoadedModel, width: int, inputs: int) -> DecoderLayers:
    """Reads the layers whose hidden states have `width` numbers; the attention of layer 0 gets `inputs` numbers.

    What config.json leaves out is taken from the tensors' shapes. Raises SpecgenError for what the native decoder cannot run.
    """
    config.check_off("use_sliding_window")
    count = _layer_count(files)
    heads = config.size("num_attention_heads")
    first = "layers.0.self_attn."
    head_size = config.size("head_dim", _share(files, f"{first}q_proj.weight", heads))
    kv_heads = config.size("num_key_value_heads", _share(files, f"{first}k_proj.weight", head_size))
    inner = config.size("intermediate_size", _rows(files, "layers.0.mlp.gate_proj.weight"))
    has_norms = any(name.endswith((".q_norm.weight", ".k_norm.weight")) for name in files.names)
    qkv_bias = config.switch("qkv_bias")
    if qkv_bias is None:
        qkv_bias = any(re.search(r"self_attn\.[qkv]_proj\.bias$", name) for name in files.names)
    output_bias = any(name.endswith("self_attn.o_proj.bias") for name in files.names)
    if qkv_bias != output_bias and (output_bias or has_norms):
        raise files.refuse("its attention has a bias in some of its projections only", "Take another head")
    shapes: dict[str, Shape] = {}
    for index in range(count):
        rows = {"q": heads * head_size, "k": kv_heads * head_size, "v": kv_heads * head_size}
        for which, number in rows.items():
            shapes[f"layers.{index}.self_attn.{which}_proj.weight"] = (number, inputs if index == 0 else width)
            if qkv_bias:
                shapes[f"layers.{index}.self_attn.{which}_proj.bias"] = (number,)
            if has_norms and which != "v":
                shapes[f"layers.{index}.self_attn.{which}_norm.weight"] = (head_size,)
        shapes[f"layers.{index}.self_attn.o_proj.weight"] = (width, heads * head_size)
        if output_bias:
            shapes[f"layers.{index}.self_attn.o_proj.bias"] = (width,)
        shapes |= {f"layers.{index}.mlp.{which}_proj.weight": (inner, width) for which in ("gate", "up")}
        shapes[f"layers.{index}.mlp.down_proj.weight"] = (width, inner)
        shapes[f"layers.{index}.post_attention_layernorm.weight"] = (width,)
    described = {
        "model_type": "qwen3" if has_norms else "qwen2" if qkv_bias and not output_bias else "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "hidden_act": config.values.get("hidden_act", "silu"),
        "rms_norm_eps": config.values.get("rms_norm_eps", _NORM_EPSILON),
        "max_position_embeddings": config.size("max_position_embeddings", target.context_limit),
        "vocab_size": target.model.num_embeddings,
        "attention_bias": output_bias,
        "tie_word_embeddings": False,
        **_rope(config),
    }
    try:
        read_architecture(described)
    except UnsupportedConfig as error:
        value = shown(repr(error.value), 40)
        raise files.refuse(f"{shown(error.field)} = {value} in its config.json is not supported", "Take another head") from error
    return DecoderLayers(described, shapes)


def _rope(config: HeadConfig) -> dict[str, Any]:
    section = config.section("rope_scaling") or config.section("rope_parameters")
    base = section.get("rope_theta", config.values.get("rope_theta", _ROPE_BASE))
    scaling = {name: value for name, value in section.items() if name != "rope_theta"}
    share = scaling.get("partial_rotary_factor", config.values.get("partial_rotary_factor", 1.0))
    plain = {"rope_theta": base} | ({} if share == 1 else {"partial_rotary_factor": share})
    is_plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    return plain if is_plain else {**plain, "rope_scaling": scaling}


def _layer_count(files: HeadTensors) -> int:
    """Returns the number of layers that the tensors' names show. Checking that all are there is left to others."""
    found = {match[1] for name in files.names if (match := re.match(r"layers\.(\d+)\.", name))}
    if len(found) > _MOST_LAYERS:
        raise files.refuse(f"it has {len(found):,} layers, which is a model's and not a head's", "Name it as a draft model: -d")
    return max(len(found), 1)


def _rows(files: HeadTensors, name: str) -> int:
    shape = files.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise files.refuse(f"{files.stored_name(name)} is no matrix in its file")
    return shape[0]


def _share(files: HeadTensors, name: str, parts: int) -> int:
    """Returns the rows of a matrix divided by `parts`."""
    rows = _rows(files, name)
    if rows % parts:
        raise files.refuse(f"the {rows:,} rows of {files.stored_name(name)} are not divisible into heads of its config.json")
    return rows // parts


def matrix_shape(files: HeadTensors, name: str) -> tuple[int, int]:
    """Returns the rows and columns of a matrix that has both. Raises SpecgenError if the tensor is missing or no matrix."""
    _rows(files, name)
    rows, columns = files.shape(name)
    return rows, columns


def check_vocabulary(files: HeadTensors, names: Sequence[str], target: LoadedModel, config: HeadConfig | None = None) -> None:
    """Raises SpecgenError if a tensor among `names` has a row for each token of another vocabulary than the target's.

    If none of them is there, `vocab_size` in `config` decides.
    """
    sizes = (target.model.vocab_size, target.model.num_embeddings)
    present = [name for name in names if name in files]
    for name in present:
        shape = files.shape(name)
        if not shape or shape[0] not in sizes:
            raise files.refuse_target(name, "a vocabulary of", shape[0] if shape else 1, target.name, sizes[0])
    if not present and config is not None and config.size("vocab_size", sizes[0]) not in sizes:
        raise files.refuse_target("config.json", "a vocabulary of", config.size("vocab_size"), target.name, sizes[0])
