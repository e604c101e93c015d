"""Kernels for the attention of a few tokens after many cached ones, which `measure_gpu.py` compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa


def attention_kernels(
    config: dict[str, Any], count: int, keys: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], torch.Tensor]]:
    """Ways to compute the attention of `count` tokens over so many keys, with random numbers, by name.

    `packed`: the query heads that share a key-value head are rows of one query. `repeated`: keys and values are copied for each
    query head. `lower_right`: without a mask, each token sees the keys up to its own.
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
    }
