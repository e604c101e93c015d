"""Makes the weights of one native layer from a model's tensors: fused, with the norms' weights and the score scale folded in.

All operations can be differentiated, so an exit layer is trained through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specgen.engine.native.description import Architecture
from specgen.engine.native.tensor_names import FINAL_NORM, LayerTensors, bias_of

TakeTensor = Callable[[str, tuple[int, ...]], torch.Tensor]
"""Returns the tensor with this name, on the model's device; raises SpecgenError if it is missing or has another shape."""


@dataclass(slots=True)
class LayerWeights:
    """The weights of one layer. Matrices are [out, in]; `qkv` has the rows of all query heads, key heads, value heads.

    `qk_norm` has the norm's weights of all query and key heads, [heads + kv heads, head size].
    """

    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    qk_norm: torch.Tensor | None = None
    attention_post_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None


def layer_weights(
    architecture: Architecture, names: LayerTensors, take: TakeTensor, dtype: torch.dtype, norm_gain: float = 1.0
) -> LayerWeights:
    """Returns the weights, in `dtype`, of the layer whose tensors have the given names.

    `norm_gain` is a factor on the weights of the norms before attention and MLP (see `residual`).
    """
    return _Fusion(architecture, names, take, dtype, norm_gain).weights()


def final_norm(
    architecture: Architecture, take: TakeTensor, dtype: torch.dtype, norm_gain: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the weight [width] of the norm before the LM head, with `norm_gain` as in `layer_weights`, and its bias or None."""
    width = (architecture.hidden_size,)
    weight = ((take(FINAL_NORM, width).float() + architecture.norm_weight_offset) * norm_gain).to(dtype)
    return weight, take(bias_of(FINAL_NORM), width).to(dtype) if architecture.norm_has_bias else None


def head_order(architecture: Architecture, device: torch.device) -> torch.Tensor:
    """Returns the index in the model's files of each number of a query or key head, in the native decoder's order."""
    rotary = architecture.rotary_size
    order = torch.arange(architecture.head_size, device=device)
    if not architecture.interleaved_rotary and any(kind.rotary is not None for kind in architecture.layers):
        order[:rotary] = order[:rotary].view(2, -1).t().reshape(-1)
    return order


class _Fusion:
    """Fuses the tensors of one layer."""

    def __init__(
        self, architecture: Architecture, names: LayerTensors, take: TakeTensor, dtype: torch.dtype, norm_gain: float
    ) -> None:
        self._architecture, self._names, self._take, self._dtype = architecture, names, take, dtype
        self._norm_gain = norm_gain
        self._width, self._size = architecture.hidden_size, architecture.head_size
        self._heads, self._kv_heads = architecture.num_heads, architecture.num_kv_heads

    def weights(self) -> LayerWeights:
        architecture, names = self._architecture, self._names
        qkv, qkv_bias = self._qkv()
        count = architecture.intermediate_size * (2 if architecture.gated_mlp else 1)
        gate_up, gate_up_bias = self._stacked(names.gate_up, count, self._width, architecture.mlp_bias)
        gate_up, gate_up_bias = self._with_norm(names.mlp_norm or names.attention_norm, gate_up, gate_up_bias)
        output, output_bias = self._stacked((names.output,), self._width, self._heads * self._size, architecture.output_bias)
        down, down_bias = self._stacked((names.down,), self._width, architecture.intermediate_size, architecture.mlp_bias)
        made = LayerWeights(qkv, output.to(self._dtype), gate_up, down.to(self._dtype), qkv_bias, gate_up_bias=gate_up_bias)
        made.output_bias = None if output_bias is None else output_bias.to(self._dtype)
        made.down_bias = None if down_bias is None else down_bias.to(self._dtype)
        made.qk_norm = self._qk_norm()
        made.attention_post_norm = self._post_norm(names.attention_post_norm)
        made.mlp_post_norm = self._post_norm(names.mlp_post_norm)
        return made

    def _qkv(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        architecture = self._architecture
        rows = (self._heads + 2 * self._kv_heads) * self._size
        weight, bias = self._stacked(self._names.qkv, rows, self._width, architecture.qkv_bias)
        scale = 1.0 if architecture.qk_norm is not None else architecture.attention_scale
        weight = self._arranged(weight.float(), scale)  # float32: rounded once, after all factors
        bias = None if bias is None else self._arranged(bias.float()[:, None], scale)[:, 0]
        return self._with_norm(self._names.attention_norm, weight, bias)

    def _stacked(
        self, names: tuple[str, ...], rows: int, columns: int, has_bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the rows of several matrices as one matrix [`rows`, `columns`], and the same for their biases [`rows`]."""
        parts = self._row_counts(names, rows)
        matrices = [self._take(name, (count, columns)) for name, count in zip(names, parts, strict=True)]
        weight = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        if not has_bias:
            return weight, None
        biases = [self._take(bias_of(name), (count,)) for name, count in zip(names, parts, strict=True)]
        return weight, torch.cat(biases)

    def _row_counts(self, names: tuple[str, ...], rows: int) -> list[int]:
        if names == self._names.qkv and len(names) == 3:
            return [heads * self._size for heads in (self._heads, self._kv_heads, self._kv_heads)]
        return [rows // len(names)] * len(names)

    def _arranged(self, weight: torch.Tensor, scale: float) -> torch.Tensor:
        """Returns the fused matrix with its query rows scaled, and with rotary pairs as neighbours in query and key heads."""
        columns = weight.shape[1]
        rotated = (self._heads + self._kv_heads) * self._size
        heads = weight[:rotated].view(-1, self._size, columns)[:, head_order(self._architecture, weight.device)]
        if scale != 1.0:
            heads = torch.cat((heads[: self._heads] * scale, heads[self._heads :]))
        return torch.cat((heads.reshape(rotated, columns), weight[rotated:]))

    def _with_norm(
        self, name: str | None, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Folds the weight and bias of the norm before a product into the product's."""
        if name is not None and self._architecture.pre_norms:
            if self._architecture.norm_has_bias:
                shift = weight.float() @ self._take(bias_of(name), (self._width,)).float()
                bias = shift if bias is None else bias + shift
            weight = weight * (self._norm_weight(name, (self._width,)) * self._norm_gain)  # float32
        return weight.to(self._dtype), None if bias is None else bias.to(self._dtype)

    def _norm_weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._take(name, shape).float() + self._architecture.norm_weight_offset

    def _post_norm(self, name: str | None) -> torch.Tensor | None:
        return None if name is None else self._norm_weight(name, (self._width,)).to(self._dtype)

    def _qk_norm(self) -> torch.Tensor | None:
        if self._architecture.qk_norm is None:
            return None
        query = self._heads_norm(self._names.q_norm, self._heads) * self._architecture.attention_scale
        both = torch.cat((query, self._heads_norm(self._names.k_norm, self._kv_heads)))
        return both[:, head_order(self._architecture, both.device)].to(self._dtype)

    def _heads_norm(self, names: str | tuple[str, ...] | None, heads: int) -> torch.Tensor:
        """Returns the norm's weights of `heads` heads: [heads, head size]."""
        assert names is not None
        size, kind = self._size, self._architecture.qk_norm
        if isinstance(names, tuple):  # one vector per head
            return torch.stack([self._norm_weight(name, (size,)) for name in names])
        if kind == "head":
            return self._norm_weight(names, (size,)).expand(heads, size)
        shape = (heads * size,) if kind == "all" else (heads, size)
        return self._norm_weight(names, shape).view(heads, size)
