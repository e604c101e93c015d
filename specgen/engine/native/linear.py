"""Linear layers: with our own kernels, with torch's products, or with weights packed for oneDNN.

Own kernels, on a CPU: weights as they are stored, or rounded to 8 or 4 bits, and all sums in
float32.

Packed, where there are no kernels: on a CPU, torch computes float32 products of a few rows slowly:
two rows take twice as long as one. oneDNN, with the weight reordered once into its own block
layout, is nearly as fast for 4 rows as for one, and twice as fast in bfloat16. Inductor compiles to
these operators; torch does not document them, so they are tried once before they are used.

Rounded: a pass over few tokens takes as long as reading the weights from memory takes, and these
are 1 byte or half a byte per element. A draft may be rounded freely, because the target verifies
what it drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from specgen.base.types import QUANTISED
from specgen.engine.gguf.rounded import as_rounded, restored
from specgen.engine.kernels.branches import MOST_RUNS, LinearRuns
from specgen.engine.kernels.operators import Kernels, kernels_for
from specgen.engine.kernels.packing import (
    GROUP,
    PackedWeight,
    Rounded,
    in_groups,
    pack_floats,
    pack_rounded,
    rounded_to_4_bits,
    rounded_to_8_bits,
)

Multiply = Callable[[Tensor], Tensor]
# bytes; smaller float32 weights are not packed: a call costs 10 us more, and torch reads them from
# the cache
_SMALL = 4 << 20
# raised by operators that this torch lacks
_ERRORS = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)
_TINY = torch.finfo(torch.float32).tiny  # a scale of rows of zeros
_AT_ONCE = 1 << 18  # elements of a weight that are converted at once, in the processor's cache


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


class MakeLinear(Protocol):
    """Makes a linear layer from a weight [out, in], a bias [out] or None, and the factor of its
    output on the residual stream. `kernels` are those that compute it, and what stands between
    linear layers; None: torch does. `rounding` (`int8`, `int4`) is what weights are rounded to;
    None: they are not."""

    kernels: Kernels | None
    rounding: str | None

    def __call__(
        self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0
    ) -> Linear: ...


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


class KernelLinear(Linear):
    """A linear layer whose products our own kernels compute, with all sums in float32. Not
    differentiable.

    `weights` are those of runs of its outputs, in order. A row of its output has the same bits
    whichever rows are computed with it.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[PackedWeight],
        bias: Tensor | None,
        scale: float,
    ) -> None:
        self._kernels = kernels
        self._scale = scale
        # the outputs of each run, its weight and its bias
        self._runs: list[tuple[slice, PackedWeight, Tensor | None]] = []
        first = 0
        for weight in weights:
            own = slice(first, first + weight.outputs)
            own_bias = None if bias is None else bias[own].float().contiguous()
            self._runs.append((own, weight, own_bias))
            first = own.stop

    @property
    def runs(self) -> LinearRuns:
        """The weights and the biases of runs of outputs."""
        _, weights, biases = zip(*self._runs, strict=True)
        return LinearRuns(weights, biases)

    def __call__(self, x: Tensor) -> Tensor:
        if len(self._runs) == 1:
            _, weight, bias = self._runs[0]
            return self._kernels.product(weight, x, bias)
        return torch.cat(
            [self._kernels.product(weight, x, bias) for _, weight, bias in self._runs], dim=1
        )

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        for own, weight, bias in self._runs:
            outputs = hidden if len(self._runs) == 1 else hidden[:, own]
            self._kernels.add_product(outputs, weight, x, bias, self._scale)
        return hidden


def kernel_runs(*linears: Linear) -> list[LinearRuns] | None:
    """Returns the weights of these linear layers for kernels that run whole branches; None if
    another function computes one of them."""
    made: list[LinearRuns] = []
    for linear in linears:
        if type(linear) is not KernelLinear or len(linear.runs.weights) > MOST_RUNS:
            return None
        made.append(linear.runs)
    return made


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


