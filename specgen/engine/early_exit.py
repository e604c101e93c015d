"""Early exit (EESD, section 3.1): one model drafts for itself, through its first N layers and a trained exit layer.

Two sessions over one model. Both ask a third for hidden rows at layer N, which runs the first layers once for every token and
keeps what it computed: so what was drafted is verified from layer N on, and only the last drafted token is new to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from specgen.engine.cached_prefix import NONE, CachedPrefix, ForwardRange
from specgen.engine.exit_layer import ExitLayer, Predictor, check_split, decoder_of, layer_kinds
from specgen.engine.forward_inputs import ForwardInputs, Mask
from specgen.engine.kv_cache import HiddenStateBuffer, KVCache
from specgen.engine.model_runner import LogitsProcessor, ModelOutput, ModelRunner
from specgen.errors import SpecgenError


class SharedFirstLayers:
    """Embedding and layers 1 to N of a model on one sequence, with their cache, in which the hidden rows stand too."""

    def __init__(self, model: Any, count: int, rope_boundary: int | None) -> None:
        decoder = decoder_of(model)
        self.device: torch.device = model.device
        self.rotary = decoder.rotary_emb
        self._embed = decoder.embed_tokens
        self._layers = ExitLayer(decoder.layers[:count], layer_kinds(model)[:count], nn.Identity(), nn.Identity(), None)
        self._geometry = ForwardInputs(model)
        self.cache = KVCache(count)
        self._hidden = HiddenStateBuffer(self.cache)
        self.cache.layers.append(self._hidden)  # gathered with the others
        self._slots = CachedPrefix(self.cache, self.device, rope_boundary)

    def forget(self) -> None:
        self._slots.forget()

    def hidden(self, span: ForwardRange) -> torch.Tensor:
        """The hidden rows [1, n, width] of the span's tokens at layer N, run now or kept; valid until the next call."""
        context, draft = span.context, span.draft
        slots = self._slots
        slots.follow(context)
        if span.last <= slots.committed:  # a chunk of a prompt: a draft behind it may stay
            return self._hidden.rows(span.first, span.last)
        slots.keep(context, draft, len(draft.tokens) + 1)
        while slots.committed < span.last and len(context) - slots.committed > (size := slots.chunk(context)):
            self._run(ForwardRange(context, NONE, slots.committed, slots.committed + size))
            slots.advance(slots.committed + size)
        if slots.filled < span.last:
            whole = ForwardRange(context, draft, slots.filled, len(context) + len(draft.tokens))
            self._run(whole)
            slots.advance(len(context), draft)
        return self._hidden.rows(span.first, span.last)

    def _run(self, span: ForwardRange) -> None:
        positions, mask = self._geometry(span, self.cache.capacity)
        self.cache.length = span.first
        embedded = self._embed(torch.tensor([span.ids], device=self.device))
        rows = self._layers(embedded, self.rotary(embedded, positions[None]), mask, self.cache).hidden
        self._hidden.write(rows)


class UpperLayersForward:
    """The body of a session that begins at layer N: the target's other layers, or an exit layer."""

    def __init__(self, first: SharedFirstLayers, layers: ExitLayer) -> None:
        self._first, self._layers = first, layers

    def __call__(self, span: ForwardRange, positions: torch.Tensor, mask: Mask, cache: KVCache, keep: int) -> ModelOutput:
        hidden = self._first.hidden(span)
        rows = self._layers(hidden, self._first.rotary(hidden, positions[None]), mask, cache, keep=keep)
        return ModelOutput(rows.logits[0], rows.hidden[0])


class EarlyExit:
    """The two sessions of a target with an exit behind its layer `after`: `target` verifies what `draft` proposes.

    Raises SpecgenError for models that are not built as Llama is.
    """

    def __init__(
        self,
        model: Any,
        layer: ExitLayer,
        after: int,
        predictor: Predictor | None = None,
        *,
        context_limits: tuple[int, int | None],
        reshaping: tuple[LogitsProcessor | None, LogitsProcessor | None] = (None, None),
    ) -> None:
        check_split(model)
        decoder, kinds = decoder_of(model), layer_kinds(model)
        if not 1 <= after < len(decoder.layers):
            raise SpecgenError(
                f"the exit layer stands behind layer {after} of {len(decoder.layers)}",
                f"It has to stand behind one of the layers 1 to {len(decoder.layers) - 1}",
            )
        limit, boundary = context_limits
        self._first = SharedFirstLayers(model, after, boundary)
        last = ExitLayer(decoder.layers[after:], kinds[after:], decoder.norm, model.lm_head, model.config.get_text_config())
        self.target, self.draft = (
            ModelRunner(model, limit, boundary, own, UpperLayersForward(self._first, layers))
            for own, layers in zip(reshaping, (last, layer), strict=True)
        )
        self.acceptance_predictor = None if predictor is None else ExitAcceptancePredictor(self.target, predictor)

    def reserve(self, capacity: int) -> None:
        """Announce how many tokens will be cached, so that the buffers are made once."""
        self._first.cache.capacity = max(self._first.cache.capacity, capacity)
        for runner in (self.target, self.draft):
            runner.reserve(capacity)

    def forget(self) -> None:
        """Drop all that is cached."""
        self._first.forget()
        for runner in (self.target, self.draft):
            runner.forget()


class ExitAcceptancePredictor:
    """Cali-TS's model prediction theta_M (EESD, Eq. 5), at the cost of one product a drafted token."""

    def __init__(self, target: ModelRunner, predictor: Predictor) -> None:
        self._target, self._predictor = target, predictor
        self._offsets = torch.zeros(predictor.PLACES, device=target.device)

    def begin(self, context: Any) -> None:
        """Look up what the target's row that the context's last token came from contributes to a draft's every place."""
        row = self._target.producing_row(context)
        if row is None:  # no run asks for this: its target has just been at this context's end
            self._offsets = self._predictor.offsets(torch.zeros_like(self._predictor.draft_weights))
        else:
            self._offsets = self._predictor.offsets(row)

    def score(self, draft_row: torch.Tensor, position: int) -> torch.Tensor:
        """How likely the target agrees with the token at `place` (from 1), drawn from the hidden row [width]: a scalar."""
        return self._predictor.score(self._offsets, draft_row, position)
