"""The sizes of a model, the same for models of the native decoder and of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NO_LIMIT = 1 << 30  # tokens; the context length of a model whose config states none


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model.

    `intermediate_size` is the width of the MLPs, None if the config states none. `context_limit` is the longest context in
    tokens, `NO_LIMIT` if the config states none. `rope_boundary` is the length in tokens beyond which a LongRoPE model uses other
    rotary frequencies, None for other models. `dtype` names the weights' dtype, None if the config does not. `tied`: the head's
    weights are the embedding's. `default_eos` is the config's end-of-sequence id or ids; where config.json is silent, the
    family's default.
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
    heads = config.num_attention_heads
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
        default_eos=config.eos_token_id,
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
