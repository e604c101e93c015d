"""Drafting in a thread: on one accelerator, where both models share the device, each on a stream of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from specgen import factory
from specgen.decoding.drafters import ModelDrafter
from specgen.engine.inference_mode import inference
from specgen.types import Context, Draft

if TYPE_CHECKING:
    from specgen.decoding.policies import LengthPolicy
    from specgen.engine.model_runner import DraftRunner
    from specgen.factory import Components
    from specgen.methods import Settings


class ThreadWorker:
    """One thread for a pair's draft session. On CUDA its kernels run beside the target's, though what Python does between two
    kernels is done by one thread at a time."""

    kind = "thread"
    threads = None

    def __init__(self, runner: DraftRunner) -> None:
        self._runner = runner
        self._pool = ThreadPoolExecutor(1, "specgen-draft")
        self._stream = torch.cuda.Stream(runner.device) if runner.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def ready(self) -> None:
        """Nothing to wait for."""

    def drafter(self, settings: Settings, parts: Components, window: int) -> ThreadDrafter:
        policy = factory.make_policy(settings, parts.seed)
        seed = factory.derive_seed(parts.seed, "draft")
        model = ModelDrafter(self._runner, parts.sampling, parts.eos_ids, parts.vocab_size, seed, keep_logits=parts.record)
        return ThreadDrafter(self._pool, self._runner, model, policy, self._stream)

    def forget(self) -> None:
        """The session is the pair's own, which tells it."""

    def close(self) -> None:
        self._pool.shutdown()


class ThreadDrafter:
    """One run's drafts (`ParallelDrafter`)."""

    def __init__(
        self, pool: ThreadPoolExecutor, runner: DraftRunner, model: ModelDrafter, policy: LengthPolicy, stream: Any | None
    ) -> None:
        self.policy = policy
        self.seconds = 0.0
        self._pool, self._runner, self._model, self._stream = pool, runner, model, stream
        self._work: Future[Draft] | None = None

    def prefill(self, context: Context) -> None:
        fits = context.largest_id < self._runner.num_embeddings and len(context) <= self._runner.context_limit
        if self._stream is not None:  # buffers may still be in use where other methods drafted
            self._stream.wait_stream(torch.cuda.current_stream(self._runner.device))
        if fits:
            self._pool.submit(self._read, Context(context.ids))  # a copy: the run commits its first token meanwhile

    def start(self, context: Context, pending: Sequence[int], limit: int) -> None:
        self._work = self._pool.submit(self._draft, context, pending, limit)

    def finish(self) -> Draft:
        assert self._work is not None
        draft = self._work.result()
        self._work = None
        return draft

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        self.start(context, (), limit)
        return self.finish()

    def close(self) -> None:
        """Wait for what is under way: the session is to be free for others."""
        self._pool.submit(int).result()
        self._work = None
        if self._stream is not None:
            torch.cuda.current_stream(self._runner.device).wait_stream(self._stream)

    @inference
    def _read(self, context: Context) -> None:
        with self._on_stream():
            self._runner.logits(context)

    @inference
    def _draft(self, context: Context, pending: Sequence[int], limit: int) -> Draft:
        begun = time.perf_counter()
        with self._on_stream():
            draft = self._model.propose(context, self.policy, limit, pending)
            if self._stream is not None:
                self._stream.synchronize()  # the target's stream is to read the distributions
        self.seconds = time.perf_counter() - begun
        return draft

    def _on_stream(self) -> Any:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()
