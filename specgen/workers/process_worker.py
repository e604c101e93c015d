"""Drafting in another process. Token ids are sent through a socket, probabilities and logits through shared memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from specgen.base.errors import RunError
from specgen.base.types import Context, Draft
from specgen.decoding.components import Components
from specgen.decoding.length_policy import Always, LengthPolicy
from specgen.engine.devices import split_threads
from specgen.methods import factory
from specgen.workers.messages import BeginRun, DraftAnswer, DraftRequest, EndRun, ForgetCache, LoadModel
from specgen.workers.process import DraftProcess, cannot_start
from specgen.workers.shared_drafts import SharedDrafts
from specgen.workers.shared_flags import SIZE

if TYPE_CHECKING:
    from specgen.base.settings import Settings
    from specgen.engine.generation_config import GenerationConfig
    from specgen.engine.model_loading import LoadedModel, PreparedModel
    from specgen.engine.text.translation import Translation


class ProcessWorker:
    """Runs a draft model in a child process. Implements `DraftWorker`.

    `process` is a child that was already started; None starts one when it is first needed. A child that died is started again.
    `device` and `dtype` are those on which the draft model is to run. `translation` is between the target's tokens and the draft
    model's; None if both have the same.
    """

    kind = "process"

    def __init__(
        self,
        process: DraftProcess | None,
        draft: PreparedModel,
        device: torch.device,
        dtype: torch.dtype,
        translation: Translation | None = None,
    ) -> None:
        own, worker_threads = split_threads()
        # a worker on an accelerator uses the CPU only to launch kernels
        self.threads: int | None = own if device.type == "cpu" else None
        names = str(device), str(dtype).removeprefix("torch.")
        source = draft.source
        given = source.trust_remote_code, *names, worker_threads, source.backend, translation, source.quantise
        self._load = LoadModel(draft.name, str(draft.folder), *given)
        self._process = process
        self._loading = process.send(self._load) if process is not None else 0
        self.penalties: tuple[GenerationConfig, frozenset[int]] | None = None
        self._region_ends: dict[object, int] = {}  # for each active run the end of its part of the shared memory
        self._threads_before = 0

    def follow(self, target: LoadedModel) -> None:
        """Makes the draft model apply the target's penalties (such as a repetition penalty) to its logits too."""
        if target.has_penalties:
            self.penalties = target.generation, target.eos_ids

    def ready(self) -> DraftProcess:
        """Waits until the process has loaded its model and returns it. Starts the process if none is alive."""
        if self._process is None or not self._process.alive:
            self._process = DraftProcess()
            self._loading = self._process.send(self._load)
        self._process.wait_ready(self._loading)
        return self._process

    def drafter(self, settings: Settings, components: Components, window: int) -> ProcessDrafter:
        return ProcessDrafter(self, settings, components, window)

    def enter(self, run: object, process: DraftProcess, size: int) -> int:
        """Begins a run (the generation of one output): reserves `size` bytes of the shared memory and returns their offset.

        The first concurrent run also lowers this process's number of CPU threads, to leave the worker its share.
        """
        offset = max(self._region_ends.values(), default=SIZE)
        is_first = not self._region_ends
        if is_first:
            self._threads_before = torch.get_num_threads()
        self._region_ends[run] = offset + size  # before the number of threads changes: `leave` restores it after an interrupt
        if is_first and self.threads is not None:
            torch.set_num_threads(min(self._threads_before, self.threads))
        try:
            if os.fstat(process.memory).st_size < offset + size:
                os.ftruncate(process.memory, offset + size)
        except OSError as error:
            raise cannot_start(error) from error
        return offset

    def leave(self, run: object) -> None:
        """Ends a run, if it has begun. When no run is left, the target gets back all CPU threads."""
        if self._region_ends.pop(run, None) is not None and not self._region_ends and self.threads is not None:
            torch.set_num_threads(self._threads_before)

    def forget(self) -> None:
        if self._process is not None and self._process.alive:
            self._process.send(ForgetCache())

    def close(self) -> None:
        if self._process is not None:
            self._process.is_wanted = False
            self._process.close()


class ProcessDrafter:
    """Drafts for one run (the generation of one output) in the worker process. Implements `ParallelDrafter`.

    The length policy (the rule that ends drafts) decides in the worker; `policy` is a copy that follows its state.
    """

    def __init__(self, worker: ProcessWorker, settings: Settings, components: Components, window: int) -> None:
        self.seconds = 0.0
        self._worker, self._settings, self._components, self._window = worker, settings, components, window
        self._observed: list[tuple[int, int]] = []
        # `adaptive` learns from the drafted tokens, which only the worker sees
        copy = None if components.adaptive is not None else factory.make_policy(settings, components.seed)
        self._mirror = _PolicyMirror(copy, self._observed)
        self.policy: LengthPolicy = self._mirror
        self._process: DraftProcess | None = None
        self._shared = SharedDrafts(components, window)
        self._run = self._slot = 0

    def prefill(self, context: Context) -> None:
        self._process = self._worker.ready()
        offset = self._worker.enter(self, self._process, self._shared.size)
        if self._shared.size:
            self._shared.map(self._process.memory, offset)
        models = {"target": cast("Any", None), "draft": None, "acceptance_predictor": None, "tokenizers": None}
        components = replace(self._components, **models)
        self._run = self._process.send(
            BeginRun(context.ids, self._settings, components, self._window, offset, self._worker.penalties)
        )
        self._known = len(context)

    def complete_prefill(self) -> None:
        """Does nothing: the pass needs no help of the caller's thread."""

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        assert self._process is not None
        self._slot = 1 - self._slot
        committed = context.ids[self._known :]
        self._serial = self._process.send(DraftRequest(self._run, committed, unverified, self._observed, limit, self._slot))
        self._known = len(context)
        self._observed.clear()

    def first(self, count: int) -> list[int]:
        assert self._process is not None
        return self._process.drafted(self._serial, count)

    def cut(self) -> None:
        assert self._process is not None
        self._process.flags.cut(self._serial)

    def finish(self) -> Draft:
        assert self._process is not None
        answer: DraftAnswer = self._process.receive(self._serial, self._run)
        self.seconds = answer.seconds
        self._mirror.answered = answer.policy_state
        draft = Draft.chain(
            answer.tokens,
            entropies=answer.entropies,
            top_probs=answer.top_probs,
            stop_reason=answer.stop_reason,
            predicted=answer.predicted,
        )
        if not (draft.tokens and self._shared.size):
            return draft
        return self._shared.read(self._slot, draft, self._components.target.device)

    def close(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        self._worker.leave(self)
        if process.alive and self._run:
            with suppress(RunError):  # a worker that is gone has no runs to end; this one may be complete
                process.send(EndRun(self._run))


class _PolicyMirror(Always):
    """A copy of a length policy that decides in the worker process.

    Adds each observation, the numbers of drafted and accepted tokens, to `observed`, to be sent to the worker. `policy` is None
    if its state does not follow from observations; then its state is `answered`: that before the last draft, from the worker.
    """

    def __init__(self, policy: LengthPolicy | None, observed: list[tuple[int, int]]) -> None:
        self._policy, self._observed = policy, observed
        self.answered: Mapping[str, float] | None = None

    def observe(self, drafted: int, accepted: int) -> None:
        if self._policy is not None:
            self._policy.observe(drafted, accepted)
        self._observed.append((drafted, accepted))

    def state(self) -> Mapping[str, float] | None:
        return self.answered if self._policy is None else self._policy.state()
