"""One rank's part of a native model that is split over several processes: which part, how it is
read, and how it runs.

As in Megatron-LM (Shoeybi et al. 2019, section 3): the first linear layers of attention and MLP are
split by output (by heads, by neurons), the last ones by input, so that the whole output is the sum
of the ranks' results. The embedding and the LM head are split by token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specgen.base.errors import SpecgenError
from specgen.engine.devices import inference, move
from specgen.engine.forward_pass import (
    ForwardFunction,
    ForwardPass,
    HiddenSource,
    LayerCall,
    ModelOutput,
)
from specgen.engine.model_files import ModelFiles, check_weight_files
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.attention import Attention
from specgen.engine.native.config_reading import read_architecture, read_config
from specgen.engine.native.inputs import layer_kinds
from specgen.engine.native.kv_buffer import KVBuffer
from specgen.engine.native.layer import NativeLayer
from specgen.engine.native.layer_files import final_norm, layer_files, read_layer
from specgen.engine.native.linear import DenseLinear, Linear, LinearFactory
from specgen.engine.native.native_model import (
    NativeForward,
    NativeModel,
    OuterWeights,
    open_model,
    return_free_memory,
    table_names,
)
from specgen.engine.native.norms import norm_gain
from specgen.engine.native.tensors import Unit, walk
from specgen.engine.spread.ranks import Group, joined
from specgen.engine.weights import WeightFiles


@dataclass(frozen=True, slots=True)
class Shard:
    """What rank `rank` of `size` holds of a model.

    `heads`, `kv_heads` and `neurons` (of the MLP) are the rank's part of each layer, `tokens` the
    token ids of its rows of the embedding and the LM head. `copies` is the number of ranks that
    hold the same key-value head; it is above 1 if there are more ranks than key-value heads. All
    ranks have equally many `tokens`; ids from the vocabulary's size on are padding.
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
        """Returns the part of one rank. `name` is what messages call the model.

        Raises SpecgenError if the heads cannot be split over `size` ranks, or if the model is too
        small for so many.
        """
        heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
        copies = max(1, size // kv_heads)
        if not _fits(size, heads, kv_heads):
            most = max(ranks for ranks in range(1, size) if _fits(ranks, heads, kv_heads))
            problem = (
                f"{name} has {heads} heads on {kv_heads} key-value heads, which "
                f"cannot be split over {size} ranks"
            )
            raise SpecgenError(problem, f"Take --nproc-per-node {most}")
        rows = -(-architecture.vocab_size // size)
        if architecture.intermediate_size < size or rows * (size - 1) >= architecture.vocab_size:
            raise SpecgenError(
                f"{name} is too small to be split over {size} ranks",
                "Take fewer: --nproc-per-node 2",
            )
        own_kv = (
            _own_range(kv_heads, rank, size)
            if copies == 1
            else range(rank // copies, rank // copies + 1)
        )
        group = heads // kv_heads
        own = (
            range(own_kv.start * group, own_kv.stop * group)
            if copies == 1
            else _own_range(heads, rank, size)
        )
        neurons = _own_range(architecture.intermediate_size, rank, size)
        tokens = range(rank * rows, (rank + 1) * rows)
        return cls(architecture, rank, size, own, own_kv, neurons, tokens, copies)

    @property
    def local(self) -> Architecture:
        """The architecture of a model whose layers have only this rank's heads and neurons."""
        counts = len(self.heads), len(self.kv_heads), len(self.neurons)
        return replace(
            self.architecture,
            num_heads=counts[0],
            num_kv_heads=counts[1],
            intermediate_size=counts[2],
        )

    def ranges(self, units: Sequence[Unit], length: int) -> list[range]:
        """Returns the rank's rows or columns of a tensor, which has `length` of them; `units` as in
        `native.tensors.Tensor`."""
        whole = self.architecture
        counts: dict[Unit, tuple[int, range]] = {
            "heads": (whole.num_heads, self.heads),
            "kv_heads": (whole.num_kv_heads, self.kv_heads),
            "neurons": (whole.intermediate_size, self.neurons),
        }
        size = length // sum(counts[unit][0] for unit in units)
        own_ranges = []
        start = 0
        for unit in units:
            count, own = counts[unit]
            own_ranges.append(range(start + own.start * size, start + own.stop * size))
            start += count * size
        return own_ranges

    @property
    def stored_tokens(self) -> range:
        """The rank's token ids without padding."""
        return range(self.tokens.start, min(self.tokens.stop, self.architecture.vocab_size))


def _own_range(total: int, rank: int, size: int) -> range:
    return range(total * rank // size, total * (rank + 1) // size)


def _fits(ranks: int, heads: int, kv_heads: int) -> bool:
    return ranks <= kv_heads or (
        ranks % kv_heads == 0 and (heads // kv_heads) % (ranks // kv_heads) == 0
    )


class LayerShard:
    """Reads one rank's part of the tensors of layer `index` from a model's files."""

    def __init__(self, files: WeightFiles, shard: Shard, index: int) -> None:
        self._files = files
        self._shard = shard
        self._tensors = {
            tensor.name: tensor for tensor in walk(layer_files(shard.architecture, index))
        }

    def take(self, name: str) -> Tensor:
        """Returns the rank's part of the tensor `name`, in its stored dtype."""
        tensor = self._tensors[name]
        if tensor.split is not None:
            dimension = 0 if tensor.split == "rows" else 1
            own = self._shard.ranges(tensor.units, tensor.shape[dimension])
            return self._files.take_part(name, dimension, own)
        whole = self._files.take(name)
        return torch.zeros_like(whole) if tensor.added_once and self._shard.rank else whole


class ShardedAttention(Attention):
    """The part of an attention that one rank holds: some of the query heads and key-value heads."""

    def __init__(self, shard: Shard, group: Group, *native: Any, **options: Any) -> None:
        super().__init__(*native, **options)
        self._group = group
        self._shard = shard

    def normed_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Returns the heads with query and key heads normalised; a norm over all heads needs the
        sums of all ranks' squares."""
        if self._norm_over != "all":
            return super().normed_heads(heads, weight)
        whole = self._shard.architecture
        counts = [self._heads, self._kv_heads]
        part = heads.narrow(1, 0, sum(counts))
        query, key = (
            heads.sum(-1) for heads in torch.split(part.float().square().sum(-1), counts, dim=1)
        )
        squares = torch.stack(
            (query / whole.num_heads, key / (self._shard.copies * whole.num_kv_heads))
        )
        self._group.sum(squares)
        factors = torch.rsqrt(squares / whole.head_size + whole.norm_eps)
        by_head = torch.cat(
            [
                factor[:, None].expand(-1, count)
                for factor, count in zip(factors, counts, strict=True)
            ],
            dim=1,
        )
        torch.mul((part.float() * by_head[:, :, None]).to(part.dtype), weight, out=part)
        return heads


class ShardedLayer(NativeLayer):
    """One rank's part of a decoder layer.

    All ranks have the whole residual stream, with the same values up to rounding.
    """

    def __init__(self, shard: Shard, group: Group, *native: Any, gain: float) -> None:
        self.attention = partial(ShardedAttention, shard, group)
        super().__init__(shard.local, *native, gain=gain)
        for branch in (self.mixer, self.mlp):
            branch.output = _summed(branch.output, shard.architecture.residual_scale, group)


def _summed(linear: Linear, scale: float, group: Group) -> Linear:
    """Returns a linear layer split by its inputs: the ranks' results are added up. `scale` is the
    factor on the residual stream."""

    def multiply(x: Tensor) -> Tensor:
        total = linear(x)
        group.sum(total)
        return total

    return Linear(multiply, scale)


def _gathered(linear: Linear, vocab_size: int, group: Group) -> Linear:
    """Returns an LM head split by token ids. Rank 0 gets the logits of all `vocab_size` tokens, the
    others their own part."""

    def multiply(x: Tensor) -> Tensor:
        own = linear(x)
        parts = group.gather(own)
        # without padding
        return own if parts is None else torch.cat([*parts], dim=1)[:, :vocab_size]

    return Linear(multiply)


class ShardedModel(NativeModel):
    """One rank's part of a model. Rank 0 uses it like a whole model; calls that need the other
    ranks are announced to them.

    `outer.embedding` has the rows of the rank's token ids. Rank 0 alone runs trained parts such as
    exit layers, which are not split.
    """

    number = 0  # given by `Group.add`

    def __init__(
        self,
        shard: Shard,
        group: Group,
        layers: Sequence[ShardedLayer],
        outer: OuterWeights,
        **options: Any,
    ) -> None:
        super().__init__(shard.local, layers, outer, outer.norm.dtype, **options)
        self.shard = shard
        self.group = group
        self.architecture = self.shape = shard.architecture

    # on rank 0

    def new_cache(self, layers: range | None = None, *, sequences: int = 1) -> KVBuffer:
        made: SharedCache = self.group.call(
            self, "add_cache", range(self.shape.num_layers) if layers is None else layers
        )
        return made

    def forward(
        self,
        layers: Sequence[LayerCall] | None = None,
        inputs: HiddenSource | None = None,
        *,
        taps: Sequence[int] = (),
        with_head: bool = True,
    ) -> ForwardFunction:
        how = layers, tuple(taps), with_head

        def run(forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
            # which may announce passes of its own
            source = forward_pass.ids if inputs is None else inputs(forward_pass).cpu()
            context: Any = range(len(forward_pass.context))  # only its length is read
            cache = forward_pass.cache
            sent = forward_pass._replace(context=context, cache=None)
            sizes = cache.length, cache.capacity
            output: ModelOutput = self.group.call(
                cache, "run", sizes, how, sent, logits_to_keep, source
            )
            return output

        return run

    def embeddings(self, ids: Tensor) -> Tensor:
        states: Tensor = self.group.call(self, "native", "embeddings", ids.cpu(), {})
        return states

    def head_logits(self, hidden: Tensor, *, is_raw: bool = False) -> Tensor:
        logits: Tensor = self.group.call(
            self, "native", "head_logits", hidden.cpu(), {"is_raw": is_raw}
        )
        return logits

    @inference
    def reference_logits(self, ids: Sequence[int]) -> Tensor:
        logits: Tensor = self.group.call(self, "native", "reference_logits", list(ids), {})
        return logits

    def batch(self, *_: Any, **__: Any) -> ModelOutput:
        raise SpecgenError(
            "under torchrun nothing is trained: the target is split",
            "Train in one process, without torchrun",
        )

    # on all ranks

    def native(self, method: str, argument: Any, options: Mapping[str, Any]) -> Any:
        """Calls the method of this name of `NativeModel` on this rank, with one argument and with
        `options` by name. A tensor is moved to the rank's device."""
        return getattr(super(), method)(
            move(argument, self.device) if isinstance(argument, Tensor) else argument, **options
        )

    def add_cache(self, layers: range) -> SharedCache:
        cache = SharedCache(self, layers)
        self.group.add(cache)
        return cache

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self._embedded(torch.tensor(ids))

    def _embedded(self, ids: Tensor) -> Tensor:
        """Returns the embeddings [n, width] of token ids. Each rank adds the rows that it holds."""
        table = self.outer.embedding
        own = move(ids.flatten(), self.device) - self.shard.tokens.start
        rows = table.index_select(0, own.clamp(0, table.shape[0] - 1)).to(self.dtype)
        rows.masked_fill_(((own < 0) | (own >= table.shape[0]))[:, None], 0)
        self.group.sum(rows)
        return self.scaled(rows)


class SharedCache(KVBuffer):
    """One rank's part of a KV cache: the entries of its key-value heads.

    `length` and `capacity` are set on rank 0, and sent to the other ranks with each pass.
    """

    number = 0  # given by `Group.add`

    def __init__(self, model: ShardedModel, layers: range) -> None:
        local = model.shard.local
        devices = [model.device] * len(layers)
        super().__init__(
            devices,
            [(local.num_kv_heads, local.head_size)] * len(layers),
            model.dtype,
            first_layer=layers.start,
        )
        self._model = model

    def gather(self, indices: Sequence[int], start: int) -> None:
        self._model.group.call(self, "move_entries", list(indices), start)

    def move_entries(self, indices: Sequence[int], start: int) -> None:
        super().gather(indices, start)

    def run(
        self,
        sizes: tuple[int, int],
        how: tuple[Sequence[LayerCall] | None, Sequence[int], bool],
        forward_pass: ForwardPass,
        logits_to_keep: int,
        source: list[int] | Tensor,
    ) -> ModelOutput:
        """Runs this rank's part of a forward pass with this cache.

        `sizes` are the cache's length and capacity. `how` are the layers, the taps, and whether the
        head is run. `source` are the token ids, or the hidden states [n, width] that enter the
        first of the layers.
        """
        (self.length, self.capacity), model = sizes, self._model
        hidden = model.embed(source) if isinstance(source, list) else move(source, model.device)
        layers, taps, with_head = how
        forward = NativeForward(model, layers, lambda _: hidden, taps, with_head=with_head)
        return forward(forward_pass._replace(cache=self), logits_to_keep)


def load_distributed(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> ShardedModel:
    """Loads a model, split over all ranks; called on rank 0.

    Raises SpecgenError for a model that cannot be split, and SpecgenError or RunError for one that
    cannot be loaded.
    """
    if files.architecture is None:
        problem = (
            f"{files.name} cannot be split over torchrun's processes: "
            f"transformers runs it ({files.fallback})"
        )
        raise SpecgenError(
            problem,
            "Run it without torchrun, with --device auto-map where it does not fit into one device",
        )
    if (parts := files.architecture.fixed_parts) is not None:
        hint = (
            "Run it without torchrun, with --device auto-map where it does not fit into one device"
        )
        raise SpecgenError(
            f"{files.name} cannot be split over torchrun's processes: it has {parts}", hint
        )
    check_weight_files(files.folder, files.name)
    return load_on(joined[0], files, dtype, device)


def load_on(
    group: Group, files: ModelFiles, dtype: torch.dtype, device: torch.device
) -> ShardedModel:
    given = files.name, str(files.folder.resolve()), dtype, files.source.exact
    model: ShardedModel = group.call(group, "load", load_shard, device.type, *given)
    return model


def load_shard(
    device: torch.device, group: Group, name: str, path: str, dtype: torch.dtype, exact: bool
) -> ShardedModel:
    """Loads this rank's part of the model in the folder `path`, as `native_model.load_native` loads
    a whole one.

    Reads only this part. Raises SpecgenError for missing, damaged, unsuitable or unexpected
    tensors, and for a model that cannot be split over so many ranks.
    """
    folder = Path(path)
    architecture = read_architecture(read_config(folder, name))
    shard = Shard.of(architecture, group.rank, group.size, name)
    with torch.no_grad():
        files, _ = open_model(folder, name, architecture, device)
        factory = LinearFactory(device, dtype)
        gain = norm_gain(architecture, dtype, device)
        outer = _outer_weights(shard, files, factory, dtype, gain, group)
        files.close()
        (_, kinds) = layer_kinds(architecture, [device] * len(architecture.layers))
        layers = []
        for index, kind in enumerate(kinds):
            weights = read_layer(
                shard.local, index, LayerShard(files, shard, index).take, dtype, gain
            )
            layers.append(ShardedLayer(shard, group, index, kind, weights, factory, gain=gain))
            del weights
            files.close()
            if not files.are_copied:
                return_free_memory()
    return ShardedModel(shard, group, layers, outer, norm_gain=gain, exact=exact)


def _outer_weights(
    shard: Shard,
    files: WeightFiles,
    factory: LinearFactory,
    dtype: torch.dtype,
    gain: float,
    group: Group,
) -> OuterWeights:
    """Returns this rank's rows of the embedding and of the LM head, and the final norm."""
    architecture = shard.architecture
    own = shard.stored_tokens
    embedding_name, head_name = table_names(files)
    matrix = files.take_part(head_name, 0, [own]).to(dtype)
    head = factory(pad(matrix, (0, 0, 0, len(shard.tokens) - len(own))))
    if embedding_name == head_name and isinstance(head, DenseLinear):
        embedding = matrix
    elif files.are_copied:
        embedding = files.take_part(embedding_name, 0, [own]).to(dtype)
    else:  # the mapped file: it takes memory only for the rows that are used
        del matrix
        files.close()
        embedding = files.take(embedding_name)[own.start : own.stop]
    norm = final_norm(architecture, files.take, dtype, gain)
    return OuterWeights(embedding, norm, _gathered(head, architecture.vocab_size, group))
