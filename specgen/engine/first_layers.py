"""A target's first layers alone: all that training an exit layer holds of it (EESD, section 5.6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specgen.engine.attention_masks import Masks
from specgen.engine.exit_layer import decoder_of
from specgen.errors import SpecgenError


class FirstLayers:
    """Embedding and layers 1..N of a model, frozen. `masks` make masks for these and for an exit layer behind them."""

    def __init__(self, model: Any, count: int) -> None:
        """Takes the model apart: its other layers, norm and head are given up, so that nothing holds their memory."""
        decoder = decoder_of(model)
        check_depth(model, count)
        self.masks = Masks(model)
        decoder.layers = nn.ModuleList(list(decoder.layers)[:count])
        decoder.norm = nn.Identity()
        model.lm_head = nn.Identity()
        self._decoder = decoder.requires_grad_(False).eval()
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device

    def cut(self, count: int) -> FirstLayers:
        """The same with fewer layers."""
        self._decoder.layers = self._decoder.layers[:count]
        return self

    @property
    def parameters_held(self) -> int:
        return sum(parameter.numel() for parameter in self._decoder.parameters())

    @torch.no_grad()
    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Hidden rows [batch, n, width] at layer N, and the rotary embeddings (cos, sin) of `positions` [batch, n]."""
        output = self._decoder(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden, self._decoder.rotary_emb(hidden, positions)


def check_depth(model: Any, after: int) -> None:
    """Refuse an exit that would leave nothing of the model behind it."""
    layers = len(decoder_of(model).layers)
    if not 1 <= after < layers:
        raise SpecgenError(f"the exit stands after layer {after}", f"The target has {layers}: take 1 to {layers - 1}")


def usual_depth(layers: int) -> int:
    """N where nobody says: 7 % of the layers, as the paper's 5 of 80 and 3 of 40, and at least 1."""
    return max(1, round(0.07 * layers))
