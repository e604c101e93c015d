"""Attention masks of forward passes over committed tokens and a draft tree after them.

Masks are additive: eager attention adds a mask, a boolean one too, which would be silently wrong.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

LayerMasks = torch.Tensor | dict[str, torch.Tensor]
Mask = LayerMasks | None

_MAX_BUFFERED = 64  # tokens per forward pass


def depths(parents: Sequence[int]) -> list[int]:
    """Each tree node's depth, 0 for the children of the context."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


class ChainMasks:
    """Causal masks for a few tokens after a long past, made at a cost that does not grow with the past.

    All masks are views of one buffer of zeros, in which only the corner of the new tokens is rewritten. A mask is valid until the
    next call.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, 0)
        self._corner: torch.Tensor | None = None  # the part of the buffer that the last mask set
        self._triangle = lru_cache(maxsize=128)(_triangle)  # one per instance: two models may run on different CUDA streams

    def __call__(self, past: int, new: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The mask [1, 1, new, past + new]: each of the `new` tokens sees the past, itself and the new ones before it."""
        if new > _MAX_BUFFERED:
            mask = torch.zeros(new, past + new, dtype=dtype, device=device)
            mask[:, past:] = self._triangle(new, dtype, device)
            return mask[None, None]
        if past + new > self._buffer.shape[1]:
            width = -(-2 * (past + new) // 64) * 64  # attention kernels need aligned strides
            self._buffer = torch.zeros(_MAX_BUFFERED, width, dtype=dtype, device=device)
        elif self._corner is not None:
            self._corner.zero_()
        self._corner = None
        if new > 1:
            self._corner = self._buffer[:new, past : past + new]
            self._corner.copy_(self._triangle(new, dtype, device))
        return self._buffer[None, None, :new, : past + new]


def _triangle(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((size, size), torch.finfo(dtype).min, dtype=dtype, device=device).triu(1)


def tree_mask(
    committed: int, parents: Sequence[int], past: int, new: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The mask [1, 1, new, past + new] of the tokens with the cache indices `past`, `past + 1`, ...

    The first `committed` indices hold committed tokens, which see those before them. The others hold the tree's nodes, which see
    the committed tokens and their ancestors.
    """
    width = past + new
    visible = torch.zeros(new, width, dtype=torch.bool)
    for row in range(new):
        node = past + row - committed
        if node < 0:
            visible[row, : past + row + 1] = True
            continue
        visible[row, :committed] = True
        while node >= 0:
            visible[row, committed + node] = True
            node = parents[node]
    mask = torch.full((new, width), torch.finfo(dtype).min, dtype=dtype)
    return mask.masked_fill_(visible, 0.0)[None, None].to(device)


class AttentionMasks:
    """Makes one model's attention masks, in the form that its code takes.

    Transformers' decoders take one mask, or, if their layers' attention types differ, a dictionary of one mask per type. Models
    with ALiBi add their bias to a mask that they make themselves: they get None, and cannot run trees.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._has_alibi = bool(getattr(config, "alibi", False)) or config.model_type in ("bloom", "mpt")
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        types = set(getattr(config, "layer_types", None) or ()) if _takes_mapping(model) else set()
        self._windows = {name: window if name == "sliding_attention" else None for name in types} or {None: window}
        self._chain_mask = ChainMasks()

    def __call__(self, past: int, positions: torch.Tensor, tree: tuple[int, Sequence[int]] | None, dtype: torch.dtype) -> Mask:
        """The mask of a forward pass over the tokens from cache index `past` on; `positions` [n] are those of all n tokens.

        `tree` is the number of committed tokens and the parents of the nodes after them; None for a chain.
        """
        if self._has_alibi:
            return None
        length, device = positions.shape[0], positions.device
        if tree is None:
            mask = self._chain_mask(past, length - past, dtype, device)
        else:
            mask = tree_mask(*tree, past, length - past, dtype, device)

        def within(window: int | None) -> torch.Tensor:
            if window is None or length <= window:
                return mask
            too_far = positions[past:, None] - positions[None, :] >= window
            return mask.masked_fill(too_far, torch.finfo(dtype).min)

        return self._for_each_type(within)

    def batched(self, visible: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> LayerMasks:
        """The mask of several sequences at once, from `visible` [batch, queries, keys]: which keys a query sees but for windows.

        `queries` [batch, queries] and `keys` [batch, keys] are their positions.
        """

        def within(window: int | None) -> torch.Tensor:
            seen = visible if window is None else visible & (queries[:, :, None] - keys[:, None, :] < window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=visible.device)
            return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

        return self._for_each_type(within)

    def _for_each_type(self, mask_within: Callable[[int | None], torch.Tensor]) -> LayerMasks:
        """Call `mask_within` with the sliding window (None: no window) of each attention type."""
        masks = {name: mask_within(window) for name, window in self._windows.items()}
        return masks.pop(None) if None in masks else masks


def _takes_mapping(model: Any) -> bool:
    """Whether the decoder takes one mask per attention type. No attribute says so, but its source code does."""
    module = sys.modules[type(model).__module__]
    try:
        return "causal_mask_mapping" in inspect.getsource(module)
    except (OSError, TypeError):
        return False
