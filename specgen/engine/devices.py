"""Chooses the device and the number of CPU threads: what the user asks for, or else what suits the
machine. Also what all code needs that runs on devices: copies between them, waiting for them, and
torch's inference mode."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path, PurePosixPath
from typing import ParamSpec, TypeVar

import torch

from specgen.base.errors import SpecgenError
from specgen.base.measuring import Sample, ThreadTimes, spread, timed

# the name that means all GPUs together, and the CPU's memory: see `spread.placement`
AUTO_MAP = "auto-map"
_NAMES = "Take auto, cpu, cuda, cuda:N or mps; for a target also auto-map"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_THREADS = torch.get_num_threads()  # before `pick_threads` changes it
_MAX_SECONDS = 2.0  # work that takes longer is not timed repeatedly
# spent on a choice of the number of threads, after the first round with each
_TIMING_SECONDS = 0.15
_ROOT = Path("/")  # of /proc and /sys
_MIN_THREAD_SPEEDUP = 1.2  # more threads are used only if they are this many times as fast


P = ParamSpec("P")
T = TypeVar("T")


def pick_device(name: str) -> torch.device:
    """Returns the device named `name`: auto, cpu, cuda, cuda:N or mps. `auto` prefers CUDA, then
    MPS, then the CPU.

    For `auto-map` returns the same as for `auto`; which layers go to other devices is planned
    later, when the models' sizes are known. Raises SpecgenError for an unknown name, or if the
    machine does not have the device.
    """
    if name in ("auto", AUTO_MAP):
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.backends.mps.is_available():
            name = "mps"
        else:
            name = "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SpecgenError(f"there is no device {name!r}", _NAMES) from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise SpecgenError(f"the device {name!r} is not supported", _NAMES)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            why = "finds no GPU" if torch.version.cuda else "was built without CUDA"
            raise SpecgenError(
                f"no CUDA device: torch {torch.__version__} {why}",
                "Leave --device out to use the CPU, or install a CUDA build of torch",
            )
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            raise SpecgenError(
                f"there is no device cuda:{index}",
                f"This machine has {count}: cuda:0 to cuda:{count - 1}",
            )
        return torch.device("cuda", index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SpecgenError(
            "no MPS device: this torch or this machine has none",
            "Leave --device out to use what is there",
        )
    return torch.device(device.type)


def pick_draft_device(name: str | None, target_name: str, target: torch.device) -> torch.device:
    """Returns the draft model's device: `name`, as for `pick_device`, or if that is None a second
    GPU where the target's was chosen by `auto`, else the target's device.

    `target_name` is the name that the device `target` was chosen by. Raises SpecgenError as
    `pick_device`, and for `auto-map`.
    """
    if name == AUTO_MAP:
        raise SpecgenError(
            "the draft model runs on one device, not on a map",
            "Name it, as in --draft-device cuda:1, or leave it out",
        )
    if name is not None:
        return pick_device(name)
    if target_name == "auto" and target.type == "cuda" and torch.cuda.device_count() > 1:
        return torch.device("cuda", 1 if target.index == 0 else 0)
    return target


def device_name(device: torch.device) -> str:
    """Returns the device as text, with the product name of a CUDA GPU, because measurements hold
    for one type of GPU only."""
    return (
        f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
    )


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a CPU tensor in page-locked memory if `device` is a GPU, so that the host need not
    wait for a copy; else the tensor itself.

    Torch does not reuse that memory before copies from it, made with `non_blocking`, have ended.
    """
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy of a CPU tensor on `device`, without waiting for a GPU; on a CPU the tensor
    itself."""
    if device.type == "cpu":
        return tensor
    return pinned(tensor, device).to(device, non_blocking=device.type == "cuda")


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in the CPU's memory: itself if it is there, or else a copy, for which the
    host waits. From a GPU, it is copied through page-locked memory."""
    if not tensor.is_cuda:
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the tensor on `device`: itself if it is there, or else a copy. The host waits only
    for a copy to the CPU."""
    if tensor.device == device:
        return tensor
    if device.type == "cpu":
        return download(tensor)
    return upload(tensor, device) if tensor.is_cpu else tensor.to(device, non_blocking=True)


def release(tensor: torch.Tensor) -> None:
    """Keeps a GPU tensor's memory from being reused before work that is queued on the current
    stream has read it.

    To be called before the tensor is dropped, where its memory may have been allocated on another
    stream. Does nothing for other devices.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """Returns a function that waits until the device has finished its queued work; None for a CPU,
    which queues nothing."""
    if device.type == "cuda":  # this stream only: a draft may run on another
        return lambda: torch.cuda.current_stream(device).synchronize()
    return torch.mps.synchronize if device.type == "mps" else None


