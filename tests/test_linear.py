"""Matrix products with weights as they are, packed, or rounded to int8 or int4: what they compute,
and which are taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from specgen.base.types import QUANTISED
from specgen.engine.native import linear
from specgen.engine.native.linear import (
    GROUP,
    DenseLinear,
    Linear,
    LinearFactory,
    WidenedLinear,
    packed_linear,
    packing_works,
    quantised,
    refusal,
    restored,
    trained_linear,
    with_int4_weights,
    with_int8_weights,
    with_rounded_activations,
)

CPU = torch.device("cpu")
BIG = (1024, 1024)  # 4 MB in float32
needs_packing = pytest.mark.skipif(
    not packing_works(torch.float32), reason="packing does not work here"
)
needs_rounding = pytest.mark.skipif(
    any(refusal(kind, CPU) is not None for kind in QUANTISED),
    reason="this torch or this processor has no such products",
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


@needs_packing
def test_large_weights_are_packed_on_a_cpu() -> None:
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
    monkeypatch: pytest.MonkeyPatch, change: object
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


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_rounded_weight_is_off_by_half_a_scale_at_most(kind: str) -> None:
    weight = (
        torch.randn(24, 96, generator=torch.Generator().manual_seed(2))
        * 10.0 ** torch.arange(-12, 12)[:, None]
    )
    weight[3] = 0.0
    groups = weight.view(24, -1, GROUP) if kind == "int4" else weight.view(24, 1, 96)
    half = groups.double().abs().amax(2, keepdim=True) / (127 if kind == "int8" else 7) / 2
    off = (restored(kind, weight) - weight.double()).abs().view(groups.shape)
    assert (off <= half * (1 + 1e-5)).all()
    assert off.max() > 0


@pytest.mark.parametrize(
    ("kind", "prepare"),
    [
        ("int8", partial(with_rounded_activations, steps=63)),
        ("int8", with_int8_weights),
        ("int4", with_int4_weights),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_products_are_those_of_the_rounded_weight(
    kind: str, prepare: linear.Multiply, dtype: torch.dtype
) -> None:
    """But for the rounding of activations: 7 bits of each row's range, or bfloat16. Rows do not
    depend on each other."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    try:
        multiply = prepare(weight)
        multiply(torch.ones(1, 64, dtype=dtype))
    except linear._ERRORS:
        pytest.skip("this torch or this processor cannot")
    for rows in (1, 2, 5, 40):
        x = torch.randn(rows, 64, generator=generator).to(dtype)
        x[0] *= 1000  # a row with large numbers takes no bits from the others
        expected = x.double() @ restored(kind, weight).T
        if isinstance(prepare, partial):
            assert torch.equal(multiply(x), torch.cat([multiply(row[None]) for row in x]))
        assert (
            (multiply(x).double() - expected).abs()
            < 0.04 * expected.abs().amax(1, keepdim=True) + 0.02
        ).all()


@needs_rounding
def test_a_broken_rounded_product_is_not_used_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: torch.Tensor) -> None:
        raise RuntimeError("no such operator\nand a stack")

    monkeypatch.setattr(
        linear, "with_rounded_activations", lambda weight: lambda x: x @ weight.T * 1.05
    )
    linear._working.cache_clear()
    try:
        assert quantised("int8", torch.randn(64, 64)) is not None  # the next way
        monkeypatch.setattr(linear, "with_int8_weights", fails)
        monkeypatch.setattr(linear, "with_int4_weights", fails)
        linear._working.cache_clear()
        assert isinstance(
            LinearFactory(CPU, torch.float32, quantise="int4")(torch.randn(64, 64)), DenseLinear
        )
        assert refusal("int8", CPU) == "int8 products failed: no such operator"
    finally:
        linear._working.cache_clear()


@needs_rounding
def test_rows_without_groups_are_rounded_to_int8() -> None:
    weight = torch.randn(64, 48)
    x = torch.randn(3, 48)
    multiply = quantised("int4", weight)
    int8 = quantised("int8", weight)
    assert multiply is not None
    assert int8 is not None
    assert torch.equal(multiply(x), int8(x))
