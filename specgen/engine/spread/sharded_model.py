"""One rank's part of a native model, and how it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from specgen.engine.devices import upload
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.inputs import layer_kinds
from specgen.engine.native.layer import norm_gain
from specgen.engine.native.layer_weights import final_norm, layer_weights
from specgen.engine.native.loading import open_model, return_free_memory, table_names
from specgen.engine.native.native_model import NativeModel, NativeParts
from specgen.engine.native.products import DenseProduct, ProductFactory
from specgen.engine.spread.ranks import GatheredHead, Ranks, ShardedLayer
from specgen.engine.spread.shards import LayerShard, Shard
from specgen.engine.weights import WeightFiles


class ShardedModel(NativeModel):
    """One rank's part of a model. All ranks have to call the same functions at the same time; rank 0 gets the logits.

    Its KV caches have the rank's key-value heads only. `parts.embedding` has the rows of the rank's token ids.
    """

    def __init__(self, shard: Shard, ranks: Ranks, layers: Sequence[ShardedLayer], parts: NativeParts, **options: Any) -> None:
        super().__init__(shard.local, layers, parts, parts.norm.dtype, **options)
        self.shard, self._ranks = shard, ranks
        self.num_embeddings = shard.architecture.vocab_size

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        return self.embeddings(upload(torch.tensor(ids), self.device))

    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of token ids on the device. Each rank adds the rows that it holds."""
        table = self.parts.embedding
        own = ids.flatten() - self.shard.tokens.start
        rows = table.index_select(0, own.clamp(0, table.shape[0] - 1)).to(self.dtype)
        rows.masked_fill_(((own < 0) | (own >= table.shape[0]))[:, None], 0)
        self._ranks.sum(rows)
        return self.scaled(rows).view(*ids.shape, -1)

    @property
    def bytes(self) -> int:
        """The bytes of this rank's weights, in the dtype in which they are computed with."""
        products = sum(choice.count * choice.out_features * choice.in_features for choice in self.product_choices)
        return products * self.dtype.itemsize


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
        files, count = open_model(folder, name, architecture, device)
        factory, gain = ProductFactory(device, dtype), norm_gain(architecture, dtype, device)
        parts = _tables(shard, files, factory, dtype, gain, ranks)
        files.close()
        (_, kinds), layers = layer_kinds(architecture, [device] * len(architecture.layers)), []
        for index, kind in enumerate(kinds):
            tensors = LayerShard(files, shard, index)
            weights = layer_weights(shard.local, index, tensors.take, dtype, gain)
            layers.append(ShardedLayer(shard, index, kind, weights, factory, ranks, gain))
            del weights
            files.close()
            if not files.are_copied:
                return_free_memory()
        min_rows = torch.tensor([factory.min_rows])
        ranks.broadcast(min_rows)  # measured by each rank; it is the width of the tensors that are summed
        return ShardedModel(
            shard,
            ranks,
            layers,
            parts,
            norm_gain=gain,
            min_rows=int(min_rows),
            exact=exact,
            num_parameters=count,
            product_choices=factory.choices,
        )


def _tables(
    shard: Shard, files: WeightFiles, factory: ProductFactory, dtype: torch.dtype, gain: float, ranks: Ranks
) -> NativeParts:
    """Returns this rank's rows of the embedding and of the LM head, and the final norm."""
    architecture = shard.architecture
    own = shard.stored_tokens
    embedding_name, head_name = table_names(files)
    matrix = files.take_part(head_name, 0, [own]).to(dtype)
    head = factory(functional.pad(matrix, (0, 0, 0, len(shard.tokens) - len(own))))
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
