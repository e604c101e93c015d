"""A model split over several ranks, as rank 0 uses it: each function announces what it runs, and runs rank 0's part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from specgen.base.errors import SpecgenError
from specgen.engine.batch_pass import BatchCache, BatchPass
from specgen.engine.forward_pass import ForwardFunction, ForwardPass, HiddenSource, LayerPart, ModelOutput
from specgen.engine.inference_mode import inference
from specgen.engine.native.architecture import Architecture, of_architecture
from specgen.engine.native.native_model import NativeModel, NativeParts
from specgen.engine.native.products import Product
from specgen.engine.spread.follower import make_forward
from specgen.engine.spread.leader import Leader
from specgen.engine.spread.messages import Operation, pass_numbers, text_numbers
from specgen.engine.spread.sharded_model import ShardedModel, load_shard
from specgen.engine.spread.shards import Shard


class DistributedCache:
    """The KV cache of a distributed model: rank 0's part, and the number of the other ranks'. Implements `forward_pass.Cache`."""

    def __init__(self, leader: Leader, model_key: int, local: ShardedModel, layers: range) -> None:
        self._leader = leader
        self.key = leader.new_key(self)
        with leader.call(Operation.CACHE, [self.key, model_key, layers.start, layers.stop]):
            self.local = local.new_cache(layers)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.local.capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self.local.capacity = capacity

    def gather(self, indices: Sequence[int], start: int) -> None:
        with self._leader.call(Operation.GATHER, [self.key, start, *indices]):
            self.local.gather(indices, start)


class DistributedForward:
    """A forward function of a distributed model. `description` is as for `follower.make_forward`."""

    def __init__(
        self, leader: Leader, model_key: int, local: ShardedModel, description: dict[str, Any], inputs: HiddenSource | None = None
    ) -> None:
        self._leader, self._model_key, self._inputs = leader, model_key, inputs
        self._key = leader.new_key(self)
        with leader.call(Operation.FUNCTION, [self._key, model_key, *text_numbers(description)]):
            self._forward, self._received = make_forward(local, description)

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        hidden = None if self._inputs is None else self._inputs(forward_pass).contiguous()  # which may announce passes of its own
        cache: DistributedCache = forward_pass.cache
        cache.local.length = cache.length
        numbers = pass_numbers(forward_pass, logits_to_keep, cache.capacity)
        with self._leader.call(Operation.PASS, [self._key, cache.key, self._model_key, *numbers]):
            if hidden is not None and self._received is not None:
                self._leader.ranks.broadcast(hidden)
                self._received.states = hidden
            return self._forward(forward_pass._replace(cache=cache.local), logits_to_keep)


class _AnnouncedHead(Product):
    """The LM head of a distributed model, for what only rank 0 runs."""

    def __init__(self, leader: Leader, model_key: int, local: ShardedModel) -> None:
        self._leader, self._model_key, self._head = leader, model_key, local.parts.head
        self.out_features, self.in_features = self._head.out_features, self._head.in_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        with self._leader.call(Operation.HEAD, [self._model_key, x.shape[0]]):
            self._leader.ranks.broadcast(x)
            return self._head(x)


class DistributedModel:
    """A native model split over ranks. Implements `engine.model.Model`, without what training needs."""

    backend = "native"
    capture_seconds = 0.0

    def __init__(self, leader: Leader, folder: Path, name: str, architecture: Architecture, **options: Any) -> None:
        """Loads the model on all ranks; `options` are those of `load_shard`: dtype, device, exact."""
        Shard.of(architecture, 0, leader.ranks.size, name)  # raises before anything is sent to the other ranks
        self._leader, self.architecture = leader, architecture
        self._key = leader.new_key(self)
        dtype = str(options["dtype"]).removeprefix("torch.")
        job = {"folder": str(folder.resolve()), "name": name, "dtype": dtype, "exact": options.get("exact", False)}
        with leader.call(Operation.LOAD, [self._key, *text_numbers(job)], holds=False):
            local = load_shard(folder, name, architecture, ranks=leader.ranks, **options)
        self.local, self.shape = local, of_architecture(architecture)
        self.dtype, self.device = local.dtype, local.device
        self.num_embeddings, self.vocab_size = local.num_embeddings, local.vocab_size
        self.num_parameters, self.product_choices = local.num_parameters, local.product_choices
        self.min_rows, self.exact = local.min_rows, local.exact
        norm = local.parts.norm
        parts = NativeParts(norm[None], norm, _AnnouncedHead(leader, self._key, local))
        # What rank 0 runs alone is as in the whole model.
        self._alone = NativeModel(
            architecture, (), parts, self.dtype, norm_gain=local.norm_gain, min_rows=local.min_rows, exact=local.exact
        )

    def capture_passes(self, shortest: int, longest: int) -> None:
        """Does nothing: no passes are captured."""

    def new_cache(self, layers: range | None = None) -> DistributedCache:
        return DistributedCache(self._leader, self._key, self.local, range(self.shape.num_layers) if layers is None else layers)

    def forward(self) -> ForwardFunction:
        return self.layers_forward([LayerPart(index) for index in range(self.shape.num_layers)])

    def layers_forward(
        self, layers: Sequence[LayerPart], inputs: HiddenSource | None = None, *, with_head: bool = True
    ) -> ForwardFunction:
        description = {"layers": [list(part) for part in layers], "inputs": inputs is not None, "head": with_head, "taps": None}
        return DistributedForward(self._leader, self._key, self.local, description, inputs)

    def feature_forward(self, taps: Sequence[int]) -> ForwardFunction:
        description = {"layers": None, "inputs": False, "head": True, "taps": list(taps)}
        return DistributedForward(self._leader, self._key, self.local, description)

    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        with self._leader.call(Operation.EMBED, [self._key, *ids.flatten().tolist()]):
            return self.local.embeddings(ids)

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._alone.head_logits(hidden)

    def check_layers(self, feature: str) -> None:
        """Does nothing: the layers can always be run one by one."""

    @inference
    def reference_logits(self, ids: Sequence[int]) -> torch.Tensor:
        with self._leader.call(Operation.REFERENCE, [self._key, *ids]):
            return self.local.reference_logits(ids)

    def batch_cache(self, sequences: int) -> BatchCache:
        raise no_training()

    def batch_logits(self, batch: BatchPass, logits_to_keep: int | None = None) -> torch.Tensor:
        raise no_training()

    def batch_layers(self, batch: BatchPass, layers: int, *, with_head: bool = False) -> ModelOutput:
        raise no_training()

    def batch_features(self, batch: BatchPass, taps: Sequence[int]) -> torch.Tensor:
        raise no_training()

    def last_layers(self, folder: Path, count: int) -> NoReturn:
        raise no_training()

    def free_weights(self, kept_layers: int = 0) -> None:
        raise no_training()


def no_training() -> SpecgenError:
    return SpecgenError("under torchrun nothing is trained: the target is split", "Train in one process, without torchrun")
