"""The interface of a model with its weights, which our own decoder (`native`) and transformers implement, and a model's sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from specgen.engine.forward_pass import BatchPass, Cache, ForwardFunction, HiddenSource, LayerPart, ModelOutput

NO_LIMIT = 1 << 30  # tokens; the context length of a model whose config states none


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model.

    `intermediate_size` is the width of the MLPs, None if the config states none. `vocab_size` is the number of token ids, which
    have an embedding and a logit each. `context_limit` is the longest context in tokens, `NO_LIMIT` if the config states none.
    `rope_boundary` is the length in tokens beyond which a LongRoPE model uses other rotary frequencies, None for other models.
    `dtype` names the weights' dtype, None if the config does not. `tied`: the head's weights are the embedding's. `default_eos`
    is the config's end-of-sequence id or ids; where config.json is silent, the family's default.
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

    def kv_bytes_per_token(self, bytes_per_number: int) -> int:
        """Returns the bytes that one token's keys and values take in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * bytes_per_number


def of_transformers(config: Any) -> ModelShape:
    """Returns the sizes of a model from its transformers config. Of a model with vision or audio, those of its text part."""
    config = config.get_text_config()
    dtype = getattr(config, "dtype", None)
    limit, boundary = _context(config)
    heads = _first_integer(config, "num_attention_heads", "num_heads") or 1  # some models have no attention
    return ModelShape(
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        intermediate_size=_first_integer(config, "intermediate_size", "ffn_dim", "n_inner"),
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=_first_integer(config, "num_key_value_heads") or heads,
        head_size=_first_integer(config, "head_dim") or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        context_limit=limit,
        rope_boundary=boundary,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        default_eos=getattr(config, "eos_token_id", None),
    )


def _first_integer(config: Any, *names: str) -> int | None:
    """Returns the first of the attributes that is a number; some models have lists with a number for each layer."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def _context(config: Any) -> tuple[int, int | None]:
    """Returns the longest context and the rope boundary."""
    limit = getattr(config, "max_position_embeddings", None) or NO_LIMIT
    rope = getattr(config, "rope_parameters", None) or {}
    parameters = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    rope_types = {entry.get("rope_type") for entry in parameters}
    key = "original_max_position_embeddings"
    inside = next((entry[key] for entry in parameters if key in entry), None)
    original = getattr(config, key, None) or inside  # transformers lets the config's own attribute win when it builds the model
    if "dynamic" in rope_types:  # beyond it the frequencies change with every token
        return original or limit, None
    return limit, original if "longrope" in rope_types else None


class Model(Protocol):
    """A model with its weights, on one device, to which outputs are moved if its layers are on several.

    `shape` is an `Architecture` if the model's family is one that the native decoder knows. `exact`: a token's logits have the
    same bits whichever tokens are run with it, in drafts without trees.
    """

    @property
    def shape(self) -> ModelShape: ...

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
        layers: Sequence[LayerPart] | None = None,
        inputs: HiddenSource | None = None,
        *,
        taps: Sequence[int] = (),
        with_head: bool = True,
    ) -> ForwardFunction:
        """Returns the function that runs some of the layers (None: all), then the final norm and the LM head.

        `inputs` returns the hidden states that enter the first of them; None takes the token embeddings. Without the head
        (`with_head` False) the output's `hidden_states` are those after the last layer, and its `logits` mean nothing.

        With `taps`, which are for the whole model, the output's `features` [m, len(taps) * width] are, for each of the m tokens
        of the pass, one hidden state for each number in `taps`: the input of the layer with this index, or with `num_layers` the
        output of the final norm. These numbers are the indices of transformers' `hidden_states`. Raises SpecgenError if the
        model's layers cannot be run one by one, which all but the whole model without taps needs.
        """
        ...

    def batch_cache(self, sequences: int) -> Cache:
        """Returns an empty KV cache for so many sequences, for all layers."""
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
        """Runs the first `layers` layers (None: all) on several sequences, as `forward`'s functions do on one.

        The output's tensors are [batch, n, ...], `logits` those of each sequence's last `logits_to_keep` tokens (None: all).
        """
        ...

    def reference_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Returns the logits [n, vocabulary] after each of the n tokens `ids`, by one forward pass without a KV cache."""
        ...

    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [..., width] of token ids [...] on the device, as they enter the first layer."""
        ...

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits [n, vocabulary] that the LM head computes from hidden states [n, width] after the final norm."""
        ...

    def check_layers(self, feature: str) -> None:
        """Raises SpecgenError if the layers cannot be run one by one, which `feature` needs."""
        ...

    def last_layers(self, folder: Path, count: int) -> dict[str, torch.Tensor]:
        """Returns float32 copies of the weights of the model's last `count` layers, of its norm and of its LM head.

        Their names are those in an exit layer's file: `layers.0.self_attn.q_proj.weight`, ..., `norm.weight`, `head.weight`.
        `folder` holds the model's files. Raises SpecgenError if the weights cannot be read.
        """
        ...

    def free_weights(self, kept_layers: int = 0) -> None:
        """Frees the memory of the weights, but for the embedding and the first `kept_layers` layers; 0: of all weights.

        After that, the model can only run the layers that it has kept.
        """
        ...
