"""Pretended CUDA graphs: operators are recorded, and repeated on the same storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from fake_gpus import Allocation, CaptureError, Gpus, Memory, Stream, poison, tensors_in
from race_detector import RaceError, place

Call = tuple[Callable[..., Any], Any, Any, Any]


class Graph:
    """In place of `torch.cuda.CUDAGraph`: its operators are recorded, and repeated on the same storages."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.gpus: Gpus = Stream.gpus
        self.calls: list[Call] = []
        self.streams: list[Stream] = []
        self.error: str | None = None
        self._is_complete = False
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._used: dict[int, tuple[ref[Memory], str, bool, bool]] = {}  # by id: memory, name, is written, is external

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        gpus = self.gpus
        assert gpus.capture is None, "a capture in a capture"
        self._pool_key = pool or object()
        self._pool = gpus.pools.setdefault(self._pool_key, Memory("a pool of graphs", gpus.clocks))
        self._stream = gpus.current(None)
        self._first, self.streams = gpus.serial, [self._stream]
        gpus.local.capture = self

    def note(self, reads: Sequence[Memory], writes: Sequence[Memory], *, products: bool) -> None:
        """Notes what captured work uses, and saves what it would change."""
        for memory in (*reads, *writes):
            is_external = isinstance(memory, Allocation) and memory.serial <= self._first
            known = self._used.get(id(memory))
            is_written = memory in writes or (known is not None and known[2])
            self._used[id(memory)] = ref(memory), memory.name, is_written, is_external
            if is_external and is_written and id(memory) not in self._saved:
                self._saved[id(memory)] = memory.storage, memory.storage.clone()

    def capture_end(self) -> None:
        self.gpus.local.capture = None
        for storage, saved in self._saved.values():  # captured work is not done
            storage.copy_(saved)
        if self.error is not None:
            raise CaptureError(f"operation failed due to a previous error during capture: {self.error}")
        for *_, result in self.calls:
            for tensor in result:
                poison(tensor)
        self._saved.clear()
        self._is_complete = True
        self.gpus.counts["captures"] += 1

    def replay(self) -> None:
        gpus = self.gpus
        with gpus.lock:
            gpus.check()
            assert self._is_complete
            if gpus.capture is not None:
                gpus.refuse("a replay")
            reads, writes = [], [self._pool, self._stream.workspace]
            for weak, name, is_written, is_external in self._used.values():
                memory = weak()
                if memory is None and is_external:
                    raise RaceError(f"a graph is replayed that uses freed {name}, at {place()}")
                if memory is not None:
                    (writes if is_written else reads).append(memory)
            gpus.launch(gpus.current(self._stream.device), "a replay", reads, writes)
            gpus.counts["replays"] += 1
            gpus.counts["replayed"] += len(self.calls)
            for work, args, kwargs, new in self.calls:
                found = work(*args, **kwargs)
                for old, value in zip(new, tensors_in(found) if new else (), strict=False):
                    old.copy_(value)

    def pool(self) -> Any:
        return self._pool_key

    def reset(self) -> None:
        self._is_complete = False


class CaptureContext:
    """In place of `torch.cuda.graph`: like torch's, leaves the capture's stream as the current one if the capture fails."""

    def __init__(self, graph: Graph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global") -> None:
        self._graph, self._pool, self._mode = graph, pool, capture_error_mode
        self._gpus = graph.gpus
        self._stream = stream or Stream()
        self._context = self._gpus.using(self._stream)

    def __enter__(self) -> None:
        self._gpus.synchronize(self._gpus.streams, "the beginning of a capture")
        self._context.__enter__()
        self._graph.capture_begin(self._pool, self._mode)

    def __exit__(self, *error: Any) -> None:
        self._graph.capture_end()
        self._context.__exit__(*error)
