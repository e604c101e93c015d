"""Attention of a few query rows over cached keys and values.

Query heads that share keys and values (grouped heads) are computed as additional query rows.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

KEY_BLOCK = 512  # keys; torch's fused attention on a CPU processes keys in blocks of this many
# in place of a mask: each token sees the keys up to its own, the last one sees all
CAUSAL = torch.empty(0)
# tokens; from here on the keys are repeated for grouped heads instead of the mask, as computing
# dominates
WIDE = 64
_WIDEST_HEAD = 256  # the largest head size that flash attention can have
# query rows; below, in float32 on a CPU, separate products are faster than torch's fused attention
_WRITTEN_OUT = 64


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    score_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    *,
    fused: bool = False,
) -> torch.Tensor:
    """Returns softmax(query keys^T + mask) values, [n, heads * head size]. The scale of the scores
    is part of the query.

    `query` is [n, heads, head size], `keys` and `values` are [kv heads, m, head size]. `mask` is [n
    * group, m], where row i * group + g belongs to token i and to the g-th query head of its group;
    if n is `WIDE` or more, it is [n, m]. None: every query sees every key. `CAUSAL` may be given in
    place of a mask if scores are not capped, on a GPU with `has_causal_kernel`. `score_cap` c
    limits the scores to c tanh(score / c) before the mask (Gemma 2). `sinks` [heads] are logits
    that take part in the softmax of each head's scores and have no value (gpt-oss). `fused` always
    takes torch's fused attention, also where separate products are faster, and adds up capped
    scores in blocks of keys: then the result of a row does not depend on how many blocks of keys
    follow those that it sees.
    """
    tokens, heads, size = query.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    if mask is CAUSAL:
        mixed = _causal(query.transpose(0, 1)[None], keys[None], values[None])[0]
        return mixed.transpose(0, 1).reshape(tokens, heads * size)
    if tokens >= WIDE:
        if score_cap is None and sinks is None:
            parts = query.transpose(0, 1)[None], *_of_all_heads(keys[None], values[None], group)
            mixed = scaled_dot_product_attention(
                *parts, mask, scale=1.0, enable_gqa=parts[1].shape[1] < heads
            )[0]
            return mixed.transpose(0, 1).reshape(tokens, heads * size)
        mask = mask if mask is None or group == 1 else mask.repeat_interleave(group, dim=0)
    if group == 1:
        rows = query.transpose(0, 1)
    else:
        rows = (
            query.view(tokens, kv_heads, group, size)
            .transpose(0, 1)
            .reshape(kv_heads, tokens * group, size)
        )
    if score_cap is not None or sinks is not None:
        sinks = sinks if sinks is None else sinks.view(kv_heads, group).repeat(1, tokens)
        mixed = _written_out(
            rows, keys, values, mask, score_cap, sinks, KEY_BLOCK if fused else None
        )
    elif (
        not fused
        and tokens * group < _WRITTEN_OUT
        and rows.dtype in (torch.float32, torch.float64)
        and rows.is_cpu
    ):
        scores = (
            rows @ keys.transpose(1, 2)
            if mask is None
            else torch.baddbmm(mask, rows, keys.transpose(1, 2))
        )
        mixed = torch.bmm(scores.softmax(-1), values)
    else:
        mask = mask if mask is None else mask[None, None]
        mixed = scaled_dot_product_attention(rows[None], keys[None], values[None], mask, scale=1.0)[
            0
        ]
    if group == 1:
        return mixed.transpose(0, 1).reshape(tokens, heads * size)
    return mixed.view(kv_heads, tokens, group, size).transpose(0, 1).reshape(tokens, heads * size)


def _causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns the attention [1, heads, n, size] of the last n tokens, each of which sees the keys
    up to its own.

    By torch's flash attention, whose causal mask begins at the lower right, and which copies no
    keys for grouped heads. (`torch.nn.attention.bias` calls it alike, but takes a second to
    import.)
    """
    mixed: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, keys, values, 0.0, is_causal=True, return_debug_mask=False, scale=1.0
    )[0]
    return mixed


def has_causal_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether `attend` can take `CAUSAL` in place of a mask here: whether torch's flash attention
    runs on this device and dtype."""
    if (
        device.type != "cuda"
        or dtype not in (torch.bfloat16, torch.float16)
        or head_size > _WIDEST_HEAD
        or head_size % 8
    ):
        return False
    is_built = torch.backends.cuda.is_flash_attention_available()  # type: ignore[no-untyped-call]
    return bool(is_built) and torch.cuda.get_device_capability(device) >= (8, 0)


def attend_batch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    score_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns softmax(query keys^T + mask) values of several sequences, [batch, n, heads * head
    size].

    `query` is [batch, n, heads, head size], `keys` and `values` are [batch, kv heads, m, head
    size], `mask` is [batch, 1, n, m]. `score_cap` and `sinks` are as for `attend`.
    """
    batch, tokens, heads, size = query.shape
    group = heads // keys.shape[1]
    # the heads of a group become query rows, which see the same keys: these are not copied for each
    # head
    if tokens == 1:
        rows = query.reshape(batch, -1, group, size)
        group = 1
    else:
        rows = query.transpose(1, 2)
    if score_cap is None and sinks is None:
        keys, values = _of_all_heads(keys, values, group)
        if mask.is_floating_point():  # a part may be trained in float32 for a target in bfloat16
            mask = mask.to(rows.dtype)
        mixed = scaled_dot_product_attention(
            rows, keys, values, mask, scale=1.0, enable_gqa=keys.shape[1] < rows.shape[1]
        )
    else:
        keys, values = (
            part if group == 1 else part.repeat_interleave(group, dim=1) for part in (keys, values)
        )
        if sinks is not None and tokens == 1:
            sinks = sinks.view(*rows.shape[1:3])
        elif sinks is not None:
            sinks = sinks[:, None].expand(-1, tokens)
        mixed = _written_out(rows, keys, values, mask, score_cap, sinks)
    if tokens > 1:
        mixed = mixed.transpose(1, 2)
    return mixed.reshape(batch, tokens, heads * size)


def _of_all_heads(
    keys: torch.Tensor, values: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values [batch, kv heads, m, head size] repeated for the query heads that
    share them, on a GPU.

    Of the kernels for GPUs, only the plain one takes a mask and grouped heads (torch 2.13, most
    GPUs): it also copies keys and values, and has all scores in memory, in float32.
    """
    if group == 1 or not keys.is_cuda:
        return keys, values
    return keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)


def _written_out(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    score_cap: float | None,
    sinks: torch.Tensor | None,
    block: int | None = None,
) -> torch.Tensor:
    """Returns attention with capped scores or with sinks, [..., heads, rows].

    With `block`, the values are added up in float32, this many keys at a time.
    """
    scores = rows @ keys.transpose(-1, -2)
    if score_cap is not None:
        scores = torch.tanh(scores / score_cap) * score_cap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks[..., None].expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))[
        ..., : keys.shape[-2]
    ]
    if block is None:
        return weights.to(values.dtype) @ values
    parts = zip(torch.split(weights, block, -1), torch.split(values, block, -2), strict=True)
    return torch.stack([weight @ value.float() for weight, value in parts]).sum(0).to(values.dtype)
