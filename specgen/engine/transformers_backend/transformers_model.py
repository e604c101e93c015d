"""A model that transformers runs, behind the interface that the native decoder has too."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from specgen.engine.forward_pass import ForwardFunction, ForwardPass, HiddenSource, LayerPart, ModelOutput, positions
from specgen.engine.inference_mode import inference
from specgen.engine.model_shape import of_transformers
from specgen.engine.transformers_backend.attention_masks import AttentionMasks, Mask
from specgen.engine.transformers_backend.decoder_layers import (
    DecoderLayers,
    check_llama_structure,
    decoder_of,
    layer_types,
)
from specgen.engine.transformers_backend.exit_layer import ExitLayer
from specgen.engine.transformers_backend.kv_cache import KVCache
from specgen.errors import SpecgenError


class TransformersModel:
    """A causal language model of transformers. Implements `engine.model.Model`; `module` is transformers' own object."""

    backend = "transformers"

    def __init__(self, module: Any) -> None:
        self.module = module
        self.shape = of_transformers(module.config)
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.num_embeddings: int = module.get_input_embeddings().weight.shape[0]
        head = module.get_output_embeddings()
        self.vocab_size: int = self.num_embeddings if head is None else head.weight.shape[0]
        self.inputs = _InputMaker(module)

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.module.parameters())

    def new_cache(self, layers: range | None = None) -> KVCache:
        """Returns an empty KV cache; a layer's buffers are allocated when it is first run."""
        return KVCache(self.shape.num_layers)

    def forward(self) -> ForwardFunction:
        return _FullModelForward(self.module, self.inputs)

    @inference
    def reference_logits(self, ids: Sequence[int]) -> torch.Tensor:
        output = self.module(input_ids=torch.tensor([ids], device=self.device), use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits

    def check_layers(self, feature: str) -> None:
        check_llama_structure(self.module, feature)

    def layers_forward(
        self, layers: Sequence[LayerPart], inputs: HiddenSource | None = None, *, with_head: bool = True
    ) -> ForwardFunction:
        decoder, types = decoder_of(self.module), layer_types(self.module)
        parts = [_part(decoder.layers[part.layer], part) for part in layers]
        norm, head = (decoder.norm, self.module.lm_head) if with_head else (nn.Identity(), nn.Identity())
        config = self.module.config.get_text_config() if with_head else None
        return _LayersForward(self, DecoderLayers(parts, [types[part.layer] for part in layers], norm, head, config), inputs)

    def exit_layers(self, tensors: Mapping[str, torch.Tensor], count: int) -> TransformersExit:
        """Returns a trained exit layer; see `engine.model.Model`."""
        layer = ExitLayer.of(self.module, count)
        if "head.weight" not in tensors:
            layer.head = nn.Identity()
        try:
            layer.load_state_dict(dict(tensors))
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if "head.weight" not in tensors:
            layer.head = self.module.lm_head
        return TransformersExit(self, layer)


class TransformersExit:
    """An exit layer made of transformers' decoder layers. Implements `engine.model.ExitLayers`."""

    def __init__(self, model: TransformersModel, layer: ExitLayer) -> None:
        self._model, self.layer = model, layer

    def new_cache(self) -> KVCache:
        return KVCache(len(self.layer.layers))

    def forward(self, inputs: HiddenSource) -> ForwardFunction:
        return _LayersForward(self._model, self.layer, inputs)


class _InputMaker:
    """Makes positions and attention masks of forward passes."""

    def __init__(self, module: Any) -> None:
        self._dtype: torch.dtype = module.dtype
        self._masks = AttentionMasks(module)
        self._positions = torch.arange(64, device=module.device)

    def __call__(self, forward_pass: ForwardPass) -> tuple[torch.Tensor, Mask]:
        """Returns the positions [n] of the pass's tokens and their attention mask."""
        context, draft, first, last = forward_pass[:4]
        if last > self._positions.shape[0]:
            self._positions = torch.arange(max(last, 2 * self._positions.shape[0]), device=self._positions.device)
        of_keys, tree = self._positions[:last], None
        if not forward_pass.is_chain:
            tree = len(context), draft.parents
            new = torch.tensor(positions(forward_pass._replace(first=len(context))), device=of_keys.device)
            of_keys = torch.cat((of_keys[: len(context)], new))
        mask = self._masks(first, of_keys, tree, self._dtype)
        if mask is None and tree is not None:
            raise SpecgenError("this model's attention uses ALiBi, which cannot run trees", "Take a method without draft trees")
        return of_keys[first:], mask

    def ids(self, forward_pass: ForwardPass) -> torch.Tensor:
        """Returns the ids [1, n] of the tokens to run."""
        return torch.tensor([forward_pass.ids], device=self._positions.device)


class _FullModelForward:
    """Runs a forward pass through the whole model, by the model's own `forward`."""

    def __init__(self, module: Any, inputs: _InputMaker) -> None:
        accepted = inspect.signature(module.forward).parameters
        self._options = [name for name in ("position_ids", "logits_to_keep") if name in accepted]
        self._module, self._inputs = module, inputs

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        at, mask = self._inputs(forward_pass)
        options = {"position_ids": at[None], "logits_to_keep": logits_to_keep}
        output = self._module(
            input_ids=self._inputs.ids(forward_pass),
            attention_mask=mask,
            past_key_values=forward_pass.cache,
            use_cache=True,
            **{name: options[name] for name in self._options},
        )
        return ModelOutput(output.logits[0][-logits_to_keep:])


class _LayersForward:
    """Runs only `layers` of a model. `inputs` returns the hidden states [n, width] that enter them; None: the embeddings."""

    def __init__(self, model: TransformersModel, layers: DecoderLayers, inputs: HiddenSource | None) -> None:
        decoder = decoder_of(model.module)
        self._make_inputs, self._layers, self._rotary = model.inputs, layers, decoder.rotary_emb
        self._hidden = inputs or (lambda forward_pass: decoder.embed_tokens(model.inputs.ids(forward_pass))[0])

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        hidden_states = self._hidden(forward_pass)[None]
        at, mask = self._make_inputs(forward_pass)
        rotary = self._rotary(hidden_states, at[None])
        logits, hidden_states = self._layers(hidden_states, rotary, mask, forward_pass.cache, logits_to_keep=logits_to_keep)
        return ModelOutput(logits[0], hidden_states[0])


class _NoAttention(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMLP(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


def _part(layer: nn.Module, part: LayerPart) -> nn.Module:
    """Returns `layer` without its attention or without its MLP; shares all weights with `layer`.

    The part left out is replaced by a module that returns zeros, which add nothing to the residual stream.
    """
    if part.attention and part.mlp:
        return layer
    reduced = copy.copy(layer)
    reduced._modules = dict(layer._modules)
    name, empty = ("mlp", _NoMLP()) if part.attention else ("self_attn", _NoAttention())
    if name not in reduced._modules:
        raise SpecgenError(f"the target's layers have no {name} to skip", "Skip whole layers, or take another method")
    reduced._modules[name] = empty
    return reduced
