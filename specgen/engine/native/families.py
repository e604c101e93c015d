"""The families of models that the native decoder runs, and how the config.json of each differs from
Llama's.

To add a family, add an entry to `FAMILIES`, and a function if its config.json differs from that of
a family that is there. Then tests/native_models.py needs variants of it, README.md its name, and
`engine/gguf/architectures.py` an entry if llama.cpp has it; see `.github/CONTRIBUTING.md`.

A field that nothing reads makes a config unsupported, unless it is known to be irrelevant
(`architecture.IRRELEVANT`) or the function ignores it explicitly. Tensors have the names that the
blocks of a layer (`attention`, `recurrence`, `mlp`, `experts`) give them, after a family's own
`names` were replaced. `config_reading` reads the fields that all families have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from specgen.engine.native.architecture import Changes, Fields, LayerKind, Mixer, Mixture, Recurrent
from specgen.engine.native.rotary import ALL_LAYERS, FULL, SLIDING, RotaryDefaults, read_rotary

_ALIGNMENT = 8  # elements: 16 bytes in 16-bit dtypes


def _biases(fields: Fields) -> Changes:
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias}


def _llama(fields: Fields, plain: Changes) -> Changes:
    return {**_biases(fields), "mlp_bias": fields.flag("mlp_bias", False)}


def _mistral(fields: Fields, plain: Changes) -> Changes:
    return fields.windows(
        plain["layers"],
        [True] * plain["num_layers"],
        fields.optional(fields.integer, "sliding_window", 4096),
    )


def _qwen2(fields: Fields, plain: Changes) -> Changes:
    window = fields.optional(fields.integer, "sliding_window", 4096)
    window = window if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28, minimum=0)
    default = [window is not None and index >= first for index in range(plain["num_layers"])]
    return {
        **fields.windows(plain["layers"], fields.sliding_layers(default), window, strict=True),
        "qkv_bias": True,
    }


def _mimo(fields: Fields, plain: Changes) -> Changes:
    fields.ignore("auto_map", "attention_bias")  # its own code computes what Qwen2's does
    return _qwen2(fields, plain)


def _qwen3(fields: Fields, plain: Changes) -> Changes:
    return {**_qwen2(fields, plain), **_biases(fields), "qk_norm": "head"}


def _phi3(fields: Fields, plain: Changes) -> Changes:
    fields.ignore("full_attn_mod", "interpolate_factor")  # written by Phi-4-mini
    window = fields.optional(fields.integer, "sliding_window")
    windows = fields.windows(plain["layers"], [True] * plain["num_layers"], window)
    return {**windows, "fused_projections": True}


def _gemma(fields: Fields, plain: Changes) -> Changes:
    fields.ignore("hidden_activation")  # transformers reads hidden_act
    # old files mean the approximation
    activation = "gelu_tanh" if plain["activation"] == "gelu" else plain["activation"]
    return {**_gemma_base(fields, plain), "activation": activation}


def _gemma2(fields: Fields, plain: Changes) -> Changes:
    fields.ignore("hidden_act", "sliding_window_size")
    types = fields.sliding_layers([index % 2 == 0 for index in range(plain["num_layers"])])
    return {
        **_late_gemma(fields, plain, types, final_cap=30.0),
        "score_cap": fields.optional(fields.positive, "attn_logit_softcapping", 50.0),
    }


def _gemma3(fields: Fields, plain: Changes) -> Changes:
    fields.ignore("hidden_act", "_sliding_window_pattern", "attn_logit_softcapping")
    pattern = fields.integer("sliding_window_pattern", 6)
    types = fields.sliding_layers(
        [(index + 1) % pattern != 0 for index in range(plain["num_layers"])]
    )
    changes = _late_gemma(fields, plain, types, final_cap=None)
    layers = tuple(
        replace(layer, rotary=SLIDING if layer.window else FULL) for layer in changes["layers"]
    )
    return {**changes, "layers": layers, "qk_norm": "head"}


def _gemma4(fields: Fields, plain: Changes) -> Changes:
    if fields.raw("use_bidirectional_attention") == "all":  # "vision" concerns pictures
        raise fields.refuse("use_bidirectional_attention")
    layers = _gemma4_layers(fields, plain)
    per_layer = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    fields.integer(
        "vocab_size_per_layer_input", 262_144, minimum=plain["vocab_size"] if per_layer else 0
    )
    changes = {
        **_biases(fields),
        **layers,
        "post_norms": True,
        "qk_norm": "values",
        "attention_scale": 1.0,
        "embedding_scale": plain["hidden_size"] ** 0.5,
        "logit_cap": fields.optional(fields.positive, "final_logit_softcapping"),
        "shared_projection": fields.flag("attention_k_eq_v", False),
        "layer_scalars": True,
        "per_layer_size": per_layer,
    }
    return {**changes, **_gemma4_experts(fields, {**plain, **changes})}


def _gemma4_layers(fields: Fields, plain: Changes) -> Changes:
    """Returns the kinds of Gemma 4's layers, and their rotary embedding. The last layers have no
    keys of their own, and perhaps wider MLPs."""
    types = [
        *fields.sliding_layers([(index + 1) % 6 != 0 for index in range(plain["num_layers"])])[:-1],
        False,
    ]
    kv_heads, size = _full_layers(fields, plain, types)
    full = LayerKind(None, FULL, kv_heads=kv_heads, head_size=size)
    sliding = LayerKind(fields.integer("sliding_window", 512), SLIDING)
    wide = 2 * plain["intermediate_size"] if fields.flag("use_double_wide_mlp", False) else None
    # the first layer that does
    sharing = len(types) - fields.integer("num_kv_shared_layers", 0, minimum=0)

    layers: list[LayerKind] = []
    last: dict[bool, int] = {}  # layers of each type that have keys and values
    elements = 0
    for index, slides in enumerate(types):
        kind = sliding if slides else full
        if index < sharing:
            last[slides] = index
            elements += (
                2 * plain["num_kv_heads"] * plain["head_size"] if slides else 2 * kv_heads * size
            )
        elif slides not in last:
            raise fields.refuse("num_kv_shared_layers")
        else:
            kind = replace(kind, owner=last[slides], inner=wide)
        layers.append(kind)

    rotary = read_rotary(fields, _GEMMA4_ROPE, size, plain["context_limit"])[0]
    return {
        "layers": tuple(layers),
        "kv_elements": elements,
        "rotary": {**plain["rotary"], FULL: rotary[FULL]},
    }


def _gemma4_experts(fields: Fields, plain: Changes) -> Changes:
    """Returns the mixtures of Gemma 4's layers; nothing for a dense model."""
    sizes = "num_experts", "top_k_experts", "moe_intermediate_size"
    fields.ignore(*sizes)
    if not fields.flag("enable_moe_block", False):
        return {}
    count, chosen, inner = map(fields.integer, sizes)
    mixture = Mixture(
        count,
        chosen,
        inner,
        layout="fused",
        shared_size=plain["intermediate_size"],
        own_norms=True,
    )
    return _experts(fields, plain, mixture)


