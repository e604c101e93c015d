"""The processes that torchrun has started, and a model that is split over them: rank 0 announces each call, all ranks run it.

Announcements are Python objects, broadcast through gloo; sums between GPUs go through NCCL. When a process fails, torchrun ends
the others. A Ctrl-C in rank 0 while all ranks run something leaves the others out of step: no later call is possible then.
"""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.machine import Launch, launch
from specgen.engine.forward_pass import ForwardFunction, ForwardPass, HiddenSource, LayerPart, ModelOutput
from specgen.engine.inference_mode import inference
from specgen.engine.model_loading import PreparedModel, check_weight_files
from specgen.engine.native.families import read_architecture, read_config
from specgen.engine.native.native_model import NativeModel, NativeParts
from specgen.engine.native.products import Product
from specgen.engine.spread.collectives import LostRankError, Ranks
from specgen.engine.spread.shards import Shard, ShardedModel, load_shard

_FOREVER = timedelta(days=365)  # rank 0 may be idle for any time between two passes
_HINT = "torchrun's own report says which process ended, and how"


class Ref(NamedTuple):
    """An argument of an announced call: each rank's own part of the object with this number."""

    key: int


class _Sent(NamedTuple):
    """A tensor among the arguments, which follows the announcement."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str


class Group:
    """What the ranks hold together: each has its part of every object, by number. Number 0 is the group itself.

    `failure` is why the ranks are no longer in step, after which nothing can be run any more.
    """

    def __init__(self, ranks: Ranks, local_rank: int) -> None:
        self.ranks, self._local_rank = ranks, local_rank
        self.objects: dict[int, Any] = {0: self}
        self.failure: str | None = None
        self._last_key = 0
        self._dropped: deque[int] = deque()  # filled by destructors, which may run at any time and in any thread

    def make(self, owner: object, key: int, method: str, *arguments: Any) -> int:
        """Announces a call as `call` does whose result all ranks keep until `owner` is freed. Returns the result's number."""
        self._last_key += 1
        weakref.finalize(owner, self._dropped.append, self._last_key)
        self._announce(self._last_key, key, method, arguments)
        return self._last_key

    def call(self, key: int, method: str, *arguments: Any) -> Any:
        """Announces a call of a method of object `key`, and runs it on rank 0. Returns rank 0's result.

        Raises RunError if the ranks are no longer in step, which they are not after other errors than a SpecgenError.
        """
        return self._announce(None, key, method, arguments)

    def _announce(self, made: int | None, key: int, method: str, arguments: Sequence[Any]) -> Any:
        if self.failure is not None:
            raise self._error()
        try:
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            arguments = [each.contiguous() if isinstance(each, Tensor) else each for each in arguments]
            self.ranks.share((dropped, made, key, method, list(map(_described, arguments))))
            for tensor in arguments:
                if isinstance(tensor, Tensor):
                    self.ranks.broadcast(tensor)
            return self._run(dropped, made, key, method, arguments)
        except LostRankError as error:
            self.failure = "another of torchrun's processes has ended"
            raise self._error() from error
        except SpecgenError:  # raised by all ranks alike
            raise
        except BaseException as error:
            self.failure = "out of memory" if is_out_of_memory(error) else "it was interrupted"
            raise

    def _error(self) -> SpecgenError:
        return RunError(f"the run on {self.ranks.size} processes has ended: {self.failure}", _HINT)

    def _run(self, dropped: Sequence[int], made: int | None, key: int, method: str, arguments: Sequence[Any]) -> Any:
        for each in dropped:
            self.objects.pop(each, None)
        own = [self.objects[each.key] if isinstance(each, Ref) else each for each in arguments]
        result = getattr(self.objects[key], method)(*own)
        if made is not None:
            self.objects[made] = result
        return result

    @inference
    def follow(self) -> None:
        """Runs on another rank than 0 all that rank 0 announces, until it has ended."""
        while (message := self.ranks.share()) is not None:
            dropped, made, key, method, described = message
            arguments = [self._received(each) if isinstance(each, _Sent) else each for each in described]
            with suppress(SpecgenError):  # rank 0 raises it, too
                self._run(dropped, made, key, method, arguments)

    def _received(self, sent: _Sent) -> Tensor:
        tensor = torch.empty(sent.shape, dtype=sent.dtype, device=self._device(sent.kind))
        self.ranks.broadcast(tensor)
        return tensor

    def _device(self, kind: str) -> torch.device:
        return torch.device("cpu") if kind == "cpu" else torch.device(kind, self._local_rank)

    def load(self, folder: str, name: str, dtype: torch.dtype, kind: str, exact: bool) -> ShardedModel:
        """Loads this rank's part of a model. Raises on all ranks an error if one cannot load it: on rank 0 its own."""
        device, own = self._device(kind), None
        if kind == "cuda":
            torch.cuda.set_device(device)
        try:
            architecture = read_architecture(read_config(Path(folder), name))
            model = load_shard(Path(folder), name, architecture, dtype, device, self.ranks, exact=exact)
        except Exception as error:  # noqa: BLE001  raised below, or by rank 0 in these words
            own = error
        problems = self.ranks.all(None if own is None else f"process {self.ranks.rank}: {in_words(own)}")
        if own is not None and self.ranks.rank == 0:
            raise own
        if problem := next(filter(None, problems), None):
            raise RunError(f"{name} cannot be loaded: {problem}", "Try --dtype bfloat16, a smaller model or more processes")
        return model


