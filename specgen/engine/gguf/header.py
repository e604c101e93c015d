"""Reads the header of one GGUF file: its metadata, and where its tensors are.

The file is untrusted. Every length, count and offset is checked against the file's size before
anything is read or allocated.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct, calcsize, unpack_from
from typing import Any

from specgen.base.text import shown
from specgen.engine.gguf.blocks import TYPES, GgufTensor

MAGIC = b"GGUF"
READ_TYPES = " and ".join(", ".join(TYPES).rsplit(", ", 1))
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 1 << 26  # the largest vocabularies take 20 MB
# A Python object takes more memory than the few bytes that describe it in a file.
_MAX_PAIRS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_NUMBERS = 1 << 24  # in all arrays together
_MAX_DEPTH = 4  # of arrays within arrays
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 1 << 62
_ALIGNMENTS = frozenset(1 << power for power in range(25))
_DEFAULT_ALIGNMENT = 32
_LEAST_PAIR_BYTES = 14  # length, one character, type, and a value of one byte
_LEAST_TENSOR_BYTES = 33  # length, one character, number of dimensions, one dimension, type, offset

_UINT32 = Struct("<I")
_UINT64 = Struct("<Q")
_STRING = 8
_ARRAY = 9
_NUMBERS = {  # the codes of `struct`
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TYPE_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class DamagedError(ValueError):
    """What is wrong with a file, as the part of a sentence that follows the file's name and a
    colon."""


class UnreadTypeError(ValueError):
    """A tensor has a type that is not read; the text says which."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file's header says: the metadata as Python values by their keys (arrays are lists),
    and where the tensors are, by their names."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> Header:
    """Returns the header of the GGUF file `path`.

    Raises DamagedError for a file that breaks the format, is shorter than its header says, or is no
    GGUF file of version 2 or 3; UnreadTypeError for a tensor of a type that is not in
    `blocks.TYPES`; OSError if the file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise DamagedError("it is no GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data, path)


def _parse(data: mmap.mmap, path: Path) -> Header:
    cursor = _Cursor(data)
    cursor.skip(len(MAGIC))
    _check_version(cursor.uint32())
    tensor_count = cursor.uint64()
    pair_count = cursor.uint64()
    cursor.check_count(pair_count, _LEAST_PAIR_BYTES, _MAX_PAIRS, "metadata values")
    cursor.check_count(tensor_count, _LEAST_TENSOR_BYTES, _MAX_TENSORS, "tensors")

    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.name("a metadata key")
        if key in metadata:
            raise DamagedError(f"two metadata values have the key {shown(key)}")
        metadata[key] = cursor.value(cursor.uint32(), key)

    infos: dict[str, _Described] = {}
    for _ in range(tensor_count):
        name = cursor.name("a tensor's name")
        if name in infos:
            raise DamagedError(f"two tensors have the name {shown(name)}")
        infos[name] = _read_description(cursor, name)

    begin = _aligned(cursor.offset, _alignment(metadata))
    tensors = {name: _located(name, info, begin, path) for name, info in infos.items()}
    _check_places(tensors, begin, _alignment(metadata), len(data))
    return Header(metadata, tensors)


def _check_version(version: int) -> None:
    if version in _VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        raise DamagedError("it is in big-endian byte order, and only little-endian GGUF is read")
    raise DamagedError(f"it is GGUF of version {version:,}, and the versions 2 and 3 are read")


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor as the header describes it; `offset` counts from the beginning of the tensors'
    bytes."""

    shape: tuple[int, ...]
    type: str
    bytes: int
    offset: int


def _read_description(cursor: _Cursor, name: str) -> _Described:
    dimensions = cursor.uint32()
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise DamagedError(f"{shown(name)} has {dimensions:,} dimensions")
    sizes = [cursor.uint64() for _ in range(dimensions)]  # the innermost dimension first
    kind = _type_name(cursor.uint32(), name)
    offset = cursor.uint64()

    if min(sizes) < 1 or prod(sizes) > _MAX_ELEMENTS:
        shape = " x ".join(map(str, reversed(sizes)))
        raise DamagedError(f"{shown(name)} has the impossible shape {shape}")
    block = TYPES[kind]
    if sizes[0] % block.elements:
        row = f"a row of {shown(name)} has {sizes[0]:,} elements"
        raise DamagedError(f"{row}, and blocks of {kind} have {block.elements}")
    size = prod(sizes) // block.elements * block.bytes
    return _Described(tuple(reversed(sizes)), kind, size, offset)


def _type_name(number: int, name: str) -> str:
    kind = _TYPE_NAMES.get(number)
    if kind is None:
        raise UnreadTypeError(f"{shown(name)} is stored in the unknown type {number:,}")
    if kind not in TYPES:
        raise UnreadTypeError(f"{shown(name)} is stored as {kind}")
    return kind


