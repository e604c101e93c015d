"""Which device, which dtype: what the user asked for if it is there, else what suits this machine."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specgen.errors import SpecgenError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LONG = 2.0  # seconds: work that takes longer is not worth timing again and again
WORTH_A_THREAD = 1.2  # more threads have to be this much faster
_MOST_THREADS = torch.get_num_threads()  # before anything chose another number
WORTH_NARROWING = 1.3  # a narrower dtype has to be this much faster on a CPU, so that noise never changes the choice


def pick_device(name: str) -> torch.device:
    """The device that `name` stands for (auto, cpu, cuda, cuda:N, mps). Raises SpecgenError where it is not there."""
    if name == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return pick_device(kind)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SpecgenError(f"there is no device {name!r}", "Take auto, cpu, cuda, cuda:N or mps") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise SpecgenError(f"the device {name!r} is not supported", "Take auto, cpu, cuda, cuda:N or mps")
    if device.type == "cuda":
        return _cuda(device)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SpecgenError("no MPS device: this torch or this machine has none", "Leave --device out to use what is there")
    return torch.device(device.type)


def _cuda(device: torch.device) -> torch.device:
    if not torch.cuda.is_available():
        why = "finds no GPU" if torch.version.cuda else "was built without CUDA"
        raise SpecgenError(
            f"no CUDA device: torch {torch.__version__} {why}",
            "Leave --device out to use the CPU, or install a CUDA build of torch",
        )
    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        raise SpecgenError(f"there is no device cuda:{index}", f"This machine has {count}: cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """Which device it is, and for a GPU which card: what was measured on another one says nothing."""
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """What waits for the device, None on a CPU."""
    if device.type == "cuda":  # the stream alone: a draft may be at work on another
        return lambda: torch.cuda.current_stream(device).synchronize()
    return torch.mps.synchronize if device.type == "mps" else None


def pick_dtype(name: str, config: Any, folder: Path, device: torch.device) -> torch.dtype:
    """The dtype that `name` stands for; `auto` is the weights' own on an accelerator, what is measured to be faster on a CPU."""
    if name != "auto":
        if name not in DTYPES:
            raise SpecgenError(f"there is no dtype {name!r}", f"Take auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    own = config.dtype if isinstance(config.dtype, torch.dtype) else DTYPES.get(str(config.dtype), torch.float32)
    if device.type != "cpu" or own not in (torch.bfloat16, torch.float16):
        return own
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if 2 * stored > 0.8 * _free_memory():
        return own
    return own if _is_faster(own, config.hidden_size, getattr(config, "intermediate_size", None)) else torch.float32


def _is_faster(narrow: torch.dtype, hidden: int, intermediate: int | None) -> bool:
    """Whether products of this model's shape are clearly faster in `narrow` than in float32, for 1 token and for 8."""

    def seconds(dtype: torch.dtype) -> float:
        weight = torch.zeros(intermediate or 4 * hidden, hidden, dtype=dtype)
        total = 0.0
        for rows in (1, 8):
            x = torch.zeros(rows, hidden, dtype=dtype)
            samples = []
            for _ in range(7):
                start = time.perf_counter()
                torch.nn.functional.linear(x, weight)
                samples.append(time.perf_counter() - start)
            total += median(samples[2:])
        return total

    with torch.inference_mode():
        return seconds(torch.float32) > WORTH_NARROWING * seconds(narrow)


def pick_threads(work: Callable[[], object]) -> None:
    """Set torch's threads on a CPU to the fewest that make `work` nearly as fast as it gets; leave a user's choice alone.

    A small model gains little from a second thread, and on a busy machine the threads wait for one another at every product:
    twenty times slower was measured. Work that takes long is a large model's, which wants them all.
    """
    most = torch.get_num_threads()
    if most == 1 or "OMP_NUM_THREADS" in os.environ:
        return
    start = time.perf_counter()
    work()
    if time.perf_counter() - start > _LONG:
        return
    candidates = sorted({1, most // 2, most})
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(3):  # in turn, so that a drifting machine is fair to all
        for threads in candidates:
            torch.set_num_threads(threads)
            start = time.perf_counter()
            work()
            taken = time.perf_counter() - start
            best[threads] = min(best[threads], taken)
            if taken > _LONG:
                torch.set_num_threads(most)
                return
    fastest = min(best.values())
    torch.set_num_threads(next(threads for threads in candidates if best[threads] <= WORTH_A_THREAD * fastest))


def split_threads() -> tuple[int, int]:
    """How many threads the target and the draft get where both run on the processor at the same time."""
    draft = max(1, _MOST_THREADS // 4)
    return max(1, _MOST_THREADS - draft), draft


def _free_memory() -> float:
    """Bytes of memory that are free, infinite where the system does not tell."""
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return float("inf")


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on the device; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _free_memory()
    return int(free) if device.type == "cpu" and math.isfinite(free) else None
