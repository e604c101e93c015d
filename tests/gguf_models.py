"""Writes tiny models of transformers as GGUF files, with the names, values and metadata that llama.cpp's converter gives them.

What is known here about the format is written a second time on purpose: the tests compare what specgen makes of a file with the
model that was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import native_models
import torch
from gguf_files import QUANTISED_BY_GGUF, Stored, quantised, random_stored, write_gguf
from tokenizer_helpers import byte_level

ROWS = 448  # of the embedding: more than the tokenizer has tokens
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": ROWS,
    "max_position_embeddings": 512,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LFM2_NAMES = {
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}

Metadata = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A family of models: its `architecture` in GGUF files, the config fields of a tiny model, and how its files differ from
    Qwen2's."""

    architecture: str
    config: Mapping[str, Any]
    metadata: Callable[[Mapping[str, Any]], Metadata] = lambda _: {}
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    shift: float = 0.0


def _llama3_factors(config: Mapping[str, Any]) -> torch.Tensor:
    """By which the rotary frequencies of Llama 3.1 are divided, as llama.cpp's converter computes them."""
    scaling, pairs = config["rope_scaling"], config["head_dim"] // 2
    frequencies = config["rope_theta"] ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    waves = 2 * torch.pi / frequencies
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = (8192 / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(waves < 8192 / high, 1.0, torch.where(waves > 8192 / low, factor, between)).float()


def _gemma3(config: Mapping[str, Any]) -> Metadata:
    window = {"gemma3.attention.sliding_window": config["sliding_window"]}
    return {**window, "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}


def _lfm2(config: Mapping[str, Any]) -> Metadata:
    heads = [config["num_key_value_heads"] * (kind == "full_attention") for kind in config["layer_types"]]
    return {"lfm2.attention.head_count_kv": heads, "lfm2.shortconv.l_cache": 3}


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
FAMILIES = {
    "llama": Family("llama", {"head_dim": 64, "rope_theta": 500000.0, "rope_scaling": _LLAMA3}, permuted=True),
    "llama, biases": Family(
        "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 128}, permuted=True
    ),
    "qwen2": Family("qwen2", {"rope_theta": 1e6}),
    "qwen3": Family("qwen3", {"head_dim": 128, "rope_theta": 1e6, "tie_word_embeddings": True}),
    "gemma3_text": Family(
        "gemma3",
        {
            "head_dim": 64,
            "num_hidden_layers": 7,
            "sliding_window": 7,
            "rope_theta": 1e6,
            "query_pre_attn_scalar": 64,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "hidden_activation": "gelu_pytorch_tanh",
        },
        _gemma3,
        _POST_NORMS,
        shift=1.0,
    ),
    "lfm2": Family(
        "lfm2",
        {
            "layer_types": ["conv", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "block_ff_dim": 256,
            "conv_L_cache": 3,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        _lfm2,
        _LFM2_NAMES,
    ),
}


def model_of(family: str) -> Any:
    """A tiny random float32 model of transformers, whose next token depends on all tokens before it."""
    model_type = family.partition(",")[0]
    module = native_models.make({"model_type": model_type, **_SIZES, "bos_token_id": 1, **FAMILIES[family].config})
    with torch.no_grad():
        module.get_input_embeddings().weight.mul_(0.1)  # with tied weights the model would repeat its last token
        for name, weight in module.named_parameters():
            if name.endswith("bias"):
                weight.mul_(0.2)  # large ones are the same for all contexts
            if name.endswith("o_proj.weight"):
                weight.mul_(3)
    return module


def write_model(module: Any, family: str, path: Path, kind: str = "F32", **metadata: Any) -> Path:
    """Writes a model as a GGUF file with matrices of the type `kind`, and sets the model's weights to the values in the file.

    `metadata` are further values, with underscores in place of the dots in their keys' last parts.
    """
    described = FAMILIES[family]
    tensors: dict[str, Stored] = {}
    with torch.no_grad():
        for name, weight in module.named_parameters():
            own = _name(name, described)
            stored = _stored(_into(weight, own, described, module), own, kind, len(tensors))
            tensors[own] = stored
            weight.copy_(_out_of(stored.values, own, described, module))
    if "rope_scaling" in described.config and described.architecture == "llama":
        tensors["rope_freqs.weight"] = quantised(_llama3_factors({**described.config}), "F32")
    write_gguf(path, {**_metadata(module.config, described), **tokenizer_metadata(), **metadata}, tensors)
    return path


def _name(name: str, family: Family) -> str:
    stem, _, end = name.rpartition(".")
    names = {**_NAMES, **family.names}
    if stem in names:
        return f"{names[stem]}.{end}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{names[part]}.{end}"


def _stored(values: torch.Tensor, name: str, kind: str, seed: int) -> Stored:
    if values.dim() == 1 or "conv" in name.split(".")[-2]:
        return quantised(values, "F32")
    if kind in QUANTISED_BY_GGUF:
        return quantised(values, kind)
    return random_stored(values.shape, kind, seed, scale=float(values.std()))


def _into(weight: torch.Tensor, name: str, family: Family, module: Any) -> torch.Tensor:
    """The values that a file stores for a weight."""
    if family.permuted and (heads := _heads(name, module)):
        return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    if name.endswith("norm.weight"):
        return weight + family.shift
    return weight.squeeze(1) if weight.dim() == 3 else weight


def _out_of(values: torch.Tensor, name: str, family: Family, module: Any) -> torch.Tensor:
    """The weight for which a file stores `values`."""
    if family.permuted and (heads := _heads(name, module)):
        return values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    if name.endswith("norm.weight"):
        return values - family.shift
    return values.unsqueeze(1) if name.endswith("shortconv.conv.weight") else values


def _heads(name: str, module: Any) -> int:
    counts = {"attn_q": module.config.num_attention_heads, "attn_k": module.config.num_key_value_heads}
    return next((count for part, count in counts.items() if f".{part}." in name), 0)


def _metadata(config: Any, family: Family) -> Metadata:
    fields = config.to_dict()
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": fields.get("norm_eps", fields.get("rms_norm_eps")),
    }
    if "rope_theta" in family.config:
        own["rope.freq_base"] = float(family.config["rope_theta"])
    if "head_dim" in family.config:
        own |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    found = {f"{family.architecture}.{key}": value for key, value in own.items()}
    return {"general.architecture": family.architecture, **found, **family.metadata(fields)}


def tokenizer_metadata(tokenizer: str | None = None, pre: str = "gpt-2") -> Metadata:
    """The metadata of a byte-level tokenizer, by default a small one."""
    described = json.loads(byte_level() if tokenizer is None else tokenizer)
    vocabulary: dict[str, int] = dict(described["model"]["vocab"])
    types = dict.fromkeys(vocabulary.values(), 1)
    for token in described["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
        types[token["id"]] = 3 if token["special"] else 4
    texts = {id_: text for text, id_ in vocabulary.items()}
    count = max(texts) + 1
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(id_, f"[PAD{id_}]") for id_ in range(count)],
        "tokenizer.ggml.token_type": [types.get(id_, 5) for id_ in range(count)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in described["model"]["merges"]],
    }