def _full_layers(fields: Fields, plain: Changes, types: Sequence[bool]) -> tuple[int, int]:
    """Returns the number of key-value heads and the head size of Gemma 4's layers without a window
    (false in `types`).

    Files have them in fields of their own, or in `per_layer_config` for each of these layers.
    """
    given: Any = {"head_dim": fields.raw("global_head_dim", 512)}
    heads = fields.raw("num_global_key_value_heads")
    if fields.flag("attention_k_eq_v", False):
        given["num_key_value_heads"] = heads
    if fields.section("per_layer_config") is not None:
        listed = fields.raw("per_layer_config")
        given = next(iter(listed.values()))
        full = {str(index) for index, slides in enumerate(types) if not slides}
        if {name.lstrip("0") or "0" for name in listed} != full or any(
            settings != given for settings in listed.values()
        ):
            raise fields.refuse("per_layer_config")
    section = Fields(given if isinstance(given, dict) else {"": given}, "per_layer_config.")
    size = section.integer("head_dim", plain["head_size"], maximum=1 << 16)
    kv_heads = section.optional(section.integer, "num_key_value_heads") or plain["num_kv_heads"]
    section.refuse_unknown()
    if plain["num_heads"] % kv_heads:
        raise fields.refuse("num_global_key_value_heads")
    return kv_heads, size


