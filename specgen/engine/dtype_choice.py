"""Chooses the dtype that a model is run in: the one the user asks for, or else what suits the machine.

Also computes how much memory a model's weights take in the chosen dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from specgen.base import machine
from specgen.base.errors import SpecgenError
from specgen.base.measuring import timed
from specgen.base.types import QUANTISED
from specgen.engine.devices import DTYPES, free_memory, inference, one_thread
from specgen.engine.model_loading import PreparedModel
from specgen.engine.native.layer_weights import EMBEDDING, HEAD
from specgen.engine.native.products import ProductFactory, last_level_cache, quantised_bytes, refusal, rows_are_independent
from specgen.engine.weights import stored_tensors

_MIN_SPEEDUP = 1.1  # a CPU uses a 16-bit dtype only if it is this many times as fast as float32: above the noise of minima
_WIDTHS = (1, 6)  # tokens of a pass in plain decoding, and of one that verifies a draft
_TOKENS_A_PASS = 2.9  # tokens that a target pass gives with drafts of 5, each accepted with 0.7: (1 - 0.7^6) / (1 - 0.7)
_MUCH_FASTER = 2.0  # if int8 weights would decode this many times as fast, a line says so
_SECONDS, _TURNS = 2.0, 2  # the most that is spent on a choice
_NUMBERS = 3 << 20  # at most, in the weight that is timed
_MAX_FLUSH = 64 << 20  # bytes; reading more takes too long
_STORED_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The dtype of a model's weights and computations, and why it was chosen.

    `quantise` (`int8`, `int4`) is what the weights are rounded to; None: they are not rounded. `warning` says why weights are not
    rounded although the user wanted it, `hint` that decoding would be much faster with another dtype; None if there is nothing to
    say.
    """

    dtype: torch.dtype
    reason: str
    quantise: str | None = None
    warning: str | None = None
    hint: str | None = None

    @property
    def name(self) -> str:
        return self.quantise or str(self.dtype).removeprefix("torch.")


def choose_dtypes(
    models: Sequence[PreparedModel], devices: Sequence[torch.device], dtypes: tuple[str, str | None]
) -> list[DtypeChoice]:
    """Returns the dtype of a target and, if `models` has a second one, of its draft model. `devices` are the models' devices.

    `dtypes` are the values of --dtype and --draft-dtype. Raises SpecgenError as `choose_dtype` and `choose_draft_dtype` do.
    """
    target, *drafts = models
    of_drafts = [choose_draft_dtype(dtypes[1], dtypes[0], draft, devices[1]) for draft in drafts]
    return [choose_dtype(dtypes[0], target, devices[0], is_drafted_for=bool(drafts)), *of_drafts]


def choose_draft_dtype(name: str | None, dtype: str, draft: PreparedModel, device: torch.device) -> DtypeChoice:
    """Returns the dtype of a draft model: `name` (--draft-dtype), or if that is None `dtype` (--dtype).

    A draft model with weights rounded to int8 or int4 computes in float32 on a CPU, where its products take the same time in all
    dtypes, and elsewhere in the dtype of its weights. If products with rounded weights do not work on this machine, the weights
    are not rounded, and the choice's `warning` says why. Raises SpecgenError for an unknown name, and for rounding the weights of
    a model that transformers runs.
    """
    kind, other = name or dtype, "auto" if dtype in QUANTISED else dtype
    if kind not in QUANTISED or (name is None and draft.rounding_refusal is not None):
        return choose_dtype(other if name is None else kind, draft, device, is_draft=True)
    if draft.rounding_refusal is not None:
        raise SpecgenError(
            f"--draft-dtype {name} needs the native backend and no experts, and {draft.rounding_refusal}",
            "Leave it out, or take auto, float32, bfloat16 or float16",
        )
    if (problem := refusal(kind, device)) is not None:
        return replace(choose_dtype(other, draft, device, is_draft=True), warning=f"{draft.name} is not quantised: {problem}")
    own = torch.float32 if device.type == "cpu" else _own(draft)
    return DtypeChoice(own, "chosen by --dtype" if name is None else "chosen by --draft-dtype", kind)


