"""The families of models that the native decoder runs: their defaults, and how each differs from Llama.

To add a family, add an entry to `FAMILIES` and a function. A field that nothing reads makes a config unsupported, unless it is
known to be irrelevant (`fields.IRRELEVANT`) or the function ignores it explicitly. Other tensor names are in `tensor_names`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from specgen.engine.native.description import Architecture, LayerKind
from specgen.engine.native.fields import Fields
from specgen.engine.native.rope_settings import ALL_LAYERS, FULL, SLIDING, RotaryDefaults

_LAYER_TYPES = {"full_attention": False, "attention": False, "sliding_attention": True}  # has the layer a sliding window?


def _llama(fields: Fields, plain: Architecture) -> Architecture:
    bias = fields.flag("attention_bias", False)
    return replace(plain, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


def _mistral(fields: Fields, plain: Architecture) -> Architecture:
    return _with_windows(fields, plain, [True] * len(plain.layers), fields.optional_integer("sliding_window", 4096))


def _qwen2(fields: Fields, plain: Architecture) -> Architecture:
    window = fields.optional_integer("sliding_window", 4096)
    window = window if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28, minimum=0)
    default = [window is not None and index >= first for index in range(len(plain.layers))]
    windowed = _with_windows(fields, plain, _layer_types(fields, default), window, required=True)
    return replace(windowed, qkv_bias=True)


def _qwen3(fields: Fields, plain: Architecture) -> Architecture:
    bias = fields.flag("attention_bias", False)
    return replace(_qwen2(fields, plain), qk_norm="head", qkv_bias=bias, output_bias=bias)


def _phi3(fields: Fields, plain: Architecture) -> Architecture:
    fields.ignore("full_attn_mod", "interpolate_factor")  # written by Phi-4-mini
    return _with_windows(fields, plain, [True] * len(plain.layers), fields.optional_integer("sliding_window"))


def _gemma(fields: Fields, plain: Architecture) -> Architecture:
    fields.ignore("hidden_activation")  # transformers reads hidden_act
    activation = "gelu_tanh" if plain.activation == "gelu" else plain.activation  # old files mean the approximation
    return replace(_gemma_base(fields, plain), activation=activation)


def _gemma2(fields: Fields, plain: Architecture) -> Architecture:
    fields.ignore("hidden_act", "sliding_window_size")
    window = fields.optional_integer("sliding_window", 4096)
    types = _layer_types(fields, [index % 2 == 0 for index in range(len(plain.layers))])
    return replace(
        _with_windows(fields, _gemma_base(fields, plain), types, window, required=True),
        post_norms=True,
        attention_scale=fields.positive("query_pre_attn_scalar", 256) ** -0.5,
        score_cap=fields.optional_positive("attn_logit_softcapping", 50.0),
        logit_cap=fields.optional_positive("final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields, plain: Architecture) -> Architecture:
    fields.ignore("hidden_act", "_sliding_window_pattern", "attn_logit_softcapping")
    window = fields.optional_integer("sliding_window", 4096)
    pattern = fields.integer("sliding_window_pattern", 6)
    types = _layer_types(fields, [(index + 1) % pattern != 0 for index in range(len(plain.layers))])
    windowed = _with_windows(fields, _gemma_base(fields, plain), types, window, required=True)
    return replace(
        windowed,
        layers=tuple(LayerKind(layer.window, SLIDING if layer.window else FULL) for layer in windowed.layers),
        post_norms=True,
        qk_norm="head",
        attention_scale=fields.positive("query_pre_attn_scalar", 256) ** -0.5,
        logit_cap=fields.optional_positive("final_logit_softcapping"),
    )


def _gemma_base(fields: Fields, plain: Architecture) -> Architecture:
    bias = fields.flag("attention_bias", False)
    return replace(plain, qkv_bias=bias, output_bias=bias, norm_weight_offset=1.0, embedding_scale=plain.hidden_size**0.5)


def _olmo2(fields: Fields, plain: Architecture) -> Architecture:
    bias = fields.flag("attention_bias", False)
    return replace(
        plain, qkv_bias=bias, output_bias=bias, pre_norms=False, post_norms=True, qk_norm="all", rotary_in_float32=True
    )


def _smollm3(fields: Fields, plain: Architecture) -> Architecture:
    fields.ignore("max_window_layers")
    count = len(plain.layers)
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.raw("no_rope_layers")  # despite its name: 1 means with rotary embedding
    if rotated is None:
        rotated = [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(rotated, list) or len(rotated) < count or not all(isinstance(entry, int) for entry in rotated):
        raise fields.refuse("no_rope_layers")
    window = fields.optional_integer("sliding_window")
    use_window = fields.flag("use_sliding_window", False) and window is not None
    types = _layer_types(fields, [use_window and not rotated[index] for index in range(count)])
    windowed = _with_windows(fields, _llama(fields, plain), types, window, required=True)
    layers = zip(windowed.layers, rotated[:count], strict=True)
    return replace(windowed, layers=tuple(LayerKind(layer.window, ALL_LAYERS if rotary else None) for layer, rotary in layers))


def _granite(fields: Fields, plain: Architecture) -> Architecture:
    return replace(
        _llama(fields, plain),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.positive("logits_scaling", 1.0),
    )


def _starcoder2(fields: Fields, plain: Architecture) -> Architecture:
    fields.ignore("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "mlp_type", "norm_type")
    fields.ignore("scale_attention_softmax_in_fp32", "scale_attn_weights")
    bias = fields.flag("use_bias", True)
    windowed = _with_windows(fields, plain, [True] * len(plain.layers), fields.optional_integer("sliding_window"))
    return replace(windowed, norm="layer", norm_has_bias=True, gated_mlp=False, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def _stablelm(fields: Fields, plain: Architecture) -> Architecture:
    if plain.num_heads * plain.head_size != plain.hidden_size:
        raise fields.refuse("head_dim" if "head_dim" in fields else "num_attention_heads")
    return replace(
        plain,
        norm="layer",
        norm_has_bias=True,
        parallel=fields.flag("use_parallel_residual", False),
        qk_norm="heads_own" if fields.flag("qk_layernorm", False) else None,
        qkv_bias=fields.flag("use_qkv_bias", False),
    )


def _cohere(fields: Fields, plain: Architecture) -> Architecture:
    bias = fields.flag("attention_bias", False)
    return replace(
        plain,
        norm="layer",
        parallel=True,
        qk_norm="heads_own" if fields.flag("use_qk_norm", False) else None,
        qkv_bias=bias,
        output_bias=bias,
        interleaved_rotary=True,
        logit_scale=fields.number("logit_scale", 0.0625),
    )


def _layer_types(fields: Fields, default: Sequence[bool]) -> Sequence[bool]:
    """Returns for each layer whether it has a sliding window: what `layer_types` says, else `default`."""
    types = fields.raw("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != len(default):
        raise fields.refuse("layer_types")
    if not all(isinstance(name, str) and name in _LAYER_TYPES for name in types):
        raise fields.refuse("layer_types")
    return [_LAYER_TYPES[name] for name in types]


def _with_windows(
    fields: Fields, plain: Architecture, sliding: Iterable[bool], window: int | None, *, required: bool = False
) -> Architecture:
    """Returns `plain` with a window of `window` tokens in each layer for which `sliding` is true.

    With `required`, such layers must not be without a window; otherwise None means that they see all tokens.
    """
    sliding = list(sliding)
    if required and window is None and any(sliding):
        raise fields.refuse("sliding_window")
    kinds = zip(plain.layers, sliding, strict=True)
    return replace(plain, layers=tuple(LayerKind(window if slides else None, kind.rotary) for kind, slides in kinds))


class Sizes(NamedTuple):
    """A family's sizes where config.json is silent. `kv_heads` None: as many as heads; `head_size` None: hidden size / heads."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int | None
    head_size: int | None
    positions: int


