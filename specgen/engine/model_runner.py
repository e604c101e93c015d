"""One model and one sequence: say which tokens you want logits for, and the session keeps what it can of its cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from specgen.engine.cached_prefix import NONE, CachedPrefix, ForwardRange, TreeNodes, chain
from specgen.engine.forward_inputs import ForwardInputs, Mask
from specgen.engine.inference_mode import inference
from specgen.engine.kv_cache import KVCache
from specgen.types import Context


class ModelOutput(NamedTuple):
    """`logits` [rows, vocabulary] in the model's dtype; valid until the session's next call.

    `hidden` [rows, width] is what the head made them from, where the session is one of early exit's.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class ForwardFunction(Protocol):
    """The layers of a session and what stands before and behind them."""

    def __call__(self, span: ForwardRange, positions: torch.Tensor, mask: Mask, cache: KVCache, keep: int) -> ModelOutput:
        """Run the span behind what the cache holds; `positions` [n] are its slots'. The last `keep` rows."""
        ...


class LogitsProcessor(Protocol):
    """What a model's generation config does to its logits (penalties), seen per row."""

    def __call__(
        self, logits: torch.Tensor, context: Context, tokens: Sequence[int], parents: Sequence[int], start: int
    ) -> torch.Tensor: ...


class FullModelForward:
    """A causal language model as it was loaded, fed with token ids."""

    def __init__(self, model: Any) -> None:
        known = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in known
        self._takes_keep = "logits_to_keep" in known
        self._model = model
        self._device = model.device

    def __call__(self, span: ForwardRange, positions: torch.Tensor, mask: Mask, cache: KVCache, keep: int) -> ModelOutput:
        options: dict[str, Any] = {}
        if self._takes_positions:
            options["position_ids"] = positions[None]
        if self._takes_keep:
            options["logits_to_keep"] = keep
        output = self._model(
            input_ids=torch.tensor([span.ids], device=self._device),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **options,
        )
        return ModelOutput(output.logits[0][-keep:])


class SharedCachePrefix(NamedTuple):
    """A session's cache, to be written behind its first `committed` slots until the session's next pass, which ends the loan
    of that `number`."""

    cache: KVCache
    committed: int
    number: int


class DraftRunner(Protocol):
    """What a drafter asks: a session, or a part of one that answers as a session does."""

    context_limit: int
    known_ids: int
    vocab_size: int
    device: torch.device

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        """As `ModelRunner.logits`."""
        ...


class ModelRunner:
    """The only code that touches a cache. Callers never roll back: the cache is addressed by its content.

    A session may be called with any context at any time. An interrupted call leaves it usable. `body` is what runs, where that
    is not the whole `model`.
    """

    def __init__(
        self,
        model: Any,
        context_limit: int,
        rope_boundary: int | None = None,
        reshaping: LogitsProcessor | None = None,
        body: ForwardFunction | None = None,
    ) -> None:
        self.context_limit = context_limit
        self.known_ids: int = model.get_input_embeddings().weight.shape[0]
        head = model.get_output_embeddings()
        self.vocab_size: int = self.known_ids if head is None else head.weight.shape[0]
        self.device: torch.device = model.device
        self._body = FullModelForward(model) if body is None else body
        self._reshaping = reshaping
        self._geometry = ForwardInputs(model)
        self._cache = KVCache(model.config.get_text_config().num_hidden_layers)
        self._slots = CachedPrefix(self._cache, self.device, rope_boundary)
        self._hidden: tuple[int, torch.Tensor] | None = None
        self._passes = 0

    def forget(self) -> None:
        """Drop all that is cached, so that the next call pays for its whole context: for measurements."""
        self._slots.forget()
        self._hidden = None
        self._passes += 1  # what was lent is forgotten too

    def reserve(self, capacity: int) -> None:
        """Announce how many tokens will be cached, so that the buffers are made once."""
        self._cache.capacity = max(self._cache.capacity, capacity)

    @inference
    def logits(
        self,
        context: Context,
        draft: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> ModelOutput:
        """The rows after the last context token (row 0) and after each draft token (rows 1, 2, ...), from row `start` on.

        Keeps the longest cached prefix of `context` (along the matching path of the last draft tree) and, of the draft, what
        stands before row `start` and is unchanged; runs the model once on what is missing. `parents` are those of a tree
        (each node behind its parent, -1 the context), None or a range for a chain.
        """
        tokens = list(draft)
        line = chain(len(tokens))
        is_chain = parents is None or isinstance(parents, range) or list(parents) == list(line)
        nodes = TreeNodes(tokens, line if is_chain or parents is None else list(parents))
        slots = self._slots
        slots.keep(context, nodes, start)
        while len(context) - slots.committed > (size := slots.chunk(context)):
            self._run(ForwardRange(context, NONE, slots.committed, slots.committed + size), keep=1)
            slots.advance(slots.committed + size)
        span = ForwardRange(context, nodes, slots.filled, len(context) + len(tokens))
        rows = self._run(span, keep=len(tokens) + 1 - start)
        slots.advance(len(context), nodes)
        self._hidden = None if rows.hidden is None else (start, rows.hidden)
        if self._reshaping is not None:
            rows = rows._replace(logits=self._reshaping(rows.logits, context, tokens, nodes.parents, start))
        return rows

    def lend(self, context: Context) -> SharedCachePrefix:
        """The cache with all of `context` but its last token in it, for rows of somebody else's behind them."""
        slots = self._slots
        slots.follow(context)
        if slots.committed < len(context) - 1:
            self.logits(context)
        slots.lend(len(context) - 1)
        self._hidden = None
        return SharedCachePrefix(self._cache, slots.committed, self._passes)

    def producing_row(self, context: Context) -> torch.Tensor | None:
        """The hidden row [width] of the last call that the context's last token was chosen by; None where it was not."""
        row = self._slots.row_before_last(context)
        if row is None or self._hidden is None or row < self._hidden[0]:
            return None
        start, hidden = self._hidden
        return hidden[row - start]

    def _run(self, span: ForwardRange, keep: int) -> ModelOutput:
        """One pass over the span, written behind what is cached. Its last `keep` rows."""
        positions, mask = self._geometry(span, self._cache.capacity)
        self._passes += 1
        self._cache.length = span.first
        return self._body(span, positions, mask, self._cache, keep)
