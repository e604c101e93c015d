"""Joins the processes that torchrun has started, and ends all of them when one has ended.

Messages and, on CPUs, the layers' sums go through gloo, sums between GPUs through NCCL. Failures and signs of life go through
torchrun's store, which works also while an operation waits.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from specgen.base import heartbeat
from specgen.base.errors import RunError, SpecgenError, is_out_of_memory
from specgen.base.heartbeat import INTERVAL, LOOK, SilenceWatch, beat_while_parent_lives
from specgen.base.machine import Launch, launch
from specgen.engine.model_loading import PreparedModel, check_weight_files
from specgen.engine.spread.distributed_model import DistributedModel
from specgen.engine.spread.follower import Follower
from specgen.engine.spread.leader import Leader
from specgen.engine.spread.ranks import LostRankError

_FOREVER = timedelta(days=365)  # rank 0 may be idle for any time between two passes
_GRACE = 5.0  # seconds in which an operation that waits for a rank that has ended should notice it itself
_JOB, _FAILURE, _BEATS, _ENDED = "specgen/job", "specgen/failure", "specgen/beats/{}", "specgen/ended"
_END = b"end"


class ProcessRanks:
    """The processes of torch.distributed's group. Implements `ranks.Ranks`."""

    def __init__(self, rank: int, size: int, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    def sum(self, tensor: torch.Tensor) -> None:
        _checked(dist.all_reduce, tensor, group=self._group)

    def gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor] | None:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        _checked(dist.gather, tensor, parts, dst=0, group=self._group)
        return parts

    def broadcast(self, tensor: torch.Tensor) -> None:
        _checked(dist.broadcast, tensor, 0, group=self._group)


def _checked(operation: Callable[..., object], *arguments: object, **options: object) -> None:
    try:
        operation(*arguments, **options)
    except (RuntimeError, ValueError) as error:  # gloo's own errors are plain RuntimeErrors
        raise LostRankError(str(error)) from error


def _store() -> Any:
    """Returns a connection to the store that torchrun serves; each thread has to have its own."""
    found, _, _ = next(iter(rendezvous("env://")))
    return found


def _join(launched: Launch, store: Any, device: torch.device) -> ProcessRanks:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = None
    if dist.is_initialized():  # by the caller, perhaps without gloo
        group = dist.new_group(backend=backend, timeout=_FOREVER)
    else:
        dist.init_process_group(backend, store=store, rank=launched.rank, world_size=launched.ranks, timeout=_FOREVER)
    return ProcessRanks(launched.rank, launched.ranks, group)


def device_of_rank(launched: Launch, name: str) -> str:
    """Returns the name of this rank's device, for the name that the user gave. Raises SpecgenError for one device for all."""
    if name not in ("auto", "cpu", "cuda"):
        raise SpecgenError(
            f"--device is {name}, and under torchrun each process has a device of its own", "Take auto, cpu or cuda"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return "cpu" if name == "auto" else name
    count = torch.cuda.device_count()
    if launched.local_ranks > count:
        raise SpecgenError(
            f"torchrun has started {launched.local_ranks} processes, and this machine has {count} GPUs",
            f"Take --nproc-per-node {count}, or --device cpu",
        )
    return f"cuda:{launched.local_rank}"


# rank 0


class _Connection:
    """Rank 0's connection to the other ranks, made when the first model is loaded."""

    def __init__(self) -> None:
        self.leader: Leader | None = None
        self._store: Any = None
        self._ending = threading.Event()
        self._watch: threading.Thread | None = None
        self._is_own_group = False

    def open(self, device: torch.device) -> Leader:
        """Joins the other ranks for models on this kind of device, unless it has done so."""
        if self.leader is None:
            launched = launch()
            assert launched is not None
            self._store = _store()
            self._store.set(_JOB, device.type)
            self._is_own_group = not dist.is_initialized()
            leader = Leader(_join(launched, self._store, device), self._reported)
            self.leader = leader
            atexit.register(self.close)
            if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._terminated)
            self._watch = threading.Thread(target=_watch, args=(leader, _store(), self._ending), daemon=True)
            self._watch.start()
        return self.leader

    def close(self) -> None:
        """Lets the other ranks end."""
        if self._ending.is_set():
            return
        if self.leader is not None:
            self.leader.end()
            self._ending.set()
            if self._watch is not None:
                self._watch.join(_GRACE)
            if self._is_own_group:
                dist.destroy_process_group()
        elif self._store is None:
            self._store = _store()
            self._store.set(_JOB, _END)
            self._wait_for_others()

    def _wait_for_others(self) -> None:
        """Waits some seconds for the other ranks to read the job, if the store ends with this process, as without torchrun."""
        launched, until = launch(), time.monotonic() + 2 * _GRACE
        assert launched is not None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            with suppress(RuntimeError):
                while self._store.add(_ENDED, 0) < launched.ranks - 1 and time.monotonic() < until:
                    time.sleep(INTERVAL / 10)

    def _reported(self) -> str | None:
        try:
            return str(self._store.get(_FAILURE).decode()) if self._store.check([_FAILURE]) else None
        except RuntimeError:  # the store has ended
            return None

    def _terminated(self, signum: int, frame: FrameType | None) -> None:
        """Torchrun ends all processes as soon as it notices that one was killed."""
        leader = self.leader
        if leader is not None and leader.failure is None:
            leader.fail("torchrun has ended it, as it does when one of its processes was killed")
            raise leader.error()


