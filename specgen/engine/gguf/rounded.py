"""Quantised tensors of GGUF files as they are: integers, scales and minimums, for kernels that
compute with these.

A matrix is a tensor of bytes [rows, bytes of a row] in one form for all types, so that rows can be
put together and in another order as those of other matrices. A row has its integers, one byte each,
then the scales and then the minimums of its groups of `GROUP` elements, in float32. An element is
scale * integer + minimum. Signed integers of 8 bits are stored with 128 added.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from specgen.engine.gguf.blocks import (
    TYPES,
    BlockType,
    GgufTensor,
    dequantise,
    five_bits,
    half,
    mxfp4_integers,
    mxfp4_scales,
    nibbles,
    read_blocks,
    scales_and_minima,
    with_fifth_bits,
)
from specgen.engine.gguf.changes import ColumnOrder
from specgen.engine.kernels.packing import GROUP, LARGEST_INT4, Rounded, rounded_to_8_bits

_FLOAT_BYTES = 4
_ROW_BYTES_OF_GROUP = GROUP + 2 * _FLOAT_BYTES
_SIGN = 128  # added to signed integers of 8 bits
_MOST_MXFP4 = 12  # the largest integer

# integers [n, k * GROUP], scales [n, k] and minimums [n, k] of n blocks
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _q8_0(blocks: torch.Tensor) -> Parts:
    scales = half(blocks, 0)
    return blocks[:, 2:] ^ _SIGN, scales, -_SIGN * scales


def _q4_0(blocks: torch.Tensor) -> Parts:
    scales = half(blocks, 0)
    return nibbles(blocks[:, 2:]).flatten(1), scales, -8 * scales


def _q4_1(blocks: torch.Tensor) -> Parts:
    return nibbles(blocks[:, 4:]).flatten(1), half(blocks, 0), half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> Parts:
    scales = half(blocks, 0)
    return five_bits(blocks[:, 2:]), scales, -16 * scales


def _q5_1(blocks: torch.Tensor) -> Parts:
    return five_bits(blocks[:, 4:]), half(blocks, 0), half(blocks, 2)


def _q4_k(blocks: torch.Tensor) -> Parts:
    scales, minima = scales_and_minima(blocks)
    return nibbles(blocks[:, 16:].view(-1, 4, 32)).flatten(1), scales, -minima


def _q5_k(blocks: torch.Tensor) -> Parts:
    scales, minima = scales_and_minima(blocks)
    return with_fifth_bits(blocks).flatten(1), scales, -minima


def _mxfp4(blocks: torch.Tensor) -> Parts:
    integers = mxfp4_integers(blocks)
    # any scale does for zeros; theirs may be too small for half precision
    scales = mxfp4_scales(blocks) * integers.any(1, keepdim=True)
    return (integers + _MOST_MXFP4).view(torch.uint8), scales, -_MOST_MXFP4 * scales


_PARTS: dict[str, Callable[[torch.Tensor], Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "MXFP4": _mxfp4,
}
EXACT_TYPES = tuple(_PARTS)  # that are read exactly as the file says


def is_exact(tensor: GgufTensor) -> bool:
    """Whether `read_rounded` returns exactly what the file says."""
    return tensor.type in EXACT_TYPES and len(tensor.shape) >= 2


def is_rounded(tensor: GgufTensor) -> bool:
    """Whether `read_rounded` can read a tensor: a quantised matrix, or several of them."""
    is_quantised = TYPES[tensor.type].dtype is None
    return is_quantised and len(tensor.shape) >= 2 and tensor.shape[-1] % GROUP == 0


def read_rounded(tensor: GgufTensor) -> torch.Tensor:
    """Returns a matrix as bytes [rows, bytes of a row] (see above), or several of them as [...,
    rows, bytes of a row]. Raises OSError as `read_tensor` does.

    Types whose groups have fewer elements, or whose integers choose from a table, are rounded to 8
    bits: 2 to 4 more than they have. For Q6_K, bfloat16 would be the other way. SmolLM2-135M's
    matrices with Q6_K's values have 0.08 % more perplexity in 8 bits and 0.06 % in bfloat16, on
    2,448 generated tokens, of which 1.7 and 0.5 % are no longer the likeliest; 8 bits take half the
    memory, and plain decoding is 1.4 times as fast (AVX-512, one thread).
    """
    columns = tensor.shape[-1]
    groups = columns // GROUP
    result = torch.empty(*tensor.shape[:-1], groups * _ROW_BYTES_OF_GROUP, dtype=torch.uint8)
    integers, scales, minimums = _parts(result.view(-1, result.shape[-1]))
    read_parts = _PARTS.get(tensor.type) or partial(_rounded, TYPES[tensor.type], columns)
    first = 0
    for blocks in read_blocks(tensor):
        own_integers, own_scales, own_minimums = read_parts(blocks)
        last = first + own_integers.numel() // columns
        integers[first:last] = own_integers.reshape(-1, columns)
        scales[first:last] = own_scales.reshape(-1, groups)
        minimums[first:last] = own_minimums.reshape(-1, groups)
        first = last
    return result


def _rounded(kind: BlockType, columns: int, blocks: torch.Tensor) -> Parts:
    weight = rounded_to_8_bits(dequantise(blocks, kind).view(-1, columns))
    scales = weight.scales.float()
    return weight.integers.view(torch.uint8) ^ _SIGN, scales, -_SIGN * scales


def _parts(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns views of the integers [rows, elements], the scales and the minimums [rows, groups] of
    a matrix of bytes."""
    groups = matrix.shape[1] // _ROW_BYTES_OF_GROUP
    elements = groups * GROUP
    floats = matrix[:, elements:].view(torch.float32)
    return matrix[:, :elements], floats[:, :groups], floats[:, groups:]


