"""Writes GGUF files for tests: any metadata, and tensors of every type that specgen reads.

The `gguf` package writes the files and quantises. For the types that it does not quantise, random
blocks are made: what they stand for is what the format says, as `gguf` reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES

# The places of the float16 numbers in a block, and how large each is for values around zero.
SCALES = {
    "Q4_0": {0: 1.0},
    "Q4_1": {0: 1.0, 2: -7.5},
    "Q5_0": {0: 1.0},
    "Q5_1": {0: 1.0, 2: -15.5},
    "Q8_0": {0: 1.0},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
    "IQ4_XS": {0: 1.0},
    "MXFP4": {},  # its scale is the exponent of a power of two
}
FLOATS = "F32", "F16", "BF16"
TYPES = (*FLOATS, *SCALES)
QUANTISED_BY_GGUF = (*FLOATS, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
_METADATA_TYPES = {
    bool: GGUFValueType.BOOL,
    str: GGUFValueType.STRING,
    int: GGUFValueType.INT64,
    float: GGUFValueType.FLOAT32,
}


@dataclass(frozen=True)
class Stored:
    """A tensor as a GGUF file stores it: `content` uint8 [..., bytes of a row]; `values` are what
    it stands for, float32."""

    type: str
    content: np.ndarray[Any, Any]
    values: torch.Tensor


def quantised(values: torch.Tensor, kind: str) -> Stored:
    """Returns a tensor rounded to a type in `QUANTISED_BY_GGUF`. A row has to be a multiple of a
    block."""
    content = quants.quantize(values.float().numpy(), GGMLQuantizationType[kind])
    return as_stored(content.view(np.uint8), kind)


def random_stored(shape: Sequence[int], kind: str, seed: int, scale: float = 0.02) -> Stored:
    """Returns a random tensor of any type in `TYPES`, whose values have about the standard
    deviation `scale`."""
    random = np.random.default_rng(seed)
    if kind in FLOATS or not SCALES[kind]:
        numbers = random.normal(0, scale, shape).astype(np.float32)
        return quantised(torch.from_numpy(numbers), kind)
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rows = (*shape[:-1], shape[-1] // elements)
    blocks = random.integers(0, 256, (*rows, size), dtype=np.uint8)
    sizes = random.uniform(0.5, 1.5, rows)

    _set_scales(blocks, kind, sizes)
    deviation = float(as_stored(blocks.reshape(-1, size), kind).values.std())
    _set_scales(blocks, kind, sizes * scale / deviation)
    return as_stored(blocks.reshape(*shape[:-1], -1), kind)


def _set_scales(blocks: np.ndarray[Any, Any], kind: str, sizes: np.ndarray[Any, Any]) -> None:
    for place, factor in SCALES[kind].items():
        numbers = (sizes * factor).astype(np.float16)
        blocks[..., place : place + 2] = numbers[..., None].view(np.uint8)


def as_stored(content: np.ndarray[Any, Any], kind: str) -> Stored:
    """Returns a tensor with these bytes, uint8 [..., bytes of a row]."""
    content = np.ascontiguousarray(content)
    values = quants.dequantize(content, GGMLQuantizationType[kind])
    return Stored(kind, content, torch.from_numpy(values.astype(np.float32)))


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], parts: int = 1
) -> list[Path]:
    """Writes a model and returns its files: `path`, or its `parts`, which are named as llama.cpp
    names them.

    `metadata` has Python values; a whole number is stored as int64, an empty list cannot be stored.
    """
    most = -(-len(tensors) // parts) if parts > 1 else 0
    logging.getLogger("gguf.gguf_writer").setLevel(logging.ERROR)
    writer = GGUFWriter(path, metadata.get("general.architecture", "llama"), split_max_tensors=most)
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.content, raw_dtype=GGMLQuantizationType[tensor.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.format_shard_names(path)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_key_value(key, value, GGUFValueType.ARRAY, _METADATA_TYPES[type(value[0])])
    else:
        writer.add_key_value(key, value, _METADATA_TYPES[type(value)])
