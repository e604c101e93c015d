"""A runner that keeps the hidden states which a trained part reads, one for each token in its KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from specgen.base.types import Context
from specgen.engine.devices import upload
from specgen.engine.forward_pass import ForwardFunction, ForwardPass, ModelOutput
from specgen.engine.inference_mode import inference
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner


class PartRunners(NamedTuple):
    """`target` verifies and keeps the hidden states (or keys and values) that `draft`, the trained part's runner, reads.

    `first` runs the layers that both share, of early exit. `predictor` predicts whether drafted tokens are accepted.
    """

    target: ModelRunner
    draft: Any  # a `DraftRunner` with `reserve` and `clear_cache`
    first: ModelRunner | None = None
    predictor: Any = None  # an `exit_layers.ExitAcceptancePredictor`

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


class KeptRows:
    """A row of numbers for each token in a KV cache, in a buffer `kept` [capacity, width]."""

    def __init__(self) -> None:
        self.kept = torch.empty(0, 0)

    def write(self, first: int, rows: torch.Tensor, capacity: int) -> None:
        """Keeps the rows [n, width] of the tokens `first`, `first` + 1, ... A new buffer has room for `capacity` tokens."""
        end = first + rows.shape[0]
        if end > self.kept.shape[0]:
            larger = rows.new_zeros(max(end, capacity, 2 * self.kept.shape[0]), rows.shape[1])
            if first:
                larger[:first] = self.kept[:first]
            self.kept = larger
        self.kept[first:end] = rows

    def gather(self, indices: Sequence[int], start: int) -> None:
        """Moves the rows of the tokens `indices` to `start`, `start + 1`, ..., as `forward_pass.Cache.gather` moves entries."""
        source = upload(torch.tensor(indices), self.kept.device)
        self.kept[start : start + len(indices)] = self.kept.index_select(0, source)


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
        rows = KeptRows()

        def forward(forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
            output = run(forward_pass, logits_to_keep)
            kept = output.hidden_states if output.features is None else output.features
            assert kept is not None
            rows.write(forward_pass.first, kept if reduce is None else reduce(kept), kv_cache.capacity)
            return output._replace(features=None)  # they are no rows of the logits

        super().__init__(model, penalties, forward, kv_cache)
        self._cached.gathers.append(rows.gather)
        self._rows = rows

    @inference
    def features(self, context: Context) -> torch.Tensor:
        """Returns the features [n - 1, width] of all n tokens of the context but the last. They are valid until the next call.

        Runs the layers on those of these tokens that the KV cache lacks.
        """
        cached, _ = self.share_prefix(context)
        return self._rows.kept[:cached]

    def features_of(self, later: ForwardPass) -> torch.Tensor:
        """Returns the features [n, width] of the n tokens that a pass of the later layers runs, context and draft. They are valid
        until the next call."""
        cached = self._cached
        cached.switch_to(later.context)
        if later.last > cached.committed:  # otherwise all tokens of the pass are cached, and a cached draft can stay
            cached.truncate_for(later.context, later.draft, len(later.draft.tokens) + 1)
            for earlier in cached.missing_passes(later.context, later.draft, later.last):
                self._forward(earlier, earlier.last - earlier.first)
        return self._rows.kept[later.first : later.last]
