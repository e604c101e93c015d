"""The positions and the attention mask of a forward pass."""

from __future__ import annotations

from typing import Any

import torch

from specgen.engine.attention_masks import Mask, Masks, depths
from specgen.engine.cached_prefix import ForwardRange
from specgen.engine.kv_cache import KVCache
from specgen.errors import SpecgenError


class ForwardInputs:
    """Makes the positions and masks of one model's forward passes. A mask is valid until the next one is made."""

    def __init__(self, model: Any) -> None:
        self._dtype: torch.dtype = model.dtype
        self._masks = Masks(model)
        self._positions = torch.arange(64, device=model.device)

    def prepare(self, forward_range: ForwardRange, cache: KVCache) -> tuple[torch.Tensor, Mask]:
        """Set the cache's length to the range's start; return the positions [n] of its tokens and their attention mask.

        A token's position is its cache index, but a tree node's is the context's length plus its depth. Raises SpecgenError for a
        tree on a model with ALiBi.
        """
        _, draft, first, last = forward_range
        if last > self._positions.shape[0]:
            self._positions = torch.arange(max(last, cache.capacity), device=self._positions.device)
        positions, tree = self._positions[:last], None
        if not isinstance(draft.parents, range):
            committed = len(forward_range.context)
            tree = committed, draft.parents
            nodes = torch.tensor(depths(draft.parents), device=positions.device) + committed
            positions = torch.cat((positions[:committed], nodes))
        mask = self._masks(first, positions, tree, self._dtype)
        if mask is None and tree is not None:
            raise SpecgenError("this model's attention uses ALiBi, which cannot run trees", "Take a method without draft trees")
        cache.length = first
        return positions[first:], mask