@dataclass(frozen=True, slots=True)
class Family:
    """A family's defaults where config.json is silent, and the function that describes how it differs from a plain Llama.

    `describe` is called with the fields and the architecture of a Llama without biases, and returns the model's own. `eos` is the
    end-of-sequence id. `eps` and `activation` give a field's name and its default.
    """

    describe: Callable[[Fields, Architecture], Architecture]
    sizes: Sizes
    eos: int | None
    tied: bool = False
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6)
    activation: tuple[str, str] = ("hidden_act", "silu")
    rotary: RotaryDefaults = field(default_factory=RotaryDefaults)


_TANH = "gelu_pytorch_tanh"
_PHI3_ROPE = RotaryDefaults(
    partial=1.0,
    original=4096,
    aliases={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
)
_GEMMA3_ROPE = RotaryDefaults(1_000_000.0, local_theta=10_000.0)
_LAYER_NORM_EPS = ("layer_norm_eps", 1e-5)

FAMILIES = {
    "llama": Family(_llama, Sizes(32_000, 4096, 11_008, 32, 32, None, None, 2048), 2),
    "mistral": Family(_mistral, Sizes(32_000, 4096, 14_336, 32, 32, 8, None, 131_072), 2),
    "qwen2": Family(_qwen2, Sizes(151_936, 4096, 22_016, 32, 32, 32, None, 32_768), None),
    "qwen3": Family(_qwen3, Sizes(151_936, 4096, 22_016, 32, 32, 32, 128, 32_768), None),
    "phi3": Family(
        _phi3, Sizes(32_064, 3072, 8192, 32, 32, None, None, 4096), 32_000, eps=("rms_norm_eps", 1e-5), rotary=_PHI3_ROPE
    ),
    "gemma": Family(_gemma, Sizes(256_000, 3072, 24_576, 28, 16, 16, 256, 8192), 1, tied=True, activation=("hidden_act", _TANH)),
    "gemma2": Family(
        _gemma2, Sizes(256_000, 2304, 9216, 26, 8, 4, 256, 8192), 1, tied=True, activation=("hidden_activation", _TANH)
    ),
    "gemma3_text": Family(
        _gemma3,
        Sizes(262_208, 2304, 9216, 26, 8, 4, 256, 131_072),
        1,
        tied=True,
        activation=("hidden_activation", _TANH),
        rotary=_GEMMA3_ROPE,
    ),
    "olmo2": Family(_olmo2, Sizes(50_304, 4096, 11_008, 32, 32, None, None, 2048), 50_279, eps=("rms_norm_eps", 1e-5)),
    "smollm3": Family(
        _smollm3, Sizes(128_256, 2048, 11_008, 36, 16, 4, None, 32_768), 128_001, tied=True, rotary=RotaryDefaults(2_000_000.0)
    ),
    "granite": Family(_granite, Sizes(32_000, 4096, 11_008, 32, 32, None, None, 2048), 2),
    "starcoder2": Family(
        _starcoder2,
        Sizes(49_152, 3072, 12_288, 30, 24, 2, None, 4096),
        50_256,
        tied=True,
        eps=("norm_epsilon", 1e-5),
        activation=("hidden_act", _TANH),
    ),
    "stablelm": Family(
        _stablelm,
        Sizes(50_304, 2560, 6912, 32, 32, 32, None, 4096),
        0,
        eps=_LAYER_NORM_EPS,
        rotary=RotaryDefaults(partial=0.25),
    ),
    "cohere": Family(
        _cohere,
        Sizes(256_000, 8192, 22_528, 40, 64, None, None, 8192),
        255_001,
        tied=True,
        eps=_LAYER_NORM_EPS,
        rotary=RotaryDefaults(500_000.0),
    ),
}
