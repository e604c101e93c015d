"""Drafting in a thread: for models that share an accelerator without CUDA streams, and where no process can be started."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specgen.base.errors import RunError
from specgen.base.types import Context, Draft
from specgen.decoding.components import Components
from specgen.decoding.drafters import ModelDrafter
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import room
from specgen.methods import factory

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.engine.model_runner import DraftRunner


_POLL = 5e-5  # seconds between two looks at a draft that is being made


class ThreadWorker:
    """Runs a draft model in a thread. Implements `DraftWorker`.

    The Python code of the two threads takes turns.
    """

    kind = "thread"
    threads: int | None = None

    def __init__(self, runner: DraftRunner) -> None:
        self.runner = runner
        self.pool = ThreadPoolExecutor(1, "specgen-draft")

    def ready(self) -> None:
        """Returns at once: the thread can always draft."""

    def drafter(self, settings: Settings, components: Components, window: int) -> ThreadDrafter:
        return ThreadDrafter(self, settings, components)

    def forget(self) -> None:
        """Does nothing: the pair of models owns the KV cache and clears it."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Starts some work in the thread. Raises RunError if the thread has ended: with `close`, or as Python exits."""
        try:
            return self.pool.submit(work, *arguments)
        except RuntimeError:
            raise RunError("the thread of the draft model has ended", "Finish a run before its pair is closed") from None

    def close(self) -> None:
        """Ends the thread after the work that was started."""
        self.pool.shutdown()


class ThreadDrafter:
    """Drafts for one run (the generation of one output) in the worker's thread. Implements `ParallelDrafter`."""

    def __init__(self, worker: ThreadWorker, settings: Settings, components: Components) -> None:
        self.policy = factory.make_policy(settings, components.seed, components.adaptive)
        self.seconds = 0.0
        self._submit, self._runner = worker.submit, worker.runner
        self._model = ModelDrafter(factory.draft_setup(replace(components, draft=worker.runner)))
        self._work: Future[Any] | None = None  # the last work that was started: the pass over the prompt, or a draft
        self._shown: list[int] = []
        self._is_cut = False

    def prefill(self, context: Context) -> None:
        if room(self._runner, context) > 0:
            self._work = self._submit(self._read, Context(context.ids))  # a copy: the run extends its context meanwhile

    def complete_prefill(self) -> None:
        """Does nothing: the pass needs no help of the caller's thread."""

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        self._shown, self._is_cut = [], False
        self._work = self._submit(self._draft, context, unverified, limit)

    def first(self, count: int) -> list[int]:
        assert self._work is not None
        while len(self._shown) < count and not self._work.done():
            time.sleep(_POLL)
        return self._shown[:count]

    def cut(self) -> None:
        self._is_cut = True

    def finish(self) -> Draft:
        assert self._work is not None
        draft: Draft = self._work.result()
        self._work = None
        return draft

    def close(self) -> None:
        """Waits until a draft that was started is complete, so that other runs can use the draft model."""
        if self._work is not None:
            wait([self._work])  # the work started before it is complete, too: there is one thread
            self._work = None

    @inference
    def _read(self, context: Context) -> None:
        self._runner.logits(context)

    @inference
    def _draft(self, context: Context, unverified: Sequence[int], limit: int) -> Draft:
        start = time.perf_counter()
        draft = self._model.propose(context, self.policy, limit, unverified, self._show)
        draft = draft.with_predictions(self.policy.predictions)
        self.seconds = time.perf_counter() - start
        return draft

    def _show(self, position: int, token: int) -> bool:
        self._shown.append(token)
        return not self._is_cut
