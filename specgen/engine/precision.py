"""Chooses the precision that a model is run in: what the user asks for, or else what a rule says.

The rule depends on the model and the machine alone and not on measured times, because another dtype
gives another text. Also computes how much memory a model's weights take in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specgen.base import machine
from specgen.base.errors import RunError, SpecgenError
from specgen.base.model_options import ModelOptions
from specgen.base.types import QUANTISED
from specgen.engine.devices import DTYPES, free_memory, total_memory
from specgen.engine.gguf.file import is_gguf
from specgen.engine.model_files import ModelFiles
from specgen.engine.native.layer_files import EMBEDDING, HEAD
from specgen.engine.native.linear import quantised_bytes, refusal, rows_are_independent
from specgen.engine.weights import stored_tensors

_SHARE_OF_MEMORY = 0.6  # of the machine's memory: the most that weights in float32 may take
_STORED_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype of a model's weights and computations, and why it was chosen.

    `rounding` (`int8`, `int4`) is what the weights are rounded to when they are loaded; None: they
    are not rounded. `wide_attention`: see `native.layer.NativeLayer`. `warning` is a sentence for
    the user where the dtype is not the one to be expected; None if there is nothing to say.
    """

    dtype: torch.dtype
    reason: str = ""
    rounding: str | None = None
    wide_attention: bool = False
    warning: str | None = None

    @property
    def name(self) -> str:
        return self.rounding or _name(self.dtype)


def choose_precisions(
    models: Sequence[ModelFiles], devices: Sequence[torch.device], options: ModelOptions
) -> list[Precision]:
    """Returns the precision of a target and, if `models` has a second one, of its draft model.
    `devices` are the models' devices.

    Raises SpecgenError as `choose_precision`
    and `choose_draft_precision` do.
    """
    target, *drafts = models
    own, of_draft = options.dtype, options.draft_dtype
    of_drafts = [choose_draft_precision(of_draft, own, draft, devices[1]) for draft in drafts]
    return [choose_precision(own, target, devices[0]), *of_drafts]


def choose_draft_precision(
    name: str | None, dtype: str, draft: ModelFiles, device: torch.device
) -> Precision:
    """Returns the precision of a draft model: `name` (--draft-dtype), or if that is None `dtype`
    (--dtype).

    A draft model with weights rounded to int8 or int4 computes in float32 on a CPU, where its
    products take the same time in all dtypes, and elsewhere in the dtype of its weights. If
    products with rounded weights do not work on this machine, the weights are not rounded, and the
    `warning` says why. Raises SpecgenError for an unknown name, and if `name` asks to round the
    weights of a mixture of experts or of a model that transformers runs; if `dtype` does, they are
    not rounded.
    """
    kind = name or dtype
    other = "auto" if dtype in QUANTISED else dtype
    if kind not in QUANTISED or (name is None and draft.rounding_refusal is not None):
        return choose_precision(other if name is None else kind, draft, device)
    if draft.rounding_refusal is not None:
        raise SpecgenError(
            (
                f"--draft-dtype {name} needs the native backend and no experts, and "
                f"{draft.rounding_refusal}"
            ),
            "Leave it out, or take auto, float32, bfloat16 or float16",
        )
    if (problem := refusal(kind, device)) is not None:
        return replace(
            choose_precision(other, draft, device),
            warning=f"{draft.name} is not quantised: {problem}",
        )
    own = torch.float32 if device.type == "cpu" else _own(draft)
    return Precision(own, "chosen by --dtype" if name is None else "chosen by --draft-dtype", kind)


def _rounded_target(target: ModelFiles, device: torch.device) -> Precision:
    """Returns the precision of a target with int8 weights, which then computes in float32. Raises
    SpecgenError if that is not possible."""
    why = target.rounding_refusal
    if why is not None:
        pass
    elif target.architecture is not None and target.architecture.recurrent is not None:
        why = f"{target.name} has recurrent layers, whose states would depend on the passes"
    elif device.type != "cpu" or machine.launch() is not None:
        why = f"{target.name} would run on {device}" + (
            " of several processes" if device.type == "cpu" else ""
        )
    else:
        why = refusal("int8", device)
        if why is None and not rows_are_independent("int8", device):
            why = "its products of one token depend on the other tokens here"
    if why is not None:
        problem = (
            "--dtype int8 needs the native backend on a CPU and dense layers with "
            f"attention, and {why}"
        )
        raise SpecgenError(
            problem,
            "Leave it out" if device.type == "cpu" else "Leave it out, or take --device cpu",
        )
    return Precision(torch.float32, "chosen by --dtype", "int8", wide_attention=True)


