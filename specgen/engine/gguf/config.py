"""Turns the metadata of a GGUF file into what a config.json of the same model says, for the families of the native decoder.

To add an architecture, add an entry to `ARCHITECTURES` and, if its tensors have other names than Llama's or other values than the
model's, to `tensors`. A test has to write a file of it and compare the model with the one it was made from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specgen.engine.gguf.blocks import TYPES, read_tensor
from specgen.engine.gguf.file import GgufFile
from specgen.engine.gguf.metadata import Metadata

Config = dict[str, Any]

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MOST_LAYERS = 4096
# Texts of tokens that end an answer in models whose metadata may name only one of several such tokens.
_END_TEXTS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|eom_id|> <|end_of_text|> <EOT> [EOT]
    <｜end▁of▁sentence｜> <end_of_utterance>
    """
_ENDS = frozenset(_END_TEXTS.split())
_HARMONY = frozenset({"<|return|>", "<|call|>"})  # in a vocabulary with these, <|end|> ends a message and not an answer
# Metadata that is not read because it does not change what the model computes. What belongs to YaRN and to sliding windows is
# read where there is one; experts' settings follow expert_count.
_DESCRIPTION_KEYS = """
    vocab_size pooling_type tensor_data_layout attention.layer_norm_epsilon attention.sliding_window_pattern
    rope.scaling.finetuned rope.scaling.original_context_length rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    """
_DESCRIPTIONS = frozenset(_DESCRIPTION_KEYS.split())
_HEAD_SIZES = frozenset({"attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"})
# Values with which a setting that is not read changes nothing.
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 0),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}
_CONTROL = 3  # the type of special tokens


