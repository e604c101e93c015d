"""Additive attention masks of the native decoder: 0 where a query sees a key, the dtype's lowest finite number elsewhere.

The query heads that share a key-value head (grouped-query attention) are run as additional query rows, so the mask's rows are
repeated: row i * `group` + g belongs to token i and to the g-th query head of its group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
        self._band, self._origin = band, left  # on one line, because KeyboardInterrupt may come between two


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the additive mask of a boolean one that is true where a query sees a key."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def visible_to_chain(first: int, rows: int, start: int, end: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Returns which keys, from `start` to `end` - 1, each of the `rows` tokens from index `first` on sees: [rows, keys]."""
    distances = torch.arange(first, first + rows, device=device)[:, None] - torch.arange(start, end, device=device)
    visible = distances >= 0
    return visible if window is None else visible & (distances < window)


def visible_to_tree(
    committed: int, parents: Sequence[int], positions: Sequence[int], first: int, end: int, window: int | None
) -> torch.Tensor:
    """Returns which of the keys 0 to `end` - 1 the tokens from cache index `first` on see: [n, `end`], boolean, on the CPU.

    Indices below `committed` hold committed tokens, then come the nodes of a draft tree with these `parents`; a node sees the
    committed tokens, its ancestors and itself. `positions` are those of the n tokens. A sliding window counts positions, not
    indices.
    """
    rows = len(positions)
    visible = torch.zeros(rows, end, dtype=torch.bool)
    for row in range(rows):
        node = first + row - committed
        visible[row, : min(first + row + 1, committed)] = True
        while node >= 0:
            visible[row, committed + node] = True
            node = parents[node]
    if window is not None:
        of_keys = torch.arange(end)
        depth_of: list[int] = []
        for parent in parents:
            depth_of.append(0 if parent < 0 else depth_of[parent] + 1)
        of_keys[committed : committed + len(depth_of)] = torch.tensor(depth_of) + committed
        visible &= torch.tensor(positions)[:, None] - of_keys < window
    return visible
