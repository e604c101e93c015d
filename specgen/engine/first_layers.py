"""A target's first layers alone: all of it that training an exit layer needs in memory (EESD, section 5.6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specgen.engine.attention_masks import Masks
from specgen.engine.decoder_layers import check_exit_depth, decoder_of


class FirstLayers:
    """Embedding and the first `depth` layers of a model, frozen. `masks` makes their masks, and an exit layer's."""

    def __init__(self, model: Any, depth: int) -> None:
        """Remove the other layers, norm and LM head from `model`, so that their memory is freed."""
        decoder = decoder_of(model)
        check_exit_depth(model, depth)
        self.masks = Masks(model)
        decoder.layers = decoder.layers[:depth]
        decoder.norm = nn.Identity()
        model.lm_head = nn.Identity()
        self._decoder = decoder.requires_grad_(False).eval()
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._decoder.parameters())

    @torch.no_grad()
    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The hidden states [batch, n, width] after layer N, and the rotary embeddings (cos, sin) of `positions` [batch, n]."""
        output = self._decoder(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        hidden_states: torch.Tensor = output.last_hidden_state
        return hidden_states, self._decoder.rotary_emb(hidden_states, positions)
