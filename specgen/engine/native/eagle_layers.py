"""The decoder layers of EAGLE heads, made of native ones: EAGLE-1 (arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840).

Pair i of a text joins the target's feature i with the embedding of token i + 1; it has position i. The layers turn pairs into
predicted features: row i imitates feature i + 1, and its logits predict token i + 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specgen.engine.native.architecture import Architecture
from specgen.engine.native.attention import attend_batch
from specgen.engine.native.inputs import PassInputs, layer_kinds
from specgen.engine.native.layer import NativeLayer, norm_function
from specgen.engine.native.layer_weights import FINAL_NORM, HEAD, Take, bias_of, layer_weights
from specgen.engine.native.products import MakeProduct

FC = "fc.weight"
FEATURE_NORM = "layers.0.hidden_norm.weight"
_FIRST_NORM = "layers.0.input_layernorm.weight"


class FirstLayer(NativeLayer):
    """The first layer of a head, whose attention does not read the residual stream."""

    def run(self, hidden: Tensor, attended: Tensor, inputs: PassInputs) -> Tensor:
        """Returns the residual stream with the outputs of attention, which reads `attended`, and of the MLP added."""
        hidden = self._output.add_to(hidden, self._attention(attended, inputs))
        return self._down.add_to(hidden, self._mlp(self._norm(hidden)))


class UnrolledLayer(FirstLayer):
    """The first layer of a head in EAGLE-3's training-time test (section 3.2): each call drafts one token after each prefix.

    The first call has a text's pairs. In call j after it, row i is the pair of the j-th token drafted after pair i, at position
    i + j. It sees the pairs that pair i sees, then the tokens drafted after pair i alone.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._drafted: list[tuple[Tensor, Tensor]] = []  # keys and values of each call, [batch, kv heads, n, head size]

    def _batch_attention(self, heads: Tensor, inputs: PassInputs) -> Tensor:
        mask, batch, group = inputs.kinds[self.kind].mask, inputs.batch, self._heads // self._kv_heads
        assert batch is not None
        assert mask is not None
        heads = heads.view(batch, inputs.rows, *heads.shape[1:])
        query, keys, values = torch.split(heads, [self._heads, self._kv_heads, self._kv_heads], dim=2)
        self._drafted.append((keys.transpose(1, 2), values.transpose(1, 2)))
        if len(self._drafted) == 1:
            return attend_batch(query, *self._drafted[0], mask).flatten(0, 1)
        repeated = [tuple(each.repeat_interleave(group, dim=1) for each in pair) for pair in self._drafted]
        (keys, values), *of_drafts = self._drafted if group == 1 else repeated
        query = query.transpose(1, 2)
        drafts = [(query * own_keys).sum(-1, keepdim=True) for own_keys, _ in of_drafts]
        weights = torch.cat((query @ keys.transpose(-1, -2) + mask, *drafts), dim=-1).softmax(dim=-1)
        before, *own_weights = torch.split(weights, [inputs.rows, *(1 for _ in drafts)], dim=-1)
        mixed: Tensor = before.to(values.dtype) @ values
        for weight, (_, own_values) in zip(own_weights, of_drafts, strict=True):
            mixed = mixed + weight * own_values
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


class EagleLayers:
    """The layers of a head of EAGLE-1 or EAGLE-3 (`version`) with their weights, for drafting and for training.

    `take` returns the head's tensors by name. `has_bias`: `fc` has a bias. `make_product` makes a product as for `NativeLayer`.
    `device` is that of the layers, `norm_gain` as in `layer.norm_function`, `norm_before_residual` as in `EagleWeights`.
    """

    def __init__(
        self,
        version: int,
        architecture: Architecture,
        take: Take,
        dtype: torch.dtype,
        make_product: MakeProduct,
        device: torch.device,
        *,
        has_bias: bool,
        norm_before_residual: bool = False,
        norm_gain: float = 1.0,
        first_layer: type[FirstLayer] = FirstLayer,
    ) -> None:
        self._version = version
        self.normed = norm_function(architecture.norm_eps, norm_gain)  # of predicted features: what `head_weight` reads
        bias = take(bias_of(FC)).to(dtype) if has_bias else None
        self.fc = make_product(take(FC).to(dtype), bias, 1.0)
        self._feature_norm = (take(FEATURE_NORM).float() * norm_gain).to(dtype) if norm_before_residual else None
        first_take = _with_both_norms(take) if version == 3 else take
        _, kinds = layer_kinds(architecture, [device] * len(architecture.layers))
        self._layers: list[NativeLayer] = []
        for index, kind in enumerate(kinds):
            own_take, layer = (take, NativeLayer) if index else (first_take, first_layer)
            made = layer_weights(architecture, index, own_take, dtype, norm_gain, is_normed=index > 0 or version == 3)
            self._layers.append(layer(architecture, index, kind, made, make_product, gain=norm_gain))

    def __call__(self, embeddings: Tensor, features: Tensor, inputs: PassInputs) -> Tensor:
        """Runs the layers on pairs, and returns the hidden states after them: the predicted features.

        `embeddings` and `features` are [n, width]: of version 3, features after `fc`.
        """
        if self._version == 1:
            attended = self.fc(torch.cat((embeddings, features), dim=-1))
            hidden = attended.to(features.dtype, copy=True)  # in training, products are in bfloat16 and sums in float32
        else:
            pairs = self.normed(torch.stack((embeddings, features), dim=1))
            attended = pairs.flatten(1)
            hidden = features.clone() if self._feature_norm is None else pairs[:, 1] * self._feature_norm
        first, *others = self._layers
        assert isinstance(first, FirstLayer)
        hidden = first.run(hidden, attended, inputs)
        for layer in others:
            hidden = layer(hidden, inputs)
        return hidden


def head_weight(take: Take, norm_gain: float = 1.0) -> Tensor:
    """Returns the LM head of version 3 [head vocabulary, width] in float32, with the weight of the norm before it folded in."""
    return take(HEAD).float() * (take(FINAL_NORM).float() * norm_gain)


def _with_both_norms(take: Take) -> Take:
    """Returns what takes the tensors of version 3's first layer, whose attention reads two normed vectors side by side."""
    return lambda name: torch.cat((take(name), take(FEATURE_NORM))) if name == _FIRST_NORM else take(name)
