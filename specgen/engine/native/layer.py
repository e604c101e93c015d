"""One layer of the native decoder: a mixer of tokens (attention) and an MLP with the norms around
them.

Norms before a linear layer have no weights here, because these are folded into that layer's weights
(`layer_weights`), as is the scale of the attention scores. Pairs of elements of a head that rotary
embedding rotates together are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Protocol

import torch
from torch.nn import functional

from specgen.engine.devices import move
from specgen.engine.native.architecture import MLP, Architecture, Mixer
from specgen.engine.native.attention import attend, attend_batch
from specgen.engine.native.inputs import PassInputs
from specgen.engine.native.layer_weights import AttentionWeights, LayerWeights, RecurrentWeights
from specgen.engine.native.linear import Linear, MakeLinear
from specgen.engine.native.mlp import ACTIVATIONS, DenseMLP, Experts
from specgen.engine.native.recurrence import unit_length
from specgen.engine.native.rotary import rotate


def norm_gain(architecture: Architecture, dtype: torch.dtype, *devices: torch.device) -> float:
    """Returns the factor `gain` by which weights that read a norm's output are multiplied, and
    `norm_function`'s output is divided.

    It is sqrt(width) in float32 on CPUs, where RMSNorm then takes three operations instead of
    torch's eight, and 1 elsewhere.
    """
    is_fast = (
        architecture.pre_norms
        and dtype == torch.float32
        and all(device.type == "cpu" for device in devices)
    )
    return sqrt(architecture.hidden_size) if is_fast else 1.0


def norm_function(eps: float, gain: float = 1.0) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that computes RMSNorm of hidden states [..., width], without the norm's
    weights, and divided by `gain`.

    `gain` is 1 or sqrt(width); see `norm_gain`.
    """
    if gain == 1.0:
        return lambda hidden: functional.rms_norm(hidden, hidden.shape[-1:], None, eps)
    with torch.inference_mode(False):
        root = torch.tensor(gain * sqrt(eps))
    return lambda hidden: hidden / torch.linalg.vector_norm(hidden, 2, -1, True).hypot_(root)


class Branch(Protocol):
    """A part of a layer whose output is added to the residual stream: the mixer (attention) or the
    MLP.

    A call computes, from the normed residual stream `x` [batch * rows, width], the input of the
    branch's last linear layer, `output`. The layer calls `output`, applies a norm if the model has
    one there, and adds the result.
    """

    output: Linear

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor: ...


