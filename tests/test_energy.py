"""Joules from recorded counters: wrap-around, idle power taken off, and nothing guessed where there is nothing to read."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_helpers import parsed, run_main
from comparisons import Compare

from specgen.base import measuring as energy
from specgen.base.measuring import Counter, Energy, EnergyMeter, UnavailableError, energy_meter_for

CPU = torch.device("cpu")
RANGE = 262_143_328_850  # microjoules, of a real machine


def zone(root: Path, number: str, name: str, microjoules: int | str = 0) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", RANGE)):
        (folder / file).write_text(f"{value}\n")
    return folder


def test_a_rapl_counter_restarts_or_is_lost_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages and their memory are counted once."""
    monkeypatch.setattr(energy, "_TICK", 0)
    for number, name in (("0", "package-0"), ("0:0", "core"), ("0:1", "dram"), ("2", "psys")):
        zone(tmp_path / "counted", number, name)
    zone(tmp_path / "counted" / "intel-rapl-mmio", "0", "package-0")
    names = [counter.name for counter in energy_meter_for([CPU], root=tmp_path / "counted").counters]
    assert names == ["RAPL package-0", "RAPL dram"]
    folder = zone(tmp_path, "0", "package-0", RANGE - 5_000_000)
    meter = EnergyMeter(energy_meter_for([CPU], root=tmp_path).counters, idle_seconds=0)
    meter.start()
    found = []
    for value in (RANGE - 1_000_000, 2_000_000):
        (folder / "energy_uj").write_text(f"{value}\n")
        found.append(meter.stop().gross_joules)
    assert found == pytest.approx([4, 7])
    (folder / "energy_uj").write_text("")
    lost = meter.stop()
    assert (lost.joules, lost.reason) == (None, f"{folder / 'energy_uj'} cannot be read")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("", "", "no RAPL"), ("psys", "0", "no RAPL"), ("package-0", "", "cannot be read"), ("package-0", "0", "root only")],
)
def test_what_cannot_be_read_is_unavailable(
    tmp_path: Path, name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name:
        zone(tmp_path, "0", name, value)
    if reason == "root only":  # the default on most machines; root, who may run the tests, can read everything
        monkeypatch.setattr(energy, "_zone", lambda *_: (_ for _ in ()).throw(PermissionError))
    meter = energy_meter_for([CPU], root=tmp_path)
    meter.start()
    found = meter.stop()
    assert (found.joules, found.source) == (None, "unavailable")
    assert reason in str(found.reason)


class Clockwork:
    """A simulated clock and a counter that grows by `watts` joules per second, in steps of `tick` seconds."""

    name = "a counter"
    restart = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tick: float = 0.1) -> None:
        self.now, self.energy, self.watts, self.tick = 1000.0, 0.0, 50.0, tick
        monkeypatch.setattr(energy.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(energy.time, "sleep", self.advance)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.energy += self.watts * seconds

    def read(self) -> float:
        self.advance(0.001)
        ticks = (self.now - 1000.0) // self.tick
        return round(self.energy - self.watts * (self.now - 1000.0 - ticks * self.tick), 6)


def test_idle_power_is_measured_first_and_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clockwork(monkeypatch, tick=0.001)
    meter = EnergyMeter([clock])
    meter.start()
    clock.watts = 150
    clock.advance(4)
    found = meter.stop()
    figures = [found.idle_watts, found.joules, found.gross_joules, found.seconds]
    assert figures == pytest.approx([50, 4 * 100, 4 * 150, 4], rel=0.02)
    begun = clock.now
    meter.start()
    assert clock.now - begun < 1, "idle power is measured once"
    clock.watts = 0
    stopped = EnergyMeter([clock])
    stopped.start()
    clock.advance(3)
    assert stopped.stop().reason == "a counter does not count"


def test_a_coarse_counter_is_read_where_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of two and a third ticks: without waiting for a change the counter would be wrong by a fifth."""
    clock = Clockwork(monkeypatch, tick=0.1)
    meter = EnergyMeter([clock])
    meter.start()
    begun = clock.now
    clock.advance(0.233)
    found = meter.stop()
    assert found.seconds == pytest.approx(0.3, abs=0.005), "to the next tick, and the time until there is counted"
    assert clock.now - begun < 0.31
    assert [found.joules, found.gross_joules] == pytest.approx([0, 0.3 * 50], abs=0.5), "it idled all the while"


def test_runs_add_up() -> None:
    left, right = Energy("x", 10.0, 50.0, 1.0, gross_joules=60.0), Energy("x", 20.0, 60.0, 3.0, gross_joules=200.0)
    assert left + right == Energy("x", 30.0, 57.5, 4.0, gross_joules=260.0)
    unknown = Energy("unavailable", reason="no counter")
    assert left + unknown == unknown == unknown + left


class FakeNvml:
    """NVML with two GPUs, in another order than torch's."""

    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self) -> None:
        self.millijoules, self.supported = {"GPU-bb": 7_000, "GPU-aa": 123_000}, True
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetName = "NVIDIA {}".format

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.millijoules:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        if not self.supported:
            raise self.NVMLError("Not Supported")
        return self.millijoules[handle]


