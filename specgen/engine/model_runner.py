"""Runs one model on one sequence with a KV cache that is addressed by content: callers name a sequence and get its logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from specgen.engine.attention_masks import Mask
from specgen.engine.cached_prefix import NO_NODES, CachedPrefix, ForwardRange, TreeNodes, chain_parents
from specgen.engine.forward_inputs import ForwardInputs
from specgen.engine.inference_mode import inference
from specgen.engine.kv_cache import KVCache
from specgen.types import Context


class ModelOutput(NamedTuple):
    """`logits` [n, vocabulary] in the model's dtype, valid until the runner's next call.

    `hidden_states` [n, width] are the LM head's inputs; None unless the runner is one of early exit's.
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor | None = None


# A model or a part of it, called with the range, its positions [n], mask, KV cache (which it writes to) and `logits_to_keep`.
ForwardFunction = Callable[[ForwardRange, torch.Tensor, Mask, KVCache, int], ModelOutput]


class LogitsProcessor(Protocol):
    """Changes logits as the model's generation config asks for (repetition penalty, forbidden tokens, ...)."""

    def __call__(
        self, logits: torch.Tensor, context: Context, tokens: Sequence[int], parents: Sequence[int], start: int
    ) -> torch.Tensor:
        """Process logits [n, vocabulary] with the indices `start`, `start + 1`, ... as `ModelRunner.logits` numbers them."""
        ...


class FullModelForward:
    """The forward function of a causal language model as transformers loads it."""

    def __init__(self, model: Any) -> None:
        accepted = inspect.signature(model.forward).parameters
        self._options = [name for name in ("position_ids", "logits_to_keep") if name in accepted]
        self._model = model
        self._device = model.device

    def __call__(
        self, forward_range: ForwardRange, positions: torch.Tensor, mask: Mask, cache: KVCache, logits_to_keep: int
    ) -> ModelOutput:
        options = {"position_ids": positions[None], "logits_to_keep": logits_to_keep}
        output = self._model(
            input_ids=torch.tensor([forward_range.token_ids], device=self._device),
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **{name: options[name] for name in self._options},
        )
        return ModelOutput(output.logits[0][-logits_to_keep:])


class SharedCachePrefix(NamedTuple):
    """A runner's cache, to be written after its first `committed` tokens until the runner's `forward_count` changes."""

    cache: KVCache
    committed: int
    forward_count: int


class DraftRunner(Protocol):
    """What a drafter needs of a model runner. `num_embeddings` is how many token ids the model has embeddings for."""

    context_limit: int
    num_embeddings: int
    vocab_size: int
    device: torch.device

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        """As `ModelRunner.logits`."""
        ...


class ModelRunner:
    """Runs a model on any context and draft, reusing what its KV cache holds of them; callers never roll back.

    Calls may change the context at any time, and an interrupted call leaves the runner usable. `context_limit` is in tokens;
    at `rope_boundary` tokens the model's rotary frequencies change (None: never); `forward` replaces the model's own.
    """

    def __init__(
        self,
        model: Any,
        context_limit: int,
        rope_boundary: int | None = None,
        logits_processor: LogitsProcessor | None = None,
        forward: ForwardFunction | None = None,
    ) -> None:
        self.context_limit = context_limit
        self.num_embeddings: int = model.get_input_embeddings().weight.shape[0]
        head = model.get_output_embeddings()
        self.vocab_size: int = self.num_embeddings if head is None else head.weight.shape[0]
        self.device: torch.device = model.device
        self._forward = FullModelForward(model) if forward is None else forward
        self._logits_processor = logits_processor
        self._inputs = ForwardInputs(model)
        self._cache = KVCache(model.config.get_text_config().num_hidden_layers)
        self._cached = CachedPrefix(self._cache, self.device, rope_boundary)
        self._hidden: tuple[int, torch.Tensor] | None = None  # the last call's `start` and hidden states
        self._forward_count = 0

    def forget(self) -> None:
        """Drop everything cached, so that the next call runs its whole context: for measurements."""
        self._cached.clear()
        self._hidden = None
        self._forward_count += 1  # ends a shared prefix, too

    def reserve(self, capacity: int) -> None:
        """Allocate buffers for at least `capacity` tokens at the next allocation, so that they need not grow."""
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
        """The logits after the last context token (index 0) and after each draft token (index 1, 2, ...), from index `start` on.

        `parents` are the indices of a tree's parent nodes, each lower than its child's (-1: the context); None or a range for a
        chain. Reuses the longest cached prefix of `context`, along the matching path of the last draft, and of the draft the
        unchanged tokens before index `start`. Runs the model once on the rest.
        """
        tokens = list(draft)
        chain = chain_parents(len(tokens))
        is_chain = parents is None or isinstance(parents, range) or list(parents) == list(chain)
        nodes = TreeNodes(tokens, chain if is_chain or parents is None else list(parents))
        cached = self._cached
        cached.truncate_for(context, nodes, start)
        while len(context) - cached.committed > (size := cached.chunk_size(context)):
            self._run(ForwardRange(context, NO_NODES, cached.committed, cached.committed + size), logits_to_keep=1)
            cached.set_cached(cached.committed + size)
        forward_range = ForwardRange(context, nodes, cached.length, len(context) + len(tokens))
        output = self._run(forward_range, logits_to_keep=len(tokens) + 1 - start)
        cached.set_cached(len(context), nodes)
        self._hidden = None if output.hidden_states is None else (start, output.hidden_states)
        if self._logits_processor is not None:
            processed = self._logits_processor(output.logits, context, tokens, nodes.parents, start)
            output = output._replace(logits=processed)
        return output

    def share_prefix(self, context: Context) -> SharedCachePrefix:
        """Cache all of `context` but its last token, and lend the cache to be written after that."""
        cached = self._cached
        cached.switch_to(context)
        if cached.committed < len(context) - 1:
            self.logits(context)
        cached.truncate(len(context) - 1)
        self._hidden = None
        return SharedCachePrefix(self._cache, cached.committed, self._forward_count)

    def last_hidden_state(self, context: Context) -> torch.Tensor | None:
        """The hidden state [width] of the last call that predicted the context's last token; None if that call did not."""
        index = self._cached.last_logits_index(context)
        if index is None or self._hidden is None or index < self._hidden[0]:
            return None
        start, hidden_states = self._hidden
        return hidden_states[index - start]

    def _run(self, forward_range: ForwardRange, logits_to_keep: int) -> ModelOutput:
        """One forward pass, written to the cache from index `forward_range.first` on."""
        positions, mask = self._inputs.prepare(forward_range, self._cache)
        self._forward_count += 1
        return self._forward(forward_range, positions, mask, self._cache, logits_to_keep)
