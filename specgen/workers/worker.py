"""The draft worker of a pair of models: it drafts at the same time as the target's passes run (PEARL)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from specgen.base.errors import RunError
from specgen.base.settings import Settings
from specgen.base.types import Context, Draft
from specgen.decoding.drafting import Setup
from specgen.decoding.policy import LengthPolicy
from specgen.engine.devices import split_threads
from specgen.methods.runs import make_policy
from specgen.workers.process import DraftProcess, cannot_start
from specgen.workers.server import Drafted, DraftServer
from specgen.workers.shared import SIZE, SharedDrafts

if TYPE_CHECKING:
    from specgen.engine.logits_processors import GenerationConfig
    from specgen.engine.model_loading import LoadedModel, PreparedModel
    from specgen.engine.model_runner import DraftRunner
    from specgen.engine.text.translation import Translation

_POLL = 5e-5  # seconds between two looks at a draft that a thread makes
_RUNS = count(1)


class DraftWorker:
    """Runs the draft model in a process of its own, or in this one: in a thread, or on a second CUDA stream.

    `kind` is `process`, `thread` or `stream`. `threads` is the number of CPU threads left to the target; None if it keeps all of
    them. Made by `of_process` or `in_this_process`.
    """

    def __init__(self, kind: str, channel: DraftProcess | _Here | None, load: Sequence[object] = (), threads: int | None = None):
        self.kind, self.threads = kind, threads
        self._channel, self._load = channel, load
        self._loading = channel.send("load", *load) if isinstance(channel, DraftProcess) else None
        self.penalties: tuple[GenerationConfig, frozenset[int]] | None = None
        self._region_ends: dict[object, int] = {}  # for each active run the end of its part of the shared memory
        self._threads_before = 0

    @classmethod
    def of_process(
        cls,
        process: DraftProcess | None,
        draft: PreparedModel,
        device: torch.device,
        dtype: torch.dtype,
        translation: Translation | None = None,
    ) -> DraftWorker:
        """The worker that runs a model in a child process.

        `process` is a child that was already started; None starts one when it is first needed. A child that died is started
        again. `device` and `dtype` are those on which the draft model is to run. `translation` is between the target's tokens
        and the draft model's; None if both have the same.
        """
        own, worker_threads = split_threads()
        source = replace(draft.source, location=str(draft.folder), label=draft.name, on_mps=device.type == "mps")
        load = source, str(device), str(dtype).removeprefix("torch."), worker_threads, translation
        # a worker on an accelerator uses the CPU only to launch kernels
        return cls("process", process, load, own if device.type == "cpu" else None)

    @classmethod
    def in_this_process(cls, runner: DraftRunner, target: torch.device | None = None) -> DraftWorker:
        """The worker that runs a draft model on its own stream of the GPU that the device `target` is, too; else in a thread."""
        is_shared = target is not None and target.type == "cuda" and runner.device == target
        return cls("stream" if is_shared else "thread", _Here(runner, is_shared))

    def follow(self, target: LoadedModel) -> None:
        """Makes the draft model in a process apply the target's penalties (such as a repetition penalty) to its logits too."""
        if target.has_penalties:
            self.penalties = target.generation, target.eos_ids

    def ready(self) -> DraftProcess | _Here:
        """Waits until the draft model is loaded. Starts the process if none is alive. Raises SpecgenError if it cannot load."""
        if isinstance(self._channel, _Here):
            return self._channel
        if self._channel is None or not self._channel.alive:
            self._channel = DraftProcess()
            self._loading = self._channel.send("load", *self._load)
        if self._loading is not None:
            try:
                self._channel.receive(self._loading)
            except BaseException:
                self._channel.close()  # it cannot draft without a model
                raise
            self._loading = None
        return self._channel

    def drafter(self, settings: Settings, setup: Setup, window: int) -> WorkerDrafter:
        """Returns a drafter for one run, with drafts of at most `window` tokens."""
        return WorkerDrafter(self, settings, setup, window)

    def enter(self, run: object, shared: SharedDrafts) -> int:
        """Begins a run (the generation of one output): reserves shared memory for it and returns its offset in bytes.

        The first concurrent run also lowers this process's number of CPU threads, to leave the worker its share.
        """
        offset = max(self._region_ends.values(), default=SIZE)
        is_first = not self._region_ends
        if is_first:
            self._threads_before = torch.get_num_threads()
        self._region_ends[run] = offset + shared.size  # before the threads change: `leave` restores them after an interrupt
        if is_first and self.threads is not None:
            torch.set_num_threads(min(self._threads_before, self.threads))
        if isinstance(self._channel, DraftProcess):
            try:
                if os.fstat(self._channel.memory).st_size < offset + shared.size:
                    os.ftruncate(self._channel.memory, offset + shared.size)
            except OSError as error:
                raise cannot_start(error) from error
            shared.map(self._channel.memory, offset)
        return offset

    def leave(self, run: object) -> None:
        """Ends a run, if it has begun. When no run is left, the target gets back all CPU threads."""
        if self._region_ends.pop(run, None) is not None and not self._region_ends and self.threads is not None:
            torch.set_num_threads(self._threads_before)

    def forget(self) -> None:
        """Clears the draft model's KV cache in another process; in this one the pair of models does."""
        if isinstance(self._channel, DraftProcess) and self._channel.alive:
            self._channel.send("forget")

    def close(self) -> None:
        """Ends the process, or the thread after the work that was started."""
        if isinstance(self._channel, DraftProcess):
            self._channel.is_wanted = False
        if self._channel is not None:
            self._channel.close()


