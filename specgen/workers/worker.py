"""The draft worker of a pair of models: it drafts while the target's passes run (PEARL), in its own
process or on a CUDA stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from specgen.base.errors import RunError
from specgen.base.types import Context, Draft
from specgen.decoding.drafting import Setup
from specgen.decoding.policy_base import LengthPolicy
from specgen.engine.devices import split_threads
from specgen.engine.text.grammar import GrammarConstraint
from specgen.workers.process import SIZE, DraftProcess, cannot_start
from specgen.workers.server import Answer, DraftServer, Observed, SharedDrafts

if TYPE_CHECKING:
    from specgen.engine.model_files import ModelFiles
    from specgen.engine.model_runner import DraftRunner
    from specgen.engine.penalties import GenerationConfig
    from specgen.engine.precision import Precision
    from specgen.engine.text.token_bytes import TokenBytes
    from specgen.engine.text.translation import Translation

_RUNS = count(1)


class DraftWorker:
    """Runs the draft model of a pair, in a child process or in this one. Made by `of_process` or
    `in_this_process`.

    In this process, it uses a CUDA stream of its own if both models share a GPU; otherwise both
    models take turns. `threads` is the number of CPU threads left to the target; None if it keeps
    all of them. `penalties` are the target's generation config and end-of-sequence ids, so that a
    draft model in a child process applies the same penalties to its logits; None without penalties.
    """

    def __init__(
        self,
        channel: DraftProcess | _Here | None,
        load: Sequence[object] = (),
        threads: int | None = None,
    ) -> None:
        self.threads = threads
        self.penalties: tuple[GenerationConfig, frozenset[int]] | None = None
        self.is_process = not isinstance(channel, _Here)
        self._channel = channel
        self._load = load
        self._loading = channel.send("load", *load) if isinstance(channel, DraftProcess) else None
        # what has the target's tokens, for constraints
        self._informed: DraftProcess | _Here | None = None
        # for each active run the end of its part of the shared memory
        self._region_ends: dict[object, int] = {}
        self._threads_before = 0

    @classmethod
    def of_process(
        cls,
        process: DraftProcess | None,
        draft: ModelFiles,
        precision: Precision,
        device: torch.device,
        translation: Translation | None = None,
    ) -> DraftWorker:
        """Returns a worker that runs the draft model in a child process.

        `process` is a child that was already started; None: one is started when it is first needed.
        A child that died is started again. `precision` and `device` are those of the draft model.
        `translation` is between the target's tokens and the draft model's; None if both have the
        same.
        """
        own, worker_threads = split_threads()
        load = draft.folder, draft.source, precision, device, worker_threads, translation
        # a worker on an accelerator uses the CPU only to launch kernels
        return cls(process, load, own if device.type == "cpu" else None)

    @classmethod
    def in_this_process(
        cls, runner: DraftRunner, target: torch.device | None = None
    ) -> DraftWorker:
        """Returns a worker that runs the draft model in this process.

        If the target's device, `target`, is a GPU and also the draft model's device, the draft
        model runs on a CUDA stream of its own; otherwise the models take turns.
        """
        is_shared = target is not None and target.type == "cuda" and runner.device == target
        return cls(_Here(runner, has_stream=is_shared))

    def ready(self) -> DraftProcess | _Here:
        """Waits until the draft model is loaded, and starts the process if none is alive. Returns
        what requests are sent to.

        Raises SpecgenError if the process cannot be started or the model not be loaded.
        """
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

    def tell_tokens(self, tokens: TokenBytes) -> list[Any]:
        """Sends the target's tokens to the worker, for constraints, unless it has them. Returns the
        requests, which have to be received."""
        channel = self._channel
        if channel is None or channel is self._informed:
            return []
        request = channel.send("learn_tokens", tokens)
        self._informed = channel
        return [request]

    def drafter(self, policy: LengthPolicy, setup: Setup, window: int) -> WorkerDrafter:
        """Returns a drafter for one run, with drafts of at most `window` tokens, which `policy`
        ends."""
        return WorkerDrafter(self, policy, setup, window)

    def enter(self, run: object, shared: SharedDrafts) -> int:
        """Begins a run (the generation of one output): reserves a part of the shared memory for it,
        and returns its offset in bytes.

        If no other run is active, also lowers this process's number of CPU threads, to leave the
        worker its share. Raises RunError if there is no room for the shared memory.
        """
        offset = max(self._region_ends.values(), default=SIZE)
        end = offset + shared.size
        is_first = not self._region_ends
        if is_first:
            self._threads_before = torch.get_num_threads()
        # before the threads change: `leave` restores them after an interrupt
        self._region_ends[run] = end
        if is_first and self.threads is not None:
            torch.set_num_threads(min(self._threads_before, self.threads))
        if isinstance(self._channel, DraftProcess):
            memory = self._channel.memory.fileno()
            try:
                if os.fstat(memory).st_size < end:
                    os.ftruncate(memory, end)
            except OSError as error:
                raise cannot_start(error) from error
            shared.map(memory, offset)
        return offset

    def leave(self, run: object) -> None:
        """Ends a run; does nothing if it has not begun. When no run is active, this process gets
        back its number of CPU threads."""
        has_begun = self._region_ends.pop(run, None) is not None
        if has_begun and not self._region_ends and self.threads is not None:
            torch.set_num_threads(self._threads_before)

    def forget(self) -> None:
        """Clears the KV cache of a draft model in a child process. The cache of one in this process
        belongs to the pair."""
        if isinstance(self._channel, DraftProcess) and self._channel.alive:
            self._channel.send("forget")

    def close(self) -> None:
        """Ends the child process, if there is one."""
        if isinstance(self._channel, DraftProcess):
            self._channel.close()


class WorkerDrafter:
    """Drafts for one run (the generation of one output) in the worker. Implements
    `decoding.parallel.ParallelDrafter`.

    The length policy (the rule that ends drafts) decides in the worker; `policy` in this process
    only follows its state.
    """

    def __init__(
        self, worker: DraftWorker, policy: LengthPolicy, setup: Setup, window: int
    ) -> None:
        self.seconds = 0.0
        self.own_seconds = 0.0
        self._worker = worker
        self._decides = policy
        self._setup = setup
        self._window = window
        # what a policy learns from the drafted tokens, only the worker knows
        self._mirror = _PolicyMirror(None if policy.learns_from_tokens else deepcopy(policy))
        self.policy: LengthPolicy = self._mirror
        self._channel: Any = None  # DraftProcess or _Here
        self._shared = SharedDrafts(setup, window)
        self._run = next(_RUNS)
        self._slot = 0
        self._sent = 0  # tokens of the context that the worker knows
        # requests without an answer: for the beginning of the run, and for a draft
        self._requests: list[Any] = []

    def ready(self) -> None:
        self._worker.ready()

    def prefill(self, context: Context) -> None:
        self._channel = self._worker.ready()
        offset = self._worker.enter(self, self._shared)
        constraint = context.constraint
        ends = None
        self._requests = []
        if isinstance(constraint, GrammarConstraint):
            ends = constraint.ends
            self._requests += self._worker.tell_tokens(constraint.tokens)
        request = self._channel.send(
            "begin",
            self._run,
            list(context.ids),
            self._decides,
            self._setup.for_worker,
            self._window,
            offset,
            self._worker.penalties,
            ends,
        )
        self._requests.append(request)
        self._sent = len(context)

    def start(self, context: Context, unverified: Sequence[int], limit: int) -> None:
        self._slot = 1 - self._slot
        committed = context.ids[self._sent :]
        observed = list(self._mirror.observed)
        request = self._channel.send(
            "draft", self._run, committed, list(unverified), observed, limit, self._slot
        )
        self._requests.append(request)
        self._sent = len(context)
        self._mirror.observed.clear()

    def first(self, count: int) -> list[int]:
        shown: list[int] = self._channel.shown(self._requests[-1], count)
        return shown

    def cut(self) -> None:
        self._channel.cut(self._requests[-1])

    def finish(self) -> Draft:
        *_, answer = [self._channel.receive(request) for request in self._requests]
        self._requests.clear()
        draft: Draft
        draft, self.seconds, self.own_seconds, self._mirror.answered = answer
        if not self._worker.is_process:
            return draft
        assert self._setup.target is not None
        return self._shared.read(self._slot, draft, self._setup.target.device)

    def close(self) -> None:
        if self._channel is None:
            return
        channel = self._channel
        self._channel = None
        self._worker.leave(self)
        with suppress(RunError):  # a worker that has ended has no runs to end
            channel.send("end", self._run, self._mirror.observed)


class _PolicyMirror(LengthPolicy):
    """A copy of a length policy that decides in the worker.

    `observed` is what the worker is to be told.
    `policy` learns from the same numbers; None if its state depends on more than them. Then the
    state is `answered`, which the worker sends with each draft: the state before it.
    """

    def __init__(self, policy: LengthPolicy | None) -> None:
        self._policy = policy
        self.observed: list[Observed] = []
        self.answered: Mapping[str, float] | None = None

    def observe(self, drafted: int, accepted: int) -> None:
        observed = Observed(drafted, accepted, self.in_turn)
        if self._policy is not None:
            observed.tell(self._policy)
        self.observed.append(observed)

    def state(self) -> Mapping[str, float] | None:
        return self.answered if self._policy is None else self._policy.state()


class _Here:
    """Runs a `DraftServer` in this process. Has the functions of `DraftProcess`.

    Two threads would not draft in parallel, because Python runs one at a time, and launches of
    kernels wait too. So there is no thread: if both models share a GPU, the caller queues the
    target's pass, and a draft is made on a second stream when the caller waits for it.
    """

    def __init__(self, runner: DraftRunner, *, has_stream: bool) -> None:
        self._server = DraftServer(runner)
        self._device = runner.device
        self._stream = torch.cuda.Stream(runner.device) if has_stream else None  # type: ignore[no-untyped-call]

    def send(self, name: str, *arguments: Any) -> Callable[[], Any]:
        """Calls a function of the server, and returns a function that returns the result. A draft
        is made only when that is called."""
        request = cache(partial(self._call, name, *arguments))
        if name != "draft":
            request()
        return request

    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls the server, on the second stream if there is one. The host does not wait for the
        target's pass."""
        function = getattr(self._server, name)
        if self._stream is None:
            return function(*arguments)
        current = torch.cuda.current_stream(self._device)
        if name == "begin":  # work of an earlier run may still use the buffers
            self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            answer = function(*arguments)
        if name in ("draft", "end"):
            current.wait_stream(self._stream)
        if name == "draft":
            for tensor in (answer[0].probs, answer[0].logits):
                if tensor is not None:
                    # its memory belongs to the stream it was allocated on
                    tensor.record_stream(current)
        return answer

    def receive(self, request: Callable[[], Any]) -> Any:
        return request()

    def shown(self, request: Callable[[], Answer], count: int) -> Sequence[int]:
        return request()[0].tokens[:count]

    def cut(self, request: object) -> None:
        """Does nothing: the draft is complete."""
