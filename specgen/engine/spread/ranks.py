"""The operations in which all ranks take part, and the products and layers that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specgen.engine.native.layer import NativeLayer
from specgen.engine.native.layer_weights import LayerWeights
from specgen.engine.native.products import MakeProduct, Product
from specgen.engine.spread.shards import Shard


class LostRankError(Exception):
    """An operation failed because another rank has ended."""


class Ranks(Protocol):
    """The `size` processes that run a model together, as seen by process number `rank`.

    All must call the same operations in the same order. These raise LostRankError if another process has ended.
    """

    rank: int
    size: int

    def sum(self, tensor: Tensor) -> None:
        """Replaces a contiguous tensor by the sum of all ranks' tensors."""
        ...

    def gather(self, tensor: Tensor) -> Sequence[Tensor] | None:
        """Returns all ranks' tensors, which have the same shape, by rank; None on all ranks but the first."""
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Replaces a contiguous tensor by rank 0's."""
        ...


class SummedProduct(Product):
    """A product split by its inputs: the ranks' results are added up. `scale` is the factor on the residual stream."""

    def __init__(self, product: Product, scale: float, ranks: Ranks) -> None:
        self.out_features, self.in_features = product.out_features, product.in_features
        self._partial, self._scale, self._ranks = product, scale, ranks

    def __call__(self, x: Tensor) -> Tensor:
        total = self._partial(x)
        self._ranks.sum(total)
        return total


class GatheredHead(Product):
    """An LM head split by token ids. Rank 0 gets the logits of all `vocab_size` tokens, the others only their own part."""

    def __init__(self, product: Product, vocab_size: int, ranks: Ranks) -> None:
        self.out_features, self.in_features = vocab_size, product.in_features
        self._product, self._ranks = product, ranks

    def __call__(self, x: Tensor) -> Tensor:
        own = self._product(x)
        parts = self._ranks.gather(own)
        if parts is None:
            return own
        last = self.out_features - own.shape[1] * (len(parts) - 1)  # without padding
        return torch.cat([*parts[:-1], parts[-1][:, :last]], dim=1)


class ShardedLayer(NativeLayer):
    """One rank's part of a decoder layer. The residual stream is the same on all ranks, up to the order of sums."""

    def __init__(
        self,
        shard: Shard,
        index: int,
        kind: int,
        weights: LayerWeights,
        make_product: MakeProduct,
        ranks: Ranks,
        gain: float,
    ) -> None:
        super().__init__(shard.local, index, kind, weights, make_product, gain=gain)
        self._ranks, self._shard = ranks, shard
        scale = shard.architecture.residual_scale
        self._output, self._down = (SummedProduct(product, scale, ranks) for product in (self._output, self._down))

    def _normed_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Returns the heads with query and key heads normalised; a norm over all heads needs the sums of all ranks' squares."""
        if self._architecture.qk_norm != "all":
            return super()._normed_heads(heads, weight)
        whole = self._shard.architecture
        part = heads.narrow(1, 0, self._heads + self._kv_heads)
        of_heads = part.float().square().sum(-1)  # [rows, heads]
        query, key = (each.sum(-1) for each in torch.split(of_heads, [self._heads, self._kv_heads], dim=1))
        squares = torch.stack((query / whole.num_heads, key / (self._shard.copies * whole.num_kv_heads)))
        self._ranks.sum(squares)
        factors = torch.rsqrt(squares / whole.head_size + whole.norm_eps)
        counts = self._heads, self._kv_heads  # not by `repeat_interleave` with a tensor, for which a GPU would be waited for
        by_head = torch.cat([each[:, None].expand(-1, count) for each, count in zip(factors, counts, strict=True)], dim=1)
        torch.mul((part.float() * by_head[:, :, None]).to(part.dtype), weight, out=part)
        return heads
