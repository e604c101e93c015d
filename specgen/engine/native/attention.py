"""Attention of a few query rows over cached keys and values, and its masks.

Query heads that share keys and values (grouped heads) are computed as additional query rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from specgen.engine.devices import upload
from specgen.engine.forward_pass import ForwardPass

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
    limits the scores to c tanh(score / c) before the mask (Gemma 2). `fused` always takes torch's
    fused attention, also where separate products are faster, and adds up capped scores in blocks of
    keys: then the result of a row does not depend on how many blocks of keys follow those that it
    sees.
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
    size], `mask` is [batch, 1, n, m]. `score_cap` is as for `attend`.
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
        mixed = scaled_dot_product_attention(
            rows, keys, values, mask, scale=1.0, enable_gqa=keys.shape[1] < rows.shape[1]
        )
    else:
        keys, values = (
            part if group == 1 else part.repeat_interleave(group, dim=1) for part in (keys, values)
        )
        sinks = (
            sinks
            if sinks is None
            else sinks.view(*rows.shape[1:3])
            if tokens == 1
            else sinks[:, None].expand(-1, tokens)
        )
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


class AttentionMask(NamedTuple):
    """Which keys the n tokens of a pass may attend to, before sliding windows are applied.

    `excluded` [..., n, m] is true where a token does not see a key. `positions` [..., n] are the
    tokens' positions, `key_positions` [..., m] those of the keys' tokens. Sliding windows are
    measured in positions, which in a draft tree differ from cache indices.
    """

    excluded: torch.Tensor
    positions: torch.Tensor
    key_positions: torch.Tensor

    def additive(self, window: int | None, dtype: torch.dtype, group: int = 1) -> torch.Tensor:
        """Returns the additive mask [..., n * group, m]: 0 where a query sees a key, the dtype's
        lowest finite number elsewhere.

        With a sliding `window`, a query does not see keys that are `window` positions or more
        before it (None: no window). Each row is repeated for the `group` query heads that share
        keys.
        """
        excluded = self.excluded
        if window is not None:
            excluded = excluded | (
                self.positions[..., :, None] - self.key_positions[..., None, :] >= window
            )
        mask = torch.zeros(excluded.shape, dtype=dtype, device=excluded.device).masked_fill_(
            excluded, torch.finfo(dtype).min
        )
        return (
            mask if group == 1 else mask[:, None].expand(-1, group, -1).reshape(-1, mask.shape[1])
        )


def chain_mask(first: int, rows: int, start: int, end: int, device: torch.device) -> AttentionMask:
    """Returns which of the keys `start` to `end` - 1 are seen by `rows` tokens from cache index
    `first` on, as a chain.

    Each token sees the keys up to its own. Positions are cache indices.
    """
    excluded = torch.ones(rows, end - start, dtype=torch.bool, device=device).triu_(
        first - start + 1
    )
    return AttentionMask(
        excluded,
        torch.arange(first, first + rows, device=device),
        torch.arange(start, end, device=device),
    )


class Ancestry(NamedTuple):
    """Which tokens the tokens of a forward pass see, in a compact form. Tokens are numbered by
    their cache indices.

    Each token of the pass sees all tokens before `base`. Bit j of `bits[i]` is 1 if the i-th token
    of the pass sees token `base` + j, which is one of its ancestors or itself. `depths` has, for
    each token from `base` to the pass's last one, its position minus `base`.
    """

    base: int
    depths: Sequence[int]
    bits: Sequence[int]


def ancestry(forward_pass: ForwardPass) -> Ancestry:
    context, draft, first, last = forward_pass[:4]
    base = first if forward_pass.is_chain else min(first, len(context))
    chain = last - base if forward_pass.is_chain else min(last, len(context)) - base
    depths = list(range(chain))
    committed = (1 << chain) - 1
    bits = [(2 << index) - 1 for index in range(chain)]
    for parent in draft.parents[: last - base - chain]:
        own = 1 << len(bits)
        depths.append(chain if parent < 0 else depths[chain + parent] + 1)
        bits.append((committed if parent < 0 else bits[chain + parent]) | own)
    return Ancestry(base, depths, bits[first - base :])


def pass_mask(forward_pass: ForwardPass, device: torch.device) -> AttentionMask:
    """Returns which keys the tokens of a forward pass see, of all keys up to that of the pass's
    last token.

    Only a few small tensors are copied to a GPU.
    """
    if forward_pass.is_chain:
        first = forward_pass.first
        last = forward_pass.last
        return chain_mask(first, last - first, 0, last, device)
    base, depths, bits = ancestry(forward_pass)
    rows = len(bits)
    size = len(depths)
    from_base = upload(torch.tensor(depths), device) + base
    excluded = torch.zeros(rows, base + size, dtype=torch.bool, device=device)
    excluded[:, base:] = ~unpacked(bits, size, device)
    return AttentionMask(
        excluded,
        from_base[size - rows :],
        torch.cat((torch.arange(base, device=device), from_base)),
    )


def unpacked(bits: Sequence[int], size: int, device: torch.device) -> torch.Tensor:
    """Returns the first `size` bits of each number, [n, `size`]: true where they are 1. See
    `Ancestry.bits`."""
    rows = len(bits)
    length = -(-size // 8)
    packed = bytearray(b"".join(row.to_bytes(length, "little") for row in bits))
    as_bytes = upload(torch.frombuffer(packed, dtype=torch.uint8), device).view(rows, length, 1)
    ones = (as_bytes >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    return (ones == 1).view(rows, length * 8)[:, :size]