class TrainedLinears:
    """Makes differentiable linear layers with weights that are being trained, so that no copies of
    them are made for speed. A `MakeLinear`."""

    kernels: Kernels | None = None
    rounding: str | None = None

    def __call__(self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Linear:
        return Linear(lambda x: torch.nn.functional.linear(x, weight, bias), scale)


trained_linear = TrainedLinears()


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


_ROUNDING = {"int8": rounded_to_8_bits, "int4": rounded_to_4_bits}


class LinearFactory:
    """Makes the linear layers of one model, in the form that is fastest on its device. A
    `MakeLinear`.

    In float32 on a CPU, our own `kernels` compute where there are any. Elsewhere on a CPU, weights
    are packed (see `packed_linear`), in float32 those of 4 MB or more. If packed products fail or
    give wrong results here, products in 16-bit dtypes are computed in float32 (`WidenedLinear`).
    `quantise` (`int8`, `int4`) rounds all weights, on a GPU if this torch has products with such
    weights that work.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, quantise: str | None = None
    ) -> None:
        self._on_cpu = device.type == "cpu"
        self._dtype = dtype
        self.rounding = quantise
        self.kernels = kernels_for(device, dtype)

    @property
    def takes_stored(self) -> bool:
        """Whether weights are to be given as they are stored, without the factors of norms: the
        kernels keep them so, and what is rounded are the stored values, with and without
        kernels."""
        is_rounded = self.rounding is not None and self._on_cpu and self._dtype == torch.float32
        return self.kernels is not None or is_rounded

    def __call__(self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Linear:
        """Returns the linear layer with `weight` [out, in] and `bias` [out]."""
        if weight.dtype == torch.uint8:  # of a quantised file
            if self.rounding is None:
                return self._of_runs(as_rounded(weight), bias, scale)
            weight = restored(weight)
        if self.rounding is not None and self._on_cpu:
            return self._of_runs([_ROUNDING[self.rounding](weight)], bias, scale)
        if self.kernels is not None and not weight.requires_grad:
            packed = pack_floats(weight, self.kernels.library)
            return KernelLinear(self.kernels, [packed], bias, scale)
        if self.rounding is not None:
            multiply = quantised_on_gpu(self.rounding, weight, bias)
            if multiply is not None:
                return Linear(multiply, scale)
        return self._dense(weight, bias, scale)

    def _of_runs(self, runs: Sequence[Rounded], bias: Tensor | None, scale: float) -> Linear:
        """Returns the linear layer with a rounded weight in runs of outputs."""
        if self.kernels is not None:
            packed = [pack_rounded(weight, self.kernels.library) for weight in runs]
            return KernelLinear(self.kernels, packed, bias, scale)
        (weight,) = runs
        if self.rounding == "int8":
            return RoundedLinear(weight, bias, scale)
        return self._dense(weight.restored(), bias, scale)

    def _dense(self, weight: Tensor, bias: Tensor | None, scale: float) -> Linear:
        is_small = self._dtype == torch.float32 and weight.nbytes < _SMALL
        if self._on_cpu and not is_small and packing_works(self._dtype):
            return packed_linear(weight, bias, scale)
        if self._on_cpu and self._dtype.itemsize == 2 and not weight.requires_grad:
            return WidenedLinear(weight, bias, scale)
        return DenseLinear(
            weight, bias, scale, by_columns=self._on_cpu and is_small and not weight.requires_grad
        )


def unrounded(
    make_linear: MakeLinear, weight: Tensor, bias: Tensor | None = None, *, is_wide: bool = False
) -> Multiply:
    """Returns a function that computes x W^T + bias with the weight [out, in] as it is, whatever
    `make_linear` rounds weights to.

    The result has the weight's dtype. If `is_wide`, it is in float64, and so are products without
    our own kernels: what is computed from a row and then rounded to float32 does not depend on the
    order of torch's operations, and so not on the rows beside it.
    """
    if make_linear.kernels is not None:
        packed = pack_floats(weight, make_linear.kernels.library)
        linear = KernelLinear(make_linear.kernels, [packed], bias, 1.0)
        return (lambda x: linear(x).double()) if is_wide else linear
    dtype = torch.float64 if is_wide else weight.dtype
    wide_bias = None if bias is None else bias.to(dtype)
    dense = DenseLinear(weight.to(dtype), wide_bias, by_columns=not weight.requires_grad)
    return lambda x: dense(x.to(dtype))


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


class RoundedLinear(Linear):
    """A linear layer with a weight in 8 bits and activations rounded to 8 bits in groups of
    `GROUP`, computed by torch: what `KernelLinear` computes, for machines without our own kernels,
    and slowly. Not differentiable.

    Sums are in float64 and then rounded, so that a row does not depend on the rows beside it.
    """

    def __init__(self, weight: Rounded, bias: Tensor | None, scale: float) -> None:
        self._weight = weight
        self._bias = bias
        self._scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        activations = rounded_activations(x)
        product = x.new_empty(x.shape[0], len(self._weight.integers))
        at_once = max(1, _AT_ONCE // activations.shape[1])
        for first in range(0, product.shape[1], at_once):
            part = self._weight.rows(first, first + at_once)
            product[:, first : first + at_once] = activations @ part.t()
        return product if self._bias is None else product.add_(self._bias)


def rounded_activations(x: Tensor) -> Tensor:
    """Returns activations [n, in] rounded to 8 bits in groups of `GROUP`: float64 [n, in padded to
    whole groups]."""
    groups = in_groups(x)
    largest = groups.abs().amax(2, keepdim=True)
    integers = (groups * torch.where(largest > 0, 127 / largest, 0.0)).round_()
    return (integers.double() * (largest / 127).double()).flatten(1)


def with_int8_weights(weight: Tensor) -> Multiply:
    """Returns a function for products on a GPU with `weight` rounded to int8, with one scale for
    each output, which computes with activations in bfloat16."""
    rows = weight.detach().float()
    scales = (rows.abs().amax(1) / 127).clamp_min_(_TINY)
    rounded = rows.div(scales[:, None]).round_().to(torch.int8)
    operator = torch.ops.aten._weight_int8pack_mm
    scales = scales.to(torch.bfloat16)
    return lambda x: operator(x.to(torch.bfloat16), rounded, scales)


def with_int4_weights(weight: Tensor) -> Multiply:
    """Returns a function for products on a GPU with `weight` rounded to integers from -7 to 7,
    with one scale for `GROUP` elements of a row, which computes with activations in bfloat16.

    Raises ValueError if rows are no multiple of `GROUP`.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"rows of {columns} elements are no groups of {GROUP}")
    groups = weight.detach().float().view(rows, -1, GROUP)
    scales = (groups.abs().amax(2) / 7).clamp_min_(_TINY)
    integers = (groups / scales[..., None]).round_().view(rows, columns)
    unsigned = integers.to(torch.int32) + 8
    operators = torch.ops.aten
    packed = operators._convert_weight_to_int4pack(
        (unsigned[:, ::2] << 4 | unsigned[:, 1::2]).to(torch.uint8), 8
    )
    zeros = torch.zeros_like(scales)
    pairs = torch.stack((scales, zeros), 2).transpose(0, 1).contiguous().to(torch.bfloat16)
    operator = operators._weight_int4pack_mm
    return lambda x: operator(x.to(torch.bfloat16), packed, GROUP, pairs)


