"""Triton kernels for what a static pass does between its matrix products: query and key heads, the KV cache, the activation.

All numbers are computed in float32, and rounded to the model's dtype wherever torch's operators round them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specgen.engine.native.kernels.triton_attention import NUMBERS, tanh


@triton.jit(do_not_specialize_on_alignment=NUMBERS)
def heads_to_cache(
    heads,  # [width, query heads + 2 * KV_HEADS, SIZE], contiguous; query heads are changed in place
    keys,  # [KV_HEADS, capacity, SIZE]
    values,
    rotations,  # [positions, ROTATED / 2, 2] float32: cos and sin
    weight,  # [query heads + KV_HEADS, SIZE]: the norm's
    base_at,
    first_at,
    depths,
    query_heads,
    key_head_stride,
    key_stride,
    eps,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,  # numbers per head; 0: no rotary embedding
    NORMED: tl.constexpr,  # whether query and key heads are normalised (RMSNorm)
    PAIRS: tl.constexpr,  # a power of two, at least SIZE / 2
):
    """Normalises and rotates one head of one token if it is a query or key head, and writes keys and values to the cache."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    base = tl.load(base_at)
    slot = tl.load(first_at) + token
    pair = tl.arange(0, PAIRS)
    is_pair = pair < SIZE // 2
    head_at = token * (query_heads + 2 * KV_HEADS) + head
    here = heads + head_at * SIZE + 2 * pair
    left = tl.load(here, mask=is_pair, other=0.0)
    right = tl.load(here + 1, mask=is_pair, other=0.0)
    if head < query_heads + KV_HEADS:
        a = left.to(tl.float32)
        b = right.to(tl.float32)
        if NORMED:
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / SIZE + eps)
            weight_here = weight + head * SIZE + 2 * pair
            left_weight = tl.load(weight_here, mask=is_pair, other=0.0).to(tl.float32)
            right_weight = tl.load(weight_here + 1, mask=is_pair, other=0.0).to(tl.float32)
            a = ((a * scale).to(left.dtype).to(tl.float32) * left_weight).to(left.dtype).to(tl.float32)
            b = ((b * scale).to(left.dtype).to(tl.float32) * right_weight).to(left.dtype).to(tl.float32)
        if ROTATED > 0:
            position = base + tl.load(depths + (slot - base))
            is_rotated = pair < ROTATED // 2
            rotation = rotations + position * ROTATED + 2 * pair
            cos = tl.load(rotation, mask=is_rotated, other=1.0)
            sin = tl.load(rotation + 1, mask=is_rotated, other=0.0)
            turned = a * cos - b * sin
            b = a * sin + b * cos
            a = turned
        left = a.to(left.dtype)
        right = b.to(left.dtype)
    if head < query_heads:
        tl.store(here, left, mask=is_pair)
        tl.store(here + 1, right, mask=is_pair)
    else:
        entry = head - query_heads
        if entry < KV_HEADS:
            at = keys + entry.to(tl.int64) * key_head_stride + slot * key_stride + 2 * pair
            tl.store(at, left, mask=is_pair)
            tl.store(at + 1, right, mask=is_pair)
        else:
            at = values + (entry - KV_HEADS).to(tl.int64) * key_head_stride + slot * key_stride + 2 * pair
            tl.store(at, left, mask=is_pair)
            tl.store(at + 1, right, mask=is_pair)


@triton.jit
def gated_activation(
    inner,  # [width, 2 * size], contiguous: gate, up
    output,  # [width, size]
    size,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes activation(gate) * up for BLOCK numbers of one token."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < size
    at = inner + token * 2 * size + column
    gate = tl.load(at, mask=is_column, other=0.0)
    up = tl.load(at + size, mask=is_column, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    if ACTIVATION == "silu":
        active = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        active = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        active = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        active = tl.where(x > 0.0, x, 0.0)
    active = active.to(gate.dtype).to(tl.float32) * up
    tl.store(output + token * size + column, active.to(gate.dtype), mask=is_column)
