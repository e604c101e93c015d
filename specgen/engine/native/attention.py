"""Attention of a few query rows over cached keys and values, with grouped heads as additional query rows."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

from specgen.engine.devices import move

KEY_BLOCK = 512  # keys; torch's fused attention on a CPU processes keys in blocks of this many
CAUSAL = torch.empty(0)  # in place of a mask: each token sees the keys up to its own, the last one sees all
WIDE = 64  # tokens; from here on the keys are repeated for grouped heads instead of the mask, as computing dominates
_WIDEST_HEAD = 256  # numbers per head that flash attention can have
_TRIAL_ERROR = 0.05  # numbers of size 1 differ by 0.01 in half precision, by 0.13 without a mask, and by 2 with another one
_WRITTEN_OUT = 64  # query rows; below, in float32 on a CPU, separate products are faster than torch's fused attention


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    score_cap: float | None = None,
    *,
    fused: bool = False,
) -> torch.Tensor:
    """Returns softmax(query keys^T + mask) values, [n, heads * head size]. The scale of the scores is part of the query.

    `query` is [n, heads, head size], `keys` and `values` are [kv heads, m, head size]. `mask` is [n * group, m] (see `masks`),
    for n from `WIDE` on [n, m]; None if every query sees every key; `CAUSAL` only where no scores are capped. `score_cap` c
    limits the scores to c tanh(score / c) before the mask (Gemma 2). `fused` always takes torch's fused attention, also where
    separate products are faster; capped scores are summed in blocks of keys instead, so that with both a row does not depend on
    how many blocks follow those that it sees.
    """
    tokens, heads, size = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    if mask is CAUSAL:
        mixed = _causal(query.transpose(0, 1)[None], keys[None], values[None])[0]
        return mixed.transpose(0, 1).reshape(tokens, heads * size)
    if tokens >= WIDE:
        if score_cap is None:
            parts = query.transpose(0, 1)[None], *_of_all_heads(keys[None], values[None], group)
            mixed = scaled_dot_product_attention(*parts, mask, scale=1.0, enable_gqa=parts[1].shape[1] < heads)[0]
            return mixed.transpose(0, 1).reshape(tokens, heads * size)
        mask = mask if mask is None or group == 1 else mask.repeat_interleave(group, dim=0)
    if group == 1:
        rows = query.transpose(0, 1)
    else:
        rows = query.view(tokens, kv_heads, group, size).transpose(0, 1).reshape(kv_heads, tokens * group, size)
    if score_cap is not None:
        mixed = _capped(rows, keys, values, mask, score_cap, KEY_BLOCK if fused else None)
    elif not fused and tokens * group < _WRITTEN_OUT and rows.dtype == torch.float32 and rows.is_cpu:
        scores = rows @ keys.transpose(1, 2) if mask is None else torch.baddbmm(mask, rows, keys.transpose(1, 2))
        mixed = torch.bmm(scores.softmax(-1), values)
    else:
        mask = mask if mask is None else mask[None, None]
        mixed = scaled_dot_product_attention(rows[None], keys[None], values[None], mask, scale=1.0)[0]
    if group == 1:
        return mixed.transpose(0, 1).reshape(tokens, heads * size)
    return mixed.view(kv_heads, tokens, group, size).transpose(0, 1).reshape(tokens, heads * size)


def _causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns the attention [1, heads, n, size] of the last n tokens, each of which sees the keys up to its own.

    On a GPU by torch's flash attention, whose causal mask begins at the lower right, and which needs half precision, heads of at
    most 256 numbers, a multiple of 8, and copies no keys for grouped heads. (`torch.nn.attention.bias` calls it alike, but takes
    a second to import.) Elsewhere with a mask.
    """
    if query.is_cuda:
        mixed: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, is_causal=True, return_debug_mask=False, scale=1.0
        )[0]
        return mixed
    tokens, count = query.shape[2], keys.shape[2]
    visible = torch.ones(tokens, count, dtype=torch.bool, device=query.device).tril(count - tokens)
    return scaled_dot_product_attention(query, keys, values, visible, scale=1.0, enable_gqa=query.shape[1] > keys.shape[1])


@cache
def has_causal_kernel(device: torch.device, dtype: torch.dtype, head_size: int, group: int) -> bool:
    """Whether `attend` can compute `CAUSAL` attention without a mask on this device. Tries it with a few numbers.

    Torch's flash attention needs a GPU of compute capability 8.0 or above, and is missing in some builds.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_size > _WIDEST_HEAD or head_size % 8:
        return False
    generator = torch.Generator().manual_seed(0)
    sizes = (2 * group, 3), (2, 20), (2, 20)  # heads and tokens of query, keys and values: the mask's corner matters
    query, keys, values = (torch.randn(1, *size, head_size, generator=generator) for size in sizes)
    query /= head_size**0.5
    expected = _causal(query, keys, values)
    try:
        found = _causal(*(move(tensor.to(dtype), device) for tensor in (query, keys, values)))
        return bool((found.cpu().float() - expected).abs().max() < _TRIAL_ERROR)
    except RuntimeError:
        return False


def attend_batch(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, score_cap: float | None = None
) -> torch.Tensor:
    """Returns softmax(query keys^T + mask) values of several sequences, [batch, n, heads * head size].

    `query` is [batch, n, heads, head size], `keys` and `values` are [batch, kv heads, m, head size], `mask` [batch, 1, n, m].
    """
    batch, tokens, heads, size = query.shape
    group = heads // keys.shape[1]
    if tokens == 1:  # the heads of a group become query rows, which see the same keys: these are not copied for each head
        rows, group = query.reshape(batch, -1, group, size), 1
    else:
        rows = query.transpose(1, 2)
    if score_cap is None:
        keys, values = _of_all_heads(keys, values, group)
        mixed = scaled_dot_product_attention(rows, keys, values, mask, scale=1.0, enable_gqa=keys.shape[1] < rows.shape[1])
    else:
        keys, values = (part if group == 1 else part.repeat_interleave(group, dim=1) for part in (keys, values))
        mixed = _capped(rows, keys, values, mask, score_cap)
    if tokens > 1:
        mixed = mixed.transpose(1, 2)
    return mixed.reshape(batch, tokens, heads * size)


def _of_all_heads(keys: torch.Tensor, values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values [batch, kv heads, m, head size] repeated for the query heads that share them, on a GPU.

    Of the kernels for GPUs, only the plain one takes a mask and grouped heads (torch 2.13, most GPUs): it also copies keys and
    values, and has all scores in memory, in float32.
    """
    if group == 1 or not _repeats_heads(keys.device):
        return keys, values
    return keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)


def _repeats_heads(device: torch.device) -> bool:
    return device.type == "cuda"


def _capped(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    score_cap: float,
    block: int | None = None,
) -> torch.Tensor:
    """Returns attention with capped scores. With `block`, the values are added up in float32, this many keys at a time."""
    scores = torch.tanh((rows @ keys.transpose(-1, -2)) / score_cap) * score_cap
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32)
    if block is None:
        return weights.to(values.dtype) @ values
    parts = zip(torch.split(weights, block, -1), torch.split(values, block, -2), strict=True)
    return torch.stack([weight @ value.float() for weight, value in parts]).sum(0).to(values.dtype)
