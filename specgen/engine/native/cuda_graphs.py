"""CUDA graphs: work on buffers of a GPU that is recorded once, and then launched at once instead of kernel by kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Work = Callable[[], None]

_WARM_UPS = 2  # libraries choose kernels and allocate memory in the first runs, which must not happen in a capture
_ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # those that take a mask and whose kernels depend on shapes only
_CAPTURE_LOCK = threading.Lock()  # a capture begins with a synchronisation, which would end one in another thread
_FAILED: list[torch.cuda.CUDAGraph] = []  # whose captures failed: torch's allocator of pinned memory keeps pointers to them


def with_attention_of_graphs(work: Work) -> Work:
    """Returns a function that does the work with the attention kernels that graphs are captured with: the same bits result."""

    def run() -> None:
        with sdpa_kernel(_ATTENTION):
            work()

    return run


class Graphs(Protocol):
    """Captures work on fixed buffers, to repeat it with other contents of these buffers. The graphs may share memory.

    So none may run at the same time as another of the same `Graphs`, and none is freed before all are.
    """

    def capture(self, work: Work, state: Sequence[torch.Tensor] = ()) -> Work:
        """Returns a function that does what `work` does. Raises RuntimeError if the work cannot be captured.

        Does the work a few times itself. `state` are the tensors that the work both reads and changes: they keep their values.
        """
        ...


class CudaGraphs:
    """Captures work on a CUDA device, on the stream `stream`, with a memory pool of its own. Implements `Graphs`.

    Graphs that are captured on one stream share the workspaces of matrix products. So a stream is for one model, which does one
    thing at a time.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, work: Work, state: Sequence[torch.Tensor] = ()) -> Work:
        """Captures the work; see `Graphs.capture`. Other threads may use the device meanwhile."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        saved = [tensor.clone() for tensor in state]
        with _CAPTURE_LOCK, torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            try:
                with torch.cuda.stream(current), sdpa_kernel(_ATTENTION):  # a failed capture leaves its stream as the current one
                    stream.wait_stream(current)
                    with torch.cuda.stream(stream):
                        for _ in range(_WARM_UPS):
                            work()
                            _restore(state, saved)
                    with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                        work()
            except BaseException:
                self._abandon(graph)
                raise
            finally:
                current.wait_stream(stream)
                _restore(state, saved)
        self._graphs.append(graph)
        return graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Tells torch that a capture has ended that failed: its memory allocator, and its random generator.

        `CUDAGraph.capture_end` raises for an invalid capture before it does so (torch 2.13). Until then, freed memory can stay in
        the pool of the capture or in use by two streams, and in some versions random numbers cannot be drawn any more.
        """
        _FAILED.append(graph)
        if not self._end_allocation():
            return
        last, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:  # the generator counts a capture as ended when the next one succeeds
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(last, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                torch.zeros(1, device=self._device)
        except RuntimeError:
            _FAILED.append(last)
            self._end_allocation()

    def _end_allocation(self) -> bool:
        """Ends for torch's allocator the capture that uses the pool. Returns False if it has ended, or never begun."""
        index = self._device.index or 0
        try:
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        except (AttributeError, RuntimeError, TypeError):
            return False
        return True


def _restore(state: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(state, saved, strict=True):
        tensor.copy_(value)
