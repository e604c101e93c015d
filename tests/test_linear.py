"""Matrix products with weights as they are, packed, or rounded to int8 or int4: what they compute,
and which are taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from specgen.base.types import QUANTISED
from specgen.engine.kernels.library import kernels
from specgen.engine.native import linear
from specgen.engine.native.linear import (
    DenseLinear,
    KernelLinear,
    Linear,
    LinearFactory,
    WidenedLinear,
    packed_linear,
    packing_works,
    trained_linear,
)

CPU = torch.device("cpu")
BIG = (1024, 1024)  # 4 MB in float32
needs_kernels = pytest.mark.skipif(kernels() is None, reason="there are no kernels here")
needs_packing = pytest.mark.skipif(
    not packing_works(torch.float32), reason="packing does not work here"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [
        DenseLinear,
        partial(DenseLinear, by_columns=True),
        WidenedLinear,
        trained_linear,
        packed_linear,
    ],
)
def test_products_and_sums_with_a_residual(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[..., Linear], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(linear, "_AT_ONCE", 40 * 70)  # three parts
    if kind is packed_linear and not packing_works(dtype):
        pytest.skip(f"{dtype} cannot be packed here")
    generator = torch.Generator().manual_seed(1)
    weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((96, 70), (96,))
    )
    for product, added in (
        (kind(weight, bias, 0.25), bias.double()),
        (kind(weight, None, 0.25), 0.0),
    ):
        for rows in (1, 2, 4, 33):
            x, residual = (
                torch.randn(rows, columns, generator=generator).to(dtype) for columns in (70, 96)
            )
            expected = x.double() @ weight.double().T + added
            limit = (1e-5 if dtype == torch.float32 else 3e-2) * float(expected.abs().max())
            assert (product(x).double() - expected).abs().max() < limit
            total = residual.double() + 0.25 * expected
            with torch.no_grad():
                assert product.add_to(residual, x) is residual
            assert (residual.double() - total).abs().max() < limit


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "kernels_for", lambda *_: None)


@needs_packing
def test_large_weights_are_packed_on_a_cpu_without_kernels(without_kernels: None) -> None:
    make = LinearFactory(CPU, torch.float32)
    assert not isinstance(make(torch.zeros(*BIG)), DenseLinear)
    small = make(torch.zeros(BIG[0] - 1, BIG[1]))
    assert isinstance(small, DenseLinear)
    assert small._transposed.is_contiguous()
    weight = torch.zeros(4, 8, requires_grad=True)
    trained = make(weight)
    assert isinstance(trained, DenseLinear)
    assert trained._transposed.data_ptr() == weight.data_ptr()  # sees the optimizer's steps
    for device, dtype in (("meta", torch.float32), ("cpu", torch.float64)):
        make = LinearFactory(torch.device(device), dtype)
        assert isinstance(make(torch.empty(*BIG, dtype=dtype, device=device)), DenseLinear)


@pytest.mark.parametrize("change", [lambda x: x * 1.001, None])
def test_packed_products_that_are_wrong_or_missing_are_not_used(
    monkeypatch: pytest.MonkeyPatch, without_kernels: None, change: object
) -> None:
    def broken(weight: torch.Tensor, *_: object) -> Linear:
        if not callable(change):
            raise RuntimeError("mkldnn is not there")
        return Linear(weight.shape, lambda x: change(torch.nn.functional.linear(x, weight)))

    monkeypatch.setattr(linear, "packed_linear", broken)
    packing_works.cache_clear()
    try:
        assert isinstance(LinearFactory(CPU, torch.float32)(torch.randn(*BIG)), DenseLinear)
    finally:
        packing_works.cache_clear()


@needs_kernels
def test_kernels_compute_in_float32_on_a_cpu() -> None:
    assert isinstance(LinearFactory(CPU, torch.float32)(torch.zeros(4, 8)), KernelLinear)
    trained = LinearFactory(CPU, torch.float32)(torch.zeros(4, 8, requires_grad=True))
    assert isinstance(trained, DenseLinear)
    assert LinearFactory(CPU, torch.bfloat16).kernels is None
    assert LinearFactory(torch.device("meta"), torch.float32).kernels is None


@needs_kernels
@pytest.mark.parametrize("rows", [1, 5])
def test_rounded_products_are_the_same_with_and_without_kernels(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(count, 95, generator=generator) for count in (70, rows))
    bias = torch.randn(70, generator=generator)
    x[0] *= 1000  # a row with large numbers takes no bits from the others
    x[-1, :40] = 0.0
    for kind in QUANTISED:
        by_kernels = LinearFactory(CPU, torch.float32, quantise=kind)(weight, bias)
        with monkeypatch.context() as patch:
            patch.setattr(linear, "kernels_for", lambda *_: None)
            by_torch = LinearFactory(CPU, torch.float32, quantise=kind)(weight, bias)
        assert isinstance(by_kernels, KernelLinear)
        assert not isinstance(by_torch, KernelLinear)
        expected = by_torch(x)
        # in 4 bits, torch does not round activations
        limit = (1e-5 if kind == "int8" else 0.02) * expected.abs().amax(1, keepdim=True)
        assert ((by_kernels(x) - expected).abs() <= limit).all()
        if kind == "int8":  # a target's rows must not depend on each other
            assert torch.equal(expected[:1], by_torch(x[:1]))


def test_a_broken_product_on_a_gpu_is_not_used_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("no such operator\nand a stack")

    device = torch.device("cpu")  # stands for a GPU
    monkeypatch.setitem(linear._ON_GPU, "int8", lambda weight: lambda x: x @ weight.T * 1.5)
    monkeypatch.setitem(linear._ON_GPU, "int4", fails)
    linear._refusal_on_gpu.cache_clear()
    try:
        problem = linear._refusal_on_gpu("int8", device.type)
        assert problem == "int8 products give wrong results"
        problem = linear._refusal_on_gpu("int4", device.type)
        assert problem == "int4 products failed: no such operator"
        monkeypatch.setitem(linear._ON_GPU, "int8", lambda weight: lambda x: x @ weight.T)
        linear._refusal_on_gpu.cache_clear()
        assert linear._refusal_on_gpu("int8", device.type) is None
    finally:
        linear._refusal_on_gpu.cache_clear()
