"""Kernels for the attention of a few tokens after many cached ones, which `measure_gpu.py` compares."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from specgen.engine.native.description import LayerKind
from specgen.engine.native.kernels.kernel_set import SPAN, AttentionSpec, PassNumbers, StaticInputs
from specgen.engine.native.kernels.torch_kernels import TORCH
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from specgen.engine.native.kv_buffer import LayerEntries


def attention_kernels(
    config: dict[str, Any], count: int, keys: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], torch.Tensor]]:
    """Ways to compute the attention of `count` tokens over so many keys, with random numbers, by name.

    `packed`: the query heads that share a key-value head are rows of one query. `repeated`: keys and values are copied for each
    query head. `lower_right`: without a mask, each token sees the keys up to its own. `fused`: Triton's kernels, `fused_in_8` in
    a cache with room for eight times as many keys; they read the number of keys from the device.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, group = config["hidden_size"] // heads, heads // kv_heads

    def zeros(rows: int) -> torch.Tensor:
        return torch.zeros(1, 1, rows, keys, dtype=dtype, device=device)

    query, k, v = (torch.randn(1, h, n, size, dtype=dtype, device=device) for h, n in ((heads, count), *[(kv_heads, keys)] * 2))
    packed = query.view(1, kv_heads, group, count, size).transpose(2, 3).reshape(1, kv_heads, count * group, size)
    mask, plain = zeros(count * group), zeros(count)

    def of_backend(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(packed, k, v, mask)

    return {
        "packed_no_mask": lambda: sdpa(packed, k, v),
        "packed_mask": lambda: sdpa(packed, k, v, mask),
        "packed_mask_cudnn": lambda: of_backend(SDPBackend.CUDNN_ATTENTION),
        "packed_mask_efficient": lambda: of_backend(SDPBackend.EFFICIENT_ATTENTION),
        "packed_products": lambda: (packed @ k.transpose(2, 3) + mask).softmax(-1) @ v,
        "repeated_mask": lambda: sdpa(query, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), plain),
        "lower_right": lambda: sdpa(query, k, v, causal_lower_right(count, keys), enable_gqa=True),
        "fused": _fused(query[0].transpose(0, 1), torch.stack((k[0], v[0])), keys),
        "fused_in_8": _fused(query[0].transpose(0, 1), torch.stack((k[0], v[0])), 8 * keys),
    }


def _fused(query: torch.Tensor, cached: torch.Tensor, room: int) -> Callable[[], torch.Tensor]:
    """The fused attention of the chain `query` [n, heads, size], whose own keys and values are the last of `cached`.

    `cached` is [2, kv heads, keys, size], the cache has room for `room` of them.
    """
    (count, heads, size), (_, kv_heads, keys, _) = query.shape, cached.shape
    cache = cached.new_zeros(2, kv_heads, room, size)
    cache[:, :, :keys] = cached
    first = torch.tensor([keys - count], device=query.device)
    bits = (2 << torch.arange(count, device=query.device)) - 1
    depths, indices = torch.arange(SPAN + 1, device=query.device), torch.arange(room, device=query.device)
    numbers, entries = PassNumbers(first, first, bits, depths), [LayerEntries(cache, *cache)]
    inputs = StaticInputs(TORCH, numbers, [LayerKind()], {}, entries, heads // kv_heads, 0, indices)
    spec = AttentionSpec(0, 0, heads, kv_heads, size, None, None, 0.0)

    def run() -> torch.Tensor:
        if not query.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("skipped: without a GPU, it needs TRITON_INTERPRET=1")
        try:
            from specgen.engine.native.kernels.triton_kernels import attend

            return attend(query, spec, inputs)
        except Exception as error:  # Triton raises errors of many types; the other kernels are to be measured
            raise RuntimeError(f"fails: {error}") from error

    return run
