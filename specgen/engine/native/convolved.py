"""Attention and MLP between two dynamic convolutions over the rows of a pass (DFlash2)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.linear import Linear, MakeLinear


class DynamicConvolution:
    """Causal convolutions of each channel over the rows of a pass, with kernels that depend on the
    row. Rows before the first one are 0.

    The kernel of row i at a tap (0: the row itself, 1: the one before it, ...) is, for channel c of
    group g, `base[side, tap, c]` plus output (side * taps + tap) * groups + g of `projection` for
    the row. There are two convolutions, the sides 0 and 1. `base` is [2, taps, width], the weight
    of `projection` [2 * taps * groups, width].
    """

    def __init__(
        self, base: torch.Tensor, projection: torch.Tensor, group: int, make_linear: MakeLinear
    ) -> None:
        sides, taps, width = base.shape
        self._shape = sides, taps, width // group
        self._base = base.view(*self._shape, group)
        self._project = make_linear(projection)

    def dynamic(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the rows `x` [n, width] add to the base kernels, [n, 2, taps, groups, 1]."""
        return self._project(x).view(len(x), *self._shape, 1)

    def __call__(self, x: torch.Tensor, dynamic: torch.Tensor, side: int) -> torch.Tensor:
        """Returns the rows `x` [n, width] convolved by the kernels of this side."""
        rows, width = x.shape
        _, taps, groups = self._shape
        kernels = self._base[side] + dynamic[:, side]
        padded = functional.pad(x, (0, 0, taps - 1, 0)).view(taps - 1 + rows, groups, -1)
        total = kernels[:, 0] * padded[taps - 1 :]
        for tap in range(1, taps):
            total = torch.addcmul(total, kernels[:, tap], padded[taps - 1 - tap : -tap])
        return total.view(rows, width)


class _Convolvable(Protocol):
    output: Linear

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor: ...


class ConvolvedBranch:
    """An attention or an MLP whose normed input and whose output are convolved, both by kernels of
    the normed input. A `Branch`.

    `scale` is the factor of the output on the residual stream.
    """

    on_torch = ("convolutions of rows",)

    def __init__(self, branch: _Convolvable, convolution: DynamicConvolution, scale: float) -> None:
        self._branch = branch
        self._convolution = convolution
        self.output = Linear(lambda x: x, scale)

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        convolve = self._convolution
        dynamic = convolve.dynamic(x)
        inner = self._branch(convolve(x, dynamic, 0), inputs)
        return convolve(self._branch.output(inner), dynamic, 1)
