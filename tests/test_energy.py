"""Joules from recorded counters: wrap-around, idle power taken off, and nothing guessed where there
is nothing to read."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_helpers import parsed, run_main
from comparisons import Compare

from specgen.base import measuring as energy
from specgen.base.measuring import Energy, EnergyMeter, energy_meter_for

CPU = torch.device("cpu")
RANGE = 262_143_328_850  # microjoules, of a real machine


def zone(root: Path, number: str, name: str, microjoules: int | str = 0) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", RANGE)):
        (folder / file).write_text(f"{value}\n")
    return folder


def test_a_rapl_counter_restarts_or_is_lost_during_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages and their memory are counted once."""
    monkeypatch.setattr(energy, "_TICK", 0)
    monkeypatch.setattr(energy, "IDLE_SECONDS", 0)
    for number, name in (("0:0", "core"), ("0:1", "dram"), ("2", "psys")):
        zone(tmp_path, number, name, 1)
    folder = zone(tmp_path, "0", "package-0", RANGE - 5_000_000)
    meter = energy_meter_for([CPU], root=tmp_path)
    assert [counter.name for counter in meter.counters] == ["RAPL package-0", "RAPL dram"]
    (tmp_path / "intel-rapl:0:1" / "name").write_text("another")
    meter = energy_meter_for([CPU], root=tmp_path)
    meter.start()
    found = []
    for value in (RANGE - 1_000_000, 2_000_000):
        (folder / "energy_uj").write_text(f"{value}\n")
        found.append(meter.stop().gross_joules)
    assert found == pytest.approx([4, 7])
    (folder / "energy_uj").write_text("")
    lost = meter.stop()
    assert (lost.joules, lost.source) == (None, "unavailable")
    assert str(lost.reason).startswith("RAPL package-0 cannot be read: ")
    for reason in ("invalid literal", "no RAPL"):
        assert reason in str(energy_meter_for([CPU], root=tmp_path).reason)
        (folder / "name").write_text("psys")


class Clockwork:
    """A simulated clock and a counter that grows by `watts` joules per second, in steps of `tick`
    seconds."""

    name = "a counter"
    restart = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tick: float = 0.1) -> None:
        self.now = 1000.0
        self.energy = 0.0
        self.watts = 50.0
        self.tick = tick
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
    """A run of two and a third ticks: without waiting for a change the counter would be wrong by a
    fifth."""
    clock = Clockwork(monkeypatch, tick=0.1)
    meter = EnergyMeter([clock])
    meter.start()
    begun = clock.now
    clock.advance(0.233)
    found = meter.stop()
    assert found.seconds == pytest.approx(0.3, abs=0.005), (
        "to the next tick, and the time until there is counted"
    )
    assert clock.now - begun < 0.31
    assert [found.joules, found.gross_joules] == pytest.approx([0, 0.3 * 50], abs=0.5), (
        "it idled all the while"
    )


def test_a_gpu_is_found_by_its_uuid_and_a_lost_one_costs_the_figure_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch may number the GPUs in another order than NVML."""
    readings = [123_000, 123_000]
    nvml = SimpleNamespace(
        NVMLError=LookupError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID={"GPU-bb": "bb", "GPU-aa": "aa"}.__getitem__,
        nvmlDeviceGetName="NVIDIA {}".format,
        nvmlDeviceGetTotalEnergyConsumption=lambda _: readings.pop(),
    )
    monkeypatch.setattr(energy, "_TICK", 0)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid=["aa", "bb", "MIG"][index]),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    meter = energy_meter_for([torch.device("cuda:0")] * 2)
    assert [counter.name for counter in meter.counters] == ["NVML NVIDIA aa"]
    assert meter.counters[0].read() == 123, "in joules"
    meter.start()
    assert (meter.stop().joules, meter.reason) == (
        None,
        "NVML NVIDIA aa cannot be read: pop from empty list",
    )
    assert energy_meter_for([torch.device("cuda:2")]).reason == "NVML: 'GPU-MIG'"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert 'pip install -e ".[energy]"' in str(energy_meter_for([torch.device("cuda:0")]).reason)


class Counted:
    """In place of an `EnergyMeter`: 50 W idle, and given joules for each run; without any left the
    energy is unavailable."""

    def __init__(self, *joules: float) -> None:
        self.left = list(joules)
        self.calls = ""

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
    """Two prompts of ten tokens; the methods take turns, after a run of each that warms up and does
    not count."""
    trace = tmp_path / "t.jsonl"
    options = (
        "-m",
        "sd,transformers",
        "-n",
        "10",
        "--ignore-eos",
        "--limit",
        "2",
        "--repeats",
        "1",
    )
    meter = Counted(*[99.0] * 3, 4.0, 1.0, 8.0, 6.0, 2.0, 12.0)
    monkeypatch.setattr("specgen.compare.runner.energy_meter_for", meter.made_for)
    code, out, _ = compare(*options, "--energy", "--json", "--trace", str(trace))
    assert (code, meter.calls) == (0, "()" * 9), "each run is measured, and nothing between runs"
    said = (
        "Joules are those beyond the 50 W of the idle devices; 'with idle' adds these (a counter)."
    )
    assert [line["joules_per_token"] for line in parsed(out)] == pytest.approx([0.5, 0.15, 1.0])
    assert [line["gross_joules_per_token"] for line in parsed(out)] == pytest.approx(
        [10.5, 10.15, 11.0]
    )
    table = compare(*options, "--resume", str(trace))[1]
    assert said in " ".join(table.split())
    assert re.search(r"joules +with .*\n.* a token +idle ", table)
    assert re.search(r"^sd .* 0\.15 +10\.2 ", table, flags=re.MULTILINE)
    monkeypatch.setattr("specgen.compare.runner.energy_meter_for", Counted().made_for)
    out = compare(*options, "--energy")[1]
    assert "Energy is unavailable: no counter." in " ".join(out.split())
    assert "joules" not in out


def test_generate_shows_joules_or_says_why_not(
    pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specgen.cli.output_writers.energy_meter_for", Counted(6.0).made_for)
    options = (
        "-m",
        "sd",
        "-n",
        "12",
        "--ignore-eos",
        "--device",
        "cpu",
        "--json",
        "--energy",
        "the cat",
    )
    code, out, err = run_main(monkeypatch, capfd, "generate", *pair, *options)
    assert (code, parsed(out)[-1]["joules_per_token"]) == (0, 0.5)
    assert "0.5 J/token above 50 W idle" in err
    monkeypatch.setattr("specgen.cli.output_writers.energy_meter_for", Counted().made_for)
    assert (
        "energy unavailable: no counter"
        in run_main(monkeypatch, capfd, "generate", *pair, *options)[2]
    )