def _rounded_target(target: PreparedModel, device: torch.device) -> DtypeChoice:
    """Returns the choice of int8 weights for a target, which then computes in float32. Raises SpecgenError if that is not
    possible."""
    if (why := target.rounding_refusal) is not None:
        pass
    elif device.type != "cpu" or machine.launch() is not None:
        why = f"{target.name} would run on {device}" + (" of several processes" if device.type == "cpu" else "")
    else:
        why = refusal("int8", device)
        if why is None and not rows_are_independent("int8", device):
            why = "its products of one token depend on the other tokens here"
    if why is not None:
        raise SpecgenError(
            f"--dtype int8 needs the native backend on a CPU and dense layers, and {why}", "Leave it out, or take --device cpu"
        )
    return DtypeChoice(torch.float32, "chosen by --dtype", "int8")


def as_chosen(model: PreparedModel, choice: DtypeChoice, *, is_target: bool = False) -> PreparedModel:
    """Returns the model with the choice's rounding of weights entered in its source, by which it is loaded."""
    wide_attention = is_target and choice.quantise is not None
    return replace(model, source=replace(model.source, quantise=choice.quantise, wide_attention=wide_attention))


def choose_dtype(
    name: str, model: PreparedModel, device: torch.device, *, is_drafted_for: bool = False, is_draft: bool = False
) -> DtypeChoice:
    """Returns the dtype named `name` to run a model in. `auto` takes the dtype that the model's config names, with exceptions on
    a CPU.

    There, `auto` takes float32 instead of a 16-bit dtype if the model fits into the processor's cache, where operations count and
    not bytes. A larger model is run in the 16-bit dtype only if a token then takes less time, or if its weights might not fit
    into memory in float32. `is_drafted_for`: the model is a target with a draft model, so that most passes verify drafts.
    `is_draft`: the model is a draft model, for which no hint is wanted. If a checkpoint is quantised, its quantised weights stay
    as they are stored: the dtype is that of the other weights and of the computation. Raises SpecgenError for an unknown name,
    and if weights are quantised in a format that cannot be loaded here.
    """
    dequantises = model.dequantises_on(device)
    if name != "auto":
        if name == "int8":
            return _rounded_target(model, device)
        if name not in DTYPES:
            raise SpecgenError(f"there is no dtype {name!r}", f"Take auto, {', '.join(DTYPES)} or int8")
        return DtypeChoice(DTYPES[name], "chosen by --dtype")
    own = _own(model)
    if model.quantisation is not None and not dequantises:
        return DtypeChoice(own, "the dtype of its weights that are not quantised")
    if device.type != "cpu" or own == torch.float32:
        return DtypeChoice(own, "the dtype of its weights")
    narrow_bytes = sum(path.stat().st_size for path in model.folder.glob("*.safetensors")) * (2 if dequantises else 1)
    if 2 * narrow_bytes <= last_level_cache():
        return DtypeChoice(torch.float32, "the model fits into the processor's cache")
    if (free := free_memory(device)) is not None and 2 * narrow_bytes > 0.8 * free:
        return DtypeChoice(own, "in float32 the weights might not fit into memory")
    return _faster(own, model, is_drafted_for=is_drafted_for, is_draft=is_draft)


def _own(model: PreparedModel) -> torch.dtype:
    return DTYPES.get(str(model.shape.dtype), torch.float32)


