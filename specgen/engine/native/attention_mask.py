"""Which keys the tokens of a pass see: attention masks of chains and of draft trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgen.engine.devices import upload
from specgen.engine.forward_pass import ForwardPass
from specgen.engine.kernels.operators import SeenSlots

_NO_SLOTS = torch.zeros(1, dtype=torch.int32)


class AttentionMask(NamedTuple):
    """Which keys the n tokens of a pass may attend to, before sliding windows are applied.

    `excluded` [..., n, m] is true where a token does not see a key. `positions` [..., n] are the
    tokens' positions, `key_positions` [..., m] those of the keys' tokens. Sliding windows are
    measured in positions, which in a draft tree differ from cache indices.
    """

    excluded: torch.Tensor
    positions: torch.Tensor
    key_positions: torch.Tensor

    def both_ways(self, window: int) -> AttentionMask:
        """Returns the mask with which tokens also see later keys, up to `window` - 1 positions
        after their own. How far back they see is left to `additive`."""
        distance = self.key_positions[..., None, :] - self.positions[..., :, None]
        return self._replace(excluded=distance >= window)

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


class ChainSlots:
    """The slots that the tokens of chains see: those up to their own, or without `causal` up to the
    pass's last token's, in a sliding `window` those that are less than so many before them, or
    without `causal` also behind them (None: no window).

    They are kept for all positions so far: making them anew takes seven times as long.
    """

    def __init__(self, window: int | None, *, causal: bool = True) -> None:
        self._window = window
        self._is_causal = causal
        self._ranges = self._made(0)

    def rows(self, first: int, last: int) -> SeenSlots:
        """Returns the slots that the tokens with the cache indices `first` to `last` - 1 see."""
        if last > self._ranges.shape[0]:
            self._ranges = self._made(max(last, 2 * self._ranges.shape[0], 256))
        ranges = self._ranges[first:last]
        if not self._is_causal:
            ranges = ranges.clone()
            if self._window is None:
                ranges[:, 1] = last
            else:
                ranges[:, 1].add_(self._window - 1).clamp_(max=last)
        return SeenSlots(ranges, _NO_SLOTS)

    def _made(self, length: int) -> torch.Tensor:
        """Returns the ranges [`length`, 4] of the tokens of a causal chain."""
        # tensors made in inference mode could not be used outside it
        with torch.inference_mode(False):
            ranges = torch.zeros(length, 4, dtype=torch.int32)
            ranges[:, 1] = torch.arange(1, length + 1)
            if self._window is not None:
                ranges[:, 0] = (ranges[:, 1] - self._window).clamp_(min=0)
        return ranges


def tree_slots(tree: Ancestry, window: int | None) -> SeenSlots:
    """Returns the slots that the tokens of a pass over a draft tree see. A sliding `window` is as
    for `AttentionMask.additive`."""
    ranges: list[list[int]] = []
    others: list[int] = []
    first_depth = len(tree.depths) - len(tree.bits)
    for index, bits in enumerate(tree.bits):
        earliest = 0
        if window is not None:
            earliest = max(0, tree.base + tree.depths[first_depth + index] + 1 - window)
        begin = len(others)
        seen_bits = bits
        while seen_bits:
            lowest = (seen_bits & -seen_bits).bit_length() - 1
            seen_bits &= seen_bits - 1
            if tree.base + tree.depths[lowest] >= earliest:
                others.append(tree.base + lowest)
        ranges.append([min(earliest, tree.base), tree.base, begin, len(others)])
    return SeenSlots(
        torch.tensor(ranges, dtype=torch.int32), torch.tensor([*others, 0], dtype=torch.int32)
    )


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