def _late_gemma(
    fields: Fields, plain: Changes, types: Sequence[bool], final_cap: float | None
) -> Changes:
    """Returns what Gemma 2 and 3 have in common; `types` says of each layer whether it has a
    sliding window."""
    window = fields.optional(fields.integer, "sliding_window", 4096)
    return {
        **_gemma_base(fields, plain),
        **fields.windows(plain["layers"], types, window, strict=True),
        "post_norms": True,
        "attention_scale": fields.positive("query_pre_attn_scalar", 256) ** -0.5,
        "logit_cap": fields.optional(fields.positive, "final_logit_softcapping", final_cap),
    }


def _gemma_base(fields: Fields, plain: Changes) -> Changes:
    return {
        **_biases(fields),
        "norm_weight_offset": 1.0,
        "embedding_scale": plain["hidden_size"] ** 0.5,
    }


def _olmo2(fields: Fields, plain: Changes) -> Changes:
    return {
        **_biases(fields),
        "pre_norms": False,
        "post_norms": True,
        "qk_norm": "all",
        "rotary_in_float32": True,
    }


def _smollm3(fields: Fields, plain: Changes) -> Changes:
    fields.ignore("max_window_layers")
    count = plain["num_layers"]
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.raw("no_rope_layers")  # despite its name: 1 means with rotary embedding
    if rotated is None:
        rotated = [(index + 1) % interval != 0 for index in range(count)]
    if (
        not isinstance(rotated, list)
        or len(rotated) < count
        or not all(isinstance(entry, int) for entry in rotated)
    ):
        raise fields.refuse("no_rope_layers")
    window = fields.optional(fields.integer, "sliding_window")
    use_window = fields.flag("use_sliding_window", False) and window is not None
    types = fields.sliding_layers([use_window and not rotated[index] for index in range(count)])
    layers = zip(
        fields.windows(plain["layers"], types, window, strict=True)["layers"],
        rotated[:count],
        strict=True,
    )
    kinds = tuple(replace(layer, rotary=ALL_LAYERS if rotary else None) for layer, rotary in layers)
    return {**_llama(fields, plain), "layers": kinds}


def _granite(fields: Fields, plain: Changes) -> Changes:
    return {
        **_llama(fields, plain),
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logit_scale": 1 / fields.positive("logits_scaling", 1.0),
    }


def _qwen3_5(fields: Fields, plain: Changes) -> Changes:
    return {**_gated(fields, plain), **_delta_rule(fields, plain)}


def _qwen3_5_moe(fields: Fields, plain: Changes, *, by_head: bool = False) -> Changes:
    mixed = _delta_rule(fields, plain, by_head=by_head)
    return {**mixed, **_gated_experts(fields, {**plain, **mixed})}


def _delta_rule(fields: Fields, plain: Changes, *, by_head: bool = False) -> Changes:
    """Returns the mixers of the layers of Qwen3-Next and Qwen3.5."""
    interval = fields.integer("full_attention_interval", 4)
    default = [
        "linear_attention" if (index + 1) % interval else FULL
        for index in range(plain["num_layers"])
    ]
    recurrent = Recurrent(
        kernel_size=fields.integer("linear_conv_kernel_dim", 4),
        key_heads=fields.integer("linear_num_key_heads", 16),
        value_heads=fields.integer("linear_num_value_heads", 32),
        key_size=fields.integer("linear_key_head_dim", 128),
        value_size=fields.integer("linear_value_head_dim", 128),
        by_head=by_head,
    )
    if recurrent.value_heads % recurrent.key_heads:
        raise fields.refuse("linear_num_key_heads")
    return {
        **_mixers(fields, plain, default, {"linear_attention": "delta"}),
        "recurrent": recurrent,
    }


