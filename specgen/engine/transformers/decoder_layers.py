"""Runs a model's decoder layers one by one, for early exit and layer skipping, and checks that a model allows it.

A model allows it if it has the structure of `LlamaForCausalLM`: a decoder with `embed_tokens`, `layers`, `norm` and `rotary_emb`,
an `lm_head`, and no other computation between these modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import nn

from specgen.base.errors import SpecgenError
from specgen.engine.devices import move
from specgen.engine.inference_mode import inference
from specgen.engine.tolerances import logits_error
from specgen.engine.transformers.attention_masks import AttentionMasks, Mask


class DecoderLayers(nn.Module):
    """Some decoder layers of a model, followed by a norm and an LM head.

    `layer_types` are the layers' attention types (None: all the same). `config` is the model's text config, which may set a cap
    on logits; None means no cap. Each layer uses the KV cache's layer with the index `layer.self_attn.layer_idx`.
    """

    def __init__(
        self, layers: Iterable[nn.Module], layer_types: Iterable[str | None], norm: nn.Module, head: nn.Module, config: Any = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.layer_types = list(layer_types)
        self.norm, self.head = norm, head
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)

    @classmethod
    def upper(cls, model: Any, start: int) -> Self:
        """Returns the model's layers from index `start` on, with the model's norm and LM head. Nothing is copied."""
        decoder = decoder_of(model)
        layers, types = decoder.layers[start:], layer_types(model)[start:]
        return cls(layers, types, decoder.norm, model.lm_head, model.config.get_text_config())

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: Mask,
        cache: Any = None,
        *,
        logits_to_keep: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the layers on hidden states [batch, n, width], then norm and head on the last `logits_to_keep` tokens (None: all).

        Returns the logits [batch, kept, vocabulary] and the head's input [batch, kept, width], the hidden states after the norm.
        `rotary` are the rotary embeddings (cos, sin) of the n positions. `mask` is an additive mask [1 or batch, 1, n, past + n]
        (past: number of cached tokens), or a dictionary of such masks by attention type. `cache` None runs without a KV cache.
        """
        hidden_states = self.run_layers(hidden_states, rotary, mask, cache)
        return self.norm_and_head(hidden_states if logits_to_keep is None else hidden_states[:, -logits_to_keep:])

    def run_layers(
        self,
        hidden_states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: Mask,
        cache: Any = None,
        inputs: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Runs the layers without norm and head, and returns their output [batch, n, width]. Arguments as for `forward`.

        Appends the input of each layer to `inputs`, unless it is None.
        """
        for layer, layer_type in zip(self.layers, self.layer_types, strict=True):
            if inputs is not None:
                inputs.append(hidden_states)
            hidden_states = layer(
                hidden_states,
                attention_mask=mask[str(layer_type)] if isinstance(mask, dict) else mask,
                position_embeddings=rotary,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return hidden_states

    def norm_and_head(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies the norm, the LM head and, for models that have one (Gemma 2), the cap on logits.

        `hidden_states` [..., width] is the layers' output. Returns logits and hidden states after the norm, as `forward`.
        """
        hidden_states = self.norm(hidden_states)
        return self.head_logits(hidden_states), hidden_states

    def head_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the LM head's logits [..., vocabulary] for hidden states [..., width] after the norm."""
        logits: torch.Tensor = self.head(hidden_states)
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


def decoder_of(model: Any) -> Any:
    """Returns the decoder inside a causal language model (`model.model` for Llama).

    Its attribute name is `base_model_prefix`; None if the model has no such attribute.
    """
    return getattr(model, model.base_model_prefix, None)


def layer_types(model: Any) -> list[str | None]:
    """Returns each layer's attention type ("full_attention", "sliding_attention", ...).

    Every entry is None if the config lists no types: then all layers use the same attention.
    """
    return list(getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(decoder_of(model).layers))


def missing_part(model: Any) -> str | None:
    """Returns the name of a module that `LlamaForCausalLM` has and this model lacks; None if it has all that are needed."""
    decoder = decoder_of(model)
    missing = [part for part in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(decoder, part)]
    return next(iter(missing), None if hasattr(model, "lm_head") else "lm_head")


@inference
def check_llama_structure(model: Any, feature: str = "early exit") -> None:
    """Raises SpecgenError if the model's layers, run one by one by `DecoderLayers`, do not give the model's own logits.

    Compares both logits on four tokens, because modules of the right names may still be used differently than in Llama.
    `feature` is what needs this structure, for the message.
    """
    if missing := missing_part(model):
        raise _refusal(model, feature, f"its decoder has no {missing}")
    decoder = decoder_of(model)
    ids = [token % decoder.embed_tokens.weight.shape[0] for token in (5, 9, 7, 3)]

    def logits() -> torch.Tensor:
        embeddings = decoder.embed_tokens(torch.tensor([ids], device=model.device))
        positions = torch.arange(len(ids), device=model.device)
        mask = AttentionMasks(model)(0, positions, None, embeddings.dtype)
        rotary = decoder.rotary_emb(embeddings, positions[None])
        return move(DecoderLayers.upper(model, 0).forward(embeddings, rotary, mask)[0][0], model.device)

    def reference() -> torch.Tensor:
        own: torch.Tensor = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0]
        return own

    if why := logits_error(logits, reference):
        raise _refusal(model, feature, f"its layers, run one by one, {why}")


def _refusal(model: Any, feature: str, why: str) -> SpecgenError:
    return SpecgenError(
        f"{feature} needs a model built as Llama is, and {model.config.model_type} is not: {why}",
        "Take a Llama-like target (Llama, Mistral, Qwen, Phi-3, Gemma, OLMo), or a draft model: -m svip",
    )