@dataclass(frozen=True, slots=True)
class Reading:
    """What the function of an architecture reads: the file, its metadata, and the fields that all architectures have."""

    opened: GgufFile
    metadata: Metadata
    common: Mapping[str, Any]

    @property
    def layers(self) -> int:
        return int(self.common["num_hidden_layers"])

    @property
    def head_size(self) -> int:
        return int(self.common["head_dim"])

    def has(self, tensor: str) -> bool:
        return tensor in self.opened.tensors

    def values(self, tensor: str) -> list[float]:
        """Returns the numbers of a small tensor."""
        found = self.opened.tensors[tensor]
        if math.prod(found.shape) > 1 << 16:
            raise self.metadata.refuse(f"has {tensor} with {math.prod(found.shape):,} numbers")
        numbers: list[float] = read_tensor(found, dtype=torch.float32).flatten().tolist()
        return numbers


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of GGUF files: the `model_type` of config.json, and a function that returns the fields that are particular
    to it."""

    model_type: str
    describe: Callable[[Reading], Config]


def gguf_config(opened: GgufFile, name: str) -> Config:
    """Returns the model's configuration with the fields of a config.json; messages call the model `name`.

    Of an architecture that is not in `ARCHITECTURES`, only `model_type` and the ids of special tokens. Raises SpecgenError for
    metadata that is missing or of a wrong type, and for values of the architecture that are unknown and may change the output.
    """
    metadata = Metadata(opened.metadata, name)
    architecture = ARCHITECTURES.get(metadata.architecture)
    ids = _special_ids(metadata)
    if architecture is None:
        return {"model_type": metadata.architecture, **ids}
    if EMBEDDING not in opened.tensors:
        raise metadata.refuse(f"lacks the tensor {EMBEDDING}")
    common = {"model_type": architecture.model_type, **_common(opened, metadata), **ids}
    reading = Reading(opened, metadata, common)
    config = {**common, **_rope(reading), **architecture.describe(reading)}
    metadata.refuse_unread(partial(_is_harmless, common))
    return config


def is_known(metadata: Metadata) -> bool:
    """Whether the native decoder's families include the file's architecture."""
    return metadata.architecture in ARCHITECTURES


def _common(opened: GgufFile, metadata: Metadata) -> Config:
    """Returns the fields that all architectures have."""
    hidden = metadata.integer("{arch}.embedding_length")
    heads = metadata.per_layer("{arch}.attention.head_count")
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", heads)
    layers = metadata.integer("{arch}.block_count")
    if heads < 1 or not 1 <= layers <= _MOST_LAYERS:
        raise metadata.refuse(f"has {heads:,} heads and {layers:,} layers by its metadata")
    size = metadata.integer("{arch}.attention.key_length", hidden // heads)
    if metadata.integer("{arch}.attention.value_length", size) != size:
        raise metadata.refuse("has heads of different sizes for keys and values, which is not supported")
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata.per_layer("{arch}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "vocab_size": opened.tensors[EMBEDDING].shape[0],
        "max_position_embeddings": metadata.integer("{arch}.context_length"),
        "rms_norm_eps": metadata.number("{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": OUTPUT not in opened.tensors,
        "dtype": _dtype(opened),
    }


def _is_harmless(common: Config, field: str, value: Any) -> bool:
    """Whether a value that was not read does not change the output of a model with the fields `common`."""
    head_size = common["head_dim"]
    if field in _DESCRIPTIONS or (field.startswith("expert_") and field != "expert_count"):
        return True
    if field in _HEAD_SIZES:
        return bool(value == head_size)
    if field == "rope.scaling.type":  # not read where each frequency has a factor; rope.scaling.factor has to be neutral
        return value in ("none", "linear")
    if field == "embedding_length_out":
        return bool(value == common["hidden_size"])
    if not isinstance(value, int | float):
        return False
    if field == "attention.sliding_window":
        return value == 0 or value >= common["max_position_embeddings"]
    if field == "attention.scale":
        return value == 0 or math.isclose(value, head_size**-0.5, rel_tol=1e-6)
    return value in _NEUTRAL.get(field, ())


def _dtype(opened: GgufFile) -> str:
    """Returns the dtype of most numbers in matrices; float32 if any matrix is quantised.

    llama.cpp keeps some small ones in float32, such as LFM2's convolutions, in files of 16-bit numbers.
    """
    counts: Counter[torch.dtype] = Counter()
    for tensor in opened.tensors.values():
        dtype = TYPES[tensor.type].dtype
        if len(tensor.shape) < 2:
            continue
        if dtype is None:
            return "float32"
        counts[dtype] += math.prod(tensor.shape)
    [(most, _)] = counts.most_common(1)
    return str(most).removeprefix("torch.")


def _special_ids(metadata: Metadata) -> Config:
    """Returns the ids of the tokens at the beginning and the end of a text, as in a config.json."""
    named = {}
    for field, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if f"tokenizer.ggml.{key}_token_id" in metadata:
            named[field] = metadata.integer(f"tokenizer.ggml.{key}_token_id")
    keys = [f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom")]
    ends = [metadata.integer(key) for key in keys if key in metadata]
    ends += _ends_by_text(metadata)
    return {**named, "eos_token_id": list(dict.fromkeys(ends)) or None}


def _ends_by_text(metadata: Metadata) -> Iterator[int]:
    """Yields the ids of special tokens whose text says that they end an answer.

    Older files, and those whose config.json named one token, do not say which tokens end an answer; llama.cpp knows them by text.
    """
    if "tokenizer.ggml.tokens" not in metadata or "tokenizer.ggml.token_type" not in metadata:
        return
    tokens = metadata.list_of("tokenizer.ggml.tokens", str)
    types = metadata.list_of("tokenizer.ggml.token_type", int)
    found = {text: id_ for id_, (text, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL and text in _ENDS}
    if found.keys() >= _HARMONY:
        found.pop("<|end|>", None)
    yield from found.values()


def _rope(reading: Reading) -> Config:
    """Returns the rotary settings of models that rotate all layers alike."""
    metadata, size = reading.metadata, reading.head_size
    if metadata.integer("{arch}.rope.dimension_count", size) != size:
        raise metadata.refuse("rotates a part of each head, which is not supported for its architecture")
    theta = metadata.number("{arch}.rope.freq_base", 10_000.0)
    return {"rope_parameters": {"rope_theta": theta, **rope_scaling(reading)}}


def rope_scaling(reading: Reading) -> Config:
    """Returns how the rotary frequencies are scaled, with the names of config.json's `rope_parameters`."""
    metadata = reading.metadata
    if reading.has(_ROPE_FACTORS):
        return _factors(reading, reading.values(_ROPE_FACTORS))
    old = metadata.number("{arch}.rope.scale_linear", 1.0)  # its name in older files
    factor = metadata.number("{arch}.rope.scaling.factor", old)
    kind = metadata.text("{arch}.rope.scaling.type", "linear")
    if kind == "none":
        return {"rope_type": "default"}
    if kind == "linear":
        return _linear(factor)
    if kind == "yarn":
        return _yarn(metadata, factor)
    raise metadata.refuse(f"scales its rotary embedding by {kind!r}, which is not supported for its architecture")


def _linear(factor: float) -> Config:
    return {"rope_type": "linear", "factor": float(factor)} if factor not in (0, 1) else {"rope_type": "default"}


def _yarn(metadata: Metadata, factor: float) -> Config:
    found: Config = {"rope_type": "yarn", "factor": float(factor)}
    keys = {
        "original_max_position_embeddings": ("original_context_length", metadata.integer),
        "beta_fast": ("yarn_beta_fast", metadata.number),
        "beta_slow": ("yarn_beta_slow", metadata.number),
    }
    for field, (key, read) in keys.items():
        if f"{{arch}}.rope.scaling.{key}" in metadata:
            found[field] = read(f"{{arch}}.rope.scaling.{key}")
    if metadata.number("{arch}.rope.scaling.yarn_ext_factor", 1.0) not in (-1, 1):  # -1 stands for the default
        raise metadata.refuse("mixes its frequencies with YaRN in a way that is not supported")
    return found