def _lfm2(fields: Fields, plain: Changes) -> Changes:
    size = fields.integer("block_ff_dim", plain["intermediate_size"])
    factor = fields.number("block_ffn_dim_multiplier", 1.0)
    multiple = fields.integer("block_multiple_of", 256)
    if fields.flag("block_auto_adjust_ff_dim", True):
        size = -(-int(factor * int(2 * size / 3)) // multiple) * multiple
    return {**_short_convolutions(fields, plain), "intermediate_size": size}


def _lfm2_moe(fields: Fields, plain: Changes) -> Changes:
    mixed = _short_convolutions(fields, plain)
    mixture = Mixture(
        fields.integer("num_experts"),
        fields.integer("num_experts_per_tok"),
        fields.integer("moe_intermediate_size"),
        "sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        epsilon=1e-6,
        scale=fields.positive("routed_scaling_factor", 1.0),
        choice_bias=fields.flag("use_expert_bias", True),
    )
    dense = range(fields.integer("num_dense_layers", 2, minimum=0))
    return {**mixed, **_experts(fields, {**plain, **mixed}, mixture, dense)}


def _short_convolutions(fields: Fields, plain: Changes) -> Changes:
    """Returns what LFM2's dense models and its mixtures have in common."""
    full = fields.raw("full_attn_idxs")
    default = [
        FULL if full is None or index in full else "conv" for index in range(plain["num_layers"])
    ]
    return {
        **_mixers(fields, plain, default, {"conv": "conv"}),
        "recurrent": Recurrent(
            fields.integer("conv_L_cache", 3), bias=fields.flag("conv_bias", False)
        ),
        "norm_eps": fields.positive("norm_eps", 1e-5),
        "tied": fields.flag("tie_embedding", plain["tied"]),
        "qk_norm": "head",
    }


def _mixers(
    fields: Fields, plain: Changes, default: Sequence[str], recurrent: Mapping[str, Mixer]
) -> Changes:
    """Returns the kinds of the layers, by `layer_types` or by `default`. `recurrent` has the mixers
    of other types than FULL."""
    types = fields.raw("layer_types") or default
    if len(types) != len(default) or not all(name == FULL or name in recurrent for name in types):
        raise fields.refuse("layer_types")
    layers = [
        LayerKind(None, ALL_LAYERS) if name == FULL else LayerKind(mixer=recurrent[name])
        for name in types
    ]
    per_layer = 2 * plain["num_kv_heads"] * plain["head_size"]
    return {
        "layers": tuple(layers),
        "kv_elements": per_layer * sum(kind.mixer == "attention" for kind in layers),
    }


def _experts(
    fields: Fields, plain: Changes, mixture: Mixture, dense: Collection[int] = ()
) -> Changes:
    """Returns the mixture and the kinds of the layers, which all have experts but the `dense`
    ones."""
    if mixture.per_token > mixture.count:
        raise fields.refuse("num_experts_per_tok")
    # what torch's products of experts need
    if plain["hidden_size"] % _ALIGNMENT or mixture.size % _ALIGNMENT:
        raise fields.refuse("hidden_size")
    of_experts = (
        replace(kind, mlp="dense" if index in dense else "experts")
        for index, kind in enumerate(plain["layers"])
    )
    return {"mixture": mixture, "layers": tuple(of_experts)}


def _qwen3_moe(fields: Fields, plain: Changes) -> Changes:
    fields.ignore("max_window_layers")
    window = fields.optional(fields.integer, "sliding_window", 4096)
    if not fields.flag("use_sliding_window", False):
        window = None
    mixture = Mixture(
        fields.expert_count(128),
        fields.integer("num_experts_per_tok", 8),
        fields.integer("moe_intermediate_size"),
        normalised=fields.flag("norm_topk_prob", False),
    )
    plain = {**plain, "layers": tuple(replace(kind, window=window) for kind in plain["layers"])}
    return {
        **_biases(fields),
        "qk_norm": "head",
        **_experts(fields, plain, mixture, _dense_layers(fields, plain)),
    }


def _dense_layers(fields: Fields, plain: Changes) -> Collection[int]:
    """Returns the layers without experts (Qwen)."""
    listed = fields.raw("mlp_only_layers") or []
    step = fields.integer("decoder_sparse_step", 1)
    if not isinstance(listed, list) or not all(isinstance(index, int) for index in listed):
        raise fields.refuse("mlp_only_layers")
    return {*listed, *(index for index in range(plain["num_layers"]) if (index + 1) % step)}


def _gated(fields: Fields, plain: Changes) -> Changes:
    """Returns what the layers with attention of Qwen3-Next and Qwen3.5 have in common."""
    fields.ignore("full_attention_interval", "mamba_ssm_dtype", "linear_conv_kernel_dim")
    fields.ignore(
        *(
            f"linear_{name}"
            for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        )
    )
    if not fields.flag("attn_output_gate", True):
        raise fields.refuse("attn_output_gate")
    return {
        **_biases(fields),
        "qk_norm": "head",
        "norm_weight_offset": 1.0,
        "gated_attention": True,
    }


def _gated_experts(fields: Fields, plain: Changes) -> Changes:
    mixture = Mixture(
        fields.integer("num_experts"),
        fields.integer("num_experts_per_tok"),
        fields.integer("moe_intermediate_size"),
        normalised=fields.flag("norm_topk_prob", True),
        shared_size=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return {
        **_gated(fields, plain),
        **_experts(fields, plain, mixture, _dense_layers(fields, plain)),
    }


def _olmoe(fields: Fields, plain: Changes) -> Changes:
    if fields.raw("clip_qkv") is not None:
        raise fields.refuse("clip_qkv")
    mixture = Mixture(
        fields.expert_count(64),
        fields.integer("num_experts_per_tok", 8),
        plain["intermediate_size"],
        normalised=fields.flag("norm_topk_prob", False),
    )
    return {**_biases(fields), "qk_norm": "all", **_experts(fields, plain, mixture)}


def _glm4_moe(fields: Fields, plain: Changes) -> Changes:
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
    size = fields.integer("moe_intermediate_size")
    mixture = Mixture(
        fields.integer("n_routed_experts", 128),
        fields.integer("num_experts_per_tok", 8),
        size,
        "sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        epsilon=1e-20,
        scale=fields.positive("routed_scaling_factor", 1.0),
        choice_bias=True,
        groups=fields.integer("n_group", 1),
        chosen_groups=fields.integer("topk_group", 1),
        shared_size=size * fields.integer("n_shared_experts", 1),
    )
    if mixture.count % mixture.groups or mixture.count < 2 * mixture.groups:
        raise fields.refuse("n_group")
    if mixture.chosen_groups > mixture.groups:
        raise fields.refuse("topk_group")
    dense = range(fields.integer("first_k_dense_replace", 1, minimum=0))
    changes = {
        "qkv_bias": fields.flag("attention_bias", False),
        **_experts(fields, plain, mixture, dense),
    }
    return {**changes, "qk_norm": "head" if fields.flag("use_qk_norm", False) else None}


def _minimax_m2(fields: Fields, plain: Changes) -> Changes:
    mixture = Mixture(
        fields.expert_count(256),
        fields.integer("num_experts_per_tok", 8),
        plain["intermediate_size"],
        "sigmoid",
        choice_bias=True,
    )
    return {"qk_norm": "all", **_experts(fields, plain, mixture)}


def _gpt_oss(fields: Fields, plain: Changes) -> Changes:
    bias = fields.flag("attention_bias", True)
    types = fields.sliding_layers([index % 2 == 0 for index in range(plain["num_layers"])])
    window = fields.optional(fields.integer, "sliding_window", 128)
    mixture = Mixture(
        fields.expert_count(128),
        fields.integer("num_experts_per_tok", 4),
        plain["intermediate_size"],
        "logits",
        layout="interleaved",
        alpha=fields.positive("swiglu_alpha", 1.702),
        limit=fields.positive("swiglu_limit", 7.0),
    )
    windowed = {**plain, **fields.windows(plain["layers"], types, window, strict=True)}
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "sinks": True,
        **_experts(fields, windowed, mixture),
    }


@dataclass(frozen=True, slots=True)
class Family:
    """A family's defaults where config.json is silent, and the function that describes how it
    differs from a plain Llama.

    `describe` is called with the fields and with the `Architecture` arguments of a Llama without
    biases, and returns those that are different. `eos` is the end-of-sequence id. `required` are
    fields, besides the sizes, that have to be in config.json: transformers' defaults for them are
    those of one particular model. `tied`: the LM head's weights are the embedding's. `eps` is that
    of the norms. `activation` is a pair: the name of the field, and its default. `inner` is the
    width of MLPs; None: config.json has to state it. `names` maps names in the family's files, in
    any order, to a Llama's where these differ (see `weights.renamed`).
    """

    describe: Callable[[Fields, Changes], Changes]
    eos: int | None
    required: tuple[str, ...] = ("num_key_value_heads",)
    tied: bool = False
    eps: float = 1e-6
    activation: tuple[str, str] = ("hidden_act", "silu")
    rotary: RotaryDefaults = field(default_factory=RotaryDefaults)
    inner: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)