def test_gpus_are_found_by_their_uuid_or_have_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    nvml, uuids = FakeNvml(), {0: "aa", 1: "bb", 2: "MIG-1"}
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    monkeypatch.setattr(torch.cuda, "synchronize", order.append)

    def meter(*devices: str) -> EnergyMeter:
        return energy_meter_for([torch.device(device) for device in devices], root=tmp_path)

    for devices, names in ((["cuda:0"], ["aa"]), (["cuda:1", "cuda:1"], ["bb"]), (["cuda:0", "cuda:1"], ["aa", "bb"])):
        assert [counter.name for counter in meter(*devices).counters] == [f"NVML NVIDIA GPU-{name}" for name in names]
    order.clear()
    assert (meter("cuda:0").counters[0].read(), order[-1]) == (123, 0), "in joules, after CUDA is synchronised"
    assert meter("mps").reason == "mps has no energy counter"
    assert meter("cuda:2").reason == "NVML: Not Found"
    assert meter("cuda:0", "cpu").reason == "no RAPL counters"
    zone(tmp_path, "0", "package-0")
    assert meter("cuda:0", "cpu").reason is None
    nvml.supported = False
    assert meter("cuda:0").reason == "NVML: Not Supported"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    assert meter("cuda:0").reason == "torch does not name the GPU's UUID"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "specgen[energy]" in str(meter("cuda:0").reason)


def test_a_gpu_that_is_lost_later_costs_the_figure_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
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


class Counted:
    """In place of an `EnergyMeter`: 50 W idle, and given joules for each run; without any left the energy is unavailable."""

    def __init__(self, *joules: float) -> None:
        self.left, self.calls = list(joules), ""

    def made_for(self, devices: Sequence[torch.device]) -> Counted:
        return self

    def start(self) -> None:
        self.calls += "("

    def stop(self) -> Energy:
        self.calls += ")"
        if not self.left:
            return Energy("unavailable", reason="no counter")
        joules = self.left.pop(0)
        return Energy("a counter", joules, 50.0, 2.0, gross_joules=joules + 100)


def test_a_comparison_shows_joules_above_idle_power_or_why_not(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two prompts of ten tokens; the methods take turns, after a run of each that warms up and does not count."""
    trace = tmp_path / "t.jsonl"
    options = ("-m", "sd,transformers", "-n", "10", "--ignore-eos", "--limit", "2", "--repeats", "1")
    meter = Counted(*[99.0] * 3, 4.0, 1.0, 8.0, 6.0, 2.0, 12.0)
    monkeypatch.setattr("specgen.compare.runner.energy_meter_for", meter.made_for)
    code, out, err = compare(*options, "--energy", "--json", "--trace", str(trace))
    assert (code, meter.calls) == (0, "()" * 9), "each run is measured, and nothing between runs"
    said = "Joules are those beyond the 50 W of the idle devices; 'with idle' adds these (a counter)."
    assert said in err
    assert [line["joules_per_token"] for line in parsed(out)] == pytest.approx([0.5, 0.15, 1.0])
    assert [line["gross_joules_per_token"] for line in parsed(out)] == pytest.approx([10.5, 10.15, 11.0])
    table = compare(*options, "--resume", str(trace))[1]
    assert said in " ".join(table.split())
    assert re.search(r"joules +with .*\n.* a token +idle ", table)
    assert re.search(r"^sd .* 0\.15 +10\.2 ", table, flags=re.MULTILINE)
    older = [json.loads(line) for line in trace.read_text().splitlines()]
    trace.write_text("".join(json.dumps({**line, "gross_joules_per_token": None}) + "\n" for line in older))
    assert [line["gross_joules_per_token"] for line in parsed(compare(*options, "--json", "--resume", str(trace))[1])] == [
        None
    ] * 3
    monkeypatch.setattr("specgen.compare.runner.energy_meter_for", Counted().made_for)
    out = compare(*options, "--energy")[1]
    assert "Energy is unavailable: no counter." in " ".join(out.split())
    assert "joules" not in out
    assert "nergy" not in compare(*options)[1]


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
