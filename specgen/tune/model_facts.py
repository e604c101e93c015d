"""What is known of a model before its weights are loaded: its size, memory and dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specgen.engine.dtype_choice import DtypeChoice
from specgen.engine.model_loading import PreparedModel, check_weight_files
from specgen.engine.model_shape import NO_LIMIT
from specgen.engine.weight_sizes import weight_sizes


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model, read from its files.

    `weight_bytes` is the size of all weights, `cache_bytes` the size of the cached keys and values of one token; both in `dtype`,
    with which the model would run, but for quantised weights, which stay packed as in their files. `context_limit` is the
    largest number of tokens in a context, None if the config names no limit. `table_rows` is the number of rows of the embedding
    table. `backend` runs the forward pass; `fallback` says why it is transformers, `tokenizer_fallback` why transformers reads
    the tokenizer, both None otherwise. `dtype_reason` says why `dtype` was chosen.
    """

    name: str
    family: str
    parameters: int
    layers: int
    hidden: int
    dtype: str
    device: str
    weight_bytes: int
    cache_bytes: int
    context_limit: int | None
    table_rows: int
    backend: str
    fallback: str | None
    dtype_reason: str
    tokenizer_fallback: str | None


def model_facts(prepared: PreparedModel, device: torch.device, weights: DtypeChoice) -> ModelFacts:
    """Returns what a model's config and the headers of its weight files say. Raises SpecgenError if they cannot be read."""
    shape, size = prepared.shape, weights.dtype.itemsize
    check_weight_files(prepared.folder, prepared.name)
    parameters, sizes = weight_sizes(prepared, device, weights)
    return ModelFacts(
        prepared.name,
        shape.model_type,
        parameters,
        shape.num_layers,
        shape.hidden_size,
        weights.name,
        str(device),
        sum(sizes.values()),
        shape.kv_bytes_per_token(size),
        None if prepared.context_limit >= NO_LIMIT else prepared.context_limit,
        shape.vocab_size,
        prepared.config.backend,
        prepared.config.fallback,
        weights.warning or weights.reason,
        prepared.tokenizer.fallback,
    )
