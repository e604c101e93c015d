"""Matrix products with a decoder's weights: torch's own, or with weights packed for oneDNN, whichever is measured to be faster.

On a CPU, torch computes float32 products of a few rows slowly: two rows take twice as long as one. oneDNN, with the weight
reordered once into its own block layout, is about as fast for 4 rows as for one. Inductor compiles to these operators; torch
does not document them, so `ProductFactory` tries them before it uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, sqrt
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

PADDED_ROWS = 4
_HOT = ((1, 2, 3, PADDED_ROWS), 7)  # the numbers of rows that are timed, and samples of each
_COLD = ((1, PADDED_ROWS), 3)  # fewer, because the cache is flushed before each sample
_MIN_GAIN = 1.1  # a packed product is taken if it is this many times as fast: above the noise of measurements
_PADDING_TOLERANCE = 1.1  # a tie goes to padding: then the results for a token depend less on how many others are in the pass
_MIN_BYTES = {torch.float32: 1 << 20}  # smaller weights are not packed: a call costs 10 us more than torch's
_SAMPLE_BYTES = 4 << 20  # of a larger weight, this much is timed
_PACKING_ERRORS = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)
_DEFAULT_CACHE = 32 << 20  # bytes, where the system does not report it
_MAX_FLUSH = 64 << 20  # bytes; reading more takes too long


class Product(Protocol):
    """A product with a weight [out, in], and the sum with a bias [out] if there is one."""

    out_features: int
    in_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x W^T + bias: [n, in] -> [n, out]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Returns residual + scale * (x W^T + bias), a new tensor: [n, out], [n, in] -> [n, out]."""
        ...

    def add_into(self, residual: Tensor, x: Tensor) -> None:
        """Adds scale * (x W^T + bias) to `residual` in place: [n, out], [n, in]."""
        ...


class DenseProduct:
    """A product with a weight in torch's own layout, which it refers to and does not copy. Differentiable."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> None:
        self.out_features, self.in_features = weight.shape
        self._transposed = weight.t().contiguous()
        self._bias, self._scale = bias, scale

    def __call__(self, x: Tensor) -> Tensor:
        if self._bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self._bias, x, self._transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        total = torch.addmm(residual, x, self._transposed, alpha=self._scale)
        return total if self._bias is None else total.add_(self._bias, alpha=self._scale)

    def add_into(self, residual: Tensor, x: Tensor) -> None:
        residual.addmm_(x, self._transposed, alpha=self._scale)
        if self._bias is not None:
            residual.add_(self._bias, alpha=self._scale)


class TrainedProduct:
    """A product with a weight that changes after every product, and is not copied to make one faster. Differentiable."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias, self._scale = weight, bias, scale

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.add(residual, self(x), alpha=self._scale)

    def add_into(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self(x), alpha=self._scale)


