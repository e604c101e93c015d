"""What the native decoder needs to know about a model: the sizes, and the variant of each step of
its forward pass.

`families` reads this from config.json, by `Fields`, which notice fields that nobody has read, so
that none that matters is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import Repr
from typing import Any, Literal, TypeVar

from specgen.engine.model import ModelShape

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
QKNorm = Literal[None, "head", "all", "values"]
Mixer = Literal["attention", "delta", "conv"]
MLP = Literal["dense", "experts"]
Scores = Literal["softmax", "sigmoid", "logits"]
ExpertLayout = Literal["separate", "fused", "interleaved"]
T = TypeVar("T", int, float)
# fields of an `Architecture` that differ from those of a Llama without biases
Changes = dict[str, Any]
_SLIDING_TYPE = "sliding_attention"
_LAYER_TYPES = ("full_attention", "attention", _SLIDING_TYPE)


_IRRELEVANT = """
    model_type architectures transformers_version torch_dtype dtype name_or_path
    use_cache cache_implementation attn_implementation
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
    use_return_dict torchscript
    use_bfloat16 tf_legacy_loss chunk_size_feed_forward pretraining_tp is_decoder
    gradient_checkpointing
    initializer_range attention_dropout hidden_dropout residual_dropout embedding_dropout
    resid_pdrop embd_pdrop
    classifier_dropout id2label label2id num_labels problem_type finetuning_task
    task_specific_params prefix tokenizer_class
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id
    decoder_start_token_id
    model_max_length max_sequence_length max_length min_length max_new_tokens min_new_tokens
    do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p epsilon_cutoff
    eta_cutoff repetition_penalty
    encoder_repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens renormalize_logits sequence_bias guidance_scale
    num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind
    target_lookbehind
    output_router_logits router_aux_loss_coef router_jitter_noise
    unsloth_version unsloth_fixed transformers.js_config is_llama_config
    pard_token spd_type
    num_nextn_predict_layers num_mtp_layers mtp_layer_types mtp_num_hidden_layers
    mtp_use_dedicated_embeddings
    """
_OPTIONAL_FEATURES = """
    is_encoder_decoder add_cross_attention tie_encoder_decoder pruned_heads
    use_bidirectional_attention use_mrope
    attention_bias mlp_bias lm_head_bias use_bias use_qkv_bias use_qk_norm qk_layernorm
    use_parallel_residual use_sliding_window
    rope_interleaved
    """

# Fields that do not change the logits of any family: they concern training, generation, other
# tasks, draft layers or the file.
IRRELEVANT = frozenset(_IRRELEVANT.split())

# Fields that switch something on which only some families have; switched off, they are harmless in
# all.
OPTIONAL_FEATURES = frozenset(_OPTIONAL_FEATURES.split())


class UnsupportedConfig(ValueError):  # noqa: N818  not an error of the user: another decoder may support the config
    """The native decoder does not support a model's config. `field` is the key in config.json,
    `value` what it holds."""

    def __init__(self, field: str, value: object) -> None:
        shown = Repr()
        shown.maxstring = shown.maxother = 40
        super().__init__(f"the native decoder does not support {field} = {shown.repr(value)}")
        self.field = field
        self.value = value


@dataclass(frozen=True, slots=True)
class Rotary:
    """One set of rotary frequencies (RoPE): a position's angles are the position times each of
    `inverse_frequencies`.

    There is one for each rotated pair of a head's elements, in float32. cos and sin of the angles
    are multiplied by `factor`. LongRoPE models have a second set of frequencies,
    `long_inverse_frequencies`, for runs longer than `long_boundary` tokens. Both are None for other
    models.
    """

    inverse_frequencies: tuple[float, ...]
    factor: float = 1.0
    long_inverse_frequencies: tuple[float, ...] | None = None
    long_boundary: int | None = None


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What may differ between the layers of a model.

    `window` is the sliding window in tokens: a query at position p sees the keys at positions p -
    `window` + 1 to p. None: it sees all keys up to p. `rotary` is a key of `Architecture.rotary`;
    None: the layer has no rotary embedding. `mixer` is how the layer mixes tokens, and `mlp` the
    kind of its MLP. Not `causal`: in a chain, the tokens of one pass see each other whatever their
    order is (block drafters), in a `window` up to position p + `window` - 1.

    `kv_heads`, `head_size` and `inner` (the width of the MLP) are the layer's sizes; None: those of
    the `Architecture`. `owner` is the index of the earlier layer whose keys and values the layer
    reads, as it has none of its own; None: it has its own.
    """

    window: int | None = None
    rotary: str | None = None
    mixer: Mixer = "attention"
    mlp: MLP = "dense"
    causal: bool = True
    kv_heads: int | None = None
    head_size: int | None = None
    inner: int | None = None
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The sizes of recurrent mixers: of a gated delta rule after a short convolution ("delta"), or
    of a short convolution alone ("conv").

    `kernel_size` is the number of tokens that the convolution reads, `bias` whether it and the
    projections have one. `by_head`: the files store what is projected for each key head and its
    value heads together (Qwen3-Next).
    """

    kernel_size: int
    key_heads: int = 0
    value_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    bias: bool = False
    by_head: bool = False

    @property
    def channels(self) -> int:
        """The channels of the delta rule's convolution: those of queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def projections(self) -> Mapping[str, int]:
        """How many rows each projection to the delta rule's queries, keys, values and output gates
        has, by the end of its name in the files."""
        values = self.value_heads * self.value_size
        if self.by_head:
            return {"_qkvz": self.channels + values}
        return {"_qkv": self.channels, "_z": values}

    @property
    def step_projections(self) -> Mapping[str, int]:
        """As `projections`, to its update gates and time steps."""
        if self.by_head:
            return {"_ba": 2 * self.value_heads}
        return {"_b": self.value_heads, "_a": self.value_heads}


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts in place of an MLP: `count` MLPs of inner width `size`, of which
    `per_token` run each token.

    A router gives a logit for each expert; `scores` says how scores are computed from the logits.
    The experts with the highest scores are chosen. With `choice_bias`, a learned bias is added to
    the scores, but only for this choice. Of `groups` groups of experts, only the `chosen_groups`
    with the largest sum of their two best scores take part. The outputs of the chosen experts are
    added up, weighted with their scores. If `normalised`, these are divided by their sum plus
    `epsilon`. If `scores` is "logits", the weights are the softmax of the chosen experts' logits
    instead. All weights are multiplied by `scale`.

    `shared_size` is the size of an additional MLP that runs all tokens, and whose output is added;
    0: there is none. With `shared_gate` its output is multiplied by the sigmoid of a gate.

    `layout` says how the files store the experts' matrices. "separate": each on its own. "fused":
    one tensor with the gate and up matrices of all experts [count, 2 size, width]. "interleaved"
    (gpt-oss): one tensor [count, width, 2 size], in which gate and up take turns; there are also
    biases, and an activation with the parameters `alpha` and `limit` (gates and ups are clamped).

    With `own_norms` (Gemma 4), router, experts and shared MLP each have a norm of their own before
    them, the latter two also one after them, and a learned factor scales each expert's output.
    """

    count: int
    per_token: int
    size: int
    scores: Scores = "softmax"
    normalised: bool = True
    epsilon: float = 0.0
    scale: float = 1.0
    choice_bias: bool = False
    groups: int = 1
    chosen_groups: int = 1
    shared_size: int = 0
    shared_gate: bool = False
    layout: ExpertLayout = "separate"
    alpha: float = 1.702
    limit: float = 7.0
    own_norms: bool = False


@dataclass(frozen=True, slots=True)
class Architecture(ModelShape):
    """A decoder-only transformer as its config.json describes it; see `ModelShape` for its sizes.

    Rotary: the first `rotary_size` elements of each head are rotated, in pairs (i, i + rotary_size
    / 2). cos and sin are rounded to the model's dtype unless `rotary_in_float32`.

    Norms: all are RMSNorm. `pre_norms` are applied to the input of attention and MLP, `post_norms`
    to their outputs before these are added to the residual stream. A norm multiplies by its weight
    plus `norm_weight_offset`. `qk_norm` says how queries and keys are normed before the rotary
    embedding: "head" is a norm over each head with one weight [head_size], "all" is a norm over all
    heads together, "values" is as "head", with a norm without weight over each head of the values
    too.

    Scales: `attention_scale` multiplies the products of queries and keys; `score_cap` c replaces
    them by c tanh(score / c), and `logit_cap` does so with the logits, after these were multiplied
    by `logit_scale`. `embedding_scale` multiplies the embeddings, rounded to the model's dtype
    first; `residual_scale` multiplies the outputs of attention and MLP.

    `mixture` describes the MLPs of the kind "experts". `sinks`: each head has a learned logit that
    takes part in the softmax of its scores, and has no value (gpt-oss). `gated_attention`: the
    attention's output is multiplied by the sigmoid of a gate. `recurrent` describes the mixers that
    are no attention. `shared_projection`: layers without a window compute their values by the
    projection of their keys. `layer_scalars`: each layer's output is multiplied by a learned
    number. `per_layer_size` is the size of a second embedding that each token has for each layer
    (Gemma 4's per-layer embeddings); 0: there is none.

    `fused_projections`: the files have one matrix with the rows of queries, keys and values, and
    one with those of gate and up projection (Phi 3).
    """

    intermediate_size: int
    layers: tuple[LayerKind, ...]
    rotary: Mapping[str, Rotary]
    rotary_size: int
    norm_eps: float
    attention_scale: float
    activation: Activation = "silu"
    rotary_in_float32: bool = False
    norm_weight_offset: float = 0.0
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: QKNorm = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    score_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    mixture: Mixture | None = None
    sinks: bool = False
    gated_attention: bool = False
    recurrent: Recurrent | None = None
    shared_projection: bool = False
    layer_scalars: bool = False
    per_layer_size: int = 0
    fused_projections: bool = False

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same sizes, and keys and values of their own."""
        return all(
            kind.kv_heads is kind.head_size is kind.inner is kind.owner is None
            for kind in self.layers
        )

    def of_layer(self, index: int) -> Architecture:
        """Returns the architecture with the sizes of one layer. A layer without keys of its own has
        no key-value heads."""
        kind = self.layers[index]
        if self.is_uniform:
            return self
        return replace(
            self,
            num_kv_heads=0 if kind.owner is not None else kind.kv_heads or self.num_kv_heads,
            head_size=kind.head_size or self.head_size,
            rotary_size=kind.head_size or self.rotary_size,
            intermediate_size=kind.inner or self.intermediate_size,
        )

    @property
    def fixed_parts(self) -> str | None:
        """What the layers have that is neither trained nor split over processes; None: nothing."""
        if self.mixture is not None:
            return "experts"
        if self.per_layer_size or not self.is_uniform:
            return "layers of several sizes"
        return None if self.recurrent is None else "recurrent layers"


class Fields:
    """The fields of a config, read by name, with a default for a field that is absent.

    All methods that read raise `UnsupportedConfig` for a value of the wrong type or out of range.
    `prefix` is put before the names in errors.
    """

    def __init__(self, config: Mapping[str, Any], prefix: str = "") -> None:
        self._config = config
        self._prefix = prefix
        self._known: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._config

    def raw(self, name: str, default: Any = None) -> Any:
        """Returns the field's value as it is."""
        self._known.add(name)
        return self._config.get(name, default)

    def ignore(self, *names: str) -> None:
        """Declares that these fields do not change the computation of this family, so that
        `refuse_unknown` accepts them."""
        self._known.update(names)

    def refuse(self, name: str) -> UnsupportedConfig:
        """Returns the exception to raise because of the field's value."""
        return UnsupportedConfig(self._prefix + name, self._config.get(name))

    def integer(
        self, name: str, default: int | None = None, minimum: int = 1, maximum: int = 1 << 31
    ) -> int:
        """Returns a whole number. If `default` is None, the field has to be there."""
        value = self.raw(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.refuse(name)
        return value

    def sliding_layers(self, default: Sequence[bool]) -> Sequence[bool]:
        """Returns for each layer whether it has a sliding window: what `layer_types` says, else
        `default`."""
        types = self.raw("layer_types")
        if types is None:
            return default
        if (
            not isinstance(types, list)
            or len(types) != len(default)
            or not all(name in _LAYER_TYPES for name in types)
        ):
            raise self.refuse("layer_types")
        return [name == _SLIDING_TYPE for name in types]

    def windows(
        self,
        layers: Sequence[LayerKind],
        sliding: Sequence[bool],
        window: int | None,
        strict: bool = False,
    ) -> Changes:
        """Returns `{"layers": layers}`, with a window of `window` tokens in those layers for which
        `sliding` is true, and with none in the others.

        `window` None: no layer has one. With `strict`, raises UnsupportedConfig if it is None
        although `sliding` is true for a layer.
        """
        if strict and window is None and any(sliding):
            raise self.refuse("sliding_window")
        kinds = zip(layers, sliding, strict=True)
        return {
            "layers": tuple(
                replace(kind, window=window if slides else None) for kind, slides in kinds
            )
        }

    def expert_count(self, default: int) -> int:
        """Returns the number of experts, which has two names."""
        return self.integer("num_experts", self.integer("num_local_experts", default))

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a finite number, an int or a float as it is in the config. If `default` is None,
        the field has to be there."""
        value = self.raw(name, default)
        if not is_number(value):
            raise self.refuse(name)
        return value  # type: ignore[no-any-return]

    def positive(self, name: str, default: float | None = None) -> float:
        """Returns a number above 0. If `default` is None, the field has to be there."""
        value = self.number(name, default)
        if value <= 0:
            raise self.refuse(name)
        return value

    def optional(
        self, read: Callable[[str, T | None], T], name: str, default: T | None = None
    ) -> T | None:
        """Returns the field `name` as `read` does, a method such as `integer`. None if the field is
        null, or absent with no `default`."""
        return None if self.raw(name, default) is None else read(name, default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name)
        return value

    def numbers(self, name: str, length: int) -> Sequence[float]:
        """Returns a list of `length` numbers above 0."""
        value = self.raw(name)
        if (
            not isinstance(value, list)
            or len(value) != length
            or not all(is_number(entry) and entry > 0 for entry in value)
        ):
            raise self.refuse(name)
        return value

    def section(self, name: str) -> Fields | None:
        """Returns the fields of the object `name`; None if it is absent, null or empty."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name)
        return Fields(value, f"{self._prefix}{name}.") if value else None

    def refuse_unknown(self, defaults: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Raises `UnsupportedConfig` for the first field that was not read and may change the
        logits; see `is_irrelevant`.

        `defaults` returns what absent fields hold; it is called only if needed. A field that holds
        its default is accepted: the config would mean the same without it. Fields in
        `OPTIONAL_FEATURES` are refused only if their value is true.
        """
        for name, value in self._config.items():
            is_switched_off = name in OPTIONAL_FEATURES and not value
            if name in self._known or is_irrelevant(name, value) or is_switched_off:
                continue
            known = defaults()
            if name not in known or known[name] != value:
                raise self.refuse(name)


def is_irrelevant(name: str, value: object) -> bool:
    """Whether a field of a config changes the logits of no family: it is listed in `IRRELEVANT`, a
    note of some program (its name begins with an underscore), null or empty."""
    return name in IRRELEVANT or name.startswith("_") or value in (None, "", [], {})


def is_number(value: object) -> bool:
    """Whether `value` is a finite number that float32 can hold."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 2.0**127
        and not math.isnan(value)
    )
