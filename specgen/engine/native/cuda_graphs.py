"""CUDA graphs: work on buffers of a GPU that is recorded once, and then launched at once instead of kernel by kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

Work = Callable[[], None]
Capture = Callable[[Work, Sequence[torch.Tensor]], Work]
"""Captures work on fixed buffers, to repeat it with other contents of these buffers: returns a function that does so.

It does the work a few times itself. The second argument are the tensors that the work both reads and changes: they keep their
values. What one `Capture` captures may share memory, so none of it may run at the same time, and none is freed before all are.
Raises RuntimeError if the work cannot be captured.
"""

_WARM_UPS = 2  # libraries choose kernels and allocate memory in the first runs, which must not happen in a capture
_LOCK = threading.Lock()  # a capture begins with a synchronisation, which would end one in another thread


class CudaGraphs:
    """Captures work on a CUDA device, on the stream `stream`, with a memory pool of its own. A `Capture`.

    Graphs that are captured on one stream share the workspaces of matrix products. So a stream is for one model, which does one
    thing at a time.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, work: Work, state: Sequence[torch.Tensor]) -> Work:
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        saved = [tensor.clone() for tensor in state]
        with _LOCK, torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            try:
                with torch.cuda.stream(current):  # a failed capture leaves its stream as the current one
                    stream.wait_stream(current)
                    with torch.cuda.stream(stream):
                        for _ in range(_WARM_UPS):
                            work()
                            _restore(state, saved)
                    with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                        work()
            finally:
                current.wait_stream(stream)
                _restore(state, saved)
        self._graphs.append(graph)
        return graph.replay


def _restore(state: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(state, saved, strict=True):
        tensor.copy_(value)
