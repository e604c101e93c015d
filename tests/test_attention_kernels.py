"""Which attention kernels a GPU is given. A CPU's tensors are taken for a GPU's, as no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specgen.engine.native import attention
from specgen.engine.native.attention import WIDE, attend, attend_batch, has_causal_kernel

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "move", lambda tensor, device: tensor)
    has_causal_kernel.cache_clear()
    yield
    has_causal_kernel.cache_clear()


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_causal_kernel_that_works_is_used(size: int, dtype: torch.dtype) -> None:
    assert has_causal_kernel(GPU, dtype, size, 4)
    assert not has_causal_kernel(GPU, dtype, size + 4, 4)
    assert not has_causal_kernel(GPU, dtype, 2 * size + 256, 1)
    assert not has_causal_kernel(GPU, torch.float32, size, 4)
    assert not has_causal_kernel(torch.device("cpu"), dtype, size, 4)


@pytest.mark.parametrize("problem", ["old GPU", "upper left"])
def test_a_causal_kernel_that_fails_or_has_another_mask_is_not_used(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention._causal

    def causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if query.dtype == torch.float32:
            return original(query, keys, values)
        if problem == "old GPU":
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
        return original(query, keys[:, :, : query.shape[2]], values[:, :, : query.shape[2]])

    monkeypatch.setattr(attention, "_causal", causal)
    assert not has_causal_kernel(GPU, torch.float16, 64, 4)


@pytest.mark.parametrize("is_batch", [False, True])
def test_a_gpu_gets_a_mask_or_grouped_heads_but_not_both(is_batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    original = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", lambda *a, **k: calls.append(k) or original(*a, **k))
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (torch.randn(heads, WIDE, 8, generator=generator) for heads in (4, 2, 2))
    mask = torch.zeros(WIDE, WIDE).masked_fill_(torch.ones(WIDE, WIDE).triu(1).bool(), -1e30)
    found = []
    for repeats in (False, True):
        monkeypatch.setattr(attention, "_repeats_heads", lambda _, repeats=repeats: repeats)
        if is_batch:
            found.append(attend_batch(query.transpose(0, 1)[None], keys[None], values[None], mask[None, None]))
        else:
            found.append(attend(query.transpose(0, 1), keys, values, mask))
    assert torch.allclose(*found, atol=1e-6)
    assert [call["enable_gqa"] for call in calls] == [True, False]
