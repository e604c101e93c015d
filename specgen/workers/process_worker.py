"""Drafting in another process: token ids go through a pipe, distributions through shared memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from specgen import factory
from specgen.decoding.components import Components
from specgen.decoding.policies import DraftedToken, LengthPolicy
from specgen.engine.devices import split_threads
from specgen.types import Context, Draft
from specgen.workers.channel import DraftRequest, Kind, unpack_draft
from specgen.workers.process import DraftProcess, cannot_start
from specgen.workers.worker_loop import shared_slots, slots_of

if TYPE_CHECKING:
    from specgen.engine.model_loading import LoadedModel, PreparedModel
    from specgen.settings import Settings


class ProcessWorker:
    """A pair's worker process (`DraftWorker`), started at once or when first needed, and restarted after it died."""

    kind = "process"

    def __init__(self, process: DraftProcess | None, draft: PreparedModel, device: torch.device, dtype: torch.dtype) -> None:
        own, worker_threads = split_threads()
        # a worker on an accelerator uses the CPU only to launch kernels
        self.threads = own if device.type == "cpu" else None
        self._load_request = {
            "name": draft.name,
            "folder": str(draft.folder),
            "trust_remote_code": draft.source.trust_remote_code,
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "threads": worker_threads,
        }
        self._process = process
        self._loading = process.send(Kind.LOAD, self._load_request) if process is not None else 0
        self.penalties: dict[str, Any] | None = None
        self._regions: dict[int, int] = {}  # start and end of each run's part of the shared memory
        self._active_runs = 0
        self._threads_before = 0

    def follow(self, target: LoadedModel) -> None:
        """Apply the target's penalties to the draft's logits too."""
        if target.has_penalties:
            self.penalties = {"config": target.model.generation_config.to_dict(), "eos_ids": sorted(target.eos_ids)}

    def ready(self) -> DraftProcess:
        """The process, after its model is loaded."""
        if self._process is None or not self._process.alive:
            self._process = DraftProcess()
            self._loading = self._process.send(Kind.LOAD, self._load_request)
        self._process.wait_ready(self._loading)
        return self._process

    def drafter(self, settings: Settings, components: Components, window: int) -> ProcessDrafter:
        return ProcessDrafter(self, settings, components, window)

    def share(self, process: DraftProcess, size: int) -> int:
        """Reserve `size` bytes of the shared memory for a run. Returns their offset; concurrent runs get separate regions."""
        offset = max(self._regions.values(), default=0)
        self._regions[offset] = offset + size
        try:
            if os.fstat(process.memory).st_size < offset + size:
                os.ftruncate(process.memory, offset + size)
        except OSError as error:
            raise cannot_start(error) from error
        return offset

    def unshare(self, offset: int) -> None:
        del self._regions[offset]

    def enter(self) -> None:
        """A run begins: leave the worker its CPU threads."""
        self._active_runs += 1
        if self._active_runs == 1 and self.threads is not None:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(min(self._threads_before, self.threads))

    def leave(self) -> None:
        """A run ended; after the last concurrent one the target gets all CPU threads back."""
        self._active_runs -= 1
        if self._active_runs == 0 and self.threads is not None:
            torch.set_num_threads(self._threads_before)

    def forget(self) -> None:
        if self._process is not None and self._process.alive:
            self._process.send(Kind.FORGET)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


class ProcessDrafter:
    """One run's drafts (`ParallelDrafter`). The policy decides in the worker; a copy here follows its state."""

    def __init__(self, worker: ProcessWorker, settings: Settings, components: Components, window: int) -> None:
        self.seconds = 0.0
        self._worker, self._settings, self._components, self._window = worker, settings, components, window
        self._observed: list[int] = []
        self.policy: LengthPolicy = _PolicyMirror(factory.make_policy(settings, components.seed), self._observed)
        self._process: DraftProcess | None = None
        self._run = 0
        self._slots: torch.Tensor | None = None
        self._offset: int | None = None
        self._slot = 0

    def prefill(self, context: Context) -> None:
        components, sampled = self._components, not self._components.sampling.greedy
        self._process = self._worker.ready()
        self._worker.enter()
        if sampled or components.record:  # `probs` for sampling, `logits` for recording
            count = 2 * (sampled + components.record)
            self._offset = self._worker.share(self._process, count * self._window * components.vocab_size * 4)
            self._slots = shared_slots(self._process.memory, self._offset, count, self._window, components.vocab_size)
        self._run = self._process.send(
            Kind.BEGIN,
            {
                "prompt_ids": context.ids,
                "capacity": components.capacity,
                "sampling": asdict(components.sampling),
                "eos_ids": sorted(components.eos_ids),
                "vocab_size": components.vocab_size,
                "seed": components.seed,
                "policy": self._settings.policy,
                "settings": dict(self._settings.values),
                "window": self._window if self._slots is not None else 0,
                "record": components.record,
                "offset": self._offset,
                "penalties": self._worker.penalties,
            },
        )
        self._known = len(context)

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        assert self._process is not None
        self._slot = 1 - self._slot
        request = DraftRequest(context.ids[self._known :], unverified, self._observed, limit, self._slot, self._run)
        self._serial = self._process.send(Kind.DRAFT, request.pack())
        self._known = len(context)
        self._observed.clear()

    def finish(self) -> Draft:
        assert self._process is not None
        draft, self.seconds = unpack_draft(self._process.receive(self._serial, self._run))
        if self._slots is None or not draft.tokens:
            return draft
        probs, logits = slots_of(
            self._slots, self._slot, len(draft.tokens), self._components.sampling, record=self._components.record
        )
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


class _PolicyMirror(LengthPolicy):
    """Follows the state of a policy that decides in the worker: notes the observations to be sent there."""

    def __init__(self, policy: LengthPolicy, observed: list[int]) -> None:
        self._policy, self._observed = policy, observed

    def keep_drafting(self, token: DraftedToken) -> bool:
        raise NotImplementedError("the policy decides in the worker process")

    def observe(self, drafted: int, accepted: int) -> None:
        self._policy.observe(drafted, accepted)
        self._observed += (drafted, accepted)

    def state(self) -> Mapping[str, float] | None:
        return self._policy.state()
