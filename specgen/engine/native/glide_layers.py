"""The layers of a GliDe draft model (Du et al. 2024): those of a small Llama, which also attend to the target's KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from specgen.engine.native.attention import attend, attend_batch
from specgen.engine.native.description import Architecture
from specgen.engine.native.inputs import layer_kinds
from specgen.engine.native.layer import NativeLayer, PassInputs
from specgen.engine.native.layer_weights import TakeTensor, final_norm, head_order, layer_weights
from specgen.engine.native.products import Product
from specgen.engine.native.residual import ExtendedResidual, PlainResidual, Residual
from specgen.engine.native.rotary import rotate
from specgen.engine.native.tensor_names import layer_tensors

MakeProduct = Callable[[torch.Tensor, torch.Tensor | None, float], Product]


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

    def __call__(self, residual: Residual, inputs: CrossInputs) -> None:
        """Adds the attention's output to the residual stream, which is its input too."""
        query = self._query(residual.values).view(-1, self._heads, self._size)
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
        residual.add_product(self._output, mixed if inputs.sees is None else mixed * inputs.sees)


class GlideLayers:
    """All layers of a GliDe draft model and its final norm. Each layer: self-attention, cross-attention, MLP.

    `architecture` describes the layers without cross-attention, `target` the target. `take` returns the weights by their names in
    `heads.weights.GlideWeights`; they are rounded to `dtype`. All operations can be differentiated. `norm_gain`: see `residual`.
    """

    def __init__(
        self,
        architecture: Architecture,
        target: Architecture,
        take: TakeTensor,
        dtype: torch.dtype,
        make_product: MakeProduct,
        *,
        native_keys: bool,
        norm_gain: float = 1.0,
    ) -> None:
        kinds, width, inner = layer_kinds(architecture), architecture.hidden_size, target.num_heads * target.head_size
        self._layers: list[tuple[NativeLayer, CrossAttention]] = []
        for index, kind in enumerate(architecture.layers):
            weights = layer_weights(architecture, layer_tensors(architecture, index), take, dtype, norm_gain)
            layer = NativeLayer(architecture, index, kinds.index(kind), weights, make_product)
            q_proj = take(f"layers.{index}.cross_attn.q_proj.weight", (inner, width))
            o_proj = take(f"layers.{index}.cross_attn.o_proj.weight", (width, inner))
            cross = CrossAttention(target, q_proj, o_proj, dtype, make_product, native_keys=native_keys)
            self._layers.append((layer, cross))
        self._norm, _ = final_norm(architecture, take, dtype, norm_gain)
        self._eps, self._extended = architecture.norm_eps, norm_gain != 1.0

    def __call__(
        self, hidden: torch.Tensor, inputs: PassInputs, cross: Sequence[CrossInputs | None], kept: int | None = None
    ) -> torch.Tensor:
        """Runs a pass on embeddings [n, width], and returns the hidden states [kept, width] after the final norm.

        These are of the last `kept` tokens (None: all). `cross` has the inputs of each layer's cross-attention, in the last layer
        for these tokens alone; None: there are no keys.
        """
        residual = self._residual(hidden)
        for (layer, attention), seen in zip(self._layers, cross, strict=True):
            layer(residual, inputs, mlp=False)
            if kept is not None and kept < hidden.shape[0] and layer is self._layers[-1][0]:
                residual = self._residual(residual.values[-kept:])
            if seen is not None:
                attention(residual, seen)
            layer(residual, inputs, attention=False)
        return residual.normed() * self._norm

    def _residual(self, hidden: torch.Tensor) -> Residual:
        return ExtendedResidual(hidden, self._eps) if self._extended else PlainResidual(hidden, self._eps)
