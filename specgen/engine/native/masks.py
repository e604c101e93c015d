"""Additive attention masks of the native decoder: 0 where a query sees a key, the dtype's lowest finite number elsewhere.

The query heads that share a key-value head (grouped-query attention) are run as additional query rows, so the mask's rows are
repeated: row i * `group` + g belongs to token i and to the g-th query head of its group.
"""

from __future__ import annotations

from functools import cache

import torch

from specgen.engine.devices import release, upload
from specgen.engine.native.ancestry import Ancestry
from specgen.engine.native.attention import WIDE

_ALIGNMENT = 16  # numbers
_ROWS = 16  # the band's rows grow in steps of this many tokens


class ChainMasks:
    """Masks for a few new tokens of a chain after cached ones, as views of one precomputed band: a mask costs no computation.

    The band has a row for each new token i and a column for each distance c between a key's index and the first new token's; a
    token sees the distances from i - `window` + 1 (all, without a window) to i.
    """

    def __init__(self, group: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._window = group, window
        self._dtype, self._device = dtype, device
        self._origin = 0  # the column of distance 0
        self._band = torch.empty(0, 0, dtype=dtype, device=device)

    def __call__(self, first: int, rows: int, start: int, end: int) -> torch.Tensor:
        """Returns the mask [`rows` * group, `end` - `start`] of the tokens `first`, ..., `first` + `rows` - 1.

        The keys are the cache's entries `start` to `end` - 1.
        """
        left, right = first - start, end - first
        if left > self._origin or right > self._band.shape[1] - self._origin or rows * self._group > self._band.shape[0]:
            self._grow(left, right, rows)
        return self._band[: rows * self._group, self._origin - left : self._origin + right]

    def _grow(self, left: int, right: int, rows: int) -> None:
        left = max(2 * left, self._origin, 64)
        right = max(right, self._band.shape[1] - self._origin, 64)
        rows = max(-(-rows // _ROWS) * _ROWS, self._band.shape[0] // self._group)
        distances = torch.arange(-left, right, device=self._device)
        tokens = torch.arange(rows, device=self._device)[:, None]
        hidden = distances > tokens
        if self._window is not None:
            hidden |= distances <= tokens - self._window
        band = additive(~hidden, self._dtype).repeat_interleave(self._group, dim=0)
        release(self._band)
        self._band, self._origin = band, left  # on one line, because KeyboardInterrupt may come between two


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the additive mask of a boolean one that is true where a query sees a key."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def visible_to_chain(first: int, rows: int, start: int, end: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Returns which keys, from `start` to `end` - 1, each of the `rows` tokens from index `first` on sees: [rows, keys]."""
    tokens = torch.arange(first, first + rows, device=device)[:, None]
    keys = torch.arange(start, end, device=device)
    visible = keys <= tokens  # compared at once: a matrix of distances would take eight times the memory
    return visible if window is None else visible.logical_and_(keys > tokens - window)


class TreeMasks:
    """Masks for a forward pass over nodes of a draft tree, and committed tokens before them, with few small copies to a GPU.

    `positions` [n] are those of the pass's tokens. A sliding window counts positions, not cache indices.
    """

    def __init__(self, ancestry: Ancestry, group: int, dtype: torch.dtype, device: torch.device) -> None:
        base, depths, bits = ancestry
        rows, size = len(bits), len(depths)
        self._group, self._dtype, self._base, self._rows = group if rows < WIDE else 1, dtype, base, rows
        self._from_base = upload(torch.tensor([base + depth for depth in depths]), device)
        self.positions = self._from_base[size - rows :]
        length = -(-size // 8)
        packed = bytearray(b"".join(row.to_bytes(length, "little") for row in bits))
        as_bytes = upload(torch.frombuffer(packed, dtype=torch.uint8), device).view(rows, length, 1)
        self._hidden = ((as_bytes & _powers(device)) == 0).view(rows, 1, length * 8)[:, :, :size]

    def __call__(self, window: int | None) -> torch.Tensor:
        """Returns the mask [n * group, keys] of the layers with this window, for n from `WIDE` on [n, keys]."""
        lowest, device = torch.finfo(self._dtype).min, self._from_base.device
        keys = self._base + self._from_base.shape[0]
        mask = torch.zeros(self._rows, self._group, keys, dtype=self._dtype, device=device)
        mask[:, :, self._base :].masked_fill_(self._hidden, lowest)
        if window is not None:
            of_keys = torch.cat((torch.arange(self._base, device=device), self._from_base))
            mask.masked_fill_(self.positions[:, None, None] - of_keys >= window, lowest)
        return mask.view(-1, keys)


@cache
def _powers(device: torch.device) -> torch.Tensor:
    """Returns the values of the bits of a byte, [8]."""
    with torch.inference_mode(False):
        return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


def aligned(mask: torch.Tensor) -> torch.Tensor:
    """Returns a mask [rows, keys] whose rows begin at addresses that a GPU's attention kernels accept; on a CPU the mask itself.

    Torch looks at a mask's strides, not at where a view of a larger one begins.
    """
    if mask.is_cpu:
        return mask
    keys = mask.shape[1]
    copy = mask.new_empty(mask.shape[0], -(-keys // _ALIGNMENT) * _ALIGNMENT)[:, :keys]
    return copy.copy_(mask)
