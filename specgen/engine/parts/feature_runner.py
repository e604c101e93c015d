"""A target's runner that keeps the hidden states which a head reads, one for each token in its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specgen.base.types import Context
from specgen.engine.forward_pass import ForwardPass, ModelOutput
from specgen.engine.hidden_state_cache import CacheWithHiddenStates
from specgen.engine.inference_mode import inference
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner


class FeatureRunner(ModelRunner):
    """Runs the whole target, and keeps of each token the hidden states that `taps` name: its features.

    `taps` are as for `Model.feature_forward`. `reduce` turns the features [n, len(taps) * width] of a pass into what is kept of
    them (None: all). Raises SpecgenError if the model's layers cannot be run one by one.
    """

    def __init__(
        self,
        model: Model,
        taps: Sequence[int],
        penalties: PenaltyProcessor | None = None,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        kv_cache = model.new_cache()
        cache, run = CacheWithHiddenStates(kv_cache), model.feature_forward(taps)

        def forward(forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
            output = run(forward_pass._replace(cache=kv_cache), logits_to_keep)
            assert output.features is not None
            cache.write_hidden(forward_pass.first, output.features if reduce is None else reduce(output.features))
            return output._replace(features=None)  # they are no rows of the logits

        super().__init__(model, penalties, forward, cache)
        self._states = cache

    @inference
    def features(self, context: Context) -> torch.Tensor:
        """Returns the features [n - 1, width] of all n tokens of the context but the last. They are valid until the next call.

        Runs the target on those of these tokens that its KV cache lacks.
        """
        cached, _ = self.share_prefix(context)
        return self._states.hidden(0, cached)
