"""The plan of `--device auto-map`: which layers live on which of some invented devices, filled in their order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.engine.spread.placement import ModelMemory, Placement, Room, plan

GIB = 1 << 30
CPU = torch.device("cpu")
OVERHEAD = GIB // 2  # per GPU


def gpus(*gib: float) -> list[Room]:
    return [Room(torch.device("cuda", index), int(free * GIB)) for index, free in enumerate(gib)]


def cpu(gib: float) -> Room:
    return Room(CPU, int(gib * GIB))


def model(
    layers: int, layer: float, table: float = 1.0, *, tied: bool = False, cache: float = 0.0, working: float = 0.5
) -> ModelMemory:
    """A model with equal layers; all sizes in GiB. `cache` is for one layer."""
    sizes = [int(each * GIB) for each in (layer, table, cache, working)]
    return ModelMemory((sizes[0],) * layers, sizes[1], sizes[1], tied, sizes[2], sizes[3])


SEVENTY_B = model(80, 1.62, 2.0, cache=0.03, working=3.3)  # in bfloat16: 133 GiB of weights
EIGHT_B = model(32, 0.41, 1.0, cache=0.03, working=0.9)  # 15 GiB


def laid_out(found: Placement | None) -> dict[str, range]:
    assert found is not None
    return {str(stage.device): stage.layers for stage in found.stages}


@pytest.mark.parametrize(
    ("rooms", "of", "draft", "expected", "draft_device"),
    [
        (gpus(80), EIGHT_B, 0, {"cuda:0": range(32)}, None),
        (gpus(*[80] * 8), EIGHT_B, 0, {"cuda:0": range(32)}, None),
        (gpus(80, 80), SEVENTY_B, 0, {"cuda:0": range(44), "cuda:1": range(44, 80)}, None),
        (gpus(80, 80), EIGHT_B, 2, {"cuda:0": range(32), "cuda:1": range(32, 32)}, "cuda:1"),
        (gpus(80), EIGHT_B, 2, {"cuda:0": range(32)}, "cuda:0"),
        ([*gpus(8), cpu(60)], EIGHT_B, 0, {"cuda:0": range(12), "cpu": range(12, 32)}, None),
        ([*gpus(8), cpu(60)], EIGHT_B, 2, {"cuda:0": range(8), "cpu": range(8, 32)}, "cuda:0"),
        ([*gpus(4), cpu(60)], EIGHT_B, 9, {"cuda:0": range(3), "cpu": range(3, 32)}, "cpu"),
        ([*gpus(2), cpu(60)], EIGHT_B, 0, {"cpu": range(32)}, None),
        (gpus(80, 2), EIGHT_B, 9, {"cuda:0": range(32)}, "cuda:0"),
    ],
)
def test_devices_are_filled_in_their_order(
    rooms: list[Room], of: ModelMemory, draft: int, expected: dict[str, range], draft_device: str | None
) -> None:
    found = plan(rooms, of, 8192, draft * GIB)
    assert laid_out(found) == expected
    assert found is not None
    assert found.draft_device == (None if draft_device is None else torch.device(draft_device))
    assert (found.layer_devices is None) == (sum(bool(layers) for layers in expected.values()) == 1)


@pytest.mark.parametrize(
    ("rooms", "of", "draft"),
    [([*gpus(24, 24), cpu(30)], SEVENTY_B, 0), (gpus(24), model(40, 0.8), 0), ([*gpus(24), cpu(5)], EIGHT_B, 20)],
)
def test_what_does_not_fit_has_no_plan(rooms: list[Room], of: ModelMemory, draft: int) -> None:
    assert plan(rooms, of, 100, draft * GIB) is None


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_table_is_counted_once_on_one_device_and_twice_on_two(tied: bool) -> None:
    of = model(10, 1.0, 4.0, tied=tied)
    needed = (10 + (4 if tied else 8)) * GIB + of.working + OVERHEAD
    assert plan([Room(torch.device("cuda", 0), needed)], of, 100) is not None
    assert plan([Room(torch.device("cuda", 0), needed - 1)], of, 100) is None
    found = plan(gpus(10, 12), of, 100)
    assert found is not None
    assert [stage.weight_bytes for stage in found.stages] == [9 * GIB, 9 * GIB]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(1, 40), min_size=1, max_size=4),
    st.none() | st.floats(1, 60),
    st.tuples(st.integers(1, 50), st.floats(0.05, 1), st.floats(0, 2), st.booleans(), st.floats(0, 0.2)),
    st.just(0) | st.integers(GIB // 10, 9 * GIB),
)
def test_every_plan_is_valid(
    free: list[float], host: float | None, sizes: tuple[int, float, float, bool, float], draft: int
) -> None:
    rooms = gpus(*free) + ([] if host is None else [cpu(host)])
    layers, layer, table, tied, cache = sizes
    of = model(layers, layer, table, tied=tied, cache=cache)
    found = plan(rooms, of, 1000, draft)
    if found is None:
        usable = sum(max(0, room.free - of.working - OVERHEAD) for room in rooms)
        wasted = len(rooms) * (of.layers[0] + of.cache + of.embedding + of.head + draft)
        assert usable < of.total + draft + wasted, "the memory in sum is short or nearly so"
        return
    assert [index for stage in found.stages for index in stage.layers] == list(range(layers)), "all of them, once, in order"
    order = [room.device for room in rooms]
    assert [stage.device for stage in found.stages] == [each for each in order if each in [one.device for one in found.stages]]
    with_layers = [stage for stage in found.stages if stage.layers]
    for stage in found.stages:
        assert stage.free == dict(rooms)[stage.device]
        assert stage.left >= 0
    for stage in with_layers:
        ends = of.embedding * (stage is with_layers[0]) + of.head * (stage is with_layers[-1])
        ends = max(of.embedding, of.head) if tied and len(with_layers) == 1 else ends
        assert stage.weight_bytes == sum(of.layers[index] for index in stage.layers) + ends
    assert sum(stage.draft_bytes for stage in found.stages) == draft
    assert found.device == with_layers[-1].device
