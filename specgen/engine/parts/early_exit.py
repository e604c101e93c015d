"""Early exit (EESD, section 3.1): one model drafts for itself, with its first N layers and a trained exit layer.

Target and draft are two model runners on the same model. Both start from the hidden states after layer N, which
`SharedFirstLayers` computes once per token and keeps. So verifying a draft runs only the layers after the first N.
"""

from __future__ import annotations

import torch

from specgen.base.types import Context
from specgen.engine.cached_prefix import CachedPrefix
from specgen.engine.exit_parts import Predictor, check_exit_depth
from specgen.engine.forward_pass import ForwardPass, LayerPart
from specgen.engine.hidden_state_cache import CacheWithHiddenStates
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model import ExitLayers, Model
from specgen.engine.model_runner import ModelRunner


class SharedFirstLayers:
    """Runs the embedding and the first `depth` layers of a model on one sequence, with a KV cache.

    The cache also stores the hidden states after these layers, so they are computed once per token.
    """

    def __init__(self, model: Model, depth: int) -> None:
        self._forward = model.layers_forward([LayerPart(index) for index in range(depth)], with_head=False)
        self._kv_cache = model.new_cache(range(depth))
        self.cache = CacheWithHiddenStates(self._kv_cache)
        self.cached = CachedPrefix(self.cache, model.shape.rope_boundary, exact=model.exact)

    def hidden_states(self, upper: ForwardPass) -> torch.Tensor:
        """Returns the hidden states [n, width] after the first N layers, of the tokens that the forward pass `upper` runs.

        `upper` is a pass of the later layers or of the exit layer. The result is valid until the next call.
        """
        self.cached.switch_to(upper.context)
        if upper.last > self.cached.committed:  # otherwise all tokens of the pass are cached, and a cached draft can stay
            self.cached.truncate_for(upper.context, upper.draft, len(upper.draft.tokens) + 1)
            for lower in self.cached.missing_passes(upper.context, upper.draft, upper.last):
                output = self._forward(lower._replace(cache=self._kv_cache), lower.last - lower.first)
                assert output.hidden_states is not None
                self.cache.write_hidden(lower.first, output.hidden_states)
        return self.cache.hidden(upper.first, upper.last)


class EarlyExit:
    """Two runners on one model, whose exit layer comes after the first `depth` layers: `draft` proposes, `target` verifies.

    `predictor` predicts the acceptance of drafted tokens; None if none was trained. `penalties` are the penalties on the logits
    of target and draft (None: none). Raises SpecgenError for a model whose layers cannot be run one by one, and for a
    depth that leaves no layers before or after the exit.
    """

    def __init__(
        self,
        model: Model,
        exit_layer: ExitLayers,
        depth: int,
        predictor: Predictor | None = None,
        *,
        penalties: tuple[PenaltyProcessor | None, PenaltyProcessor | None] = (None, None),
    ) -> None:
        model.check_layers("early exit")
        check_exit_depth(model.shape.num_layers, depth)
        self._first_layers = SharedFirstLayers(model, depth)
        source, later = self._first_layers.hidden_states, range(depth, model.shape.num_layers)
        verify = model.layers_forward([LayerPart(index) for index in later], source)
        self.target = ModelRunner(model, penalties[0], verify, model.new_cache(later))
        self.draft = ModelRunner(model, penalties[1], exit_layer.forward(source), exit_layer.new_cache())
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
