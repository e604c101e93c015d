"""What is known of a model before its weights are loaded: its size, memory and dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from specgen.engine.device_map import stored_tensors
from specgen.engine.dtype_choice import DtypeChoice
from specgen.engine.model_loading import PreparedModel, check_weight_files
from specgen.engine.model_shape import NO_LIMIT
from specgen.engine.native.quantised_products import quantised_bytes
from specgen.engine.native.tensor_names import EMBEDDING, HEAD


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model, read from its files.

    `weight_bytes` is the size of all weights, `cache_bytes` the size of the cached keys and values of one token; both in `dtype`,
    with which the model would run, but for quantised weights, which take as many bytes as their files. `context_limit` is the
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
    parameters, weight_bytes = _weights(prepared, device, weights)
    return ModelFacts(
        prepared.name,
        shape.model_type,
        parameters,
        shape.num_layers,
        shape.hidden_size,
        weights.name,
        str(device),
        weight_bytes,
        shape.kv_bytes_per_token(size),
        None if prepared.context_limit >= NO_LIMIT else prepared.context_limit,
        shape.vocab_size,
        prepared.config.backend,
        prepared.config.fallback,
        weights.warning or weights.reason,
        prepared.tokenizer.fallback,
    )


def _weights(prepared: PreparedModel, device: torch.device, weights: DtypeChoice) -> tuple[int, int]:
    """Returns the number of a model's parameters, and the bytes of its weights in memory.

    Quantised weights stay as they are in their files, packed, whose shapes say nothing of the number of parameters. If a draft's
    weights are rounded when they are loaded, its LM head is a table apart from the embedding.
    """
    shapes = {name: shape for name, shape, _ in stored_tensors(prepared.folder)}
    numbers, size, kind = {name: math.prod(shape) for name, shape in shapes.items()}, weights.dtype.itemsize, weights.quantise
    stored = sum(numbers.values())
    if kind is not None:
        rounded = [name for name, shape in shapes.items() if len(shape) == 2 and not name.endswith(EMBEDDING)]
        kept = stored - sum(numbers[name] for name in rounded)
        rounded += [name for name in shapes if name.endswith(EMBEDDING) and HEAD not in shapes]
        return stored, kept * size + sum(quantised_bytes(kind, numbers[name], shapes[name][0]) for name in rounded)
    quantisation = prepared.quantisation_on(device)
    if quantisation is None:
        return stored, stored * size
    from specgen.engine.transformers_backend.structure import count_parameters

    parameters = count_parameters(prepared.config.transformers_config, prepared.source.trust_remote_code) or stored
    in_file = sum(path.stat().st_size for path in prepared.folder.glob("*.safetensors"))
    return parameters, parameters * size if quantisation.dequantises else in_file