def _described(argument: Any) -> Any:
    return _Sent(tuple(argument.shape), argument.dtype, argument.device.type) if isinstance(argument, Tensor) else argument


def in_words(error: BaseException) -> str:
    if is_out_of_memory(error):
        return "out of memory"
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, SpecgenError) else f"{type(error).__name__}: {text}"


# rank 0's side of a model


class DistributedCache:
    """The KV cache of a distributed model. Implements `forward_pass.Cache`; `local` is rank 0's part."""

    def __init__(self, group: Group, model_key: int, layers: range) -> None:
        self._group, self.length = group, 0
        self.key = group.make(self, model_key, "new_cache", layers)
        self.local = group.objects[self.key]

    @property
    def capacity(self) -> int:
        return int(self.local.capacity)

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self.local.capacity = capacity

    def gather(self, indices: Sequence[int], start: int) -> None:
        self._group.call(self.key, "gather", list(indices), start)


class _ContextPart:
    """The tokens of a context from index `first` to `last` - 1, which is all that a forward pass reads of it."""

    def __init__(self, context: Any, first: int, last: int) -> None:
        self._length, self._first, self._ids = len(context), first, context.ids[first:last]

    @property
    def ids(self) -> _ContextPart:
        return self

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> list[int]:
        ids: list[int] = self._ids[part.start - self._first : part.stop - self._first]
        return ids


class _DistributedForward:
    """A forward function of a distributed model. `options` are those of `ShardedForward`."""

    def __init__(self, group: Group, model_key: int, inputs: HiddenSource | None, *options: Any) -> None:
        self._group, self._inputs = group, inputs
        self._key = group.make(self, model_key, "part_of_forward", *options)

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        hidden = None if self._inputs is None else self._inputs(forward_pass)  # which may announce passes of its own
        context: Any = _ContextPart(forward_pass.context, forward_pass.first, forward_pass.last)
        cache, sent = forward_pass.cache, forward_pass._replace(context=context, cache=None)
        sizes = cache.length, cache.capacity
        output: ModelOutput = self._group.call(self._key, "run", Ref(cache.key), sizes, sent, logits_to_keep, hidden)
        return output


class _AnnouncedHead(Product):
    """The LM head of a distributed model, for what only rank 0 runs."""

    def __init__(self, group: Group, model_key: int, sizes: Sequence[int]) -> None:
        super().__init__(torch.Size(sizes), lambda x: group.call(model_key, "head", x))


class DistributedModel(NativeModel):
    """A native model split over ranks, as rank 0 uses it. What rank 0 runs alone, exit layers, is as in the whole model."""

    def __init__(self, group: Group, prepared: PreparedModel, dtype: torch.dtype, device: torch.device) -> None:
        architecture, name, folder = prepared.architecture, prepared.name, str(prepared.folder.resolve())
        assert architecture is not None
        Shard.of(architecture, 0, group.ranks.size, name)  # raises before anything is sent to the other ranks
        self._group = group
        self._key = group.make(self, 0, "load", folder, name, dtype, device.type, prepared.source.exact)
        self.local: ShardedModel = group.objects[self._key]
        norm, sizes = self.local.parts.norm, (architecture.vocab_size, architecture.hidden_size)
        parts = NativeParts(norm[None], norm, _AnnouncedHead(group, self._key, sizes))
        options = {name: getattr(self.local, name) for name in ("norm_gain", "min_rows", "exact")}
        super().__init__(architecture, (), parts, dtype, product_choices=self.local.product_choices, **options)

    def new_cache(self, layers: range | None = None, *, sequences: int = 1) -> Any:
        return DistributedCache(self._group, self._key, range(self.shape.num_layers) if layers is None else layers)

    def forward(
        self,
        layers: Sequence[LayerPart] | None = None,
        inputs: HiddenSource | None = None,
        *,
        taps: Sequence[int] = (),
        with_head: bool = True,
    ) -> ForwardFunction:
        parts = None if layers is None else list(layers)
        return _DistributedForward(self._group, self._key, inputs, parts, inputs is not None, with_head, list(taps))

    def embeddings(self, ids: Tensor) -> Tensor:
        found: Tensor = self._group.call(self._key, "embeddings", ids)
        return found

    @inference
    def reference_logits(self, ids: Sequence[int]) -> Tensor:
        logits: Tensor = self._group.call(self._key, "reference_logits", list(ids))
        return logits

    def _embedded(self, ids: Tensor) -> Tensor:
        raise SpecgenError("under torchrun nothing is trained: the target is split", "Train in one process, without torchrun")


