"""One layer of the native decoder: a mixer of tokens (attention) and an MLP with the norms around
them.

Norms before a linear layer have no weights here, because these are folded into that layer's weights
(`layer_files`), as is the scale of the attention scores. Pairs of elements of a head that rotary
embedding rotates together are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from specgen.engine.devices import move
from specgen.engine.kernels.branches import BranchNorms, KernelBranch
from specgen.engine.native.architecture import MLP, Architecture, Mixer
from specgen.engine.native.attention import Attention
from specgen.engine.native.experts import Experts
from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.layer_files import LayerWeights
from specgen.engine.native.linear import Linear, MakeLinear
from specgen.engine.native.mlp import ACTIVATIONS, DenseMLP
from specgen.engine.native.norms import Norm, norm_function, rms_norm
from specgen.engine.native.recurrence import DeltaNet, ShortConv


def _unchanged(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


class Branch(Protocol):
    """A part of a layer whose output is added to the residual stream: the mixer (attention) or the
    MLP.

    A call computes, from the normed residual stream `x` [batch * rows, width], the input of the
    branch's last linear layer, `output`. The layer calls `output`, applies a norm if the model has
    one there, and adds the result. `on_torch` names what torch computes in it where our own kernels
    compute the rest.
    """

    output: Linear

    @property
    def on_torch(self) -> tuple[str, ...]: ...

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor: ...


_MIXERS: dict[Mixer, Callable[..., Branch]] = {"delta": DeltaNet, "conv": ShortConv}
_MLPS: dict[MLP, Callable[..., Branch]] = {"dense": DenseMLP, "experts": Experts}


class NativeLayer:
    """A decoder layer with its weights. `kind` is the index of its inputs in `PassInputs.kinds`.

    `make_linear` makes a linear layer from a weight [out, in], a bias or None, and the factor of
    its output on the residual stream. `gain` is as for `norms.norm_function`. The hidden states are
    moved to `device` first (None: they are on the right one). `wide_attention`: see `Attention`.
    """

    attention: Callable[..., Branch] = Attention

    def __init__(
        self,
        architecture: Architecture,
        index: int,
        kind: int,
        weights: LayerWeights,
        make_linear: MakeLinear,
        *,
        gain: float = 1.0,
        device: torch.device | None = None,
        wide_attention: bool = False,
    ) -> None:
        self.device = device
        self._index = index
        self._scalar = weights.scalar
        architecture = architecture.of_layer(index)
        self._eps = architecture.norm_eps
        self._scale = architecture.residual_scale
        self._mixer_norm: Norm = _unchanged
        self._mlp_norm: Norm = _unchanged
        if architecture.pre_norms:
            eps = architecture.norm_eps
            self._mixer_norm = norm_function(eps, gain, weights.attention_norm)
            self._mlp_norm = norm_function(eps, gain, weights.mlp_norm)
        # the norms around the mixer and the MLP
        self._norms = [
            BranchNorms(architecture.pre_norms, before, after, architecture.norm_eps)
            for before, after in (
                (weights.attention_norm, weights.attention_post_norm),
                (weights.mlp_norm, weights.mlp_post_norm),
            )
        ]
        make_mixer = _MIXERS.get(architecture.layers[index].mixer, self.attention)
        self.mixer: Branch = make_mixer(
            architecture, index, kind, weights.mixer, make_linear, is_wide=wide_attention
        )
        self.mlp: Branch = _MLPS[architecture.layers[index].mlp](
            architecture, weights.mlp, make_linear
        )
        self._kernels = make_linear.kernels
        self._activation = architecture.activation
        self._function = ACTIVATIONS[architecture.activation]
        self._own_linears = [make_linear(weight, None, 1.0) for weight in weights.per_layer[:2]]
        self._own_norm = weights.per_layer[2] if weights.per_layer else None

    def for_kernels(self, *, attention: bool = True, mlp: bool = True) -> list[KernelBranch] | None:
        """Returns what a call with these arguments runs, for kernels that run it in one call with
        other layers; None where they cannot."""
        if self._own_norm is not None or self._scalar != 1.0 or self.device is not None:
            return None
        made: list[KernelBranch] = []
        branches = (self.mixer, self.mlp)
        for branch, norms, is_run in zip(branches, self._norms, (attention, mlp), strict=True):
            if not is_run:
                continue
            if not isinstance(branch, Attention | DenseMLP):
                return None
            own = branch.for_kernels(norms, self._scale)
            if own is None:
                return None
            made.append(own)
        return made

    def __call__(
        self, hidden: torch.Tensor, inputs: PassInputs, *, attention: bool = True, mlp: bool = True
    ) -> torch.Tensor:
        """Returns the residual stream `hidden` [batch * rows, width] with the outputs of the mixer
        and of the MLP added.

        `attention` or `mlp` False leaves one of them out. Without gradients, `hidden` itself is
        changed.
        """
        if self.device is not None:
            hidden = move(hidden, self.device)
        if attention:
            normed = self._mixer_norm(hidden)
            hidden = self._added(hidden, normed, self.mixer, inputs, self._norms[0].after)
        if mlp:
            normed = self._mlp_norm(hidden)
            hidden = self._added(hidden, normed, self.mlp, inputs, self._norms[1].after)
        if (norm := self._own_norm) is not None and inputs.per_layer is not None:
            gate, projection = self._own_linears
            own = move(inputs.per_layer[:, self._index], hidden.device)
            gated = self._gated(gate(hidden), own)
            hidden = hidden.add_(rms_norm(self._eps, norm, projection(gated)))
        return hidden if self._scalar == 1.0 else hidden.mul_(self._scalar)

    def _gated(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns activation(gates) * values."""
        if self._kernels is None:
            return self._function(gates) * values
        return self._kernels.gated(torch.cat((gates, values), 1), self._activation)

    @property
    def on_torch(self) -> tuple[str, ...]:
        """What torch computes in the layer where our own kernels compute the rest, as plain
        names."""
        names = [*self.mixer.on_torch, *self.mlp.on_torch]
        if self._scalar != 1.0:
            names.append("factors of layers")
        return tuple(names)

    def _added(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        branch: Branch,
        inputs: PassInputs,
        post_norm: torch.Tensor | None,
    ) -> torch.Tensor:
        x = branch(normed, inputs)
        if post_norm is None:
            return branch.output.add_to(hidden, x)
        # in training, products are in bfloat16 and norms in float32
        added = branch.output(x).to(post_norm.dtype)
        added = rms_norm(self._eps, post_norm, added)
        add = hidden.add if torch.is_grad_enabled() else hidden.add_
        return add(added, alpha=self._scale)
