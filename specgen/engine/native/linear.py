"""Linear layers: with torch's own products, with weights packed for oneDNN, or with weights rounded
to 8 or 4 bits.

Packed: on a CPU, torch computes float32 products of a few rows slowly: two rows take twice as long
as one. oneDNN, with the weight reordered once into its own block layout, is nearly as fast for 4
rows as for one, and twice as fast in bfloat16. Inductor compiles to these operators; torch does not
document them, so they are tried once before they are used.

Rounded: a pass over few tokens takes as long as reading the weights from memory takes, and these
are 1 byte or half a byte per element. Rounding is symmetric: in int8 each output row has one scale,
in int4 each group of 32 elements of a row. A draft may be rounded freely, because the target
verifies what it drafts. torch's operators are private or differ between devices, so each is
compared with the product of the same rounded weights before it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from math import sqrt

import torch
from torch import Tensor

from specgen.base.types import QUANTISED

Multiply = Callable[[Tensor], Tensor]
GROUP = 32  # elements that share a scale in int4
# bytes; smaller float32 weights are not packed: a call costs 10 us more, and torch reads them from
# the cache
_SMALL = 4 << 20
# raised by operators that this torch lacks
_ERRORS = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)
_TINY = torch.finfo(torch.float32).tiny  # a scale of rows of zeros
_AT_ONCE = 1 << 18  # elements of a weight that are converted at once, in the processor's cache
# a product has to keep at least this many bits of each activation, without the sign
_ACTIVATION_BITS = 6


class Linear:
    """A linear layer with a weight [out, in]. `multiply` computes its output, [n, in] -> [n, out],
    with the bias [out] if there is one.

    `scale` is the factor on the output in `add_to`, which adds it to the residual stream.
    """

    def __init__(self, multiply: Multiply, scale: float = 1.0) -> None:
        self._multiply = multiply
        self._scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x W^T + bias: [n, in] -> [n, out]."""
        return self._multiply(x)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        """Returns hidden + scale * (x W^T + bias): [n, out], [n, in] -> [n, out]. Without
        gradients, `hidden` is changed."""
        product = self(x)
        if torch.is_grad_enabled():
            return torch.add(hidden, product, alpha=self._scale)
        return hidden.add_(product, alpha=self._scale)


# Makes a linear layer from a weight [out, in], a bias [out] or None, and the factor of its output
# on the residual stream.
MakeLinear = Callable[[Tensor, Tensor | None, float], Linear]


