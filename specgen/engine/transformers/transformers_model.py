"""Models that transformers' own code runs: whole passes, and passes over some of the decoder
layers."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from specgen.base.errors import SpecgenError, is_out_of_memory
from specgen.base.types import Context
from specgen.engine.devices import inference, move
from specgen.engine.forward_pass import (
    NO_NODES,
    BatchPass,
    ForwardFunction,
    ForwardPass,
    HiddenSource,
    LayerCall,
    ModelOutput,
)
from specgen.engine.model import ALL_OPERATORS, ModelShape, of_transformers
from specgen.engine.native.architecture import UnsupportedConfig
from specgen.engine.native.attention_mask import AttentionMask, pass_mask
from specgen.engine.native.config_reading import read_architecture
from specgen.engine.native.recurrent_states import Steps
from specgen.engine.transformers.kv_cache import GrowingCache, KVCache
from specgen.engine.transformers.quiet import quiet_transformers
from specgen.engine.transformers.recurrent_layers import RECURRENT_TYPES, replace_recurrences

# as fractions of the largest logit; a larger difference is a wrong computation
_FLOAT32_ERROR = 1e-3
_NARROW_ERROR = 0.1
Mask = torch.Tensor | dict[str, torch.Tensor | None] | None
_UNROLLED = (
    "{} keeps a state ({}) that cannot be rolled back, which speculation needs: after a "
    "rejected draft all is run again. "
    "Plain decoding needs no rollback: -m ar"
)
# What models call their cache in inputs and outputs: transformers 5.24 renamed all but RWKV's, and
# 5.40 removes the old names.
_CACHES = "cache", "cache_params", "past_key_values", "state"
_ROWS = 512  # of an identity matrix: few enough for the memory of a large LM head's logits


class TransformersModel:
    """A causal language model of transformers. Implements `engine.model.Model`; `module` is
    transformers' own object.

    Its modules may be on several devices, between which accelerate's hooks move tensors. All
    outputs are moved to `device`, which is then the embedding's.
    """

    exact = False
    rounding: str | None = None

    def __init__(self, module: Any) -> None:
        self.module = module
        self.shape = _shape(module.config)
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self._masks = AttentionMasks(module)
        self._fixed = replace_recurrences(module)
        self.warning = (
            None
            if self._fixed is None
            else _UNROLLED.format(module.config.model_type, self._fixed.what)
        )
        accepted = inspect.signature(module.forward).parameters
        self._cache_name = cache_argument(module)
        self._options = [name for name in ("position_ids", "logits_to_keep") if name in accepted]

    def new_cache(self, layers: range | None = None) -> KVCache:
        """Returns an empty KV cache. `layers` is not needed: a layer's buffers are allocated when
        it is first run."""
        return (
            KVCache(self.shape.num_layers, self.device)
            if self._fixed is None
            else GrowingCache(self.device)
        )

    def batch_cache(self, sequences: int) -> KVCache:
        """Returns an empty KV cache. `sequences` is not needed: the first pass decides for how many
        sequences the buffers are."""
        if getattr(type(self.module), "_is_stateful", False):
            raise SpecgenError(
                "a model with recurrent layers runs one text at a time",
                "Train with another target, or on given texts",
            )
        return KVCache(self.shape.num_layers, self.device)

    def forward(
        self,
        layers: Sequence[LayerCall] | None = None,
        inputs: HiddenSource | None = None,
        *,
        taps: Sequence[int] = (),
        with_head: bool = True,
    ) -> ForwardFunction:
        """Returns a function that runs the model by transformers' own `forward`, or if `layers` are
        named, layer by layer.

        Arguments and output are those of `engine.model.Model.forward`; without `layers` and `taps`,
        the output has no `hidden_states`.
        """
        if layers is not None:
            return self._layers_forward(layers, inputs, taps, with_head=with_head)
        if taps and self._fixed is not None:
            problem = (
                f"heads read hidden states, and {self.module.config.model_type} "
                f"keeps a state ({self._fixed.what})"
            )
            raise SpecgenError(
                f"{problem} that cannot be rolled back", "Take a method without a head: -m lookup"
            )
        if taps:
            self.check_layers(
                "a head on hidden states", last_states_only=set(taps) == {self.shape.num_layers}
            )
        if self._fixed is not None:
            return self._grow

        def run(forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
            ids = torch.tensor([forward_pass.ids], device=self.device)
            attention_mask = pass_mask(forward_pass, self.device)
            mask = self._masks.of_pass(forward_pass, attention_mask, self.dtype)
            cache = forward_pass.cache
            cache.steps = Steps(forward_pass, self.device)
            output = self._run(
                ids,
                attention_mask.positions[None],
                mask,
                cache,
                logits_to_keep,
                with_states=bool(taps),
            )
            logits = output.logits[0, -logits_to_keep:]
            if not taps:
                return ModelOutput(logits)
            kept = move(output.hidden_states[-1], self.device)[0, -logits_to_keep:]
            return ModelOutput(logits, kept, features=self._features(output, taps)[0])

        return run

    # whole passes, by the model's own `forward`

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: Mask,
        cache: Any,
        keep: int = 0,
        *,
        with_states: bool = False,
    ) -> Any:
        """Returns transformers' output of a pass over token ids [batch, n], with hidden states if
        `with_states`.

        `keep` is the number of tokens, the last ones, whose logits are wanted; 0: all. Some models
        compute them all nevertheless.
        """
        given = {"position_ids": positions, "logits_to_keep": keep}
        options = {name: given[name] for name in self._options} | (
            {"output_hidden_states": True} if with_states else {}
        )
        options[self._cache_name] = cache
        return self.module(
            input_ids=ids, attention_mask=mask, use_cache=cache is not None, **options
        )

    def _grow(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        """Runs a pass with a `GrowingCache`. From the beginning all tokens are run at once, and
        later ones one by one.

        Chunks of a long prompt are run with the last of them. Raises SpecgenError for a tree.
        """
        context, draft, first, last, cache = forward_pass[:5]
        assert self._fixed is not None
        if not forward_pass.is_chain:
            kept = f"{self.module.config.model_type} keeps a state ({self._fixed.what})"
            raise SpecgenError(
                f"{kept} that cannot be rolled back, so it runs no draft trees",
                "Take a method without them: -m ar",
            )
        if not 0 <= cache.end <= first:  # it holds another text's state
            cache.kept = {}
            cache.end = 0
        if last < len(context):
            return ModelOutput(torch.empty(0, device=self.device))
        begin = cache.end
        cache.end = -1
        tokens = (context.ids + draft.tokens)[begin:last]
        pieces = ([token] for token in tokens) if begin else [tokens]
        logits = []
        for piece in pieces:
            positions = torch.arange(begin, begin + len(piece), device=self.device)[None]
            given = {"position_ids": positions} if "position_ids" in self._options else {}
            ids = torch.tensor([piece], device=self.device)
            output = self.module(input_ids=ids, use_cache=self._fixed.grows, **given, **cache.kept)
            state = next((output[name] for name in _CACHES if output.get(name) is not None), None)
            cache.kept = {} if state is None or not self._fixed.grows else {self._cache_name: state}
            logits.append(output.logits[0])
            begin += len(piece)
        cache.end = last if self._fixed.grows else 0
        return ModelOutput(torch.cat(logits)[-logits_to_keep:])

    def _features(self, output: Any, taps: Sequence[int]) -> torch.Tensor:
        return torch.cat([move(output.hidden_states[tap], self.device) for tap in taps], dim=-1)

    @inference
    def reference_logits(self, ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self.module(
            input_ids=torch.tensor([ids], device=self.device), use_cache=False
        ).logits[0]
        return logits

    def batch(
        self,
        batch: BatchPass,
        layers: int | None = None,
        *,
        taps: Sequence[int] = (),
        with_head: bool = True,
        logits_to_keep: int | None = None,
    ) -> ModelOutput:
        """Runs several sequences through all layers that the model still has (see `free_weights`);
        see `engine.model.Model`."""
        attention_mask = AttentionMask(~batch.visible, batch.positions, batch.key_positions)
        mask = self._masks(attention_mask, self.dtype)
        with_states = bool(taps) or layers is not None
        keep = logits_to_keep or 0
        output = self._run(
            batch.ids, batch.positions, mask, batch.cache, keep, with_states=with_states
        )
        features = self._features(output, taps) if taps else None
        hidden = None if layers is None else move(output.hidden_states[layers], self.device)
        return ModelOutput(output.logits[:, -keep:], hidden, features=features)

    # some of the layers

    def on_torch(self) -> tuple[str, ...]:
        return ALL_OPERATORS

    @inference
    def check_layers(self, feature: str, *, last_states_only: bool = False) -> None:
        """Raises SpecgenError if the layers, run one by one, do not give the model's own logits.
        `feature` needs this, in the message. With `last_states_only`, it needs only the hidden
        states that the LM head reads.

        Modules with the same names as in Llama may still be used differently, so the logits of four
        tokens are compared.
        """
        if missing := missing_part(self.module):
            why: str | None = f"its decoder has no {missing}"
        else:
            ids = [token % self.shape.vocab_size for token in (5, 9, 7, 3)]
            run = self._layers_forward([LayerCall(index) for index in range(self.shape.num_layers)])
            tokens = ForwardPass(Context(ids), NO_NODES, 0, len(ids), self.new_cache())
            given = {
                "input_ids": torch.tensor([ids], device=self.device),
                "use_cache": False,
                "output_hidden_states": True,
            }

            def logits() -> torch.Tensor:
                if last_states_only:
                    return self.head_logits(self.module(**given).hidden_states[-1][0])
                return run(tokens, len(ids)).logits

            error = logits_error(logits, lambda: self.reference_logits(ids))
            why = error and (
                "its "
                f"{'last hidden states' if last_states_only else 'layers, run one by one,'} {error}"
            )
        if why:
            raise SpecgenError(
                (
                    f"{feature} needs a model built as Llama is, and "
                    f"{self.module.config.model_type} is not: {why}"
                ),
                (
                    "Take a Llama-like target (Llama, Mistral, Qwen, Phi-3, Gemma, OLMo), or "
                    "a draft model: -m svip"
                ),
            )

    def _layers_forward(
        self,
        layers: Sequence[LayerCall],
        inputs: HiddenSource | None = None,
        taps: Sequence[int] = (),
        *,
        with_head: bool = True,
    ) -> ForwardFunction:
        """Returns a function that runs some layers, or parts of them, one by one. Of the `taps`,
        only `num_layers` may be named."""
        assert set(taps) <= {self.shape.num_layers}
        decoder = decoder_of(self.module)
        types = (
            getattr(self.module.config.get_text_config(), "layer_types", None)
            or [None] * self.shape.num_layers
        )
        called = [
            (_without(decoder.layers[call.layer], call), types[call.layer]) for call in layers
        ]
        cache_name = cache_argument(decoder.layers[0])

        def run(forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
            if inputs is None:
                hidden = self.embeddings(torch.tensor([forward_pass.ids], device=self.device))
            else:
                hidden = inputs(forward_pass)[None]
            attention_mask = pass_mask(forward_pass, self.device)
            cache = forward_pass.cache
            cache.steps = Steps(forward_pass, self.device)
            masks = self._masks.of_pass(forward_pass, attention_mask, self.dtype)
            rotary = decoder.rotary_emb(hidden, attention_mask.positions[None])
            for layer, kind in called:
                mask = masks[str(kind)] if isinstance(masks, dict) else masks
                options = {cache_name: cache, "position_embeddings": rotary, "use_cache": True}
                hidden = layer(hidden, attention_mask=mask, **options)
            if not with_head:
                hidden = move(hidden[0], self.device)
                return ModelOutput(hidden, hidden)
            kept = hidden[0] if taps else hidden[0, -logits_to_keep:]
            states = move(decoder.norm(kept), self.device)
            logits = self.head_logits(states[-logits_to_keep:])
            return ModelOutput(logits, states[-logits_to_keep:], features=states if taps else None)

        return run

    def embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [..., width] of token ids [...] on the device, as they enter the
        first layer."""
        embeddings: torch.Tensor = self.module.get_input_embeddings()(ids)
        return embeddings

    def head_logits(self, hidden: torch.Tensor, *, is_raw: bool = False) -> torch.Tensor:
        """Returns the logits [n, vocabulary] that the LM head computes from hidden states [n,
        width] after the final norm.

        They are scaled (Cohere, Granite) and capped (Gemma 2) if the config says so.
        """
        logits: torch.Tensor = move(self.module.lm_head(hidden), self.device)
        if is_raw:
            return logits
        config = self.module.config.get_text_config()
        cap = getattr(config, "final_logit_softcapping", None)
        scale = getattr(config, "logit_scale", None) or 1 / (
            getattr(config, "logits_scaling", None) or 1
        )
        logits = logits if scale == 1 else logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # weights

    def last_layers(self, folder: Path, count: int) -> dict[str, torch.Tensor]:
        """Returns float32 copies of the weights of the last `count` layers, the norm and the LM
        head, named as in an exit layer's file.

        Raises SpecgenError if the model is on several devices.
        """
        if len(set((getattr(self.module, "hf_device_map", None) or {}).values())) > 1:
            raise SpecgenError(
                "transformers cannot train parts of a target on several devices",
                "Take --device cuda or cpu",
            )
        decoder = decoder_of(self.module)
        head = self.module.lm_head
        layers = list(decoder.layers[len(decoder.layers) - count :])
        named = [
            *((f"layers.{index}", layer) for index, layer in enumerate(layers)),
            ("norm", decoder.norm),
            ("head", head),
        ]
        stored = {
            f"{part}.{name}": weight
            for part, module in named
            for name, weight in self._weights_of(module)
        }
        return {
            name: weight.detach().to(self.device, torch.float32, copy=True)
            for name, weight in stored.items()
        }

    @torch.no_grad()
    def _weights_of(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights of a module by name, as ordinary numbers also where those of its
        linear modules are quantised.

        Quantised ones are computed by running the linear modules on an identity matrix, so this
        works for each format.
        """
        # also False for weights that were dequantised on loading
        if not getattr(self.module, "is_quantized", False):
            yield from module.named_parameters()
            return
        for name, part in module.named_modules():
            prefix = f"{name}." if name else ""
            if not hasattr(part, "in_features"):
                yield from (
                    (prefix + key, weight) for key, weight in part.named_parameters(recurse=False)
                )
                continue
            device = next(iter((*part.parameters(), *part.buffers()))).device
            identity = torch.eye(part.in_features, device=device, dtype=self.dtype)
            bias = part(torch.zeros_like(identity[:1]))
            yield (
                f"{prefix}weight",
                torch.cat([part(rows) - bias for rows in torch.split(identity, _ROWS)]).T,
            )
            if getattr(part, "bias", None) is not None:
                yield f"{prefix}bias", bias[0]

    def free_weights(self, kept_layers: int = 0) -> None:
        """Frees the memory of all weights, or with `kept_layers` above 0 of all but the embedding
        and the first `kept_layers` layers."""
        if not kept_layers:
            # quantised ones cannot be moved to the meta device
            for module in self.module.modules():
                module._parameters.clear()
                module._buffers.clear()
            return
        decoder = decoder_of(self.module)
        decoder.layers = decoder.layers[:kept_layers]
        decoder.norm = nn.Identity()
        self.module.lm_head = nn.Identity()


class AttentionMasks:
    """Makes the attention masks of one model, in the form that the model's `forward` takes.

    Most models in transformers take one mask tensor. Models whose layers have different attention
    types (full, sliding window, chunked) take a dictionary with one mask per type. Models with
    ALiBi make their mask themselves: they get None, and cannot run trees. Masks are additive,
    because transformers' eager attention adds any mask to the scores, where a boolean one would
    silently be wrong.
    """

    def __init__(self, module: Any) -> None:
        config = module.config.get_text_config()
        self._has_alibi = bool(getattr(config, "alibi", False)) or config.model_type in (
            "bloom",
            "mpt",
        )
        window = (
            getattr(config, "sliding_window", None)
            if getattr(config, "use_sliding_window", True)
            else None
        )
        types = set(getattr(config, "layer_types", None) or ()) if _takes_mapping(module) else set()
        # they need no masks
        self._recurrent = dict.fromkeys(types & RECURRENT_TYPES and RECURRENT_TYPES)
        types = types - RECURRENT_TYPES | ({"full_attention"} if self._recurrent else set())
        self._windows = {name: window if name == "sliding_attention" else None for name in types}
        self._window = window
        self._chunk = int(getattr(config, "attention_chunk_size", None) or 1)

    def of_pass(
        self, forward_pass: ForwardPass, attention_mask: AttentionMask, dtype: torch.dtype
    ) -> Mask:
        """Returns `attention_mask` in the form that the model takes. Raises SpecgenError for a tree
        with ALiBi."""
        if not self._has_alibi:
            return self(attention_mask, dtype)
        if not forward_pass.is_chain:
            raise SpecgenError(
                "this model's attention uses ALiBi, which cannot run trees",
                "Take a method without draft trees",
            )
        return None

    def __call__(self, attention_mask: AttentionMask, dtype: torch.dtype) -> Mask:
        """Returns the mask [1 or batch, 1, n, keys] for n tokens of one sequence or of several, or
        one mask for each attention type."""
        made = {
            window: attention_mask.additive(window, dtype)
            for window in {*self._windows.values()} or {self._window}
        }
        masks = {each: mask.view(-1, 1, *mask.shape[-2:]) for each, mask in made.items()}
        by_type = {name: masks[each] for name, each in self._windows.items()} | self._recurrent
        if "chunked_attention" in by_type:  # a token sees those of its own chunk alone (Llama 4)
            first = attention_mask.positions // self._chunk * self._chunk
            before = attention_mask.key_positions[..., None, :] < first[..., :, None]
            earlier_chunk = before.view(-1, 1, *before.shape[-2:])
            by_type["chunked_attention"] = masks[None].masked_fill(
                earlier_chunk, torch.finfo(dtype).min
            )
        return by_type or masks[self._window]


def _takes_mapping(model: Any) -> bool:
    """Whether the model takes a dictionary with one mask per attention type. Found in its source
    code: no attribute says so."""
    module = sys.modules[type(model).__module__]
    try:
        return "causal_mask_mapping" in inspect.getsource(module)
    except (OSError, TypeError):
        return False


def _shape(config: Any) -> ModelShape:
    """Returns the sizes of a model from its transformers config; an `Architecture` if the native
    decoder knows the family."""
    fields = json.loads(config.get_text_config().to_json_string(use_diff=False))
    try:
        return read_architecture({**fields, "quantization_config": None})
    except UnsupportedConfig:
        return of_transformers(config)


def decoder_of(module: Any) -> Any:
    """Returns the decoder inside a causal language model (`module.model` for Llama).

    Its attribute name is `base_model_prefix`; None if the model has no such attribute.
    """
    return getattr(module, module.base_model_prefix, None)


def cache_argument(module: nn.Module) -> str:
    """Returns the name of the argument by which a module's `forward` takes the cache."""
    accepted = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in accepted), "past_key_values")


