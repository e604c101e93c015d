"""Products with packed and dense weights: what they compute, and which of them the factory takes for measured seconds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specgen.engine.native import products
from specgen.engine.native.products import DenseProduct, PackedProduct, Product, ProductFactory

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
BIG = (1024, 256)  # 1 MB in float32
Seconds = Mapping[int, float]


def can_pack(dtype: torch.dtype) -> bool:
    try:
        PackedProduct(torch.zeros(64, 64, dtype=dtype))(torch.zeros(1, 64, dtype=dtype))
    except (AttributeError, RuntimeError):
        return False
    return True


needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch or this processor cannot pack weights")
KINDS = [DenseProduct, pytest.param(PackedProduct, marks=needs_packing)]


class Timer:
    """Gives scripted seconds instead of measured ones, and counts its calls."""

    def __init__(self, dense: Seconds, packed: Seconds) -> None:
        self.seconds = {DenseProduct: dense, PackedProduct: packed}
        self.calls: list[tuple[type[Product], int]] = []

    def __call__(self, product: Product, x: Tensor) -> float:
        self.calls.append((type(product), x.shape[0]))
        return self.seconds[type(product)][x.shape[0]]


SLOW_DENSE = Timer({1: 1.0, 2: 2.0, 3: 3.0, 4: 2.0}, {1: 1.0, 2: 1.1, 3: 0.9, 4: 0.8})


def factory(timer: Timer, model_bytes: int = 1 << 20, dtype: torch.dtype = torch.float32, **options: bool) -> ProductFactory:
    return ProductFactory(CPU, dtype, model_bytes=model_bytes, timer=timer, cache_bytes=4 << 20, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_and_sums_with_a_residual(kind: Callable[..., Product], dtype: torch.dtype, has_bias: bool) -> None:
    if kind is PackedProduct and not can_pack(dtype):
        pytest.skip(f"{dtype} cannot be packed here")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 70, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype) if has_bias else None
    product = kind(weight, bias, 0.25)
    assert (product.out_features, product.in_features) == (96, 70)
    for rows in (1, 2, 3, 4, 7, 33):
        x = torch.randn(rows, 70, generator=generator).to(dtype)
        residual = torch.randn(rows, 96, generator=generator).to(dtype)
        before = residual.clone()
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        limit = TOLERANCE[dtype] * float(expected.abs().max())
        assert (product(x).double() - expected).abs().max() < limit
        assert (product.add_to(residual, x).double() - (residual.double() + 0.25 * expected)).abs().max() < limit
        assert torch.equal(residual, before)


def test_dense_products_are_differentiable() -> None:
    weight, bias = torch.randn(5, 3, requires_grad=True), torch.randn(5, requires_grad=True)
    product = DenseProduct(weight, bias, 0.5)
    for _ in range(2):  # the same product in two steps of training
        x, residual = torch.randn(4, 3, requires_grad=True), torch.randn(4, 5, requires_grad=True)
        ours = torch.autograd.grad(product.add_to(residual, x).square().sum(), (weight, bias, x, residual))
        reference = (residual + 0.5 * (x @ weight.T + bias)).square().sum()
        for one, other in zip(ours, torch.autograd.grad(reference, (weight, bias, x, residual)), strict=True):
            assert torch.allclose(one, other, atol=1e-4)


@needs_packing
def test_a_packed_product_does_not_keep_the_weight() -> None:
    weight = torch.randn(*BIG)
    gone = weakref.ref(weight)
    product = factory(SLOW_DENSE)(weight)
    assert isinstance(product, PackedProduct)
    del weight
    gc.collect()
    assert gone() is None


@needs_packing
def test_the_faster_kind_is_taken_for_each_shape() -> None:
    timer = Timer(SLOW_DENSE.seconds[DenseProduct], SLOW_DENSE.seconds[PackedProduct])
    make = factory(timer)
    assert isinstance(make(torch.randn(*BIG)), PackedProduct)
    measured = len(timer.calls)
    timer.seconds[PackedProduct] = dict.fromkeys(range(1, 5), 1.45)  # saves less than the noise of measurements
    assert isinstance(make(torch.randn(*BIG)), PackedProduct)  # the shape is known
    assert len(timer.calls) == measured
    assert isinstance(make(torch.randn(BIG[1], BIG[0])), DenseProduct)
    first, second = make.choices
    assert (first.out_features, first.in_features, first.count, first.packed, first.reason) == (*BIG, 2, True, None)
    assert first.dense_seconds[4] == 2.0
    assert first.packed_seconds == {1: 1.0, 2: 1.1, 3: 0.9, 4: 0.8}
    assert (second.count, second.packed, second.reason) == (1, False, None)


@needs_packing
def test_a_packed_row_counts_as_padded_where_that_is_faster() -> None:
    slow_alone = Timer({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, {1: 5.0, 2: 5.0, 3: 0.7, 4: 0.8})
    make = factory(slow_alone)
    assert isinstance(make(torch.randn(*BIG)), PackedProduct)
    assert make.pad_rows == {1: 4, 2: 4}
    assert make.min_rows == 4


@needs_packing
def test_padding_is_decided_by_all_weights_together() -> None:
    rising = {1: 1.0, 2: 1.9, 3: 3.0, 4: 2.0}  # 2 rows are within the tolerance
    timer = Timer(rising, dict.fromkeys(rising, 9.0))
    make = factory(timer)
    assert make.pad_rows == {}
    make(torch.randn(8, 8))
    assert make.pad_rows == {2: 4, 3: 4}
    assert make.min_rows == 1
    timer.seconds[PackedProduct] = {1: 1.0, 2: 1.0, 3: 1.0, 4: 0.5}
    make(torch.randn(*BIG))
    assert make.min_rows == 1  # 1.0 + 1.0 against 2.0 + 0.5
    for _ in range(2):
        make(torch.randn(*BIG))
    assert make.pad_rows == {1: 4, 2: 4, 3: 4}  # 1.0 + 3 * 1.0 against 2.0 + 3 * 0.5
    assert make.min_rows == 4


@needs_packing
def test_small_float32_weights_are_not_packed() -> None:
    make = factory(SLOW_DENSE)
    assert isinstance(make(torch.randn(BIG[0] - 1, BIG[1])), DenseProduct)
    assert make.choices[0].reason == "too small"
    assert make.choices[0].dense_seconds
    assert not make.choices[0].packed_seconds


@needs_packing
def test_the_cache_is_flushed_before_each_sample_of_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    timer = Timer(SLOW_DENSE.seconds[DenseProduct], SLOW_DENSE.seconds[PackedProduct])

    def timed(product: Product, x: Tensor) -> float:
        events.append(type(product).__name__)
        return timer(product, x)

    buffer = SimpleNamespace(amax=lambda: events.append("flush"))
    monkeypatch.setattr(ProductFactory, "_flush_buffer", buffer)
    make = ProductFactory(CPU, torch.float32, model_bytes=64 << 20, timer=timed, cache_bytes=32 << 20)
    make(torch.randn(*BIG))
    assert events == ["flush", "DenseProduct", "PackedProduct"] * (len(events) // 3)
    assert {rows for _, rows in timer.calls} == {1, 4}
    assert make.pad_rows == {1: 4, 2: 4, 3: 4}
    events.clear()
    make = ProductFactory(CPU, torch.float32, model_bytes=16 << 20, timer=timed, cache_bytes=32 << 20)
    make(torch.randn(*BIG))
    assert events
    assert "flush" not in events


@needs_packing
def test_a_part_of_a_large_weight_is_timed() -> None:
    rows: set[int] = set()

    def timed(product: Product, _: Tensor) -> float:
        rows.add(product.out_features)
        return 1.0

    make = ProductFactory(CPU, torch.float32, model_bytes=1, timer=timed)
    product = make(torch.randn(16384, 256))  # 16 MB
    assert rows == {4096}
    assert product.out_features == 16384
    assert make.choices[0].dense_seconds[1] == 4.0


@needs_packing
def test_packing_that_gives_wrong_results_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PackedProduct.__call__
    monkeypatch.setattr(PackedProduct, "__call__", lambda self, x: right(self, x) * 1.001)
    make = factory(SLOW_DENSE, pack=True)
    assert isinstance(make(torch.randn(*BIG)), DenseProduct)
    assert make.choices[0].reason == "packing gives wrong results"


@pytest.mark.parametrize("missing", [AttributeError("no such operator"), RuntimeError("mkldnn is\nnot there")])
def test_without_the_operators_weights_stay_dense(monkeypatch: pytest.MonkeyPatch, missing: Exception) -> None:
    def fail(*_: object) -> None:
        raise missing

    monkeypatch.setattr(products.PackedProduct, "__init__", fail)
    for pack in (None, True):
        make = factory(SLOW_DENSE, pack=pack)
        assert isinstance(make(torch.randn(*BIG)), DenseProduct)
        assert make.choices[0].reason == f"packing failed: {str(missing).splitlines()[0]}"


def test_a_dtype_that_cannot_be_packed_stays_dense() -> None:
    make = factory(SLOW_DENSE, dtype=torch.float64)
    assert isinstance(make(torch.randn(*BIG, dtype=torch.float64)), DenseProduct)
    assert make.choices[0].reason is not None


def test_nothing_is_timed_if_the_caller_decides_or_for_another_device() -> None:
    timer = Timer({}, {})
    kinds = {True: PackedProduct if can_pack(torch.float32) else DenseProduct, False: DenseProduct}
    for pack, kind in kinds.items():
        make = factory(timer, pack=pack)
        assert isinstance(make(torch.randn(32, 16)), kind)
        assert make.pad_rows == {}
    assert make.choices[0].reason == "packing is switched off"
    make = ProductFactory(torch.device("meta"), torch.float32, model_bytes=1, timer=timer)
    assert isinstance(make(torch.empty(*BIG, device="meta")), DenseProduct)
    assert make.choices[0].reason == "packing is for CPUs"


@needs_packing
def test_choosing_leaves_the_random_state_of_torch_alone() -> None:
    before = torch.random.get_rng_state()
    weight = torch.zeros(*BIG)
    factory(SLOW_DENSE)(weight)
    assert torch.equal(torch.random.get_rng_state(), before)
