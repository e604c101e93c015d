"""Measures the energy of generations in joules: of NVIDIA GPUs by NVML's total-energy counters, of CPUs under Linux by RAPL's
counters.

Idle power is measured first with the same counters, and subtracted; the gross energy is reported too. A counter covers everything
that runs on its device, other programs included. torch is imported only when a GPU counter is made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

RAPL = Path("/sys/class/powercap")
IDLE_SECONDS = 2.0
_TICK = 0.25  # longest wait for a counter to change, in seconds
_WATCH = 20.0  # seconds between readings of RAPL counters, the smallest of which restart after minutes


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy used in `seconds` seconds: `joules` beyond what the idle devices use, `gross_joules` in all.

    `source` names the counters. If there is none, all numbers are None and `reason` says why.
    """

    source: str
    joules: float | None = None
    idle_watts: float | None = None
    seconds: float | None = None
    reason: str | None = None
    gross_joules: float | None = None

    def __add__(self, other: Energy) -> Energy:
        """The total energy of two runs on the same devices. It is unknown if the energy of either run is unknown."""
        if self.joules is None or other.joules is None:
            return self if self.joules is None else other
        assert self.seconds is not None and other.seconds is not None  # noqa: PT018
        assert self.idle_watts is not None and other.idle_watts is not None  # noqa: PT018
        assert self.gross_joules is not None and other.gross_joules is not None  # noqa: PT018
        seconds = self.seconds + other.seconds
        idle = (self.idle_watts * self.seconds + other.idle_watts * other.seconds) / seconds if seconds else self.idle_watts
        gross = self.gross_joules + other.gross_joules
        return Energy(self.source, self.joules + other.joules, idle, seconds, gross_joules=gross)


class UnavailableError(Exception):
    """No energy counter can be read. The message says why in a few words."""


class GpuCounter:
    """NVML's counter of the total energy that one GPU has used since its driver was loaded. Before each reading the GPU finishes
    its queued work."""

    def __init__(self, nvml: Any, index: int) -> None:
        """`nvml` is the module `pynvml`. `index` is the GPU's index in torch. The GPU is looked up by its UUID, because NVML's
        own indices ignore CUDA_VISIBLE_DEVICES."""
        import torch

        uuid = str(torch.cuda.get_device_properties(index).uuid)
        self._nvml, self._synchronize = nvml, partial(torch.cuda.synchronize, index)
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        self.name = f"NVML {nvml.nvmlDeviceGetName(self._handle)}"

    def joules(self) -> float:
        """Returns the counter's value in joules. Raises UnavailableError if NVML cannot read it."""
        self._synchronize()
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._nvml.NVMLError as error:
            raise UnavailableError(f"NVML: {error}") from None


