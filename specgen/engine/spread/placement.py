"""Plans which layers of a target live on which device, where it is spread over several GPUs and the CPU (`--device auto-map`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

_STEPS = 20  # of the bisection that balances the devices: to a millionth of their memory
_OVERHEAD = 512 << 20  # bytes per GPU that its context, its libraries' workspaces and gaps between allocations take


class Room(NamedTuple):
    """A device and its free memory in bytes."""

    device: torch.device
    free: int


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The memory in bytes that a model takes: the weights of each of its `layers`, of the embedding, and of norm and `head`.

    `tied`: embedding and head share their table where both are on one device; elsewhere each has a copy. `cache` is what the
    keys and values of one layer take for the planned context, `working` what forward passes and loading take on each device
    besides.
    """

    layers: tuple[int, ...]
    embedding: int
    head: int
    tied: bool
    cache: int
    working: int

    def weights_on_one_device(self) -> int:
        return sum(self.layers) + self.ends(is_first=True, is_last=True)

    def ends(self, *, is_first: bool, is_last: bool) -> int:
        """Returns the bytes of embedding and head on a device that has the first layer, the last layer, or both."""
        if is_first and is_last and self.tied:
            return max(self.embedding, self.head)
        return self.embedding * is_first + self.head * is_last

    @property
    def total(self) -> int:
        """The bytes that the model takes on a single device."""
        return self.weights_on_one_device() + self.cache * len(self.layers) + self.working


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a plan for one device: the target's `layers` there, and the bytes that are planned of its `free` ones.

    `draft_bytes` is all that the draft model takes, 0 if it is elsewhere. `layers` is empty on a device with the draft alone.
    """

    device: torch.device
    layers: range
    free: int
    weight_bytes: int = 0
    cache_bytes: int = 0
    working_bytes: int = 0
    draft_bytes: int = 0

    @property
    def left(self) -> int:
        return self.free - self.weight_bytes - self.cache_bytes - self.working_bytes - self.draft_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """A plan: what is on each device that is used, in the order of the layers. `context` is the number of tokens planned for.

    `draft_device` is None if there is no draft model, or if the user has named its device.
    """

    stages: tuple[Stage, ...]
    draft_device: torch.device | None
    context: int

    @property
    def device(self) -> torch.device:
        """The device of the target's last layers, its norm and its head: where its logits are."""
        return self.target_stages[-1].device

    @property
    def target_stages(self) -> list[Stage]:
        return [stage for stage in self.stages if stage.layers]

    @property
    def layer_devices(self) -> list[torch.device] | None:
        """The device of each layer; None if all are on one."""
        stages = self.target_stages
        return [stage.device for stage in stages for _ in stage.layers] if len(stages) > 1 else None


class _Split(NamedTuple):
    """A way to spread a target: the rooms that get layers, and which."""

    rooms: list[Room]
    layers: list[range]


def plan(rooms: Sequence[Room], model: ModelMemory, context: int, draft: int = 0) -> Placement | None:
    """Returns the plan for a target, and for a draft model that takes `draft` bytes (0: none to place). None if nothing fits.

    Takes as few GPUs as possible, those with the most room, and fills them in equal shares of their free memory, so that each
    keeps room for longer contexts. Only where all GPUs together are too small, they are filled, and the CPU takes the rest: the
    last layers. Each device has layers that follow one another, the first one also the embedding, the last one norm and head.
    The draft model is on the GPU that then has the most room left, which may be one without layers of the target. With layers on
    the CPU, it is on the GPU that leaves the fewest of them there, and on the CPU only if no GPU has room for it.
    """
    gpus = [room for room in rooms if room.device.type != "cpu"]
    ranked = sorted(gpus, key=lambda room: -room.free)
    for count in range(1, len(gpus) + 1):
        used = sorted(ranked[:count], key=gpus.index)
        options = [
            (share, host, split)
            for host in (gpus if draft else [None])
            if (share := _least_share(used, host, model, draft)) is not None
            and (split := _split(used, host, model, draft, share)) is not None
        ]
        if options:
            _, host, split = min(options, key=lambda option: option[0])
            return _placement(split, host, model, draft, context)
    choices: list[list[Room | None]] = [[*ranked], [*rooms[len(gpus) :]]] if draft else [[None]]
    for hosts in choices:
        filled = [(split, host) for host in hosts if (split := _split(rooms, host, model, draft, 1.0)) is not None]
        if filled:
            split, host = min(filled, key=lambda option: len(option[0].layers[-1]))
            return _placement(split, host, model, draft, context)
    return None


def reserve(room: Room, model: ModelMemory) -> int:
    """Returns the bytes of a device that the target uses which are kept for forward passes."""
    return model.working + (_OVERHEAD if room.device.type != "cpu" else 0)


def _least_share(used: Sequence[Room], host: Room | None, model: ModelMemory, draft: int) -> float | None:
    """Returns the smallest share of each device's memory with which all fits, with the draft model on `host`; None if none."""
    others = 0.0
    if host is not None and host not in used:
        others = (draft + _OVERHEAD) / max(host.free, 1)
        if others > 1:
            return None
    low, high = 0.0, 1.0
    if _split(used, host, model, draft, high) is None:
        return None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _split(used, host, model, draft, middle) is not None else (middle, high)
    return max(high, others)


def _split(rooms: Sequence[Room], host: Room | None, model: ModelMemory, draft: int, share: float) -> _Split | None:
    """Spreads the layers over the rooms in their order, each filled up to `share` of its free memory; None if they do not fit.

    A room that is too small for a layer gets none.
    """
    count, first = len(model.layers), 0
    found = _Split([], [])
    for room in rooms:
        capacity = share * room.free - reserve(room, model) - (draft if room is host else 0)
        last = _filled(capacity, model, first)
        if last > first:
            found.rooms.append(room)
            found.layers.append(range(first, last))
            first = last
    is_placed = first == count and (host is None or host in found.rooms or draft <= host.free)
    return found if is_placed else None


def _filled(capacity: float, model: ModelMemory, first: int) -> int:
    """Returns the end of the layers from `first` on that fit into so many bytes. The last layer only goes with the head."""
    count, last, weights = len(model.layers), first, 0
    while last < count:
        weights += model.layers[last]
        ends = model.ends(is_first=first == 0, is_last=last == count - 1)
        if weights + ends + (last + 1 - first) * model.cache > capacity:
            break
        last += 1
    return last


def _placement(split: _Split, host: Room | None, model: ModelMemory, draft: int, context: int) -> Placement:
    return Placement(tuple(_stages(split, host, model, draft)), None if host is None else host.device, context)


def _stages(split: _Split, host: Room | None, model: ModelMemory, draft: int) -> Iterator[Stage]:
    for room, layers in zip(*split, strict=True):
        ends = model.ends(is_first=layers.start == 0, is_last=layers.stop == len(model.layers))
        yield Stage(
            room.device,
            layers,
            room.free,
            sum(model.layers[layers.start : layers.stop]) + ends,
            model.cache * len(layers),
            reserve(room, model),
            draft if room is host else 0,
        )
    if host is not None and host not in split.rooms:
        yield Stage(host.device, range(0), host.free, draft_bytes=draft)
