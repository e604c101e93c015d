"""`--device auto-map`: loading a pair by a plan, `inspect`'s view of the plan, and what the option is combined with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_devices import fake, fake_devices
from static_checks import on_gpu
from typer.testing import CliRunner

import specgen
from specgen import demo
from specgen.base.errors import RunError, SpecgenError
from specgen.base.types import SamplingParams
from specgen.cli.app import app
from specgen.engine.devices import free_memory, pick_draft_device
from specgen.engine.dtype_choice import DtypeChoice
from specgen.engine.model_loading import ModelSource, prepare
from specgen.engine.spread import placement
from specgen.engine.spread.placement import Room, model_memory, place
from specgen.tune.pair_inspection import model_facts

CPU = torch.device("cpu")
MIB = 1 << 20
FLOAT32 = DtypeChoice(torch.float32, "")
PROMPT = "def add(a, b):\n"
GREEDY = SamplingParams(max_new_tokens=8)
METHODS = [("svip", {}), ("eesd-tree", {}), ("selfsd", {"skip": "3+5a"}), ("glide", {}), ("eagle", {}), ("medusa", {})]
METHODS += [("sd", {"width": 2, "depth": 3}), ("mtad", {}), ("lookahead", {})]
COSTS = {"draft_cost": 0.2, "verify_cost": 0.02}  # else they are measured, and sampled tokens change with the drafts' lengths
METHODS += [("lookup", COSTS), ("adaptive", COSTS)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Room]]:
    """The devices that a plan is made for, in a list that a test fills. The bundled target takes 11 MiB and 12 MiB of cache."""
    rooms: list[Room] = []
    monkeypatch.setattr(placement, "_OVERHEAD", 0)
    monkeypatch.setattr(placement, "_pass_bytes", lambda *_: MIB)
    monkeypatch.setattr(placement, "find_rooms", lambda: rooms)
    return rooms


def two_gpus(mib: int) -> list[Room]:
    return [Room(fake(0), mib * MIB), Room(fake(1), mib * MIB), Room(CPU, 400 * MIB)]


def test_a_target_on_two_devices_generates_what_one_does(machine: list[Room]) -> None:
    machine += two_gpus(16)
    with specgen.load(device="cpu") as single:
        expected = single.generate(PROMPT, method="ar", sampling=GREEDY).token_ids
    with fake_devices(), specgen.load(device="auto-map") as pair:
        assert pair.target.layer_devices == [fake(0)] * 7 + [fake(1)] * 5
        assert pair.devices()[:2] == [fake(0), fake(1)]
        assert pair.target.device_label == "7 layers on privateuseone:0, 5 layers on privateuseone:1"
        assert pair.generate(PROMPT, method="svip", sampling=GREEDY).token_ids == expected
        assert pair.generate(PROMPT, method="eesd-tree", sampling=GREEDY).token_ids == expected


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_method_gives_on_two_devices_what_it_gives_on_one(temperature: float, machine: list[Room]) -> None:
    sampling = SamplingParams(max_new_tokens=24, temperature=temperature, seed=1)
    found = []
    for mib in (200, 16):
        machine[:] = two_gpus(mib)
        with fake_devices(), specgen.load(device="auto-map") as pair:
            assert (pair.target.layer_devices is None) == (mib == 200)
            found.append([pair.generate(PROMPT, method=name, sampling=sampling, **rest).token_ids for name, rest in METHODS])
    assert found[0] == found[1]


def test_the_draft_is_where_there_is_room_or_where_the_user_says(machine: list[Room]) -> None:
    machine += two_gpus(200)
    with fake_devices():
        with specgen.load(device="auto-map") as pair:
            assert pair.draft is not None
            assert (pair.target.device, pair.draft.device, pair.target.layer_devices) == (fake(0), fake(1), None)
        with specgen.load(device="auto-map", draft_device="cpu") as pair:
            assert pair.draft is not None
            assert pair.draft.device == CPU


def test_without_a_gpu_it_is_what_auto_is() -> None:
    """This machine has none, or the test is about the CPU alone."""
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("there is a GPU")
    with specgen.load(device="auto-map", exact=True) as pair:
        assert pair.target.device == CPU
        assert pair.target.layer_devices is None


def test_exact_needs_one_device(machine: list[Room]) -> None:
    machine += two_gpus(16)
    found = CliRunner().invoke(app, ["generate", "hi", "--device", "auto-map", "--exact"])
    assert (found.exit_code, found.stdout) == (2, "")
    assert "--exact is for the CPU and for one CUDA device, and demo/target needs several devices" in found.stderr


def test_what_does_not_fit_is_said_with_the_numbers(machine: list[Room]) -> None:
    machine += [Room(fake(0), 5 * MIB), Room(fake(1), 5 * MIB), Room(CPU, 6 * MIB)]
    found = CliRunner().invoke(app, ["generate", "hi", "--device", "auto-map"])
    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr.count("\n") == 1
    for part in (
        "11.2 MiB of weights",
        "12.0 MiB of cache for 1,024 tokens",
        "privateuseone:1 5.0 MiB",
        "cpu 6.0 MiB",
        "--context N",
    ):
        assert part in found.stderr
    found = CliRunner().invoke(app, ["inspect", "--target", str(demo.folder("target")), "--device", "auto-map"])
    assert (found.exit_code, found.stdout) == (1, "")


def test_inspect_shows_the_plan(machine: list[Room]) -> None:
    machine += two_gpus(16)
    models = ["--target", str(demo.folder("target")), "--draft", str(demo.folder("draft")), "--device", "auto-map"]
    shown = CliRunner().invoke(app, ["inspect", *models], env={"COLUMNS": "200"}).stdout
    assert "the plan for 1,024 tokens on 2 devices:" in shown
    assert "privateuseone:0: layers 0 to 6, embedding: " in shown
    assert "privateuseone:1: layers 7 to 11, norm, head: " in shown
    assert "without CUDA graphs" in shown
    assert "--device auto-map --measure" in shown
    shown = CliRunner().invoke(app, ["inspect", *models, "--context", "64"], env={"COLUMNS": "200"}).stdout
    assert "layers 0 to 11, embedding, norm, head" in shown
    assert "without CUDA graphs" not in shown
    report = json.loads(CliRunner().invoke(app, ["inspect", *models, "--json"]).stdout)["placement"]
    assert report["context"] == 1024
    assert [each["layers"] for each in report["devices"]] == [[0, 6], [7, 11]]
    assert sum(each["draft_bytes"] > 0 for each in report["devices"]) == 1
    for each in report["devices"]:
        used = sum(each[name] for name in ("weight_bytes", "cache_bytes", "working_bytes", "draft_bytes"))
        assert 0 < used <= each["free_bytes"] == 16 * MIB
    plain = json.loads(CliRunner().invoke(app, ["inspect", *models[:-2], "--json"]).stdout)
    assert plain["placement"] is None


def test_the_planned_bytes_are_those_of_the_files(machine: list[Room]) -> None:
    target = prepare(ModelSource(str(demo.folder("target"))), lambda _: None)
    found = model_memory(target, CPU, FLOAT32, 100)
    numbers = model_facts(target, CPU, FLOAT32).parameters
    assert found.weights == 4 * numbers
    assert found.cache == 100 * target.shape.kv_bytes_per_token(4) // target.shape.num_layers
    half = DtypeChoice(torch.bfloat16, "")
    assert model_memory(target, CPU, half, 100).weights == 2 * numbers
    for kind in ("int8", "int4"):  # a draft's
        rounded = replace(FLOAT32, quantise=kind)
        memory = model_memory(target, CPU, rounded, 100)
        assert memory.weights == model_facts(target, CPU, rounded).weight_bytes < 2 * numbers
        assert not memory.tied
        assert memory.cache == found.cache


def test_layers_that_accelerate_runs_on_the_gpu_have_their_cache_there(machine: list[Room]) -> None:
    """The native decoder runs the CPU's layers on the CPU, so that fewer bytes are needed on the GPU."""
    machine += [Room(fake(0), 20 * MIB), Room(CPU, 400 * MIB)]
    counts = []
    for backend in ("native", "transformers"):
        source = ModelSource(str(demo.folder("target")), backend=backend)
        found = place("auto-map", [prepare(source, lambda _: None)], [FLOAT32], None)
        assert found is not None
        counts.append([len(stage.layers) for stage in found.stages])
    assert sum(counts[0]) == sum(counts[1]) == 12
    assert counts[0][0] > counts[1][0]