_ON_GPU = {"int8": with_int8_weights, "int4": with_int4_weights}


def quantised_bytes(quantise: str, elements: int) -> int:
    """Returns the bytes of a weight of so many elements rounded to `quantise` (`int8`, `int4`),
    scales and minimums included."""
    groups = elements // GROUP
    return elements + 2 * groups if quantise == "int8" else elements // 2 + 4 * groups


def quantised_on_gpu(quantise: str, weight: Tensor, bias: Tensor | None = None) -> Multiply | None:
    """Returns a function that multiplies with `weight` [out, in] rounded to `quantise` (`int8`,
    `int4`) and adds `bias`.

    A weight that cannot be rounded to int4 (in groups) is rounded to int8; returns None if that is
    not possible either. The choice depends on the device and the weight, not on timings, so that
    the draft's probabilities are the same in all processes. Not differentiable.
    """
    for tried in QUANTISED[QUANTISED.index(quantise) :: -1]:
        if refusal(tried, weight.device) is None:
            with suppress(*_ERRORS):  # a shape that the operator does not take
                return partial(_with_bias, _ON_GPU[tried](weight), bias)
    return None


def _with_bias(multiply: Multiply, bias: Tensor | None, x: Tensor) -> Tensor:
    product = multiply(x).to(x.dtype)
    return product if bias is None else product.add_(bias)


def refusal(quantise: str, device: torch.device) -> str | None:
    """Returns why products with weights rounded to `quantise` (`int8`, `int4`) do not work on this
    device; None if they do, as on all CPUs.

    The first call tries them: torch's operators are private.
    """
    return None if device.type == "cpu" else _refusal_on_gpu(quantise, device.type)


@cache
def _refusal_on_gpu(quantise: str, device: str) -> str | None:
    """Compares products of 1 and 5 rows with those of the weight as it is."""
    generator = torch.Generator().manual_seed(0)
    weight, inputs = (torch.randn(rows, 256, generator=generator) for rows in (128, 5))
    limit = 0.03 if quantise == "int8" else 0.25  # of the largest; a wrong product is off by 1
    try:
        multiply = _ON_GPU[quantise](weight.to(device))
        for x in (inputs[:1], inputs):
            expected = x @ weight.T
            off = (multiply(x.to(device)).cpu().float() - expected).abs().max()
            if not off <= limit * expected.abs().max():
                return f"{quantise} products give wrong results"
    except _ERRORS as error:
        first_line, *_ = str(error).split("\n")
        return f"{quantise} products failed: {first_line}"
    return None