def _factors(reading: Reading, factors: Sequence[float]) -> Config:
    """Returns the settings of files that have a factor for each rotary frequency, by which it is divided.

    Most are those of Llama 3.1 and later, computed from four numbers. Then these are returned, as the frequencies that they give
    have the same bits as in the original model.
    """
    metadata = reading.metadata
    if len(factors) != reading.head_size // 2 or not all(0 < factor < math.inf for factor in factors):
        raise metadata.refuse(f"has {_ROPE_FACTORS} with {len(factors):,} numbers that do not fit its heads")
    largest = max(factors)
    theta = metadata.number("{arch}.rope.freq_base", 10_000.0)
    expected = _llama3_factors(theta, len(factors), largest)
    if all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(factors, expected, strict=True)):
        return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    length = metadata.integer("{arch}.context_length")
    both = {"short_factor": list(factors), "long_factor": list(factors)}
    return {"rope_type": "longrope", **both, "attention_factor": 1.0, "original_max_position_embeddings": length}


def _llama3_factors(theta: float, count: int, factor: float) -> list[float]:
    """Returns the factors by which Llama 3.1's rotary frequencies are divided."""
    low, high, original = _LLAMA3.values()
    found = []
    for index in range(count):
        turns = original / (2 * math.pi) * theta ** (-index / count)  # in the original context
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1 / ((1 - share) / factor + share))
    return found


def _llama(reading: Reading) -> Config:
    if reading.metadata.integer("{arch}.expert_count", 0):
        raise reading.metadata.refuse("is a mixture of experts of the architecture llama, which is not supported")
    return {
        "attention_bias": reading.has("blk.0.attn_q.bias"),
        "mlp_bias": reading.has("blk.0.ffn_gate.bias"),
        "hidden_act": "silu",
    }


def _plain(reading: Reading) -> Config:
    return {"hidden_act": "silu"}


def _qwen3(reading: Reading) -> Config:
    return {"hidden_act": "silu", "attention_bias": reading.has("blk.0.attn_q.bias")}


def _gemma3(reading: Reading) -> Config:
    metadata, layers = reading.metadata, reading.layers
    scale = reading.head_size
    if layers == 62:  # of the 27B model, which scales by the width of the residual stream
        scale = reading.common["hidden_size"] // reading.common["num_attention_heads"]
    window = metadata.integer("{arch}.attention.sliding_window", 0)
    full = {"rope_theta": metadata.number("{arch}.rope.freq_base", 1_000_000.0), **rope_scaling(reading)}
    local = {"rope_theta": metadata.number("{arch}.rope.freq_base_swa", 10_000.0), "rope_type": "default"}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        "sliding_window": window or None,
        "layer_types": _types(_slides(metadata, layers, 6) if window else [False] * layers),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "final_logit_softcapping": _optional(metadata, "{arch}.final_logit_softcapping"),
        "attn_logit_softcapping": None,
    }


def _slides(metadata: Metadata, layers: int, pattern: int) -> list[bool]:
    """Returns for each layer whether it has a sliding window: by default all but each `pattern`-th one."""
    key = "{arch}.attention.sliding_window_pattern"
    if not metadata.is_list(key):
        pattern = metadata.integer(key, pattern)
        return [bool(pattern) and (index + 1) % pattern != 0 for index in range(layers)]
    found = metadata.list_of(key, bool)
    if len(found) != layers:
        raise metadata.refuse(f"has a sliding window pattern of {len(found):,} layers, and {layers:,} layers")
    return found


def _types(sliding: Sequence[bool]) -> list[str]:
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]


def _optional(metadata: Metadata, key: str) -> float | None:
    return metadata.number(key) if key in metadata else None


def _lfm2(reading: Reading) -> Config:
    metadata = reading.metadata
    heads = metadata.list_of("{arch}.attention.head_count_kv", int)
    if len(heads) != reading.layers:
        raise metadata.refuse(f"has {len(heads):,} numbers of key heads, and {reading.layers:,} layers")
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": metadata.integer("{arch}.shortconv.l_cache"),
        "conv_bias": False,
        "norm_eps": reading.common["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama),
    "qwen2": Architecture("qwen2", _plain),
    "qwen3": Architecture("qwen3", _qwen3),
    "gemma3": Architecture("gemma3_text", _gemma3),
    "lfm2": Architecture("lfm2", _lfm2),
}