def choose_precision(name: str, model: ModelFiles, device: torch.device) -> Precision:
    """Returns the precision of a model that is run in the dtype named `name`. `auto` is float32 on
    a CPU, and elsewhere the dtype of the weights.

    On a CPU, `auto` is the dtype of the weights too if they would take too much of the machine's
    memory in float32, and bfloat16 for a quantised GGUF file; the `warning` says so. If a
    checkpoint is quantised, its quantised weights stay as they are stored: the dtype is that of the
    other weights and of the computation. (Those of a GGUF file are converted.) Raises SpecgenError
    for an unknown name, and if weights are quantised in a format that cannot be loaded here.
    """
    dequantises = model.dequantises_on(device)
    if name == "int8":
        return _rounded_target(model, device)
    if name != "auto":
        if name not in DTYPES:
            raise SpecgenError(
                f"there is no dtype {name!r}", f"Take auto, {', '.join(DTYPES)} or int8"
            )
        return Precision(DTYPES[name], "chosen by --dtype")
    own = _own(model)
    if model.quantisation is not None and not dequantises:
        return Precision(own, "the dtype of its weights that are not quantised")
    narrow = _narrow(model)
    if device.type != "cpu" or narrow is None:
        return Precision(own, "the dtype of its weights")
    return _on_cpu(narrow, model)


def check_room(model: ModelFiles, device: torch.device, precision: Precision) -> None:
    """Raises RunError if 16-bit or quantised weights that are widened to float32 on a CPU do not
    fit into its free memory.

    They are not loaded as they are stored instead: with another dtype, the same command would give
    another text.
    """
    narrow = _narrow(model)
    if (
        device.type != "cpu"
        or precision.dtype != torch.float32
        or narrow is None
        or precision.rounding is not None
    ):
        return
    needed = _float32_bytes(model)
    free = free_memory(device)
    if free is not None and needed > free:
        problem = (
            f"{model.name} takes {_gib(needed)} of memory in float32, and {_gib(free)} are free"
        )
        raise RunError(
            problem,
            f"Close other programs, or take --dtype {_name(narrow)}, which may give another text",
        )


def _own(model: ModelFiles) -> torch.dtype:
    return DTYPES.get(str(model.shape.dtype), torch.float32)


def _narrow(model: ModelFiles) -> torch.dtype | None:
    """Returns the 16-bit dtype of a model that is stored in fewer bits than float32 has; None for
    one that is stored in float32."""
    own = _own(model)
    if own != torch.float32:
        return own
    return torch.bfloat16 if is_gguf(model.folder) and not _is_stored_in_floats(model) else None


def _is_stored_in_floats(model: ModelFiles) -> bool:
    return all(kind in _STORED_FLOATS for _, kind in stored_tensors(model.folder).values())


def _on_cpu(narrow: torch.dtype, model: ModelFiles) -> Precision:
    """Returns float32 for a model of the 16-bit dtype `narrow`; `narrow` if its weights take too
    much memory in float32.

    What counts is all memory of the machine, because the memory that is free differs from start to
    start.
    """
    needed = _float32_bytes(model)
    total = total_memory()
    if total is None or needed <= _SHARE_OF_MEMORY * total:
        return Precision(torch.float32, "the dtype of all models on a CPU")
    memory = f"{_gib(needed)} of this machine's {_gib(total)} of memory"
    stored = ", as it is stored" if _is_stored_in_floats(model) else ""
    warning = f"{model.name} runs in {_name(narrow)}{stored}: in float32 it would take {memory}"
    return Precision(narrow, "in float32 the weights would take too much memory", warning=warning)


def _float32_bytes(model: ModelFiles) -> int:
    return sum(model.parameters.values()) * torch.float32.itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB"


def weight_bytes(files: ModelFiles, device: torch.device, weights: Precision) -> dict[str, int]:
    """Returns the bytes of each of a model's tensors in memory, by name.

    A quantised checkpoint's weights stay packed as in its files, unless they are dequantised on
    this device. If `weights` rounds the weights when they are loaded, the LM head is a table apart
    from the embedding. Raises SpecgenError for unreadable files.
    """
    size = weights.dtype.itemsize
    stored = stored_tensors(files.folder)
    if files.quantisation is not None and not files.dequantises_on(device):
        each = {
            name: size if kind in _STORED_FLOATS else _BYTES.get(kind, 1)
            for name, (_, kind) in stored.items()
        }
        return {
            name: math.prod(dimensions) * each[name] for name, (dimensions, _) in stored.items()
        }
    sizes = {name: count * size for name, count in files.parameters.items()}
    if weights.rounding is not None:
        tables = {name: name for name in sizes if len(stored[name][0]) == 2}
        embedding = next((name for name in tables if name.endswith(EMBEDDING)), None)
        if embedding is not None and tables.pop(embedding) and HEAD not in tables:
            tables[HEAD] = embedding
        for name, own in tables.items():
            sizes[name] = quantised_bytes(
                weights.rounding, files.parameters[own], stored[own][0][0]
            )
    return sizes
