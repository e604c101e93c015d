"""What the native decoder needs to know about a model: the shapes and the variant of each step of its forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import Repr
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
QKNorm = Literal[None, "head", "heads_own", "all"]


class UnsupportedConfig(ValueError):  # noqa: N818  not an error of the user: another decoder may support the config
    """The native decoder does not support a model's config. `field` is the key in config.json, `value` what it holds."""

    def __init__(self, field: str, value: object) -> None:
        shown = Repr()
        shown.maxstring = shown.maxother = 40
        super().__init__(f"the native decoder does not support {field} = {shown.repr(value)}")
        self.field = field
        self.value = value


@dataclass(frozen=True, slots=True)
class Rotary:
    """One set of rotary frequencies (RoPE). A position's angles are the position times `inverse_frequencies` [R / 2], in float32.

    cos and sin of the angles are multiplied by `factor`. LongRoPE models have a second set of frequencies,
    `long_inverse_frequencies`, for runs longer than `long_boundary` tokens. Both are None for other models.
    """

    inverse_frequencies: tuple[float, ...]
    factor: float = 1.0
    long_inverse_frequencies: tuple[float, ...] | None = None
    long_boundary: int | None = None


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What may differ between the layers of a model.

    `window` is the sliding window in tokens: a query sees the keys with 0 <= its position - the key's position < `window`. None:
    it sees all earlier keys. `rotary` is a key of `Architecture.rotary`; None: the layer has no rotary embedding.
    """

    window: int | None = None
    rotary: str | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer as its config.json describes it.

    `max_position_embeddings` is the longest context in tokens (with dynamic RoPE the length from which on the frequencies would
    change). `dtype` is the weights' dtype by name, None if the config is silent. `default_eos` is the config's end-of-sequence
    id or ids; where config.json is silent, the family's default.

    Rotary: the first `rotary_size` numbers of each head are rotated, in pairs (i, i + rotary_size / 2), or in pairs
    (2i, 2i + 1) with `interleaved_rotary`. cos and sin are rounded to the model's dtype unless `rotary_in_float32`.

    Norms: `pre_norms` are applied to the input of attention and MLP, `post_norms` to their outputs before these are added to the
    residual. The norm multiplies by its weight plus `norm_weight_offset`. With `parallel`, attention and MLP read the same normed
    input. `qk_norm` says how queries and keys are normed before the rotary embedding: "head" is RMSNorm over a head with one
    weight [head_size], "heads_own" is LayerNorm without bias over a head with a weight [heads, head_size], "all" is RMSNorm over
    all heads together.

    Scales: `attention_scale` multiplies the products of queries and keys; `score_cap` c replaces them by c tanh(score / c), and
    `logit_cap` does so with the logits, after these were multiplied by `logit_scale`. `embedding_scale` multiplies the
    embeddings, rounded to the model's dtype first; `residual_scale` multiplies the outputs of attention and MLP.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str | None
    layers: tuple[LayerKind, ...]
    rotary: Mapping[str, Rotary]
    rotary_size: int
    norm_eps: float
    attention_scale: float
    tied: bool
    default_eos: int | list[int] | None
    activation: Activation = "silu"
    interleaved_rotary: bool = False
    rotary_in_float32: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_has_bias: bool = False
    norm_weight_offset: float = 0.0
    pre_norms: bool = True
    post_norms: bool = False
    parallel: bool = False
    qk_norm: QKNorm = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    score_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
