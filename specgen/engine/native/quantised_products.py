"""Matrix products with weights that are rounded to 8 or 4 bits when a draft model is loaded.

A pass over few tokens takes as long as reading the weights from memory takes, and these are 1 byte or half a byte per number.
Rounding is symmetric: in int8 each output row has one scale, in int4 each group of 32 numbers of a row. A draft may be rounded
freely, because the target verifies what it drafts. torch's operators for such products are private or differ between devices, so
`quantised_product` compares each with the product of the same rounded weights before it is used for a model.

Timed on two AMD cores with AVX-512 (torch 2.13, 1 thread, weights [8192, 2048] from memory, 1 / 4 rows): float32 packed 8.6 / 8.0
ms, bfloat16 packed 6.5 / 4.3, int8 with rounded activations 0.9 / 1.2, int8 with bfloat16 activations 2.5 / 7.1, int4 1.1 / 2.0.
With float32 activations, torch computes the last two without vector instructions: 3 to 20 times as slow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import sqrt

import torch
from torch import Tensor

from specgen.base.types import QUANTISED

GROUP = 32  # numbers that share a scale in int4
OPERATOR_ERRORS = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)
Multiply = Callable[[Tensor], Tensor]
Prepare = Callable[[Tensor], Multiply]
_TRIAL_ROWS = (1, 5)
_TINY = torch.finfo(torch.float32).tiny  # a scale of rows of zeros
_AT_ONCE = 1 << 18  # numbers that are rounded at once, in the processor's cache
_ACTIVATION_BITS = 6  # at least, that a product keeps of each activation, its sign not counted


def rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weight [out, in] as int8 [out, in] and float32 scales [out]. int8 * scale is off by half a scale at most."""
    rounded = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scales = weight.new_empty(weight.shape[0], dtype=torch.float32)
    at_once = max(1, _AT_ONCE // weight.shape[1])
    for first in range(0, weight.shape[0], at_once):
        rows, scale = weight[first : first + at_once].float(), scales[first : first + at_once]
        torch.div(rows.abs().amax(1), 127, out=scale).clamp_min_(_TINY)
        rounded[first : first + at_once] = rows.div(scale[:, None]).round_()
    return rounded, scales


def rounded_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weight [out, in] as int8 numbers from -7 to 7 [out, in] and float32 scales [out, in / `GROUP`].

    Raises ValueError if rows are no whole number of groups.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"rows of {columns} numbers are no groups of {GROUP}")
    groups = weight.detach().float().view(rows, -1, GROUP)
    scales = (groups.abs().amax(2) / 7).clamp_min_(_TINY)
    return (groups / scales[..., None]).round_().to(torch.int8).view(rows, columns), scales


