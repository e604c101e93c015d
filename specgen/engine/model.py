"""The interface of a model with its weights, which the native decoder and transformers' models
implement, and a model's sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from specgen.engine.forward_pass import (
    BatchPass,
    Cache,
    ForwardFunction,
    HiddenSource,
    LayerCall,
    ModelOutput,
)

# kinds of layers that keep a state in place of keys and values
STATE_TYPES = ("linear_attention", "conv")
ALL_OPERATORS = ("all operators",)  # of `Model.on_torch`
NO_LIMIT = 1 << 30  # tokens; the context length of a model whose config states none


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model.

    `intermediate_size` is the width of the MLPs, None if the config states none. `vocab_size` is
    the number of token ids, which have an embedding and a logit each. `context_limit` is the
    longest context in tokens, `NO_LIMIT` if the config states none. `rope_boundary` is the length
    in tokens beyond which a LongRoPE model uses other rotary frequencies, None for other models.
    `dtype` names the weights' dtype, None if the config does not. `tied`: the LM head's weights are
    the embedding's. `default_eos` is the config's end-of-sequence id or ids; where config.json is
    silent, the family's default. `kv_elements` is how many elements the keys and values of one
    token have in all layers together; `num_kv_heads` and `head_size` are those of the first layer,
    from which others may differ.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int | None
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context_limit: int
    rope_boundary: int | None
    dtype: str | None
    tied: bool
    default_eos: int | list[int] | None
    kv_elements: int

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Returns the bytes that one token's keys and values take in all layers."""
        return self.kv_elements * bytes_per_element


def of_transformers(config: Any) -> ModelShape:
    """Returns the sizes of a model from its transformers config. Of a model with vision or audio,
    those of its text part."""
    config = config.get_text_config()
    dtype = getattr(config, "dtype", None)
    limit, boundary = _context(config)
    count = config.num_hidden_layers
    # some models have no attention
    heads = _first_integer(config, "num_attention_heads", "num_heads") or 1
    is_uniform = not getattr(config, "is_heterogeneous", False)
    layers = (
        [config] * count
        if is_uniform
        else [config.per_layer_config[index] for index in range(count)]
    )
    sizes = [
        (
            _first_integer(layer, "num_key_value_heads") or heads,
            _first_integer(layer, "head_dim") or config.hidden_size // heads,
        )
        for layer in layers
    ]
    types = getattr(config, "layer_types", None) or [None] * count
    owners = [size for size, kind in zip(sizes, types, strict=True) if kind not in STATE_TYPES]
    # the others read the keys of these
    owners = owners[: len(owners) - (getattr(config, "num_kv_shared_layers", None) or 0)]
    return ModelShape(
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        intermediate_size=_first_integer(config, "intermediate_size", "ffn_dim", "n_inner"),
        num_layers=count,
        num_heads=heads,
        num_kv_heads=sizes[0][0],
        head_size=sizes[0][1],
        vocab_size=config.vocab_size,
        context_limit=limit,
        rope_boundary=boundary,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        default_eos=getattr(config, "eos_token_id", None),
        kv_elements=sum(2 * kv_heads * size for kv_heads, size in owners),
    )


def _first_integer(config: Any, *names: str) -> int | None:
    """Returns the value of the first of these attributes that is an integer (in some models it is a
    list with a number per layer)."""
    return next(
        (value for name in names if isinstance(value := getattr(config, name, None), int)), None
    )


def _context(config: Any) -> tuple[int, int | None]:
    """Returns the longest context in tokens, and the rope boundary (see `ModelShape`)."""
    limit = getattr(config, "max_position_embeddings", None) or NO_LIMIT
    rope = getattr(config, "rope_parameters", None) or {}
    parameters = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    rope_types = {entry.get("rope_type") for entry in parameters}
    key = "original_max_position_embeddings"
    inside = next((entry[key] for entry in parameters if key in entry), None)
    # transformers lets the config's own attribute win when it builds the model
    original = getattr(config, key, None) or inside
    if "dynamic" in rope_types:  # beyond it the frequencies change with every token
        return original or limit, None
    return limit, original if "longrope" in rope_types else None


