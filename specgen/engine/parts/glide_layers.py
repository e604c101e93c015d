"""The layers of a GliDe draft model (Du et al. 2024): those of a small Llama, which also attend to the target's KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgen.engine.native.architecture import Architecture
from specgen.engine.native.attention import attend, attend_batch
from specgen.engine.native.inputs import PassInputs, layer_kinds
from specgen.engine.native.layer import NativeLayer, norm_function
from specgen.engine.native.layer_weights import Take, final_norm, head_order, layer_weights
from specgen.engine.native.products import MakeProduct
from specgen.engine.native.rotary import rotate


class CrossInputs(NamedTuple):
    """What the cross-attention of one layer needs in a pass over `rows` tokens of one sequence, or of each of `batch` sequences.

    `keys` and `values` are those of a target's layer, as for `attention.attend` or `attend_batch`, and so is `mask`. `rotation`
    [batch * rows, 1, R/2] is the target's at the tokens' own positions (None: its layer has no rotary embedding). `sees`
    [batch * rows, 1] is 0 for a token that sees no key, otherwise 1; None: all see some. Such a token's mask must hide nothing.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rotation: torch.Tensor | None
    mask: torch.Tensor | None = None
    sees: torch.Tensor | None = None
    batch: int | None = None


class CrossAttention:
    """Attention to the cached keys and values of the target. Only its queries and its output have weights.

    The keys are rotated already, so the queries get the target's rotation. Their scale is 1 / sqrt(the target's head size). There
    is no norm, score cap or sliding window. `q_proj` [heads * head size, width] has the order of numbers of a model's files. The
    keys have this order too, unless `native_keys`: then they are in the native decoder's order.
    """

    def __init__(
        self,
        target: Architecture,
        q_proj: torch.Tensor,
        o_proj: torch.Tensor,
        dtype: torch.dtype,
        make_product: MakeProduct,
        *,
        native_keys: bool,
    ) -> None:
        self._heads, self._size = target.num_heads, target.head_size
        order = head_order(target, q_proj.device)
        query = q_proj.float().view(self._heads, self._size, -1)[:, order].flatten(0, 1) * self._size**-0.5
        self._query, self._output = make_product(query.to(dtype), None, 1.0), make_product(o_proj.to(dtype), None, 1.0)
        self._key_order = None if native_keys else order.argsort()

    def __call__(self, hidden: torch.Tensor, inputs: CrossInputs) -> torch.Tensor:
        """Returns the residual stream, which is its input too, with the attention's output added."""
        query = self._query(hidden).view(-1, self._heads, self._size)
        if inputs.rotation is not None:
            rotate(query, inputs.rotation)
        if self._key_order is not None:
            query = query.index_select(2, self._key_order)
        if inputs.batch is None:
            mixed = attend(query, inputs.keys, inputs.values, inputs.mask)
        else:
            assert inputs.mask is not None
            query = query.view(inputs.batch, -1, self._heads, self._size)
            mixed = attend_batch(query, inputs.keys, inputs.values, inputs.mask).flatten(0, 1)
        return self._output.add_to(hidden, mixed if inputs.sees is None else mixed * inputs.sees)


class GlideLayers:
    """All layers of a GliDe draft model and its final norm. Each layer: self-attention, cross-attention, MLP.

    `architecture` describes the layers without cross-attention, `target` the target. `take` returns the weights by their names in
    `weights.GlideWeights`;
    they are rounded to `dtype`. All operations can be differentiated. `device` is that of the layers, `norm_gain` as in
    `layer.norm_function`.
    """

    def __init__(
        self,
        architecture: Architecture,
        target: Architecture,
        take: Take,
        dtype: torch.dtype,
        make_product: MakeProduct,
        device: torch.device,
        *,
        native_keys: bool,
        norm_gain: float = 1.0,
    ) -> None:
        _, kinds = layer_kinds(architecture, [device] * len(architecture.layers))
        self._layers: list[tuple[NativeLayer, CrossAttention]] = []
        for index, kind in enumerate(kinds):
            weights = layer_weights(architecture, index, take, dtype, norm_gain)
            layer = NativeLayer(architecture, index, kind, weights, make_product, gain=norm_gain)
            q_proj, o_proj = (take(f"layers.{index}.cross_attn.{name}_proj.weight") for name in "qo")
            cross = CrossAttention(target, q_proj, o_proj, dtype, make_product, native_keys=native_keys)
            self._layers.append((layer, cross))
        self._norm = final_norm(architecture, take, dtype, norm_gain)
        self._normed = norm_function(architecture.norm_eps, norm_gain)

    def __call__(
        self, hidden: torch.Tensor, inputs: PassInputs, cross: Sequence[CrossInputs | None], kept: int | None = None
    ) -> torch.Tensor:
        """Runs a pass on embeddings [n, width], and returns the hidden states [kept, width] after the final norm.

        These are of the last `kept` tokens (None: all). `cross` has the inputs of each layer's cross-attention, in the last layer
        for these tokens alone; None: there are no keys.
        """
        for (layer, attention), seen in zip(self._layers, cross, strict=True):
            hidden = layer(hidden, inputs, mlp=False)
            if kept is not None and kept < hidden.shape[0] and layer is self._layers[-1][0]:
                hidden = hidden[-kept:]
            if seen is not None:
                hidden = attention(hidden, seen)
            hidden = layer(hidden, inputs, attention=False)
        return self._normed(hidden) * self._norm
