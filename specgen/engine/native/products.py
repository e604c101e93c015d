"""Matrix products with a decoder's weights: torch's own, or with weights packed for oneDNN.

On a CPU, torch computes float32 products of a few rows slowly: two rows take twice as long as one. oneDNN, with the weight
reordered once into its own block layout, is about as fast for 4 rows as for one, and twice as fast in bfloat16. Inductor
compiles to these operators; torch does not document them, so `ProductFactory` tries them before it uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, sqrt
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from specgen.engine.devices import one_thread
from specgen.engine.native.quantised_products import OPERATOR_ERRORS, QuantisedProduct, quantised_product

PADDED_ROWS = 4
_TIMED_ROWS = (1, PADDED_ROWS)
_SAMPLES = 5
_MAX_LOSS = 1.3  # packed products are refused if they take this many times as long: above the noise of measurements
_MIN_BYTES = {torch.float32: 1 << 20}  # smaller weights are not packed: a call costs 10 us more than torch's
_SAMPLE_BYTES = 1 << 20  # of a larger weight, this much is timed
_DEFAULT_CACHE = 32 << 20  # bytes, where the system does not report it


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
    """A product with a weight in torch's own layout. Differentiable.

    It refers to the weight, or with `by_columns` to a copy that is stored [in, out]: a few rows take less time with small float32
    weights then.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0, *, by_columns: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self._transposed = weight.t().contiguous() if by_columns else weight.t()
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

    `dense_seconds` and `packed_seconds` are the seconds of one call by number of rows, with the whole weight or the first rows of
    a large one; empty if it was not timed. `reason` says why weights are not packed, or not quantised as was asked for; None if
    they are. `quantised` is `int8` or `int4` if weights are stored so. `count` is the number of weights.
    """

    out_features: int
    in_features: int
    packed: bool = False
    reason: str | None = None
    dense_seconds: Mapping[int, float] = field(default_factory=dict)
    packed_seconds: Mapping[int, float] = field(default_factory=dict)
    count: int = 0
    quantised: str | None = None


def call_seconds(product: Product, x: Tensor) -> float:
    """Returns the seconds of one call of `product`."""
    start = time.perf_counter()
    product(x)
    return time.perf_counter() - start


class ProductFactory:
    """Makes the products of one model. For each shape of weight, the first call decides whether weights are packed.

    Weights are packed on a CPU, in float32 from 1 MB on, unless the operators fail, give wrong results, or are measured to be
    clearly slower here: the choice does not depend on how busy the machine is. `pack` True packs wherever it is possible, False
    nowhere; then nothing is timed. `timer` returns the seconds of one call of a product, `cache_bytes` is the size of the
    processor's last-level cache. `quantise` (`int8`, `int4`) rounds all weights, where this torch has products for it that work.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        pack: bool | None = None,
        timer: Callable[[Product, Tensor], float] = call_seconds,
        cache_bytes: int | None = None,
        quantise: str | None = None,
    ) -> None:
        self._dtype, self._pack, self._timer, self._quantise = dtype, pack, timer, quantise
        self._is_cpu = device.type == "cpu"
        self._cache_bytes = cache_bytes
        self._by_shape: dict[tuple[int, int], ProductChoice] = {}
        self._generator = torch.Generator().manual_seed(0)  # torch's own generator is the user's

    def __call__(self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0) -> Product:
        """Returns the product with `weight` [out, in] and `bias` [out]."""
        shape = (weight.shape[0], weight.shape[1])
        product, refusal = self._quantised(weight, bias, scale)
        if shape not in self._by_shape:
            self._by_shape[shape] = ProductChoice(*shape) if product is not None else self._choose(weight.detach())
        choice = self._by_shape[shape]
        choice.count += 1
        if self._quantise is not None:
            choice.quantised, choice.reason = None if product is None else product.kind, refusal
        if product is not None:
            return product
        if choice.packed:
            return PackedProduct(weight, bias, scale)
        by_columns = self._is_cpu and self._is_small(weight) and not weight.requires_grad
        return DenseProduct(weight, bias, scale, by_columns=by_columns)

    @property
    def choices(self) -> list[ProductChoice]:
        """The choices so far, in the order of the shapes' first weights."""
        return list(self._by_shape.values())

    @property
    def min_rows(self) -> int:
        """4 if passes over fewer tokens should be padded, because products of 4 rows take no longer than those of one; else 1.

        This is so for packed weights that are read from memory: reading takes longer than computing, and oneDNN's kernels read
        faster for 4 rows than for 1 or 2. In the cache, 4 rows take 1.3 to 1.4 times as long as one. Counts the weights made.
        """
        total = packed = 0
        for choice in self.choices:
            size = choice.count * choice.out_features * choice.in_features * self._dtype.itemsize
            total += size
            packed += size if choice.packed else 0
        if 2 * packed <= total:
            return 1
        return PADDED_ROWS if total > (self._cache_bytes or last_level_cache()) else 1

    def _quantised(self, weight: Tensor, bias: Tensor | None, scale: float) -> tuple[QuantisedProduct | None, str | None]:
        """Returns the product with the quantised weight, or None; and why there is none where one was asked for."""
        return (None, None) if self._quantise is None else quantised_product(self._quantise, weight, bias, scale)

    def _is_small(self, weight: Tensor) -> bool:
        return weight.nbytes < _MIN_BYTES.get(self._dtype, 0)

    def _choose(self, weight: Tensor) -> ProductChoice:
        """Tries packing with `weight`, or the first rows of a large one."""
        choice = ProductChoice(weight.shape[0], weight.shape[1])
        sample = weight[: max(64, _SAMPLE_BYTES // (choice.in_features * weight.itemsize))]
        packed, choice.reason = self._try_packing(weight, sample)
        if packed is None:
            return choice
        choice.packed = True
        if self._pack is None:
            with one_thread():
                choice.dense_seconds, choice.packed_seconds = self._measure(DenseProduct(sample), packed)
            if sum(choice.packed_seconds.values()) > _MAX_LOSS * sum(choice.dense_seconds.values()):
                choice.packed, choice.reason = False, "packed is slower here"
        return choice

    def _try_packing(self, weight: Tensor, sample: Tensor) -> tuple[PackedProduct | None, str | None]:
        """Returns the packed product with `sample`, a part of `weight`, or else why it should not be packed."""
        if not self._is_cpu:
            return None, "packing is for CPUs"
        if self._pack is False:
            return None, "packing is switched off"
        if self._pack is None and self._is_small(weight):
            return None, "too small"
        try:
            packed = PackedProduct(sample)
            for rows in _TIMED_ROWS:
                x = self._random_rows(rows, sample.shape[1])
                if not _is_close(packed(x), torch.nn.functional.linear(x, sample), sample.shape[1]):
                    return None, "packing gives wrong results"
        except OPERATOR_ERRORS as error:
            return None, f"packing failed: {str(error).partition(chr(10))[0]}"
        return packed, None

    def _measure(self, *products: Product) -> list[dict[int, float]]:
        """Returns the seconds of one call of each product by number of rows: the shortest of some samples, taken in turns."""
        best: list[dict[int, float]] = [dict.fromkeys(_TIMED_ROWS, inf) for _ in products]
        for rows in _TIMED_ROWS:
            x = self._random_rows(rows, products[0].in_features)
            for turn in range(1 + _SAMPLES):  # the first call prepares the kernel
                for of_kind, product in zip(best, products, strict=True):
                    taken = self._timer(product, x)
                    if turn:
                        of_kind[rows] = min(of_kind[rows], taken)
        return best

    def _random_rows(self, rows: int, in_features: int) -> Tensor:
        return torch.randn(rows, in_features, generator=self._generator).to(self._dtype)


def last_level_cache() -> int:
    """Returns the bytes of the processor's largest cache; a usual size if the system does not report it (only Linux does)."""
    try:
        sizes = [path.read_text() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        return max(int(size.strip().removesuffix("K")) for size in sizes) << 10
    except (OSError, ValueError):
        return _DEFAULT_CACHE


def _is_close(product: Tensor, expected: Tensor, in_features: int) -> bool:
    """Whether two results differ by no more than the rounding of the result and of sums of `in_features` terms in float32."""
    tolerance = 2 * torch.finfo(expected.dtype).eps + 4 * sqrt(in_features) * torch.finfo(torch.float32).eps
    return bool((product - expected).abs().max() <= tolerance * expected.abs().max())