# the processes


_joined: list[Group] = []


def follow_unless_first() -> None:
    """Joins the other processes. Returns on rank 0; another rank does what rank 0 announces, and then ends this process.

    Another rank ends with exit code 0 when rank 0 has ended, and writes nothing; else it says why in a line, and ends with 1.
    """
    launched = launch()
    if launched is None or _joined:
        return
    if launched.rank == 0:
        _joined.append(_join(launched))
        atexit.register(end)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends, and this rank with it
    nowhere, errors = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    code = 0
    try:
        _join(launched).follow()
    except LostRankError:
        pass
    except BaseException as error:  # noqa: BLE001  reported, and this process ends
        os.write(errors, f"error: process {launched.rank}: {in_words(error)}\n".encode())
        code = 1
    finally:
        os._exit(code)  # without waiting for connections to processes that have ended


def _join(launched: Launch) -> Group:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    group = None
    try:
        if dist.is_initialized():  # by the caller, perhaps without gloo
            group = dist.new_group(backend=backend, timeout=_FOREVER)
        else:
            dist.init_process_group(backend, rank=launched.rank, world_size=launched.ranks, timeout=_FOREVER)
    except (RuntimeError, ValueError) as error:
        raise LostRankError(str(error)) from error
    return Group(Ranks(launched.rank, launched.ranks, group), launched.local_rank)


def end() -> None:
    """Lets the other ranks end; called on rank 0 when it ends."""
    while _joined:
        group = _joined.pop()
        if group.failure is None:
            group.failure = "it was closed"
            with suppress(LostRankError):  # they have ended already
                group.ranks.share(None)
        if dist.is_initialized():  # otherwise gloo's threads may abort this process as it ends
            dist.destroy_process_group(group.ranks.group)


def device_of_rank(launched: Launch, name: str) -> str:
    """Returns the name of this rank's device, for the name that the user gave. Raises SpecgenError for one device for all."""
    if name not in ("auto", "cpu", "cuda"):
        problem = f"--device is {name}, and under torchrun each process has a device of its own"
        raise SpecgenError(problem, "Take auto, cpu or cuda")
    if name == "cpu" or not torch.cuda.is_available():
        return "cpu" if name == "auto" else name
    count = torch.cuda.device_count()
    if launched.local_ranks > count:
        problem = f"torchrun has started {launched.local_ranks} processes, and this machine has {count} GPUs"
        raise SpecgenError(problem, f"Take --nproc-per-node {count}, or --device cpu")
    return f"cuda:{launched.local_rank}"


def load_distributed(prepared: PreparedModel, dtype: torch.dtype, device: torch.device, _: object = None) -> DistributedModel:
    """Loads a model on all ranks; called on rank 0. Raises SpecgenError for a model that cannot be split, or cannot be loaded."""
    if prepared.architecture is None:
        problem = f"{prepared.name} cannot be split over torchrun's processes: transformers runs it ({prepared.fallback})"
        raise SpecgenError(problem, "Run it without torchrun, with --device auto-map where it does not fit into one device")
    check_weight_files(prepared.folder, prepared.name)
    try:
        return DistributedModel(_joined[0], prepared, dtype, device)
    except Exception as error:
        if not is_out_of_memory(error) or isinstance(error, SpecgenError):
            raise
        hint = "Try --dtype bfloat16, a smaller model or more processes"
        raise RunError(f"a part of {prepared.name} does not fit into the memory of {device}", hint) from error