class DenseLinear(Linear):
    """A linear layer with its weight in torch's own layout. Differentiable.

    It keeps a reference to the weight. With `by_columns` it keeps a copy that is stored [in, out],
    with which products of a few rows with small float32 weights take less time.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        scale: float = 1.0,
        *,
        by_columns: bool = False,
    ) -> None:
        self._transposed = weight.t().contiguous() if by_columns else weight.t()
        self._bias = bias
        self._scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        return (
            torch.mm(x, self._transposed)
            if self._bias is None
            else torch.addmm(self._bias, x, self._transposed)
        )

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            total = torch.addmm(hidden, x, self._transposed, alpha=self._scale)
        else:
            total = hidden.addmm_(x, self._transposed, alpha=self._scale)
        return total if self._bias is None else total.add_(self._bias, alpha=self._scale)


class WidenedLinear(DenseLinear):
    """A linear layer with a weight of a 16-bit dtype, for CPUs without instructions for this dtype.
    Not differentiable.

    There, torch's product of n rows takes n times as long as that of one row. So from two rows on,
    parts of the weight that fit into the processor's cache are converted to float32, in which
    products of a few rows take little more time than those of one.
    """

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return super().__call__(x)
        weight = self._transposed.t()
        x_wide = x.float()
        rows = max(1, _AT_ONCE // weight.shape[1])
        total = x_wide.new_empty(x.shape[0], weight.shape[0])
        part = x_wide.new_empty(rows, weight.shape[1])
        for first in range(0, weight.shape[0], rows):
            stored = weight[first : first + rows]
            part[: len(stored)] = stored
            torch.mm(x_wide, part[: len(stored)].t(), out=total[:, first : first + rows])
        return (total if self._bias is None else total.add_(self._bias)).to(x.dtype)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        return hidden.add_(self(x), alpha=self._scale)


def trained_linear(weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Linear:
    """Returns a linear layer with a weight that is being trained, so that no copy of it is made for
    speed. Differentiable."""
    return Linear(lambda x: torch.nn.functional.linear(x, weight, bias), scale)


def packed_linear(weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Linear:
    """Returns a linear layer with a copy of `weight` [out, in] that is reordered for oneDNN's fast
    products on a CPU. Not differentiable.

    Raises AttributeError or RuntimeError if this torch lacks the operators or cannot run them for
    the weight's dtype.
    """
    multiply = torch.ops.mkldnn._linear_pointwise
    # 8 rows; for 1, float32 stays as it is
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)
    return Linear(lambda x: multiply(x, packed, bias, "none", [], ""), scale)


class LinearFactory:
    """Makes the linear layers of one model, in the form that is fastest on its device.

    On a CPU, weights are packed (see `packed_linear`), in float32 those of 4 MB or more. If packed
    products fail or give wrong results here, products in 16-bit dtypes are computed in float32
    (`WidenedLinear`). `quantise` (`int8`, `int4`) rounds all weights, if this torch has products
    with such weights that work.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, quantise: str | None = None
    ) -> None:
        self._on_cpu = device.type == "cpu"
        self._dtype = dtype
        self._quantise = quantise

    def __call__(self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Linear:
        """Returns the linear layer with `weight` [out, in] and `bias` [out]."""
        if (
            self._quantise is not None
            and (multiply := quantised(self._quantise, weight, bias)) is not None
        ):
            return Linear(multiply, scale)
        is_small = self._dtype == torch.float32 and weight.nbytes < _SMALL
        if self._on_cpu and not is_small and packing_works(self._dtype):
            return packed_linear(weight, bias, scale)
        if self._on_cpu and self._dtype.itemsize == 2 and not weight.requires_grad:
            return WidenedLinear(weight, bias, scale)
        return DenseLinear(
            weight, bias, scale, by_columns=self._on_cpu and is_small and not weight.requires_grad
        )


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether packed products in this dtype work on this machine: compares one with torch's own for
    1 and for 4 rows."""
    generator = torch.Generator().manual_seed(0)
    size = 256
    weight, x = (torch.randn(rows, size, generator=generator).to(dtype) for rows in (192, 4))
    # roundings of result and sums
    limit = 2 * torch.finfo(dtype).eps + 4 * sqrt(size) * torch.finfo(torch.float32).eps
    try:
        with torch.no_grad():
            packed = packed_linear(weight)
            expected = torch.nn.functional.linear(x, weight)
            errors = [(packed(x[:rows]) - expected[:rows]).abs().max() for rows in (1, 4)]
    except _ERRORS:
        return False
    return bool(max(errors) <= limit * expected.abs().max())


def rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight [out, in] to int8 [out, in], with float32 scales [out], one for each row.
    Returns both.

    int8 * scale differs from the weight by at most half a scale.
    """
    rounded = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
    scales = weight.new_empty(weight.shape[0], dtype=torch.float32)
    at_once = max(1, _AT_ONCE // weight.shape[1])
    for first in range(0, weight.shape[0], at_once):
        rows = weight[first : first + at_once].float()
        scale = scales[first : first + at_once]
        torch.div(rows.abs().amax(1), 127, out=scale).clamp_min_(_TINY)
        rounded[first : first + at_once] = rows.div(scale[:, None]).round_()
    return rounded, scales


def rounded_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight [out, in] to int8 from -7 to 7 [out, in], with float32 scales [out,
    in / `GROUP`]. Returns both.

    `GROUP` neighbouring elements of a row share a scale. Raises ValueError if `in` is no multiple
    of `GROUP`.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"rows of {columns} elements are no groups of {GROUP}")
    groups = weight.detach().float().view(rows, -1, GROUP)
    scales = (groups.abs().amax(2) / 7).clamp_min_(_TINY)
    return (groups / scales[..., None]).round_().to(torch.int8).view(rows, columns), scales


def with_rounded_activations(weight: Tensor, steps: int = 127) -> Multiply:
    """Returns a function for products on a CPU with `weight` rounded to int8, which also rounds
    activations to integers.

    `steps` is the largest integer for activations, of either sign. Each row of activations is
    rounded by its own range, so its product does not depend on the other rows. Integer instructions
    multiply both. Those of older processors add pairs of products in 16 bits, for which 127 steps
    are too many and 63 are not. The operator takes torch's quantised tensors, which torch 2.13
    calls deprecated.
    """
    rounded, scales = rounded_rows(weight)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        whole = torch._make_per_channel_quantized_tensor(rounded, scales.double(), zeros, 0)
        packed = torch.ops.quantized.linear_prepack(whole, None)
    operator = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32

    def multiply(x: Tensor) -> Tensor:
        x = x.float()
        largest = x.abs().amax(1, keepdim=True).clamp_min_(_TINY)
        product: Tensor = operator(x / largest, 1 / steps, steps + 1, packed)
        return product.mul_(largest)

    return multiply


def with_int8_weights(weight: Tensor) -> Multiply:
    """Returns a function for products with `weight` rounded to int8, which computes with
    activations in bfloat16."""
    rounded, scales = rounded_rows(weight)
    operator = torch.ops.aten._weight_int8pack_mm
    scales = scales.to(torch.bfloat16)
    return lambda x: operator(x.to(torch.bfloat16), rounded, scales)


def with_int4_weights(weight: Tensor) -> Multiply:
    """Returns a function for products with `weight` rounded to int4, which computes with
    activations in bfloat16.

    `GROUP` elements of a row share a scale.
    """
    rounded, scales = rounded_groups(weight)
    unsigned = rounded.to(torch.int32) + 8
    operators = torch.ops.aten
    if weight.device.type == "cpu":
        packed = operators._convert_weight_to_int4pack_for_cpu(unsigned, 1)
        operator = operators._weight_int4pack_mm_for_cpu
    else:
        packed = operators._convert_weight_to_int4pack(
            (unsigned[:, ::2] << 4 | unsigned[:, 1::2]).to(torch.uint8), 8
        )
        operator = operators._weight_int4pack_mm
    pairs = (
        torch.stack((scales, torch.zeros_like(scales)), 2)
        .transpose(0, 1)
        .contiguous()
        .to(torch.bfloat16)
    )
    return lambda x: operator(x.to(torch.bfloat16), packed, GROUP, pairs)


def quantised_bytes(quantise: str, elements: int, rows: int) -> int:
    """Returns the bytes of a weight rounded to `quantise` (`int8`, `int4`), scales included, of so
    many elements and output rows."""
    return elements + 4 * rows if quantise == "int8" else elements // 2 + 4 * elements // GROUP


def quantised(quantise: str, weight: Tensor, bias: Tensor | None = None) -> Multiply | None:
    """Returns a function that multiplies with `weight` [out, in] rounded to `quantise` (`int8`,
    `int4`) and adds `bias`.

    A weight that cannot be rounded to int4 (in groups) is rounded to int8; returns None if that is
    not possible either. The choice depends on the device and the weight, not on timings, so that
    the draft's probabilities are the same in all processes. Not differentiable.
    """
    for tried in QUANTISED[QUANTISED.index(quantise) :: -1]:
        prepare, _ = _working(tried, weight.device.type)
        if prepare is not None:
            with suppress(*_ERRORS):  # a shape that the operator does not take
                return partial(_with_bias, prepare(weight.detach()), bias)
    return None


def _with_bias(multiply: Multiply, bias: Tensor | None, x: Tensor) -> Tensor:
    product = multiply(x).to(x.dtype)
    return product if bias is None else product.add_(bias)


def refusal(quantise: str, device: torch.device) -> str | None:
    """Returns why products with weights rounded to `quantise` (`int8`, `int4`) do not work on this
    device; None if they do.

    The first call tries them.
    """
    return _working(quantise, device.type)[1]


@cache
def _working(quantise: str, device: str) -> tuple[Callable[[Tensor], Multiply] | None, str | None]:
    """Returns a function that prepares products with rounded weights on this device (`cpu`,
    `cuda`), and None.

    If no such products give right results, returns None and the reason why the last one that was
    tried does not.
    """
    tried = [with_int8_weights if quantise == "int8" else with_int4_weights]
    if (quantise, device) == ("int8", "cpu"):
        tried[:0] = with_rounded_activations, partial(with_rounded_activations, steps=63)  # faster
    reason = None
    for prepare in tried:
        try:
            if _is_right(quantise, prepare, torch.device(device)):
                return prepare, None
            reason = f"{quantise} products give wrong results"
        except _ERRORS as error:
            first_line, *_ = str(error).split("\n")
            reason = f"{quantise} products failed: {first_line}"
    return None, reason


@cache
def rows_are_independent(quantise: str, device: torch.device) -> bool:
    """Whether a row of a product with rounded weights has the same bits whichever rows are
    multiplied with it. Tries 2 to 9 rows."""
    multiply = quantised(
        quantise, torch.randn(96, 256, generator=torch.Generator().manual_seed(1)).to(device)
    )
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(2)).to(device)
    if multiply is None:
        return False
    alone = torch.cat([multiply(row[None]) for row in x])
    return all(torch.equal(multiply(x[:rows]), alone[:rows]) for rows in range(2, 10))


