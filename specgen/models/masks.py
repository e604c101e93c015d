"""Masks and positions of a pass over committed tokens and a draft tree behind them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch


def depths(parents: Sequence[int]) -> list[int]:
    """Each node's distance from the context's end, 0 for the first level."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def chain_mask(past: int, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive mask [1, 1, rows, past + rows]: every row sees the past, and the rows up to its own.

    Additive, because eager attention adds a mask, a boolean one too, and would be silently wrong.
    """
    mask = torch.zeros(1, 1, rows, past + rows, dtype=dtype, device=device)
    mask[..., past:] = _triangle(rows, dtype, device)
    return mask


@lru_cache(maxsize=128)
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
        self._zeros: torch.Tensor | None = None

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
        if slots - past == 1 and tree is None:
            mask = self._all_visible(slots, dtype, device)
        elif tree is None:
            mask = chain_mask(past, slots - past, dtype, device)
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

    def _all_visible(self, slots: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The mask of a single row, which sees everything: a view of zeros that are made once."""
        if self._zeros is None or self._zeros.shape[-1] < slots:
            self._zeros = torch.zeros(1, 1, 1, 2 * slots, dtype=dtype, device=device)
        return self._zeros[..., :slots]


def _takes_mapping(model: Any) -> bool:
    """Whether the decoder's code looks masks up by the kind of layer: a fact of its source that no attribute tells."""
    module = sys.modules[type(model).__module__]
    try:
        return "causal_mask_mapping" in inspect.getsource(module)
    except (OSError, TypeError):
        return False
