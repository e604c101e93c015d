"""The architectures of GGUF files that are read without transformers: llama.cpp's names for them.

To add one, add an entry to `ARCHITECTURES`. Where its config.json has more fields than Llama's, it
needs a function that reads them; where its tensors have other names or values, `names` and
`changes`. A test has to write a file of it and compare the model with the one it was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from specgen.engine.gguf import changes
from specgen.engine.gguf.changes import Change, delta_heads
from specgen.engine.gguf.metadata import Metadata
from specgen.engine.gguf.reading import (
    Config,
    Reading,
    optional_number,
    rope_scaling,
    sliding_types,
)

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    # of layers that predict several tokens, which are not run
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_GEMMA_NAMES = {"ffn_norm": "pre_feedforward_layernorm"}
_PHI3_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_LFM2_NAMES = {
    "token_embd_norm": "model.norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_GPT_OSS_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_DELTA_NAMES = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SHARED_EXPERT_NAMES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QWEN3_NEXT_NAMES = {
    **_DELTA_NAMES,
    **_SHARED_EXPERT_NAMES,
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}
# values of expert_gating_func
_SOFTMAX = 1
_SIGMOID = 2


def _plain(reading: Reading) -> Config:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of GGUF files.

    `model_type` is that of config.json, and `describe` returns the fields of config.json that are
    particular to it. `is_partial`: only a part of each head may be rotated.

    `names` maps llama.cpp's names of tensors to those of the native decoder, which are a Llama's in
    safetensors files. Names of a layer's tensors lack `model.layers.N.`. A key with an ending, such
    as `.bias`, is a whole name; one without stands for the names with `.weight` and with `.bias`.
    `{}` in a name is the number of an expert: the stored tensor has those of all experts.

    `changes` has by the same keys what makes the model's tensor of the stored one. `joined` are the
    model's names of tensors that are made of two stored ones.
    """

    model_type: str
    describe: Callable[[Reading], Config] = _plain
    names: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Callable[[Metadata], Change]] = field(default_factory=dict)
    joined: frozenset[str] = frozenset()
    is_partial: bool = False

    def model_name(self, stored: str) -> str | None:
        """Returns the native decoder's name of the tensor that llama.cpp calls `stored`, such as
        `attn_q.weight` (without `blk.N.` if it is a layer's); None if it is unknown."""
        names = {**_NAMES, **self.names}
        if stored in names:
            return names[stored]
        stem, _, end = stored.rpartition(".")
        if stem not in names or end not in ("weight", "bias"):
            return None
        return f"{names[stem]}.{end}"

    def change(self, stored: str, metadata: Metadata) -> Change | None:
        """Returns what makes the model's tensor of the stored one with this name; None if that is
        the model's already."""
        make = self.changes.get(stored) or self.changes.get(stored.rpartition(".")[0])
        return None if make is None else make(metadata)


_PERMUTED = {
    "attn_q": partial(changes.in_halves, "{arch}.attention.head_count"),
    "attn_k": partial(changes.in_halves, "{arch}.attention.head_count_kv"),
}
_SHIFTED_NORMS = {name: changes.less_one for name in _NAMES if name.endswith("_norm")}
_CONVOLUTIONS = {"shortconv.conv": changes.convolution}
_DELTA_CHANGES = {
    **_SHIFTED_NORMS,
    "attn_qkv": changes.grouped_last,
    "attn_gate": changes.grouped_rows,
    "ssm_beta": changes.grouped_heads,
    "ssm_alpha": changes.grouped_heads,
    "ssm_a": changes.grouped_logarithms,
    "ssm_dt.bias": changes.grouped_heads,
    "ssm_conv1d": changes.grouped_convolution,
    "ssm_out": changes.grouped_columns,
    "ffn_gate_inp_shexp": changes.one_row,
}
_QWEN3_NEXT_CHANGES = {
    **_SHIFTED_NORMS,
    "attn_gate": changes.by_key_head,
    "ssm_a": changes.logarithms,
    "ssm_conv1d": changes.convolution,
    "ffn_gate_inp_shexp": changes.one_row,
}
_GPT_OSS_CHANGES = {
    "ffn_gate_exps.weight": changes.interleaved,
    "ffn_gate_exps.bias": changes.interleaved_bias,
    "ffn_down_exps.weight": changes.transposed,
}


