"""The main loop of the worker process: one draft model, loaded once, drafts for all runs of its pair."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from specgen import factory
from specgen.decoding.drafters import DraftSetup, ModelDrafter
from specgen.decoding.policies import LengthPolicy
from specgen.engine.devices import DTYPES, pick_threads
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_loading import ModelSource, load_weights
from specgen.engine.model_runner import ModelRunner
from specgen.errors import RunError, SpecgenError, is_out_of_memory
from specgen.settings import Settings
from specgen.types import Context, Draft, SamplingParams
from specgen.workers.channel import Channel, ChannelClosedError, DraftRequest, Kind, pack_draft


def serve(channel: Channel, parent: int, memory: int) -> None:
    """Answer messages until the other side closes the channel. Failures are reported, and the loop continues."""
    worker = Worker(memory)
    try:
        while True:
            channel.wait(parent)
            kind, serial, payload = channel.receive()
            try:
                answer = worker.handle(kind, serial, payload)
            except Exception as error:  # noqa: BLE001  every failure is reported to the pair
                traceback.print_exc()
                channel.send(Kind.FAILED, serial, json.dumps(_failure(error)).encode())
            else:
                if answer is not None:
                    channel.send(*answer[:1], serial, answer[1])
    except ChannelClosedError:
        pass


class Worker:
    """What is kept between messages: the model, its runner, and the active runs."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._model: Any = None
        self._runner: ModelRunner | None = None
        self._runs: dict[int, _Run | Exception] = {}

    def handle(self, kind: Kind, serial: int, payload: bytes) -> tuple[Kind, bytes] | None:
        """Process a message. Returns kind and payload of the answer, None if the message has no answer."""
        if kind == Kind.LOAD:
            self._load(json.loads(payload))
            return Kind.READY, b""
        if kind == Kind.BEGIN:
            try:
                self._runs[serial] = self._begin(json.loads(payload))
            except Exception as error:
                self._runs[serial] = error  # drafts of this run may have been requested already
                raise
        elif kind == Kind.DRAFT:
            request = DraftRequest.unpack(payload)
            run = self._runs[request.run]
            if isinstance(run, Exception):
                raise run
            draft, seconds = run.draft(request)
            return Kind.DRAFTED, pack_draft(draft, seconds)
        elif kind == Kind.FORGET and self._runner is not None:
            self._runner.clear_cache()
        elif kind == Kind.END:
            self._runs.pop(json.loads(payload), None)
        return None

    def _load(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(request["threads"])
        source = ModelSource(request["name"], trust_remote_code=request["trust_remote_code"])
        self._model = load_weights(Path(request["folder"]), source, DTYPES[request["dtype"]], torch.device(request["device"]))
        runner = ModelRunner(self._model)

        def a_draft() -> None:
            for length in range(4):
                runner.logits(Context([0, 1]), [1] * length, start=length)

        a_draft()
        if request["device"] == "cpu":
            pick_threads(a_draft)  # at most as many as set above

    def _begin(self, request: dict[str, Any]) -> _Run:
        """Construct the run's drafter and policy as a thread worker does, and run the prompt."""
        if self._runner is None:
            self._runner = ModelRunner(self._model, self._penalties(request["penalties"], request["vocab_size"]))
        self._runner.reserve(request["capacity"])
        sampling = SamplingParams(**request["sampling"])
        vocab_size, record = request["vocab_size"], bool(request["record"])
        seed = factory.derive_seed(request["seed"], "draft")
        drafter = ModelDrafter(DraftSetup(self._runner, sampling, frozenset(request["eos_ids"]), vocab_size, seed, record))
        policy = factory.make_policy(Settings(request["policy"], request["settings"]), request["seed"])
        context = Context(request["prompt_ids"])
        slots = None
        if request["window"]:
            count = 2 * (record + (not sampling.greedy))
            slots = shared_slots(self._memory, request["offset"], count, request["window"], vocab_size)
        if context.largest_id < self._runner.num_embeddings and len(context) <= self._runner.context_limit:
            self._runner.logits(context)
        return _Run(context, drafter, policy, slots, sampling, record)

    def _penalties(self, described: dict[str, Any] | None, width: int) -> PenaltyProcessor | None:
        if described is None:
            return None
        return PenaltyProcessor(GenerationConfig.from_dict(described["config"]), described["eos_ids"], width, self._model.device)


@dataclass(slots=True)
class _Run:
    """One run of the pair. `slots` is its part of the shared memory; None if neither `probs` nor `logits` are sent."""

    context: Context
    drafter: ModelDrafter
    policy: LengthPolicy
    slots: torch.Tensor | None
    sampling: SamplingParams
    record: bool

    def draft(self, request: DraftRequest) -> tuple[Draft, float]:
        """The draft, and the seconds that it took."""
        start = time.perf_counter()
        if request.committed:
            self.context.extend(request.committed)
        for drafted, accepted in zip(request.observed[::2], request.observed[1::2], strict=True):
            self.policy.observe(drafted, accepted)
        draft = self.drafter.propose(self.context, self.policy, request.limit, request.unverified)
        if draft.tokens and self.slots is not None:
            shared = slots_of(self.slots, request.slot, len(draft.tokens), self.sampling, record=self.record)
            for memory, rows in zip(shared, (draft.probs, draft.logits), strict=True):
                if memory is not None and rows is not None:  # a draft model may have fewer tokens than the target
                    memory[:, : rows.shape[-1]].copy_(rows)
                    memory[:, rows.shape[-1] :] = 0.0 if rows is draft.probs else -torch.inf
        return draft, time.perf_counter() - start


def shared_slots(memory: int, offset: int, slots: int, window: int, vocab_size: int) -> torch.Tensor:
    """A run's part of the shared memory, float32 [slots, window, vocab_size]; see `slots_of`.

    The memory must be large enough already. The tensor keeps the mapping alive.
    """
    count = slots * window * vocab_size
    mapped = mmap(memory, offset + count * 4)
    return torch.frombuffer(mapped, dtype=torch.float32, offset=offset, count=count).view(slots, window, vocab_size)


def slots_of(
    slots: torch.Tensor, draft: int, length: int, sampling: SamplingParams, *, record: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The memory of a draft's distributions and of its logits, each [length, vocab_size], None if they are not sent.

    There are two drafts, 0 and 1: one is being verified while the other is being made.
    """
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