def _alignment(metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment not in _ALIGNMENTS:
        raise DamagedError(f"its general.alignment is {shown(alignment)}, not a power of two")
    return alignment


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _located(name: str, described: _Described, begin: int, path: Path) -> GgufTensor:
    shape = described.shape
    kind = described.type
    return GgufTensor(name, shape, kind, path, begin + described.offset, described.bytes)


def _check_places(tensors: Mapping[str, GgufTensor], begin: int, alignment: int, size: int) -> None:
    """Raises DamagedError unless the tensors are aligned, lie one after the other, and end within
    the file of `size` bytes."""
    end = begin
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if (tensor.offset - begin) % alignment:
            raise DamagedError(f"{shown(tensor.name)} is not aligned to {alignment:,} bytes")
        if tensor.offset < end:
            raise DamagedError(f"{shown(tensor.name)} overlaps another tensor")
        end = tensor.offset + tensor.bytes
        if end > size:
            problem = f"{shown(tensor.name)} ends at byte {end:,}"
            raise DamagedError(f"{problem}, and the file has {size:,} bytes")


class _Cursor:
    """Reads the values of a header one after the other. Every method raises DamagedError if the
    file ends before the value does."""

    def __init__(self, data: mmap.mmap) -> None:
        self.offset = 0
        self._numbers = 0  # that were read
        self._data = data
        self._end = min(len(data), _MAX_HEADER_BYTES)

    def skip(self, count: int) -> int:
        """Moves on by `count` bytes. Returns the offset of the first of them."""
        start = self.offset
        if count > self._end - start:
            raise self._too_long()
        self.offset = start + count
        return start

    def _too_long(self) -> DamagedError:
        if self._end < len(self._data):
            return DamagedError(f"its header is longer than {_MAX_HEADER_BYTES >> 20} MiB")
        return DamagedError("the file ends within its header")

    def check_count(self, count: int, least_bytes: int, most: int, what: str) -> None:
        """Raises DamagedError if `count` values of at least `least_bytes` bytes do not fit into the
        rest of the header, or are more than `most`."""
        if count * least_bytes > self._end - self.offset:
            raise DamagedError(f"its header claims {count:,} {what}: more than the file can hold")
        if count > most:
            raise DamagedError(f"its header claims {count:,} {what}: more than {most:,}")

    def uint32(self) -> int:
        (number,) = _UINT32.unpack_from(self._data, self.skip(_UINT32.size))
        return int(number)

    def uint64(self) -> int:
        (number,) = _UINT64.unpack_from(self._data, self.skip(_UINT64.size))
        return int(number)

    def name(self, what: str) -> str:
        """Returns a string that is neither empty nor has control characters."""
        (text,) = self._strings(1, what)
        if not text:
            raise DamagedError(f"{what} is empty")
        if _CONTROL.search(text):
            raise DamagedError(f"{what} has control characters: {shown(text)}")
        return text

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        """Returns a value of the metadata type `kind`; `key` is its key, for messages."""
        if kind == _ARRAY:
            return self._array(key, depth)
        (value,) = self._values(kind, 1, key, depth)
        return value

    def _array(self, key: str, depth: int) -> list[Any]:
        if depth == _MAX_DEPTH:
            raise DamagedError(f"the arrays in {shown(key)} are nested too deeply")
        kind = self.uint32()
        return self._values(kind, self.uint64(), key, depth + 1)

    def _values(self, kind: int, count: int, key: str, depth: int) -> list[Any]:
        what = f"values in {shown(key)}"
        if kind == _STRING:
            self.check_count(count, _UINT64.size, _MAX_NUMBERS, what)
            return self._strings(count, f"a string in {shown(key)}")
        if kind == _ARRAY:
            self.check_count(count, _UINT32.size + _UINT64.size, _MAX_PAIRS, what)
            return [self._array(key, depth) for _ in range(count)]
        code = _NUMBERS.get(kind)
        if code is None:
            raise DamagedError(f"{shown(key)} has the unknown value type {kind:,}")

        size = calcsize(f"<{code}")
        self._numbers += count
        self.check_count(count, size, _MAX_NUMBERS - self._numbers + count, what)
        return list(unpack_from(f"<{count}{code}", self._data, self.skip(count * size)))

    def _strings(self, count: int, what: str) -> list[str]:
        """Returns strings, each stored as its length and its UTF-8 bytes. Vocabularies have
        hundreds of thousands of them."""
        data = self._data
        end = self._end
        offset = self.offset
        length_at: Callable[[mmap.mmap, int], tuple[int]] = _UINT64.unpack_from
        texts: list[str] = []
        for _ in range(count):
            start = offset + _UINT64.size
            if start > end:
                raise self._too_long()
            (length,) = length_at(data, offset)
            offset = start + length
            if offset > end:
                raise self._too_long()
            try:
                texts.append(data[start:offset].decode())
            except UnicodeDecodeError as error:
                raise DamagedError(f"{what} is not UTF-8") from error
        self.offset = offset
        return texts