class DeviceTimer:
    """Finds out when a GPU finishes work that was queued on the current stream. Use: `start`, then
    any number of `mark`s.

    The work is timed by CUDA events. Reading them after the host has waited for a result takes no
    further waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Begins a measurement. The device should have no work queued."""
        self._origin = self._event()
        self._started = time.perf_counter()

    def mark(self) -> Callable[[], float]:
        """Marks the end of the work queued so far. Returns a function that waits for this work and
        returns the time when it ended.

        The time is in seconds on the clock of `time.perf_counter`.
        """
        origin = self._origin
        started = self._started
        event = self._event()
        marked = time.perf_counter()

        def ended() -> float:
            event.synchronize()
            # no event ends before it is queued
            return max(marked, started + float(origin.elapsed_time(event)) / 1000)

        return ended

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))  # type: ignore[no-untyped-call]
        return event


def device_timer(device: torch.device) -> DeviceTimer | None:
    """Returns a timer for the work of a GPU. None for other devices: a CPU has done its work when a
    call returns."""
    return DeviceTimer(device) if device.type == "cuda" else None


def split_threads() -> tuple[int, int]:
    """Returns the numbers of CPU threads for the target and for the draft model if both run on the
    CPU at the same time."""
    draft = max(1, _MAX_THREADS // 4)
    return max(1, _MAX_THREADS - draft), draft


def free_memory(device: torch.device) -> int | None:
    """Free memory of the device in bytes; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    # Linux: with what the system keeps of files, and can drop
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(
            next(line for line in lines if line.startswith("MemAvailable:")).split()[1]
        )
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def total_memory() -> int | None:
    """The memory of this machine in bytes, or of the container that this process runs in if that
    has less; None if the system does not report it."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    return min([total, *_group_limits()])


def _group_limits() -> Iterator[int]:
    """Yields the most bytes of memory that each control group of this process may take, on
    Linux."""
    try:
        groups = (_ROOT / "proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return
    mounted = _ROOT / "sys/fs/cgroup"
    for line in groups:
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            yield from _limits_on_path(mounted, group, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_on_path(mounted / "memory", group, "memory.limit_in_bytes")


def _limits_on_path(mounted: Path, group: str, file: str) -> Iterator[int]:
    """Yields the limits of a group and of all groups around it.

    A container may see its own group as the root, and its path as the host names it.
    """
    path = PurePosixPath(group.lstrip("/"))
    for folder in [path, *path.parents]:
        with suppress(OSError, ValueError):  # "max", and no such file
            yield int((mounted / folder / file).read_text())


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """The number of CPU threads, and why it was chosen. `seconds` has the measured time for each
    number that was tried."""

    threads: int
    reason: str
    seconds: Mapping[int, float] = field(default_factory=dict)


def pick_threads(work: Callable[[], object]) -> Sample[ThreadChoice]:
    """Chooses the smallest number of CPU threads with which `work` is nearly as fast as with the
    fastest number. Returns a sample of this choice.

    `work` runs a round of decoding with the loaded models. Tries one thread, half of torch's number
    and all of it. A small model gains little from a second thread, and on a busy machine threads
    wait for each other at every matrix product, which was measured to be twenty times slower.

    The choice is torch's present number if this is 1 or the user has set `OMP_NUM_THREADS`, without
    running `work`, and also if `work` takes more than `_MAX_SECONDS`, as with a large model.

    The sample's spread is the largest of those of the times, or, if that is more, the time with one
    thread divided by its own processor time: beside busy programs all times may be long, and
    evenly, but the thread then waits for a processor. It is infinite where `work` is not run.
    """
    all_threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return Sample(ThreadChoice(all_threads, "OMP_NUM_THREADS is set"), 0, math.inf)
    if all_threads == 1:
        return Sample(ThreadChoice(1, "torch has one"), 0, math.inf)

    single = ThreadTimes()

    def run(threads: int) -> None:
        torch.set_num_threads(threads)
        if threads == 1:
            single.time(work)
        else:
            work()

    first = timed({all_threads: partial(run, all_threads)}, 1, 0.0, fewest=1, most=1)[all_threads][
        0
    ]
    if first > _MAX_SECONDS:
        return Sample(
            ThreadChoice(all_threads, "the models are large", {all_threads: first}), 1, 1.0
        )
    candidates = sorted({1, all_threads // 2, all_threads})
    samples = timed(
        {threads: partial(run, threads) for threads in candidates},
        0,
        _TIMING_SECONDS,
        fewest=2,
        most=4,
    )
    best = {threads: min(taken) for threads, taken in samples.items()}
    chosen = next(
        threads
        for threads in candidates
        if best[threads] <= _MIN_THREAD_SPEEDUP * min(best.values())
    )
    torch.set_num_threads(all_threads)
    choice = ThreadChoice(chosen, "the fewest of those that are nearly the fastest", best)
    scatter = max(map(spread, samples.values()))
    return Sample(choice, min(map(len, samples.values())), max(scatter, single.wait))


def inference(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates `function` to run in torch's inference mode: without gradients and autograd
    bookkeeping.

    If inference mode is on already when the function is called, this costs almost nothing, unlike
    torch's own decorator.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run