def _biased(reading: Reading) -> Config:
    """Returns which weights have biases, in models that have the two fields of Llama."""
    return {
        "attention_bias": reading.has("blk.0.attn_q.bias"),
        "mlp_bias": reading.has("blk.0.ffn_gate.bias"),
    }


def _llama(reading: Reading) -> Config:
    if reading.metadata.integer("{arch}.expert_count", 0):
        what = "is a mixture of experts of the architecture llama, which is not supported"
        raise reading.metadata.refuse(what)
    return _biased(reading)


def _qwen3(reading: Reading) -> Config:
    return {"attention_bias": reading.has("blk.0.attn_q.bias")}


def _phi3(reading: Reading) -> Config:
    metadata = reading.metadata
    length = metadata.integer("{arch}.context_length")
    original = metadata.integer("{arch}.rope.scaling.original_context_length", length)
    window = metadata.integer("{arch}.attention.sliding_window", 0)
    return {
        "original_max_position_embeddings": original,
        "sliding_window": window or None,
    }


def _smollm3(reading: Reading) -> Config:
    rotates = [int((index + 1) % 4 != 0) for index in range(reading.layers)]  # as in llama.cpp
    return {
        **_biased(reading),
        "no_rope_layers": rotates,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _granite(reading: Reading) -> Config:
    if not reading.metadata.flag("{arch}.rope.scaling.finetuned", True):
        raise reading.metadata.refuse("has no rotary embedding, which is not supported")
    return {
        **_biased(reading),
        "attention_multiplier": reading.scale("{arch}.attention.scale", reading.head_size**-0.5),
        "embedding_multiplier": reading.scale("{arch}.embedding_scale"),
        "residual_multiplier": reading.scale("{arch}.residual_scale"),
        "logits_scaling": reading.scale("{arch}.logit_scale"),
    }


def _gemma(reading: Reading) -> Config:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(reading: Reading) -> Config:
    metadata = reading.metadata
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(reading, 46),
        "sliding_window": metadata.integer("{arch}.attention.sliding_window", 4096),
        "layer_types": sliding_types(reading, 2),
        "attn_logit_softcapping": metadata.number("{arch}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("{arch}.final_logit_softcapping", 30.0),
    }


def _query_scalar(reading: Reading, layers_of_27b: int) -> int:
    """Returns the number whose inverse square root scales the scores of Gemma.

    It is the head size, but for the 27B model, which is known by the number of its layers.
    """
    if reading.layers != layers_of_27b:
        return reading.head_size
    return int(reading.common["hidden_size"] // reading.common["num_attention_heads"])


def _gemma3(reading: Reading) -> Config:
    metadata = reading.metadata
    layers = reading.layers
    window = metadata.integer("{arch}.attention.sliding_window", 0)
    theta = metadata.number("{arch}.rope.freq_base", 1_000_000.0)
    local_theta = metadata.number("{arch}.rope.freq_base_swa", 10_000.0)
    full = {"rope_theta": theta, **rope_scaling(reading)}
    local = {"rope_theta": local_theta, "rope_type": "default"}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(reading, 62),
        "sliding_window": window or None,
        "layer_types": sliding_types(reading, 6) if window else ["full_attention"] * layers,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "final_logit_softcapping": optional_number(metadata, "{arch}.final_logit_softcapping"),
        "attn_logit_softcapping": None,
    }


def _lfm2(reading: Reading) -> Config:
    metadata = reading.metadata
    heads = metadata.list_of("{arch}.attention.head_count_kv", int)
    if len(heads) != reading.layers:
        problem = f"has {len(heads):,} numbers of key heads, and {reading.layers:,} layers"
        raise metadata.refuse(problem)
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": metadata.integer("{arch}.shortconv.l_cache"),
        "conv_bias": False,
        "norm_eps": reading.common["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(reading: Reading) -> Config:
    dense = _leading_dense(reading)
    fields = _lfm2(reading)
    del fields["block_auto_adjust_ff_dim"]
    _check_gating(reading, _SIGMOID)
    return {
        **fields,
        **_experts(reading, "num_experts"),
        "num_dense_layers": dense,
        "norm_topk_prob": reading.metadata.flag("{arch}.expert_weights_norm", True),
        "routed_scaling_factor": reading.scale("{arch}.expert_weights_scale"),
        "use_expert_bias": reading.has(f"blk.{dense}.exp_probs_b.bias"),
    }


def _experts(reading: Reading, count_field: str) -> Config:
    """Returns the sizes of a mixture of experts; config.json calls their number `count_field`."""
    metadata = reading.metadata
    size = metadata.integer("{arch}.expert_feed_forward_length")
    return {
        count_field: metadata.integer("{arch}.expert_count"),
        "num_experts_per_tok": metadata.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": size,
    }


def _leading_dense(reading: Reading) -> int:
    """Returns how many of the first layers have no experts."""
    return reading.metadata.integer("{arch}.leading_dense_block_count", 0)


def _check_gating(reading: Reading, function: int) -> None:
    """Raises SpecgenError if the scores of experts are computed by another function."""
    if reading.metadata.integer("{arch}.expert_gating_func", function) not in (0, function):
        raise reading.metadata.refuse("chooses its experts in a way that is not supported")


def _qwen3_moe(reading: Reading) -> Config:
    _check_gating(reading, _SOFTMAX)
    return {
        **_qwen3(reading),
        **_experts(reading, "num_experts"),
        "norm_topk_prob": reading.metadata.flag("{arch}.expert_weights_norm", True),
    }


def _olmoe(reading: Reading) -> Config:
    metadata = reading.metadata
    _check_gating(reading, _SOFTMAX)
    size = reading.common["intermediate_size"]
    return {
        "num_experts": metadata.integer("{arch}.expert_count"),
        "num_experts_per_tok": metadata.integer("{arch}.expert_used_count"),
        "intermediate_size": metadata.integer("{arch}.expert_feed_forward_length", size),
        "norm_topk_prob": metadata.flag("{arch}.expert_weights_norm", False),
    }


def _glm4_moe(reading: Reading) -> Config:
    metadata = reading.metadata
    _check_gating(reading, _SIGMOID)
    return {
        **_experts(reading, "n_routed_experts"),
        "attention_bias": reading.has("blk.0.attn_q.bias"),
        "use_qk_norm": reading.has("blk.0.attn_q_norm.weight"),
        "n_shared_experts": metadata.integer("{arch}.expert_shared_count", 1),
        "first_k_dense_replace": _leading_dense(reading),
        "n_group": metadata.integer("{arch}.expert_group_count", 1),
        "topk_group": metadata.integer("{arch}.expert_group_used_count", 1),
        "norm_topk_prob": metadata.flag("{arch}.expert_weights_norm", True),
        "routed_scaling_factor": reading.scale("{arch}.expert_weights_scale"),
    }


def _minimax_m2(reading: Reading) -> Config:
    metadata = reading.metadata
    _check_gating(reading, _SIGMOID)
    size = reading.common["intermediate_size"]
    return {
        "num_local_experts": metadata.integer("{arch}.expert_count"),
        "num_experts_per_tok": metadata.integer("{arch}.expert_used_count"),
        "intermediate_size": metadata.integer("{arch}.expert_feed_forward_length", size),
    }


def _gpt_oss(reading: Reading) -> Config:
    metadata = reading.metadata
    size = reading.common["intermediate_size"]
    theta = metadata.number("{arch}.rope.freq_base", 150_000.0)
    return {
        "num_local_experts": metadata.integer("{arch}.expert_count"),
        "num_experts_per_tok": metadata.integer("{arch}.expert_used_count"),
        "intermediate_size": metadata.integer("{arch}.expert_feed_forward_length", size),
        "attention_bias": reading.has("blk.0.attn_q.bias"),
        "sliding_window": metadata.integer("{arch}.attention.sliding_window"),
        "layer_types": sliding_types(reading, 2),
        # the model's own YaRN does not round the bounds of the frequencies that it scales
        "rope_parameters": {"rope_theta": theta, **rope_scaling(reading), "truncate": False},
    }


def _qwen35(reading: Reading) -> Config:
    metadata = reading.metadata
    interval = metadata.integer("{arch}.full_attention_interval", 4)
    if interval < 1:
        raise metadata.refuse(f"has full attention in each {interval:,}th layer")
    if "{arch}.rope.dimension_sections" in metadata:  # those of a text's positions are the same
        metadata.list_of("{arch}.rope.dimension_sections", int)
    heads = delta_heads(metadata)
    is_full = [(index + 1) % interval == 0 for index in range(reading.layers)]
    return {
        "layer_types": ["full_attention" if full else "linear_attention" for full in is_full],
        "linear_conv_kernel_dim": metadata.integer("{arch}.ssm.conv_kernel"),
        "linear_num_key_heads": heads.keys,
        "linear_num_value_heads": heads.values,
        "linear_key_head_dim": heads.key_size,
        "linear_value_head_dim": heads.value_size,
    }


def _qwen35_moe(reading: Reading) -> Config:
    metadata = reading.metadata
    _check_gating(reading, _SOFTMAX)
    experts = _experts(reading, "num_experts")
    size = experts["moe_intermediate_size"]
    key = "{arch}.expert_shared_feed_forward_length"
    return {
        **_qwen35(reading),
        **experts,
        "shared_expert_intermediate_size": metadata.integer(key, size),
        "norm_topk_prob": metadata.flag("{arch}.expert_weights_norm", True),
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, changes=_PERMUTED),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", _qwen3),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "gemma": Architecture("gemma", _gemma, changes=_SHIFTED_NORMS),
    "gemma2": Architecture("gemma2", _gemma2, _GEMMA_NAMES, _SHIFTED_NORMS),
    "gemma3": Architecture("gemma3_text", _gemma3, _GEMMA_NAMES, _SHIFTED_NORMS),
    "phi3": Architecture("phi3", _phi3, _PHI3_NAMES, is_partial=True),
    "smollm3": Architecture("smollm3", _smollm3, changes=_PERMUTED),
    "granite": Architecture("granite", _granite, changes=_PERMUTED),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe", _olmoe),
    "lfm2": Architecture("lfm2", _lfm2, _LFM2_NAMES, _CONVOLUTIONS),
    "lfm2moe": Architecture("lfm2_moe", _lfm2_moe, _LFM2_NAMES, _CONVOLUTIONS),
    "glm4moe": Architecture("glm4_moe", _glm4_moe, is_partial=True),
    "minimax-m2": Architecture("minimax_m2", _minimax_m2, is_partial=True),
    "qwen35": Architecture("qwen3_5_text", _qwen35, _DELTA_NAMES, _DELTA_CHANGES, is_partial=True),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        _qwen35_moe,
        {**_DELTA_NAMES, **_SHARED_EXPERT_NAMES},
        _DELTA_CHANGES,
        is_partial=True,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        _qwen35_moe,
        _QWEN3_NEXT_NAMES,
        _QWEN3_NEXT_CHANGES,
        joined=frozenset({"linear_attn.in_proj_qkvz.weight"}),
        is_partial=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _gpt_oss,
        _GPT_OSS_NAMES,
        _GPT_OSS_CHANGES,
        joined=frozenset({"mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"}),
    ),
}
