"""The plan of `--device auto-map`: which layers live on which of some invented devices."""

from __future__ import annotations

import random

import pytest
import torch

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


def check(found: Placement | None, rooms: list[Room], of: ModelMemory, draft: int = 0) -> Placement:
    """Asserts what holds for every plan, and returns it."""
    assert found is not None
    layers = [index for stage in found.target_stages for index in stage.layers]
    assert layers == list(range(len(of.layers)))  # all of them, each once, in order
    assert [stage.device for stage in found.stages] == list(dict.fromkeys(stage.device for stage in found.stages))
    free = dict(rooms)
    for stage in found.stages:
        assert stage.free == free[stage.device]
        assert stage.left >= 0
        assert stage.weight_bytes >= sum(of.layers[index] for index in stage.layers)
    assert found.device == found.target_stages[-1].device
    planned = sum(stage.weight_bytes for stage in found.stages)
    assert planned == sum(of.layers) + of.ends(is_first=True, is_last=len(found.target_stages) == 1) + (
        of.head if len(found.target_stages) > 1 else 0
    )
    assert sum(stage.draft_bytes for stage in found.stages) == draft
    on_cpu = [stage.device == CPU for stage in found.target_stages]
    assert on_cpu == sorted(on_cpu), "the CPU has the last layers"
    return found


def test_one_gpu_that_is_large_enough_gets_all() -> None:
    found = check(plan(gpus(80), EIGHT_B, 8192), gpus(80), EIGHT_B)
    assert laid_out(found) == {"cuda:0": range(32)}
    assert found.layer_devices is None
    assert found.draft_device is None


def test_the_fewest_gpus_are_taken() -> None:
    rooms = gpus(*[80] * 8)
    assert laid_out(plan(rooms, EIGHT_B, 8192)) == {"cuda:0": range(32)}
    found = check(plan(rooms, SEVENTY_B, 8192), rooms, SEVENTY_B)
    assert laid_out(found) == {"cuda:0": range(40), "cuda:1": range(40, 80)}
    assert found.layer_devices == [rooms[0].device] * 40 + [rooms[1].device] * 40


def test_the_gpus_with_the_most_room_are_taken_in_their_order() -> None:
    rooms = gpus(20, 79, 10, 78)
    found = check(plan(rooms, SEVENTY_B, 8192), rooms, SEVENTY_B)
    assert list(laid_out(found)) == ["cuda:1", "cuda:3"]
    assert laid_out(plan(gpus(12, 40), EIGHT_B, 8192)) == {"cuda:1": range(32)}


def test_two_gpus_of_24_gb_share_equally() -> None:
    """In shares of their memory, so that both keep room for longer contexts."""
    rooms, of = gpus(23.2, 23.2), model(40, 0.8, 1.2, cache=0.02)  # 34 GiB of weights
    found = check(plan(rooms, of, 8192), rooms, of)
    assert [len(stage.layers) for stage in found.stages] == [20, 20]
    unequal = gpus(23.2, 15.5)
    counts = [len(stage.layers) for stage in check(plan(unequal, of, 8192), unequal, of).stages]
    assert counts == [25, 15]


def test_the_draft_is_on_the_device_with_the_most_room_left() -> None:
    draft = 2 * GIB
    rooms = gpus(80, 80)
    alone = check(plan(rooms, EIGHT_B, 8192, draft), rooms, EIGHT_B, draft)
    assert (alone.device, alone.draft_device) == (rooms[0].device, rooms[1].device)
    assert laid_out(alone) == {"cuda:0": range(32), "cuda:1": range(0)}
    single = check(plan(rooms[:1], EIGHT_B, 8192, draft), rooms[:1], EIGHT_B, draft)
    assert single.draft_device == rooms[0].device
    used = gpus(80, 79)
    both = check(plan(used, SEVENTY_B, 8192, draft), used, SEVENTY_B, draft)
    assert both.draft_device in [room.device for room in used]
    larger = gpus(80, 80, 81.0)
    assert check(plan(larger, SEVENTY_B, 8192, draft), larger, SEVENTY_B, draft).draft_device == larger[1].device


