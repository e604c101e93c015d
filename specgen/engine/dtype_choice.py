"""Chooses the dtype that a model is run in: what the user asks for, or else what suits the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

import torch

from specgen.base.errors import SpecgenError
from specgen.base.types import Context
from specgen.engine.devices import DTYPES, free_memory, one_thread
from specgen.engine.inference_mode import inference
from specgen.engine.model_runner import ModelRunner
from specgen.engine.model_shape import ModelShape
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.layer import NativeLayer, norm_gain
from specgen.engine.native.layer_weights import FINAL_NORM, layer_shapes, layer_weights
from specgen.engine.native.native_model import NativeModel, NativeParts
from specgen.engine.native.products import ProductFactory, last_level_cache

Passes = Mapping[int, Callable[[], object]]
"""For each number of tokens, a function that runs a forward pass over so many."""

_MIN_SPEEDUP = 1.1  # a CPU uses a 16-bit dtype only if it is this many times as fast as float32: above the noise of minima
_TOKENS = (1, 6)  # in plain decoding, and in a pass that verifies a draft
_SAMPLES = 3
_MLP_NUMBERS, _HEADS_NUMBERS, _TABLE_NUMBERS = 3 << 20, 1 << 20, 1 << 20  # at most, in the parts of a shortened model
_MAX_FLUSH = 64 << 20  # bytes; reading more takes too long
_CONTEXT = 32  # cached tokens of its passes


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The dtype of a model's weights and computations, and why it was chosen.

    `quantise` (`int8`, `int4`) is what the weights are rounded to, None if they are not. `warning` says why they are not although
    the user wanted it.
    """

    dtype: torch.dtype
    reason: str
    quantise: str | None = None
    warning: str | None = None

    @property
    def name(self) -> str:
        return self.quantise or str(self.dtype).removeprefix("torch.")


