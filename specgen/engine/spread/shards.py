"""One rank's part of a native model that is split over several: which part, how it is read, and how it runs.

As in Megatron-LM (Shoeybi et al. 2019, section 3): the products that enter attention and MLP are split by output (by heads, by
neurons), those that leave them by input, so that the ranks' results add up to the whole product's. The embedding and the LM head
are split by token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specgen.base.errors import SpecgenError
from specgen.engine.devices import upload
from specgen.engine.forward_pass import ForwardPass, LayerPart, ModelOutput
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.inputs import layer_kinds
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import NativeLayer, norm_gain
from specgen.engine.native.layer_weights import bias_of, final_norm, layer_tensors, layer_weights
from specgen.engine.native.loading import open_model, return_free_memory, table_names
from specgen.engine.native.native_model import NativeModel, NativeParts
from specgen.engine.native.products import DenseProduct, Product, ProductFactory
from specgen.engine.spread.collectives import Ranks
from specgen.engine.weights import WeightFiles

_Part = tuple[int, Sequence[range]]  # the dimension along which a tensor is split, and its ranges that a rank holds


@dataclass(frozen=True, slots=True)
class Shard:
    """What rank `rank` of `size` holds of a model.

    `heads`, `kv_heads` and `neurons` (of the MLP) are its part of each layer, `tokens` the token ids of its rows of the embedding
    and the LM head. `copies` is the number of ranks that hold the same key-value head: more than 1 where there are more ranks
    than key-value heads. All ranks have equally many `tokens`; those from the vocabulary's size on are padding.
    """

    architecture: Architecture
    rank: int
    size: int
    heads: range
    kv_heads: range
    neurons: range
    tokens: range
    copies: int = 1

    @classmethod
    def of(cls, architecture: Architecture, rank: int, size: int, name: str = "the model") -> Shard:
        """Returns one rank's part. Raises SpecgenError if the model, which messages call `name`, cannot be split so."""
        heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
        copies = max(1, size // kv_heads)
        if not _fits(size, heads, kv_heads):
            most = max(ranks for ranks in range(1, size) if _fits(ranks, heads, kv_heads))
            problem = f"{name} has {heads} heads on {kv_heads} key-value heads, which cannot be split over {size} ranks"
            raise SpecgenError(problem, f"Take --nproc-per-node {most}")
        rows = -(-architecture.vocab_size // size)
        if architecture.intermediate_size < size or rows * (size - 1) >= architecture.vocab_size:
            raise SpecgenError(f"{name} is too small to be split over {size} ranks", "Take fewer: --nproc-per-node 2")
        own_kv = _part(kv_heads, rank, size) if copies == 1 else range(rank // copies, rank // copies + 1)
        group = heads // kv_heads
        own = range(own_kv.start * group, own_kv.stop * group) if copies == 1 else _part(heads, rank, size)
        neurons, tokens = _part(architecture.intermediate_size, rank, size), range(rank * rows, (rank + 1) * rows)
        return cls(architecture, rank, size, own, own_kv, neurons, tokens, copies)

    @property
    def local(self) -> Architecture:
        """The architecture of a model whose layers have only this rank's heads and neurons."""
        counts = len(self.heads), len(self.kv_heads), len(self.neurons)
        return replace(self.architecture, num_heads=counts[0], num_kv_heads=counts[1], intermediate_size=counts[2])

    @property
    def stored_tokens(self) -> range:
        """The rank's token ids without padding."""
        return range(self.tokens.start, min(self.tokens.stop, self.architecture.vocab_size))


def _part(total: int, rank: int, size: int) -> range:
    return range(total * rank // size, total * (rank + 1) // size)


def _fits(ranks: int, heads: int, kv_heads: int) -> bool:
    return ranks <= kv_heads or (ranks % kv_heads == 0 and (heads // kv_heads) % (ranks // kv_heads) == 0)


class LayerShard:
    """Reads one rank's part of the tensors of layer `index`."""

    def __init__(self, files: WeightFiles, shard: Shard, index: int) -> None:
        names = layer_tensors(shard.architecture, index)
        self._files, self._shard = files, shard
        self._added_once = {bias_of(names.output), bias_of(names.down)}
        whole, size = shard.architecture, shard.architecture.head_size
        queries, keys = (range(part.start * size, part.stop * size) for part in (shard.heads, shard.kv_heads))
        lengths = whole.num_heads * size, whole.num_kv_heads * size, whole.num_kv_heads * size
        rows = _split(names.qkv, lengths, (queries, keys, keys))
        rows |= _split(names.gate_up, (whole.intermediate_size,) * 2, (shard.neurons, shard.neurons))
        self._parts = rows | {bias_of(str(name)): part for name, part in rows.items()}
        self._parts |= {names.output: (1, [queries]), names.down: (1, [shard.neurons])}
        if whole.qk_norm == "all":
            self._parts |= {names.q_norm: (0, [queries]), names.k_norm: (0, [keys])}

    def take(self, name: str) -> Tensor:
        """Returns the rank's part of the tensor `name`; see `WeightFiles.take`.

        The biases of sums over all ranks are zero on all ranks but the first.
        """
        if name in self._parts:
            return self._files.take_part(name, *self._parts[name])
        tensor = self._files.take(name)
        return torch.zeros_like(tensor) if name in self._added_once and self._shard.rank else tensor


def _split(names: Sequence[str], lengths: Sequence[int], own: Sequence[range]) -> dict[str | None, _Part]:
    """Returns a rank's rows of some matrices, or of a single one that has the rows of all, one matrix after the other."""
    if len(names) > 1:
        return {name: (0, [part]) for name, part in zip(names, own, strict=True)}
    starts = accumulate(lengths[:-1], initial=0)
    return {names[0]: (0, [range(start + part.start, start + part.stop) for start, part in zip(starts, own, strict=True)])}


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
        return own if parts is None else torch.cat([*parts], dim=1)[:, : self.out_features]  # without padding


class ShardedLayer(NativeLayer):
    """One rank's part of a decoder layer. The residual stream is the same on all ranks, up to the order of sums."""

    def __init__(self, shard: Shard, ranks: Ranks, *native: Any, gain: float) -> None:
        super().__init__(shard.local, *native, gain=gain)
        self._ranks, self._shard, scale = ranks, shard, shard.architecture.residual_scale
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


class ShardedModel(NativeModel):
    """One rank's part of a model. All ranks have to call the same functions at the same time; rank 0 gets the logits.

    Its KV caches have the rank's key-value heads only. `parts.embedding` has the rows of the rank's token ids.
    """

    def __init__(self, shard: Shard, ranks: Ranks, layers: Sequence[ShardedLayer], parts: NativeParts, **options: Any) -> None:
        super().__init__(shard.local, layers, parts, parts.norm.dtype, **options)
        self.shard, self._ranks = shard, ranks

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self.embeddings(upload(torch.tensor(ids), self.device))

    def embeddings(self, ids: Tensor) -> Tensor:
        """Returns the embeddings of token ids on the device. Each rank adds the rows that it holds."""
        table = self.parts.embedding
        own = ids.flatten() - self.shard.tokens.start
        rows = table.index_select(0, own.clamp(0, table.shape[0] - 1)).to(self.dtype)
        rows.masked_fill_(((own < 0) | (own >= table.shape[0]))[:, None], 0)
        self._ranks.sum(rows)
        return self.scaled(rows).view(*ids.shape, -1)

    def head(self, x: Tensor) -> Tensor:
        """Returns the output of the LM head's product; on rank 0 that for all tokens."""
        return self.parts.head(x)

    def part_of_forward(self, *options: Any) -> ShardedForward:
        return ShardedForward(self, *options)


class ShardedForward:
    """One rank's part of a forward function. `layers`, `with_head` and `taps` are as for `engine.model.Model`.

    `reads_hidden`: hidden states enter the first layer, not embeddings.
    """

    def __init__(
        self, model: ShardedModel, layers: Sequence[LayerPart] | None, reads_hidden: bool, with_head: bool, taps: Sequence[int]
    ) -> None:
        self._hidden: Any = None
        source = (lambda _: self._hidden) if reads_hidden else None
        self._forward = model.forward(layers, source, taps=taps, with_head=with_head)

    def run(
        self, cache: KVBuffer, sizes: tuple[int, int], forward_pass: ForwardPass, logits_to_keep: int, hidden: Tensor | None
    ) -> ModelOutput:
        """Runs a pass on the rank's part of the cache, whose length and capacity are `sizes`."""
        (cache.length, cache.capacity), self._hidden = sizes, hidden
        return self._forward(forward_pass._replace(cache=cache), logits_to_keep)


def load_shard(
    folder: Path,
    name: str,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    *,
    exact: bool = False,
) -> ShardedModel:
    """Loads this rank's part of the model in `folder`, as `native.loading.load_native` loads a whole one. Reads only this part.

    Raises SpecgenError for missing, damaged, unsuitable or unexpected tensors, and for a model that cannot be split so.
    """
    shard = Shard.of(architecture, ranks.rank, ranks.size, name)
    with torch.no_grad():
        files = open_model(folder, name, architecture, device)
        factory, gain = ProductFactory(device, dtype), norm_gain(architecture, dtype, device)
        parts = _tables(shard, files, factory, dtype, gain, ranks)
        files.close()
        (_, kinds), layers = layer_kinds(architecture, [device] * len(architecture.layers)), []
        for index, kind in enumerate(kinds):
            weights = layer_weights(shard.local, index, LayerShard(files, shard, index).take, dtype, gain)
            layers.append(ShardedLayer(shard, ranks, index, kind, weights, factory, gain=gain))
            del weights
            files.close()
            if not files.are_copied:
                return_free_memory()
    options = {"norm_gain": gain, "min_rows": factory.min_rows, "exact": exact}
    return ShardedModel(shard, ranks, layers, parts, product_choices=factory.choices, **options)


def _tables(
    shard: Shard, files: WeightFiles, factory: ProductFactory, dtype: torch.dtype, gain: float, ranks: Ranks
) -> NativeParts:
    """Returns this rank's rows of the embedding and of the LM head, and the final norm."""
    architecture, own = shard.architecture, shard.stored_tokens
    embedding_name, head_name = table_names(files)
    matrix = files.take_part(head_name, 0, [own]).to(dtype)
    head = factory(pad(matrix, (0, 0, 0, len(shard.tokens) - len(own))))
    if embedding_name == head_name and isinstance(head, DenseProduct):
        embedding = matrix
    elif files.are_copied:
        embedding = files.take_part(embedding_name, 0, [own]).to(dtype)
    else:  # the mapped file: it takes memory only for the rows that are used
        del matrix
        files.close()
        embedding = files.take(embedding_name)[own.start : own.stop]
    norm = final_norm(architecture, files.take, dtype, gain)
    return NativeParts(embedding, norm, GatheredHead(head, architecture.vocab_size, ranks))