class QuantisedProduct:
    """A product with a rounded weight; it keeps no reference to `weight`. Not differentiable.

    `kind` is `int8` or `int4`. `prepare` rounds the weight [out, in] and returns a function that multiplies: [n, in] -> [n, out].
    Raises one of `OPERATOR_ERRORS` if this torch lacks an operator or cannot run it.
    """

    def __init__(self, kind: str, prepare: Prepare, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> None:
        self.kind = kind
        self.out_features, self.in_features = weight.shape
        self._multiply = prepare(weight.detach())
        self._bias, self._scale = bias, scale

    def __call__(self, x: Tensor) -> Tensor:
        product = self._multiply(x).to(x.dtype)
        return product if self._bias is None else product.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.add(residual, self(x), alpha=self._scale)

    def add_into(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self(x), alpha=self._scale)


def with_rounded_activations(weight: Tensor, *, bits: int = 8) -> Multiply:
    """Prepares products on a CPU with int8 weights and activations that are rounded to 8 bits too, each row by its own range.

    Integer instructions multiply both. `bits` 7 leaves a bit unused, for processors whose instructions add pairs of products in
    16 bits. The operator takes torch's quantised tensors, which torch 2.13 calls deprecated.
    """
    rounded, scales = rounded_rows(weight)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        quantised = torch._make_per_channel_quantized_tensor(rounded, scales.double(), zeros, 0)
        packed = torch.ops.quantized.linear_prepack(quantised, None)
    operator, reduce_range = torch.ops.quantized.linear_dynamic, bits < 8
    ends = torch.zeros(1, weight.shape[1])
    ends[0, :2] = torch.tensor([-1.0, 1.0])[: weight.shape[1]]

    def multiply(x: Tensor) -> Tensor:
        """Scales rows to numbers from -1 to 1, and adds a row that has both: the operator's range is that of all rows together.

        So a row's product does not depend on the other rows.
        """
        x = x.float()
        largest = x.abs().amax(1, keepdim=True).clamp_min_(_TINY)
        product: Tensor = operator(torch.cat((x / largest, ends)), packed, reduce_range)
        return product[:-1].mul_(largest)

    return multiply


def with_int8_weights(weight: Tensor) -> Multiply:
    """Prepares products with int8 weights and bfloat16 activations."""
    rounded, scales = rounded_rows(weight)
    operator, scales = torch.ops.aten._weight_int8pack_mm, scales.to(torch.bfloat16)
    return lambda x: operator(x.to(torch.bfloat16), rounded, scales)


def with_int4_weights(weight: Tensor) -> Multiply:
    """Prepares products with int4 weights, of which `GROUP` numbers of a row share a scale, and bfloat16 activations."""
    rounded, scales = rounded_groups(weight)
    numbers, operators = rounded.to(torch.int32) + 8, torch.ops.aten
    if weight.device.type == "cpu":
        packed = operators._convert_weight_to_int4pack_for_cpu(numbers, 1)
        operator = operators._weight_int4pack_mm_for_cpu
    else:
        packed = operators._convert_weight_to_int4pack((numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8), 8)
        operator = operators._weight_int4pack_mm
    pairs = torch.stack((scales, torch.zeros_like(scales)), 2).transpose(0, 1).contiguous().to(torch.bfloat16)
    return lambda x: operator(x.to(torch.bfloat16), packed, GROUP, pairs)


def quantised_bytes(kind: str, numbers: int, rows: int) -> int:
    """Returns the bytes of a weight with so many numbers and output rows, its scales included."""
    return numbers + 4 * rows if kind == "int8" else numbers // 2 + 4 * numbers // GROUP


def _preparations(kind: str, device: str) -> Sequence[Prepare]:
    """Returns what prepares products with `int8` or `int4` weights on a device (`cpu`, `cuda`), the fastest first."""
    if kind == "int4":
        return [with_int4_weights]
    if device == "cpu":
        return [with_rounded_activations, partial(with_rounded_activations, bits=7), with_int8_weights]
    return [with_int8_weights]


def quantised_product(
    kind: str, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> tuple[QuantisedProduct | None, str | None]:
    """Returns the product with `weight` [out, in] rounded to `kind` (`int8`, `int4`), or else None and why there is none here.

    A weight that cannot be rounded to int4 groups is rounded to int8. The choice depends on the device and the weight, not on
    timings: the draft's probabilities are alike in all processes.
    """
    reason = None
    for tried in QUANTISED[QUANTISED.index(kind) :: -1]:
        prepare, problem = _working(tried, weight.device.type)
        if prepare is not None:
            try:
                return QuantisedProduct(tried, prepare, weight, bias, scale), reason
            except OPERATOR_ERRORS as error:  # a shape that the operator does not take
                problem = f"{tried} products failed: {_first_line(error)}"
        reason = reason or problem
    return None, reason


def refusal(kind: str, device: torch.device) -> str | None:
    """Returns why there are no `int8` or `int4` products on this device, None if there are. Tries them at the first call."""
    return _working(kind, device.type)[1]


@cache
def _working(kind: str, device: str) -> tuple[Prepare | None, str | None]:
    """Returns what prepares products that are right on this device, or None and why the last that was tried is not."""
    reason = ""
    for prepare in _preparations(kind, device):
        try:
            if _is_right(kind, prepare, torch.device(device)):
                return prepare, None
            reason = f"{kind} products give wrong results"
        except OPERATOR_ERRORS as error:
            reason = f"{kind} products failed: {_first_line(error)}"
    return None, reason


def _is_right(kind: str, prepare: Prepare, device: torch.device) -> bool:
    """Compares products with those of the same rounded weights in float64, with the largest numbers too, whose sums overflow."""
    generator = torch.Generator().manual_seed(0)
    largest = torch.ones(128, 256)
    for weight in (torch.randn(128, 256, generator=generator) / 16, largest):
        multiply = prepare(weight.to(device))
        exact = _restored(kind, weight).double()
        for rows in _TRIAL_ROWS:
            x = torch.ones(rows, 256) if weight is largest else torch.randn(rows, 256, generator=generator)
            expected = x.double() @ exact.T
            found = multiply(x.to(device)).cpu().double()
            step = x.abs().amax(1, keepdim=True).double() * 2.0**-_ACTIVATION_BITS
            limit = step * exact.norm(dim=1).max() / sqrt(12) * 6  # six standard deviations of the rounding of activations
            if not bool(((found - expected).abs() <= limit + 0.01 * expected.abs()).all()):
                return False
    return True


def _restored(kind: str, weight: Tensor) -> Tensor:
    """Returns a weight as it is after rounding, in float32."""
    if kind == "int8":
        rounded, scales = rounded_rows(weight)
        return rounded * scales[:, None]
    rounded, scales = rounded_groups(weight)
    return rounded * scales.repeat_interleave(GROUP, 1)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
