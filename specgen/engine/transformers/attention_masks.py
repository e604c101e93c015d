"""Makes the attention masks of forward passes over committed tokens (prompt and accepted output) and a draft tree after them.

Masks are additive: 0 where a token is seen, the dtype's minimum where it is not. Boolean masks would be silently wrong, because
transformers' eager attention adds any mask to the scores.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from specgen.engine.batch_pass import BatchPass

LayerMasks = torch.Tensor | dict[str, torch.Tensor]
Mask = LayerMasks | None

_MAX_BUFFERED = 64  # tokens per forward pass


class ChainMasks:
    """Makes causal masks for a few new tokens after many cached ones, at a cost that does not grow with the cached ones.

    All masks are views of one buffer of zeros. Only the square between the new tokens, where a token must not see later ones, is
    rewritten. A mask is valid until the next call.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, 0)
        self._corner: torch.Tensor | None = None  # the part of the buffer that the last mask set
        self._triangle = lru_cache(maxsize=128)(_triangle)  # one per instance: two models may run on different CUDA streams

    def __call__(self, past: int, new: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns the mask [1, 1, new, past + new] of `new` tokens after `past` cached ones.

        Each new token sees all cached tokens, itself and the new tokens before it.
        """
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
    """Returns the mask [1, 1, new, past + new] of a forward pass over the `new` tokens from KV cache index `past` on.

    Cache indices below `committed` hold committed tokens; each sees itself and the tokens before it. From index `committed` on
    come the nodes of a draft tree; each sees all committed tokens, its ancestors and itself. `parents` are the parent indices
    of all nodes of the tree (-1: the context).
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
    """Makes the attention masks of one model, in the form that the model's `forward` takes.

    Most models in transformers take one mask tensor. Models whose layers have different attention types (full, sliding window)
    take a dictionary with one mask per type. Models with ALiBi make their mask themselves: they get None, and cannot run trees.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._has_alibi = bool(getattr(config, "alibi", False)) or config.model_type in ("bloom", "mpt")
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        types = set(getattr(config, "layer_types", None) or ()) if _takes_mapping(model) else set()
        self._windows = {name: window if name == "sliding_attention" else None for name in types} or {None: window}
        self._chain_mask = ChainMasks()

    def __call__(self, past: int, positions: torch.Tensor, tree: tuple[int, Sequence[int]] | None, dtype: torch.dtype) -> Mask:
        """Returns the mask of a forward pass over the tokens from KV cache index `past` on.

        `positions` [n] are the positions of all n tokens, the `past` cached ones included. `tree` is the number of committed
        tokens and the parent indices of the tree nodes after them; None if the tokens are a chain.
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

    def batched(self, batch: BatchPass, dtype: torch.dtype) -> LayerMasks:
        """Returns the mask [batch, 1, n, keys] of several sequences at once; a dictionary for several attention types."""

        def within(window: int | None) -> torch.Tensor:
            seen = batch.within(window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]

        return self._for_each_type(within)

    def _for_each_type(self, mask_within: Callable[[int | None], torch.Tensor]) -> LayerMasks:
        """Returns `mask_within(window)` for each attention type of the model, in a dictionary; for a single type the mask alone.

        `window` is the type's sliding window in tokens; None means no window.
        """
        masks = {name: mask_within(window) for name, window in self._windows.items()}
        return masks.pop(None) if None in masks else masks


def _takes_mapping(model: Any) -> bool:
    """Whether the model takes a dictionary with one mask per attention type. Found in its source code: no attribute says so."""
    module = sys.modules[type(model).__module__]
    try:
        return "causal_mask_mapping" in inspect.getsource(module)
    except (OSError, TypeError):
        return False