_connection = _Connection()


def load_distributed(
    prepared: PreparedModel, dtype: torch.dtype, device: torch.device, layer_devices: object = None
) -> DistributedModel:
    """Loads a model on all ranks; called on rank 0. Raises SpecgenError for a model that cannot be split, or cannot be loaded."""
    if prepared.architecture is None:
        raise SpecgenError(
            f"{prepared.name} cannot be split over torchrun's processes: transformers runs it ({prepared.fallback})",
            "Run it without torchrun, with --device auto-map where it does not fit into one device",
        )
    check_weight_files(prepared.folder, prepared.name)
    try:
        leader = _connection.open(device)
        return DistributedModel(
            leader, prepared.folder, prepared.name, prepared.architecture, dtype=dtype, device=device, exact=prepared.source.exact
        )
    except Exception as error:
        if not is_out_of_memory(error) or isinstance(error, SpecgenError):
            raise
        hint = "Try --dtype bfloat16, a smaller model or more processes"
        raise RunError(f"a part of {prepared.name} does not fit into the memory of {device}", hint) from error


def end() -> None:
    """Lets the other ranks end; called on rank 0 when it ends."""
    _connection.close()


def _watch(leader: Leader, store: Any, ending: threading.Event) -> None:
    """Notices on rank 0 that another rank has failed, is killed or hangs, and ends a run that waits for it all the same.

    For a thread. An operation on CPUs ends itself when another process ends; one on GPUs may wait forever.
    """
    parent, ranks = os.getppid(), range(1, leader.ranks.size)
    watches = {rank: SilenceWatch(partial(_beats, store, rank)) for rank in ranks}
    noticed: float | None = None
    while not ending.wait(LOOK):
        if leader.failure is None:
            try:
                silent = [rank for rank, watch in watches.items() if watch.is_over()]
                if silent:
                    leader.fail(f"process {silent[0]} gave no sign of life for {heartbeat.LONGEST_SILENCE:g} seconds")
                elif os.getppid() != parent or store.check([_FAILURE]):
                    leader.fail()
            except RuntimeError:
                leader.fail("torchrun has ended")
        elif leader.in_call:
            noticed = noticed or time.monotonic()
            if time.monotonic() - noticed >= _GRACE:
                print(f"error: {leader.error()}", file=sys.stderr, flush=True)
                os._exit(RunError.exit_code)


def _beats(store: Any, rank: int) -> int:
    return int(store.add(_BEATS.format(rank), 0))


# the other ranks


def follow_unless_first() -> None:
    """Returns on rank 0. Does on another rank what rank 0 announces, then ends this process with exit code 0; it writes nothing.

    The exit code says nothing about failures, since torchrun would end rank 0 before it has reported the failure.
    """
    launched = launch()
    if launched is None or launched.rank == 0:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends, and this rank with it
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    try:
        _follow(launched)
    finally:
        os._exit(0)  # without waiting for connections to processes that have ended


def _follow(launched: Launch) -> None:
    store = _store()
    beat = partial(_beat, _store(), launched.rank)
    threading.Thread(target=beat_while_parent_lives, args=(beat, os.getppid()), daemon=True).start()
    while not store.check([_JOB]):
        time.sleep(INTERVAL / 10)
    kind = store.get(_JOB)
    if kind == _END:
        store.add(_ENDED, 1)
        return
    try:
        device = torch.device("cpu" if kind == b"cpu" else f"cuda:{launched.local_rank}")
        Follower(_join(launched, store, device), device).run()
    except LostRankError:
        raise
    except BaseException as error:
        store.set(_FAILURE, f"process {launched.rank}: {_in_words(error)}")
        raise


def _beat(store: Any, rank: int) -> None:
    try:
        store.add(_BEATS.format(rank), 1)
    except RuntimeError:  # torchrun has ended, and the other ranks with it
        os._exit(0)


def _in_words(error: BaseException) -> str:
    if is_out_of_memory(error):
        return "out of memory"
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, SpecgenError) else f"{type(error).__name__}: {text}"
