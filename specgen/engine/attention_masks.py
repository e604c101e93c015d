"""Masks and positions of a pass over committed tokens and a draft tree behind them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

_FEW_ROWS = 64


def depths(parents: Sequence[int]) -> list[int]:
    """Each node's distance from the context's end, 0 for the first level."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


class ChainMasks:
    """Additive masks for a few rows behind a long past: every row sees the past, and the rows up to its own.

    Additive, because eager attention adds a mask, a boolean one too, and would be silently wrong. The past's zeros are made once,
    and only the corner is written anew, so that a round costs nothing that grows with the context. A mask lasts until the next.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, 0)
        self._corner: torch.Tensor | None = None  # where the last mask was not zero
        self._triangle = lru_cache(maxsize=128)(_triangle)  # not shared: two models may run on streams of their own

    def __call__(self, past: int, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The mask [1, 1, rows, past + rows]."""
        if rows > _FEW_ROWS:
            mask = torch.zeros(rows, past + rows, dtype=dtype, device=device)
            mask[:, past:] = self._triangle(rows, dtype, device)
            return mask[None, None]
        if past + rows > self._buffer.shape[1]:
            width = -(-2 * (past + rows) // 64) * 64  # even strides, which attention kernels ask for
            self._buffer = torch.zeros(_FEW_ROWS, width, dtype=dtype, device=device)
        elif self._corner is not None:
            self._corner.zero_()
        self._corner = None
        if rows > 1:
            self._corner = self._buffer[:rows, past : past + rows]
            self._corner.copy_(self._triangle(rows, dtype, device))
        return self._buffer[None, None, :rows, : past + rows]


def _triangle(rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((rows, rows), torch.finfo(dtype).min, dtype=dtype, device=device).triu(1)


def tree_mask(
    committed: int, parents: Sequence[int], past: int, rows: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Additive mask [1, 1, rows, past + rows] for slots past, past + 1, ...: a node sees the committed tokens and its ancestors.

    `committed` tokens stand in the first slots, the tree's nodes behind them in order; a row may be either.
    """
    width = past + rows
    visible = torch.zeros(rows, width, dtype=torch.bool)
    for row in range(rows):
        node = past + row - committed
        if node < 0:
            visible[row, : past + row + 1] = True
            continue
        visible[row, :committed] = True
        while node >= 0:
            visible[row, committed + node] = True
            node = parents[node]
    mask = torch.full((rows, width), torch.finfo(dtype).min, dtype=dtype)
    return mask.masked_fill_(visible, 0.0)[None, None].to(device)


class Masks:
    """Makes the attention masks of one model, in the form that its code takes.

    Transformers' decoders take one mask, or, where layers differ (`config.layer_types`), a dictionary with one a kind of layer.
    Models with ALiBi add their bias to a mask of their own making: they get None, and chains only.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self.alibi = bool(getattr(config, "alibi", False)) or config.model_type in ("bloom", "mpt")
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        kinds = set(getattr(config, "layer_types", None) or ()) if _takes_mapping(model) else set()
        self._windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
        self._window = None if kinds else window
        self._chain_mask = ChainMasks()

    def __call__(
        self,
        past: int,
        positions: torch.Tensor,
        tree: tuple[int, Sequence[int]] | None,
        dtype: torch.dtype,
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """The mask of a pass over the slots behind `past`, the last of `positions` [past + rows].

        `tree` is the number of committed tokens and the parents of the nodes behind them, None where all is one chain.
        """
        if self.alibi:
            return None
        slots, device = positions.shape[0], positions.device
        if tree is None:
            mask = self._chain_mask(past, slots - past, dtype, device)
        else:
            mask = tree_mask(*tree, past, slots - past, dtype, device)

        def within(window: int | None) -> torch.Tensor:
            if window is None or slots <= window:
                return mask
            too_far = positions[past:, None] - positions[None, :] >= window
            return mask.masked_fill(too_far, torch.finfo(dtype).min)

        if self._windows:
            return {kind: within(window) for kind, window in self._windows.items()}
        return within(self._window)

    def batched(
        self, visible: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask of several sequences at once: `visible` [batch, rows, slots] says who may see whom, windows aside; `rows`
        [batch, rows] and `slots` [batch, slots] are their positions."""

        def within(window: int | None) -> torch.Tensor:
            seen = visible if window is None else visible & (rows[:, :, None] - slots[:, None, :] < window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=visible.device)
            return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

        if self._windows:
            return {kind: within(window) for kind, window in self._windows.items()}
        return within(self._window)


def _takes_mapping(model: Any) -> bool:
    """Whether the decoder's code looks masks up by the kind of layer: a fact of its source that no attribute tells."""
    module = sys.modules[type(model).__module__]
    try:
        return "causal_mask_mapping" in inspect.getsource(module)
    except (OSError, TypeError):
        return False
