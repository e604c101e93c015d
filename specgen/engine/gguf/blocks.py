"""The types in which GGUF files store tensors, and the values that the stored bytes stand for.

A quantised tensor is a sequence of blocks. A block has a fixed number of consecutive elements of a
row, and the scales that turn their few bits into numbers. The values are computed in float32 as
llama.cpp's format defines them, one rounding per operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch

# Converts blocks (uint8 [n, bytes of a block]) to float32 [n, elements of a block].
Dequantise = Callable[[torch.Tensor], torch.Tensor]

_PIECE_ELEMENTS = 1 << 17  # converted at a time: intermediate results stay in a cache
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensors: its blocks have `elements` elements in `bytes` bytes.

    Plain floating-point numbers have a `dtype` and are blocks of one element; the other types have
    the function `dequantise`.
    """

    elements: int
    bytes: int
    dtype: torch.dtype | None = None
    dequantise: Dequantise | None = None


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is stored: `bytes` bytes from `offset` in the file `path`.

    `shape` has the outermost dimension first, as in torch. `type` is the GGUF name of its type, a
    key of `TYPES`.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    path: Path
    offset: int
    bytes: int


def read_tensor(
    tensor: GgufTensor,
    rows: range | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns a tensor, or those of its outermost rows that are in `rows`, on the CPU.

    `rows` is a range with step 1 within the tensor. F32, F16 and BF16 are returned as stored,
    quantised types as float32; `dtype` converts them to another one. The file is read in pieces, so
    that no memory beyond the result and a piece is needed. Raises OSError if the file cannot be
    read or has become shorter.
    """
    rows = range(tensor.shape[0]) if rows is None else rows
    assert rows.step == 1
    assert 0 <= rows.start <= rows.stop <= tensor.shape[0]
    kind = TYPES[tensor.type]
    row_bytes = tensor.bytes // tensor.shape[0]

    result = torch.empty((len(rows), *tensor.shape[1:]), dtype=dtype or kind.dtype or torch.float32)
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.offset + rows.start * row_bytes)
        if result.dtype == kind.dtype:
            _fill(result, file, tensor)
        else:
            _convert(result, kind, file, tensor)
    return result


def read_blocks(tensor: GgufTensor) -> Iterator[torch.Tensor]:
    """Yields the blocks (uint8 [n, bytes of a block]) of a quantised matrix, or of several that
    follow each other, those of some whole rows at a time. Each is overwritten by the next one.
    Raises OSError as `read_tensor` does."""
    kind = TYPES[tensor.type]
    rows = math.prod(tensor.shape[:-1])
    columns = tensor.shape[-1]
    blocks_of_row = columns // kind.elements
    at_once = max(1, _PIECE_ELEMENTS // columns)
    stored = torch.empty(at_once * blocks_of_row, kind.bytes, dtype=torch.uint8)
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.offset)
        for first in range(0, rows, at_once):
            blocks = stored[: min(at_once, rows - first) * blocks_of_row]
            _fill(blocks, file, tensor)
            yield blocks


def _fill(result: torch.Tensor, file: RawIOBase, tensor: GgufTensor) -> None:
    """Fills a contiguous tensor with the next bytes of the file."""
    bytes_of_result: Any = result.view(-1).view(torch.uint8).numpy()
    remaining = memoryview(bytes_of_result)
    while remaining:
        count = file.readinto(remaining)
        if not count:
            raise OSError(f"{tensor.path} has become shorter")
        remaining = remaining[count:]


def _convert(result: torch.Tensor, kind: BlockType, file: RawIOBase, tensor: GgufTensor) -> None:
    """Fills a contiguous tensor with the values of the next blocks of the file, piece by piece."""
    pieces = torch.split(result.view(-1), _PIECE_ELEMENTS)
    stored = torch.empty(_PIECE_ELEMENTS // kind.elements, kind.bytes, dtype=torch.uint8)
    for piece in pieces:
        blocks = stored[: len(piece) // kind.elements]
        _fill(blocks, file, tensor)
        piece.copy_(dequantise(blocks, kind).view(-1))


def dequantise(blocks: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Returns the values of blocks (uint8 [n, `kind.bytes`]) as float32 [n, `kind.elements`]."""
    if kind.dequantise is not None:
        return kind.dequantise(blocks)
    assert kind.dtype is not None
    return blocks.view(kind.dtype).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """2 bytes scale, 32 signed bytes."""
    return blocks[:, 2:].view(torch.int8).float().mul_(half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """2 bytes scale, 16 bytes with 4 bits of 32 elements, which stand for -8 to 7."""
    return nibbles(blocks[:, 2:]).flatten(1).float().sub_(8).mul_(half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """2 bytes scale, 2 bytes minimum, 16 bytes with 4 bits of 32 elements."""
    scaled = nibbles(blocks[:, 4:]).flatten(1).float().mul_(half(blocks, 0))
    return scaled.add_(half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """2 bytes scale, 4 bytes with the fifth bit of 32 elements, 16 bytes with the other four; they
    stand for -16 to 15."""
    return five_bits(blocks[:, 2:]).float().sub_(16).mul_(half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """2 bytes scale, 2 bytes minimum, 4 bytes with the fifth bit of 32 elements, 16 bytes with the
    other four."""
    return five_bits(blocks[:, 4:]).float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def five_bits(packed: torch.Tensor) -> torch.Tensor:
    """Returns the 5-bit numbers [n, 32] of blocks with 4 bytes of fifth bits and 16 bytes of the
    lower four."""
    fifth = _bits(packed[:, :4], 1).transpose(1, 2).flatten(1)
    return nibbles(packed[:, 4:]).flatten(1) | (fifth << 4)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """2 + 2 bytes scales of the scales and minima, 12 bytes with these, 128 bytes with 4 bits of
    256 elements.

    The elements are 8 groups of 32 with a scale and a minimum each. 32 bytes hold two groups: one
    in the lower bits, one in the upper ones.
    """
    numbers = nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return _scaled_groups(blocks, numbers)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """As Q4_K, with 32 bytes of fifth bits before the others: bit g of byte i is that of element i
    of group g."""
    return _scaled_groups(blocks, with_fifth_bits(blocks))


def with_fifth_bits(blocks: torch.Tensor) -> torch.Tensor:
    """Returns the integers [n, 8, 32] of blocks of Q5_K."""
    fifth = _bits(blocks[:, 16:48], 1)
    lower = nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    return lower | (fifth << 4)


def _scaled_groups(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Returns the values of `numbers` [n, 8, 32] in blocks of Q4_K or Q5_K."""
    scales, minima = scales_and_minima(blocks)
    values = numbers.float().mul_(scales[:, :, None]).sub_(minima[:, :, None])
    return values.flatten(1)


def scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales and the minima, to be subtracted, of the groups in blocks of Q4_K or Q5_K,
    each float32 [n, 8].

    The 12 bytes of scales and minima are three rows of four: 6 bits of the first four scales; 6
    bits of the first four minima; 4 bits of the last four scales below 4 bits of the last four
    minima. The upper two bits of these are the upper bits of the first two rows.
    """
    low_scales, low_minima, others = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    high_scales = (others & 15) | ((low_scales >> 6) << 4)
    high_minima = (others >> 4) | ((low_minima >> 6) << 4)

    scales = torch.cat([low_scales & 63, high_scales], dim=1).float().mul_(half(blocks, 0))
    minima = torch.cat([low_minima & 63, high_minima], dim=1).float().mul_(half(blocks, 2))
    return scales, minima


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """128 bytes with the lower 4 bits of 256 elements, 64 bytes with the upper 2, 16 bytes signed
    scales, 2 bytes their scale.

    Each half of a block has 128 elements in four groups of 32. The lower bits of groups 0 and 2
    share 32 bytes, as those of 1 and 3 do; the upper bits of all four share 32 bytes. The numbers
    stand for -32 to 31; 16 elements have a scale.
    """
    lower = nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 8, 32)
    upper = _bits(blocks[:, 128:192].view(-1, 2, 32), 2).view(-1, 8, 32)
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(half(blocks, 208))
    numbers = (lower | (upper << 4)).float().sub_(32)
    return numbers.view(-1, 16, 16).mul_(scales[:, :, None]).flatten(1)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """2 bytes scale of the scales, 2 bytes with the upper 2 bits of 8 scales, 4 bytes with their
    lower 4, 128 bytes with 4 bits of 256 elements.

    Each group of 32 elements has a scale, from -32 to 31, and 16 bytes. The bits choose one of 16
    values.
    """
    lower = _interleaved_nibbles(blocks[:, 4:8])
    upper = torch.cat([_bits(blocks[:, 2:3], 2), _bits(blocks[:, 3:4], 2)], dim=1).flatten(1)
    scales = (lower | (upper << 4)).float().sub_(32).mul_(half(blocks, 0))

    choices = nibbles(blocks[:, 8:].view(-1, 8, 16)).view(-1)
    table = torch.tensor(_IQ4_VALUES, dtype=torch.float32, device=blocks.device)
    values = table.index_select(0, choices.int())
    return values.view(-1, 8, 32).mul_(scales[:, :, None]).flatten(1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """1 byte exponent of a power of two, 16 bytes with 4 bits of 32 elements, which choose one of
    16 values.

    The values are twice those of the format, and the power half of its.
    """
    return mxfp4_integers(blocks).float().mul_(mxfp4_scales(blocks))


def mxfp4_integers(blocks: torch.Tensor) -> torch.Tensor:
    """Returns the integers int8 [n, 32], from -12 to 12, of blocks of MXFP4."""
    choices = nibbles(blocks[:, 1:]).flatten()
    table = torch.tensor(_MXFP4_VALUES, dtype=torch.int8, device=blocks.device)
    return table.index_select(0, choices.int()).view(-1, 32)


def mxfp4_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Returns the scales float32 [n, 1] of the integers in blocks of MXFP4."""
    exponents = blocks[:, :1].int()
    subnormal = torch.full_like(exponents, 1 << 21) << exponents.clamp(max=1)
    bits = torch.where(exponents < 2, subnormal, (exponents - 1).clamp(min=0) << 23)
    return bits.view(torch.float32)


def half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Returns the float16 number at `offset` of each block as float32 [n, 1]."""
    return blocks[:, offset : offset + 2].view(torch.float16).float()


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Returns the lower and the upper four bits of bytes [..., k] as [..., 2, k]."""
    packed = packed.contiguous()  # within blocks the processor reads them byte by byte
    return torch.stack([packed & 15, packed >> 4], dim=-2)


def _interleaved_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Returns the lower and the upper four bits of bytes [n, k], byte by byte, as [n, 2 k]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def _bits(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the numbers of `width` bits in bytes [..., k], the lowest first.

    The result is [..., 8 / width, k].
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return (packed[..., None, :] >> shifts[:, None]) & ((1 << width) - 1)


TYPES: Mapping[str, BlockType] = {
    "F32": BlockType(1, 4, dtype=torch.float32),
    "F16": BlockType(1, 2, dtype=torch.float16),
    "BF16": BlockType(1, 2, dtype=torch.bfloat16),
    "Q8_0": BlockType(32, 34, dequantise=_q8_0),
    "Q4_0": BlockType(32, 18, dequantise=_q4_0),
    "Q4_1": BlockType(32, 20, dequantise=_q4_1),
    "Q5_0": BlockType(32, 22, dequantise=_q5_0),
    "Q5_1": BlockType(32, 24, dequantise=_q5_1),
    "Q4_K": BlockType(256, 144, dequantise=_q4_k),
    "Q5_K": BlockType(256, 176, dequantise=_q5_k),
    "Q6_K": BlockType(256, 210, dequantise=_q6_k),
    "IQ4_XS": BlockType(256, 136, dequantise=_iq4_xs),
    "MXFP4": BlockType(32, 17, dequantise=_mxfp4),
}