@inference
def _faster(narrow: torch.dtype, model: PreparedModel, *, is_drafted_for: bool, is_draft: bool) -> DtypeChoice:
    """Returns `narrow` if a token clearly takes less time than in float32, by products on one thread, which are timed in turns.

    A pass over several tokens may take as long as one over one token, or as several: what counts is the time of a pass by the
    tokens that it gives, with or without a draft.
    """
    kinds: list[torch.dtype | str] = [torch.float32, narrow]
    if not is_draft and model.rounding_refusal is None and refusal("int8", torch.device("cpu")) is None:
        kinds.append("int8")
    work = {(kind, width): _product(model, kind, width) for width in _WIDTHS for kind in kinds}
    flush = torch.ones(min(last_level_cache(), _MAX_FLUSH) // 4)  # weights come from memory, as they do in a whole model's pass
    with one_thread():
        samples = timed(work, 0, _SECONDS, most=_TURNS, before=flush.amax)
    seconds = {}
    for kind in kinds:
        single, verifying = (min(samples[kind, width]) for width in _WIDTHS)
        seconds[kind] = min(single, verifying / _TOKENS_A_PASS) if is_drafted_for else single
    dtype = narrow if seconds[torch.float32] > _MIN_SPEEDUP * seconds[narrow] else torch.float32
    times = (
        f"{1e3 * seconds[narrow]:.2f} ms a token in {DtypeChoice(narrow, '').name}, {1e3 * seconds[torch.float32]:.2f} in float32"
    )
    gain, hint = seconds[dtype] / seconds.get("int8", math.inf), None
    if gain >= _MUCH_FASTER:
        hint = f"with its weights rounded, {model.name} would decode about {gain:.1f} times as fast: --dtype int8"
    reason = f"a part of an MLP takes {times}" + (" (with drafts of 5 tokens)" if is_drafted_for else "")
    return DtypeChoice(dtype, reason, hint=hint)


def _product(model: PreparedModel, kind: torch.dtype | str, width: int) -> Callable[[], object]:
    """Returns the first product of an MLP over `width` tokens, as the model's backend computes it; not all rows of large ones.

    `kind` is the dtype, or `int8` for rounded weights. Tokens are run by different experts where there are as many.
    """
    columns = model.shape.hidden_size
    dtype = kind if isinstance(kind, torch.dtype) else torch.float32
    if model.architecture is not None and (mixture := model.architecture.mixture) is not None:
        experts = min(mixture.count, width * mixture.per_token)
        rows = max(8, min(2 * mixture.size, _NUMBERS // (columns * experts) // 8 * 8))
        weights = torch.full((experts, rows, columns), 1 / 64, dtype=dtype).transpose(1, 2)
        ends = torch.arange(1, experts + 1, dtype=torch.int32)
        return partial(torch.nn.functional.grouped_mm, torch.ones(experts, columns, dtype=dtype), weights, offs=ends)
    weight = torch.full((min(model.shape.intermediate_size or 4 * columns, _NUMBERS // columns), columns), 1 / 64, dtype=dtype)
    x = torch.ones(width, columns, dtype=dtype)
    if model.architecture is None:
        return partial(torch.nn.functional.linear, x, weight)
    return partial(ProductFactory(torch.device("cpu"), dtype, quantise=None if kind is dtype else "int8")(weight), x)


def weight_bytes(prepared: PreparedModel, device: torch.device, weights: DtypeChoice) -> dict[str, int]:
    """Returns the bytes of each of a model's tensors in memory, by name.

    A quantised checkpoint's weights stay packed as in its files, unless they are dequantised on this device. If `weights` rounds
    the weights when they are loaded, the LM head is a table apart from the embedding. Raises SpecgenError for unreadable files.
    """
    size, stored = weights.dtype.itemsize, stored_tensors(prepared.folder)
    if prepared.quantisation is not None and not prepared.dequantises_on(device):
        each = {name: size if kind in _STORED_FLOATS else _BYTES.get(kind, 1) for name, (_, kind) in stored.items()}
        return {name: math.prod(dimensions) * each[name] for name, (dimensions, _) in stored.items()}
    found = {name: count * size for name, count in prepared.parameters.items()}
    if weights.quantise is not None:
        tables = {name: name for name in found if len(stored[name][0]) == 2}
        embedding = next((name for name in tables if name.endswith(EMBEDDING)), None)
        if embedding is not None and tables.pop(embedding) and HEAD not in tables:
            tables[HEAD] = embedding
        for name, own in tables.items():
            found[name] = quantised_bytes(weights.quantise, prepared.parameters[own], stored[own][0][0])
    return found
