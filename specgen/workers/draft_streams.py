"""Where the draft model of a `StreamWorker` runs, and how its tensors get to the target: CUDA streams, or none on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from specgen.engine.devices import upload


class Streams(Protocol):
    """The stream of the draft model, and the current streams of its device and of the target's.

    `crosses`: the draft's tensors are copied to another GPU. `is_queued`: the draft model's passes are queued on a GPU, too.
    """

    crosses: bool
    is_queued: bool

    def drafting(self) -> AbstractContextManager[object]:
        """Queues the block's work on the draft model's stream."""

    def draft_waits(self) -> None:
        """Lets later work of the draft model wait for what is queued on its device's current stream. The host does not wait."""

    def current_waits(self) -> None:
        """Lets later work on the current stream of the draft model's device wait for the draft model. The host does not wait."""

    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor, made while `drafting`, on the target's device, for work that is queued there from now on.

        The host does not wait for a GPU, and a copy to another GPU does not wait for the target's pass.
        """
        ...


class CudaStreams:
    """Implements `Streams` for a draft model on the GPU `draft` and a target on the GPU `target`, which may be the same.

    torch copies between GPUs on the source's current stream, and lets this and the destination's current stream wait for each
    other. The latter has the target's pass queued. So copies are received on another stream, which has nothing else to do.
    """

    is_queued = True

    def __init__(self, draft: torch.device, target: torch.device) -> None:
        self._draft, self._target, self.crosses = draft, target, draft != target
        self._stream = torch.cuda.Stream(draft)  # type: ignore[no-untyped-call]
        self._arrival = torch.cuda.Stream(target) if self.crosses else self._stream  # type: ignore[no-untyped-call]

    def drafting(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def draft_waits(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._draft))

    def current_waits(self) -> None:
        torch.cuda.current_stream(self._draft).wait_stream(self._stream)

    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.crosses:
            with self.drafting(), torch.cuda.stream(self._arrival):
                tensor = tensor.to(self._target, non_blocking=True)
        reader = torch.cuda.current_stream(self._target)
        reader.wait_stream(self._arrival)
        tensor.record_stream(reader)  # the memory is of the stream that it was allocated on
        return tensor


class HostDraft:
    """Implements `Streams` for a draft model on the CPU, whose passes the caller's thread computes, and a target on a GPU."""

    crosses = is_queued = False

    def __init__(self, target: torch.device) -> None:
        self._target = target

    def drafting(self) -> AbstractContextManager[object]:
        return nullcontext()

    def draft_waits(self) -> None:
        """Does nothing: the CPU has done its work when a call returns."""

    def current_waits(self) -> None:
        """Does nothing, like `draft_waits`."""

    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        return upload(tensor, self._target)


def streams_for(draft: torch.device, target: torch.device) -> Streams:
    """Returns the streams for a draft model on a GPU or a CPU and a target on a GPU."""
    return HostDraft(target) if draft.type == "cpu" else CudaStreams(draft, target)
