"""The weights of experts, of which the kernels compute those that have rows in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from specgen.engine.kernels.branches import LinearRuns, address


class _ExpertPart(ctypes.Structure):
    """`expert_part` in `kernels.c`."""

    _fields_ = [
        ("expert", ctypes.c_long),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("column", ctypes.c_long),
    ]


class ExpertsWeight:
    """The same linear layer of several experts, each with weights [`outputs`, `inputs`]; `inputs`
    has to be even. `address` is that of C's array of `count` parts."""

    def __init__(self, experts: Sequence[LinearRuns]) -> None:
        self._experts = experts  # kept: C has their addresses
        self.inputs = experts[0].inputs
        self.outputs = experts[0].outputs
        assert self.inputs % 2 == 0
        parts = []
        for number, runs in enumerate(experts):
            column = 0
            for weight, bias in zip(runs.weights, runs.biases, strict=True):
                parts.append(_ExpertPart(number, weight.address, address(bias), column))
                column += weight.outputs
        self.count = len(parts)
        self._parts = (_ExpertPart * self.count)(*parts)
        self.address = ctypes.addressof(self._parts)
