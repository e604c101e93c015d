"""Writes tiny models of transformers as GGUF files, with the names, values and metadata that
llama.cpp's converter gives them.

What is known here about the format is written a second time on purpose: the tests compare what
specgen makes of a file with the model that was written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
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

_OLMO2_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PHI3_NAMES = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_EXPERT_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction": "exp_probs_b",
    "mlp.e_score_correction": "exp_probs_b",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert": "exp_probs_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_GPT_OSS_NAMES = {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
_QWEN35_NAMES = {
    **_EXPERT_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.norm": "ssm_norm",
}

Metadata = dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """How a weight is stored: under `names`, as what `split` makes of it; `merge` does the
    opposite."""

    names: tuple[str, ...]
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda weight: [weight]
    merge: Callable[..., torch.Tensor] = lambda values: values


_FUSED = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_EXPERTS = {
    "experts.gate_up_proj": Parts(
        _FUSED, lambda w: w.chunk(2, dim=1), lambda *p: torch.cat(p, dim=1)
    ),
    "experts.down_proj": Parts(("ffn_down_exps.weight",)),
}


def _take_turns(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    weight = gates.new_empty((*gates.shape[:-1], 2 * gates.shape[-1]))
    weight[..., ::2] = gates
    weight[..., 1::2] = ups
    return weight


_GPT_OSS = {
    "self_attn.sinks": Parts(("attn_sinks.weight",)),
    "experts.gate_up_proj": Parts(
        _FUSED,
        lambda w: [w.transpose(1, 2)[:, ::2], w.transpose(1, 2)[:, 1::2]],
        lambda *p: _take_turns(*[part.transpose(1, 2) for part in p]),
    ),
    "experts.gate_up_proj_bias": Parts(
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"), lambda w: [w[:, ::2], w[:, 1::2]], _take_turns
    ),
    "experts.down_proj": Parts(
        ("ffn_down_exps.weight",), lambda w: [w.transpose(1, 2)], lambda w: w.transpose(1, 2)
    ),
    "experts.down_proj_bias": Parts(("ffn_down_exps.bias",)),
}

# The sizes of the gated delta rule: 2 key heads of 16 numbers, 4 value heads of 32.
_KEYS = 2
_VALUES = 4
_KEY = 16
_VALUE = 32
_DELTA = {
    "linear_num_key_heads": _KEYS,
    "linear_num_value_heads": _VALUES,
    "linear_key_head_dim": _KEY,
    "linear_value_head_dim": _VALUE,
    "linear_conv_kernel_dim": 4,
}


def _tiled(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Value heads of `size` rows: from (key head, value head of it) to (value head of a key head,
    key head)."""
    heads = rows.reshape(_KEYS, _VALUES // _KEYS, size, -1)
    return torch.cat(
        [heads[key, value] for value in range(_VALUES // _KEYS) for key in range(_KEYS)]
    ).view(rows.shape)


def _untiled(rows: torch.Tensor, size: int) -> torch.Tensor:
    heads = rows.reshape(_VALUES // _KEYS, _KEYS, size, -1)
    return torch.cat(
        [heads[value, key] for key in range(_KEYS) for value in range(_VALUES // _KEYS)]
    ).view(rows.shape)


def _rows(name: str, size: int, others: int = 0) -> Parts:
    """A tensor whose rows after the first `others` are those of value heads."""
    return Parts(
        (name,),
        lambda w: [torch.cat((w[:others], _tiled(w[others:], size)))],
        lambda w: torch.cat((w[:others], _untiled(w[others:], size))),
    )


_QWEN35 = {
    **_EXPERTS,
    "linear_attn.in_proj_qkv.weight": _rows("attn_qkv.weight", _VALUE, 2 * _KEYS * _KEY),
    "linear_attn.in_proj_z.weight": _rows("attn_gate.weight", _VALUE),
    "linear_attn.in_proj_a.weight": _rows("ssm_alpha.weight", 1),
    "linear_attn.in_proj_b.weight": _rows("ssm_beta.weight", 1),
    "linear_attn.dt_bias": _rows("ssm_dt.bias", 1),
    "linear_attn.A_log": Parts(
        ("ssm_a",), lambda w: [-_tiled(w, 1).exp()], lambda w: (-_untiled(w, 1)).log()
    ),
    "linear_attn.conv1d.weight": Parts(
        ("ssm_conv1d.weight",),
        lambda w: _rows("", _VALUE, 2 * _KEYS * _KEY).split(w.squeeze(1)),
        lambda w: _rows("", _VALUE, 2 * _KEYS * _KEY).merge(w).unsqueeze(1),
    ),
    "linear_attn.out_proj.weight": Parts(
        ("ssm_out.weight",),
        lambda w: [_tiled(w.t(), _VALUE).t().contiguous()],
        lambda w: _untiled(w.t(), _VALUE).t(),
    ),
    "shared_expert_gate.weight": Parts(
        ("ffn_gate_inp_shexp.weight",), lambda w: [w[0]], lambda w: w[None]
    ),
}


def _of_key_heads(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """Qwen3-Next's rows of all queries, keys and values; and those of all gates."""
    values = _VALUES // _KEYS * _VALUE
    sorts: list[list[torch.Tensor]] = [[], [], [], []]
    for head in weight.chunk(_KEYS):
        for rows, sort in zip(head.split([_KEY, _KEY, values, values]), sorts, strict=True):
            sort.append(rows)
    return [torch.cat([*sorts[0], *sorts[1], *sorts[2]]), torch.cat(sorts[3])]


def _to_key_heads(others: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    queries, keys, values = others.split([_KEYS * _KEY, _KEYS * _KEY, _VALUES * _VALUE])
    heads = zip(*(rows.chunk(_KEYS) for rows in (queries, keys, values, gates)), strict=True)
    return torch.cat([rows for head in heads for rows in head])


_QWEN3_NEXT = {
    **_EXPERTS,
    "linear_attn.in_proj_qkvz.weight": Parts(
        ("attn_qkv.weight", "attn_gate.weight"), _of_key_heads, _to_key_heads
    ),
    "linear_attn.in_proj_ba.weight": Parts(("ssm_ba.weight",)),
    "linear_attn.dt_bias": Parts(("ssm_dt.bias",)),
    "linear_attn.A_log": Parts(("ssm_a",), lambda w: [-w.exp()], lambda w: (-w).log()),
    "linear_attn.conv1d.weight": Parts(
        ("ssm_conv1d.weight",), lambda w: [w.squeeze(1)], lambda w: w.unsqueeze(1)
    ),
    "linear_attn.out_proj.weight": Parts(("ssm_out.weight",)),
    "shared_expert_gate.weight": Parts(
        ("ffn_gate_inp_shexp.weight",), lambda w: [w[0]], lambda w: w[None]
    ),
}


@dataclass(frozen=True)
class Family:
    """A family of models: its `architecture` in GGUF files, the config fields of a tiny model, and
    how its files differ from Qwen2's."""

    architecture: str
    config: Mapping[str, Any]
    metadata: Callable[[Mapping[str, Any]], Metadata] = lambda _: {}
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    shift: float = 0.0
    parts: Mapping[str, Parts] = field(default_factory=dict)
    factors: Callable[[Mapping[str, Any]], Mapping[str, torch.Tensor]] = lambda _: {}


def _llama3_factors(config: Mapping[str, Any]) -> torch.Tensor:
    """By which the rotary frequencies of Llama 3.1 are divided, as llama.cpp's converter computes
    them."""
    scaling = config["rope_scaling"]
    pairs = config["head_dim"] // 2
    frequencies = config["rope_theta"] ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    waves = 2 * torch.pi / frequencies
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    factor = scaling["factor"]
    smooth = (8192 / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(
        waves < 8192 / high, 1.0, torch.where(waves > 8192 / low, factor, between)
    ).float()


def _phi3_factors(config: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    scaling = config["rope_scaling"]
    return {
        f"rope_factors_{run}.weight": torch.tensor(scaling[f"{run}_factor"])
        for run in ("long", "short")
    }


def _phi3(config: Mapping[str, Any]) -> Metadata:
    original = config["original_max_position_embeddings"]
    ratio = config["max_position_embeddings"] / original
    return {
        "phi3.rope.dimension_count": config["hidden_size"] // config["num_attention_heads"] // 2,
        "phi3.rope.scaling.original_context_length": original,
        "phi3.rope.scaling.attn_factor": math.sqrt(1 + math.log(ratio) / math.log(original)),
        "phi3.attention.sliding_window": config["sliding_window"],
    }


def _granite(config: Mapping[str, Any]) -> Metadata:
    return {
        "granite.attention.scale": config["attention_multiplier"],
        "granite.embedding_scale": config["embedding_multiplier"],
        "granite.residual_scale": config["residual_multiplier"],
        "granite.logit_scale": config["logits_scaling"],
    }


def _gemma2(config: Mapping[str, Any]) -> Metadata:
    return {
        "gemma2.attn_logit_softcapping": config["attn_logit_softcapping"],
        "gemma2.final_logit_softcapping": config["final_logit_softcapping"],
        "gemma2.attention.sliding_window": config["sliding_window"],
    }


def _experts_of(architecture: str, config: Mapping[str, Any]) -> Metadata:
    number = next(
        config[key]
        for key in ("num_local_experts", "num_experts", "n_routed_experts")
        if key in config
    )
    return {
        f"{architecture}.expert_count": number,
        f"{architecture}.expert_used_count": config["num_experts_per_tok"],
        f"{architecture}.expert_feed_forward_length": config.get(
            "moe_intermediate_size", config["intermediate_size"]
        ),
    }


def _qwen3_moe(config: Mapping[str, Any]) -> Metadata:
    return _experts_of("qwen3moe", config)


def _olmoe(config: Mapping[str, Any]) -> Metadata:
    found = _experts_of("olmoe", config)
    del found["olmoe.expert_feed_forward_length"]
    return found


def _lfm2_moe(config: Mapping[str, Any]) -> Metadata:
    heads = [
        config["num_key_value_heads"] * (kind == "full_attention") for kind in config["layer_types"]
    ]
    return {
        **_experts_of("lfm2moe", config),
        "lfm2moe.attention.head_count_kv": heads,
        "lfm2moe.shortconv.l_cache": config["conv_L_cache"],
        "lfm2moe.leading_dense_block_count": config["num_dense_layers"],
        "lfm2moe.expert_gating_func": 2,
        "lfm2moe.vocab_size": config["vocab_size"],
    }


def _glm4_moe(config: Mapping[str, Any]) -> Metadata:
    return {
        **_experts_of("glm4moe", config),
        "glm4moe.rope.dimension_count": config["head_dim"] // 2,
        "glm4moe.expert_shared_count": config["n_shared_experts"],
        "glm4moe.leading_dense_block_count": config["first_k_dense_replace"],
        "glm4moe.expert_group_count": config["n_group"],
        "glm4moe.expert_group_used_count": config["topk_group"],
        "glm4moe.expert_gating_func": 2,
        "glm4moe.expert_weights_scale": config["routed_scaling_factor"],
        "glm4moe.expert_weights_norm": config["norm_topk_prob"],
    }


def _minimax_m2(config: Mapping[str, Any]) -> Metadata:
    return {
        **_experts_of("minimax-m2", config),
        "minimax-m2.rope.dimension_count": 16,
        "minimax-m2.expert_gating_func": 2,
    }


def _gpt_oss(config: Mapping[str, Any]) -> Metadata:
    return {
        **_experts_of("gpt-oss", config),
        "gpt-oss.attention.sliding_window": config["sliding_window"],
        "gpt-oss.rope.scaling.type": "yarn",
        "gpt-oss.rope.scaling.factor": 4.0,
        "gpt-oss.rope.scaling.original_context_length": 128,
        "gpt-oss.rope.scaling.yarn_beta_fast": 32.0,
        "gpt-oss.rope.scaling.yarn_beta_slow": 1.0,
    }


def _delta(architecture: str, config: Mapping[str, Any]) -> Metadata:
    own = {
        "ssm.conv_kernel": 4,
        "ssm.state_size": _KEY,
        "ssm.group_count": _KEYS,
        "ssm.time_step_rank": _VALUES,
        "ssm.inner_size": _VALUES * _VALUE,
        "full_attention_interval": 2,
        "rope.dimension_count": config["head_dim"] // 4,
        "rope.dimension_sections": [2, 2, 2, 0],
    }
    return {f"{architecture}.{key}": value for key, value in own.items()}


def _qwen35(config: Mapping[str, Any]) -> Metadata:
    return _delta("qwen35", config)


def _shared(architecture: str, config: Mapping[str, Any]) -> Metadata:
    shared = {
        f"{architecture}.expert_shared_feed_forward_length": config[
            "shared_expert_intermediate_size"
        ]
    }
    return {**_experts_of(architecture, config), **shared}


def _qwen35_moe(config: Mapping[str, Any]) -> Metadata:
    return {**_delta("qwen35moe", config), **_shared("qwen35moe", config)}


def _qwen3_next(config: Mapping[str, Any]) -> Metadata:
    return {**_delta("qwen3next", config), **_shared("qwen3next", config)}


def _gemma3(config: Mapping[str, Any]) -> Metadata:
    window = {"gemma3.attention.sliding_window": config["sliding_window"]}
    return {**window, "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}


def _lfm2(config: Mapping[str, Any]) -> Metadata:
    heads = [
        config["num_key_value_heads"] * (kind == "full_attention") for kind in config["layer_types"]
    ]
    return {"lfm2.attention.head_count_kv": heads, "lfm2.shortconv.l_cache": 3}


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_SMALL = {"hidden_size": 64, "intermediate_size": 96}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 256,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "truncate": False,
}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
_RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    **_DELTA,
}
_PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.25}
_LFM2_CONFIG = {
    "layer_types": ["conv", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "block_ff_dim": 256,
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
}
FAMILIES = {
    "llama": Family(
        "llama",
        {"head_dim": 64, "rope_theta": 500000.0, "rope_scaling": _LLAMA3},
        permuted=True,
        factors=lambda config: {"rope_freqs.weight": _llama3_factors(config)},
    ),
    "llama, biases": Family(
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 128},
        permuted=True,
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
    "lfm2": Family("lfm2", _LFM2_CONFIG, _lfm2, _LFM2_NAMES),
    "qwen3_moe": Family(
        "qwen3moe",
        {**_MOE, "moe_intermediate_size": 256, "head_dim": 64, "norm_topk_prob": True},
        _qwen3_moe,
        _EXPERT_NAMES,
        parts=_EXPERTS,
    ),
}
# Those that are written in float32 alone.
MORE_FAMILIES = {
    "gemma": Family(
        "gemma", {**_SMALL, "head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}, shift=1.0
    ),
    "gemma2": Family(
        "gemma2",
        {
            **_SMALL,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 7,
            "attn_logit_softcapping": 2.5,
            "final_logit_softcapping": 3.25,
        },
        _gemma2,
        _POST_NORMS,
        shift=1.0,
    ),
    "phi3": Family(
        "phi3",
        {
            **_SMALL,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 256,
            "rope_scaling": _LONGROPE,
            "sliding_window": 100,
            "pad_token_id": 0,
        },
        _phi3,
        _PHI3_NAMES,
        factors=_phi3_factors,
    ),
    "smollm3": Family(
        "smollm3",
        {**_SMALL, "num_hidden_layers": 5, "rope_theta": 5e6, "pad_token_id": 0},
        permuted=True,
    ),
    "granite": Family(
        "granite",
        {
            **_SMALL,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 7.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "attention_bias": True,
        },
        _granite,
        permuted=True,
    ),
    "olmo2": Family("olmo2", {**_SMALL, "rope_theta": 5e5}, names=_OLMO2_NAMES),
    "olmoe": Family(
        "olmoe",
        {**_SMALL, "num_experts": 8, "num_experts_per_tok": 2},
        _olmoe,
        _EXPERT_NAMES,
        parts=_EXPERTS,
    ),
    "lfm2_moe": Family(
        "lfm2moe",
        {**_SMALL, **_LFM2_CONFIG, **_MOE, "num_dense_layers": 1},
        _lfm2_moe,
        {**_LFM2_NAMES, **_EXPERT_NAMES},
        parts=_EXPERTS,
    ),
    "glm4_moe": Family(
        "glm4moe",
        {
            **_SMALL,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        _glm4_moe,
        {**_EXPERT_NAMES, "post_attention_layernorm": "post_attention_norm"},
        parts=_EXPERTS,
    ),
    "minimax_m2": Family(
        "minimax-m2",
        {
            **_SMALL,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "rotary_dim": 16,
            "rope_theta": 5e6,
        },
        _minimax_m2,
        _EXPERT_NAMES,
        parts=_EXPERTS,
    ),
    "gpt_oss": Family(
        "gpt-oss",
        {
            **_SMALL,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "sliding_window": 12,
            "rope_theta": 150000.0,
            "rope_scaling": _YARN,
        },
        _gpt_oss,
        _GPT_OSS_NAMES,
        parts=_GPT_OSS,
    ),
    "qwen3_5_text": Family(
        "qwen35",
        {**_SMALL, **_RECURRENT, "head_dim": 32, "rope_parameters": _PARTIAL},
        _qwen35,
        _QWEN35_NAMES,
        shift=1.0,
        parts=_QWEN35,
    ),
    "qwen3_5_moe_text": Family(
        "qwen35moe",
        {
            **_SMALL,
            **_RECURRENT,
            **_MOE,
            "shared_expert_intermediate_size": 48,
            "head_dim": 32,
            "rope_parameters": _PARTIAL,
        },
        _qwen35_moe,
        _QWEN35_NAMES,
        shift=1.0,
        parts=_QWEN35,
    ),
    "qwen3_next": Family(
        "qwen3next",
        {
            **_SMALL,
            **_RECURRENT,
            **_MOE,
            "shared_expert_intermediate_size": 48,
            "head_dim": 32,
            "rope_parameters": _PARTIAL,
        },
        _qwen3_next,
        _QWEN35_NAMES,
        shift=1.0,
        parts=_QWEN3_NEXT,
    ),
}


# Those that transformers alone runs.
OTHER_FAMILIES = {
    "starcoder2": Family(
        "starcoder2",
        {
            **_SMALL,
            "rope_theta": 1e5,
            "use_bias": True,
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
        },
        lambda config: {"starcoder2.attention.layer_norm_epsilon": config["norm_epsilon"]},
        {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    ),
}


def model_of(family: str) -> Any:
    """A tiny random float32 model of transformers, whose next token depends on all tokens before
    it."""
    model_type = family.partition(",")[0]
    module = native_models.make(
        {"model_type": model_type, **_SIZES, "bos_token_id": 1, **described(family).config}
    )
    with torch.no_grad():
        # with tied weights the model would repeat its last token
        module.get_input_embeddings().weight.mul_(0.1)
        for name, weight in module.named_parameters():
            if name.endswith("bias"):
                weight.mul_(0.2)  # large ones are the same for all contexts
            if name.endswith("o_proj.weight"):
                weight.mul_(3)
    return module


def described(family: str) -> Family:
    return {**FAMILIES, **MORE_FAMILIES, **OTHER_FAMILIES}[family]


def write_model(module: Any, family: str, path: Path, kind: str = "F32", **metadata: Any) -> Path:
    """Writes a model as a GGUF file with matrices of the type `kind`, and sets the model's weights
    to the values in the file.

    `metadata` are further values, with underscores in place of the dots in their keys' last parts.
    """
    own = described(family)
    tensors: dict[str, Stored] = {}
    with torch.no_grad():
        for name, weight in weights(module).items():
            values = []
            parts = _parts(name, own, module)
            for part, stored in zip(parts.names, parts.split(weight), strict=True):
                tensors[part] = _stored(stored.contiguous(), part, kind, len(tensors))
                values.append(tensors[part].values)
            weight.copy_(parts.merge(*values))
    for name, factors in own.factors(own.config).items():
        tensors[name] = quantised(factors, "F32")
    write_gguf(path, {**_metadata(module.config, own), **tokenizer_metadata(), **metadata}, tensors)
    return path


def weights(module: Any) -> dict[str, torch.Tensor]:
    """The parameters of a model, and the learned numbers that transformers has as buffers."""
    learned = {name: buffer for name, buffer in module.named_buffers() if name.endswith("_bias")}
    return {**dict(module.named_parameters()), **learned}


def _parts(name: str, family: Family, module: Any) -> Parts:
    """How the weight `name` of transformers' model is stored."""
    if not name.startswith("model.layers."):
        stem, _, end = name.rpartition(".")
        own = f"{ {**_NAMES, **family.names}[stem] }.{end}"
        return _changed(own, family, module)
    _, _, index, part = name.split(".", 3)
    found = next((parts for key, parts in family.parts.items() if part.endswith(key)), None)
    if found is None:
        stem, _, end = part.rpartition(
            "_bias" if part.endswith(("correction_bias", "expert_bias")) else "."
        )
        own = {**_NAMES, **family.names}[stem]
        return _changed(f"blk.{index}.{own}.{end or 'bias'}", family, module)
    return Parts(tuple(f"blk.{index}.{own}" for own in found.names), found.split, found.merge)


def _changed(own: str, family: Family, module: Any) -> Parts:
    """How a weight is stored that is one tensor with the name `own`."""
    return Parts(
        (own,), lambda w: [_into(w, own, family, module)], lambda v: _out_of(v, own, family, module)
    )


def _stored(values: torch.Tensor, name: str, kind: str, seed: int) -> Stored:
    if values.dim() == 1 or "conv" in name.split(".")[-2] or "_inp" in name:
        return quantised(values, "F32")
    if kind in QUANTISED_BY_GGUF:
        return quantised(values, kind)
    return random_stored(values.shape, kind, seed, scale=float(values.std()))


def _into(weight: torch.Tensor, name: str, family: Family, module: Any) -> torch.Tensor:
    """The values that a file stores for a weight."""
    if family.permuted and (heads := _heads(name, module)):
        return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    if name.endswith("norm.weight") and "ssm" not in name:
        return weight + family.shift
    return weight.squeeze(1) if weight.dim() == 3 else weight


def _out_of(values: torch.Tensor, name: str, family: Family, module: Any) -> torch.Tensor:
    """The weight for which a file stores `values`."""
    if family.permuted and (heads := _heads(name, module)):
        return values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
    if name.endswith("norm.weight") and "ssm" not in name:
        return values - family.shift
    return values.unsqueeze(1) if name.endswith("shortconv.conv.weight") else values


def _heads(name: str, module: Any) -> int:
    counts = {
        "attn_q": module.config.num_attention_heads,
        "attn_k": module.config.num_key_value_heads,
    }
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
    stated = {key: value for key, value in found.items() if value is not None}
    return {"general.architecture": family.architecture, **stated, **family.metadata(fields)}


def tokenizer_metadata(tokenizer: str | None = None, pre: str = "gpt-2", rows: int = 0) -> Metadata:
    """The metadata of a byte-level tokenizer, by default a small one, filled up to `rows`
    tokens."""
    described = json.loads(byte_level() if tokenizer is None else tokenizer)
    vocabulary: dict[str, int] = dict(described["model"]["vocab"])
    types = dict.fromkeys(vocabulary.values(), 1)
    for token in described["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
        types[token["id"]] = 3 if token["special"] else 4
    texts = {id_: text for text, id_ in vocabulary.items()}
    count = max(rows, max(texts) + 1)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(id_, f"[PAD{id_}]") for id_ in range(count)],
        "tokenizer.ggml.token_type": [types.get(id_, 5) for id_ in range(count)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in described["model"]["merges"]],
    }
