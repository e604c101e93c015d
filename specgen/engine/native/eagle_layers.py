"""The decoder layers of EAGLE heads, made of native ones: EAGLE-1 (arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840).

Pair i of a text joins the target's feature i with the embedding of token i + 1; it has position i. The layers turn pairs into
predicted features: row i imitates feature i + 1, and its logits predict token i + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specgen.base.errors import SpecgenError
from specgen.engine.native.architecture import read_architecture
from specgen.engine.native.attention import attend_batch
from specgen.engine.native.description import Architecture, UnsupportedConfig
from specgen.engine.native.inputs import layer_kinds
from specgen.engine.native.layer import NativeLayer, PassInputs
from specgen.engine.native.layer_weights import TakeTensor, layer_weights
from specgen.engine.native.products import Product
from specgen.engine.native.residual import ExtendedResidual, PlainResidual, Residual
from specgen.engine.native.tensor_names import FINAL_NORM, HEAD, bias_of, layer_tensors

FC = "fc.weight"
FEATURE_NORM = "layers.0.hidden_norm.weight"
_FIRST = "layers.0.self_attn."
_FIRST_NORM = "layers.0.input_layernorm.weight"
_QKV = frozenset(f"{_FIRST}{name}_proj.weight" for name in "qkv")
_OTHER_FIELDS = frozenset({"bias", "qkv_bias", "draft_vocab_size", "target_hidden_size", "eagle_config", "norm_before_residual"})
_MakeProduct = Callable[[Tensor, Tensor | None, float], Product]


@dataclass(frozen=True, slots=True)
class EagleDesign:
    """What the layers of an EAGLE head are like, but for the numbers in their weights.

    `version` is 1 (also for EAGLE-2) or 3. `has_bias`: `fc` has a bias. `norm_before_residual` is as in `EagleWeights`.
    """

    version: int
    architecture: Architecture
    has_bias: bool = False
    norm_before_residual: bool = False

    @property
    def width(self) -> int:
        return self.architecture.hidden_size


def read_design(
    version: int, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, norm_before_residual: bool = False
) -> EagleDesign:
    """Returns the design that a head's config and the names and shapes of its tensors describe.

    Which products have biases, and how wide an attention head is, the tensors say. Raises SpecgenError for layers of another kind
    than Llama's and Qwen 3's.
    """
    query, heads = tensors.get(f"{_FIRST}q_proj.weight"), config.get("num_attention_heads")
    known = {name: value for name, value in config.items() if name not in _OTHER_FIELDS}
    known.setdefault("model_type", "llama")
    if query is not None and isinstance(heads, int) and heads > 0:
        known["head_dim"] = query.shape[0] // heads
    try:
        architecture = read_architecture(known)
    except UnsupportedConfig as error:
        raise SpecgenError(f"cannot run the layers of the EAGLE head: {error}", _OTHER_HEAD) from error
    usual = replace(architecture, post_norms=False, parallel=False, pre_norms=True, norm="rms", residual_scale=1.0)
    if architecture != usual or architecture.model_type == "phi3":
        raise SpecgenError(f"the EAGLE head has layers of the kind {architecture.model_type!r}", _OTHER_HEAD)
    architecture = replace(
        architecture,
        qkv_bias=f"{_FIRST}q_proj.bias" in tensors,
        output_bias=f"{_FIRST}o_proj.bias" in tensors,
        mlp_bias="layers.0.mlp.down_proj.bias" in tensors,
    )
    return EagleDesign(version, architecture, bias_of(FC) in tensors, norm_before_residual)


class FirstLayer(NativeLayer):
    """The first layer of a head, whose attention does not read the residual stream."""

    def run(self, residual: Residual, attended: Tensor, inputs: PassInputs) -> None:
        """Adds the outputs of attention, which reads `attended`, and of the MLP to the residual stream."""
        residual.add_product(self._output, self._attention(attended, inputs))
        residual.add_product(self._down, self._mlp(residual.normed(), inputs))


class UnrolledLayer(FirstLayer):
    """The first layer of a head in EAGLE-3's training-time test (section 3.2): each call drafts one token after each prefix.

    The first call has a text's pairs. In call j after it, row i is the pair of the j-th token drafted after pair i, at position
    i + j. It sees the pairs that pair i sees, then the tokens drafted after pair i alone.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
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
    """The layers of a head with their weights, for drafting and for training.

    `take` returns the head's tensors by name (see `check_tensor`), `make_product` makes a product as for `NativeLayer`.
    `norm_gain` is that of the residual stream, see `residual`.
    """

    def __init__(
        self,
        design: EagleDesign,
        take: TakeTensor,
        dtype: torch.dtype,
        make_product: _MakeProduct,
        *,
        norm_gain: float = 1.0,
        fc_inputs: int = 2,
        first_layer: type[FirstLayer] = FirstLayer,
    ) -> None:
        self.design, architecture, width = design, design.architecture, design.width
        self._gain, self._eps = norm_gain, architecture.norm_eps
        bias = take(bias_of(FC), (width,)).to(dtype) if design.has_bias else None
        self.fc = make_product(take(FC, (width, fc_inputs)).to(dtype), bias, 1.0)
        self._feature_norm: Tensor | None = None
        if design.norm_before_residual:
            self._feature_norm = (take(FEATURE_NORM, (width,)).float() * norm_gain).to(dtype)
        kinds, made = layer_kinds(architecture), []
        for index, kind in enumerate(architecture.layers):
            names = layer_tensors(architecture, index)
            if index == 0 and design.version == 1:
                names = replace(names, attention_norm=None)
            each = _FirstTensors(take) if index == 0 and design.version == 3 else take
            weights = layer_weights(architecture, names, each, dtype, norm_gain)
            layer = first_layer if index == 0 else NativeLayer
            made.append(layer(architecture, index, kinds.index(kind), weights, make_product))
        self._layers = made

    def residual(self, hidden: Tensor) -> Residual:
        """Returns a residual stream that begins with `hidden` [n, width]."""
        return PlainResidual(hidden, self._eps) if self._gain == 1.0 else ExtendedResidual(hidden, self._eps)

    def __call__(self, embeddings: Tensor, features: Tensor, inputs: PassInputs) -> Residual:
        """Runs the layers on pairs, and returns the residual stream after them: the predicted features.

        `embeddings` and `features` are [n, width]: of version 3, features after `fc`.
        """
        if self.design.version == 1:
            attended = self.fc(torch.cat((embeddings, features), dim=-1))
            residual = self.residual(attended.to(features.dtype))  # in training, products are in bfloat16 and sums in float32
        else:
            normed = self._normed_pairs(embeddings, features)
            attended = normed.flatten(1)
            residual = self.residual(features if self._feature_norm is None else normed[:, 1] * self._feature_norm)
        first, *others = self._layers
        assert isinstance(first, FirstLayer)
        first.run(residual, attended, inputs)
        for layer in others:
            layer(residual, inputs)
        return residual

    def _normed_pairs(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Returns both inputs after norms without weights, [n, 2, width], divided by the norm's gain."""
        if self._gain == 1.0:
            pairs = torch.stack((embeddings, features), dim=1)
            return functional.rms_norm(pairs, pairs.shape[-1:], None, self._eps)
        count, width = features.shape  # as `ExtendedResidual` does it
        pairs = features.new_empty(count, 2, width + 1)
        pairs.select(2, width).fill_(sqrt(width * self._eps))
        pairs[:, 0, :width], pairs[:, 1, :width] = embeddings, features
        normed: Tensor = pairs[:, :, :width] / torch.linalg.vector_norm(pairs, dim=2, keepdim=True)
        return normed


def head_weight(design: EagleDesign, take: TakeTensor, vocab_size: int, norm_gain: float = 1.0) -> Tensor:
    """Returns the LM head of version 3 [`vocab_size`, width] in float32, with the weight of the norm before it folded in."""
    width = design.width
    return take(HEAD, (vocab_size, width)).float() * (take(FINAL_NORM, (width,)).float() * norm_gain)


class _FirstTensors:
    """Takes the tensors of version 3's first layer, whose attention reads two normed vectors side by side, as if it were one."""

    def __init__(self, take: TakeTensor) -> None:
        self._take = take

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name == _FIRST_NORM:
            return torch.cat((self._take(name, shape), self._take(FEATURE_NORM, shape)))
        return self._take(name, (shape[0], 2 * shape[1]) if name in _QKV else shape)


def check_tensor(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns a head's tensor. Raises SpecgenError if it is missing or has another shape."""
    tensor = tensors.get(name)
    if tensor is None:
        raise SpecgenError(f"the EAGLE head has no {name}", _OTHER_HEAD)
    if tuple(tensor.shape) != shape:
        found, expected = (" x ".join(map(str, sizes)) for sizes in (tensor.shape, shape))
        raise SpecgenError(f"{name} of the EAGLE head is {found}, but has to be {expected} for this model", _OTHER_HEAD)
    return tensor


_OTHER_HEAD = "Take a head that was made for this model"
