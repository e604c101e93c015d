"""Chooses the precision that a model is run in: what the user asks for, or else what a rule says.

The rule depends on the model and the machine alone and not on measured times, because another dtype
gives another text. Also computes how much memory a model's weights take in it.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specgen.base import machine
from specgen.base.errors import RunError, SpecgenError
from specgen.base.model_options import ModelOptions
from specgen.base.types import QUANTISED
from specgen.engine.devices import DTYPES, free_memory, total_memory
from specgen.engine.gguf.file import is_gguf
from specgen.engine.gguf.rounded import EXACT_TYPES
from specgen.engine.kernels.library import VARIABLE, kernels, why_none
from specgen.engine.kernels.operators import kernels_for
from specgen.engine.model_files import ModelFiles
from specgen.engine.native.layer_files import EMBEDDING, HEAD
from specgen.engine.native.linear import quantised_bytes, refusal

_SHARE_OF_MEMORY = 0.6  # of the machine's memory: the most that weights in float32 may take
_STORED_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# bytes of an element in memory, by the type in which it is stored
_STORED_SIZES: dict[str, float] = {"F16": 2, "BF16": 2}
_PACKED_SIZES = {
    **dict.fromkeys(("Q4_0", "Q4_1"), 20 / 32),
    **dict.fromkeys(("Q5_0", "Q5_1", "MXFP4"), 36 / 32),
    "Q4_K": 24 / 32,
    "Q5_K": 40 / 32,
    **dict.fromkeys(("Q8_0", "Q6_K", "IQ4_XS"), 34 / 32),
}
# of a table of embeddings, see `gguf.rounded`; in float32, where that would not be exact
_TABLE_SIZES = _STORED_SIZES | dict.fromkeys(EXACT_TYPES, 40 / 32)
# matrices that are never rounded, nor computed with as quantised files store them
_UNROUNDED = re.compile(r"\.(router|gate|shared_expert_gate|linear_attn\.in_proj_(a|b|ba))\.")
_EXPERTS = re.compile(r"(^|\.)experts\.")
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}


_COST_OF_Q6_K = "perplexity +0.08 % for SmolLM2-135M"  # see `gguf.rounded.read_rounded`
_ROUNDED_AS = {
    "int8": "rounded to 8 bits in groups of 32",
    "int4": "rounded to 4 bits with scale and minimum in groups of 32",
}


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtype of a model's weights and computations, and why it was chosen.

    `rounding` (`int8`, `int4`) is what the weights are rounded to when they are loaded; None: they
    are not rounded. `stored_type` is the type of a quantised GGUF file's matrices if they stay as
    they are; None: they are floating-point numbers. `rounded_types` are the types in that file with
    which the kernels compute in 8 bits. `wide_attention`: see `native.layer.NativeLayer`. `warning`
    is a sentence for the user where the dtype is not the one to be expected; None if there is
    nothing to say.
    """

    dtype: torch.dtype
    reason: str = ""
    rounding: str | None = None
    stored_type: str | None = None
    rounded_types: Sequence[str] = ()
    wide_attention: bool = False
    warning: str | None = None

    @property
    def name(self) -> str:
        return self.stored_type or self.rounding or _name(self.dtype)

    def kept_as(self, stored: str | None) -> str:
        """Returns in words how the weights are in memory. `stored` is the dtype in which kernels
        leave those that are stored in floating point; None: there are no kernels."""
        if self.stored_type is not None:
            in_8_bits = "".join(f", {kind} in 8 bits" for kind in self.rounded_types)
            cost = f" ({_COST_OF_Q6_K})" if "Q6_K" in self.rounded_types else ""
            return f"as in their file ({self.stored_type}){in_8_bits}{cost}"
        if self.rounding is not None:
            return _ROUNDED_AS[self.rounding]
        if stored is not None:
            return f"as stored ({stored})"
        return _name(self.dtype)


