"""A model that transformers runs, with the same interface as the native decoder's models."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specgen.base.errors import SpecgenError
from specgen.engine.batch_pass import BatchPass
from specgen.engine.devices import move
from specgen.engine.forward_pass import ForwardFunction, ForwardPass, HiddenSource, LayerPart, ModelOutput, positions
from specgen.engine.inference_mode import inference
from specgen.engine.model_shape import of_transformers
from specgen.engine.native.architecture import Architecture
from specgen.engine.native.families import read_architecture
from specgen.engine.transformers.attention_masks import AttentionMasks, LayerMasks, Mask
from specgen.engine.transformers.decoder_layers import (
    DecoderLayers,
    check_llama_structure,
    decoder_of,
    layer_types,
)
from specgen.engine.transformers.kv_cache import KVCache
from specgen.engine.transformers.structure import count_parameters, dequantised_layer, dequantised_linear, is_quantised


class TransformersModel:
    """A causal language model of transformers. Implements `engine.model.Model`; `module` is transformers' own object.

    Its modules may be on several devices, between which accelerate's hooks move their inputs. Then `device` is the embedding's,
    to which the outputs are moved.
    """

    backend = "transformers"
    exact = False
    capture_seconds = 0.0

    def __init__(self, module: Any) -> None:
        self.module = module
        self.shape = of_transformers(module.config)
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.num_embeddings: int = module.get_input_embeddings().weight.shape[0]
        head = module.get_output_embeddings()
        rows = getattr(head, "out_features", None) or (head or module.get_input_embeddings()).weight.shape[0]
        self.vocab_size: int = rows  # a packed weight has another shape
        self.inputs = _InputMaker(module)

    @property
    def num_parameters(self) -> int:
        counted = count_parameters(self.module.config, False) if is_quantised(self.module) else None
        return counted or sum(weight.numel() for weight in self.module.parameters())

    @property
    def is_placed(self) -> bool:
        """Whether the modules are on several devices."""
        return getattr(self.module, "hf_device_map", None) is not None and len(set(self.module.hf_device_map.values())) > 1

    @property
    def architecture(self) -> Architecture:
        """What config.json describes; see `engine.model.Model`."""
        config = json.loads(self.module.config.get_text_config().to_json_string(use_diff=False))
        return read_architecture({**config, "quantization_config": None})

    def capture_passes(self, shortest: int, longest: int) -> None:
        """Does nothing: no passes are captured."""

    def new_cache(self, layers: range | None = None) -> KVCache:
        """Returns an empty KV cache; a layer's buffers are allocated when it is first run."""
        return KVCache(self.shape.num_layers, self.device)

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
        return _LayersForward(self, self._decoder_layers(layers, with_head=with_head), inputs)

    def feature_forward(self, taps: Sequence[int]) -> ForwardFunction:
        """Returns a function that also returns hidden states between the layers; see `engine.model.Model`."""
        self.check_layers("a head on hidden states")
        layers = self._decoder_layers([LayerPart(index) for index in range(self.shape.num_layers)], with_head=True)
        return _LayersForward(self, layers, None, taps)

    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of token ids on the device; see `engine.model.Model`."""
        embeddings: torch.Tensor = decoder_of(self.module).embed_tokens(ids)
        return embeddings

    def head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the LM head's logits; see `engine.model.Model`."""
        return move(self._decoder_layers([], with_head=True).head_logits(hidden), self.device)

    def batch_cache(self, sequences: int) -> KVCache:
        """Returns an empty KV cache; its first pass decides for how many sequences."""
        return KVCache(self.shape.num_layers, self.device)

    def batch_logits(self, batch: BatchPass, logits_to_keep: int | None = None) -> torch.Tensor:
        """Runs the model's own `forward` on several sequences; see `engine.model.Model`."""
        options = {"position_ids": batch.positions, "logits_to_keep": logits_to_keep or 0}
        output = self.module(
            input_ids=batch.ids,
            attention_mask=self.inputs.batch_masks(batch),
            past_key_values=batch.cache,
            use_cache=batch.cache is not None,
            **{name: options[name] for name in _accepted_options(self.module)},
        )
        logits: torch.Tensor = output.logits
        return logits if logits_to_keep is None else logits[:, -logits_to_keep:]

    def batch_layers(self, batch: BatchPass, layers: int, *, with_head: bool = False) -> ModelOutput:
        """Runs the first layers on several sequences; see `engine.model.Model`."""
        decoder = decoder_of(self.module)
        hidden = decoder.embed_tokens(batch.ids)
        parts = self._decoder_layers([LayerPart(index) for index in range(layers)], with_head=with_head)
        logits, states = parts(hidden, *self.inputs.batched(batch, hidden), batch.cache)
        return ModelOutput(move(logits, self.device), move(states, self.device))

    def batch_features(self, batch: BatchPass, taps: Sequence[int]) -> torch.Tensor:
        """Returns hidden states between the layers for several sequences; see `engine.model.Model`."""
        decoder = decoder_of(self.module)
        hidden = decoder.embed_tokens(batch.ids)
        rotary, masks = self.inputs.batched(batch, hidden)
        layers = self._decoder_layers([LayerPart(index) for index in range(self.shape.num_layers)], with_head=True)
        inputs: list[torch.Tensor] = []
        inputs.append(layers.norm(layers.run_layers(hidden, rotary, masks, batch.cache, inputs)))
        return torch.cat([move(inputs[tap], self.device) for tap in taps], dim=-1)

    def last_layers(self, folder: Path, count: int) -> dict[str, torch.Tensor]:
        """Returns copies of the last layers' weights; see `engine.model.Model`."""
        if self.is_placed:
            raise SpecgenError("transformers cannot train parts of a target on several devices", "Take --device cuda or cpu")
        decoder, head = decoder_of(self.module), self.module.lm_head
        start = len(decoder.layers) - count
        layers = list(decoder.layers[start:])
        if is_quantised(self.module):
            config, head = self.module.config.get_text_config(), dequantised_linear(head, self.dtype)
            layers = [dequantised_layer(layer, index, config, self.dtype) for index, layer in enumerate(layers, start)]
        named = [*((f"layers.{index}", layer) for index, layer in enumerate(layers)), ("norm", decoder.norm), ("head", head)]
        stored = {f"{part}.{name}": weight for part, module in named for name, weight in module.state_dict().items()}
        return {name: weight.detach().to(self.device, torch.float32, copy=True) for name, weight in stored.items()}

    def free_weights(self, kept_layers: int = 0) -> None:
        """Frees the memory of weights; see `engine.model.Model`."""
        if not kept_layers:
            for module in self.module.modules():  # quantised ones cannot be moved to the meta device
                module._parameters.clear()
                module._buffers.clear()
            return
        decoder = decoder_of(self.module)
        decoder.layers = decoder.layers[:kept_layers]
        decoder.norm, self.module.lm_head = nn.Identity(), nn.Identity()

    def _decoder_layers(self, layers: Sequence[LayerPart], *, with_head: bool) -> DecoderLayers:
        decoder, types = decoder_of(self.module), layer_types(self.module)
        parts = [_part(decoder.layers[part.layer], part) for part in layers]
        norm, head = (decoder.norm, self.module.lm_head) if with_head else (nn.Identity(), nn.Identity())
        config = self.module.config.get_text_config() if with_head else None
        return DecoderLayers(parts, [types[part.layer] for part in layers], norm, head, config)


