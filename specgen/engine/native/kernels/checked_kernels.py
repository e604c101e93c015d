"""Chooses the kernels of a model's static passes: Triton's where these work on the device, torch's operators elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from specgen.engine.inference_mode import inference
from specgen.engine.native.description import Architecture
from specgen.engine.native.kernels.kernel_set import SPAN, AttentionSpec, KernelSet, PassNumbers, StaticInputs
from specgen.engine.native.kernels.torch_kernels import TORCH
from specgen.engine.native.kv_buffer import LayerEntries

_CAPACITY = 2500  # cache entries of the samples: more splits than the attention adds up at once
_BASES = (2, 130, 2300)  # numbers of cached tokens before those of the samples
_WINDOW = 100  # at most, of the samples: below most bases, so that it excludes keys
_ROUNDINGS = 6  # units in the last place that a result may differ by, relative to the largest number
_IN_FLOAT32 = 2e-5  # for float32, where it is the order of the sums that differs
_LEAST_CAPABILITY = 8, 0  # compiled for 7.5, the attention spills 6 KB of registers per thread (`tests/kernel_resources.py`)
_BLOCK_WIDTHS = (1, 2, 4, 8, 16, 32, SPAN)  # they need each variant of the attention, which depends on the number of query rows

_WITH = {"store": ("norms",), "attend": ("finds_keys",)}  # fields of `KernelSet` that say what a kernel does

_log = logging.getLogger(__name__)


def checked_kernels(architecture: Architecture, dtype: torch.dtype, device: torch.device, widths: Sequence[int]) -> KernelSet:
    """Returns the kernels for static passes of these widths: torch's operators, and on a CUDA device Triton's kernels.

    Each of Triton's kernels is compared with torch's operators on random inputs of the model's shapes. Where one fails or gives
    other results, logs a warning, and the set has torch's operators instead.
    """
    if device.type != "cuda":
        return TORCH
    start = time.perf_counter()
    try:
        from specgen.engine.native.kernels.triton_kernels import TRITON
    except Exception as error:  # noqa: BLE001  a broken triton raises anything
        _log.info("static passes run without fused kernels, as triton cannot be imported: %s", _first_line(error))
        return TORCH
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        _log.info("static passes run without fused kernels, which are made for GPUs of compute capability 8.0 and above")
        return TORCH
    _log.info("compiling and checking the fused kernels of static passes; later runs load the compiled ones")
    kernels = only_working(TRITON, architecture, dtype, device, widths)
    _log.info("checked the fused kernels of static passes in %.1f s", time.perf_counter() - start)
    return kernels


@inference
def only_working(
    kernels: KernelSet, architecture: Architecture, dtype: torch.dtype, device: torch.device, widths: Sequence[int]
) -> KernelSet:
    """Returns a set of those of the kernels that give the results of torch's operators, and of torch's operators for the rest.

    The attention is also checked for other widths than `widths`, because the levels of draft trees have their own.
    """
    samples = _Samples(architecture, dtype, device)
    checks: dict[str, Callable[[KernelSet, int], None]] = {"store": samples.store, "attend": samples.attend}
    if architecture.gated_mlp:
        checks["gate"] = samples.gate
    failed: dict[str, list[str]] = {}
    for name, check in checks.items():
        try:
            for width in sorted({*widths, *_BLOCK_WIDTHS}) if name == "attend" else sorted({min(widths), max(widths)}):
                check(kernels, width)
        except Exception as error:  # noqa: BLE001  Triton's compiler and launcher raise errors of many types
            failed.setdefault(_first_line(error), []).append(f"`{name}`")
            kernels = replace(kernels, **{field: getattr(TORCH, field) for field in (name, *_WITH.get(name, ()))})
    for reason, names in failed.items():  # a missing C compiler makes all of them fail
        _log.warning("torch's operators replace fused kernels that do not work here, %s: %s", ", ".join(names), reason)
    return kernels


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class _WrongResultError(Exception):
    """A kernel gives other results than torch's operators."""


