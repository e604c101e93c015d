"""The trained parts of EESD: the exit layer (section 3.1) and the predictor of acceptance of its method Cali-TS (Eq. 5).

Also holds the target's first layers alone, whose output is the training input of both.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from specgen.engine.attention_masks import AttentionMasks, LayerMasks
from specgen.engine.decoder_layers import DecoderLayers, check_exit_depth, check_llama_structure, decoder_of
from specgen.errors import SpecgenError

MAX_LAYERS = 2  # EESD's Figure 5 shows that more than one layer gains little


class ExitLayer(DecoderLayers):
    """EESD's exit layer: decoder layers, a norm and an LM head that compute the draft's logits.

    The input is the hidden states after the target's first N layers. The decoder layers are of the same class as the target's and
    have a KV cache of their own. Without decoder layers only norm and head remain, as in the paper's ablation.
    """

    @classmethod
    def of(cls, model: Any, layers: int = 1) -> ExitLayer:
        """Returns an untrained exit layer for the target `model`: copies of the target's last `layers` layers, norm and LM head.

        Raises SpecgenError for more than `MAX_LAYERS` layers and for a model without Llama's structure (`decoder_layers`).
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
    """Predicts the probability theta_M = sigmoid(w . [W_i h_T, h_D] + b_i) that the i-th token of a draft (i from 1) is accepted.

    h_T is the target's hidden state (after the norm) from which the last committed token was predicted. h_D is the exit layer's
    hidden state from which the drafted token was predicted. b_i is a bias. W_i only occurs in the product of w's first half and
    W_i, so this vector is trained instead, one per position i. All positions from the tenth on share the same parameters.
    """

    POSITIONS = 10

    def __init__(self, width: int) -> None:
        super().__init__()
        self.target_weights = nn.Parameter(torch.zeros(self.POSITIONS, width))
        self.draft_weights = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(self.POSITIONS))

    def offsets(self, target_hidden: torch.Tensor) -> torch.Tensor:
        """Returns the part of the sigmoid's argument that depends on the target's hidden state [..., width].

        The result [..., POSITIONS] has one number per position of a drafted token.
        """
        return nn.functional.linear(target_hidden.to(self.bias.dtype), self.target_weights, self.bias)

    def logits(self, offsets: torch.Tensor, draft_hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the sigmoid's argument [..., n] for n drafted tokens, for training.

        `offsets` [..., POSITIONS] is from `offsets`, `draft_hidden` [..., n, width] are the exit layer's hidden states, and
        `positions` [..., n] are the tokens' positions in the draft, from 1.
        """
        index = positions.clamp(1, self.POSITIONS) - 1
        return draft_hidden.to(self.bias.dtype) @ self.draft_weights + offsets.gather(-1, index)

    def score(self, offsets: torch.Tensor, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        """Returns theta_M, a scalar tensor, of one drafted token at `position` of the draft (from 1).

        `offsets` [POSITIONS] is from `offsets`; `draft_hidden` [width] is the hidden state from which the token was predicted.
        """
        offset = offsets[min(position, self.POSITIONS) - 1]
        return torch.sigmoid(draft_hidden.to(self.bias.dtype) @ self.draft_weights + offset)


class FirstLayers:
    """The embedding and the first `depth` layers of a model, frozen, for training an exit layer.

    `masks` makes the attention masks of these layers and of the exit layer.
    """

    def __init__(self, model: Any, depth: int) -> None:
        """Changes `model`: removes its later layers, its norm and its LM head, so that their memory is freed."""
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
        """Returns the hidden states [batch, n, width] after these layers, and the rotary embeddings (cos, sin) of `positions`.

        `ids` and `positions` are [batch, n]; `mask` is from `masks`.
        """
        output = self._decoder(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        hidden_states: torch.Tensor = output.last_hidden_state
        return hidden_states, self._decoder.rotary_emb(hidden_states, positions)
