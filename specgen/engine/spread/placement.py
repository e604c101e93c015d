"""Plans which layers of a target live on which device with `--device auto-map`: the GPUs in their
order, then the CPU.

The sizes are those in the headers of the models' files. Each device is filled before the next one
gets a layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from specgen.base.errors import RunError
from specgen.base.model_options import ModelOptions
from specgen.engine.cached_prefix import PREFILL_CHUNK, chunk_size
from specgen.engine.devices import AUTO_MAP, free_memory
from specgen.engine.model import ModelShape
from specgen.engine.model_files import ModelFiles, check_weight_files
from specgen.engine.precision import Precision, weight_bytes

PLANNED_CONTEXT = 8192  # tokens that memory is kept for where the user names no number of them
# bytes per GPU that its context, its libraries' workspaces and gaps between allocations take
_OVERHEAD = 512 << 20
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_HEADS = ("lm_head.", "embed_out.")


class Room(NamedTuple):
    """A device and its free memory in bytes."""

    device: torch.device
    free: int

    @property
    def overhead(self) -> int:
        return 0 if self.device.type == "cpu" else _OVERHEAD


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The memory in bytes that a model takes. The weights: `layers` has those of each layer; then
    `embedding`, and `head` with the norms.

    `tied`: embedding and head share one table if both are on one device; otherwise each has a copy.
    `cache` is what the keys and values of one layer take for the planned context. `working` is what
    forward passes and loading take in addition on each device.
    """

    layers: tuple[int, ...]
    embedding: int
    head: int
    tied: bool
    cache: int
    working: int

    def weights_of(self, layers: range) -> int:
        """Returns the bytes of the weights of `layers`, which follow one another.

        With the first layer among them, the embedding is counted too, and with the last layer the
        norm and the head.
        """
        is_first = layers.start == 0
        is_last = layers.stop == len(self.layers)
        ends = self.embedding * is_first + self.head * is_last
        if is_first and is_last and self.tied:
            ends = max(self.embedding, self.head)
        return sum(self.layers[layers.start : layers.stop]) + ends

    @property
    def weights(self) -> int:
        """The bytes of all weights on a single device."""
        return self.weights_of(range(len(self.layers)))


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a plan for one device: the target's `layers` there, and how many of the device's
    `free` bytes are planned for what.

    `draft_bytes` is all that the draft model takes; 0 if it is on another device. `layers` is empty
    on a device with the draft model alone.
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
        return (
            self.free - self.weight_bytes - self.cache_bytes - self.working_bytes - self.draft_bytes
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """A plan: what is on each device that is used, in the order of the layers. `context` is the
    number of tokens planned for.

    `draft_device` is None if there is no draft model, or if the user has named its device. `device`
    is that of the target's last layers, its norm and its head, and so of its logits.
    `layer_devices` has the device of each layer; None if all are on one.
    """

    stages: tuple[Stage, ...]
    draft_device: torch.device | None
    context: int

    @property
    def device(self) -> torch.device:
        return [stage.device for stage in self.stages if stage.layers][-1]

    @property
    def layer_devices(self) -> list[torch.device] | None:
        devices = [stage.device for stage in self.stages for _ in stage.layers]
        return devices if len(set(devices)) > 1 else None


def find_rooms() -> list[Room]:
    """Returns the GPUs of this machine with their free memory, then the CPU; nothing if there is no
    GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", index) for index in range(count)] + [torch.device("cpu")]
    return [Room(device, free_memory(device) or 0) for device in devices] if count else []


def place(
    models: Sequence[ModelFiles], precisions: Sequence[Precision], options: ModelOptions
) -> Placement | None:
    """Returns the plan for a target, and for its draft model if there is one and the user has not
    named its device.

    Returns None unless the device is `auto-map` and this machine has GPUs; without GPUs, `auto-map`
    means the same as `auto`. Raises RunError if the models do not fit.
    """
    rooms = find_rooms() if options.device == AUTO_MAP else []
    if not rooms:
        return None
    context = models[0].source.context or min(models[0].context_limit, PLANNED_CONTEXT)
    target = model_memory(models[0], rooms[0].device, precisions[0], context)
    draft = 0
    if len(models) == 2 and options.draft_device is None:
        of_draft = model_memory(
            models[1], rooms[0].device, precisions[1], min(models[1].context_limit, context)
        )
        draft = of_draft.weights + of_draft.cache * len(of_draft.layers) + of_draft.working
    placement = plan(rooms, target, context, draft)
    uses_cpu = placement is None or any(
        stage.layers and stage.device.type == "cpu" for stage in placement.stages
    )
    # accelerate computes the CPU's layers on the first GPU
    if uses_cpu and models[0].backend == "transformers":
        target = replace(
            target,
            cache=0,
            working=target.working + target.cache * len(target.layers) + max(target.layers),
        )
        placement = plan(rooms, target, context, draft)
    if placement is None:
        raise _does_not_fit(models[0].name, rooms, target, context, draft)
    return placement


def plan(
    rooms: Sequence[Room], model: ModelMemory, context: int, draft: int = 0
) -> Placement | None:
    """Returns the plan for a target, and for a draft model that takes `draft` bytes (0: there is
    none to place). Returns None if they do not fit with the KV cache of `context` tokens.

    `rooms` are filled in order. Each device gets layers that follow one another; the first device
    also gets the embedding, the last one norm and head. The draft model is on the last GPU that has
    room for it; if none has, on the last device.
    """
    fitting = [
        room for room in rooms if draft + room.overhead <= room.free and room.device.type != "cpu"
    ]
    host = (fitting or rooms)[-1] if draft else None
    stages = []
    first = 0
    count = len(model.layers)
    for room in rooms:
        own = draft if room is host else 0
        reserved = model.working + room.overhead
        stage = Stage(room.device, range(first, first), room.free, draft_bytes=own)
        for last in range(first + 1, count + 1):  # the last layer only goes with the head
            layers = range(first, last)
            more = Stage(
                room.device,
                layers,
                room.free,
                model.weights_of(layers),
                len(layers) * model.cache,
                reserved,
                own,
            )
            if more.left < 0:
                break
            stage = more
        if (stage.layers or own) and stage.left >= 0:
            stages.append(stage)
        first = stage.layers.stop
    is_complete = first == count and sum(stage.draft_bytes for stage in stages) == draft
    return Placement(tuple(stages), host and host.device, context) if is_complete else None


def model_memory(
    files: ModelFiles, device: torch.device, weights: Precision, context: int
) -> ModelMemory:
    """Returns the memory that a model takes with a KV cache for `context` tokens, by the headers of
    its files.

    `weights` is the precision that the model is run in. A quantised checkpoint may be dequantised
    on `device`, and then takes more. Raises SpecgenError if the files cannot be read.
    """
    check_weight_files(files.folder, files.name)
    shape = files.shape
    size = weights.dtype.itemsize
    layers = [0] * shape.num_layers
    embedding = 0
    others = 0
    has_head = False
    for name, taken in weight_bytes(files, device, weights).items():
        match = _LAYER.search(name)
        if match is not None:
            # others predict further tokens, and are not loaded
            if int(match[1]) < shape.num_layers:
                layers[int(match[1])] += taken
        elif name.startswith(_HEADS):
            has_head = True
            others = others + taken
        elif "embed" in name or ".wte." in name or ".wpe." in name:
            embedding += taken
        else:
            others += taken
    tied = shape.tied and not has_head
    cache = context * shape.kv_bytes_per_token(size) // shape.num_layers
    # layers are fused in float32 while they are loaded
    working = max(_pass_bytes(shape, size, context), 2 * max(layers))
    return ModelMemory(
        tuple(layers), embedding, others + (embedding if tied else 0), tied, cache, working
    )


def _pass_bytes(shape: ModelShape, size: int, context: int) -> int:
    """Returns about how many bytes the largest forward pass takes: a chunk of a long prompt, with
    its attention mask."""
    tokens = min(chunk_size(max(context - PREFILL_CHUNK, 0)), context)
    per_token = (
        8 * shape.hidden_size + 4 * (shape.intermediate_size or 4 * shape.hidden_size) + 2 * context
    )
    return tokens * per_token * size + 16 * shape.vocab_size * 4  # logits of a draft, in float32


def _does_not_fit(
    name: str, rooms: Sequence[Room], target: ModelMemory, context: int, draft: int
) -> RunError:
    """Returns the error that says what is needed, and what the devices have."""
    needs = (
        f"{_size(target.weights)} of weights, "
        f"{_size(target.cache * len(target.layers))} of cache for {context:,} tokens"
    )
    needs += f" and {_size(target.working)} for passes on each device" + (
        f", its draft {_size(draft)}" if draft else ""
    )
    free = ", ".join(f"{room.device} {_size(room.free)}" for room in rooms)
    return RunError(
        f"{name} needs {needs}; free are {free}",
        "Try --context N, --dtype bfloat16 or a smaller model",
    )


def _size(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB" if count >> 30 else f"{count / (1 << 20):,.1f} MiB"