def missing_part(module: Any) -> str | None:
    """Returns the name of a module that running layers one by one needs, as in `LlamaForCausalLM`,
    and that this model lacks.

    None if the model has all of them.
    """
    decoder = decoder_of(module)
    missing = [
        part
        for part in ("embed_tokens", "layers", "norm", "rotary_emb")
        if not hasattr(decoder, part)
    ]
    return next(iter(missing), None if hasattr(module, "lm_head") else "lm_head")


def model_without_weights(config: Any, trust_remote_code: bool) -> Any | None:
    """Returns the model on torch's meta device, so that its structure can be inspected before the
    weights are loaded.

    `config` is transformers' config. Returns None if building the model fails.
    """
    try:
        with quiet_transformers(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception:  # noqa: BLE001  loading the model reports the error
        return None


def _without(layer: nn.Module, call: LayerCall) -> nn.Module:
    """Returns `layer` without its attention or without its MLP, which is replaced by zeros; shares
    all weights with `layer`."""
    if call.attention and call.mlp:
        return layer
    if hasattr(layer, "_hf_hook"):  # a copy of a layer would still call the original
        raise SpecgenError(
            "transformers skips no parts of layers on several devices",
            "Skip whole layers, or take --device cuda",
        )
    reduced = copy.copy(layer)
    name = "mlp" if call.attention else "self_attn"
    if name not in layer._modules:
        raise SpecgenError(
            f"the target's layers have no {name} to skip",
            "Skip whole layers, or take another method",
        )
    reduced._modules = {key: module for key, module in layer._modules.items() if key != name}
    setattr(
        reduced,
        name,
        torch.zeros_like
        if name == "mlp"
        else lambda hidden_states, **_: (torch.zeros_like(hidden_states), None),
    )
    return reduced


def logits_error(
    compute: Callable[[], torch.Tensor], reference: Callable[[], torch.Tensor]
) -> str | None:
    """Compares logits with those of the model's own forward pass. Returns None if they agree.

    `compute()` returns the logits [n, vocabulary] to check, `reference()` those of the model's own
    pass, [n or more, vocabulary], of which the last n are compared. If they differ by more than
    rounding explains, or if computing them fails, returns the end of a message, such as "do not
    give its own logits". NaN in the model's own logits is ignored here, because decoding reports
    damaged weights.
    """
    try:
        logits = compute().float()
        own = reference()
        is_float32 = own.dtype == torch.float32
        own = own[-len(logits) :].float()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"fail ({shorten(str(error), 100, placeholder=' …')})"
    # -inf: a token that the model never predicts
    largest = float(own.nan_to_num(0.0, 0.0, 0.0).abs().max())
    allowed = largest * (_FLOAT32_ERROR if is_float32 else _NARROW_ERROR)
    agree = bool(own.isnan().any()) or torch.allclose(logits, own, rtol=0.0, atol=allowed)
    return None if agree else "do not give its own logits"