class _InputMaker:
    """Makes positions and attention masks of forward passes."""

    def __init__(self, module: Any) -> None:
        self._dtype: torch.dtype = module.dtype
        self._masks, self._rotary = AttentionMasks(module), getattr(decoder_of(module), "rotary_emb", None)
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

    def batched(self, batch: BatchPass, hidden: torch.Tensor) -> tuple[Any, LayerMasks]:
        """Returns the rotary embeddings (cos, sin) and the mask of a pass over several sequences with Llama's structure."""
        assert self._rotary is not None
        return self._rotary(hidden, batch.positions), self.batch_masks(batch)

    def batch_masks(self, batch: BatchPass) -> LayerMasks:
        return self._masks.batched(batch, self._dtype)

    def ids(self, forward_pass: ForwardPass) -> torch.Tensor:
        """Returns the ids [1, n] of the tokens to run."""
        return torch.tensor([forward_pass.ids], device=self._positions.device)


class _FullModelForward:
    """Runs a forward pass through the whole model, by the model's own `forward`."""

    def __init__(self, module: Any, inputs: _InputMaker) -> None:
        self._options = _accepted_options(module)
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


def _accepted_options(module: Any) -> list[str]:
    """Returns which of the options that not all models have the model's `forward` takes."""
    accepted = inspect.signature(module.forward).parameters
    return [name for name in ("position_ids", "logits_to_keep") if name in accepted]


class _LayersForward:
    """Runs only `layers` of a model. `inputs` returns the hidden states [n, width] that enter them; None: the embeddings.

    `taps` name the hidden states that the output's `features` are made of, see `engine.model.Model.feature_forward`.
    """

    def __init__(
        self, model: TransformersModel, layers: DecoderLayers, inputs: HiddenSource | None, taps: Sequence[int] = ()
    ) -> None:
        self._taps, self._device = taps, model.device
        decoder = decoder_of(model.module)
        self._make_inputs, self._layers, self._rotary = model.inputs, layers, decoder.rotary_emb
        self._hidden = inputs or (lambda forward_pass: decoder.embed_tokens(model.inputs.ids(forward_pass))[0])

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        hidden_states = self._hidden(forward_pass)[None]
        at, mask = self._make_inputs(forward_pass)
        rotary = self._rotary(hidden_states, at[None])
        if not self._taps:
            logits, hidden_states = self._layers(hidden_states, rotary, mask, forward_pass.cache, logits_to_keep=logits_to_keep)
            return ModelOutput(move(logits[0], self._device), move(hidden_states[0], self._device))
        found: list[torch.Tensor] = []
        found.append(self._layers.norm(self._layers.run_layers(hidden_states, rotary, mask, forward_pass.cache, found)))
        kept = move(found[-1][0, -logits_to_keep:], self._device)
        features = torch.cat([move(found[tap][0], self._device) for tap in self._taps], dim=-1)
        return ModelOutput(move(self._layers.head_logits(kept), self._device), kept, features=features)


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
    if hasattr(layer, "_hf_hook"):  # a copy of a layer would still call the original
        raise SpecgenError("transformers skips no parts of layers on several devices", "Skip whole layers, or take --device cuda")
    reduced = copy.copy(layer)
    reduced._modules = dict(layer._modules)
    name, empty = ("mlp", _NoMLP()) if part.attention else ("self_attn", _NoAttention())
    if name not in reduced._modules:
        raise SpecgenError(f"the target's layers have no {name} to skip", "Skip whole layers, or take another method")
    reduced._modules[name] = empty
    return reduced
