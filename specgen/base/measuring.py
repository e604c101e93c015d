"""Measures time and energy, and reports how far the passes over a prompt are. Imports no torch but
for a GPU's energy.

Energy, in joules, is read from NVML's total-energy counters for NVIDIA GPUs, and from RAPL's
counters for CPUs under Linux.

Idle power is measured first with the same counters, and subtracted; the gross energy is reported
too. A counter covers everything that runs on its device, other programs included.

RAPL's counters restart at 0 at the end of their range, after 10 minutes or more: one restart during
a run is noticed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

RAPL = Path("/sys/class/powercap")
IDLE_SECONDS = 2.0
_TICK = 0.25  # longest wait for a counter to change, in seconds
STEADY = 1.5  # the largest spread of a sample that is kept
_FEWEST_CHECKED = 8  # passes of a run, from which on slow ones mean something
# factor between the times of measured passes and a run's, above which they are measured again
_LARGEST_FACTOR = 1.5
Key = TypeVar("Key")
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample(Generic[T]):
    """A measured `value`: the number of `repetitions` that it rests on, and the `spread` of their
    times (see `spread`)."""

    value: T
    repetitions: int
    spread: float

    @property
    def is_steady(self) -> bool:
        """Whether its times scatter little. On a busy machine they scatter, and say little about a
        quiet one."""
        return self.spread <= STEADY

    def holding(self, value: S) -> Sample[S]:
        """Returns the sample with its value in another form."""
        return Sample(value, self.repetitions, self.spread)


def spread(seconds: Sequence[float]) -> float:
    """Returns the upper quartile of the times divided by the lower one, at least 1. Infinite
    without times, and if one of them is not above 0."""
    ordered = sorted(seconds)
    if not ordered or ordered[0] <= 0:
        return math.inf
    quarter = len(ordered) // 4
    return ordered[-1 - quarter] / ordered[quarter]


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """Times of pieces of work: the `seconds` that each took, and the seconds in which the thread
    that did it ran (`own`).

    Beside busy programs a thread waits for a processor: then `seconds` may be long without
    scattering, but `own` are not long.
    """

    seconds: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)

    def time(self, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        own_start = time.thread_time()
        work()
        own = time.thread_time() - own_start
        self.add(time.perf_counter() - start, own)

    def add(self, seconds: float, own: float) -> None:
        self.seconds.append(seconds)
        self.own.append(own)

    @property
    def wait(self) -> float:
        """The sum of `seconds` divided by that of `own`: about 1 on a quiet machine, 1 if nothing
        was measured."""
        own = sum(self.own)
        return sum(self.seconds) / own if own > 0 else 1.0


def undisturbed(seconds: Sequence[float]) -> float:
    """Returns the lowest decile of the times, of which there has to be one: other programs make
    work longer, never shorter."""
    return sorted(seconds)[len(seconds) // 10]


class PassCheck:
    """Compares the times of a run's passes with measured ones, and calls `doubt` at its end if they
    are far from them."""

    def __init__(self, doubt: Callable[[], None]) -> None:
        self._doubt = doubt
        self._factors: dict[str, list[float]] = {}

    def add(self, kind: str, seconds: float, measured: float) -> None:
        """Adds a pass of this kind: the seconds that it took, and those that such a pass took when
        it was measured."""
        self._factors.setdefault(kind, []).append(seconds / measured)

    def end(self) -> None:
        for factors in self._factors.values():
            if len(factors) < 2:
                continue
            factor = undisturbed(factors)
            is_slower = factor > _LARGEST_FACTOR and len(factors) >= _FEWEST_CHECKED
            # nothing makes a pass shorter: a few are enough
            is_faster = factor * _LARGEST_FACTOR < 1
            if is_slower or is_faster:
                self._doubt()
                return


def timed(
    work: Mapping[Key, Callable[[], object]],
    warm_up: int,
    seconds: float,
    *,
    fewest: int = 3,
    most: int = 15,
    before: Callable[[], object] = lambda: None,
) -> dict[Key, list[float]]:
    """Calls each function in `work` several times. Returns the seconds of its counted calls, in
    order, under the same key.

    The functions take turns, so that a machine that becomes slower affects all alike. The first
    `warm_up` turns do not count. No turn begins later than `seconds` after the start, except that
    each function is counted at least `fewest` times; it is counted at most `most` times. `before`
    is called before each start of the clock (to empty a cache). A function that uses a GPU has to
    wait for it itself.
    """
    samples: dict[Key, list[float]] = {key: [] for key in work}
    deadline = time.perf_counter() + seconds
    for turn in range(warm_up + most):
        if turn >= warm_up + fewest and time.perf_counter() > deadline:
            break
        for key, run in work.items():
            before()
            start = time.perf_counter()
            run()
            taken = time.perf_counter() - start
            if turn >= warm_up:
                samples[key].append(taken)
    return samples


def distinct_ids(count: int, vocab_size: int) -> list[int]:
    """Returns `count` token ids, the same ones at each call, to time passes with. They are distinct
    if the vocabulary is large enough.

    In a mixture of experts, copies of one token would all be run by the same experts, and the pass
    would take less time than one over a text.
    """
    order = Random(0).sample(range(vocab_size), min(count, vocab_size))
    return [order[index % vocab_size] for index in range(count)]


class PrefillReports:
    """Tells an observer how many tokens of a long prompt have been run. Without an observer,
    reports are dropped.

    One object serves the whole process, because models report from several threads. The observer is
    called with a number that identifies the KV cache (heads and exit layers have caches of their
    own), the number of tokens that have been run, and the number to run in all. While a pass runs,
    its layers count as shares of its tokens.
    """

    def __init__(self) -> None:
        self._observer: Callable[[int, int, int], None] | None = None
        # of each thread: source, tokens before the pass, in it, and in all
        self._pass = threading.local()

    @contextmanager
    def to(self, observer: Callable[[int, int, int], None]) -> Iterator[None]:
        """Calls `observer` for each report until the `with` block ends."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def report(self, source: int, done: int, total: int) -> None:
        observer = self._observer  # another thread may end the observation meanwhile
        if observer is not None:
            observer(source, done, total)

    @contextmanager
    def within(self, source: int, done: int, size: int, total: int) -> Iterator[None]:
        """Lets `layer` report while the block runs a pass over `size` tokens in this thread.

        `source` identifies the KV cache. Of the prompt's `total` tokens, `done` were run before.
        """
        outer = getattr(self._pass, "running", None)
        self._pass.running = source, done, size, total
        try:
            yield
        finally:
            self._pass.running = outer

    def layer(self, done: int, layers: int) -> None:
        """Reports that `done` of the model's `layers` have run the pass, if it is one over a long
        prompt."""
        running = getattr(self._pass, "running", None)
        if self._observer is not None and running is not None:
            source, before, size, total = running
            self.report(source, before + size * done // layers, total)


prefill_reports = PrefillReports()


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy used in `seconds` seconds: `gross_joules` in all, and `joules` without what the
    devices use when idle (`idle_watts`).

    `source` names the counters. If nothing could be measured, it is `unavailable`, all numbers are
    None, and `reason` says why.
    """

    source: str
    joules: float | None = None
    idle_watts: float | None = None
    seconds: float | None = None
    reason: str | None = None
    gross_joules: float | None = None


@dataclass(frozen=True, slots=True)
class Counter:
    """A counter of energy. `read` returns joules, or raises an error. After `restart` joules the
    counter begins at 0 again."""

    name: str
    read: Callable[[], float]
    restart: float = math.inf


class EnergyMeter:
    """Measures the energy of one run after another, each from `start` to `stop`. The first `start`
    also measures idle power, for 2 s.

    Each reading waits until the counter changes, so that a coarse counter (NVML's changes ten times
    per second) gives exact results. Without counters nothing is measured, and `reason` says why. If
    a counter can no longer be read, `reason` says so, and this run and all later ones have no
    figures.
    """

    def __init__(self, counters: Sequence[Counter], reason: str | None = None) -> None:
        self.counters = counters
        self.reason = reason
        self._idle: list[float] | None = None  # idle power in watts, for each counter
        self._begin: list[tuple[float, float]] = []

    def start(self) -> None:
        if self._idle is None:
            before = self._readings()
            time.sleep(IDLE_SECONDS if self.counters else 0)
            self._idle = [joules / seconds for seconds, joules in self._since(before)]
        self._begin = self._readings()

    def stop(self) -> Energy:
        """Returns the energy used since `start`: in all, and without what the idle devices would
        have used."""
        spans = self._since(self._begin)
        source = ", ".join(counter.name for counter in self.counters)
        if self.reason is not None or not all(joules > 0 for _, joules in spans):
            return Energy("unavailable", reason=self.reason or f"{source} does not count")
        gross = sum(joules for _, joules in spans)
        idle = self._idle or []
        idle_joules = sum(watts * seconds for (seconds, _), watts in zip(spans, idle, strict=True))
        return Energy(
            source,
            gross - idle_joules,
            sum(idle),
            max(seconds for seconds, _ in spans),
            gross_joules=gross,
        )

    def _readings(self) -> list[tuple[float, float]]:
        """Reads each counter at the moment when it changes. Returns the time in seconds and the
        counter's joules for each.

        If a counter cannot be read, drops all counters, sets `reason` and returns no readings.
        """
        readings = []
        try:
            for counter in self.counters:
                first = joules = counter.read()
                end = time.perf_counter() + _TICK
                while joules == first and time.perf_counter() < end:
                    joules = counter.read()
                readings.append((time.perf_counter(), joules))
        except Exception as error:  # noqa: BLE001  NVML has errors of its own
            self.counters = ()
            self.reason = f"{counter.name} cannot be read: {error}"
            return []
        return readings

    def _since(self, before: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """The seconds and joules of each counter since the readings `before`."""
        return [
            (end - begin, now - then + (counter.restart if now < then else 0))
            for counter, (begin, then), (end, now) in zip(
                self.counters, before, self._readings(), strict=False
            )
        ]


def energy_meter_for(devices: Sequence[Any], root: Path = RAPL) -> EnergyMeter:
    """Makes a meter for these torch devices. If their energy cannot be measured, the meter has no
    counters and its `reason` says why."""
    types = {device.type for device in devices}
    try:
        others = types - {"cuda", "cpu"}
        if others:
            raise OSError(f"{min(others)} has no energy counter")
        gpus = _gpus(sorted({device.index or 0 for device in devices if device.type == "cuda"}))
        return EnergyMeter([*gpus, *(_zones(root) if "cpu" in types else [])])
    except (OSError, ValueError) as error:
        return EnergyMeter([], str(error))


def _gpus(indices: Sequence[int]) -> list[Counter]:
    """NVML's counters of the total energy that each GPU has used since its driver was loaded.

    Torch's GPUs are looked up by UUID, because NVML's own indices ignore CUDA_VISIBLE_DEVICES.
    """
    if not indices:
        return []
    import torch

    try:
        import pynvml as nvml
    except ImportError:
        raise OSError('nvidia-ml-py is not installed (pip install -e ".[energy]")') from None

    def joules(handle: Any, index: int) -> float:
        torch.cuda.synchronize(index)  # the GPU finishes its queued work first
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

    counters = []
    try:
        nvml.nvmlInit()
        for index in indices:
            uuid = str(torch.cuda.get_device_properties(index).uuid)
            uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            name = f"NVML {nvml.nvmlDeviceGetName(handle)}"
            counters.append(Counter(name, partial(joules, handle, index)))
    # a build of torch for other GPUs has no UUIDs
    except (nvml.NVMLError, AttributeError) as error:
        raise OSError(f"NVML: {error}") from None
    return counters


def _zones(root: Path) -> list[Counter]:
    """Returns the RAPL counters of processor packages and of their memory in Linux's sysfs. The
    other zones are not used: they are parts of a package (cores) or contain all packages
    (platform), so energy would be counted twice."""

    def joules(file: Path) -> float:
        return int(file.read_text()) / 1e6

    counters = []
    for folder in sorted(root.glob("intel-rapl:*")):  # AMD's zones have this name too
        name = (folder / "name").read_text().strip()
        if name.startswith("package") or name == "dram":
            restart = joules(folder / "max_energy_range_uj")
            counter = Counter(f"RAPL {name}", partial(joules, folder / "energy_uj"), restart)
            counter.read()  # on most machines root alone may read it
            counters.append(counter)
    if not any("package" in counter.name for counter in counters):
        raise OSError("no RAPL counters")
    return counters
