"""EESD's exit layer (section 3.1), Cali-TS's predictor (section 3.3, Eq. 5), and the target's first layers, to train both."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from specgen.engine.attention_masks import AttentionMasks, LayerMasks
from specgen.engine.decoder_layers import DecoderLayers, check_exit_depth, check_llama_structure, decoder_of
from specgen.errors import SpecgenError

MAX_LAYERS = 2  # the paper's Figure 5: more than one gains little


class ExitLayer(DecoderLayers):
    """Layers of the target's class, a norm and an LM head, which compute draft logits from hidden states after layer N.

    Its layers use the indices 0, 1, ... of a KV cache of their own. With no layers it is a norm and a head: the paper's ablation.
    """

    @classmethod
    def of(cls, model: Any, layers: int = 1) -> ExitLayer:
        """An untrained exit layer for the target `model`: copies of its last `layers` layers, its norm and its LM head.

        Raises SpecgenError for more than `MAX_LAYERS` layers and for a model without Llama's structure.
        """
        if not 0 <= layers <= MAX_LAYERS:
            raise SpecgenError(f"the exit has {layers} layers", f"It can have 0 (a head alone) to {MAX_LAYERS}")
        check_llama_structure(model)
        made = copy.deepcopy(cls.upper(model, len(decoder_of(model).layers) - layers))
        for index, layer in enumerate(made.layers):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = index  # type: ignore[assignment]
        return made.requires_grad_(False).eval()


class Predictor(nn.Module):
    """Predicts the probability that a drafted token is accepted: theta_M = sigmoid(w . [W_i h_T, h_D]) at position i = 1, 2, ...

    h_T is the target's hidden state (after its norm) that predicted the last committed token, h_D the exit layer's that predicted
    the drafted token. Only the product of W_i and w's first half matters, so one vector per position is trained and stored.
    Positions from the tenth on share their parameters.
    """

    POSITIONS = 10

    def __init__(self, width: int) -> None:
        super().__init__()
        self.target_weights = nn.Parameter(torch.zeros(self.POSITIONS, width))
        self.draft_weights = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(self.POSITIONS))

    def offsets(self, target_hidden: torch.Tensor) -> torch.Tensor:
        """What the target's hidden state [..., width] adds to the sigmoid's argument at each position [..., POSITIONS]."""
        return nn.functional.linear(target_hidden.to(self.bias.dtype), self.target_weights, self.bias)

    def logits(self, offsets: torch.Tensor, draft_hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The sigmoid's argument for draft hidden states [..., n, width] at `positions` [..., n], counted from 1."""
        index = positions.clamp(1, self.POSITIONS) - 1
        return draft_hidden.to(self.bias.dtype) @ self.draft_weights + offsets.gather(-1, index)

    def score(self, offsets: torch.Tensor, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        """theta_M, a scalar on the device, of the token at `position` (from 1) predicted by the hidden state [width]."""
        offset = offsets[min(position, self.POSITIONS) - 1]
        return torch.sigmoid(draft_hidden.to(self.bias.dtype) @ self.draft_weights + offset)


class FirstLayers:
    """Embedding and the first `depth` layers of a model, frozen. `masks` makes their masks, and an exit layer's."""

    def __init__(self, model: Any, depth: int) -> None:
        """Remove the other layers, norm and LM head from `model`, so that their memory is freed."""
        decoder = decoder_of(model)
        check_exit_depth(model, depth)
        self.masks = AttentionMasks(model)
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
        self, ids: torch.Tensor, positions: torch.Tensor, mask: LayerMasks
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The hidden states [batch, n, width] after layer N, and the rotary embeddings (cos, sin) of `positions` [batch, n]."""
        output = self._decoder(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        hidden_states: torch.Tensor = output.last_hidden_state
        return hidden_states, self._decoder.rotary_emb(hidden_states, positions)
