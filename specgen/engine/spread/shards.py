"""Which part of a model one of several ranks holds, and how it is read from the weight files.

As in Megatron-LM (Shoeybi et al. 2019, section 3): the products that enter attention and MLP are split by output (by heads, by
neurons), those that leave them by input, so that the ranks' results add up to the whole product's. The embedding and the LM head
are split by token ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specgen.base.errors import SpecgenError
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.layer_weights import LayerTensors, bias_of, layer_tensors
from specgen.engine.weights import WeightFiles


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
        group, copies = heads // kv_heads, 1
        if size <= kv_heads:
            own_kv = _part(kv_heads, rank, size)
            own_heads = range(own_kv.start * group, own_kv.stop * group)
        else:
            copies = size // kv_heads
            if size % kv_heads or group % copies:
                usable = [ranks for ranks in range(1, heads + 1) if _fits(ranks, heads, kv_heads)]
                raise SpecgenError(
                    f"{name} has {heads} heads on {kv_heads} key-value heads, which cannot be split over {size} ranks",
                    f"Take --nproc-per-node {max(ranks for ranks in usable if ranks < size)}",
                )
            own_kv = range(rank // copies, rank // copies + 1)
            own_heads = _part(heads, rank, size)
        rows = -(-architecture.vocab_size // size)
        if architecture.intermediate_size < size or rows * (size - 1) >= architecture.vocab_size:
            raise SpecgenError(f"{name} is too small to be split over {size} ranks", "Take fewer: --nproc-per-node 2")
        neurons = _part(architecture.intermediate_size, rank, size)
        tokens = range(rank * rows, (rank + 1) * rows)
        return cls(architecture, rank, size, own_heads, own_kv, neurons, tokens, copies)

    @property
    def local(self) -> Architecture:
        """The architecture of a model whose layers have only this rank's heads and neurons."""
        return replace(
            self.architecture,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.neurons),
        )

    @property
    def stored_tokens(self) -> range:
        """The rank's token ids without padding."""
        return range(self.tokens.start, min(self.tokens.stop, self.architecture.vocab_size))


def _part(total: int, rank: int, size: int) -> range:
    return range(total * rank // size, total * (rank + 1) // size)


def _fits(ranks: int, heads: int, kv_heads: int) -> bool:
    return ranks <= kv_heads or (ranks % kv_heads == 0 and (heads // kv_heads) % (ranks // kv_heads) == 0)


@dataclass(frozen=True, slots=True)
class _Part:
    """The `ranges` of a tensor along `dimension`."""

    dimension: int
    ranges: tuple[range, ...]


class LayerShard:
    """Reads one rank's part of the tensors of layer `index`."""

    def __init__(self, files: WeightFiles, shard: Shard, index: int) -> None:
        self._files, self._shard = files, shard
        names = layer_tensors(shard.architecture, index)
        self._parts = _parts(shard, names)
        self._added_once = {bias_of(names.output), bias_of(names.down)}

    def take(self, name: str) -> torch.Tensor:
        """Returns the rank's part of the tensor `name`; see `WeightFiles.take`.

        The biases of sums over all ranks are zero on all ranks but the first.
        """
        part = self._parts.get(name)
        if part is None:
            tensor = self._files.take(name)
            return torch.zeros_like(tensor) if name in self._added_once and self._shard.rank else tensor
        return self._files.take_part(name, part.dimension, part.ranges)


def _parts(shard: Shard, names: LayerTensors) -> dict[str, _Part]:
    """Returns which part of each tensor of a layer the rank holds; it holds the whole of those that are missing here."""
    architecture = shard.architecture
    size, width = architecture.head_size, architecture.intermediate_size
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    queries, keys = _times(shard.heads, size), _times(shard.kv_heads, size)
    by_rows: dict[str, _Part] = {}
    if len(names.qkv) == 1:
        offsets = 0, heads * size, (heads + kv_heads) * size
        ranges = tuple(_moved(part, offset) for part, offset in zip((queries, keys, keys), offsets, strict=True))
        by_rows[names.qkv[0]] = _Part(0, ranges)
    else:
        by_rows = {name: _Part(0, (part,)) for name, part in zip(names.qkv, (queries, keys, keys), strict=True)}
    if len(names.gate_up) == 1:
        by_rows[names.gate_up[0]] = _Part(0, (shard.neurons, _moved(shard.neurons, width)))
    else:
        by_rows |= dict.fromkeys(names.gate_up, _Part(0, (shard.neurons,)))
    parts = by_rows | {bias_of(name): part for name, part in by_rows.items()}
    parts[names.output] = _Part(1, (queries,))
    parts[names.down] = _Part(1, (shard.neurons,))
    if architecture.qk_norm == "all":
        parts |= {norm: _Part(0, (part,)) for norm, part in ((names.q_norm, queries), (names.k_norm, keys)) if norm is not None}
    return parts


def _times(part: range, factor: int) -> range:
    return range(part.start * factor, part.stop * factor)


def _moved(part: range, offset: int) -> range:
    return range(part.start + offset, part.stop + offset)
