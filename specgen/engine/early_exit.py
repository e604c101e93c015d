"""Early exit (EESD, section 3.1): one model drafts for itself, with its first N layers and a trained exit layer.

Target and draft are two runners on one model. Both take their input from `SharedFirstLayers`, which runs the first N layers once
per token and keeps the hidden states: verifying a draft runs only the layers after N on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specgen.engine.attention_masks import Mask
from specgen.engine.cached_prefix import NO_NODES, CachedPrefix, ForwardRange
from specgen.engine.decoder_layers import DecoderLayers, check_exit_depth, check_llama_structure, decoder_of, layer_types
from specgen.engine.exit_layer import ExitLayer, Predictor
from specgen.engine.forward_inputs import ForwardInputs
from specgen.engine.kv_cache import HiddenStateBuffer, KVCache
from specgen.engine.model_runner import LogitsProcessor, ModelOutput, ModelRunner
from specgen.types import Context


class SharedFirstLayers:
    """Embedding and the first `depth` layers of a model on one sequence, with a KV cache that holds the hidden states, too."""

    def __init__(self, model: Any, depth: int, rope_boundary: int | None) -> None:
        decoder = decoder_of(model)
        self.device: torch.device = model.device
        self.rotary = decoder.rotary_emb
        self._embed = decoder.embed_tokens
        self._layers = DecoderLayers(decoder.layers[:depth], layer_types(model)[:depth], nn.Identity(), nn.Identity())
        self._inputs = ForwardInputs(model)
        self.cache = KVCache(depth)
        self._hidden = HiddenStateBuffer(self.cache)
        self.cache.layers.append(self._hidden)  # so that the cache gathers it with its layers
        self._cached = CachedPrefix(self.cache, self.device, rope_boundary)

    def forget(self) -> None:
        """Drop everything cached."""
        self._cached.clear()

    def hidden_states(self, forward_range: ForwardRange) -> torch.Tensor:
        """The hidden states [1, n, width] of the range's tokens after layer N, valid until the next call."""
        context, draft, first, last = forward_range
        cached = self._cached
        cached.switch_to(context)
        if last <= cached.committed:  # a chunk of a prompt; the cached draft need not be dropped
            return self._hidden.view(first, last)
        cached.truncate_for(context, draft, len(draft.tokens) + 1)
        while cached.committed < last and len(context) - cached.committed > (size := cached.chunk_size(context)):
            self._run(ForwardRange(context, NO_NODES, cached.committed, cached.committed + size))
            cached.set_cached(cached.committed + size)
        if cached.length < last:
            self._run(ForwardRange(context, draft, cached.length, len(context) + len(draft.tokens)))
            cached.set_cached(len(context), draft)
        return self._hidden.view(first, last)

    def _run(self, forward_range: ForwardRange) -> None:
        positions, mask = self._inputs.prepare(forward_range, self.cache)
        embeddings = self._embed(torch.tensor([forward_range.token_ids], device=self.device))
        self._hidden.write(self._layers.run_layers(embeddings, self.rotary(embeddings, positions[None]), mask, self.cache))


class UpperLayersForward:
    """The forward function of the layers after layer N: the target's other layers, or an exit layer."""

    def __init__(self, first_layers: SharedFirstLayers, layers: DecoderLayers) -> None:
        self._first_layers, self._layers = first_layers, layers

    def __call__(
        self, forward_range: ForwardRange, positions: torch.Tensor, mask: Mask, cache: KVCache, logits_to_keep: int
    ) -> ModelOutput:
        hidden_states = self._first_layers.hidden_states(forward_range)
        rotary = self._first_layers.rotary(hidden_states, positions[None])
        output = self._layers(hidden_states, rotary, mask, cache, logits_to_keep=logits_to_keep)
        return ModelOutput(output.logits[0], output.hidden_states[0])


class EarlyExit:
    """The two runners of a target with an exit layer after its first `depth` layers: `draft` proposes, `target` verifies.

    `context_limits` are the context limit and the rope boundary, in tokens; `logits_processors` those of target and draft.
    Raises SpecgenError for a model without Llama's structure and for a depth that leaves no layers on one side.
    """

    def __init__(
        self,
        model: Any,
        exit_layer: ExitLayer,
        depth: int,
        predictor: Predictor | None = None,
        *,
        context_limits: tuple[int, int | None],
        logits_processors: tuple[LogitsProcessor | None, LogitsProcessor | None] = (None, None),
    ) -> None:
        check_llama_structure(model)
        check_exit_depth(model, depth)
        limit, rope_boundary = context_limits
        self._first_layers = SharedFirstLayers(model, depth, rope_boundary)
        self.target, self.draft = (
            ModelRunner(model, limit, rope_boundary, processor, UpperLayersForward(self._first_layers, layers))
            for processor, layers in zip(logits_processors, (DecoderLayers.upper(model, depth), exit_layer), strict=True)
        )
        self.acceptance_predictor = None if predictor is None else ExitAcceptancePredictor(self.target, predictor)

    def reserve(self, capacity: int) -> None:
        """As `ModelRunner.reserve`."""
        self._first_layers.cache.capacity = max(self._first_layers.cache.capacity, capacity)
        for runner in (self.target, self.draft):
            runner.reserve(capacity)

    def forget(self) -> None:
        """Drop everything cached."""
        for part in (self._first_layers, self.target, self.draft):
            part.forget()


class ExitAcceptancePredictor:
    """Predicts each drafted token's acceptance (theta_M of EESD, Eq. 5) from the hidden states of the current run."""

    def __init__(self, target: ModelRunner, predictor: Predictor) -> None:
        self._target, self._predictor = target, predictor
        self._offsets = torch.zeros(predictor.POSITIONS, device=target.device)

    def begin(self, context: Context) -> None:
        """Start a draft after `context`: compute what the target's hidden state adds at each of its positions."""
        hidden = self._target.last_hidden_state(context)
        if hidden is None:  # not in a run, where the target has just predicted the context's last token
            hidden = torch.zeros_like(self._predictor.draft_weights)
        self._offsets = self._predictor.offsets(hidden)

    def score(self, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        """The predicted acceptance, a scalar, of the token at `position` (from 1) predicted by the hidden state [width]."""
        return self._predictor.score(self._offsets, draft_hidden, position)
