"""Reads config.json into an `Architecture`, which is all that the native decoder knows about a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specgen.base.errors import SpecgenError
from specgen.engine.hub import GGUF_HINT
from specgen.engine.model_shape import ModelShape
from specgen.engine.native.description import Activation, Architecture, LayerKind, Rotary, UnsupportedConfig
from specgen.engine.native.families import FAMILIES, Family
from specgen.engine.native.fields import Fields
from specgen.engine.native.rope_settings import ALL_LAYERS, read_rotary

__all__ = ["Architecture", "LayerKind", "Rotary", "UnsupportedConfig", "read_architecture", "read_config"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_DTYPES = ("float32", "float16", "bfloat16")
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")  # the same by the names of several families
_MOST_LAYERS = 4096  # the deepest models have some hundreds
_SPECIAL_NUMBERS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Returns the contents of config.json in a model's folder. `name` is what messages call the model.

    Raises SpecgenError if the file is missing or damaged.
    """
    path = folder / "config.json"
    if not path.is_file():
        hint = GGUF_HINT if any(folder.glob("*.gguf")) else "Name a model id or a folder made by save_pretrained"
        raise SpecgenError(f"{name} is no Hugging Face model: it has no config.json", hint)
    try:
        config = json.loads(path.read_text("utf-8"), object_hook=_special_number)
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise SpecgenError(f"cannot read the configuration of {name}: {reason}", "Download or save it again") from error
    if not isinstance(config, dict):
        raise SpecgenError(f"cannot read the configuration of {name}: it is no JSON object", "Download or save it again")
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in _LAYER_COUNTS:
            if isinstance(part.get(key), int) and part[key] > _MOST_LAYERS:  # transformers would build them, or try to
                raise SpecgenError(f"{name} has a {key} above {_MOST_LAYERS:,}", "Correct its config.json, or download it again")
    return config


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Returns what the config.json of a model describes. Both forms are read: complete ones, and older ones without defaults.

    Raises UnsupportedConfig where the family is unknown, a value is impossible, or a field is unknown that may change the
    computation.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedConfig("model_type", model_type)
    fields = Fields(config)
    described = family.describe(fields, _plain(fields, str(model_type), family))
    fields.refuse_unknown()
    return described


def of_architecture(architecture: Architecture) -> ModelShape:
    """Returns the sizes of a model that the native decoder runs."""
    boundaries = (rotary.long_boundary for rotary in architecture.rotary.values())
    return ModelShape(
        model_type=architecture.model_type,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_layers=len(architecture.layers),
        num_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_size=architecture.head_size,
        vocab_size=architecture.vocab_size,
        context_limit=architecture.max_position_embeddings,
        rope_boundary=next((boundary for boundary in boundaries if boundary is not None), None),
        dtype=architecture.dtype,
        tied=architecture.tied,
    )


def _plain(fields: Fields, model_type: str, family: Family) -> Architecture:
    """Returns a Llama without biases, with the sizes, the rotary embedding and the activation of the model."""
    hidden, heads = fields.integer("hidden_size", family.sizes.hidden), fields.integer("num_attention_heads", family.sizes.heads)
    kv_heads = fields.optional_integer("num_key_value_heads", family.sizes.kv_heads) or heads
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads")
    head_size = fields.optional_integer("head_dim", family.sizes.head_size)
    if head_size is None and hidden % heads:
        raise fields.refuse("num_attention_heads")
    head_size = head_size or hidden // heads
    if head_size > 1 << 16:
        raise fields.refuse("head_dim" if "head_dim" in fields else "hidden_size")
    length = fields.integer("max_position_embeddings", family.sizes.positions)
    rotary, rotary_size, limit = read_rotary(fields, family.rotary, head_size, length)
    layers = fields.integer("num_hidden_layers", family.sizes.layers, maximum=_MOST_LAYERS)
    activation = fields.raw(*family.activation)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise fields.refuse(family.activation[0])
    return Architecture(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", family.sizes.intermediate),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=fields.integer("vocab_size", family.sizes.vocab),
        max_position_embeddings=limit,
        dtype=_dtype(fields),
        layers=(LayerKind(None, ALL_LAYERS),) * layers,
        rotary=rotary,
        rotary_size=rotary_size,
        norm_eps=fields.positive(*family.eps),
        attention_scale=head_size**-0.5,
        tied=fields.flag("tie_word_embeddings", family.tied),
        default_eos=_eos(fields, family.eos),
        activation=_ACTIVATIONS[activation],
    )


def _dtype(fields: Fields) -> str | None:
    """Returns the weights' dtype: `dtype`, or `torch_dtype` in older files."""
    name = "torch_dtype" if fields.raw("dtype") is None else "dtype"
    dtype = fields.raw(name)
    if dtype is None:
        return None
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in _DTYPES:
        raise fields.refuse(name)
    return dtype.removeprefix("torch.")


def _eos(fields: Fields, default: int | None) -> int | list[int] | None:
    """Returns the end-of-sequence id or ids."""
    eos = fields.raw("eos_token_id", default)
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise fields.refuse("eos_token_id")
    return eos  # type: ignore[no-any-return]


def _special_number(found: dict[str, Any]) -> Any:
    """Returns the number that transformers writes as an object such as {"__float__": "Infinity"}; other objects as they are."""
    written = found.get("__float__")
    return _SPECIAL_NUMBERS[written] if len(found) == 1 and isinstance(written, str) and written in _SPECIAL_NUMBERS else found