class Model(Protocol):
    """A model with its weights. All outputs are on `device`, also if its layers are on several
    devices.

    `rounding` (`int8`, `int4`) is what the weights are rounded to; None: they are not. `shape` is
    an `Architecture` if the native decoder knows the model's family. `exact`: passes are
    padded so that in drafts without branches a token's logits have the same bits whichever tokens
    are run with it.
    """

    @property
    def shape(self) -> ModelShape: ...
    @property
    def rounding(self) -> str | None: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def exact(self) -> bool: ...

    def new_cache(self, layers: range | None = None) -> Cache:
        """Returns an empty KV cache for the layers with these indices; None: all."""
        ...

    def forward(
        self,
        layers: Sequence[LayerCall] | None = None,
        inputs: HiddenSource | None = None,
        *,
        taps: Sequence[int] = (),
        with_head: bool = True,
    ) -> ForwardFunction:
        """Returns a function that runs some of the layers (None: all), then the final norm and the
        LM head, on a forward pass.

        `layers` may be named only after `check_layers` has raised nothing. `inputs` returns the
        hidden states that enter the first of the layers; None: the token embeddings enter. Without
        the head (`with_head` False) the output's `hidden_states` are those after the last layer,
        and its `logits` mean nothing.

        `taps` name layers that are run, or `num_layers`. The output's `features` [m, len(taps) *
        width] then have, for each of the m tokens of the pass, one hidden state for each number in
        `taps`: the input of the layer with this index, or for `num_layers` the output of the final
        norm.
        transformers' `hidden_states` have the same indices. Raises SpecgenError if the model cannot
        give the hidden states that `taps` name, or cannot leave out a part of a layer.
        """
        ...

    def batch_cache(self, sequences: int) -> Cache:
        """Returns an empty KV cache for so many sequences, for all layers. Raises SpecgenError if
        the model can run one sequence only."""
        ...

    def batch(
        self,
        batch: BatchPass,
        layers: int | None = None,
        *,
        taps: Sequence[int] = (),
        with_head: bool = True,
        logits_to_keep: int | None = None,
    ) -> ModelOutput:
        """Runs the first `layers` layers (None: all) on several sequences of n tokens each. The
        other arguments are as in `forward`.

        The output's tensors are [batch, n, ...]; `logits` are those of each sequence's last
        `logits_to_keep` tokens (None: all). Raises SpecgenError for a model that is split over
        processes.
        """
        ...

    def reference_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns the logits [n, vocabulary] after each of the n tokens `ids`, computed by one
        forward pass without a KV cache."""
        ...

    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [..., width] of token ids [...] on the device, as they enter the
        first layer."""
        ...

    def head_logits(self, hidden: torch.Tensor, *, is_raw: bool = False) -> torch.Tensor:
        """Returns the logits [n, vocabulary] that the LM head computes from hidden states [n,
        width] after the final norm.

        `is_raw`: without the factor and the cap that some models apply to them.
        """
        ...

    def on_torch(self) -> tuple[str, ...]:
        """Returns the operators of a pass that torch computes, as plain names; empty if our own
        kernels compute all of it, and `ALL_OPERATORS` if they compute nothing."""
        ...

    def check_layers(self, feature: str) -> None:
        """Raises SpecgenError if the layers cannot be run one by one. `feature` is what messages
        say needs this."""
        ...

    def last_layers(self, folder: Path, count: int) -> dict[str, torch.Tensor]:
        """Returns float32 copies of the weights of the model's last `count` layers, of its norm and
        of its LM head.

        Their names are those in an exit layer's file: `layers.0.self_attn.q_proj.weight`, ...,
        `norm.weight`, `head.weight`. `folder` holds the model's files. Raises SpecgenError if the
        weights cannot be read.
        """
        ...

    def free_weights(self, kept_layers: int = 0) -> None:
        """Frees the memory of all weights, or with `kept_layers` above 0 of all but the embedding
        and the first `kept_layers` layers.

        After that, the model can only run the layers that it has kept.
        """
        ...
