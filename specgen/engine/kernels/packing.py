"""Weights in the layouts that the kernels read, and their rounding to 8 and 4 bits.

The layouts are described in `kernels.c` at `matrix`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specgen.engine.kernels.library import Library

GROUP = 32  # elements that share a scale
_BLOCKS = 4  # a packed weight has a multiple of this many blocks of outputs
_AT_ONCE = 1 << 18  # elements that are rounded or packed at once, so that copies stay small

FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT8 = 3
_INT8_MINIMUM = 4
_INT4_MINIMUM = 5
_WIDER = 2  # added to the last two: scales and minimums in float32
LARGEST_INT4 = 15


class Rounded(NamedTuple):
    """A weight [out, in] whose groups of `GROUP` elements are scale * integer + minimum.

    `integers` [out, groups, GROUP] are int8, or uint8 where there are minimums, of `bits` 8 or 4.
    `scales` and `minimums` [out, groups] are in float16 or float32. Elements after `inputs` are
    padding. None: there are no minimums.
    """

    integers: Tensor
    scales: Tensor
    minimums: Tensor | None
    inputs: int
    bits: int

    def restored(self) -> Tensor:
        """Returns the weight's values [out, in] in float32."""
        return self.rows(0, len(self.integers)).float()[:, : self.inputs]

    def rows(self, first: int, last: int) -> Tensor:
        """Returns the values of the outputs `first` to `last` - 1 [n, in padded to groups], in
        float64."""
        values = self.integers[first:last].double() * self.scales[first:last].double()[..., None]
        if self.minimums is not None:
            values += self.minimums[first:last].double()[..., None]
        return values.flatten(1)


def rounded_to_8_bits(weight: Tensor) -> Rounded:
    """Rounds a weight [out, in] to the values of GGUF's Q8_0: integers from -127 to 127 and a
    scale in half precision for each group."""
    return _rounded_in_parts(weight, _rows_in_8_bits)


def rounded_to_4_bits(weight: Tensor) -> Rounded:
    """Rounds a weight [out, in] to the values of GGUF's Q4_1: integers from 0 to 15, and a scale
    and a minimum in half precision for each group."""
    return _rounded_in_parts(weight, _rows_in_4_bits)


