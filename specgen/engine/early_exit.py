"""Early exit (EESD, section 3.1): one model drafts for itself, with its first N layers and a trained exit layer.

Target and draft are two model runners on the same model. Both start from the hidden states after layer N, which
`SharedFirstLayers` computes once per token and keeps. So verifying a draft runs only the layers after the first N.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specgen.engine.cached_prefix import CachedPrefix, ForwardPass
from specgen.engine.decoder_layers import (
    DecoderLayers,
    LayersForward,
    check_exit_depth,
    check_llama_structure,
    decoder_of,
    layer_types,
)
from specgen.engine.exit_layer import ExitLayer, Predictor
from specgen.engine.kv_cache import KVCache, KVCacheLayer
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model_runner import ModelRunner
from specgen.types import Context


class SharedFirstLayers:
    """Runs the embedding and the first `depth` layers of a model on one sequence, with a KV cache.

    The cache also stores the hidden states after these layers, so they are computed once per token.
    """

    def __init__(self, model: Any, depth: int) -> None:
        layers, types = decoder_of(model).layers[:depth], layer_types(model)[:depth]
        self._forward = LayersForward(model, DecoderLayers(layers, types, nn.Identity(), nn.Identity()))
        self.cache = KVCache(depth)
        self._hidden = KVCacheLayer(self.cache)  # keys [1, 1, capacity, width]: the hidden states; values of width 0
        self.cache.layers.append(self._hidden)  # so that the cache gathers it with its layers
        self.cached = CachedPrefix(model, self.cache)

    def hidden_states(self, upper: ForwardPass) -> torch.Tensor:
        """Returns the hidden states [1, n, width] after the first N layers, of the tokens that the forward pass `upper` runs.

        `upper` is a pass of the later layers or of the exit layer. The result is valid until the next call.
        """
        self.cached.switch_to(upper.context)
        if upper.last > self.cached.committed:  # otherwise all tokens of the pass are cached, and a cached draft can stay
            self.cached.truncate_for(upper.context, upper.draft, len(upper.draft.tokens) + 1)
            for lower in self.cached.missing_passes(upper.context, upper.draft, upper.last):
                hidden_states = self._forward(lower, lower.last - lower.first).logits[None, None]
                self._hidden.update(hidden_states, hidden_states[..., :0])
        hidden: torch.Tensor = self._hidden.keys[:, 0, upper.first : upper.last]
        return hidden


class EarlyExit:
    """Two runners on one model, whose exit layer comes after the first `depth` layers: `draft` proposes, `target` verifies.

    `predictor` predicts the acceptance of drafted tokens; None if none was trained. `penalties` are the penalties on the logits
    of target and draft (None: none). Raises SpecgenError for a model without Llama's structure (`decoder_layers`), and for a
    depth that leaves no layers before or after the exit.
    """

    def __init__(
        self,
        model: Any,
        exit_layer: ExitLayer,
        depth: int,
        predictor: Predictor | None = None,
        *,
        penalties: tuple[PenaltyProcessor | None, PenaltyProcessor | None] = (None, None),
    ) -> None:
        check_llama_structure(model)
        check_exit_depth(model, depth)
        self._first_layers = SharedFirstLayers(model, depth)
        self.target, self.draft = (
            ModelRunner(model, processor, LayersForward(model, layers, self._first_layers.hidden_states))
            for processor, layers in zip(penalties, (DecoderLayers.upper(model, depth), exit_layer), strict=True)
        )
        self.acceptance_predictor = None if predictor is None else ExitAcceptancePredictor(self.target, predictor)

    def reserve(self, capacity: int) -> None:
        """Makes all KV caches' next buffers large enough for `capacity` tokens."""
        self._first_layers.cache.capacity = max(self._first_layers.cache.capacity, capacity)
        for runner in (self.target, self.draft):
            runner.reserve(capacity)

    def clear_cache(self) -> None:
        """Empties the KV caches of both runners and of the shared layers."""
        self._first_layers.cached.clear()
        for runner in (self.target, self.draft):
            runner.clear_cache()


class ExitAcceptancePredictor:
    """Predicts the probability that a drafted token is accepted: theta_M of EESD, Eq. 5.

    The inputs are the target's hidden state before the draft and the exit layer's hidden state at the drafted token.
    """

    def __init__(self, target: ModelRunner, predictor: Predictor) -> None:
        self._target, self._predictor = target, predictor
        self._offsets = torch.zeros(predictor.POSITIONS, device=target.device)

    def begin(self, context: Context) -> None:
        """Starts a draft after `context`: computes the part of the prediction that depends only on the target's hidden state."""
        hidden = self._target.last_hidden_state(context)
        if hidden is None:  # only outside of decoding: while decoding, the target has just predicted the context's last token
            hidden = torch.zeros_like(self._predictor.draft_weights)
        self._offsets = self._predictor.offsets(hidden)

    def score(self, draft_hidden: torch.Tensor, position: int) -> torch.Tensor:
        """Returns the predicted acceptance probability, a scalar tensor, of the token at `position` of the draft (from 1).

        `draft_hidden` [width] is the exit layer's hidden state from which this token was predicted.
        """
        return self._predictor.score(self._offsets, draft_hidden, position)
