"""Energy of runs in joules, from NVML's total-energy counters for NVIDIA GPUs and from RAPL's for CPUs under Linux.

Idle power is measured first, on the same counters, and subtracted. Counters cover everything that runs on a device, other
programs included. torch is imported on use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Protocol

RAPL = Path("/sys/class/powercap")
IDLE_SECONDS = 2.0
_TICK = 0.25  # seconds to wait for a counter to change
_WATCH = 20.0  # seconds between readings of a counter that wraps around, the smallest after minutes


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy above idle over `seconds`. Without a counter `joules` and the rest are None, and `reason` says why."""

    source: str
    joules: float | None = None
    idle_watts: float | None = None
    seconds: float | None = None
    reason: str | None = None

    def __add__(self, other: Energy) -> Energy:
        """The energy of two runs on the same devices; unknown where that of either is."""
        if self.joules is None or other.joules is None:
            return self if self.joules is None else other
        assert self.seconds is not None and other.seconds is not None  # noqa: PT018
        assert self.idle_watts is not None and other.idle_watts is not None  # noqa: PT018
        seconds = self.seconds + other.seconds
        idle = (self.idle_watts * self.seconds + other.idle_watts * other.seconds) / seconds if seconds else self.idle_watts
        return Energy(self.source, self.joules + other.joules, idle, seconds)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class UnavailableError(Exception):
    """There is no counter to read; the message says why in a few words."""


class Counter(Protocol):
    """An energy counter. `joules` starts at an arbitrary value; `wraps` says whether it has to be read regularly."""

    name: str
    wraps: bool

    def joules(self) -> float: ...


class GpuCounter:
    """NVML's total energy of one GPU since its driver was loaded."""

    wraps = False

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.name = f"NVML {nvml.nvmlDeviceGetName(handle)}"

    def joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3


class RaplZone:
    """One RAPL zone in sysfs: a package, or its memory. The counter restarts at 0 at the end of its range."""

    wraps = True

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self.name = f"RAPL {(folder / 'name').read_text().strip()}"
        self._lock = Lock()
        self._last = int(self._file.read_text())
        self._microjoules = 0

    def joules(self) -> float:
        """Energy since this object was created. Has to be called at least once between two wraps of the counter."""
        with self._lock:
            now = int(self._file.read_text())
            self._microjoules += now - self._last + (self._range if now < self._last else 0)
            self._last = now
            return self._microjoules / 1e6


class NoEnergyMeter:
    """Has the interface of `EnergyMeter` where nothing can be measured."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def start(self) -> None:
        """Does nothing."""

    def stop(self) -> Energy:
        return Energy("unavailable", reason=self.reason)


class EnergyMeter:
    """Measures the energy of one run after another. The first `start` measures idle power, which takes some seconds.

    A reading waits until the counter changes, so that a coarse counter (NVML's changes ten times per second) is exact too.
    """

    def __init__(self, counters: Sequence[Counter], synchronize: Callable[[], None], idle_seconds: float = IDLE_SECONDS) -> None:
        self._counters = counters
        self._synchronize = synchronize
        self._idle_seconds = idle_seconds
        self._idle: list[float] | None = None
        self._start_readings: list[tuple[float, float]] = []
        self._stopped = Event()

    def start(self) -> None:
        if self._idle is None:
            before = self._read()
            time.sleep(self._idle_seconds)
            spans = [_span(*pair) for pair in zip(before, self._read(), strict=True)]
            self._idle = [joules / seconds for seconds, joules in spans]
        self._stopped.clear()
        self._start_readings = self._read()
        if any(counter.wraps for counter in self._counters):
            Thread(target=self._watch, args=(self._stopped,), daemon=True).start()

    def stop(self) -> Energy:
        """The energy since `start`."""
        assert self._idle is not None
        ended = self._read()
        self._stopped.set()
        self._stopped = Event()
        spans = [_span(*pair) for pair in zip(self._start_readings, ended, strict=True)]
        source = ", ".join(counter.name for counter in self._counters)
        if not all(joules > 0 for _, joules in spans):
            return Energy("unavailable", reason=f"{source} does not count")
        above = sum(joules - watts * seconds for (seconds, joules), watts in zip(spans, self._idle, strict=True))
        return Energy(source, above, sum(self._idle), max(seconds for seconds, _ in spans))

    def _read(self) -> list[tuple[float, float]]:
        """Time and value of each counter, once the devices have finished their queued work."""
        self._synchronize()
        return [_read_at_change(counter) for counter in self._counters]

    def _watch(self, stopped: Event) -> None:
        while not stopped.wait(_WATCH):
            for counter in self._counters:
                with suppress(OSError):
                    counter.joules()


def _read_at_change(counter: Counter) -> tuple[float, float]:
    first = found = counter.joules()
    end = time.perf_counter() + _TICK
    while found == first and time.perf_counter() < end:
        found = counter.joules()
    return time.perf_counter(), found


def _span(begin: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    """Seconds and joules between two readings."""
    return end[0] - begin[0], end[1] - begin[1]


def energy_meter_for(devices: Sequence[Any], root: Path = RAPL) -> EnergyMeter | NoEnergyMeter:
    """A meter for these torch devices."""
    kinds = {device.type for device in devices}
    try:
        if other := kinds - {"cuda", "cpu"}:
            raise UnavailableError(f"{min(other)} has no energy counter")
        counters: list[Counter] = []
        synchronize: Callable[[], None] = _nothing
        if "cuda" in kinds:
            import torch

            indices = sorted({device.index or 0 for device in devices if device.type == "cuda"})
            counters += _gpus([str(torch.cuda.get_device_properties(index).uuid) for index in indices])

            def synchronize() -> None:
                for index in indices:
                    torch.cuda.synchronize(index)

        if "cpu" in kinds:
            counters += _zones(root)
        return EnergyMeter(counters, synchronize)
    except UnavailableError as error:
        return NoEnergyMeter(str(error))


def _nothing() -> None:
    """A CPU has no queued work."""


def _gpus(uuids: Sequence[str]) -> list[Counter]:
    """Counters of the GPUs with these UUIDs: NVML's numbering ignores CUDA_VISIBLE_DEVICES."""
    try:
        import pynvml
    except ImportError:
        raise UnavailableError("nvidia-ml-py is not installed (pip install specgen[energy])") from None
    found: list[Counter] = []
    try:
        pynvml.nvmlInit()
        for uuid in uuids:
            counter = GpuCounter(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"))
            counter.joules()
            found.append(counter)
    except pynvml.NVMLError as error:
        raise UnavailableError(f"NVML: {error}") from None
    return found


def _zones(root: Path) -> list[Counter]:
    """Counters of packages and of their memory. Other zones are part of a package (cores) or contain all of them (platform)."""
    found: list[Counter] = []
    for folder in sorted(root.glob("intel-rapl:*")):  # AMD's zones have this name too
        try:
            name = (folder / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                found.append(RaplZone(folder))
        except PermissionError:
            raise UnavailableError(f"{folder / 'energy_uj'} is readable by root only") from None
        except (OSError, ValueError):
            raise UnavailableError(f"{folder} cannot be read") from None
    if not any("package" in counter.name for counter in found):
        raise UnavailableError("no RAPL counters")
    return found
