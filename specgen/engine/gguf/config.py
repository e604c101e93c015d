"""Turns the metadata of a GGUF file into what a config.json of the same model says, for the
architectures that are read without transformers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from specgen.engine.gguf.architectures import ARCHITECTURES
from specgen.engine.gguf.blocks import TYPES
from specgen.engine.gguf.file import GgufFile
from specgen.engine.gguf.metadata import Metadata
from specgen.engine.gguf.reading import Config, Reading, rope

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
_MOST_LAYERS = 4096
# Texts of tokens that end an answer in models whose metadata may name only one of several such
# tokens.
_END_TEXTS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <|eom_id|>
    <|end_of_text|> <EOT> [EOT]
    <｜end▁of▁sentence｜> <end_of_utterance>
    """
_ENDS = frozenset(_END_TEXTS.split())
# in a vocabulary with these, <|end|> ends a message and not an answer
_HARMONY = frozenset({"<|return|>", "<|call|>"})
# Metadata that is not read because it does not change what the model computes. What belongs to YaRN
# and to sliding windows is read where there is one.
_DESCRIPTION_KEYS = """
    vocab_size pooling_type tensor_data_layout attention.layer_norm_epsilon
    attention.sliding_window_pattern
    rope.scaling.finetuned rope.scaling.original_context_length rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow
    """
_DESCRIPTIONS = frozenset(_DESCRIPTION_KEYS.split())
_HEAD_SIZES = frozenset(
    {"attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"}
)
# Values with which a setting that is not read changes nothing.
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
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


def gguf_config(opened: GgufFile, name: str) -> Config:
    """Returns the model's configuration with the fields of a config.json; messages call the model
    `name`.

    Of an architecture that is not in `ARCHITECTURES`, only `model_type` and the ids of special
    tokens. Raises SpecgenError for metadata that is missing or of a wrong type, and for values of
    the architecture that are unknown and may change the output.
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
    config = {**common, **rope(reading, architecture.is_partial), **architecture.describe(reading)}
    has_experts = bool(opened.metadata.get(f"{metadata.architecture}.expert_count"))
    metadata.refuse_unread(partial(_is_harmless, common, has_experts))
    return config


def _common(opened: GgufFile, metadata: Metadata) -> Config:
    """Returns the fields that all architectures have."""
    hidden = metadata.integer("{arch}.embedding_length")
    heads = metadata.per_layer("{arch}.attention.head_count")
    kv_heads = metadata.per_layer("{arch}.attention.head_count_kv", heads)
    predicting = metadata.integer("{arch}.nextn_predict_layers", 0)  # layers that are not run
    layers = metadata.integer("{arch}.block_count") - predicting
    if heads < 1 or not 1 <= layers <= _MOST_LAYERS:
        raise metadata.refuse(f"has {heads:,} heads and {layers:,} layers by its metadata")
    size = metadata.integer("{arch}.attention.key_length", hidden // heads)
    if size < 1:
        raise metadata.refuse(f"has heads of {size:,} numbers by its metadata")
    if metadata.integer("{arch}.attention.value_length", size) != size:
        raise metadata.refuse(
            "has heads of different sizes for keys and values, which is not supported"
        )
    inner = None  # of dense MLPs, which some mixtures do not have
    if "{arch}.expert_feed_forward_length" in metadata:
        inner = metadata.integer("{arch}.expert_feed_forward_length")
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata.per_layer("{arch}.feed_forward_length", inner),
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


def _is_harmless(common: Config, has_experts: bool, field: str, value: Any) -> bool:
    """Whether a value that was not read does not change the output of a model with the fields
    `common`."""
    head_size = common["head_dim"]
    if field in _DESCRIPTIONS or (field.startswith("expert_") and not has_experts):
        return True
    if field in _HEAD_SIZES:
        return bool(value == head_size)
    # not read where each frequency has a factor; rope.scaling.factor has to be neutral
    if field == "rope.scaling.type":
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
    """Returns the dtype of most elements of matrices; float32 if any matrix is quantised.

    llama.cpp keeps some small ones in float32, such as LFM2's convolutions, in 16-bit files.
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
    named: dict[str, int | None] = {}
    for field, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        full = f"tokenizer.ggml.{key}_token_id"
        # not that of the family's first model
        named[field] = metadata.integer(full) if full in metadata else None
    keys = [f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom")]
    ends = [metadata.integer(key) for key in keys if key in metadata]
    ends += _ends_by_text(metadata)
    return {**named, "eos_token_id": list(dict.fromkeys(ends)) or None}


def _ends_by_text(metadata: Metadata) -> Iterator[int]:
    """Yields the ids of special tokens whose text says that they end an answer.

    Older files, and those whose config.json named one token, do not say which tokens end an answer;
    llama.cpp knows them by text.
    """
    if "tokenizer.ggml.tokens" not in metadata or "tokenizer.ggml.token_type" not in metadata:
        return
    tokens = metadata.list_of("tokenizer.ggml.tokens", str)
    types = metadata.list_of("tokenizer.ggml.token_type", int)
    ends = {
        text: id_
        for id_, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and text in _ENDS
    }
    if ends.keys() >= _HARMONY:
        ends.pop("<|end|>", None)
    yield from ends.values()
