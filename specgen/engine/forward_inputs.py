"""Where a pass's tokens stand, and what each of them may see."""

from __future__ import annotations

from typing import Any

import torch

from specgen.engine.attention_masks import Masks, depths
from specgen.engine.cached_prefix import ForwardRange
from specgen.errors import SpecgenError

Mask = torch.Tensor | dict[str, torch.Tensor] | None


class ForwardInputs:
    """Positions and masks of one model's passes. A mask lasts until the next."""

    def __init__(self, model: Any) -> None:
        self._dtype: torch.dtype = model.dtype
        self._masks = Masks(model)
        self._positions = torch.arange(64, device=model.device)

    def __call__(self, span: ForwardRange, capacity: int) -> tuple[torch.Tensor, Mask]:
        """The positions [n] of the span's tokens, and their mask over all slots up to the last.

        A slot's position is its own number, but for a tree's nodes the context's length plus their depth.
        """
        if span.last > self._positions.shape[0]:
            self._positions = torch.arange(max(span.last, capacity), device=self._positions.device)
        positions, tree = self._positions[: span.last], None
        if not isinstance(span.draft.parents, range):
            committed = len(span.context)
            tree = committed, span.draft.parents
            nodes = torch.tensor(depths(span.draft.parents), device=positions.device) + committed
            positions = torch.cat((positions[:committed], nodes))
        mask = self._masks(span.first, positions, tree, self._dtype)
        if mask is None and tree is not None:
            raise SpecgenError(
                "this model's attention has ALiBi biases, which know no trees", "Take a method without draft trees"
            )
        return positions[span.first :], mask