def test_wrong_combinations_are_named(machine: list[Room]) -> None:
    with pytest.raises(SpecgenError, match="the draft model runs on one device"):
        pick_draft_device("auto-map", "auto", CPU)
    assert place("auto", [], [], None) is None
    machine.append(Room(fake(0), 1))
    target = prepare(ModelSource(str(demo.folder("target"))), lambda _: None)
    with pytest.raises(RunError):
        place("auto-map", [target], [FLOAT32], None)


def test_free_memory_of_the_cpu_counts_what_the_system_can_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:  60 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert free_memory(CPU) == 60 * 1024


@on_gpu
def test_a_target_on_a_gpu_and_the_cpu_generates_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method on real devices: the GPU is said to have little memory."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(placement, "_OVERHEAD", 0)
    monkeypatch.setattr(placement, "_pass_bytes", lambda *_: MIB)
    monkeypatch.setattr(placement, "find_rooms", lambda: [Room(gpu, 16 * MIB), Room(CPU, 4000 * MIB)])
    with specgen.load(device="cpu") as single:
        expected = single.generate(PROMPT, method="ar", sampling=GREEDY).token_ids
    with specgen.load(device="auto-map", dtype="float32") as pair:
        assert set(pair.target.layer_devices or ()) == {gpu, CPU}
        for name, settings in [*METHODS, ("pearl", {"window": 3})]:
            assert pair.generate(PROMPT, method=name, sampling=GREEDY, **settings).token_ids == expected, name
