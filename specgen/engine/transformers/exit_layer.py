"""EESD's exit layer (section 3.1), made of transformers' decoder layers."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from specgen.engine.exit_parts import check_exit_layers
from specgen.engine.transformers.decoder_layers import DecoderLayers, check_llama_structure, decoder_of
from specgen.engine.transformers.structure import dequantised_layer, dequantised_linear, is_quantised


class ExitLayer(DecoderLayers):
    """EESD's exit layer: decoder layers, a norm and an LM head that compute the draft's logits.

    The input is the hidden states after the target's first N layers. The decoder layers are of the same class as the target's and
    have a KV cache of their own. Without decoder layers only norm and head remain, as in the paper's ablation.
    """

    @classmethod
    def of(cls, model: Any, layers: int = 1) -> ExitLayer:
        """Returns an untrained exit layer for the target `model`: copies of the target's last `layers` layers, norm and LM head.

        The weights are ordinary numbers, even if the target's are quantised.
        Raises SpecgenError for more than `MAX_LAYERS` layers and for a model without Llama's structure (`decoder_layers`).
        """
        check_exit_layers(layers)
        check_llama_structure(model)
        start = len(decoder_of(model).layers) - layers
        made = cls.upper(model, start)
        if is_quantised(model):
            config = model.config.get_text_config()
            made.layers = nn.ModuleList(
                dequantised_layer(layer, index, config, model.dtype) for index, layer in enumerate(made.layers, start)
            )
            made.head = dequantised_linear(made.head, model.dtype)
            made.norm = copy.deepcopy(made.norm)
        else:
            made = copy.deepcopy(made)
        for index, layer in enumerate(made.layers):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = index  # type: ignore[assignment]
        return made.requires_grad_(False).eval()
