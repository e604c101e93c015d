"""A runner that keeps the hidden states which a trained part reads, one for each token in its KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from specgen.base.types import Context
from specgen.engine.forward_pass import ForwardFunction, ForwardPass, ModelOutput
from specgen.engine.hidden_state_cache import CacheWithHiddenStates
from specgen.engine.inference_mode import inference
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner
from specgen.engine.parts.acceptance import ExitAcceptancePredictor


class PartRunners(NamedTuple):
    """`target` verifies and keeps the hidden states (or keys and values) that `draft`, the trained part's runner, reads.

    `first` runs the layers that both share, of early exit. `predictor` predicts whether drafted tokens are accepted.
    """

    target: ModelRunner
    draft: Any  # a `DraftRunner` with `reserve` and `clear_cache`
    first: ModelRunner | None = None
    predictor: ExitAcceptancePredictor | None = None

    def reserve(self, capacity: int) -> None:
        """Makes all buffers large enough for `capacity` tokens."""
        for runner in self[:3]:
            if runner is not None:
                runner.reserve(capacity)

    def clear_cache(self) -> None:
        """Drops all that was computed, so that the next call runs its whole context. For measurements."""
        for runner in self[:3]:
            if runner is not None:
                runner.clear_cache()


class FeatureRunner(ModelRunner):
    """Runs the layers of `run` with the KV cache `kv_cache`, and keeps each token's features: `features` or else `hidden_states`
    of the output.

    `reduce` turns the features [n, ...] of a pass into what is kept of them (None: all).
    """

    def __init__(
        self,
        model: Model,
        run: ForwardFunction,
        kv_cache: Any,
        penalties: PenaltyProcessor | None = None,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        cache = CacheWithHiddenStates(kv_cache)

        def forward(forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
            output = run(forward_pass._replace(cache=kv_cache), logits_to_keep)
            kept = output.hidden_states if output.features is None else output.features
            assert kept is not None
            cache.write_hidden(forward_pass.first, kept if reduce is None else reduce(kept))
            return output._replace(features=None)  # they are no rows of the logits

        super().__init__(model, penalties, forward, cache)
        self._states = cache

    @inference
    def features(self, context: Context) -> torch.Tensor:
        """Returns the features [n - 1, width] of all n tokens of the context but the last. They are valid until the next call.

        Runs the layers on those of these tokens that the KV cache lacks.
        """
        cached, _ = self.share_prefix(context)
        return self._states.hidden(0, cached)

    def features_of(self, later: ForwardPass) -> torch.Tensor:
        """Returns the features [n, width] of the n tokens that a pass of the later layers runs, context and draft. They are valid
        until the next call."""
        cached = self._cached
        cached.switch_to(later.context)
        if later.last > cached.committed:  # otherwise all tokens of the pass are cached, and a cached draft can stay
            cached.truncate_for(later.context, later.draft, len(later.draft.tokens) + 1)
            for earlier in cached.missing_passes(later.context, later.draft, later.last):
                self._forward(earlier, earlier.last - earlier.first)
        return self._states.hidden(later.first, later.last)
