"""Inside the worker's process: one draft model, loaded once, drafting for whichever run asks."""

from __future__ import annotations

import json
import time
import traceback
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from specgen import factory, methods
from specgen.decoding.drafters import ModelDrafter
from specgen.decoding.policies import LengthPolicy
from specgen.engine.devices import DTYPES, pick_threads
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_loading import ModelSource, load_weights, new_runner
from specgen.engine.model_runner import ModelRunner
from specgen.errors import RunError, SpecgenError, is_out_of_memory
from specgen.types import Context, Draft, SamplingParams
from specgen.workers.channel import Channel, ChannelClosedError, DraftRequest, Kind, pack_draft


def serve(channel: Channel, parent: int, memory: int) -> None:
    """Answer messages until the other side is gone. A failure is reported; the next message may do better."""
    worker = Worker(memory)
    try:
        while True:
            channel.wait(parent)
            kind, serial, payload = channel.receive()
            try:
                answer = worker.handle(kind, serial, payload)
            except Exception as error:  # noqa: BLE001  whatever it is, the other side is told
                traceback.print_exc()
                channel.send(Kind.FAILED, serial, json.dumps(_failure(error)).encode())
            else:
                if answer is not None:
                    channel.send(*answer[:1], serial, answer[1])
    except ChannelClosedError:
        pass


class Worker:
    """What is kept between messages: the model, its session, and the run that is under way."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._model: Any = None
        self._runner: ModelRunner | None = None
        self._runs: dict[int, _Run | Exception] = {}

    def handle(self, kind: Kind, serial: int, payload: bytes) -> tuple[Kind, bytes] | None:
        """Do what a message asks; the answer's kind and payload, if there is one."""
        if kind == Kind.LOAD:
            self._load(json.loads(payload))
            return Kind.READY, b""
        if kind == Kind.BEGIN:
            try:
                self._runs[serial] = self._begin(json.loads(payload))
            except Exception as error:
                self._runs[serial] = error  # its drafts are asked for already, maybe
                raise
        elif kind == Kind.DRAFT:
            asked = DraftRequest.unpack(payload)
            run = self._runs[asked.run]
            if isinstance(run, Exception):
                raise run
            draft, seconds = run.draft(asked)
            return Kind.DRAFTED, pack_draft(draft, seconds)
        elif kind == Kind.FORGET and self._runner is not None:
            self._runner.forget()
        elif kind == Kind.END:
            self._runs.pop(json.loads(payload), None)
        return None

    def _load(self, wanted: dict[str, Any]) -> None:
        torch.set_num_threads(wanted["threads"])
        source = ModelSource(wanted["name"], trust_remote_code=wanted["trust_remote_code"])
        self._model = load_weights(Path(wanted["folder"]), source, DTYPES[wanted["dtype"]], torch.device(wanted["device"]))
        runner = new_runner(self._model)

        def a_draft() -> None:
            for length in range(4):
                runner.logits(Context([0, 1]), [1] * length, start=length)

        a_draft()
        if wanted["device"] == "cpu":
            pick_threads(a_draft)  # of those that it may have at most

    def _begin(self, wanted: dict[str, Any]) -> _Run:
        """Make the run's drafter and policy just as a pair makes them in its own process, and read the prompt."""
        if self._runner is None:
            self._runner = new_runner(self._model, self._penalties(wanted["penalties"], wanted["vocab_size"]))
        self._runner.reserve(wanted["capacity"])
        sampling = SamplingParams(**wanted["sampling"])
        seed, vocab_size = wanted["seed"], wanted["vocab_size"]
        record, draft_seed = bool(wanted["record"]), factory.derive_seed(seed, "draft")
        eos_ids = frozenset(wanted["eos_ids"])
        drafter = ModelDrafter(self._runner, sampling, eos_ids, vocab_size, draft_seed, keep_logits=record)
        policy = factory.make_policy(methods.Settings(wanted["policy"], wanted["settings"]), seed)
        context = Context(wanted["prompt_ids"])
        slots = None
        if wanted["window"]:
            count = 2 * (record + (not sampling.greedy))
            slots = shared_slots(self._memory, wanted["offset"], count, wanted["window"], vocab_size)
        if context.largest_id < self._runner.num_embeddings and len(context) <= self._runner.context_limit:
            self._runner.logits(context)
        return _Run(context, drafter, policy, slots, sampling, record=record)

    def _penalties(self, wanted: dict[str, Any] | None, width: int) -> PenaltyProcessor | None:
        if wanted is None:
            return None
        return PenaltyProcessor(GenerationConfig.from_dict(wanted["config"]), wanted["eos_ids"], width, self._model.device)


class _Run:
    def __init__(
        self,
        context: Context,
        drafter: ModelDrafter,
        policy: LengthPolicy,
        slots: torch.Tensor | None,
        sampling: SamplingParams,
        *,
        record: bool,
    ) -> None:
        self._context, self._drafter, self._policy, self._slots = context, drafter, policy, slots
        self._sampling, self._record = sampling, record

    def draft(self, asked: DraftRequest) -> tuple[Draft, float]:
        start = time.perf_counter()
        if asked.committed:
            self._context.extend(asked.committed)
        for drafted, accepted in zip(asked.observed[::2], asked.observed[1::2], strict=True):
            self._policy.observe(drafted, accepted)
        draft = self._drafter.propose(self._context, self._policy, asked.limit, asked.pending)
        if draft.tokens and self._slots is not None:
            positions = slots_of(self._slots, asked.slot, len(draft.tokens), self._sampling, record=self._record)
            for position, made in zip(positions, (draft.probs, draft.logits), strict=True):
                if position is not None and made is not None:  # a draft model may know fewer tokens than the target
                    position[:, : made.shape[-1]].copy_(made)
                    position[:, made.shape[-1] :] = 0.0 if made is draft.probs else -torch.inf
        return draft, time.perf_counter() - start


def shared_slots(memory: int, offset: int, slots: int, window: int, vocab_size: int) -> torch.Tensor:
    """A run's part of the shared memory, float32 [slots, window, vocab_size]: `slots_of` says what for. The memory has to reach
    that far already. The tensor keeps the mapping alive.
    """
    count = slots * window * vocab_size
    mapped = mmap(memory, offset + count * 4)
    return torch.frombuffer(mapped, dtype=torch.float32, offset=offset, count=count).view(slots, window, vocab_size)


def slots_of(
    slots: torch.Tensor, draft: int, length: int, sampling: SamplingParams, *, record: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where a draft's distributions and its logits stand, each [length, vocab_size], None where nobody asks for them. There are
    two drafts, 0 and 1: one being judged, one being made."""
    probs = None if sampling.greedy else slots[draft, :length]
    logits = slots[draft - 2, :length] if record else None
    return probs, logits


def _failure(error: Exception) -> dict[str, Any]:
    if isinstance(error, SpecgenError):
        return {"message": error.message, "hint": error.hint, "while_running": isinstance(error, RunError)}
    if is_out_of_memory(error):
        return {"message": "the draft worker ran out of memory", "hint": "Try a smaller model", "while_running": True}
    text = " ".join(str(error).split())[:160]
    return {"message": f"the draft worker failed: {type(error).__name__}: {text}", "hint": "", "while_running": True}