def pass_seconds(run: Callable[[], object]) -> float:
    """Returns the seconds of one call of `run`."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def choose_dtype(
    name: str,
    shape: ModelShape,
    folder: Path,
    device: torch.device,
    architecture: Architecture | None = None,
    *,
    timer: Callable[[Callable[[], object]], float] = pass_seconds,
    narrow_bytes: int | None = None,
) -> DtypeChoice:
    """Returns the dtype named `name` for the model in `folder`. `architecture` is None if transformers runs it.

    `narrow_bytes` is the size of all weights in a 16-bit dtype; None: that of the files.

    `auto` takes the dtype that the model's config names. On a CPU it takes float32 instead of a 16-bit dtype if the model fits
    into the processor's cache, where operations count and not bytes; a larger model is run in the 16-bit dtype if that is
    measured to be faster, or if its weights might not fit into memory in float32. Nothing is loaded for it: passes of a model
    shortened to one layer of constant weights are timed on one thread, with `timer`. Raises SpecgenError for an unknown name.
    """
    if name != "auto":
        if name not in DTYPES:
            raise SpecgenError(f"there is no dtype {name!r}", f"Take auto, {', '.join(DTYPES)}")
        return DtypeChoice(DTYPES[name], "chosen by --dtype")
    own = DTYPES.get(str(shape.dtype), torch.float32)
    if device.type != "cpu" or own not in (torch.bfloat16, torch.float16):
        return DtypeChoice(own, "the dtype of its weights")
    stored = narrow_bytes or sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if 2 * stored <= last_level_cache():
        return DtypeChoice(torch.float32, "the model fits into the processor's cache")
    free = free_memory(device)
    if free is not None and 2 * stored > 0.8 * free:
        return DtypeChoice(own, "in float32 the weights might not fit into memory")
    make = _products if architecture is None else partial(_shortened, architecture)
    with one_thread():
        return _faster(own, make, timer, shape)


@inference
def _faster(
    narrow: torch.dtype,
    make: Callable[[ModelShape, torch.dtype], Passes],
    timer: Callable[[Callable[[], object]], float],
    shape: ModelShape,
) -> DtypeChoice:
    """Returns `narrow` if its passes are clearly faster than float32's: the shortest of some samples, taken in turns."""
    passes = {dtype: make(shape, dtype) for dtype in (torch.float32, narrow)}
    flush = torch.ones(min(last_level_cache(), _MAX_FLUSH) // 4)  # written, so that its pages differ
    best = {(dtype, tokens): inf for dtype in passes for tokens in _TOKENS}
    for turn in range(1 + _SAMPLES):  # the first prepares kernels
        for tokens in _TOKENS:
            for dtype, of_dtype in passes.items():
                flush.amax()  # weights come from memory, as they do in a pass through the whole model
                taken = timer(of_dtype[tokens])
                if turn:
                    best[dtype, tokens] = min(best[dtype, tokens], taken)
    wide, fast = (sum(best[dtype, tokens] for tokens in _TOKENS) for dtype in passes)
    choice = narrow if wide > _MIN_SPEEDUP * fast else torch.float32
    measured = f"a shortened layer takes {1e3 * fast:.1f} ms in {DtypeChoice(narrow, '').name}, {1e3 * wide:.1f} in float32"
    return DtypeChoice(choice, f"{measured} ({_TOKENS[0]} and {_TOKENS[1]} tokens)")


def _products(shape: ModelShape, dtype: torch.dtype) -> Passes:
    """Returns passes that stand for those of transformers: the first matrix product of an MLP."""
    rows = min(shape.intermediate_size or 4 * shape.hidden_size, _MLP_NUMBERS // shape.hidden_size)
    weight = torch.full((rows, shape.hidden_size), 1 / 64, dtype=dtype)
    inputs = {tokens: torch.ones(tokens, shape.hidden_size, dtype=dtype) for tokens in _TOKENS}
    return {tokens: partial(torch.nn.functional.linear, x, weight) for tokens, x in inputs.items()}


def _shortened(architecture: Architecture, shape: ModelShape, dtype: torch.dtype) -> Passes:
    """Returns passes of a model with one layer of this kind and a small head."""
    runner = ModelRunner(shortened_model(architecture, dtype))
    context = Context([0] * min(_CONTEXT, shape.context_limit - max(_TOKENS)))
    runner.logits(context)
    return {tokens: partial(runner.logits, context, [0] * (tokens - 1)) for tokens in _TOKENS}


def shortened_model(architecture: Architecture, dtype: torch.dtype) -> NativeModel:
    """Returns a model for the CPU with the architecture's first layer, of a limited size, whose weights are all alike."""
    width, size, device = architecture.hidden_size, architecture.head_size, torch.device("cpu")
    group = architecture.num_heads // architecture.num_kv_heads
    kv_heads = min(architecture.num_kv_heads, max(1, _HEADS_NUMBERS // (width * size * (2 * group + 2))))
    short = replace(
        architecture,
        layers=architecture.layers[:1],
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        intermediate_size=min(architecture.intermediate_size, max(1, _MLP_NUMBERS // (3 * width))),
        vocab_size=min(architecture.vocab_size, max(1, _TABLE_NUMBERS // width)),
    )

    shapes = layer_shapes(short, 0) | {FINAL_NORM: (width,), "": (short.vocab_size, width)}

    def weights(name: str) -> torch.Tensor:
        return torch.full(shapes[name], 1 / 64, dtype=dtype)

    factory, gain = ProductFactory(device, dtype, cache_bytes=1), norm_gain(short, dtype, device)
    table = weights("")
    parts = NativeParts(table, weights(FINAL_NORM), factory(table))
    layer = NativeLayer(short, 0, 0, layer_weights(short, 0, weights, dtype, gain), factory, gain=gain)
    return NativeModel(short, [layer], parts, dtype, norm_gain=gain, min_rows=factory.min_rows)
