"""The trained parts of EESD: the exit layer (section 3.1) and the predictor of acceptance of its method Cali-TS (Eq. 5).

Also holds the target's first layers alone, whose output is the training input of both.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from specgen.engine.exit_parts import MAX_LAYERS, check_exit_depth
from specgen.engine.transformers_backend.attention_masks import AttentionMasks, LayerMasks
from specgen.engine.transformers_backend.decoder_layers import DecoderLayers, check_llama_structure, decoder_of
from specgen.errors import SpecgenError


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


class FirstLayers:
    """The embedding and the first `depth` layers of a model, frozen, for training an exit layer.

    `masks` makes the attention masks of these layers and of the exit layer.
    """

    def __init__(self, model: Any, depth: int) -> None:
        """Changes `model`: removes its later layers, its norm and its LM head, so that their memory is freed."""
        decoder = decoder_of(model)
        check_exit_depth(len(decoder.layers), depth)
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