# the gate, the up and the down projection
_NUMBERED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_MINIMAX_NAMES = {
    "block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    "block_sparse_moe": "mlp",
    **_NUMBERED,
}
_LFM2_NAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "embedding_norm": "norm",
    "feed_forward": "mlp",
    "expert_bias": "gate.e_score_correction_bias",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    **_NUMBERED,
}
_HEADS = ("num_key_value_heads", "head_dim")
# of pictures: a text's three positions are the same
_MROPE = ("mrope_section", "mrope_interleaved")
_GATED_ROPE = RotaryDefaults(partial=0.25, ignored=_MROPE)
_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_MIXTURE = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_EXPERTS = ("num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size")
_PHI3_TYPES = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
_PHI3_ROPE = RotaryDefaults(partial=1.0, original=4096, aliases=_PHI3_TYPES)
_GEMMA3_ROPE = RotaryDefaults(1_000_000.0, local_theta=10_000.0)
_GEMMA4_FULL = {
    "rope_type": "proportional",
    "partial_rotary_factor": 0.25,
    "rope_theta": 1_000_000.0,
}
_GEMMA4_TYPES = {"default": "default", "proportional": "proportional"}
_GEMMA4_ROPE = RotaryDefaults(
    1_000_000.0, local_theta=10_000.0, aliases=_GEMMA4_TYPES, settings={FULL: _GEMMA4_FULL}
)
_GEMMA_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")