class PackedProduct:
    """A product with a weight reordered for oneDNN on a CPU; it keeps no reference to `weight`. Not differentiable.

    Raises AttributeError or RuntimeError if this torch lacks the operators or cannot run them for the weight's dtype.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> None:
        self.out_features, self.in_features = weight.shape
        self._multiply = torch.ops.mkldnn._linear_pointwise
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)  # 8 rows; for 1, float32 stays as it is
        self._bias, self._scale = bias, scale

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self._multiply(x, self._packed, self._bias, "none", [], "")
        return product

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.add(residual, self(x), alpha=self._scale)

    def add_into(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self(x), alpha=self._scale)


@dataclass
class ProductChoice:
    """What was chosen for the weights of one shape, and why.

    `dense_seconds` and `packed_seconds` are the seconds of one call by number of rows, empty if it was not timed; only a part of
    a large weight is timed, and the seconds are extrapolated. `reason` says why weights could not be packed or were not
    considered, else it is None. `count` is the number of weights.
    """

    out_features: int
    in_features: int
    packed: bool = False
    reason: str | None = None
    dense_seconds: Mapping[int, float] = field(default_factory=dict)
    packed_seconds: Mapping[int, float] = field(default_factory=dict)
    count: int = 0

    @property
    def seconds(self) -> Mapping[int, float]:
        """The seconds of one call of the chosen kind by number of rows."""
        return self.packed_seconds if self.packed else self.dense_seconds


def call_seconds(product: Product, x: Tensor) -> float:
    """Returns the seconds of one call of `product`."""
    start = time.perf_counter()
    product(x)
    return time.perf_counter() - start


class ProductFactory:
    """Makes the products of one model. For each shape of weight, the first call decides whether weights are packed.

    `model_bytes` is the size of all weights: if the processor's cache cannot hold them all, calls are timed with a cold cache.
    `pack` True packs wherever it is possible, False nowhere; then nothing is timed. `timer` returns the seconds of one call of a
    product, `cache_bytes` is the size of the processor's last-level cache. A factory may hold a buffer of that size until it is
    deleted. Weights of another device than a CPU are never packed or timed.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        model_bytes: int,
        pack: bool | None = None,
        timer: Callable[[Product, Tensor], float] = call_seconds,
        cache_bytes: int | None = None,
    ) -> None:
        self._dtype, self._pack, self._timer = dtype, pack, timer
        self._is_cpu = device.type == "cpu"
        self._cache_bytes = last_level_cache() if cache_bytes is None else cache_bytes
        self._is_cold = model_bytes > self._cache_bytes
        self._by_shape: dict[tuple[int, int], ProductChoice] = {}
        self._generator = torch.Generator().manual_seed(0)  # torch's own generator is the user's

    def __call__(self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Product:
        """Returns the product with `weight` [out, in] and `bias` [out]."""
        shape = (weight.shape[0], weight.shape[1])
        if shape not in self._by_shape:
            self._by_shape[shape] = self._choose(weight.detach())
        choice = self._by_shape[shape]
        choice.count += 1
        return PackedProduct(weight, bias, scale) if choice.packed else DenseProduct(weight, bias, scale)

    @property
    def choices(self) -> list[ProductChoice]:
        """The choices so far, in the order of the shapes' first weights."""
        return list(self._by_shape.values())

    @property
    def pad_rows(self) -> Mapping[int, int]:
        """For each number of rows for which the products of 4 rows take no longer: 4. Counts the weights made so far."""
        total: dict[int, float] = {}
        for choice in self.choices:
            for rows, seconds in choice.seconds.items():
                total[rows] = total.get(rows, 0.0) + choice.count * seconds
        if not total:
            return {}
        for rows in (2, 3):  # not timed with a cold cache; they gain from padding where one row does
            total.setdefault(rows, total[1])
        padded = total[PADDED_ROWS]
        return {rows: PADDED_ROWS for rows in range(1, PADDED_ROWS) if padded < _PADDING_TOLERANCE * total[rows]}

    @property
    def min_rows(self) -> int:
        """4 if the products of 4 rows take no longer than those of one, so that shorter passes should be padded, else 1."""
        return self.pad_rows.get(1, 1)

    def _choose(self, weight: Tensor) -> ProductChoice:
        """Times both kinds of product with `weight`, or the first rows of a large one."""
        choice = ProductChoice(weight.shape[0], weight.shape[1])
        sample = weight[: max(64, _SAMPLE_BYTES // (choice.in_features * weight.itemsize))]
        packed, choice.reason = self._try_packing(weight, sample)
        if self._pack is not None or not self._is_cpu:
            choice.packed = packed is not None
            return choice
        products: list[Product] = [DenseProduct(sample)]
        if packed is not None:
            products.append(packed)
        part = sample.shape[0] / weight.shape[0]
        times = [{rows: taken / part for rows, taken in of_kind.items()} for of_kind in self._measure(products)]
        choice.dense_seconds = times[0]
        if packed is not None:
            choice.packed_seconds = times[1]
            choice.packed = _cost(choice.dense_seconds) > _MIN_GAIN * _cost(choice.packed_seconds)
        return choice

    def _try_packing(self, weight: Tensor, sample: Tensor) -> tuple[PackedProduct | None, str | None]:
        """Returns the packed product with `sample`, a part of `weight`, or else why it should not be packed."""
        if not self._is_cpu:
            return None, "packing is for CPUs"
        if self._pack is False:
            return None, "packing is switched off"
        if self._pack is None and weight.nbytes < _MIN_BYTES.get(self._dtype, 0):
            return None, "too small"
        try:
            packed = PackedProduct(sample)
            for rows in (1, PADDED_ROWS):
                x = self._random_rows(rows, sample.shape[1])
                if not _is_close(packed(x), torch.nn.functional.linear(x, sample), sample.shape[1]):
                    return None, "packing gives wrong results"
        except _PACKING_ERRORS as error:
            return None, f"packing failed: {str(error).partition(chr(10))[0]}"
        return packed, None

    def _measure(self, products: Sequence[Product]) -> list[dict[int, float]]:
        """Returns the seconds of one call of each product by number of rows: the shortest of some samples, taken in turns."""
        timed_rows, samples = _COLD if self._is_cold else _HOT
        best: list[dict[int, float]] = [{} for _ in products]
        for rows in timed_rows:
            x = self._random_rows(rows, products[0].in_features)
            for product in products:
                product(x)  # the first call prepares the kernel
            for _ in range(samples):
                if self._is_cold:
                    self._flush_buffer.amax()
                for of_kind, product in zip(best, products, strict=True):
                    of_kind[rows] = min(of_kind.get(rows, inf), self._timer(product, x))
        return best

    @cached_property
    def _flush_buffer(self) -> Tensor:
        """A buffer that displaces the weights from the cache when it is read. Written, so that its pages differ."""
        return torch.ones(min(self._cache_bytes, _MAX_FLUSH) // 4, dtype=torch.float32)

    def _random_rows(self, rows: int, in_features: int) -> Tensor:
        return torch.randn(rows, in_features, generator=self._generator).to(self._dtype)


def last_level_cache() -> int:
    """Returns the bytes of the processor's largest cache; a usual size if the system does not report it (only Linux does)."""
    try:
        sizes = [path.read_text() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        return max(int(size.strip().removesuffix("K")) for size in sizes) << 10
    except (OSError, ValueError):
        return _DEFAULT_CACHE


def _cost(seconds: Mapping[int, float]) -> float:
    """Returns the seconds of a call of 1 row and one of 4; the row is padded to 4 where that is faster."""
    return min(seconds[1], seconds[PADDED_ROWS]) + seconds[PADDED_ROWS]


def _is_close(product: Tensor, expected: Tensor, in_features: int) -> bool:
    """Whether two results differ by no more than the rounding of the result and of sums of `in_features` terms in float32."""
    tolerance = 2 * torch.finfo(expected.dtype).eps + 4 * sqrt(in_features) * torch.finfo(torch.float32).eps
    return bool((product - expected).abs().max() <= tolerance * expected.abs().max())
