"""The installation, the machine on which measurements are made, and torchrun's processes. Imports
no torch."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# The version of the arithmetic: raised with each change after which a model's logits have other
# bits, because a text may then differ although no installed version does. Profiles, traces and
# cached measurements hold it.
ARITHMETIC = 2

# An environment variable for a process of specgen's own, to be set before it imports torch. Without
# it, torch's idle threads keep their cores busy, and on a machine with other work to do a pass can
# take ten times as long.
WAIT_PASSIVELY = {"OMP_WAIT_POLICY": "PASSIVE"}


_THREAD_VARIABLES = ("OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_", "ATEN_")


@dataclass(frozen=True, slots=True)
class Launch:
    """How torchrun started this process: as number `rank` (from 0) of `ranks` processes, and number
    `local_rank` (from 0) of `local_ranks` on its machine."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


def launch() -> Launch | None:
    """Returns how torchrun started this process; None if torchrun did not start it, or started only
    this one."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = [os.environ.get(name, "") for name in names]
    if (
        not all(map(str.isdecimal, values))
        or not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    ):
        return None
    launched = Launch(*map(int, values))
    return launched if launched.ranks > 1 else None


def versions() -> dict[str, str]:
    """Returns the versions of specgen, of its arithmetic, of Python, torch and transformers."""
    return {
        "specgen": __version__,
        "arithmetic": str(ARITHMETIC),
        "python": platform.python_version(),
        **_libraries(),
    }


@cache
def _libraries() -> dict[str, str]:
    from importlib.metadata import version  # slow to import, and not needed for --help

    return {name: version(name) for name in ("torch", "transformers")}


def machine() -> dict[str, Any]:
    """Returns what identifies this machine in cached measurements and tuning profiles, whose
    folders several machines may share.

    These are its name, processor and number of cores, and under torchrun the number of processes.
    """
    machine = {
        "node": platform.node(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    launched = launch()
    return machine if launched is None else machine | {"ranks": launched.ranks}


def thread_settings() -> dict[str, Any]:
    """Returns what decides how many CPU threads compute and how they wait: environment variables,
    and the usable cores."""
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_THREAD_VARIABLES)
    }
    return {"usable_cores": usable_cores(), **variables}


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_busy() -> bool:
    """Whether more programs want to run than there are cores, by the system's load average of the
    last minute. False where the system does not report it."""
    try:
        return os.getloadavg()[0] > usable_cores()
    except (AttributeError, OSError):
        return False


def machine_in_words() -> str:
    """Describes processor, number of cores, memory and operating system in one line."""
    return (
        f"{_processor()}, {os.cpu_count()} cores, {_memory()}{platform.system()} "
        f"{platform.release()}"
    )


def _processor() -> str:
    """The processor's name from Linux's /proc/cpuinfo. Where that is missing, the name that Python
    reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine()


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB, "
    except (AttributeError, OSError, ValueError):
        return ""
