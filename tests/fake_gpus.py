"""Pretended GPUs: their streams, events and memory, with checks of what is only wrong on a GPU. No tensors here.

Work is done at once, on the CPU. What a GPU could do later is checked by clocks (see `race_detector`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from race_detector import HOST, Access, Clocks, Memory, RaceError, place
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from fake_graphs import Graph


class CaptureError(RuntimeError):
    """Something that a CUDA graph cannot capture, or that ends a capture."""


class Allocation(Memory):
    """Memory of a GPU, which the allocator gave to a stream. It is freed when its last tensor is dropped.

    `is_inference`: it was allocated in inference mode. `captured_in` is the graph in whose pool it is, or None.
    """

    def __init__(self, gpus: Gpus, storage: torch.UntypedStorage, device: torch.device) -> None:
        size = storage.nbytes()
        gpus.allocate(size, device)
        self.gpus, self.storage, self.device, self.size = gpus, storage, device, size
        self.stream = gpus.current(device)
        gpus.serial += 1
        self.serial, self.is_inference = gpus.serial, gpus.is_inference
        self.is_pooled = gpus.capture is not None
        self.recorded: set[Any] = set()  # streams of `record_stream`
        super().__init__(f"memory of {device} allocated at {place()}", gpus.clocks)

    def __del__(self) -> None:
        if not hasattr(self, "recorded") or self.gpus.is_closed:
            return
        self.gpus.used[self.device.index] -= self.size
        if self.is_pooled:
            return
        for access in self.unknown_to([HOST, self.stream.actor]):
            if access.actor not in self.recorded:
                self.gpus.errors.append(
                    f"{self.name}, on {self.stream.actor}, is freed at {place()} and may be used again before:\n  {access}\n"
                    "  (a wait or record_stream is missing)"
                )


class Pinned(Memory):
    """Page-locked memory of the host. `value` writes what a copy brings once the host has waited for it."""

    def __init__(self, gpus: Gpus, storage: torch.UntypedStorage) -> None:
        super().__init__(f"pinned memory allocated at {place()}", gpus.clocks)
        self.weak = StorageWeakRef(storage)


class Stream:
    """In place of `torch.cuda.Stream`."""

    gpus: Gpus

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = self.gpus.device(device)
        self.actor = f"stream {len(self.gpus.streams)} of {self.device}"
        self.gpus.streams.append(self)
        self.workspace = Memory(f"the workspace of matrix products of {self.actor}", self.gpus.clocks)

    def synchronize(self) -> None:
        self.gpus.synchronize([self], "a stream's synchronize")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        return all(
            time <= self.gpus.clocks.of(HOST).get(self.actor, -1) for time in [self.gpus.clocks.of(self.actor)[self.actor]]
        )


class Event:
    """In place of `torch.cuda.Event`."""

    gpus: Gpus

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timed, self._times, self._stream, self._capture = enable_timing, None, None, None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpus.current(None)
        self._stream, self._capture = stream, self.gpus.capture_of(stream)
        clocks = self.gpus.clocks
        if self._capture is None:
            clocks.join(stream.actor, clocks.of(HOST))
            clocks.of(stream.actor)[stream.actor] += 1
        self._times = dict(clocks.of(stream.actor))

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpus.current(None)
        if self._times is None:
            return
        capture = self.gpus.capture_of(stream)
        if self._capture is not None and self._capture is self.gpus.capture:
            self._capture.streams.append(stream)
        elif capture is not None:
            self.gpus.refuse("a wait for work outside of the capture")
        self.gpus.clocks.join(stream.actor, self._times)

    def query(self) -> bool:
        return self._times is None or self.gpus.clocks.of(HOST).get(self._stream.actor, -1) >= self._times[self._stream.actor]

    def synchronize(self) -> None:
        if self._times is not None:
            self.gpus.wait_for(self._times, "an event's synchronize")

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._times is None or end._times is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        return 0.01 * max(1, end._times[end._stream.actor] - self._times.get(end._stream.actor, 0))


class Gpus:
    """The state of the pretended GPUs. `memory` is the number of bytes of each.

    `counts` has the numbers of copies by their kinds, of `synchronisations`, of `launches` (operators that are no views), of
    `replays` and of the operators `replayed` in them. `waits` counts the synchronisations that took
    time, by their places.
    """

    def __init__(self, count: int, memory: int) -> None:
        self.count, self.memory = count, memory
        self.clocks, self.counts, self.waits = Clocks(), Counter[str](), Counter[str]()
        self.lock = threading.RLock()
        self.local = threading.local()
        self.errors: list[str] = []
        self.used = [0] * count
        self.serial = 0
        self.sync_mode: Any = 0
        self.is_closed = False
        self.allocations: WeakValueDictionary[int, Allocation] = WeakValueDictionary()
        self.pinned: dict[int, Pinned] = {}
        self.pending: list[tuple[Access, torch.Tensor, torch.Tensor]] = []  # copies to the host that are not complete
        self.pools: dict[Any, Memory] = {}
        self.streams: list[Stream] = []
        Stream.gpus = Event.gpus = self
        self.defaults = [Stream(index) for index in range(count)]

    # -------------------------------------------------------------- what is current in a thread

    def device(self, device: Any) -> torch.device:
        """Returns a CUDA device with its index."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        device = torch.device("cuda" if device is None else device)
        index = getattr(self.local, "index", 0) if device.index is None else device.index
        if index >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", index)

    def current(self, device: Any) -> Stream:
        """Returns the current stream of a device in this thread."""
        device = self.device(device)
        return getattr(self.local, "streams", {}).get(device.index, self.defaults[device.index])

    @contextmanager
    def using(self, stream: Stream | None) -> Any:
        """In place of `torch.cuda.stream`."""
        if stream is None:
            yield
            return
        with self.on_device(stream.device):
            before = self.current(stream.device)
            self.local.streams = {**getattr(self.local, "streams", {}), stream.device.index: stream}
            try:
                yield
            finally:
                self.local.streams = {**self.local.streams, stream.device.index: before}

    @contextmanager
    def on_device(self, device: Any) -> Any:
        """In place of `torch.cuda.device`."""
        before = self.device(None).index
        self.local.index = self.device(device).index
        try:
            yield
        finally:
            self.local.index = before

    @property
    def is_inference(self) -> bool:
        return getattr(self.local, "inference", False)

    @property
    def capture(self) -> Graph | None:
        """The graph into which this thread captures."""
        return getattr(self.local, "capture", None)

    def capture_of(self, stream: Stream) -> Graph | None:
        return self.capture if self.capture is not None and stream in self.capture.streams else None

    # -------------------------------------------------------------- work

    def allocate(self, size: int, device: torch.device) -> None:
        """Raises torch's error if the device has no room for `size` more bytes."""
        if self.used[device.index] + size > self.memory:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes. GPU {device.index}")
        self.used[device.index] += size

    def launch(
        self, stream: Stream, what: str, reads: Sequence[Memory], writes: Sequence[Memory], *, products: bool = False
    ) -> Access | None:
        """Notes work on a stream. Raises RaceError; see `Memory`. Returns None if the work is captured, which is not done now."""
        if self.capture is not None:
            if stream not in self.capture.streams:
                self.refuse(f"{what} on {stream.actor}, which is not part of the capture")
            self.capture.note(reads, writes, products=products)
            return None
        self.clocks.join(stream.actor, self.clocks.of(HOST))
        access = self.clocks.access(stream.actor, what)
        for memory in reads:
            memory.read(access)
        for memory in [*writes, stream.workspace] if products else writes:
            memory.write(access)
        return access

    def on_host(self, what: str, reads: Sequence[Memory], writes: Sequence[Memory]) -> None:
        """Notes that the host uses memory. Raises RaceError; see `Memory`."""
        access = self.clocks.access(HOST, what)
        for memory in reads:
            memory.read(access)
        for memory in writes:
            memory.write(access)

    def synchronize(self, streams: Sequence[Stream], what: str) -> None:
        """Lets the host wait for all work of these streams."""
        times: dict[Any, int] = {}
        for stream in streams:
            times |= {actor: max(time, times.get(actor, -1)) for actor, time in self.clocks.of(stream.actor).items()}
        self.wait_for(times, what)

    def wait_for(self, times: dict[Any, int], what: str) -> None:
        if self.capture is not None:
            self.refuse(what)
        if self.sync_mode in (2, "error"):
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        known = self.clocks.of(HOST)
        is_complete = all(time <= known.get(actor, -1) for actor, time in times.items())
        self.counts["synchronisations, nothing to wait for" if is_complete else "synchronisations"] += 1
        if not is_complete:
            self.waits[f"{what} at {place()}"] += 1
        self.clocks.join(HOST, times)
        complete = [copy for copy in self.pending if self.clocks.is_known(copy[0], [HOST])]
        self.pending = [copy for copy in self.pending if not self.clocks.is_known(copy[0], [HOST])]
        for _, target, values in complete:
            target.copy_(values)

    def refuse(self, what: str) -> None:
        """Ends a capture with an error."""
        assert self.capture is not None
        self.capture.error = f"operation not permitted when stream is capturing: {what} at {place()}"
        raise CaptureError(self.capture.error)

    def check(self) -> None:
        """Raises RaceError if memory was freed too early."""
        if self.errors:
            errors, self.errors = self.errors, []
            raise RaceError("\n".join(errors))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes the memory of a CPU tensor page-locked."""
        if self.capture is not None:
            self.refuse("an allocation of pinned memory")
        storage = tensor.untyped_storage()
        if len(self.pinned) > 2000:
            self.pinned = {key: found for key, found in self.pinned.items() if not found.weak.expired()}
        self.pinned[storage._cdata] = Pinned(self, storage)
        return tensor

    def pinned_memory(self, tensor: torch.Tensor) -> Pinned | None:
        """Returns the page-locked memory of a CPU tensor; None if it is pageable."""
        if not self.pinned or tensor.device.type != "cpu" or tensor.is_mkldnn:
            return None
        found = self.pinned.get(tensor.untyped_storage()._cdata)
        return None if found is None or found.weak.expired() else found

    def properties(self, device: Any = None) -> Any:
        index = self.device(device).index
        uuid = f"00000000-0000-0000-0000-00000000000{index}"
        return SimpleNamespace(
            name=self.name(device), total_memory=self.memory, uuid=uuid, major=9, minor=0, multi_processor_count=132
        )

    def name(self, device: Any = None) -> str:
        return f"Pretended GPU {self.device(device).index}"


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a tensor's memory with what no one should read: NaN, -1."""
    if tensor.untyped_storage().nbytes():
        tensor.untyped_storage().fill_(0xFF) if tensor.dtype != torch.bool else tensor.fill_(True)
    return tensor


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for one in value for tensor in tensors_in(one)]
