"""Computes the size of a model's weights in memory from the headers of its files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from specgen.base.errors import SpecgenError
from specgen.engine.dtype_choice import DtypeChoice
from specgen.engine.model_loading import PreparedModel
from specgen.engine.native.layer_weights import EMBEDDING, HEAD
from specgen.engine.native.products import quantised_bytes

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


def weight_sizes(prepared: PreparedModel, device: torch.device, weights: DtypeChoice) -> tuple[int, dict[str, int]]:
    """Returns the number of a model's parameters, and the bytes of each of its tensors in memory, by name.

    Quantised weights stay as they are in their files, packed, whose shapes say nothing of the number of parameters; or they are
    dequantised on this device. If a draft's weights are rounded when they are loaded, its LM head is a table apart from the
    embedding. Raises SpecgenError if the files cannot be read.
    """
    stored = {name: (dimensions, kind) for name, dimensions, kind in _stored_tensors(prepared.folder)}
    numbers, size = {name: math.prod(dimensions) for name, (dimensions, _) in stored.items()}, weights.dtype.itemsize
    parameters, plain = sum(numbers.values()), {name: count * size for name, count in numbers.items()}
    if weights.quantise is not None:
        tables = {name: name for name, (dimensions, _) in stored.items() if len(dimensions) == 2}
        embedding = next((name for name in tables if name.endswith(EMBEDDING)), None)
        if embedding is not None and tables.pop(embedding) and HEAD not in tables:
            tables[HEAD] = embedding
        rounded = {name: quantised_bytes(weights.quantise, numbers[own], stored[own][0][0]) for name, own in tables.items()}
        return parameters, plain | rounded
    if prepared.quantisation is None:
        return parameters, plain
    from specgen.engine.transformers.transformers_model import model_without_weights

    module = model_without_weights(prepared.transformers_config, prepared.source.trust_remote_code)
    counts = numbers if module is None else {name: weight.numel() for name, weight in module.named_parameters()}
    if prepared.dequantises_on(device):
        return sum(counts.values()), {name: count * size for name, count in counts.items()}
    return sum(counts.values()), {
        name: numbers[name] * (size if kind in _FLOATS else _BYTES.get(kind, 1)) for name, (_, kind) in stored.items()
    }


def _stored_tensors(folder: Path) -> Iterator[tuple[str, list[int], str]]:
    """Yields the name, the shape and safetensors' name of the dtype of each tensor in a model's files."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  no mapping
                    part = file.get_slice(name)
                    yield name, part.get_shape(), part.get_dtype()
        except Exception as error:  # safetensors' own exceptions share no base that it exports
            raise SpecgenError(f"cannot read the weights {path}: {str(error)[:160]}", "Download or save them again") from error
