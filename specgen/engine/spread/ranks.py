"""The processes (ranks) that torchrun has started. Each holds a part of each model.

Rank 0 announces each call of a method to the others, and all ranks run it on their parts.
Announcements are Python objects, broadcast through gloo; sums between GPUs go through NCCL. When a
process fails, torchrun ends the others. A Ctrl-C in rank 0 while all ranks run something leaves the
others out of step: no later call is possible then.
"""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.machine import Launch, launch
from specgen.engine.devices import inference

_FOREVER = timedelta(days=365)  # rank 0 may be idle for any time between two passes
_HINT = "torchrun's own report says which process ended, and how"


class LostRankError(Exception):
    """An operation failed because another rank has ended."""


class Shared(Protocol):
    """An object of which each rank holds a part. The parts have the same `number` on all ranks; see
    `Group.add`."""

    number: int


class Group:
    """The `size` processes that hold a model together, as seen by process number `rank`.

    All processes must call the same operations in the same order. An operation raises LostRankError
    if another process has ended. `failure` says why the ranks are no longer in step, after which
    nothing can be run any more; None as long as they are. `group` is torch.distributed's process
    group.
    """

    number = 0  # of the group itself

    def __init__(self, rank: int, size: int, local_rank: int, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._local_rank = local_rank
        self.group = group
        self.failure: str | None = None
        self.objects: MutableMapping[int, Any] = weakref.WeakValueDictionary() if rank == 0 else {}
        self.objects[0] = self
        self._last = 0
        # filled by destructors, which may run at any time and in any thread
        self._dropped: deque[int] = deque()

    # operations

    def sum(self, tensor: Tensor) -> None:
        """Replaces the tensor, which has to be contiguous, by the sum of all ranks' tensors. Called
        on all ranks."""
        self._checked(dist.all_reduce, tensor)

    def gather(self, tensor: Tensor) -> Sequence[Tensor] | None:
        """Returns on rank 0 all ranks' tensors, by rank; None on the other ranks. All have the same
        shape. Called on all ranks."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        self._checked(dist.gather, tensor, parts, dst=0)
        return parts

    def share(self, message: Any = None) -> Any:
        """Returns rank 0's message, a Python object, on all ranks. The messages of the other ranks
        are ignored."""
        messages = [message]
        self._checked(dist.broadcast_object_list, messages, 0)
        return messages[0]

    def all(self, message: Any) -> list[Any]:
        """Returns the messages of all ranks, Python objects, by rank. Called on all ranks."""
        messages: list[Any] = [None] * self.size
        self._checked(dist.all_gather_object, messages, message)
        return messages

    def _checked(
        self, operation: Callable[..., object], *arguments: object, **options: object
    ) -> None:
        try:
            operation(*arguments, group=self.group, **options)
        except (RuntimeError, ValueError) as error:  # gloo's own errors are plain RuntimeErrors
            raise LostRankError(str(error)) from error

    # announced calls

    def add(self, made: Shared) -> None:
        """Gives an object its number, by which all ranks know their part of it.

        All ranks make the same objects in the same order. The other ranks keep their parts until
        rank 0's is freed.
        """
        self._last += 1
        made.number = self._last
        self.objects[self._last] = made
        if self.rank == 0:
            weakref.finalize(made, self._dropped.append, self._last)

    def call(self, shared: Shared, method: str, *arguments: Any) -> Any:
        """Calls a method of an object on all ranks, each with its own part, and returns rank 0's
        result. Called on rank 0.

        Tensors among the arguments have to be on the CPU. Raises RunError if the ranks are no
        longer in step. An error in the call leaves them out of step, unless it is a SpecgenError.
        """
        if self.failure is not None:
            raise self._error()
        try:
            message = (
                [self._dropped.popleft() for _ in range(len(self._dropped))],
                shared.number,
                method,
                arguments,
            )
            self.share(message)
            return self._run(*message)
        except LostRankError as error:
            self.failure = "another of torchrun's processes has ended"
            raise self._error() from error
        except SpecgenError:  # raised by all ranks alike
            raise
        except BaseException as error:
            self.failure = "out of memory" if is_out_of_memory(error) else "it was interrupted"
            raise

    def _error(self) -> SpecgenError:
        return RunError(f"the run on {self.size} processes has ended: {self.failure}", _HINT)

    def _run(
        self, dropped: Sequence[int], number: int, method: str, arguments: Sequence[Any]
    ) -> Any:
        for unused in dropped:
            self.objects.pop(unused, None)
        return getattr(self.objects[number], method)(*arguments)

    @inference
    def follow(self) -> None:
        """On a rank other than 0, runs all that rank 0 announces, until rank 0 announces the
        end."""
        while (message := self.share()) is not None:
            with suppress(SpecgenError):  # rank 0 raises it, too
                self._run(*message)

    def load(self, read: Callable[..., Shared], kind: str, name: str, *arguments: Any) -> Any:
        """Makes this rank's part of a model by `read(device, group, name, *arguments)`, and adds it
        to the group's objects.

        `kind` is the type of the devices (`cpu`, `cuda`), of which each rank has one. Called on all
        ranks: if it fails on one, all raise an error.
        """
        device = torch.device(kind, self._local_rank) if kind == "cuda" else torch.device(kind)
        own = None
        made = None
        if kind == "cuda":
            torch.cuda.set_device(device)
        try:
            made = read(device, self, name, *arguments)
        except Exception as error:  # noqa: BLE001  raised below, as itself or as text
            own = error
        problems = self.all(None if own is None else f"process {self.rank}: {in_words(own)}")
        if isinstance(own, SpecgenError) and self.rank == 0:
            raise own
        if problem := next(filter(None, problems), None):
            hint = "Try --dtype bfloat16, a smaller model or more processes"
            raise RunError(f"{name} cannot be loaded: {problem}", hint) from own
        assert made is not None
        self.add(made)
        return made


def in_words(error: BaseException) -> str:
    if is_out_of_memory(error):
        return "out of memory"
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, SpecgenError) else f"{type(error).__name__}: {text}"


# the processes


# The group of this process, on rank 0 once it has joined the others.
joined: list[Group] = []


def follow_unless_first() -> None:
    """Joins the processes that torchrun has started. Returns on rank 0; another rank does what rank
    0 announces, and then ends.

    Another rank ends its process with exit code 0 and without output when rank 0 has ended; after
    an error of its own, with a line that says why and exit code 1. Without torchrun, returns at
    once.
    """
    launched = launch()
    if launched is None or joined:
        return
    if launched.rank == 0:
        joined.append(_join(launched))
        atexit.register(end)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends, and this rank with it
    nowhere = os.open(os.devnull, os.O_WRONLY)
    errors = os.dup(2)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    code = 0
    try:
        _join(launched).follow()
    except LostRankError:
        pass
    except BaseException as error:  # noqa: BLE001  reported, and this process ends
        os.write(errors, f"error: process {launched.rank}: {in_words(error)}\n".encode())
        code = 1
    finally:
        os._exit(code)  # without waiting for connections to processes that have ended


def _join(launched: Launch) -> Group:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    group = None
    try:
        if dist.is_initialized():  # by the caller, perhaps without gloo
            group = dist.new_group(backend=backend, timeout=_FOREVER)
        else:
            dist.init_process_group(
                backend, rank=launched.rank, world_size=launched.ranks, timeout=_FOREVER
            )
    except (RuntimeError, ValueError) as error:
        raise LostRankError(str(error)) from error
    return Group(launched.rank, launched.ranks, launched.local_rank, group)


def end() -> None:
    """Lets the other ranks end, and leaves the process group. Called on rank 0 when its process
    ends."""
    while joined:
        group = joined.pop()
        if group.failure is None:
            group.failure = "it was closed"
            with suppress(LostRankError):  # they have ended already
                group.share(None)
        if dist.is_initialized():  # otherwise gloo's threads may abort this process as it ends
            dist.destroy_process_group(group.group)


def device_of_rank(launched: Launch, name: str) -> str:
    """Returns the name of this rank's device, for the name that the user gave.

    Raises SpecgenError if the name is that of a single device, which all ranks would share, or if
    there are fewer GPUs than ranks.
    """
    if name not in ("auto", "cpu", "cuda"):
        problem = f"--device is {name}, and under torchrun each process has a device of its own"
        raise SpecgenError(problem, "Take auto, cpu or cuda")
    if name == "cpu" or not torch.cuda.is_available():
        return "cpu" if name == "auto" else name
    if launched.local_ranks > (count := torch.cuda.device_count()):
        problem = (
            f"torchrun has started {launched.local_ranks} processes, and this "
            f"machine has {count} GPUs"
        )
        raise SpecgenError(problem, f"Take --nproc-per-node {count}, or --device cpu")
    return f"cuda:{launched.local_rank}"