FAMILIES = {
    "llama": Family(_llama, 2, ()),
    "mistral": Family(_mistral, 2),
    "qwen2": Family(_qwen2, None),
    "mimo": Family(_mimo, None),
    "qwen3": Family(_qwen3, None, _HEADS),
    "phi3": Family(_phi3, 32_000, (), eps=1e-5, rotary=_PHI3_ROPE),
    "gemma": Family(_gemma, 1, _HEADS, tied=True, activation=("hidden_act", "gelu_pytorch_tanh")),
    "gemma2": Family(_gemma2, 1, _HEADS, tied=True, activation=_GEMMA_ACTIVATION),
    "gemma3_text": Family(
        _gemma3, 1, _HEADS, tied=True, activation=_GEMMA_ACTIVATION, rotary=_GEMMA3_ROPE
    ),
    "gemma4_text": Family(
        _gemma4, 1, _HEADS, tied=True, activation=_GEMMA_ACTIVATION, rotary=_GEMMA4_ROPE
    ),
    "olmo2": Family(_olmo2, 50_279, (), eps=1e-5),
    "smollm3": Family(_smollm3, 128_001, tied=True, rotary=RotaryDefaults(2_000_000.0)),
    "granite": Family(_granite, 2, ()),
    "qwen3_moe": Family(_qwen3_moe, None, _EXPERTS),
    "olmoe": Family(_olmoe, 50_279, (), eps=1e-5),
    "glm4_moe": Family(
        _glm4_moe, None, ("head_dim", *_EXPERTS), eps=1e-5, rotary=RotaryDefaults(partial=0.5)
    ),
    "qwen3_5_text": Family(_qwen3_5, None, _HEADS, rotary=_GATED_ROPE),
    "qwen3_5_moe_text": Family(
        _qwen3_5_moe, None, (*_HEADS, *_MIXTURE), rotary=_GATED_ROPE, inner=512
    ),
    "qwen3_next": Family(
        partial(_qwen3_5_moe, by_head=True), None, (*_HEADS, *_MIXTURE), rotary=_GATED_ROPE
    ),
    "lfm2": Family(_lfm2, 2, tied=True, rotary=RotaryDefaults(1_000_000.0), names=_LFM2_NAMES),
    "lfm2_moe": Family(
        _lfm2_moe,
        2,
        ("num_experts", *_EXPERTS),
        tied=True,
        rotary=RotaryDefaults(1_000_000.0),
        names=_LFM2_NAMES,
    ),
    "minimax_m2": Family(
        _minimax_m2,
        200_020,
        _HEADS,
        rotary=RotaryDefaults(5_000_000.0, partial=1.0),
        names=_MINIMAX_NAMES,
    ),
    "gpt_oss": Family(
        _gpt_oss, None, _HEADS, eps=1e-5, rotary=RotaryDefaults(150_000.0, settings=_OSS_ROPE)
    ),
}


def tensor_names(model_type: str) -> Mapping[str, str]:
    """Returns `Family.names` of the family `model_type`; empty for a family that the native decoder
    does not have."""
    family = FAMILIES.get(model_type)
    return {} if family is None else family.names