def _is_right(quantise: str, prepare: Callable[[Tensor], Multiply], device: torch.device) -> bool:
    """Compares products of 1 and 5 rows with those of the same rounded weights in float64."""
    generator = torch.Generator().manual_seed(0)
    weight, inputs = (torch.randn(rows, 256, generator=generator) for rows in (128, 5))
    # the largest sum there can be
    weight[0] = 1.0
    inputs[0] = 1.0
    multiply = prepare(weight.to(device))
    exact = restored(quantise, weight)
    for x in (inputs[:1], inputs):
        product = multiply(x.to(device)).cpu().double()
        expected = x.double() @ exact.T
        step = x.abs().amax(1, keepdim=True).double() * 2.0**-_ACTIVATION_BITS
        # six standard deviations of the rounding of activations
        limit = step * exact.norm(dim=1).max() / sqrt(12) * 6
        if not bool(((product - expected).abs() <= limit + 0.01 * expected.abs()).all()):
            return False
    return True


def restored(quantise: str, weight: Tensor) -> Tensor:
    """Returns what becomes of a weight [out, in] by rounding to `quantise` (`int8`, `int4`), as
    float64."""
    rounded, scales = (rounded_rows if quantise == "int8" else rounded_groups)(weight)
    return rounded.double() * scales.double().view(len(scales), -1).repeat_interleave(
        1 if quantise == "int8" else GROUP, 1
    )
