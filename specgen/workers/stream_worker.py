"""Drafting in the caller's thread while a GPU runs the target's pass: on a second stream, on another GPU, or on the CPU.

The caller's thread queues the target's pass, which takes no waiting, and then drafts while the GPU computes that pass. With a
second thread, the Python code of both would take turns, and the launch of each kernel with it. A second process could launch
kernels at the same time, but a pass that is a CUDA graph is launched at once, and drafts would have to cross the host's memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.base.types import Context, Draft
from specgen.decoding import logits_ops
from specgen.decoding.components import Components
from specgen.decoding.drafters import ModelDrafter
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import room
from specgen.methods import factory
from specgen.workers.draft_streams import Streams

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.engine.model_runner import DraftRunner


class StreamWorker:
    """Runs a draft model in the caller's thread, where `streams` say. Implements `DraftWorker`."""

    kind = "stream"
    threads: int | None = None

    def __init__(self, runner: DraftRunner, streams: Streams) -> None:
        self.runner, self.streams = runner, streams

    def ready(self) -> None:
        """Returns at once: there is nothing to start."""

    def drafter(self, settings: Settings, components: Components, window: int) -> StreamDrafter:
        return StreamDrafter(self, settings, components)

    def forget(self) -> None:
        """Does nothing: the pair of models owns the KV cache and clears it."""

    def close(self) -> None:
        """Does nothing: torch frees the streams."""


class StreamDrafter:
    """Drafts for one run (the generation of one output). Implements `ParallelDrafter`.

    A draft is made when its caller waits for it, so the caller has to queue the target's pass before.
    """

    def __init__(self, worker: StreamWorker, settings: Settings, components: Components) -> None:
        self.policy = factory.make_policy(settings, components.seed, components.adaptive)
        self.seconds = 0.0
        self._runner, self._streams = worker.runner, worker.streams
        self._model = ModelDrafter(factory.draft_setup(replace(components, draft=worker.runner)))
        self._packed = logits_ops.packed_width(components.sampling, components.vocab_size) if worker.streams.crosses else 0
        self._vocab_size = components.vocab_size
        self._prompt: Context | None = None  # if the draft model has yet to read it
        self._wanted: tuple[Context, Sequence[int], int] | None = None  # the draft that was started
        self._made = Draft()

    def prefill(self, context: Context) -> None:
        self._streams.draft_waits()  # work of an earlier run may still use the buffers
        self._prompt = context
        if self._streams.is_queued:
            self.complete_prefill()

    @inference
    def complete_prefill(self) -> None:
        context, self._prompt = self._prompt, None
        if context is not None and room(self._runner, context) > 0:
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
        self._wanted, self._prompt, self._made = None, None, Draft()
        self._streams.current_waits()  # so that other runs can use the draft model

    @inference
    def _make(self) -> None:
        """Makes the draft that was started, unless it is made. The host waits for its tokens, but not for the target."""
        if self._wanted is None:
            return
        (context, unverified, limit), self._wanted = self._wanted, None
        start = time.perf_counter()
        with self._streams.drafting():
            draft = self._model.propose(context, self.policy, limit, unverified).with_predictions(self.policy.predictions)
            read = list(draft.entropies), list(draft.top_probs)  # on this stream
            probs = draft.probs
            if probs is not None and self._packed:
                probs = logits_ops.pack(probs, self._packed)
        self.seconds = time.perf_counter() - start
        if probs is not None:
            probs = self._streams.hand_over(probs)
            probs = logits_ops.unpack(probs, self._vocab_size) if self._packed else probs
        logits = None if draft.logits is None else self._streams.hand_over(draft.logits)
        self._made = replace(draft, entropies=read[0], top_probs=read[1], probs=probs, logits=logits)