def _rounded_in_parts(weight: Tensor, round_rows: Callable[[Tensor], Rounded]) -> Rounded:
    """Returns what `round_rows` makes of a weight, of a few rows at a time: their copies in float32
    stay small."""
    at_once = max(1, _AT_ONCE // weight.shape[1])
    parts = [round_rows(rows) for rows in torch.split(weight, at_once)]
    if len(parts) == 1:
        return parts[0]
    integers, scales, minimums, *_ = zip(*parts, strict=True)
    return parts[0]._replace(
        integers=torch.cat(integers),
        scales=torch.cat(scales),
        minimums=None if minimums[0] is None else torch.cat(minimums),
    )


def _rows_in_8_bits(weight: Tensor) -> Rounded:
    groups = in_groups(weight)
    largest = groups.abs().amax(2)
    scales = (largest / 127).half()
    # by the scale before it is rounded, as llama.cpp does
    inverse = torch.where(largest > 0, 127 / largest, 0.0)
    integers = (groups * inverse[..., None]).round_().to(torch.int8)
    return Rounded(integers, scales, None, weight.shape[1], 8)


def _rows_in_4_bits(weight: Tensor) -> Rounded:
    groups = in_groups(weight)
    minimums = groups.amin(2)
    steps = (groups.amax(2) - minimums) / LARGEST_INT4
    inverse = torch.where(steps > 0, 1 / steps, 0.0)
    integers = ((groups - minimums[..., None]) * inverse[..., None] + 0.5).to(torch.uint8)
    integers.clamp_(max=LARGEST_INT4)
    return Rounded(integers, steps.half(), minimums.half(), weight.shape[1], 4)


def in_groups(rows: Tensor) -> Tensor:
    """Returns rows [n, in] in float32 as [n, groups, GROUP], padded with zeros."""
    padding = -rows.shape[1] % GROUP
    return pad(rows.float(), (0, padding)).view(rows.shape[0], -1, GROUP)


class _Matrix(ctypes.Structure):
    """`matrix` in `kernels.c`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minimums", ctypes.c_void_p),
        ("inputs", ctypes.c_long),
        ("outputs", ctypes.c_long),
        ("kind", ctypes.c_long),
    ]


class PackedWeight:
    """A weight [`outputs`, `inputs`] in a layout of the kernels. `address` is that of C's
    `matrix`."""

    def __init__(
        self,
        kind: int,
        shape: tuple[int, int],
        data: Tensor,
        scales: Tensor | None = None,
        minimums: Tensor | None = None,
    ) -> None:
        self.outputs, self.inputs = shape
        self._tensors = (data, scales, minimums)  # kept: C has their addresses
        addresses = [None if part is None else part.data_ptr() for part in self._tensors]
        self._matrix = _Matrix(*addresses, self.inputs, self.outputs, kind)
        self.address = ctypes.addressof(self._matrix)


def pack_floats(weight: Tensor, library: Library) -> PackedWeight:
    """Packs a weight [out, in] in float32, bfloat16 or float16 as it is, one in float64 as
    float32."""
    if weight.dtype == torch.float64:
        weight = weight.float()
    outputs, inputs = weight.shape
    paired = inputs + inputs % 2
    lanes = library.lanes

    def blocks(rows: Tensor) -> Tensor:
        rows = pad(rows, (0, paired - inputs))
        if weight.dtype == torch.bfloat16:
            return rows.view(-1, lanes, paired // 2, 2).transpose(1, 2)
        return rows.view(-1, lanes, paired).transpose(1, 2)

    data = _packed(weight, lanes, (paired * lanes,), blocks)
    return PackedWeight(FLOAT_KINDS[weight.dtype], (outputs, inputs), data)


def pack_rounded(weight: Rounded, library: Library) -> PackedWeight:
    """Packs a weight in 8 or 4 bits."""
    lanes = library.lanes
    outputs, groups, _ = weight.integers.shape

    def integers(rows: Tensor) -> Tensor:
        if weight.bits == 4:
            rows = rows[:, :, : GROUP // 2] | (rows[:, :, GROUP // 2 :] << 4)
        return rows.view(-1, lanes, groups, rows.shape[2] // 4, 4).permute(0, 2, 3, 1, 4)

    def of_groups(rows: Tensor) -> Tensor:
        return rows.view(-1, lanes, groups).transpose(1, 2)

    bytes_of_block = groups * lanes * GROUP * weight.bits // 8
    data = _packed(weight.integers, lanes, (bytes_of_block,), integers)
    scales = _packed(weight.scales, lanes, (groups * lanes,), of_groups)
    if weight.minimums is None:
        return PackedWeight(_INT8, (outputs, weight.inputs), data, scales)
    minimums = _packed(weight.minimums, lanes, (groups * lanes,), of_groups)
    kind = _INT8_MINIMUM if weight.bits == 8 else _INT4_MINIMUM
    if weight.scales.dtype == torch.float32:
        kind += _WIDER
    return PackedWeight(kind, (outputs, weight.inputs), data, scales, minimums)


def _packed(
    rows: Tensor, lanes: int, size: tuple[int], arrange: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns [blocks, `size`]: what `arrange` makes of `rows` [out, ...], a few blocks of `lanes`
    rows at a time. Rows of zeros complete the last blocks."""
    count = -(-rows.shape[0] // (lanes * _BLOCKS)) * _BLOCKS
    packed = torch.empty(count, *size, dtype=rows.dtype)
    at_once = max(1, _AT_ONCE // (lanes * rows[0].numel())) * lanes
    for first in range(0, count * lanes, at_once):
        last = min(first + at_once, count * lanes)
        part = rows[first:last]
        missing = last - first - part.shape[0]
        if missing:
            part = pad(part, (0, 0) * (part.dim() - 1) + (0, missing))
        own = arrange(part.contiguous())
        packed[first // lanes : last // lanes] = own.reshape(own.shape[0], *size)
    return packed
