"""Joules from recorded counters: wrap-around, idle power taken off, and nothing guessed where there is nothing to read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_helpers import parsed, run_main
from comparisons import Compare

from specgen.base import energy
from specgen.base.energy import Counter, Energy, EnergyMeter, UnavailableError, energy_meter_for

CPU = torch.device("cpu")
RANGE = 262_143_328_850  # microjoules, of a real machine
MICRO = 1e-6


def zone(root: Path, number: str, name: str, microjoules: int = 0, size: int = RANGE) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", size)):
        (folder / file).write_text(f"{value}\n")
    return folder


class TestRapl:
    def test_a_counter_that_restarts_during_a_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(energy, "_TICK", 0)
        folder = zone(tmp_path, "0", "package-0", RANGE - 5_000_000)
        meter = EnergyMeter(energy_meter_for([CPU], root=tmp_path).counters, idle_seconds=0)
        meter.start()
        found = []
        for value in (RANGE - 1_000_000, 2_000_000):
            (folder / "energy_uj").write_text(f"{value}\n")
            found.append(meter.stop().gross_joules)
        assert found == pytest.approx([4, 7])

    def test_packages_and_their_memory_are_counted_once(self, tmp_path: Path) -> None:
        for number, name in (("0", "package-0"), ("0:0", "core"), ("0:1", "dram"), ("1", "package-1"), ("2", "psys")):
            zone(tmp_path, number, name)
        zone(tmp_path / "intel-rapl-mmio", "0", "package-0")
        meter = energy_meter_for([CPU], root=tmp_path)
        assert [counter.name for counter in meter.counters] == ["RAPL package-0", "RAPL dram", "RAPL package-1"]

    @pytest.mark.parametrize("what", ["nothing", "no package", "no number", "forbidden"])
    def test_what_cannot_be_read_is_unavailable(self, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if what == "no package":
            zone(tmp_path, "0", "psys")
        elif what == "no number":
            (zone(tmp_path, "0", "package-0") / "energy_uj").write_text("\n")
        elif what == "forbidden":  # the default on most machines; root, who may run the tests, can read everything
            zone(tmp_path, "0", "package-0")
            monkeypatch.setattr(energy, "_zone", lambda *_: (_ for _ in ()).throw(PermissionError))
        meter = energy_meter_for([CPU], root=tmp_path)
        meter.start()
        found = meter.stop()
        assert found.joules is None
        assert found.source == "unavailable"
        reasons = {"nothing": "no RAPL", "no package": "no RAPL", "no number": "cannot be read", "forbidden": "root only"}
        assert reasons[what] in str(found.reason)


class Clockwork:
    """A simulated clock and a counter that grows by `watts` joules per second, in steps of `tick` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tick: float = 0.1) -> None:
        self.now, self.energy, self.watts, self.tick = 1000.0, 0.0, 50.0, tick
        self.name = "a counter"
        monkeypatch.setattr(energy.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(energy.time, "sleep", self.advance)
        self.restart = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.energy += self.watts * seconds

    def read(self) -> float:
        self.advance(0.001)
        ticks = (self.now - 1000.0) // self.tick
        return round(self.energy - self.watts * (self.now - 1000.0 - ticks * self.tick), 6)


class TestMeter:
    def test_idle_power_is_measured_first_and_taken_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clockwork(monkeypatch, tick=0.001)
        meter = EnergyMeter([clock])
        meter.start()
        clock.watts = 150
        clock.advance(4)
        found = meter.stop()
        assert found.idle_watts == pytest.approx(50, rel=0.01)
        assert found.joules == pytest.approx(4 * 100, rel=0.02)
        assert found.gross_joules == pytest.approx(4 * 150, rel=0.02)
        assert found.seconds == pytest.approx(4, rel=0.02)
        assert found.source == "a counter"
        begun = clock.now
        meter.start()
        assert clock.now - begun < 1, "idle power is measured once"

    def test_a_coarse_counter_is_read_where_it_changes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run of two and a third ticks: without waiting for a change the counter would be wrong by a fifth."""
        clock = Clockwork(monkeypatch, tick=0.1)
        meter = EnergyMeter([clock])
        meter.start()
        begun = clock.now
        clock.advance(0.233)
        found = meter.stop()
        assert found.seconds == pytest.approx(0.3, abs=0.005), "to the next tick, and the time until there is counted"
        assert clock.now - begun < 0.31
        assert found.joules == pytest.approx(0, abs=0.5), "it idled all the while"
        assert found.gross_joules == pytest.approx(0.3 * 50, abs=0.5)

    def test_a_counter_that_does_not_count_is_unavailable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clockwork(monkeypatch)
        clock.watts = 0
        meter = EnergyMeter([clock])
        meter.start()
        clock.advance(3)
        found = meter.stop()
        assert (found.joules, found.reason) == (None, "a counter does not count")

    def test_runs_add_up(self) -> None:
        left, right = Energy("x", 10.0, 50.0, 1.0, gross_joules=60.0), Energy("x", 20.0, 60.0, 3.0, gross_joules=200.0)
        assert left + right == Energy("x", 30.0, 57.5, 4.0, gross_joules=260.0)
        unknown = Energy("unavailable", reason="no counter")
        assert left + unknown == unknown == unknown + left


class FakeNvml:
    """NVML with two GPUs, in another order than torch's."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.millijoules = {"GPU-bb": 7_000, "GPU-aa": 123_000}
        self.supported = True

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.millijoules:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return f"NVIDIA {handle}"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if not self.supported:
            raise self.NVMLError("Not Supported")
        return self.millijoules[handle]


class TestGpu:
    @pytest.fixture
    def nvml(self, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
        fake = FakeNvml()
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        uuids = {0: "aa", 1: "bb", 2: "MIG-1"}
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
        return fake

    @pytest.mark.parametrize(
        ("devices", "names"), [(["cuda:0"], ["aa"]), (["cuda:1", "cuda:1"], ["bb"]), (["cuda:0", "cuda:1"], ["aa", "bb"])]
    )
    def test_devices_are_found_by_their_uuid(self, nvml: FakeNvml, devices: list[str], names: list[str]) -> None:
        meter = energy_meter_for([torch.device(device) for device in devices])
        assert [counter.name for counter in meter.counters] == [f"NVML NVIDIA GPU-{name}" for name in names]

    def test_cuda_is_synchronised_before_a_reading(self, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
        order: list[Any] = []
        meter = energy_meter_for([torch.device("cuda:0")])
        monkeypatch.setattr(torch.cuda, "synchronize", lambda index: order.append(index))
        assert meter.counters[0].read() == 123, "in joules"
        assert order == [0]

    def test_why_there_is_no_energy_counter(self, nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def reason(*devices: str) -> str | None:
            return energy_meter_for([torch.device(device) for device in devices], root=tmp_path).reason

        assert reason("mps") == "mps has no energy counter"
        assert reason("cuda:2") == "NVML: Not Found"
        assert reason("cuda:0", "cpu") == "no RAPL counters"
        zone(tmp_path, "0", "package-0")
        assert reason("cuda:0", "cpu") is None
        nvml.supported = False
        assert reason("cuda:0") == "NVML: Not Supported"
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
        assert reason("cuda:0") == "torch does not name the GPU's UUID"
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert "specgen[energy]" in str(reason("cuda:0"))

    def test_a_gpu_that_is_lost_later_costs_the_figure_and_not_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """During the first measurement of idle power, between start and stop, or in a later run: each has a reason."""
        monkeypatch.setattr(energy, "_TICK", 0)
        for readings in range(6):
            left = iter(range(readings))

            def read(left: Any = left) -> float:
                if next(left, None) is None:
                    raise UnavailableError("NVML: Not Supported")
                return 1.0

            meter = EnergyMeter([Counter("a GPU", read)], idle_seconds=0)
            for _ in range(2):
                meter.start()
                found = meter.stop()
            assert (found.source, found.joules, found.reason) == ("unavailable", None, "NVML: Not Supported")


def test_a_rapl_counter_that_can_no_longer_be_read_costs_the_figure(tmp_path: Path) -> None:
    folder = zone(tmp_path, "0", "package-0", 5)
    meter = EnergyMeter(energy_meter_for([CPU], root=tmp_path).counters, idle_seconds=0)
    meter.start()
    (folder / "energy_uj").write_text("")
    found = meter.stop()
    assert (found.joules, found.reason) == (None, f"{folder / 'energy_uj'} cannot be read")


class Counted:
    """In place of an `EnergyMeter`: 50 W idle, and given joules for each run; without any left the energy is unavailable."""

    def __init__(self, *joules: float) -> None:
        self.left, self.devices, self.calls = list(joules), [CPU], ""

    def made_for(self, devices: Sequence[torch.device]) -> Counted:
        self.devices = list(devices)
        return self

    def start(self) -> None:
        self.calls += "("

    def stop(self) -> Energy:
        self.calls += ")"
        return Energy("a counter", self.left.pop(0), 50.0, 2.0) if self.left else Energy("unavailable", reason="no counter")


COMPARED = ("-m", "sd,transformers", "-n", "10", "--ignore-eos", "--limit", "2", "--repeats", "1", "--energy")
SAID = "Joules are those beyond the 50 W of the idle devices; 'with idle' adds these (a counter)."


def test_a_comparison_shows_joules_above_idle_power_or_why_not(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of ten tokens; the methods take turns, after a run of each that warms up and does not count."""
    for options in ((), ("--json",)):
        meter = Counted(*[99.0] * 3, 4.0, 1.0, 8.0, 6.0, 2.0, 12.0)
        monkeypatch.setattr("specgen.compare.runner.energy_meter_for", meter.made_for)
        code, out, err = compare(*COMPARED, *options)
        assert (code, meter.calls) == (0, "()" * 9), "each run is measured, and nothing between runs"
        assert SAID in " ".join((out + err).split())
        if options:
            assert [line["joules_per_token"] for line in parsed(out)] == pytest.approx([0.5, 0.15, 1.0])
    monkeypatch.setattr("specgen.compare.runner.energy_meter_for", Counted().made_for)
    out = compare(*COMPARED)[1]
    assert "Energy is unavailable: no counter." in " ".join(out.split())
    assert "joules" not in out
    assert [line["joules_per_token"] for line in parsed(compare(*COMPARED, "--json")[1])] == [None] * 3
    assert "nergy" not in compare(*COMPARED[:-1])[1]


@pytest.mark.parametrize(("joules", "shown"), [((6.0,), "0.5 J/token above 50 W idle"), ((), "energy unavailable: no counter")])
def test_generate_shows_joules_or_says_why_not(
    pair: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    joules: tuple[float, ...],
    shown: str,
) -> None:
    monkeypatch.setattr("specgen.cli.output_writers.energy_meter_for", Counted(*joules).made_for)
    options = ("-m", "sd", "-n", "12", "--ignore-eos", "--device", "cpu", "--json", "--energy", "the cat")
    code, out, err = run_main(monkeypatch, capfd, "generate", *pair, *options)
    assert code == 0
    assert shown in err
    summary = parsed(out)[-1]
    assert summary["joules_per_token"] == (0.5 if joules else None)
    assert summary["energy"]["reason"] == (None if joules else "no counter")
