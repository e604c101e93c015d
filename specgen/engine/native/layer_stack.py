"""Layers that are run one after the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from specgen.engine.forward_pass import LayerCall
from specgen.engine.kernels.branches import KernelBranch, Program
from specgen.engine.kernels.operators import own_kernels
from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.layer import NativeLayer

# rows; in longer passes, calls from Python take no visible share, and progress and interruptions
# are wanted between layers
SHORT_PASS = 32


class Piece(NamedTuple):
    """The layers `first` to `last` - 1 of a stack. `program` runs them in one call of the kernels;
    None: they are called one by one."""

    first: int
    last: int
    program: Program | None


class LayerStack:
    """Runs layers, in short passes as many in one call of the kernels as they can run.

    `calls` says what is run of each of `layers` (None: everything). Pieces end before the layers
    with the indices `stops`.
    """

    def __init__(
        self,
        layers: Sequence[NativeLayer],
        calls: Sequence[LayerCall] | None = None,
        stops: Collection[int] = (),
    ) -> None:
        self._layers = layers
        self._calls = [LayerCall(index) for index in range(len(layers))] if calls is None else calls
        branches = [
            layer.for_kernels(attention=call.attention, mlp=call.mlp)
            for layer, call in zip(layers, self._calls, strict=True)
        ]
        starts = [
            index
            for index, own in enumerate(branches)
            if index in stops or own is None or index == 0 or branches[index - 1] is None
        ]
        self._short = _pieces(branches, starts)
        self._long = _pieces(branches, range(len(branches)))

    def __len__(self) -> int:
        return len(self._layers)

    def pieces(self, inputs: PassInputs) -> Sequence[Piece]:
        """Returns the pieces that `run` runs in a pass with these inputs, in order."""
        is_short = inputs.place is not None and inputs.rows <= SHORT_PASS
        return self._short if is_short else self._long

    @property
    def short_pieces(self) -> Sequence[Piece]:
        """The pieces of short passes."""
        return self._short

    def run(self, piece: Piece, hidden: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        """Runs a piece on the residual stream `hidden` [batch * rows, width]. Returns it; without
        gradients, `hidden` is changed."""
        if piece.program is not None and inputs.place is not None:
            kernels = own_kernels()
            assert kernels is not None
            cache, slot, kinds = inputs.place
            hidden = hidden.contiguous()
            kernels.run(piece.program, hidden, kinds, cache.places(), cache.first_layer, slot)
            return hidden
        own = slice(piece.first, piece.last)
        for layer, call in zip(self._layers[own], self._calls[own], strict=True):
            hidden = layer(hidden, inputs, attention=call.attention, mlp=call.mlp)
        return hidden

    def __call__(self, hidden: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        """Runs all layers; see `run`."""
        for piece in self.pieces(inputs):
            hidden = self.run(piece, hidden, inputs)
        return hidden


def _pieces(branches: Sequence[list[KernelBranch] | None], starts: Sequence[int]) -> list[Piece]:
    """Returns the pieces that begin at `starts`, of layers with these branches."""
    made: list[Piece] = []
    for first, last in pairwise([*starts, len(branches)]):
        own = [branch for of_layer in branches[first:last] for branch in of_layer or ()]
        made.append(Piece(first, last, Program(own) if own else None))
    return made
