"""Tiny models of the native decoder's families with unusual settings and random weights, for
comparing it with transformers."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import IS_OLD_TRANSFORMERS
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specgen.engine.native import linear
from specgen.engine.native.config_reading import read_architecture, read_config
from specgen.engine.native.native_model import NativeModel, load_native

_TINY = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
# families whose head size does not follow from hidden_size
_OWN_HEAD = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "qwen3",
    "glm4_moe",
    "minimax_m2",
    "gpt_oss",
    "gemma4_text",
)
_TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_SLIDING_LAST = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
_BIASES = {"attention_bias": True, "mlp_bias": True}
_SIX = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}
_ONE = {"num_attention_heads": 4, "num_key_value_heads": 1}
_EQUAL = {"num_attention_heads": 4, "num_key_value_heads": 4}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_OLMOE = {"num_experts": 8, "num_experts_per_tok": 2}
_GLM = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
_MINIMAX = {"num_local_experts": 8, "num_experts_per_tok": 2}
_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3}
_GEMMA4 = {
    "global_head_dim": 16,
    "sliding_window": 7,
    "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 0,
}
_GEMMA4 |= {
    "vocab_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
_EDGE = {
    **_GEMMA4,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 96,
    "num_kv_shared_layers": 3,
}
_EDGE |= {"layer_types": ["sliding_attention", "full_attention"] * 3, "use_double_wide_mlp": True}
_LARGE = {
    **_GEMMA4,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 3.0,
}
_GEMMA4_MOE = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
_GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 7.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_MSCALE = {
    "rope_type": "yarn",
    "factor": 16.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "truncate": False,
}
_LINEAR = {"rope_type": "linear", "factor": 3.0}
_DYNAMIC = {"rope_type": "dynamic", "factor": 1.7}
BOUNDARY = 32  # of LongRoPE


def longrope(pairs: int, **more: Any) -> dict[str, Any]:
    factors = {
        "short_factor": [1 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + i for i in range(pairs)],
    }
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": BOUNDARY,
        **factors,
        **more,
    }


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": _LINEAR,
    "dynamic": _DYNAMIC,
    "llama3": _LLAMA3,
    "yarn": _YARN,
    "yarn mscale": _MSCALE,
    "longrope": longrope(4),
}

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {**_SIX, **_BIASES, "head_dim": 10, "rope_scaling": _LLAMA3},
        {
            **_ONE,
            "head_dim": 12,
            "tie_word_embeddings": True,
            "rope_scaling": _YARN,
            "hidden_act": "gelu",
        },
        {
            **_EQUAL,
            "rope_scaling": longrope(4),
            "rope_theta": 5e5,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
        },
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "mlp_bias": True},
    ],
    "mistral": [
        {**_ONE, "sliding_window": 7, "head_dim": 16},
        {**_SIX, "sliding_window": 1, "tie_word_embeddings": True, "rope_scaling": _LINEAR},
        {"sliding_window": None, "rope_scaling": _MSCALE},
    ],
    "qwen2": [
        {
            **_SIX,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": _TYPES,
            "rope_scaling": _YARN,
        },
        {
            **_ONE,
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        {**_EQUAL, "sliding_window": 3, "use_sliding_window": False},
    ],
    "qwen3": [
        {
            **_SIX,
            "head_dim": 12,
            "attention_bias": True,
            "rope_scaling": _YARN,
            "rms_norm_eps": 1e-3,
        },
        {
            **_ONE,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": _SLIDING_LAST,
        },
    ],
    "phi3": [
        {**_SIX, "sliding_window": 7, "partial_rotary_factor": 0.5, "rope_scaling": longrope(2)},
        {
            **_ONE,
            "original_max_position_embeddings": BOUNDARY,
            "rope_scaling": longrope(4),
            "tie_word_embeddings": True,
        },
        {**_EQUAL, "partial_rotary_factor": 0.75, "head_dim": 16, "sliding_window": 12},
    ],
    "gemma": [
        {**_ONE, "hidden_act": "gelu", "attention_bias": True, "head_dim": 16},
        {**_SIX, "head_dim": 6, "tie_word_embeddings": False, "rope_scaling": _LINEAR},
    ],
    "gemma2": [
        {
            **_SIX,
            "query_pre_attn_scalar": 10,
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "attention_bias": True,
        },
        {
            **_ONE,
            "layer_types": _SLIDING_LAST,
            "sliding_window": 12,
            "final_logit_softcapping": 3.0,
            "head_dim": 12,
        },
        {
            **_EQUAL,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "gelu",
        },
    ],
    "gemma3_text": [
        {
            **_SIX,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": 500.0,
            "query_pre_attn_scalar": 7,
        },
        {
            **_ONE,
            "layer_types": _TYPES,
            "sliding_window": 12,
            "rope_scaling": _LINEAR,
            "final_logit_softcapping": 4.0,
        },
        {
            **_EQUAL,
            "layer_types": _SLIDING_LAST,
            "sliding_window": 5,
            "attention_bias": True,
            "attn_logit_softcapping": 2.0,
        },
    ],
    "olmo2": [
        {**_SIX, "attention_bias": True, "rms_norm_eps": 1e-2},
        {**_ONE, "tie_word_embeddings": True, "rope_scaling": _YARN},
    ],
    "smollm3": [
        {
            **_SIX,
            **_BIASES,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
        {
            **_ONE,
            "no_rope_layers": [1, 0, 0, 1],
            "layer_types": _TYPES,
            "sliding_window": 12,
            "tie_word_embeddings": False,
        },
        {**_EQUAL, "no_rope_layers": [0, 0, 0, 0]},
    ],
    "qwen3_moe": [
        {
            **_SIX,
            **_MOE,
            "head_dim": 12,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
        {
            **_ONE,
            **_MOE,
            "num_experts": 5,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ],
    "olmoe": [
        {**_EQUAL, **_OLMOE},
        {**_ONE, **_OLMOE, "norm_topk_prob": True, "num_experts_per_tok": 1},
    ],
    "glm4_moe": [
        {
            **_SIX,
            **_GLM,
            "head_dim": 12,
            "use_qk_norm": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
        {
            **_ONE,
            **_GLM,
            "attention_bias": True,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
        },
    ],
    "minimax_m2": [
        {**_SIX, **_MINIMAX, "head_dim": 12, "rotary_dim": 6},
        {**_EQUAL, **_MINIMAX, "num_experts_per_tok": 3},
    ],
    "gpt_oss": [
        {**_SIX, **_OSS, "sliding_window": 7, "head_dim": 16, "rope_scaling": _YARN},
        {
            **_ONE,
            **_OSS,
            "sliding_window": 12,
            "layer_types": _TYPES,
            "swiglu_alpha": 1.1,
            "swiglu_limit": 0.7,
        },
        {**_EQUAL, **_OSS, "attention_bias": False, "sliding_window": 5},
    ],
    "gemma4_text": [
        _EDGE,
        {**_SIX, **_LARGE},
        {**_LARGE, **_GEMMA4_MOE},
        {**_EDGE, **_GEMMA4_MOE, "attention_bias": True},
    ],
    "granite": [
        {**_SIX, **_BIASES, **_GRANITE, "rope_scaling": _LLAMA3},
        {**_ONE, **_GRANITE, "tie_word_embeddings": True},
    ],
}
# The oldest supported versions of transformers compute other logits for configs of these families.
WRONG = ("gemma", "minimax_m2", "gpt_oss") if IS_OLD_TRANSFORMERS else ()
CASES = [
    pytest.param(family, index, id=f"{family}-{index}")
    for family in VARIANTS
    if family not in WRONG
    for index in range(len(VARIANTS[family]))
]
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_VISION |= {"image_size": 16, "patch_size": 8}
# the family of the text part, and the other parts of the config
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {"vision_config": _VISION, "mm_tokens_per_image": 4, "image_token_index": 95},
    ),
    "gemma4": ("gemma4_text", {"vision_config": None, "audio_config": None}),
}


def wrapped(wrapper: str, index: int = 0, **changes: Any) -> dict[str, Any]:
    """A config of a model with vision, whose text part is a variant of its family."""
    family, others = WRAPPERS[wrapper]
    return deepcopy(
        {"model_type": wrapper, "text_config": variant(family, index), **others, **changes}
    )


def sparse(family: str, **changes: Any) -> dict[str, Any]:
    """A tiny config as transformers 4 wrote it: without the defaults, and with rope_theta and
    rope_scaling at the top."""
    own = {"head_dim": 8} if family in _OWN_HEAD else {}
    return deepcopy({"model_type": family, **_TINY, **own, **changes})


def reference_of(config: dict[str, Any]) -> Any:
    """The transformers config object of the fields `config`."""
    return CONFIG_MAPPING[config["model_type"]].from_dict(deepcopy(config))


def make(config: dict[str, Any], seed: int = 0) -> Any:
    """A float32 transformers model of the config fields `config`. All weights are random, those of
    norms and biases too."""
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(
        reference_of(config), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight.uniform_(0.4, 1.8).mul_(torch.randint(0, 2, weight.shape) * 2 - 1.0)
                if "q_norm" in name and "gemma4" in config["model_type"]:
                    # its scores have no factor: larger ones make rounding errors of 5e-4 in
                    # transformers too
                    weight.mul_(0.3)
            elif name.endswith(("bias", "sinks")):
                weight.normal_(std=0.5)
            else:
                weight.normal_(std=0.5 if "embed" in name else weight.shape[-1] ** -0.5)
        for name, bias in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.normal_(std=0.3)
            if name.endswith("layer_scalar"):
                bias.uniform_(0.5, 1.5)
    return module.requires_grad_(False)


def variant(family: str, index: int = 0, **changes: Any) -> dict[str, Any]:
    """The config fields (see `sparse`) of variant number `index` of a family, with `changes`."""
    return sparse(family, **{**VARIANTS[family][index], **changes})


def load(
    folder: Path, dtype: torch.dtype = torch.float32, *, exact: bool = False, pack: bool = False
) -> NativeModel:
    """Loads a saved model with the native decoder. `pack` says whether weights are packed for the
    processor, whatever the rules would choose."""
    with pytest.MonkeyPatch.context() as patch:
        if pack:
            patch.setattr(linear, "_SMALL", 0)
        else:
            patch.setattr(linear, "packing_works", lambda _: False)
        architecture = read_architecture(read_config(folder, "the model"))
        return load_native(
            folder, "the model", architecture, dtype, torch.device("cpu"), exact=exact
        )


def both(config: dict[str, Any], folder: Path, **options: Any) -> tuple[Any, NativeModel]:
    """A random model twice: in transformers, and in the native decoder, which loads it from
    `folder`. `options` are those of `load`."""
    module = make(config)
    save(module, folder)
    return module, load(folder, **options)


def save(module: Any, folder: Path, **options: Any) -> None:
    """Saves a model without a tokenizer."""
    module.save_pretrained(folder, **options)


@torch.no_grad()
def expected(module: Any, sequences: list[list[int]]) -> torch.Tensor:
    """Transformers' logits [sequences, vocabulary] after the last token of each sequence, without a
    cache."""
    longest = max(map(len, sequences))
    # LongRoPE looks at the longest sequence of a batch
    if len({len(ids) > BOUNDARY for ids in sequences}) > 1:
        return torch.cat([expected(module, [ids]) for ids in sequences])
    # later tokens change nothing
    batch = torch.tensor([ids + [0] * (longest - len(ids)) for ids in sequences])
    logits = module(batch, use_cache=False).logits
    return torch.stack([logits[row, len(ids) - 1] for row, ids in enumerate(sequences)])
