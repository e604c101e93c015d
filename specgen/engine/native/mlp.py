"""The dense MLP of a layer: its weights in a model's files, how they are read, and how it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from specgen.engine.kernels.branches import BranchNorms, KernelBranch
from specgen.engine.kernels.operators import ACTIVATIONS as ACTIVATION_NUMBERS
from specgen.engine.native.architecture import Activation, Architecture
from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.linear import MakeLinear, kernel_runs
from specgen.engine.native.tensors import LinearFiles, linear_files, scaled, stacked
from specgen.engine.weights import Take

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@dataclass(frozen=True, slots=True)
class MLPFiles:
    """The weights of an MLP in a model's files. `gate_up` are the gate and the up projection, or
    one with the rows of both."""

    gate_up: tuple[LinearFiles, ...]
    down: LinearFiles


def mlp_files(architecture: Architecture, index: int) -> MLPFiles:
    """Returns the weights of the dense MLP of layer `index`, whose sizes `architecture` has (see
    `Architecture.of_layer`)."""
    block = f"layers.{index}.mlp."
    inner = architecture.intermediate_size
    if not architecture.fused_projections:
        return gated_mlp_files(
            block, architecture.hidden_size, inner, has_bias=architecture.mlp_bias
        )
    width = architecture.hidden_size
    has_bias = architecture.mlp_bias
    gate_up = linear_files(
        f"{block}gate_up_proj",
        2 * inner,
        width,
        has_bias=has_bias,
        split="rows",
        units=("neurons", "neurons"),
    )
    return MLPFiles((gate_up,), _down(block, width, inner, has_bias=has_bias))


def gated_mlp_files(block: str, width: int, inner: int, *, has_bias: bool = False) -> MLPFiles:
    """Returns the weights of an MLP with separate gate and up projections, whose names begin with
    `block`."""
    gate, up = (
        linear_files(
            f"{block}{name}", inner, width, has_bias=has_bias, split="rows", units=("neurons",)
        )
        for name in ("gate_proj", "up_proj")
    )
    return MLPFiles((gate, up), _down(block, width, inner, has_bias=has_bias))


def _down(block: str, width: int, inner: int, *, has_bias: bool) -> LinearFiles:
    return linear_files(
        f"{block}down_proj", width, inner, has_bias=has_bias, split="columns", units=("neurons",)
    )


class MLPWeights(NamedTuple):
    """The weights of an MLP. Matrices are [out, in]; `gate_up` has the rows of the gate, then those
    of the up projection."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def read_mlp(
    files: MLPFiles,
    take: Take,
    dtype: torch.dtype | None,
    gain: torch.Tensor | None,
    take_matrix: Take | None = None,
) -> MLPWeights:
    """Returns the MLP's weights in `dtype`. `take` returns a tensor by name. `gain` [width]: the
    factors of the norm before it, None without one. `dtype` None: matrices stay as
    `take_matrix` returns them, and biases are in float32."""
    gate_up, gate_up_bias = stacked(files.gate_up, take, take_matrix)
    down, down_bias = stacked((files.down,), take, take_matrix)
    if gain is not None:
        is_copy = len(files.gate_up) > 1
        gate_up = scaled(gate_up, gain) if is_copy else gate_up * gain
    if dtype is not None:
        gate_up = gate_up.to(dtype)
        down = down.to(dtype)
    biases = (
        None if bias is None else bias.to(dtype or torch.float32)
        for bias in (gate_up_bias, down_bias)
    )
    return MLPWeights(gate_up, down, *biases)


class DenseMLP:
    """The MLP activation(gate) * up. A `Branch`."""

    on_torch = ()

    def __init__(
        self, architecture: Architecture, weights: MLPWeights, make_linear: MakeLinear
    ) -> None:
        self._kernels = make_linear.kernels
        self._name = architecture.activation
        self._activation = ACTIVATIONS[architecture.activation]
        self.gate_up = make_linear(weights.gate_up, weights.gate_up_bias, 1.0)
        self.output = make_linear(weights.down, weights.down_bias, architecture.residual_scale)

    def for_kernels(self, norms: BranchNorms, scale: float) -> KernelBranch | None:
        """Returns this MLP for kernels; see `Attention.for_kernels`."""
        runs = kernel_runs(self.gate_up, self.output)
        if runs is None:
            return None
        return KernelBranch(runs, norms, scale, activation=ACTIVATION_NUMBERS[self._name])

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        gates_and_ups = self.gate_up(x)
        if self._kernels is not None:
            return self._kernels.gated(gates_and_ups, self._name)
        gate, up = gates_and_ups.chunk(2, dim=-1)
        active = self._activation(gate)
        return active * up if torch.is_grad_enabled() else active.mul_(up)