class Attention:
    """Attention of grouped heads. A `Branch`.

    `kind` is the index of the layer's inputs in `PassInputs.kinds`. `is_wide`: computes in float64
    and rounds to float32. Then a token's result does not depend on the order of the keys (in draft
    trees) or on the other tokens of the pass. Needed before products that round activations to few
    bits, in which tiny differences would grow.
    """

    def __init__(
        self,
        architecture: Architecture,
        index: int,
        kind: int,
        weights: AttentionWeights,
        make_linear: MakeLinear,
        *,
        is_wide: bool = False,
    ) -> None:
        self._index = index
        self._kind = kind
        self._is_wide = is_wide
        self._heads = architecture.num_heads
        self._kv_heads = architecture.num_kv_heads
        self._size = architecture.head_size
        self._score_cap = architecture.score_cap
        self._eps = architecture.norm_eps
        self._qk_norm = weights.qk_norm
        self._norm_over = architecture.qk_norm
        self._sinks = weights.sinks
        self._is_gated = architecture.gated_attention
        self.qkv = make_linear(weights.qkv, weights.qkv_bias, 1.0)
        self.output = make_linear(weights.output, weights.output_bias, architecture.residual_scale)

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self._size)
        if not self._is_gated:
            return self._attended(heads, inputs)
        heads, gates = heads.split_with_sizes((self._heads + 2 * self._kv_heads, self._heads), 1)
        return self._attended(heads, inputs) * gates.flatten(1).sigmoid()

    def _attended(self, heads: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        """Returns the output [batch * rows, heads * head size] for queries, keys and values [batch
        * rows, all heads, ...]."""
        if self._qk_norm is not None:
            heads = self.normed_heads(heads, self._qk_norm)
        rotation, mask, entries = inputs.kinds[self._kind]
        if rotation is not None:
            rotate(heads.narrow(1, 0, self._heads + self._kv_heads), rotation)
        if inputs.batch is not None:
            return self._batch_attention(heads, inputs)
        query, new = heads.split_with_sizes((self._heads, 2 * self._kv_heads), 1)
        if entries is None:
            keys, values = torch.split(new.transpose(0, 1), self._kv_heads)
        else:
            written, keys, values = entries[self._index - inputs.first_layer]
        # otherwise another layer writes the keys and values that this one reads
        if entries is not None and self._kv_heads:
            if inputs.written != inputs.rows:
                new = new.narrow(0, 0, inputs.written)
            new = new.view(-1, 2, self._kv_heads, self._size).permute(1, 2, 0, 3)
            if inputs.slots is None:
                written.copy_(new)
            else:
                written.index_copy_(2, inputs.slots, new)
        if self._is_wide:
            query = query.double()
            keys = keys.double()
            values = values.double()
            mask = mask if mask is None else mask.double()
        return attend(
            query, keys, values, mask, self._score_cap, self._sinks, fused=inputs.fused
        ).to(heads.dtype)

    def _batch_attention(self, heads: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        """Returns what a call does, for several sequences. `heads` is [batch * rows, all heads,
        head size]."""
        _, mask, entries = inputs.kinds[self._kind]
        assert inputs.batch is not None
        assert mask is not None
        heads = heads.view(inputs.batch, inputs.rows, *heads.shape[1:])
        query, keys, values = torch.split(
            heads, [self._heads, self._kv_heads, self._kv_heads], dim=2
        )
        keys = keys.transpose(1, 2)
        values = values.transpose(1, 2)
        if entries is not None:
            written, all_keys, all_values = entries[self._index - inputs.first_layer]
            if self._kv_heads:
                written.view(2, *keys.shape).copy_(torch.stack((keys, values)))
            keys, values = (
                part.view(inputs.batch, -1, *part.shape[1:]) for part in (all_keys, all_values)
            )
        return attend_batch(query, keys, values, mask, self._score_cap, self._sinks).flatten(0, 1)

    def normed_heads(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the heads with query and key heads normalised (Qwen 3, Gemma 3, OLMo 2), or value
        heads too (Gemma 4)."""
        part = heads.narrow(1, 0, weight.shape[0])
        if self._norm_over != "all":
            found = functional.rms_norm(part, part.shape[-1:], None, self._eps)
        else:  # over all query heads at once, and over all key heads
            both = torch.split(part, [self._heads, self._kv_heads], dim=1)
            found = torch.cat(
                [functional.rms_norm(one, one.shape[-2:], None, self._eps) for one in both], dim=1
            )
        if torch.is_grad_enabled():
            return torch.cat((found * weight, heads[:, weight.shape[0] :]), dim=1)
        torch.mul(found, weight, out=part)
        return heads


class RecurrentMixer:
    """Base of the mixers that are no attention: a projection before the recurrence (`qkv`), and one
    after it (`output`).

    `kind` and `is_wide` are those of `Attention`, which these mixers do not need.
    """

    def __init__(
        self,
        architecture: Architecture,
        index: int,
        kind: int,
        weights: RecurrentWeights,
        make_linear: MakeLinear,
        *,
        is_wide: bool = False,
    ) -> None:
        self._index = index
        self._architecture = architecture
        self._weights = weights
        self.qkv = make_linear(weights.inputs, weights.inputs_bias, 1.0)
        self.output = make_linear(weights.output, weights.output_bias, architecture.residual_scale)


class DeltaNet(RecurrentMixer):
    """A gated delta rule after a short convolution (Qwen3-Next). A `Branch`."""

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        steps, states = inputs.recurrent_inputs
        sizes = self._architecture.recurrent
        weights = self._weights
        assert sizes is not None
        assert weights.decay_rates is not None
        assert weights.step_bias is not None
        heads = sizes.value_heads
        of_keys = sizes.key_heads * sizes.key_size
        of_values = heads * sizes.value_size
        mixed, gate, beta, step = self.qkv(x).split_with_sizes(
            (sizes.channels, of_values, heads, heads), 1
        )
        mixed = functional.silu(states.convs[self._index](steps, mixed, weights.convolution))
        query, key, value = mixed.split_with_sizes((of_keys, of_keys, of_values), 1)
        query = unit_length(query.view(-1, sizes.key_heads, sizes.key_size)) * sizes.key_size**-0.5
        key = unit_length(key.view(-1, sizes.key_heads, sizes.key_size))
        value = value.view(-1, heads, sizes.value_size)
        decay = weights.decay_rates * functional.softplus(step.float() + weights.step_bias)
        found = states.states[self._index](
            steps, query, key, value, decay[..., None], beta.float().sigmoid()
        )
        normed = functional.rms_norm(
            found, (sizes.value_size,), weights.norm, self._architecture.norm_eps
        ).flatten(1)
        return (normed * functional.silu(gate.float())).to(x.dtype)


class ShortConv(RecurrentMixer):
    """A short convolution with gates on its input and its output (LFM2). A `Branch`."""

    def __call__(self, x: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        steps, states = inputs.recurrent_inputs
        before, after, values = self.qkv(x).chunk(3, 1)
        weights = self._weights
        found = states.convs[self._index](
            steps, before * values, weights.convolution, weights.convolution_bias
        )
        return found.to(x.dtype) * after


_MIXERS: dict[Mixer, Callable[..., Branch]] = {"delta": DeltaNet, "conv": ShortConv}
_MLPS: dict[MLP, Callable[..., Branch]] = {"dense": DenseMLP, "experts": Experts}


class NativeLayer:
    """A decoder layer with its weights. `kind` is the index of its inputs in `PassInputs.kinds`.

    `make_linear` makes a linear layer from a weight [out, in], a bias or None, and the factor of
    its output on the residual stream. `gain` is as for `norm_function`. The hidden states are moved
    to `device` first (None: they are on the right one). `wide_attention`: see `Attention`.
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
        self._norm = (
            norm_function(architecture.norm_eps, gain)
            if architecture.pre_norms
            else lambda hidden: hidden
        )
        self._attention_post_norm = weights.attention_post_norm
        self._mlp_post_norm = weights.mlp_post_norm
        make_mixer = _MIXERS.get(architecture.layers[index].mixer, self.attention)
        self.mixer: Branch = make_mixer(
            architecture, index, kind, weights.mixer, make_linear, is_wide=wide_attention
        )
        self.mlp: Branch = _MLPS[architecture.layers[index].mlp](
            architecture, weights.mlp, make_linear
        )
        self._activation = ACTIVATIONS[architecture.activation]
        self._own_linears = [make_linear(weight, None, 1.0) for weight in weights.per_layer[:2]]
        self._own_norm = weights.per_layer[2] if weights.per_layer else None

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
            hidden = self._added(hidden, self.mixer, inputs, self._attention_post_norm)
        if mlp:
            hidden = self._added(hidden, self.mlp, inputs, self._mlp_post_norm)
        if (norm := self._own_norm) is not None and inputs.per_layer is not None:
            gate, projection = self._own_linears
            gated = self._activation(gate(hidden)) * move(
                inputs.per_layer[:, self._index], hidden.device
            )
            hidden = hidden.add_(
                functional.rms_norm(projection(gated), norm.shape, norm, self._eps)
            )
        return hidden if self._scalar == 1.0 else hidden.mul_(self._scalar)

    def _added(
        self,
        hidden: torch.Tensor,
        branch: Branch,
        inputs: PassInputs,
        post_norm: torch.Tensor | None,
    ) -> torch.Tensor:
        x = branch(self._norm(hidden), inputs)
        if post_norm is None:
            return branch.output.add_to(hidden, x)
        # in training, products are in bfloat16 and norms in float32
        added = branch.output(x).to(post_norm.dtype)
        added = functional.rms_norm(added, post_norm.shape, post_norm, self._eps)
        add = hidden.add if torch.is_grad_enabled() else hidden.add_
        return add(added, alpha=self._scale)
