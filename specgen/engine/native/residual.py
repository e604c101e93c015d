"""The residual stream: the hidden states that the layers add to, and the norms without weights that they read it through."""

from __future__ import annotations

from math import sqrt
from typing import Protocol

import torch
from torch.nn import functional

from specgen.engine.devices import move
from specgen.engine.native.products import Product


class Residual(Protocol):
    """The hidden states [n, width] between the parts of a decoder."""

    values: torch.Tensor

    def normed(self) -> torch.Tensor:
        """Returns the normalised hidden states, without the norm's weights, divided by the `norm_gain` of this kind of stream."""
        ...

    def add_product(self, product: Product, x: torch.Tensor) -> None:
        """Adds a product's output for `x`, times the product's scale."""
        ...

    def add(self, branch: torch.Tensor, scale: float) -> None:
        """Adds `branch` times `scale`."""
        ...

    def move_to(self, device: torch.device) -> None:
        """Moves the hidden states to another device; does nothing if they are there."""
        ...


class PlainResidual:
    """A residual stream with torch's norms, which also works where gradients are computed. Its gain is 1.

    `in_place` changes the tensor `hidden` itself, without gradients: a sum in place of a product and its addend needs no copy of
    the addend, which on a GPU is a kernel of its own.
    """

    def __init__(self, hidden: torch.Tensor, eps: float, *, layer_norm: bool = False, in_place: bool = False) -> None:
        self.values = hidden
        self._eps, self._layer_norm, self._in_place = eps, layer_norm, in_place

    def normed(self) -> torch.Tensor:
        norm = functional.layer_norm if self._layer_norm else functional.rms_norm
        return norm(self.values, self.values.shape[-1:], None, eps=self._eps)

    def add_product(self, product: Product, x: torch.Tensor) -> None:
        if self._in_place:
            product.add_into(self.values, x)
        else:
            self.values = product.add_to(self.values, x)

    def add(self, branch: torch.Tensor, scale: float) -> None:
        self.values = self.values.add_(branch, alpha=scale) if self._in_place else self.values.add(branch, alpha=scale)

    def move_to(self, device: torch.device) -> None:
        self.values = move(self.values, device)


class ExtendedResidual:
    """A residual stream whose RMSNorm takes two operations, for float32 on a CPU, where torch's own takes eight.

    The buffer has one more column, which holds sqrt(width * eps). So the norm of a row is sqrt(sum of squares + width * eps), and
    a row divided by it is RMSNorm's output divided by sqrt(width): the gain, which belongs into the weights of what reads it.
    """

    def __init__(self, hidden: torch.Tensor, eps: float) -> None:
        rows, width = hidden.shape
        self._buffer = hidden.new_empty(rows, width + 1)
        self._buffer.select(1, width).fill_(sqrt(width * eps))
        self.values = self._buffer[:, :width]
        self.values.copy_(hidden)

    def move_to(self, device: torch.device) -> None:
        if self._buffer.device != device:
            self._buffer = move(self._buffer, device)
            self.values = self._buffer[:, :-1]

    def normed(self) -> torch.Tensor:
        normed: torch.Tensor = self.values / torch.linalg.vector_norm(self._buffer, dim=1, keepdim=True)
        return normed

    def add_product(self, product: Product, x: torch.Tensor) -> None:
        product.add_into(self.values, x)

    def add(self, branch: torch.Tensor, scale: float) -> None:
        self.values.add_(branch, alpha=scale)