def with_columns_moved(matrix: torch.Tensor, order: ColumnOrder) -> torch.Tensor:
    """Returns a matrix of bytes with its columns in another order, which moves whole groups."""
    moved = torch.empty_like(matrix)
    sizes = order.size, order.size // GROUP, order.size // GROUP
    for new, old, size in zip(_parts(moved), _parts(matrix), sizes, strict=True):
        new.copy_(order.move(old, size))
    return moved


def as_rounded(matrix: torch.Tensor) -> list[Rounded]:
    """Returns a matrix of bytes as runs of rows, each in the narrowest form that holds it exactly:
    without minimums, in 4 bits, with scales in half precision.

    Rows without minimums and others are runs of their own. Rows of zeros, whose scales are 0,
    belong to those before them.
    """
    _, scales, minimums = _parts(matrix)
    is_signed = (minimums == -_SIGN * scales).all(1)
    numbers = torch.arange(len(matrix))
    is_signed = is_signed[torch.where(scales.any(1), numbers, 0).cummax(0).values]
    changes = (is_signed[1:] != is_signed[:-1]).nonzero().flatten() + 1
    ends = [*changes.tolist(), len(matrix)]
    return [_narrowest(matrix[first:last]) for first, last in pairwise([0, *ends])]


def _narrowest(matrix: torch.Tensor) -> Rounded:
    integers, scales, minimums = _parts(matrix)
    shape = (len(matrix), scales.shape[1], GROUP)
    elements = integers.shape[1]
    in_half = scales.half()
    has_half = torch.equal(in_half.float(), scales)
    if has_half and torch.equal(minimums, -_SIGN * scales):
        signed = (integers ^ _SIGN).view(torch.int8)
        return Rounded(signed.reshape(shape), in_half, None, elements, 8)
    bits = 4 if int(integers.max()) <= LARGEST_INT4 else 8
    minimums_in_half = minimums.half()
    if has_half and torch.equal(minimums_in_half.float(), minimums):
        return Rounded(integers.reshape(shape), in_half, minimums_in_half, elements, bits)
    return Rounded(
        integers.reshape(shape), scales.contiguous(), minimums.contiguous(), elements, bits
    )


def restored(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the values [rows, columns] of a matrix of bytes in float32."""
    integers, scales, minimums = _parts(matrix)
    groups = integers.reshape(len(matrix), -1, GROUP)
    return Rounded(groups, scales, minimums, integers.shape[1], 8).restored()
