"""One layer of the native decoder: attention and MLP with the norms around them, in as few operations as possible.

Norms before a product are without weights here, since these are folded into the product's weights (`layer_weights`). So is the
scale of the attention scores. The numbers of each head that rotary embedding rotates together are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from specgen.engine.native.attention import attend, attend_batch
from specgen.engine.native.description import Architecture
from specgen.engine.native.kernels.kernel_set import AttentionSpec, StaticInputs
from specgen.engine.native.kernels.torch_kernels import ACTIVATIONS, gate
from specgen.engine.native.kv_buffer import LayerEntries
from specgen.engine.native.layer_weights import LayerWeights
from specgen.engine.native.products import Product
from specgen.engine.native.residual import Residual
from specgen.engine.native.rotary import rotate


class KindInputs(NamedTuple):
    """What the layers of one kind (sliding window, rotary frequencies) need in one forward pass.

    `rotation` [batch * rows, 1, R/2] holds complex numbers (None: no rotary embedding), `mask` is as for `attention.attend` or
    `attend_batch`, and `entries` are those of each layer in the KV cache (None: no cache).
    """

    rotation: torch.Tensor | None
    mask: torch.Tensor | None
    entries: Sequence[LayerEntries] | None


class PassInputs(NamedTuple):
    """The inputs of one forward pass over `rows` tokens, padding included, of one sequence, or of each of `batch` sequences.

    `kinds` has the inputs for each kind of layer. `attended` is the number of tokens that attention is computed for, `written`
    the number whose keys and values the cache keeps; the rest are padding. `first_layer` is the index of the cache's first layer.
    `fused`: attention always takes the same kernel, so that results do not depend on the number of tokens. `static` has the
    inputs of a static pass and its kernels; then `kinds` is empty.
    `placed` returns the same pass's inputs on another device; None for a model on one device.
    """

    rows: int
    attended: int
    written: int
    kinds: Sequence[KindInputs]
    batch: int | None = None
    first_layer: int = 0
    fused: bool = False
    static: StaticInputs | None = None
    placed: Callable[[torch.device], PassInputs] | None = None

    def on(self, device: torch.device) -> PassInputs:
        """Returns the inputs of the layers on this device, for a model on several devices."""
        assert self.placed is not None
        return self.placed(device)


class NativeLayer:
    """A decoder layer with its weights. `kind` is the index of its kind in `PassInputs.kinds`.

    `make_product` makes a product from a weight [out, in], a bias or None, and the factor of its output on the residual stream.
    """

    def __init__(
        self,
        architecture: Architecture,
        index: int,
        kind: int,
        weights: LayerWeights,
        make_product: Callable[[torch.Tensor, torch.Tensor | None, float], Product],
    ) -> None:
        self.index, self.kind = index, kind
        scale = architecture.residual_scale
        self._architecture = architecture
        self._qk_norm = weights.qk_norm
        self._attention_post_norm, self._mlp_post_norm = weights.attention_post_norm, weights.mlp_post_norm
        self._heads, self._kv_heads, self._size = architecture.num_heads, architecture.num_kv_heads, architecture.head_size
        self._score_cap = architecture.score_cap
        self._qkv = make_product(weights.qkv, weights.qkv_bias, 1.0)
        self._output = make_product(weights.output, weights.output_bias, scale)
        self._gate_up = make_product(weights.gate_up, weights.gate_up_bias, 1.0)
        self._down = make_product(weights.down, weights.down_bias, scale)
        weight = weights.qk_norm if architecture.qk_norm == "head" else None
        self._spec = AttentionSpec(
            index, kind, self._heads, self._kv_heads, self._size, self._score_cap, weight, architecture.norm_eps
        )

    def __call__(self, residual: Residual, inputs: PassInputs, *, attention: bool = True, mlp: bool = True) -> None:
        """Adds the outputs of attention and MLP, or of one of them, to the residual stream of `batch` * `rows` tokens."""
        architecture = self._architecture
        if architecture.parallel:
            normed = residual.normed()
            if attention:
                residual.add_product(self._output, self._attention(normed, inputs))
            if mlp:
                residual.add_product(self._down, self._mlp(normed, inputs))
            return
        pre = architecture.pre_norms
        if attention:
            mixed = self._attention(residual.normed() if pre else residual.values, inputs)
            self._add(residual, self._output, mixed, self._attention_post_norm)
        if mlp:
            inner = self._mlp(residual.normed() if pre else residual.values, inputs)
            self._add(residual, self._down, inner, self._mlp_post_norm)

    def _add(self, residual: Residual, product: Product, x: torch.Tensor, post_norm: torch.Tensor | None) -> None:
        if post_norm is None:
            residual.add_product(product, x)
        else:
            architecture = self._architecture
            branch = product(x).to(post_norm.dtype)  # in training, products are in bfloat16 and norms in float32
            branch = functional.rms_norm(branch, post_norm.shape, post_norm, architecture.norm_eps)
            residual.add(branch, architecture.residual_scale)

    def _mlp(self, normed: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        """Returns the input of the MLP's second product."""
        inner, activation = self._gate_up(normed), self._architecture.activation
        if not self._architecture.gated_mlp:
            return ACTIVATIONS[activation](inner)
        return gate(inner, activation) if inputs.static is None else inputs.static.kernels.gate(inner, activation)

    def _attention(self, normed: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        """Returns the attention's output [batch * rows, heads * head size] before the output product."""
        heads = self._qkv(normed).view(normed.shape[0], self._heads + 2 * self._kv_heads, self._size)
        static, norm = inputs.static, self._architecture.qk_norm
        if norm is not None and (static is None or norm not in static.kernels.norms):
            heads = self._normed_heads(heads)
        if static is not None:
            return static.attention(heads, self._spec)
        rotation, mask, entries = inputs.kinds[self.kind]
        if rotation is not None:
            rotate(heads.narrow(1, 0, self._heads + self._kv_heads), rotation)
        if inputs.batch is not None:
            return self._batch_attention(heads, inputs)
        query, new = heads.narrow(1, 0, self._heads), heads.narrow(1, self._heads, 2 * self._kv_heads)
        if entries is None:
            keys, values = torch.split(new.transpose(0, 1), self._kv_heads)
        else:
            written, keys, values = entries[self.index - inputs.first_layer]
            if inputs.written != inputs.rows:
                new = new.narrow(0, 0, inputs.written)
            written.copy_(new.view(-1, 2, self._kv_heads, self._size).permute(1, 2, 0, 3))
        if inputs.attended == inputs.rows:
            return attend(query, keys, values, mask, self._score_cap, fused=inputs.fused)
        mixed = attend(query.narrow(0, 0, inputs.attended), keys, values, mask, self._score_cap, fused=inputs.fused)
        return functional.pad(mixed, (0, 0, 0, inputs.rows - inputs.attended))

    def _batch_attention(self, heads: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        """Returns what `_attention` does, for several sequences. `heads` is [batch * rows, all heads, head size]."""
        _, mask, entries = inputs.kinds[self.kind]
        assert inputs.batch is not None
        assert mask is not None
        heads = heads.view(inputs.batch, inputs.rows, *heads.shape[1:])
        query, keys, values = torch.split(heads, [self._heads, self._kv_heads, self._kv_heads], dim=2)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if entries is not None:
            written, all_keys, all_values = entries[self.index - inputs.first_layer]
            written.view(2, *keys.shape).copy_(torch.stack((keys, values)))
            keys, values = (part.view(inputs.batch, self._kv_heads, *part.shape[1:]) for part in (all_keys, all_values))
        return attend_batch(query, keys, values, mask, self._score_cap).flatten(0, 1)

    def _normed_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """Returns the heads with query and key heads normalised (Qwen 3, Gemma 3, OLMo 2, StableLM, Cohere)."""
        eps, weight, rotated = self._architecture.norm_eps, self._qk_norm, self._heads + self._kv_heads
        assert weight is not None
        part = heads.narrow(1, 0, rotated)
        if self._architecture.qk_norm == "head":
            normed = functional.rms_norm(part, part.shape[-1:], None, eps)
        elif self._architecture.qk_norm == "heads_own":
            normed = functional.layer_norm(part, part.shape[-1:], None, None, eps)
        else:  # over all query heads at once, and over all key heads
            both = torch.split(part, [self._heads, self._kv_heads], dim=1)
            normed = torch.cat([functional.rms_norm(one, one.shape[-2:], None, eps) for one in both], dim=1)
        if torch.is_grad_enabled():
            return torch.cat((normed * weight, heads.narrow(1, rotated, self._kv_heads)), dim=1)
        torch.mul(normed, weight, out=part)
        return heads
