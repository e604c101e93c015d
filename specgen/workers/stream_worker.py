"""Drafting on a second CUDA stream, without a second thread: for models that share one GPU.

The caller's thread queues the target's pass on its own stream, which takes no waiting, and then drafts on the other stream while
the GPU computes that pass. With a second thread, the Python code of both would take turns, and the launch of each kernel with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specgen import factory
from specgen.decoding.components import Components
from specgen.decoding.drafters import ModelDrafter
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import room
from specgen.types import Context, Draft

if TYPE_CHECKING:
    from specgen.engine.model_runner import DraftRunner
    from specgen.setting_parsing import Settings


class Streams(Protocol):
    """The stream of the draft model, and the caller's current one."""

    def drafting(self) -> AbstractContextManager[object]:
        """Queues the block's work on the draft model's stream."""

    def draft_waits(self) -> None:
        """Lets later work on the draft model's stream wait for what is queued on the current one. The host does not wait."""

    def current_waits(self) -> None:
        """Lets later work on the current stream wait for what is queued on the draft model's. The host does not wait."""

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Keeps the memory of a tensor from the draft model's stream until the current stream has used it."""


class CudaStreams:
    """Implements `Streams` on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def drafting(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def draft_waits(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def current_waits(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def hand_over(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


class StreamWorker:
    """Runs a draft model on a stream of its own. Implements `DraftWorker`."""

    kind = "stream"
    threads: int | None = None

    def __init__(self, runner: DraftRunner, streams: Streams) -> None:
        self.runner, self.streams = runner, streams

    def ready(self) -> None:
        """Returns at once: the stream exists."""

    def drafter(self, settings: Settings, components: Components, window: int) -> StreamDrafter:
        return StreamDrafter(self, settings, components)

    def forget(self) -> None:
        """Does nothing: the pair of models owns the KV cache and clears it."""

    def close(self) -> None:
        """Does nothing: torch frees the stream."""


class StreamDrafter:
    """Drafts for one run (the generation of one output). Implements `ParallelDrafter`.

    A draft is made when its caller waits for it, so the caller has to queue the target's pass before.
    """

    def __init__(self, worker: StreamWorker, settings: Settings, components: Components) -> None:
        self.policy = factory.make_policy(settings, components.seed, components.adaptive)
        self.seconds = 0.0
        self._runner, self._streams = worker.runner, worker.streams
        self._model = ModelDrafter(factory.draft_setup(replace(components, draft=worker.runner)))
        self._wanted: tuple[Context, Sequence[int], int] | None = None  # the draft that was started
        self._made = Draft()

    @inference
    def prefill(self, context: Context) -> None:
        self._streams.draft_waits()  # work of an earlier run may still use the buffers
        if room(self._runner, context) > 0:
            with self._streams.drafting():
                self._runner.logits(context)

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        self._wanted = context, unverified, limit

    def first(self, count: int) -> list[int]:
        self._make()
        return list(self._made.tokens[:count])

    def cut(self) -> None:
        """Does nothing: drafts are complete when the target's pass has ended, or are not made yet."""

    def finish(self) -> Draft:
        self._make()
        made, self._made = self._made, Draft()
        return made

    def close(self) -> None:
        self._wanted, self._made = None, Draft()
        self._streams.current_waits()  # so that other runs can use the draft model

    @inference
    def _make(self) -> None:
        """Makes the draft that was started, unless it is made. The host waits for each of its tokens, but not for the target."""
        if self._wanted is None:
            return
        (context, unverified, limit), self._wanted = self._wanted, None
        start = time.perf_counter()
        with self._streams.drafting():
            draft = self._model.propose(context, self.policy, limit, unverified).with_predictions(self.policy.predictions)
            self._made = replace(draft, entropies=list(draft.entropies), top_probs=list(draft.top_probs))  # read on this stream
        self.seconds = time.perf_counter() - start
        handed: list[Any] = [tensor for tensor in (self._made.probs, self._made.logits) if tensor is not None]
        if handed:
            self._streams.current_waits()
        for tensor in handed:
            self._streams.hand_over(tensor)