class RaplZone:
    """The energy counter of one RAPL zone in Linux's sysfs: a processor package, or its memory. At the end of its range the
    counter restarts at 0."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self.name = f"RAPL {(folder / 'name').read_text().strip()}"
        self._lock = Lock()
        self._last = int(self._file.read_text())
        self._microjoules = 0

    def joules(self) -> float:
        """Returns the energy in joules since this object was created. It has to be called at least once between two restarts of
        the counter. Raises UnavailableError if it cannot be read."""
        with self._lock:
            try:
                now = int(self._file.read_text())
            except (OSError, ValueError):
                raise UnavailableError(f"{self._file} cannot be read") from None
            self._microjoules += now - self._last + (self._range if now < self._last else 0)
            self._last = now
            return self._microjoules / 1e6


class EnergyMeter:
    """Measures the energy of one run after another, each from `start` to `stop`. The first `start` also measures idle power,
    which takes some seconds.

    Each reading waits until the counter changes, so that a coarse counter (NVML's changes ten times per second) gives exact
    results. Without counters nothing is measured, and `reason` says why. A counter that can no longer be read ends the measuring
    in the same way: the run and those after it have no figure.
    """

    def __init__(
        self, counters: Sequence[GpuCounter | RaplZone], reason: str | None = None, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self.counters, self.reason = counters, reason
        self._idle_seconds = idle_seconds
        self._idle: list[float] | None = None  # idle power in watts, for each counter
        self._start_readings: list[tuple[float, float]] = []
        self._stopped = Event()

    def start(self) -> None:
        try:
            if self._idle is None:
                before = self._read()
                time.sleep(self._idle_seconds if self.counters else 0)
                self._idle = [joules / seconds for seconds, joules in self._since(before)]
            self._start_readings = self._read()
        except UnavailableError as error:
            self._give_up(error)
        self._stopped = Event()
        zones = [counter for counter in self.counters if isinstance(counter, RaplZone)]
        if zones:
            Thread(target=_watch, args=(zones, self._stopped), daemon=True).start()

    def stop(self) -> Energy:
        """Returns the energy used since `start`, with and without what the idle devices use."""
        self.close()
        try:
            spans = self._since(self._start_readings)
        except UnavailableError as error:
            spans = []
            self._give_up(error)
        source = ", ".join(counter.name for counter in self.counters)
        if self.reason is not None or not all(joules > 0 for _, joules in spans):
            return Energy("unavailable", reason=self.reason or f"{source} does not count")
        assert self._idle is not None
        above = sum(joules - watts * seconds for (seconds, joules), watts in zip(spans, self._idle, strict=True))
        gross = sum(joules for _, joules in spans)
        return Energy(source, above, sum(self._idle), max(seconds for seconds, _ in spans), gross_joules=gross)

    def close(self) -> None:
        """Ends a measurement that `stop` does not end, because the run failed."""
        self._stopped.set()

    def _give_up(self, error: UnavailableError) -> None:
        self.counters, self.reason = (), str(error)
        self._start_readings = []

    def _read(self) -> list[tuple[float, float]]:
        """Reads each counter: the time in seconds, and the counter's value in joules."""
        return [_read_at_change(counter) for counter in self.counters]

    def _since(self, before: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """The seconds and joules of each counter since the readings `before`."""
        return [(end[0] - begin[0], end[1] - begin[1]) for begin, end in zip(before, self._read(), strict=True)]


def _watch(zones: Sequence[RaplZone], stopped: Event) -> None:
    """Reads the counters from time to time until `stopped` is set, so that no restart of a counter is missed in a long run."""
    while not stopped.wait(_WATCH):
        for zone in zones:
            with suppress(UnavailableError):
                zone.joules()


def _read_at_change(counter: GpuCounter | RaplZone) -> tuple[float, float]:
    first = found = counter.joules()
    end = time.perf_counter() + _TICK
    while found == first and time.perf_counter() < end:
        found = counter.joules()
    return time.perf_counter(), found


def energy_meter_for(devices: Sequence[Any], root: Path = RAPL) -> EnergyMeter:
    """Makes a meter for these torch devices. If their energy cannot be measured, the meter has no counters and its `reason` says
    why."""
    kinds = {device.type for device in devices}
    try:
        if other := kinds - {"cuda", "cpu"}:
            raise UnavailableError(f"{min(other)} has no energy counter")
        gpus = _gpus(sorted({device.index or 0 for device in devices if device.type == "cuda"}))
        return EnergyMeter([*gpus, *(_zones(root) if "cpu" in kinds else [])])
    except UnavailableError as error:
        return EnergyMeter([], str(error))


def _gpus(indices: Sequence[int]) -> list[GpuCounter]:
    if not indices:
        return []
    try:
        import pynvml
    except ImportError:
        raise UnavailableError("nvidia-ml-py is not installed (pip install specgen[energy])") from None
    try:
        pynvml.nvmlInit()
        found = [GpuCounter(pynvml, index) for index in indices]
        for counter in found:
            counter.joules()
    except pynvml.NVMLError as error:
        raise UnavailableError(f"NVML: {error}") from None
    except AttributeError:  # a build of torch for other GPUs
        raise UnavailableError("torch does not name the GPU's UUID") from None
    return found


def _zones(root: Path) -> list[RaplZone]:
    """Returns the RAPL counters of processor packages and of their memory. The other zones are not used: they are parts of a
    package (cores) or contain all packages (platform), so energy would be counted twice."""
    found: list[RaplZone] = []
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
