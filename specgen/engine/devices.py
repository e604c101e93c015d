"""Chooses the device, the dtype and the number of CPU threads: what the user asks for, or else what suits the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from specgen.engine.model_shape import ModelShape
from specgen.errors import SpecgenError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MAX_SECONDS = 2.0  # work that takes longer is not timed repeatedly
_MIN_THREAD_SPEEDUP = 1.2  # more threads are used only if they are this many times as fast
_MAX_THREADS = torch.get_num_threads()  # before `pick_threads` changes it
_MIN_NARROW_SPEEDUP = 1.3  # a CPU uses a 16-bit dtype only if it is this many times as fast as float32: above measurement noise


def pick_device(name: str) -> torch.device:
    """Returns the device named `name`: auto, cpu, cuda, cuda:N or mps. `auto` prefers CUDA, then MPS, then the CPU.

    Raises SpecgenError if the machine does not have the device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SpecgenError(f"there is no device {name!r}", "Take auto, cpu, cuda, cuda:N or mps") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise SpecgenError(f"the device {name!r} is not supported", "Take auto, cpu, cuda, cuda:N or mps")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            why = "finds no GPU" if torch.version.cuda else "was built without CUDA"
            raise SpecgenError(
                f"no CUDA device: torch {torch.__version__} {why}",
                "Leave --device out to use the CPU, or install a CUDA build of torch",
            )
        count, index = torch.cuda.device_count(), device.index or 0
        if index >= count:
            raise SpecgenError(f"there is no device cuda:{index}", f"This machine has {count}: cuda:0 to cuda:{count - 1}")
        return torch.device("cuda", index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SpecgenError("no MPS device: this torch or this machine has none", "Leave --device out to use what is there")
    return torch.device(device.type)


def device_name(device: torch.device) -> str:
    """Returns the device as text, for a CUDA device with the GPU's product name, because measurements hold for one GPU only."""
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a CPU tensor in memory from which a copy to `device`, if this is a GPU, does not make the host wait.

    Torch uses that memory again only after copies from it, made with `non_blocking`, have ended.
    """
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy of a CPU tensor on `device`, without waiting for a GPU; on a CPU the tensor itself."""
    if device.type == "cpu":
        return tensor
    return pinned(tensor, device).to(device, non_blocking=device.type == "cuda")


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """Returns a function that waits until the device has finished its queued work; None for a CPU, which queues nothing."""
    if device.type == "cuda":  # this stream only: a draft may run on another
        return lambda: torch.cuda.current_stream(device).synchronize()
    return torch.mps.synchronize if device.type == "mps" else None


def pick_dtype(name: str, shape: ModelShape, folder: Path, device: torch.device) -> torch.dtype:
    """Returns the dtype named `name`.

    `auto` takes the dtype that the model's config names. On a CPU it takes float32 instead of a 16-bit dtype, unless the 16-bit
    dtype is measured to be faster or weights in float32 might not fit into memory. Raises SpecgenError for an unknown name.
    """
    if name != "auto":
        if name not in DTYPES:
            raise SpecgenError(f"there is no dtype {name!r}", f"Take auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    own = DTYPES.get(str(shape.dtype), torch.float32)
    if device.type != "cpu" or own not in (torch.bfloat16, torch.float16):
        return own
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    free = free_memory(device)
    if free is not None and 2 * stored > 0.8 * free:  # float32 might not fit
        return own
    return own if _is_faster(own, shape.hidden_size, shape.intermediate_size) else torch.float32


def _is_faster(narrow: torch.dtype, hidden: int, intermediate: int | None) -> bool:
    """Whether the 16-bit dtype `narrow` is clearly faster than float32 on this CPU.

    Times the first matrix product of an MLP, from `hidden` to `intermediate` features, on 1 token and on 8.
    """

    def seconds(dtype: torch.dtype) -> float:
        weight = torch.zeros(intermediate or 4 * hidden, hidden, dtype=dtype)
        total = 0.0
        for tokens in (1, 8):
            hidden_states = torch.zeros(tokens, hidden, dtype=dtype)
            samples = []
            for _ in range(7):
                start = time.perf_counter()
                torch.nn.functional.linear(hidden_states, weight)
                samples.append(time.perf_counter() - start)
            total += median(samples[2:])
        return total

    with torch.inference_mode():
        return seconds(torch.float32) > _MIN_NARROW_SPEEDUP * seconds(narrow)


def pick_threads(work: Callable[[], object]) -> None:
    """Sets torch's number of CPU threads to the smallest with which `work` is nearly as fast as with the fastest number.

    Tries one thread, half of them and all. A small model gains little from a second thread, and on a busy machine threads wait
    for each other at every matrix product, which was measured to be twenty times slower. Does nothing if the user has set
    `OMP_NUM_THREADS`, or if `work` takes more than `_MAX_SECONDS`, as with a large model.
    """
    all_threads = torch.get_num_threads()
    if all_threads == 1 or "OMP_NUM_THREADS" in os.environ:
        return
    start = time.perf_counter()
    work()
    if time.perf_counter() - start > _MAX_SECONDS:
        return
    candidates = sorted({1, all_threads // 2, all_threads})
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(3):  # in turn, so that a machine that slows down affects all alike
        for threads in candidates:
            torch.set_num_threads(threads)
            start = time.perf_counter()
            work()
            taken = time.perf_counter() - start
            best[threads] = min(best[threads], taken)
            if taken > _MAX_SECONDS:
                torch.set_num_threads(all_threads)
                return
    fastest = min(best.values())
    torch.set_num_threads(next(threads for threads in candidates if best[threads] <= _MIN_THREAD_SPEEDUP * fastest))


def split_threads() -> tuple[int, int]:
    """Returns the numbers of CPU threads for the target and for the draft model if both run on the CPU at the same time."""
    draft = max(1, _MAX_THREADS // 4)
    return max(1, _MAX_THREADS - draft), draft


def free_memory(device: torch.device) -> int | None:
    """Free memory of the device in bytes; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if device.type == "cpu" else None
    except (AttributeError, OSError, ValueError):
        return None