def choose_precisions(
    models: Sequence[ModelFiles], devices: Sequence[torch.device], options: ModelOptions
) -> list[Precision]:
    """Returns the precision of a target and, if `models` has a second one, of its draft model.
    `devices` are the models' devices.

    Raises SpecgenError as `choose_precision` and `choose_draft_precision` do.
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
    `warning` says why. Raises SpecgenError for an unknown name, and if `name` asks to round weights
    that cannot be rounded (see `ModelFiles.rounding_refusal`); if `dtype` does, they are not
    rounded.
    """
    kind = name or dtype
    other = "auto" if dtype in QUANTISED else dtype
    why = draft.rounding_refusal(device)
    if kind not in QUANTISED or (name is None and why is not None):
        return choose_precision(other if name is None else kind, draft, device)
    if why is not None:
        raise SpecgenError(
            f"--draft-dtype {name} needs the native backend, and {why}",
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
    why = target.rounding_refusal(device)
    if why is not None:
        pass
    elif device.type != "cpu" or machine.launch() is not None:
        why = f"{target.name} would run on {device}" + (
            " of several processes" if device.type == "cpu" else ""
        )
    if why is not None:
        raise SpecgenError(
            f"--dtype int8 needs the native backend on a CPU, and {why}",
            "Leave it out" if device.type == "cpu" else "Leave it out, or take --device cpu",
        )
    reason = "chosen by --dtype"
    if kernels() is not None:
        return Precision(torch.float32, reason, "int8", wide_attention=_is_recurrent(target))
    warning = None
    if _lacks_kernels():
        warning = f"torch computes the int8 products of {target.name}, slowly: {why_none()}"
    return Precision(torch.float32, reason, "int8", wide_attention=True, warning=warning)


def _is_recurrent(model: ModelFiles) -> bool:
    return model.architecture is not None and model.architecture.recurrent is not None


def choose_precision(name: str, model: ModelFiles, device: torch.device) -> Precision:
    """Returns the precision of a model that is run in the dtype named `name`. `auto` is float32 on
    a CPU, and elsewhere the dtype of the weights.

    On a CPU with our own kernels, `auto` leaves the matrices of a quantised GGUF file as they are
    (`stored_type`). If the weights would take too much of a CPU machine's memory, `auto` is their
    dtype, bfloat16 for a quantised GGUF file; the `warning` says so. If another checkpoint is
    quantised, its quantised weights stay as they are stored: the dtype is that of the other weights
    and of the computation. Raises SpecgenError for an unknown name, and if weights are quantised in
    a format that cannot be loaded here.
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
    stored_type = _computable_type(model)
    if stored_type is not None:
        wide = _is_recurrent(model)
        reason = "as in its file"
        return Precision(
            torch.float32,
            reason,
            stored_type=stored_type,
            rounded_types=_rounded_types(model),
            wide_attention=wide,
        )
    chosen = _on_cpu(narrow, model)
    is_quantised = is_gguf(model.folder) and not _is_stored_in_floats(model)
    if is_quantised and chosen.warning is None and _lacks_kernels():
        needed = _gib(sum(weight_bytes(model, device, chosen).values()))
        warning = f"{model.name} becomes float32, {needed}, and is slower: {why_none()}"
        return replace(chosen, warning=warning)
    return chosen


def _lacks_kernels() -> bool:
    """Whether there are no kernels of our own here, and the user does not know it."""
    return kernels() is None and VARIABLE not in os.environ


def _computable_type(model: ModelFiles) -> str | None:
    """Returns the type of most of a quantised GGUF file's weights if our own kernels can compute
    with them as they are."""
    is_alone = machine.launch() is None
    if not is_gguf(model.folder) or model.architecture is None or not is_alone or kernels() is None:
        return None
    sizes: Counter[str] = Counter()
    for dimensions, kind in model.stored_tensors.values():
        sizes[kind] += math.prod(dimensions)
    ((kind, _),) = sizes.most_common(1)
    return None if kind in _STORED_FLOATS else kind.lower()


def _rounded_types(model: ModelFiles) -> tuple[str, ...]:
    """Returns the types in a quantised GGUF file with which our own kernels compute in 8 bits, see
    `gguf.rounded.read_rounded`."""
    kinds = {kind for _, kind in model.stored_tensors.values()}
    return tuple(sorted(kinds & (_PACKED_SIZES.keys() - set(EXACT_TYPES))))


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
        or precision.stored_type is not None
    ):
        return
    needed = sum(weight_bytes(model, device, precision).values())
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


def stored_16_bit_dtype(model: ModelFiles) -> torch.dtype | None:
    """Returns the 16-bit dtype in which a model's weights are stored; None if they are stored in
    another one, or quantised."""
    own = _own(model)
    is_quantised = model.quantisation is not None or not _is_stored_in_floats(model)
    return None if is_quantised or own.itemsize != 2 else own


def _is_stored_in_floats(model: ModelFiles) -> bool:
    return all(kind in _STORED_FLOATS for _, kind in model.stored_tensors.values())


def _on_cpu(narrow: torch.dtype, model: ModelFiles) -> Precision:
    """Returns float32 for a model of the 16-bit dtype `narrow`; `narrow` if its weights take too
    much memory in float32.

    What counts is all memory of the machine, because the memory that is free differs from start to
    start.
    """
    in_float32 = Precision(torch.float32)
    needed = sum(weight_bytes(model, torch.device("cpu"), in_float32).values())
    total = total_memory()
    if total is None or needed <= _SHARE_OF_MEMORY * total:
        return Precision(torch.float32, "the dtype of all models on a CPU")
    memory = f"{_gib(needed)} of this machine's {_gib(total)} of memory"
    stored = ", as it is stored" if _is_stored_in_floats(model) else ""
    warning = f"{model.name} runs in {_name(narrow)}{stored}: in float32 it would take {memory}"
    return Precision(narrow, "in float32 the weights would take too much memory", warning=warning)


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
    stored = files.stored_tensors
    if files.quantisation is not None and not files.dequantises_on(device):
        each = {
            name: size if kind in _STORED_FLOATS else _BYTES.get(kind, 1)
            for name, (_, kind) in stored.items()
        }
        return {
            name: math.prod(dimensions) * each[name] for name, (dimensions, _) in stored.items()
        }
    sizes = {name: count * size for name, count in files.parameters.items()}
    if files.architecture is not None and kernels_for(device, weights.dtype) is not None:
        sizes_of_types = _STORED_SIZES
        if weights.stored_type is not None:
            sizes_of_types = _STORED_SIZES | _PACKED_SIZES
        for name, count in files.parameters.items():
            dimensions, kind = stored[name]
            if _is_matrix(name, dimensions):
                known = _STORED_SIZES if _UNROUNDED.search(name) else sizes_of_types
                sizes[name] = round(count * min(size, known.get(kind, size)))
    if weights.stored_type is not None:
        # the table of embeddings, whose rows are read as they are stored, and the packed head
        table = next(name for name in sizes if name.endswith(EMBEDDING))
        sizes.setdefault(HEAD, sizes[table])
        table_size = _TABLE_SIZES.get(stored[table][1], size)
        sizes[table] = round(files.parameters[table] * table_size)
    if weights.rounding is not None:
        tables = {
            name: name
            for name in sizes
            if _is_matrix(name, stored[name][0]) and not _UNROUNDED.search(name)
        }
        embedding = next((name for name in tables if name.endswith(EMBEDDING)), None)
        if embedding is not None and tables.pop(embedding) and HEAD not in tables:
            tables[HEAD] = embedding
        for name, own in tables.items():
            sizes[name] = quantised_bytes(weights.rounding, files.parameters[own])
    return sizes


def _is_matrix(name: str, dimensions: Sequence[int]) -> bool:
    """Whether a tensor is the matrix of a linear layer, or has those of all experts."""
    if name.endswith("_bias"):  # of all experts
        return False
    return len(dimensions) == 2 or (len(dimensions) == 3 and _EXPERTS.search(name) is not None)
