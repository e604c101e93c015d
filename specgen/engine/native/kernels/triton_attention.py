"""Triton kernels for the attention of a static pass: a part for each range of cached keys, and the sum of the parts.

Flash decoding (https://pytorch.org/blog/flash-decoding): the keys are processed in splits of `SPLIT` by different programs, each
with the online softmax of FlashAttention (arXiv:2205.14135), and a second kernel adds the parts. Which keys a token sees is
computed from the pass's numbers on the device, see `static_numbers`; so is the number of keys.

Splits begin at multiples of `SPLIT` and are added in their order, and keys that a row does not see add zeros. So the bits of a
row depend neither on the room in the cache nor on what the other rows of the pass are.
"""

from __future__ import annotations

import triton
import triton.language as tl

SPLIT = tl.constexpr(128)  # keys; more programs for short contexts than the usual 256, less to add up than with 64
CHUNK = tl.constexpr(16)  # splits that are added up at once
NUMBERS = ["base_at", "first_at", "bits", "depths"]  # parts of one vector: compiled alike wherever in it they begin
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """Returns tanh(x) in float32, to a relative error of 4e-7: libdevice's is named differently in each version."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    rest = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - rest) / (1.0 + rest)
    return tl.where(tl.abs(x) < 0.125, series, tl.where(x < 0, -large, large))


@triton.jit
def _key_range(base, first, width, window):
    """Returns the range of cache entries that some token of the pass may see. No token is before position `base`."""
    start = tl.where(window > 0, tl.maximum(base - window + 1, 0), 0)
    return start, first + width


@triton.jit(do_not_specialize=["width", "splits", "rows_apart", "window"], do_not_specialize_on_alignment=NUMBERS)
def attention_parts(
    query,  # [width, heads, SIZE], scaled; rows and heads may be apart
    keys,  # [kv heads, capacity, SIZE]
    values,
    base_at,  # [1] int64: the first of the tokens that depths and bits are for
    first_at,  # [1] int64: the pass's first token
    bits,  # [width] int64: what each token sees from base on
    depths,  # [64] int64: the positions of the tokens from base on, minus base
    sums,  # [width * heads, splits, SIZE] float32: sums of exp(score - top) * value of each split
    tops,  # [2, width * heads, splits] float32: the highest score of a split in units of log 2, and the sum of exponentials
    query_token_stride,
    query_head_stride,
    key_head_stride,
    key_stride,
    width,
    splits,
    rows_apart,  # width * heads * splits
    window,  # in positions; 0: none
    score_cap,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,  # whether there is a window
    CAPPED: tl.constexpr,
    IN_FLOAT32: tl.constexpr,  # products in float32, without TF32
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
):
    """Computes the part of one split, for ROWS rows of one key-value head. Row r is query head r % GROUP of token r // GROUP."""
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    base = tl.load(base_at)
    first = tl.load(first_at)
    start, end = _key_range(base, first, width, window)
    begin = split * SPLIT
    if (begin < end) & (begin + SPLIT > start):
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        token = row // GROUP
        is_row = token < width
        head = kv_head * GROUP + row % GROUP
        column = tl.arange(0, PADDED_SIZE)
        is_column = column < SIZE
        at = query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + column[None, :]
        q = tl.load(at, mask=is_row[:, None] & is_column[None, :], other=0.0)
        if IN_FLOAT32:
            q = q.to(tl.float32)
        seen = tl.load(bits + token, mask=is_row, other=0)
        position = tl.load(depths + (first - base) + token, mask=is_row, other=0)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, PADDED_SIZE], tl.float32)
        block_start = kv_head.to(tl.int64) * key_head_stride
        for offset in range(0, SPLIT, KEYS):
            key = begin + offset + tl.arange(0, KEYS)
            is_key = key < end
            key_at = block_start + key.to(tl.int64) * key_stride
            loaded = is_key[:, None] & is_column[None, :]
            k = tl.load(keys + key_at[:, None] + column[None, :], mask=loaded, other=0.0)
            if IN_FLOAT32:
                scores = tl.dot(q, tl.trans(k.to(tl.float32)), input_precision="ieee")
            else:
                scores = tl.dot(q, tl.trans(k))
            if CAPPED:
                scores = score_cap * tanh(scores / score_cap)
            distance = key - base
            bit = tl.minimum(tl.maximum(distance, 0), 63)
            visible = (distance < 0)[None, :] | (((seen[:, None] >> bit[None, :]) & 1) != 0)
            if WINDOWED:
                depth = tl.load(depths + bit)
                of_key = tl.where(distance < 0, distance, depth)
                visible = visible & (position[:, None] - of_key[None, :] < window)
            visible = visible & is_key[None, :]
            scores = tl.where(visible, scores * _LOG2_E, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that sees no key so far has zeros
            weights = tl.exp2(scores - finite_top[:, None])
            scale = tl.exp2(top - finite_top)
            total = total * scale + tl.sum(weights, 1)
            v = tl.load(values + key_at[:, None] + column[None, :], mask=loaded, other=0.0)
            mixed = mixed * scale[:, None]
            if IN_FLOAT32:
                mixed += tl.dot(weights.to(v.dtype).to(tl.float32), v.to(tl.float32), input_precision="ieee")
            else:
                mixed += tl.dot(weights.to(v.dtype), v)
            top = new_top
        heads = tl.num_programs(0) * GROUP
        out = (token * heads + head) * splits + split
        tl.store(tops + out, top, mask=is_row)
        tl.store(tops + rows_apart + out, total, mask=is_row)
        sums_at = sums + out.to(tl.int64)[:, None] * SIZE + column[None, :]
        tl.store(sums_at, mixed, mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["width", "splits", "rows_apart", "window"], do_not_specialize_on_alignment=NUMBERS)
def attention_sum(
    sums,
    tops,
    base_at,
    first_at,
    output,  # [width * heads, SIZE]
    width,
    splits,
    rows_apart,
    window,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
):
    """Adds the parts of one row, a query head of a token, in chunks of splits that begin at multiples of CHUNK."""
    row = tl.program_id(0)
    base = tl.load(base_at)
    start, end = _key_range(base, tl.load(first_at), width, window)
    low, high = start // SPLIT, (end + SPLIT - 1) // SPLIT
    column = tl.arange(0, PADDED_SIZE)
    top = float("-inf")
    total = 0.0
    mixed = tl.zeros([PADDED_SIZE], tl.float32)
    for chunk in range(low // CHUNK, (high + CHUNK - 1) // CHUNK):
        split = chunk * CHUNK + tl.arange(0, CHUNK)
        is_split = (split >= low) & (split < high)
        at = row * splits + split
        tops_here = tl.load(tops + at, mask=is_split, other=float("-inf"))
        totals = tl.load(tops + rows_apart + at, mask=is_split, other=0.0)
        loaded = is_split[:, None] & (column < SIZE)[None, :]
        parts = tl.load(sums + at.to(tl.int64)[:, None] * SIZE + column[None, :], mask=loaded, other=0.0)
        new_top = tl.maximum(top, tl.max(tops_here, 0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tops_here - finite_top)
        scale = tl.exp2(top - finite_top)
        total = total * scale + tl.sum(weights * totals, 0)
        mixed = mixed * scale + tl.sum(weights[:, None] * parts, 0)
        top = new_top
    mixed = mixed / total
    tl.store(output + row * SIZE + column, mixed.to(output.dtype.element_ty), mask=column < SIZE)
