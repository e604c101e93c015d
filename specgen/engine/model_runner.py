"""Runs one model on one sequence with a KV cache that is addressed by content: callers name a sequence and get its logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from specgen.engine.cached_prefix import CachedPrefix, ForwardPass, TreeNodes, chain_parents, context_limits
from specgen.engine.inference_mode import inference
from specgen.engine.kv_cache import KVCache
from specgen.engine.logits_processors import PenaltyProcessor
from specgen.types import Context

_LIKELIHOOD_CHUNK = 512  # tokens whose logits are in memory at once


class ModelOutput(NamedTuple):
    """`logits` [n, vocabulary] in the model's dtype, valid until the runner's next call.

    `hidden_states` [n, width] are the LM head's inputs; None from runners that run the whole model.
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor | None = None


ForwardFunction = Callable[[ForwardPass, int], ModelOutput]
"""Runs a model or a part of it; returns the output of the last tokens, as many as its second argument says."""


class FullModelForward:
    """The forward function of a causal language model as transformers loads it."""

    def __init__(self, model: Any) -> None:
        accepted = inspect.signature(model.forward).parameters
        self._options = [name for name in ("position_ids", "logits_to_keep") if name in accepted]
        self._model = model

    def __call__(self, forward_pass: ForwardPass, logits_to_keep: int) -> ModelOutput:
        options = {"position_ids": forward_pass.positions[None], "logits_to_keep": logits_to_keep}
        output = self._model(
            input_ids=forward_pass.input_ids,
            attention_mask=forward_pass.mask,
            past_key_values=forward_pass.cache,
            use_cache=True,
            **{name: options[name] for name in self._options},
        )
        return ModelOutput(output.logits[0][-logits_to_keep:])


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

    Calls may change the context at any time, and an interrupted call leaves the runner usable. `forward` replaces the model's own
    forward function, and `cache` is another runner's KV cache to share. `context_limit` is in tokens.
    """

    def __init__(
        self,
        model: Any,
        penalties: PenaltyProcessor | None = None,
        forward: ForwardFunction | None = None,
        cache: KVCache | None = None,
    ) -> None:
        self.context_limit = context_limits(model.config)[0]
        self.num_embeddings: int = model.get_input_embeddings().weight.shape[0]
        head = model.get_output_embeddings()
        self.vocab_size: int = self.num_embeddings if head is None else head.weight.shape[0]
        self.device: torch.device = model.device
        self.cache = KVCache(model.config.get_text_config().num_hidden_layers) if cache is None else cache
        self._forward = FullModelForward(model) if forward is None else forward
        self._penalties = penalties
        self._cached = CachedPrefix(model, self.cache)
        self._hidden: tuple[int, torch.Tensor] | None = None  # the last call's `start` and hidden states
        self._forward_count = 0

    def clear_cache(self) -> None:
        """Drop everything cached, so that the next call runs its whole context: for measurements."""
        self._cached.clear()
        self._hidden = None
        self._forward_count += 1  # ends a shared prefix, too

    def reserve(self, capacity: int) -> None:
        """Allocate buffers for at least `capacity` tokens at the next allocation, so that they need not grow."""
        self.cache.capacity = max(self.cache.capacity, capacity)

    @inference
    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
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
        end = len(context) + len(tokens)
        self._cached.truncate_for(context, nodes, start)
        for forward_pass in self._cached.missing_passes(context, nodes, end):
            self._forward_count += 1
            output = self._forward(forward_pass, len(tokens) + 1 - start if forward_pass.last == end else 1)
        self._hidden = None if output.hidden_states is None else (start, output.hidden_states)
        if self._penalties is not None:
            processed = self._penalties(output.logits, context, tokens, nodes.parents, start)
            output = output._replace(logits=processed)
        return output

    def share_prefix(self, context: Context) -> tuple[int, int]:
        """Cache all of `context` but its last token; another runner may then write to the cache after that.

        Returns how many tokens are cached, and a number that changes as soon as this runner uses its cache again.
        """
        cached = self._cached
        cached.switch_to(context)
        if cached.committed < len(context) - 1:
            self.logits(context)
        cached.truncate(len(context) - 1)
        self._hidden = None
        return cached.committed, self._forward_count

    def last_hidden_state(self, context: Context) -> torch.Tensor | None:
        """The hidden state [width] of the last call that predicted the context's last token; None if that call did not."""
        index = self._cached.last_logits_index(context)
        if index is None or self._hidden is None or index < self._hidden[0]:
            return None
        start, hidden_states = self._hidden
        return hidden_states[index - start]

    @inference
    def log_likelihood(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
        """The log-likelihood (nats) of `token_ids` after the prompt at temperature 1, in one pass over what is not cached.

        It is computed in float32. For the model's own distribution the runner must have no penalties.
        """
        context = Context(prompt_ids)
        total = torch.zeros((), device=self.device)
        for start in range(0, len(token_ids), _LIKELIHOOD_CHUNK):
            tokens = list(token_ids[start : start + _LIKELIHOOD_CHUNK])
            logits = self.logits(context, tokens[:-1]).logits.float()
            chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
            total += (chosen - logits.logsumexp(dim=-1)).sum()
            context.extend(tokens)
        return float(total)