class WorkerDrafter:
    """Drafts for one run (the generation of one output) in the worker. Implements `methods.pearl_schedule.ParallelDrafter`.

    The length policy (the rule that ends drafts) decides in the worker; `policy` is a copy that follows its state.
    """

    def __init__(self, worker: DraftWorker, settings: Settings, setup: Setup, window: int) -> None:
        self.seconds = 0.0
        self._worker, self._settings, self._setup, self._window = worker, settings, setup, window
        self._observed: list[tuple[int, int]] = []
        # `adaptive` learns from the drafted tokens, which only the worker sees
        copy = None if setup.adaptive is not None else make_policy(settings, setup.seed)
        self._mirror = _PolicyMirror(copy, self._observed)
        self.policy: LengthPolicy = self._mirror
        self._channel: Any = None  # DraftProcess or _Here
        self._shared = SharedDrafts(setup, window)
        self._run, self._slot = next(_RUNS), 0
        self._begun: Any = None  # the request that began the run, until its answer is received
        self._asked: Any = None  # the last request for a draft

    def prefill(self, context: Context) -> None:
        self._channel = self._worker.ready()
        offset = self._worker.enter(self, self._shared)
        given = self._settings, self._setup.for_worker, self._window, offset, self._worker.penalties
        self._begun = self._channel.send("begin", self._run, list(context.ids), *given)
        self._known = len(context)

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        self._slot = 1 - self._slot
        committed, observed = context.ids[self._known :], list(self._observed)
        self._asked = self._channel.send("draft", self._run, committed, list(unverified), observed, limit, self._slot)
        self._known = len(context)
        self._observed.clear()

    def first(self, count: int) -> list[int]:
        shown: list[int] = self._channel.shown(self._asked, count)
        return shown

    def cut(self) -> None:
        self._channel.cut(self._asked)

    def finish(self) -> Draft:
        if self._begun is not None:
            self._channel.receive(self._begun)
            self._begun = None
        answer: Drafted = self._channel.receive(self._asked)
        self._asked = None
        self.seconds, self._mirror.answered = answer.seconds, answer.policy_state
        fields = dict(answer.fields)
        if answer.tokens and isinstance(self._channel, DraftProcess) and self._shared.size:
            assert self._setup.target is not None
            fields |= self._shared.read(self._slot, len(answer.tokens), self._setup.target.device)
        return Draft.chain(answer.tokens, **fields)

    def close(self) -> None:
        if self._channel is None:
            return
        channel, self._channel = self._channel, None
        self._worker.leave(self)
        with suppress(RunError):  # a worker that is gone has no runs to end; this one may be complete
            channel.send("end", self._run, list(self._observed))


class _PolicyMirror(LengthPolicy):
    """A copy of a length policy that decides in the worker.

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


@dataclass(slots=True)
class _Call:
    """A call of a `DraftServer` in this process: in a thread, or one that `make` has yet to do."""

    future: Future[Any] | None = None
    make: Callable[[], Any] | None = None
    shown: list[int] = field(default_factory=list)
    is_cut: bool = False

    def show(self, position: int, token: int) -> bool:
        self.shown.append(token)
        return not self.is_cut

    def result(self) -> Any:
        if self.future is None:
            assert self.make is not None
            found = self.make()
            self.future = Future()
            self.future.set_result(found)
        return self.future.result()


class _Here:
    """Runs a `DraftServer` in this process, with the functions that `DraftProcess` has.

    Python code of two threads takes turns, and the launch of each kernel with it. So where both models share a GPU, there is no
    thread: the caller queues the target's pass, and a draft is made, on a second stream, when the caller waits for it.
    """

    def __init__(self, runner: DraftRunner, has_stream: bool) -> None:
        self._server, self._device = DraftServer(runner), runner.device
        self._stream = torch.cuda.Stream(runner.device) if has_stream else None  # type: ignore[no-untyped-call]
        self._pool = None if has_stream else ThreadPoolExecutor(1, "specgen-draft")

    def send(self, name: str, *arguments: Any) -> _Call:
        call = _Call()
        options = {"show": call.show} if name == "draft" else {}
        if self._pool is not None:
            try:
                call.future = self._pool.submit(getattr(self._server, name), *arguments, **options)
            except RuntimeError:
                raise RunError("the thread of the draft model has ended", "Finish a run before its pair is closed") from None
            if name == "end":  # so that other runs can use the draft model
                call.result()
            return call
        call.make = lambda: self._on_stream(name, arguments, options)
        if name != "draft":
            call.result()
        return call

    def _on_stream(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Calls the server on the second stream. The host does not wait for the target's pass."""
        assert self._stream is not None
        current = torch.cuda.current_stream(self._device)
        if name == "begin":  # work of an earlier run may still use the buffers
            self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            answer = getattr(self._server, name)(*arguments, **options)
        if name == "end":
            current.wait_stream(self._stream)
        if isinstance(answer, Drafted):
            current.wait_stream(self._stream)
            for tensor in (answer.fields["probs"], answer.fields["logits"]):
                if tensor is not None:
                    tensor.record_stream(current)  # the memory is of the stream that it was allocated on
        return answer

    def receive(self, call: _Call) -> Any:
        return call.result()

    def shown(self, call: _Call, count: int) -> list[int]:
        if call.future is None:
            call.result()
        while len(call.shown) < count and call.future is not None and not call.future.done():
            time.sleep(_POLL)
        return call.shown[:count]

    def cut(self, call: _Call) -> None:
        call.is_cut = True

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
