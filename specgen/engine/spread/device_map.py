"""Plans where a pair's models live with `--device auto-map`, from the devices' free memory and the sizes in the models' files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from specgen.base.errors import RunError
from specgen.engine.cached_prefix import PREFILL_CHUNK, chunk_size
from specgen.engine.devices import AUTO_MAP, free_memory
from specgen.engine.dtype_choice import DtypeChoice
from specgen.engine.model_loading import PreparedModel, check_weight_files
from specgen.engine.model_shape import ModelShape
from specgen.engine.spread.placement import ModelMemory, Placement, Room, plan
from specgen.engine.weight_sizes import weight_sizes

PLANNED_CONTEXT = 8192  # tokens that memory is kept for where the user names no number of them
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_HEADS = ("lm_head.", "embed_out.")


def find_rooms() -> list[Room]:
    """Returns the GPUs of this machine with their free memory, then the CPU; nothing if there is no GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return []
    devices = [torch.device("cuda", index) for index in range(count)] + [torch.device("cpu")]
    return [Room(device, free_memory(device) or 0) for device in devices]


def place(
    device: str, models: Sequence[PreparedModel], choices: Sequence[DtypeChoice], draft_device: str | None
) -> Placement | None:
    """Returns the plan for a target, and for its draft model if there is one and the user has not named its device.

    None unless `device` is `auto-map` and this machine has GPUs: then it means `auto`. Raises RunError if nothing fits.
    """
    rooms = find_rooms() if device == AUTO_MAP else []
    if not rooms:
        return None
    context = models[0].source.context or min(models[0].context_limit, PLANNED_CONTEXT)
    target = model_memory(models[0], rooms[0].device, choices[0], context)
    draft = 0
    if len(models) == 2 and draft_device is None:
        draft = model_memory(models[1], rooms[0].device, choices[1], min(models[1].context_limit, context)).total
    gpus = [room for room in rooms if room.device.type != "cpu"]
    found = plan(gpus, target, context, draft)
    if found is None and models[0].config.backend == "transformers":  # accelerate computes the CPU's layers on the first GPU
        target = replace(target, cache=0, working=target.working + target.cache * len(target.layers) + max(target.layers))
    found = plan(rooms, target, context, draft) if found is None else found
    if found is None:
        raise _does_not_fit(models[0].name, rooms, target, context, draft)
    return found


def model_memory(prepared: PreparedModel, device: torch.device, weights: DtypeChoice, context: int) -> ModelMemory:
    """Returns the memory that a model takes with a KV cache for `context` tokens, by the headers of its files.

    `weights` is the dtype that it is run in; quantised ones may be dequantised on `device`. Raises SpecgenError if the files
    cannot be read.
    """
    check_weight_files(prepared.folder, prepared.name)
    shape, size = prepared.shape, weights.dtype.itemsize
    layers, embedding, others, has_head = [0] * shape.num_layers, 0, 0, False
    for name, taken in weight_sizes(prepared, device, weights)[1].items():
        found = _LAYER.search(name)
        if found is not None:
            if int(found[1]) < shape.num_layers:  # others predict further tokens, and are not loaded
                layers[int(found[1])] += taken
        elif name.startswith(_HEADS):
            has_head, others = True, others + taken
        elif "embed" in name or ".wte." in name or ".wpe." in name:
            embedding += taken
        else:
            others += taken
    tied = shape.tied and not has_head
    cache = context * shape.kv_bytes_per_token(size) // shape.num_layers
    working = max(_pass_bytes(shape, size, context), 2 * max(layers))  # layers are fused in float32 while they are loaded
    return ModelMemory(tuple(layers), embedding, others + (embedding if tied else 0), tied, cache, working)


def _pass_bytes(shape: ModelShape, size: int, context: int) -> int:
    """Returns about how many bytes the largest forward pass takes: a chunk of a long prompt, with its attention mask."""
    tokens = min(chunk_size(max(context - PREFILL_CHUNK, 0)), context)
    per_token = 8 * shape.hidden_size + 4 * (shape.intermediate_size or 4 * shape.hidden_size) + 2 * context
    return tokens * per_token * size + 16 * shape.vocab_size * 4  # logits of a draft, in float32


def _does_not_fit(name: str, rooms: Sequence[Room], target: ModelMemory, context: int, draft: int) -> RunError:
    """Returns the error that says what is needed, and what the devices have."""
    weights, cache = target.weights_on_one_device(), target.cache * len(target.layers)
    needs = f"{_size(weights)} of weights, {_size(cache)} of cache for {context:,} tokens"
    needs += f" and {_size(target.working)} for passes on each device" + (f", its draft {_size(draft)}" if draft else "")
    free = ", ".join(f"{room.device} {_size(room.free)}" for room in rooms)
    return RunError(f"{name} needs {needs}; free are {free}", "Try --context N, --dtype bfloat16 or a smaller model")


def _size(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB" if count >> 30 else f"{count / (1 << 20):,.1f} MiB"
