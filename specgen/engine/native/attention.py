"""Attention of a few query rows over cached keys and values, with grouped heads as additional query rows."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

WIDE = 64  # tokens of one sequence; from here on the keys are repeated instead of the mask, as computing dominates
_WRITTEN_OUT = 64  # query rows; below, in float32 on a CPU, three products are faster than torch's fused attention


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    score_cap: float | None,
    *,
    fused: bool = False,
) -> torch.Tensor:
    """Returns softmax(query keys^T + mask) values as [batch * n, heads * head size]. The scale is part of the query.

    `query` is [batch, n, heads, head size], `keys` and `values` [batch, kv heads, m, head size]. `mask` is None if every query
    sees every key. For n below `WIDE` it is [n * group, m] (see `masks`) or, with n = 1, also [batch, 1, 1, m]; otherwise it is
    [n, m] or [batch, 1, n, m]. `score_cap` c limits the scores to c tanh(score / c) before the mask (Gemma 2). `fused` always takes
    torch's fused attention, also where separate products are faster.
    """
    batch, tokens, heads, size = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    if tokens >= WIDE and score_cap is None:
        mixed = scaled_dot_product_attention(query.transpose(1, 2), keys, values, mask, scale=1.0, enable_gqa=group > 1)
        return mixed.transpose(1, 2).reshape(batch * tokens, heads * size)
    if tokens >= WIDE and mask is not None and group > 1:
        mask = mask.repeat_interleave(group, dim=-2)
    if group == 1:
        rows = query.transpose(1, 2)
    else:
        rows = query.unflatten(2, (kv_heads, group)).transpose(1, 2).reshape(batch, kv_heads, tokens * group, size)
    if score_cap is not None:
        mixed = _capped(rows, keys, values, mask, score_cap)
    elif not fused and batch == 1 and rows.dtype == torch.float32 and tokens * group < _WRITTEN_OUT and rows.is_cpu:
        flat, transposed = rows[0], keys[0].transpose(1, 2)
        scores = torch.bmm(flat, transposed) if mask is None else torch.baddbmm(mask, flat, transposed)
        mixed = torch.bmm(scores.softmax(dim=-1), values[0])[None]
    else:
        mixed = scaled_dot_product_attention(rows, keys, values, mask if mask is None or mask.dim() == 4 else mask[None, None], scale=1.0)
    if group == 1:
        return mixed.transpose(1, 2).reshape(batch * tokens, heads * size)
    return mixed.unflatten(2, (tokens, group)).transpose(1, 2).reshape(batch * tokens, heads * size)


def _capped(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, score_cap: float
) -> torch.Tensor:
    scores = torch.matmul(rows, keys.transpose(2, 3)).div_(score_cap).tanh_().mul_(score_cap)
    if mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype), values)