class _Samples:
    """Random inputs of the kernels, and the results that torch's operators give for them in float32."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self._architecture, self._dtype, self._device = architecture, dtype, device
        self._generator = torch.Generator().manual_seed(0)  # torch's own generator is the user's
        shape = architecture.num_heads, architecture.num_kv_heads, architecture.head_size
        self._heads, self._kv_heads, self._size = shape
        self._is_normed = architecture.qk_norm == "head"
        self._weight = self._random(self._heads + self._kv_heads, self._size) if self._is_normed else None
        self._cache = self._random(2, self._kv_heads, _CAPACITY, self._size)  # drawn once: on the host, that takes longest
        angles = torch.rand(_CAPACITY, architecture.rotary_size // 2, generator=self._generator) * 6
        self._table = torch.polar(torch.ones_like(angles), angles).to(device)

    def store(self, kernels: KernelSet, width: int) -> None:
        """Raises an error if `store` does not give torch's result."""
        heads = self._random(width, self._heads + 2 * self._kv_heads, self._size)
        for spec, (found_in, expected_in) in self._inputs(kernels, width):
            normed = heads.to(torch.float32, copy=True)
            if self._weight is not None and self._architecture.qk_norm in kernels.norms:
                rotated = normed[:, : self._heads + self._kv_heads]
                rotated = functional.rms_norm(rotated, rotated.shape[-1:], None, spec.eps) * self._weight.float()
                normed = torch.cat((rotated, normed[:, self._heads + self._kv_heads :]), dim=1)
            expected = TORCH.store(normed, spec, expected_in)
            found = kernels.store(heads.clone(), spec, found_in)
            self._compare(found, expected)
            self._compare(found_in.entries(spec).written, expected_in.entries(spec).written)

    def attend(self, kernels: KernelSet, width: int) -> None:
        """Raises an error if `attend` does not give torch's result."""
        query = self._random(width, self._heads + 2 * self._kv_heads, self._size)[:, : self._heads] * self._size**-0.5
        for spec, (found_in, expected_in) in self._inputs(kernels, width):
            self._compare(kernels.attend(query, spec, found_in), TORCH.attend(query.float(), spec, expected_in))

    def gate(self, kernels: KernelSet, width: int) -> None:
        """Raises an error if `gate` does not give torch's result."""
        inner, activation = self._random(width, 2 * self._architecture.intermediate_size), self._architecture.activation
        self._compare(kernels.gate(inner.clone(), activation), TORCH.gate(inner.float(), activation))

    def _inputs(self, kernels: KernelSet, width: int) -> Iterator[tuple[AttentionSpec, tuple[StaticInputs, StaticInputs]]]:
        """Yields, for each kind of layer and number of cached tokens, inputs for the kernels, and those for torch in float32."""
        architecture = self._architecture
        windows = (None if kind.window is None else min(kind.window, _WINDOW) for kind in architecture.layers)
        changed = (replace(kind, window=window) for kind, window in zip(architecture.layers, windows, strict=True))
        kinds = list(dict.fromkeys(changed))
        indices = torch.arange(_CAPACITY, device=self._device)
        cache, in_float32 = self._cache.clone(), self._cache.to(torch.float32, copy=True)
        rotations = dict.fromkeys(architecture.rotary, self._table)

        def inputs(by: KernelSet, numbers: PassNumbers, buffer: torch.Tensor) -> StaticInputs:
            entries, group = [LayerEntries(buffer, *buffer)], self._heads // self._kv_heads
            return StaticInputs(by, numbers, kinds, rotations, entries, group, 0, indices)

        for kind in range(len(kinds)):
            shape = self._heads, self._kv_heads, self._size, architecture.score_cap, self._weight, architecture.norm_eps
            spec = AttentionSpec(0, kind, *shape)
            for base in _BASES:
                numbers = self._numbers(base, width)
                yield spec, (inputs(kernels, numbers, cache), inputs(TORCH, numbers, in_float32))

    def _numbers(self, base: int, width: int) -> PassNumbers:
        """Returns the numbers of a pass over nodes of a random tree, three of whose nodes are in the cache."""
        before = 3 if width + 3 <= SPAN else 0
        parents = [
            int(torch.randint(-1, node, (1,), generator=self._generator)) if node else -1 for node in range(before + width)
        ]
        bits: list[int] = []
        depths: list[int] = []
        for node, parent in enumerate(parents):
            bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        depths += [depths[-1]] * (SPAN + 1 - len(depths))
        rows = ([base], [base + before], bits[before:], depths)
        return PassNumbers(*(torch.tensor(row).to(self._device) for row in rows))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def _compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = _IN_FLOAT32 if self._dtype == torch.float32 else _ROUNDINGS * torch.finfo(self._dtype).eps
        difference = float((found.float() - expected).abs().max() / expected.abs().max())
        if not difference <= tolerance:  # NaN is never below
            raise _WrongResultError(f"its results differ from torch's by {difference:.2g} of the largest")
