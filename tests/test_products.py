"""Products with packed and dense weights: what they compute, and which of them the factory takes for measured seconds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping

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


SLOW_DENSE = Timer({1: 1.0, 4: 2.0}, {1: 1.0, 4: 0.8})


def factory(timer: Timer, dtype: torch.dtype = torch.float32, **options: bool | None) -> ProductFactory:
    return ProductFactory(CPU, dtype, timer=timer, cache_bytes=4 << 20, **options)


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
def test_weights_are_packed_unless_that_is_clearly_slower_and_once_per_shape() -> None:
    timer = Timer({1: 1.0, 4: 2.0}, {1: 1.2, 4: 2.6})  # slower, but not by more than the noise of measurements
    make = factory(timer)
    assert isinstance(make(torch.randn(*BIG)), PackedProduct)
    measured = len(timer.calls)
    timer.seconds[PackedProduct] = {1: 2.0, 4: 2.0}
    assert isinstance(make(torch.randn(*BIG)), PackedProduct)  # the shape is known
    assert len(timer.calls) == measured
    assert isinstance(make(torch.randn(BIG[1], BIG[0])), DenseProduct)
    first, second = make.choices
    assert (first.out_features, first.in_features, first.count, first.packed, first.reason) == (*BIG, 2, True, None)
    assert first.dense_seconds[4] == 2.0
    assert first.packed_seconds == {1: 1.2, 4: 2.6}
    assert (second.count, second.packed, second.reason) == (1, False, "packed is slower here")


@needs_packing
def test_the_kinds_are_timed_in_turns_and_a_single_slow_sample_does_not_count() -> None:
    seconds = iter([9.0, 9.0, 9.0, *[1.0] * 100])
    order: list[type[Product]] = []

    def timed(product: Product, _: Tensor) -> float:
        order.append(type(product))
        return next(seconds) if isinstance(product, PackedProduct) else 1.0

    make = ProductFactory(CPU, torch.float32, timer=timed)
    assert isinstance(make(torch.randn(*BIG)), PackedProduct)
    assert order == [DenseProduct, PackedProduct] * (len(order) // 2)
    assert make.choices[0].packed_seconds == {1: 1.0, 4: 1.0}


@needs_packing
def test_passes_are_padded_if_most_weights_are_packed_and_they_exceed_the_cache() -> None:
    make = factory(SLOW_DENSE)  # a cache of 4 MB
    for _ in range(4):
        make(torch.randn(*BIG))
    assert make.min_rows == 1  # 4 MB
    make(torch.randn(*BIG))
    assert make.min_rows == 4
    for _ in range(6):
        make(torch.randn(BIG[0] - 1, BIG[1]))  # too small to be packed
    assert make.min_rows == 1


@needs_packing
def test_small_float32_weights_are_not_packed_but_stored_by_columns() -> None:
    make = factory(SLOW_DENSE)
    small, weight = torch.randn(BIG[0] - 1, BIG[1]), torch.randn(4, 8, requires_grad=True)
    product, trained = make(small), make(weight)
    assert isinstance(product, DenseProduct)
    assert isinstance(trained, DenseProduct)
    assert product._transposed.is_contiguous()
    assert trained._transposed.data_ptr() == weight.data_ptr()  # sees the optimizer's steps
    assert make.choices[0].reason == "too small"
    assert not make.choices[0].dense_seconds
    dense = factory(SLOW_DENSE, pack=False)(torch.randn(*BIG))
    assert isinstance(dense, DenseProduct)
    assert not dense._transposed.is_contiguous()  # a large weight is not copied


@needs_packing
def test_a_part_of_a_large_weight_is_timed() -> None:
    rows: set[int] = set()

    def timed(product: Product, _: Tensor) -> float:
        rows.add(product.out_features)
        return 1.0

    product = ProductFactory(CPU, torch.float32, timer=timed)(torch.randn(16384, 256))  # 16 MB
    assert rows == {1024}
    assert product.out_features == 16384


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
        assert make.min_rows == 1
    assert make.choices[0].reason == "packing is switched off"
    make = ProductFactory(torch.device("meta"), torch.float32, timer=timer)
    assert isinstance(make(torch.empty(*BIG, device="meta")), DenseProduct)
    assert make.choices[0].reason == "packing is for CPUs"


@needs_packing
def test_choosing_leaves_the_random_state_of_torch_alone() -> None:
    before = torch.random.get_rng_state()
    weight = torch.zeros(*BIG)
    factory(SLOW_DENSE)(weight)
    assert torch.equal(torch.random.get_rng_state(), before)
