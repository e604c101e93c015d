"""Drafting in another process: ids go through a pipe, distributions through memory that both sides map."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specgen import factory
from specgen.decoding.policies import DraftedToken, LengthPolicy, Signals
from specgen.engine.devices import split_threads
from specgen.types import Context, Draft
from specgen.workers.channel import DraftRequest, Kind, unpack_draft
from specgen.workers.process import DraftProcess, cannot_start
from specgen.workers.worker_loop import shared_slots, slots_of

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel, PreparedModel
    from specgen.factory import Components
    from specgen.methods import Settings


class ProcessWorker:
    """Keeps a worker's process for a pair: started at once or when first needed, and again after it died."""

    kind = "process"

    def __init__(self, process: DraftProcess | None, draft: PreparedModel, device: torch.device, dtype: torch.dtype) -> None:
        own, theirs = split_threads()
        # a worker on an accelerator needs the processor for little else than launching
        self.threads = own if device.type == "cpu" else None
        self._wanted = {
            "name": draft.name,
            "folder": str(draft.folder),
            "trust_remote_code": draft.source.trust_remote_code,
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "threads": theirs,
        }
        self._process = process
        self._loading = process.send(Kind.LOAD, self._wanted) if process is not None else 0
        self.penalties: dict[str, Any] | None = None
        self._parts: dict[int, int] = {}  # where each run's part of the shared memory begins, and where it ends
        self._going = 0  # runs
        self._threads_before = 0

    def follow(self, target: LoadedModel) -> None:
        """Have the draft's logits reshaped by the target's penalties too."""
        if target.has_penalties:
            self.penalties = {"config": target.model.generation_config.to_dict(), "eos_ids": sorted(target.eos_ids)}

    def ready(self) -> DraftProcess:
        """The process, its model loaded."""
        if self._process is None or not self._process.alive:
            self._process = DraftProcess()
            self._loading = self._process.send(Kind.LOAD, self._wanted)
        self._process.wait_ready(self._loading)
        return self._process

    def drafter(self, settings: Settings, parts: Components, window: int) -> ProcessDrafter:
        return ProcessDrafter(self, settings, parts, window)

    def share(self, process: DraftProcess, size: int) -> int:
        """A part of the shared memory for a run, as an offset. Runs that take turns get parts of their own."""
        offset = max(self._parts.values(), default=0)
        self._parts[offset] = offset + size
        try:
            if os.fstat(process.memory).st_size < offset + size:
                os.ftruncate(process.memory, offset + size)
        except OSError as error:
            raise cannot_start(error) from error
        return offset

    def unshare(self, offset: int) -> None:
        del self._parts[offset]

    def enter(self) -> None:
        """A run begins: leave the draft its threads."""
        self._going += 1
        if self._going == 1 and self.threads is not None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(min(self._threads_before, self.threads))

    def leave(self) -> None:
        """A run is over; after the last of those that took turns, all threads are the target's again."""
        self._going -= 1
        if self._going == 0 and self.threads is not None:
            torch.set_num_threads(self._threads_before)

    def forget(self) -> None:
        if self._process is not None and self._process.alive:
            self._process.send(Kind.FORGET)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


class ProcessDrafter:
    """One run's drafts (`ParallelDrafter`). The policy lives with the drafter; a twin here answers for its state."""

    def __init__(self, worker: ProcessWorker, settings: Settings, parts: Components, window: int) -> None:
        self.seconds = 0.0
        self._worker, self._settings, self._parts, self._window = worker, settings, parts, window
        self._observed: list[int] = []
        self.policy: LengthPolicy = _Twin(factory.make_policy(settings, parts.seed), self._observed)
        self._process: DraftProcess | None = None
        self._run = 0
        self._slots: torch.Tensor | None = None
        self._offset: int | None = None
        self._slot = 0

    def prefill(self, context: Context) -> None:
        parts, sampled = self._parts, not self._parts.sampling.greedy
        self._process = self._worker.ready()
        self._worker.enter()
        if sampled or parts.record:  # distributions to draw from, and logits for the record
            count = 2 * (sampled + parts.record)
            self._offset = self._worker.share(self._process, count * self._window * parts.vocab_size * 4)
            self._slots = shared_slots(self._process.memory, self._offset, count, self._window, parts.vocab_size)
        self._run = self._process.send(
            Kind.BEGIN,
            {
                "prompt_ids": context.ids,
                "capacity": parts.capacity,
                "sampling": asdict(parts.sampling),
                "eos_ids": sorted(parts.eos_ids),
                "vocab_size": parts.vocab_size,
                "seed": parts.seed,
                "policy": self._settings.policy,
                "settings": dict(self._settings.values),
                "window": self._window if self._slots is not None else 0,
                "record": parts.record,
                "offset": self._offset,
                "penalties": self._worker.penalties,
            },
        )
        self._known = len(context)

    def start(self, context: Context, pending: Sequence[int], limit: int) -> None:
        assert self._process is not None
        self._slot = 1 - self._slot
        asked = DraftRequest(context.ids[self._known :], pending, self._observed, limit, self._slot, self._run)
        self._serial = self._process.send(Kind.DRAFT, asked.pack())
        self._known = len(context)
        self._observed.clear()

    def finish(self) -> Draft:
        assert self._process is not None
        draft, self.seconds = unpack_draft(self._process.receive(self._serial, self._run))
        if self._slots is None or not draft.tokens:
            return draft
        probs, logits = slots_of(self._slots, self._slot, len(draft.tokens), self._parts.sampling, record=self._parts.record)
        return replace(draft, probs=probs, logits=logits)

    def propose(self, context: Context, policy: LengthPolicy, limit: int) -> Draft:
        self.start(context, (), limit)
        return self.finish()

    def close(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        self._worker.leave()
        if self._offset is not None:
            self._worker.unshare(self._offset)
        if process.alive and self._run:
            process.send(Kind.END, self._run)


class _Twin:
    """A policy that decides elsewhere: what it is told here is noted for the other, and both come to the same state."""

    signals: ClassVar[Signals] = frozenset()
    reason = ""

    def __init__(self, policy: LengthPolicy, observed: list[int]) -> None:
        self._policy, self._observed = policy, observed

    def keep_drafting(self, step: DraftedToken) -> bool:
        raise NotImplementedError("the policy decides where the draft is made")

    def observe(self, drafted: int, accepted: int) -> None:
        self._policy.observe(drafted, accepted)
        self._observed += (drafted, accepted)

    def state(self) -> Mapping[str, float] | None:
        return self._policy.state()