def test_a_draft_that_leaves_no_room_takes_another_gpu() -> None:
    rooms, of = gpus(24, 24), model(40, 0.5, 0.5)  # 21 GiB
    assert len(check(plan(rooms, of, 100), rooms, of).stages) == 1
    found = check(plan(rooms, of, 100, 4 * GIB), rooms, of, 4 * GIB)
    assert laid_out(found) == {"cuda:0": range(40), "cuda:1": range(0)}
    assert found.draft_device == rooms[1].device


def test_the_cpu_takes_what_the_gpus_have_no_room_for() -> None:
    rooms = [*gpus(8), cpu(60)]
    found = check(plan(rooms, EIGHT_B, 8192), rooms, EIGHT_B)
    assert laid_out(found) == {"cuda:0": range(12), "cpu": range(12, 32)}
    assert found.device == CPU
    assert found.stages[0].left < EIGHT_B.layers[0] + EIGHT_B.cache  # as many as fit
    with_draft = check(plan(rooms, EIGHT_B, 8192, 2 * GIB), rooms, EIGHT_B, 2 * GIB)
    assert with_draft.draft_device == rooms[0].device
    assert len(with_draft.stages[0].layers) < 12


def test_a_draft_too_large_for_the_gpu_is_on_the_cpu() -> None:
    rooms = [*gpus(4), cpu(60)]
    found = check(plan(rooms, EIGHT_B, 8192, 9 * GIB), rooms, EIGHT_B, 9 * GIB)
    assert found.draft_device == CPU
    assert found.stages[0].device == rooms[0].device


def test_a_gpu_too_small_for_a_layer_is_left_out() -> None:
    rooms = [*gpus(2), cpu(60)]
    assert laid_out(check(plan(rooms, EIGHT_B, 8192), rooms, EIGHT_B)) == {"cpu": range(32)}


def test_nothing_fits() -> None:
    assert plan([*gpus(24, 24), cpu(30)], SEVENTY_B, 8192) is None
    assert plan(gpus(24), model(40, 0.8), 100) is None
    assert plan([*gpus(24), cpu(5)], EIGHT_B, 100, 20 * GIB) is None


def test_a_longer_context_takes_more_devices() -> None:
    short, long = model(32, 0.41, cache=0.01), model(32, 0.41, cache=0.5)
    rooms = gpus(24, 24)
    assert len(check(plan(rooms, short, 1000), rooms, short).stages) == 1
    assert len(check(plan(rooms, long, 50_000), rooms, long).stages) == 2


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_table_is_counted_once_on_one_device_and_twice_on_two(tied: bool) -> None:
    of = model(10, 1.0, 4.0, tied=tied)
    needed = (10 + (4 if tied else 8)) * GIB + of.working + OVERHEAD
    assert plan([Room(torch.device("cuda", 0), needed)], of, 100) is not None
    assert plan([Room(torch.device("cuda", 0), needed - 1)], of, 100) is None
    rooms = gpus(12, 12)
    found = check(plan(rooms, of, 100), rooms, of)
    assert [stage.weight_bytes for stage in found.stages] == [9 * GIB, 9 * GIB]


def test_random_machines_and_models() -> None:
    """Every plan is valid, and where there is none, the memory in sum is short or nearly so."""
    rng = random.Random(0)
    placed = 0
    for _ in range(300):
        rooms = gpus(*(rng.uniform(1, 40) for _ in range(rng.randrange(1, 5))))
        if rng.random() < 0.5:
            rooms.append(cpu(rng.uniform(1, 60)))
        of = model(
            rng.randrange(1, 50), rng.uniform(0.05, 1), rng.uniform(0, 2), tied=rng.random() < 0.5, cache=rng.uniform(0, 0.2)
        )
        draft = int(rng.choice([0, rng.uniform(0.1, 9)]) * GIB)
        found = plan(rooms, of, 1000, draft)
        if found is not None:
            placed += 1
            check(found, rooms, of, draft)
        else:
            usable = sum(max(0, room.free - of.working - OVERHEAD) for room in rooms)
            wasted = len(rooms) * (of.layers[0] + of.cache + of.embedding + of.head + draft)
            assert usable < of.total + draft + wasted
    assert 100 < placed < 290
