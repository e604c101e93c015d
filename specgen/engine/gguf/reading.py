"""What a GGUF file says about its model in general, for the functions that describe one
architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specgen.engine.gguf.blocks import read_tensor
from specgen.engine.gguf.file import GgufFile
from specgen.engine.gguf.metadata import Metadata

Config = dict[str, Any]

_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = "rope_factors_long.weight"
_SHORT_FACTORS = "rope_factors_short.weight"
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Reading:
    """What the function of an architecture reads: the file, its metadata, and the fields of a
    config.json that all architectures have."""

    opened: GgufFile
    metadata: Metadata
    common: Mapping[str, Any]

    @property
    def layers(self) -> int:
        return int(self.common["num_hidden_layers"])

    @property
    def head_size(self) -> int:
        return int(self.common["head_dim"])

    @property
    def rotated(self) -> int:
        """How many elements of each head are rotated."""
        return self.metadata.integer("{arch}.rope.dimension_count", self.head_size)

    def has(self, tensor: str) -> bool:
        return tensor in self.opened.tensors

    def values(self, tensor: str) -> list[float]:
        """Returns the elements of a small tensor. Raises SpecgenError for a large one."""
        info = self.opened.tensors[tensor]
        if math.prod(info.shape) > 1 << 16:
            raise self.metadata.refuse(f"has {tensor} with {math.prod(info.shape):,} numbers")
        elements: list[float] = read_tensor(info, dtype=torch.float32).flatten().tolist()
        return elements

    def scale(self, key: str, default: float = 1.0) -> float:
        """Returns a factor of the metadata; `default` if it is absent or 0, as in llama.cpp."""
        return self.metadata.number(key, 0) or default


def rope(reading: Reading, is_partial: bool) -> Config:
    """Returns the field `rope_parameters` of config.json for a model that rotates all layers alike.

    Raises SpecgenError if only a part of each head is rotated, unless `is_partial`, and as
    `rope_scaling` does.
    """
    metadata = reading.metadata
    if reading.rotated != reading.head_size and not is_partial:
        what = "rotates a part of each head, which is not supported for its architecture"
        raise metadata.refuse(what)

    theta = metadata.number("{arch}.rope.freq_base", 10_000.0)
    settings: Config = {"rope_theta": theta, **rope_scaling(reading)}
    if is_partial:
        settings["partial_rotary_factor"] = reading.rotated / reading.head_size
    return {"rope_parameters": settings}


def rope_scaling(reading: Reading) -> Config:
    """Returns how the rotary frequencies are scaled, by the names in config.json's
    `rope_parameters`. Raises SpecgenError for a scaling that is not supported."""
    metadata = reading.metadata
    if reading.has(_ROPE_FACTORS):
        return _factors(reading, _read_factors(reading, _ROPE_FACTORS))
    if reading.has(_LONG_FACTORS) and reading.has(_SHORT_FACTORS):
        return _longrope(reading)
    old = metadata.number("{arch}.rope.scale_linear", 1.0)  # its name in older files
    factor = metadata.number("{arch}.rope.scaling.factor", old)
    kind = metadata.text("{arch}.rope.scaling.type", "linear")
    if kind == "none":
        return {"rope_type": "default"}
    if kind == "linear":
        return _linear(factor)
    if kind == "yarn":
        return _yarn(metadata, factor)
    what = f"scales its rotary embedding by {kind!r}, which is not supported for its architecture"
    raise metadata.refuse(what)


def _linear(factor: float) -> Config:
    if factor in (0, 1):
        return {"rope_type": "default"}
    return {"rope_type": "linear", "factor": float(factor)}


def _yarn(metadata: Metadata, factor: float) -> Config:
    scaling: Config = {"rope_type": "yarn", "factor": float(factor)}
    keys = {
        "original_max_position_embeddings": ("original_context_length", metadata.integer),
        "beta_fast": ("yarn_beta_fast", metadata.number),
        "beta_slow": ("yarn_beta_slow", metadata.number),
    }
    for field, (key, read) in keys.items():
        if f"{{arch}}.rope.scaling.{key}" in metadata:
            scaling[field] = read(f"{{arch}}.rope.scaling.{key}")
    # -1: the default, which is 1
    if metadata.number("{arch}.rope.scaling.yarn_ext_factor", 1.0) not in (-1, 1):
        raise metadata.refuse("mixes its frequencies with YaRN in a way that is not supported")
    return scaling


def _longrope(reading: Reading) -> Config:
    """Returns the settings of files that have factors for short and for long runs."""
    metadata = reading.metadata
    metadata.text("{arch}.rope.scaling.type", "longrope")  # what the factors are is clear
    length = metadata.integer("{arch}.context_length")
    original = metadata.integer("{arch}.rope.scaling.original_context_length", length)
    scaling: Config = {
        "rope_type": "longrope",
        "short_factor": _read_factors(reading, _SHORT_FACTORS),
        "long_factor": _read_factors(reading, _LONG_FACTORS),
        "original_max_position_embeddings": original,
    }
    stored = metadata.number("{arch}.rope.scaling.attn_factor", 1.0)
    computed = 1.0
    if length > original > 1:
        computed = math.sqrt(1 + math.log(length / original) / math.log(original))
    if not math.isclose(stored, computed, rel_tol=1e-6):
        scaling["attention_factor"] = float(stored)
    return scaling


def _read_factors(reading: Reading, tensor: str) -> list[float]:
    """Returns the factors of the rotary frequencies in a tensor."""
    factors = reading.values(tensor)
    is_positive = all(0 < factor < math.inf for factor in factors)
    if len(factors) != reading.rotated // 2 or not is_positive:
        what = f"has {tensor} with {len(factors):,} numbers that do not fit its heads"
        raise reading.metadata.refuse(what)
    return factors


def _factors(reading: Reading, factors: Sequence[float]) -> Config:
    """Returns the settings of files that have a factor for each rotary frequency, by which it is
    divided.

    Most are those of Llama 3.1 and later, computed from four numbers. Then these are returned, as
    the frequencies that they give have the same bits as in the original model.
    """
    metadata = reading.metadata
    largest = max(factors)
    theta = metadata.number("{arch}.rope.freq_base", 10_000.0)
    expected = _llama3_factors(theta, len(factors), largest)
    pairs = zip(factors, expected, strict=True)
    if all(math.isclose(one, other, rel_tol=1e-4) for one, other in pairs):
        return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    return {
        "rope_type": "longrope",
        "short_factor": list(factors),
        "long_factor": list(factors),
        "attention_factor": 1.0,
        "original_max_position_embeddings": metadata.integer("{arch}.context_length"),
    }


def _llama3_factors(theta: float, count: int, factor: float) -> list[float]:
    """Returns the factors by which Llama 3.1's rotary frequencies are divided."""
    low, high, original = _LLAMA3.values()
    divisors = []
    for index in range(count):
        turns = original / (2 * math.pi) * theta ** (-index / count)  # in the original context
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - share) / factor + share))
    return divisors


def sliding_types(reading: Reading, pattern: int) -> list[str]:
    """Returns the `layer_types` of a config.json. Where the file does not say, each `pattern`-th
    layer has full attention, and the others have a sliding window.

    Raises SpecgenError if the file says it for another number of layers.
    """
    metadata = reading.metadata
    count = reading.layers
    key = "{arch}.attention.sliding_window_pattern"
    if metadata.is_list(key):
        slides = metadata.list_of(key, bool)
    else:
        pattern = metadata.integer(key, pattern)
        slides = [bool(pattern) and (index + 1) % pattern != 0 for index in range(count)]
    if len(slides) != count:
        problem = f"has a sliding window pattern of {len(slides):,} layers, and {count:,} layers"
        raise metadata.refuse(problem)
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def optional_number(metadata: Metadata, key: str) -> float | None:
    return metadata.number(key) if key in metadata else None
