"""`--device auto-map`: the plan for invented devices, filled in their order, and a model whose
layers are on several of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from families import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_checks import CPU, OTHER
from static_checks import on_gpu
from typer.testing import CliRunner

import specgen
from specgen import demo
from specgen.base.errors import SpecgenError
from specgen.base.model_options import ModelOptions
from specgen.base.types import SamplingParams
from specgen.cli.app import app
from specgen.engine.devices import pick_draft_device
from specgen.engine.model_files import ModelSource, find_model
from specgen.engine.precision import Precision
from specgen.engine.spread import placement
from specgen.engine.spread.placement import ModelMemory, Room, model_memory, place, plan
from specgen.engine.transformers.loading import module_devices
from specgen.tune.pair_inspection import model_facts

# the last per GPU
GIB = 1 << 30
MIB = 1 << 20
OVERHEAD = 1 << 29
FLOAT32 = Precision(torch.float32, "")
TARGET = ModelSource(str(demo.folder("target")))
PROMPT = "def add(a, b):\n"
GREEDY = SamplingParams(max_new_tokens=8)


def rooms_of(*gib: float, cpu: float = 0.0) -> list[Room]:
    found = [Room(torch.device("cuda", index), int(free * GIB)) for index, free in enumerate(gib)]
    return found + ([Room(CPU, int(cpu * GIB))] if cpu else [])


def model(
    layers: int,
    layer: float,
    table: float = 1.0,
    *,
    tied: bool = False,
    cache: float = 0.03,
    working: float = 0.9,
) -> ModelMemory:
    """A model with equal layers; all sizes in GiB. `cache` is for one layer."""
    sizes = [int(each * GIB) for each in (layer, table, cache, working)]
    return ModelMemory((sizes[0],) * layers, sizes[1], sizes[1], tied, sizes[2], sizes[3])


SEVENTY_B = model(80, 1.62, 2.0, working=3.3)  # in bfloat16: 133 GiB of weights
EIGHT_B = model(32, 0.41)  # 15 GiB


@pytest.mark.parametrize(
    ("rooms", "of", "draft", "expected", "draft_device"),
    [
        (rooms_of(80, 80), SEVENTY_B, 0, {"cuda:0": range(44), "cuda:1": range(44, 80)}, None),
        (rooms_of(80, 80), EIGHT_B, 2, {"cuda:0": range(32), "cuda:1": range(32, 32)}, "cuda:1"),
        (rooms_of(8, cpu=60), EIGHT_B, 2, {"cuda:0": range(8), "cpu": range(8, 32)}, "cuda:0"),
        (rooms_of(4, cpu=60), EIGHT_B, 9, {"cuda:0": range(3), "cpu": range(3, 32)}, "cpu"),
        (rooms_of(80, 2), EIGHT_B, 9, {"cuda:0": range(32)}, "cuda:0"),
        (rooms_of(24, 24, cpu=30), SEVENTY_B, 0, None, None),
        (rooms_of(24, cpu=5), EIGHT_B, 20, None, None),
    ],
)
def test_devices_are_filled_in_their_order(
    rooms: list[Room],
    of: ModelMemory,
    draft: int,
    expected: dict[str, range] | None,
    draft_device: str | None,
) -> None:
    found = plan(rooms, of, 8192, draft * GIB)
    assert (
        None if found is None else {str(stage.device): stage.layers for stage in found.stages}
    ) == expected
    if found is not None and expected is not None:
        assert found.draft_device == (None if draft_device is None else torch.device(draft_device))
        assert (found.layer_devices is None) == (
            sum(bool(layers) for layers in expected.values()) == 1
        )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(1, 40), min_size=1, max_size=4),
    st.just(0) | st.floats(1, 60),
    st.tuples(
        st.integers(1, 50), st.floats(0.05, 1), st.floats(0, 2), st.booleans(), st.floats(0, 0.2)
    ),
    st.just(0) | st.integers(GIB // 10, 9 * GIB),
)
def test_every_plan_is_valid(
    free: list[float], host: float, sizes: tuple[int, float, float, bool, float], draft: int
) -> None:
    rooms = rooms_of(*free, cpu=host)
    layers, layer, table, tied, cache = sizes
    of = model(layers, layer, table, tied=tied, cache=cache, working=0.5)
    found = plan(rooms, of, 1000, draft)
    if found is None:
        usable = sum(max(0, room.free - of.working - OVERHEAD) for room in rooms)
        wasted = len(rooms) * (of.layers[0] + of.cache + of.embedding + of.head + draft)
        assert usable < of.weights + layers * of.cache + of.working + draft + wasted, (
            "the memory in sum is short or nearly so"
        )
        return
    assert [index for stage in found.stages for index in stage.layers] == list(range(layers)), (
        "all of them, once, in order"
    )
    with_layers = [stage for stage in found.stages if stage.layers]
    for stage in found.stages:
        assert 0 <= stage.left <= stage.free == dict(rooms)[stage.device]
    for stage in with_layers:
        ends = of.embedding * (stage is with_layers[0]) + of.head * (stage is with_layers[-1])
        # on two devices, each has a copy
        ends = max(of.embedding, of.head) if tied and len(with_layers) == 1 else ends
        assert stage.weight_bytes == sum(of.layers[index] for index in stage.layers) + ends
    assert sum(stage.draft_bytes for stage in found.stages) == draft
    assert found.device == with_layers[-1].device


@pytest.mark.usefixtures("without_kernels")
def test_the_planned_bytes_are_those_of_the_files() -> None:
    target = find_model(TARGET, lambda _: None)
    numbers = model_facts(target, CPU, FLOAT32).parameters
    for choice, size in ((FLOAT32, 4), (Precision(torch.bfloat16, ""), 2)):
        found = model_memory(target, CPU, choice, 100)
        assert found.weights == size * numbers
        assert found.cache == 100 * target.shape.kv_bytes_per_token(size) // target.shape.num_layers
    for kind in ("int8", "int4"):  # a draft's
        rounded = replace(FLOAT32, rounding=kind)
        memory = model_memory(target, CPU, rounded, 100)
        assert memory.weights == model_facts(target, CPU, rounded).weight_bytes < 2 * numbers
        assert not memory.tied


# ------------------------------------------------------------------ on this machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Room]]:
    """The devices that a plan is made for, in a list that a test fills. The bundled target takes 11
    MiB and 12 MiB of cache."""
    rooms: list[Room] = []
    monkeypatch.setattr(placement, "_OVERHEAD", 0)
    monkeypatch.setattr(placement, "_pass_bytes", lambda *_: MIB)
    monkeypatch.setattr(placement, "find_rooms", lambda: rooms)
    return rooms


@pytest.mark.usefixtures("without_kernels")
def test_a_target_on_two_devices_generates_what_one_does(machine: list[Room]) -> None:
    machine += [Room(OTHER, 16 * MIB), Room(CPU, 16 * MIB)]
    with (
        specgen.load(device="cpu", dtype="float32") as single,
        specgen.load(device="auto-map", dtype="float32") as pair,
    ):
        assert pair.target.layer_devices == [OTHER] * 7 + [CPU] * 5
        assert pair.target.device_label == "7 layers on cpu:0, 5 layers on cpu"
        for name in ("ar", "svip", "eesd-tree", "glide"):
            found, expected = (
                each.generate(PROMPT, method=name, sampling=GREEDY).token_ids
                for each in (pair, single)
            )
            assert found == expected, name


@pytest.mark.usefixtures("without_kernels")
def test_inspect_shows_the_plan(machine: list[Room]) -> None:
    machine += [Room(OTHER, 16 * MIB), Room(CPU, 16 * MIB)]
    models = [
        "--target",
        str(demo.folder("target")),
        "--draft",
        str(demo.folder("draft")),
        "--device",
        "auto-map",
    ]
    shown = CliRunner().invoke(app, ["inspect", *models], env={"COLUMNS": "200"}).stdout
    assert "cpu: layers 7 to 11; " in shown
    report = json.loads(CliRunner().invoke(app, ["inspect", *models, "--json"]).stdout)["placement"]
    assert [each["layers"] for each in report["devices"]] == [[0, 6], [7, 11]]
    assert sum(each["draft_bytes"] > 0 for each in report["devices"]) == 1
    for each in report["devices"]:
        used = sum(
            each[name] for name in ("weight_bytes", "cache_bytes", "working_bytes", "draft_bytes")
        )
        assert 0 < used <= each["free_bytes"] == 16 * MIB


@pytest.mark.usefixtures("without_kernels")
def test_what_cannot_be_placed_is_said_in_a_line(machine: list[Room]) -> None:
    machine += [Room(OTHER, 5 * MIB), Room(CPU, 6 * MIB)]
    found = CliRunner().invoke(app, ["generate", "hi", "--device", "auto-map"])
    assert (found.exit_code, found.stdout, found.stderr.count("\n")) == (1, "", 1)
    for part in (
        "11.2 MiB of weights",
        "12.0 MiB of cache for 1,024 tokens",
        "cpu:0 5.0 MiB",
        "cpu 6.0 MiB",
        "--context N",
    ):
        assert part in found.stderr
    machine[:] = [Room(OTHER, 16 * MIB), Room(CPU, 16 * MIB)]
    found = CliRunner().invoke(app, ["generate", "hi", "--device", "auto-map", "--exact"])
    assert (found.exit_code, found.stdout) == (2, "")
    assert (
        "--exact is for the CPU and for one CUDA device, and demo/target needs several devices"
        in found.stderr
    )
    with pytest.raises(SpecgenError, match="the draft model runs on one device"):
        pick_draft_device("auto-map", "auto", CPU)
    assert place([], [], ModelOptions()) is None


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_every_module_of_transformers_has_a_device(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers have theirs, what comes before them the first one's, what comes after them the
    last one's."""
    module = make_model(family, tie_word_embeddings=False)
    devices = [torch.device("cuda", index) for index in range(module.config.num_hidden_layers)]
    found = module_devices(module, "m", devices)
    for weight, _ in module.named_parameters():
        assert any(weight.startswith(f"{name}.") for name in found), weight
    assert [
        device for name, device in found.items() if name.rsplit(".", 1)[-1].isdigit()
    ] == devices
    names = {part: name for name, part in module.named_modules()}
    head = names[module.get_output_embeddings()]
    table = names[module.get_input_embeddings()]
    assert (found[head], found[table]) == (devices[-1], devices[0])
    assert (
        module_devices(make_model(family, tie_word_embeddings=True), "m", devices)[head]
        == devices[0]
    )
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(SpecgenError, match=r"pip install -e .*multi-gpu"):
        module_devices(module, "m", devices)


@on_gpu
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_target_on_a_gpu_and_the_cpu_generates_what_one_does(
    machine: list[Room], backend: str
) -> None:
    """Every kind of method on real devices: the GPU is said to have little memory."""
    gpu = torch.device("cuda", 0)
    machine += [Room(gpu, (16 if backend == "native" else 24) * MIB), Room(CPU, 4000 * MIB)]
    with specgen.load(device="cpu", dtype="float32") as single:
        expected = single.generate(PROMPT, method="ar", sampling=GREEDY).token_ids
    with specgen.load(device="auto-map", dtype="float32", backend=backend) as pair:
        assert set(pair.target.layer_devices or ()) == {gpu, CPU}
        for name in ("svip", "eesd-tree", "glide", "eagle", "medusa", "mtad", "lookahead", "pearl"):
            assert pair.generate(PROMPT, method=name, sampling=GREEDY).token_ids == expected, name
