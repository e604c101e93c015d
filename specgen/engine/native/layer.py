"""One layer of the native decoder: attention and MLP with the norms around them, in as few operations as possible.

Norms before a product are without weights here, since these are folded into the product's weights (`layer_weights`). So is the
scale of the attention scores. The numbers of each head that rotary embedding rotates together are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from specgen.engine.native.architecture import Architecture, LayerKind
from specgen.engine.native.attention import attend
from specgen.engine.native.kv_buffer import LayerEntries
from specgen.engine.native.layer_weights import LayerWeights
from specgen.engine.native.products import Product


class KindInputs(NamedTuple):
    """What the layers of one kind (sliding window, rotary frequencies) need in one forward pass.

    `rotation` [batch or 1, n, 1, R/2] holds complex numbers (None: no rotary embedding), `mask` is as for `attention.attend`, and
    `entries` are those of each layer in the KV cache (None: no cache).
    """

    rotation: torch.Tensor | None
    mask: torch.Tensor | None
    entries: Sequence[LayerEntries] | None


class PassInputs(NamedTuple):
    """The inputs of one forward pass over `rows` tokens (padding included) of each of `batch` sequences.

    `kinds` has the inputs for each kind of layer. `attended` is the number of tokens that attention is computed for, `written` the
    number whose keys and values the cache keeps; the rest are padding. `first_layer` is the index of the cache's first layer.
    `fused`: attention always takes the same kernel, so that results do not depend on the number of tokens.
    """

    batch: int
    rows: int
    attended: int
    written: int
    kinds: Sequence[KindInputs]
    first_layer: int = 0
    fused: bool = False


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
        self._rotary_size, self._score_cap = architecture.rotary_size, architecture.score_cap
        self._qkv = make_product(weights.qkv, weights.qkv_bias, 1.0)
        self._output = make_product(weights.output, weights.output_bias, scale)
        self._gate_up = make_product(weights.gate_up, weights.gate_up_bias, 1.0)
        self._down = make_product(weights.down, weights.down_bias, scale)
        self._activation = _ACTIVATIONS[architecture.activation]

    def __call__(
        self, hidden: torch.Tensor, inputs: PassInputs, *, attention: bool = True, mlp: bool = True
    ) -> torch.Tensor:
        """Returns the layer's output [batch * rows, width] for the hidden states `hidden`. May leave out attention or MLP."""
        architecture = self._architecture
        if architecture.parallel:
            normed = self._pre_norm(hidden)
            if attention:
                hidden = self._output.add_to(hidden, self._attention(normed, inputs))
            return self._down.add_to(hidden, self._mlp(normed)) if mlp else hidden
        scale = architecture.residual_scale
        if attention:
            mixed = self._attention(self._pre_norm(hidden), inputs)
            if self._attention_post_norm is None:
                hidden = self._output.add_to(hidden, mixed)
            else:
                hidden = hidden.add(self._norm(self._output(mixed), self._attention_post_norm), alpha=scale)
        if mlp:
            inner = self._mlp(self._pre_norm(hidden))
            if self._mlp_post_norm is None:
                hidden = self._down.add_to(hidden, inner)
            else:
                hidden = hidden.add(self._norm(self._down(inner), self._mlp_post_norm), alpha=scale)
        return hidden

    def _pre_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden, None) if self._architecture.pre_norms else hidden

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        architecture = self._architecture
        if architecture.norm == "rms":
            return functional.rms_norm(hidden, hidden.shape[-1:], weight, architecture.norm_eps)
        return functional.layer_norm(hidden, hidden.shape[-1:], weight, None, architecture.norm_eps)

    def _mlp(self, normed: torch.Tensor) -> torch.Tensor:
        """Returns the input of the MLP's second product."""
        inner = self._gate_up(normed)
        if not self._architecture.gated_mlp:
            return self._activation(inner)
        gate, up = inner.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)

    def _attention(self, normed: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        """Returns the attention's output [batch * rows, heads * head size] before the output product."""
        rotation, mask, entries = inputs.kinds[self.kind]
        heads = self._qkv(normed).view(inputs.batch, inputs.rows, self._heads + 2 * self._kv_heads, self._size)
        rotated = self._heads + self._kv_heads
        if self._architecture.qk_norm is not None:
            heads = self._normed_heads(heads, rotated)
        if rotation is not None:
            heads = self._rotate(heads, rotated, rotation)
        query = heads[:, : inputs.attended, : self._heads]
        if entries is None:
            keys, values = heads[:, :, self._heads : rotated].transpose(1, 2), heads[:, :, rotated:].transpose(1, 2)
        else:
            written, keys, values = entries[self.index - inputs.first_layer]
            new = heads[:, : inputs.written, self._heads :]
            written.copy_(new.unflatten(2, (2, self._kv_heads)).permute(2, 0, 3, 1, 4))
        mixed = attend(query, keys, values, mask, self._score_cap, fused=inputs.fused)
        if inputs.attended == inputs.rows:
            return mixed
        return functional.pad(mixed, (0, 0, 0, inputs.rows - inputs.attended))  # only without a batch

    def _rotate(self, heads: torch.Tensor, rotated: int, rotation: torch.Tensor) -> torch.Tensor:
        """Multiplies pairs of numbers of query and key heads with the complex numbers `rotation`, in place."""
        part = heads[:, :, :rotated, : self._rotary_size]
        if part.dtype == torch.float32:
            torch.view_as_complex(part.unflatten(3, (-1, 2))).mul_(rotation)
        else:
            product = torch.view_as_complex(part.float().unflatten(3, (-1, 2))).mul_(rotation)
            part.copy_(torch.view_as_real(product).flatten(3))
        return heads

    def _normed_heads(self, heads: torch.Tensor, rotated: int) -> torch.Tensor:
        """Returns the heads with query and key heads normalised (Qwen 3, Gemma 3, OLMo 2, StableLM, Cohere)."""
        eps, weight = self._architecture.norm_eps, self._qk_norm
        assert weight is not None
        part = heads[:, :, :rotated]
        if self._architecture.qk_norm == "head":
            normed = functional.rms_norm(part, part.shape[-1:], None, eps)
        elif self._architecture.qk_norm == "heads_own":
            normed = functional.layer_norm(part, part.shape[-1:], None, None, eps)
        else:  # over all query heads at once, and over all key heads
            both = part.split((self._heads, self._kv_heads), dim=2)
            normed = torch.cat([functional.rms_norm(one, one.shape[-2:], None, eps) for one in both], dim=2)
        if torch.is_grad_enabled():
            return torch.cat((normed * weight, heads[:, :, rotated:]), dim=2)
        torch.mul(normed, weight, out=part)
        return heads


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
