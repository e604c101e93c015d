"""Reads config.json into an `Architecture`: what all families have, and with `families` what is
particular to one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from specgen.base.errors import SpecgenError
from specgen.base.files import files_in
from specgen.engine.gguf.config import gguf_config
from specgen.engine.gguf.file import open_gguf
from specgen.engine.hub import GGUF_HINT
from specgen.engine.native.architecture import (
    Activation,
    Architecture,
    Changes,
    Fields,
    LayerKind,
    UnsupportedConfig,
)
from specgen.engine.native.families import FAMILIES, Family
from specgen.engine.native.rotary import ALL_LAYERS, read_rotary

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_DTYPES = ("float32", "float16", "bfloat16")
# the same by the names of several families
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    *_LAYER_COUNTS,
)
_MOST_LAYERS = 4096  # the deepest models have some hundreds
# Models with vision or audio that have a text part of a family: what that part's config has where
# it is silent.
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    "gemma4": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
}
# may stand outside of the text part's config
_OUTER = "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype"


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Returns the contents of config.json in a model's folder, or what a GGUF file says in its
    place. `name` is what messages call the model.

    Raises SpecgenError if the file is missing or damaged, or states an impossible size.
    """
    if folder.is_file():
        config = gguf_config(open_gguf(folder, name), name)
        _check_sizes(config, name)
        return config
    path = folder / "config.json"
    if not path.is_file():
        hint = (
            GGUF_HINT
            if files_in(folder, "*.gguf")
            else "Name a model id or a folder made by save_pretrained"
        )
        raise SpecgenError(f"{name} is no Hugging Face model: it has no config.json", hint)
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise SpecgenError(
            f"cannot read the configuration of {name}: {reason}", "Download or save it again"
        ) from error
    if not isinstance(config, dict):
        raise SpecgenError(
            f"cannot read the configuration of {name}: it is no JSON object",
            "Download or save it again",
        )
    _check_sizes(config, name)
    return config


def _check_sizes(config: Mapping[str, Any], name: str) -> None:
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in _SIZES:  # transformers would build such a model, or try to
            most = _MOST_LAYERS if key in _LAYER_COUNTS else 1 << 31
            if isinstance(value := part.get(key), int) and not 1 <= value <= most:
                problem = f"above {most:,}" if value > most else f"of {value}"
                raise SpecgenError(
                    f"{name} has a {key} {problem}", "Correct its config.json, or download it again"
                )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the text part of a model with vision or audio; of other models the
    config itself.

    `tie_word_embeddings` is true if either of the two configs says so.
    """
    defaults = _TEXT_DEFAULTS.get(str(config.get("model_type")))
    inner = config.get("text_config")
    if defaults is None or not isinstance(inner, dict):
        return config
    outer = {name: config[name] for name in _OUTER if config.get(name) is not None}
    tied = {"tie_word_embeddings": True} if config.get("tie_word_embeddings") is True else {}
    return {
        **defaults,
        **outer,
        **{name: value for name, value in inner.items() if value is not None},
        **tied,
    }


def attention_architecture(config: Mapping[str, Any]) -> Architecture:
    """Returns the architecture of the layers with attention in a model that may have recurrent
    layers too; see `read_architecture`."""
    fields = dict(text_config(config))
    fields.setdefault("intermediate_size", fields.get("moe_intermediate_size"))
    fields["layer_types"] = fields["quantization_config"] = None
    for name in ("rope_parameters", "rope_scaling"):
        # positions in pictures have three parts (mrope); those in a text are plain
        if isinstance(fields.get(name), dict):
            fields[name] = {
                key: value for key, value in fields[name].items() if not key.startswith("mrope_")
            }
    return read_architecture(fields)


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Returns the architecture that a config.json describes; of a model with vision or audio, that
    of the text part.

    Fields that are missing, as in older files, get their family's defaults. Raises
    UnsupportedConfig where the family is unknown, a value is impossible, or a field is unknown that
    may change the computation.
    """
    config = text_config(config)
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedConfig("model_type", model_type)
    fields = Fields(config)
    plain = _plain(fields, str(model_type), family)
    described = Architecture(**{**plain, **family.describe(fields, plain)})
    fields.refuse_unknown(lambda: _defaults(str(model_type)))
    return described


@cache
def _defaults(model_type: str) -> Mapping[str, Any]:
    """Returns the fields of transformers' config for a family with their defaults; none if
    transformers lacks the family."""
    # takes a second: only for an unknown field
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]().to_dict() if model_type in CONFIG_MAPPING else {}


def _plain(fields: Fields, model_type: str, family: Family) -> Changes:
    """Returns a Llama without biases, with the sizes, the rotary embedding and the activation of
    the model."""
    for name in family.required:
        if name not in fields:
            raise fields.refuse(name)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.optional(fields.integer, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads")
    head_size = fields.optional(fields.integer, "head_dim")
    if head_size is None and hidden % heads:
        raise fields.refuse("num_attention_heads")
    head_size = head_size or hidden // heads
    if head_size > 1 << 16:
        raise fields.refuse("head_dim" if "head_dim" in fields else "hidden_size")
    rotary, rotary_size, limit = read_rotary(
        fields, family.rotary, head_size, fields.integer("max_position_embeddings")
    )
    layers = fields.integer("num_hidden_layers", maximum=_MOST_LAYERS)
    activation = fields.raw(*family.activation)
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise fields.refuse(family.activation[0])
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", family.inner),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "vocab_size": fields.integer("vocab_size"),
        "context_limit": limit,
        "rope_boundary": next((settings.long_boundary for settings in rotary.values()), None),
        "dtype": _dtype(fields),
        "tied": fields.flag("tie_word_embeddings", family.tied),
        "default_eos": _eos(fields, family.eos),
        "kv_elements": 2 * layers * kv_heads * head_size,
        "layers": (LayerKind(None, ALL_LAYERS),) * layers,
        "rotary": rotary,
        "rotary_size": rotary_size,
        "norm_eps": fields.positive("rms_norm_eps", family.eps),
        "attention_scale": head_size**-0.5,
        "activation": _ACTIVATIONS[activation],
    }


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
    if eos is None:
        return None
    ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise fields.refuse("eos_token_id")
    return eos  # type: ignore[no-any-return]
