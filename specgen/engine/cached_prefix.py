"""Which tokens the entries of a KV cache belong to. Every method's rollback happens here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from specgen.engine.attention_masks import AttentionMasks, Mask, depths
from specgen.engine.kv_cache import KVCache
from specgen.errors import SpecgenError
from specgen.types import Context

PREFILL_CHUNK = 1024  # tokens per forward pass over a long prompt: bounds the mask's and the activations' memory
NO_LIMIT = 1 << 30  # tokens


class TreeNodes(NamedTuple):
    """The drafted tokens of a tree, and the index of each one's parent (-1: the context). A chain's parents are a range."""

    tokens: list[int]
    parents: Sequence[int]


def chain_parents(length: int) -> range:
    """The parents of a chain; a range costs nothing to make, slice or compare."""
    return range(-1, length - 1)


NO_NODES = TreeNodes([], chain_parents(0))


class ForwardPass(NamedTuple):
    """One forward pass over the tokens with the cache indices `first` to `last - 1`, of a context and then a draft.

    `positions` [n] are the tokens' positions. The pass writes to `cache` from index `first` on; it sees what `mask` allows.
    """

    context: Context
    draft: TreeNodes
    first: int
    last: int
    positions: torch.Tensor
    mask: Mask
    cache: KVCache

    @property
    def input_ids(self) -> torch.Tensor:
        """The tokens' ids [1, n] on the model's device."""
        length = len(self.context)
        first, last = max(self.first - length, 0), max(self.last - length, 0)
        ids = self.context.ids[self.first : self.last] + self.draft.tokens[first:last]
        return torch.tensor([ids], device=self.positions.device)


class CachedPrefix:
    """The tokens in a model's KV cache: the first `committed` tokens of a context, then the nodes of a draft.

    An interruption may come between any two statements, and every token counted as cached has to be cached then. So the draft's
    nodes are dropped before `committed`, which their cache indices depend on, changes.
    """

    def __init__(self, model: Any, cache: KVCache) -> None:
        self.cache = cache
        self._rope_boundary = context_limits(model.config)[1]
        self._dtype: torch.dtype = model.dtype
        self._masks = AttentionMasks(model)
        self._positions = torch.arange(64, device=model.device)
        self.clear()

    def clear(self) -> None:
        """Count nothing as cached."""
        self._context = Context(())
        self.committed = 0
        self.draft: TreeNodes = NO_NODES

    @property
    def length(self) -> int:
        return self.committed + len(self.draft.tokens)

    def truncate_for(self, context: Context, draft: TreeNodes, start: int) -> None:
        """Keep the cached tokens that a call for the logits from index `start` on need not run again."""
        self.switch_to(context)
        if start == 0 or self.committed < len(context):
            self.draft = NO_NODES
            self.committed = min(self.committed, len(context) - (start == 0))
        else:
            cached = self.draft
            same_tokens = common_prefix_length(cached.tokens, draft.tokens)
            kept = min(same_tokens, common_prefix_length(cached.parents, draft.parents), start - 1)
            self.draft = TreeNodes(cached.tokens[:kept], cached.parents[:kept])

    def switch_to(self, context: Context) -> None:
        """Keep the cached tokens that `context` begins with. Draft nodes that were committed since become committed tokens."""
        if context is not self._context:
            shared = common_prefix_length(self._context.ids, context.ids, self.committed)
            if self._uses_long_rope(context) != self._uses_long_rope(self._context):
                shared = 0
            if shared < self.committed:
                self.draft = NO_NODES
            self.committed = shared
            self._context = context
        cached = self.draft
        path = self._matching_path(context, len(context))
        if not path:
            return
        length = len(path)
        self.draft = NO_NODES
        if path[-1] != length - 1:
            self.cache.gather([self.committed + node for node in path], self.committed, self._positions.device)
        self.committed += length
        if isinstance(cached.parents, range):
            self.draft = TreeNodes(cached.tokens[length:], chain_parents(len(cached.tokens) - length))

    def last_logits_index(self, context: Context) -> int | None:
        """Index of the logits in the last forward pass that predicted the context's last token; None if unknown.

        Index 0 follows the context that was passed then, index i + 1 follows draft node i.
        """
        if context is not self._context or self.committed >= len(context):
            return None
        path = self._matching_path(context, len(context) - 1)
        if self.committed + len(path) != len(context) - 1:
            return None
        return path[-1] + 1 if path else 0

    def missing_passes(self, context: Context, draft: TreeNodes, last: int) -> Iterator[ForwardPass]:
        """The forward passes that fill the cache up to index `last`: chunks of a long prompt, then the rest and the draft.

        The caller runs each before it takes the next, which counts it as cached. Mask and positions are valid until then. Raises
        SpecgenError for a tree on a model with ALiBi.
        """
        while self.committed < last and len(context) - self.committed > (size := self._chunk_size(context)):
            yield self._forward_pass(context, NO_NODES, self.committed, self.committed + size)
            self.committed += size
        if self.length < last:
            yield self._forward_pass(context, draft, self.length, len(context) + len(draft.tokens))
            self.committed = len(context)
            self.draft = draft

    def set_committed(self, context: Context, committed: int) -> None:
        """Count exactly the first `committed` tokens of `context` as cached."""
        self.clear()
        self._context = context
        self.committed = committed

    def truncate(self, committed: int) -> None:
        """Count at most the first `committed` tokens as cached."""
        self.draft = NO_NODES
        self.committed = min(self.committed, committed)

    def _matching_path(self, context: Context, end: int) -> list[int]:
        """The cached draft nodes that hold the context's tokens from index `committed` on, up to `end` at most."""
        tokens, parents = self.draft
        path: list[int] = []
        for token in context.ids[self.committed : end]:
            parent = path[-1] if path else -1
            children = (node for node in range(parent + 1, len(tokens)) if parents[node] == parent and tokens[node] == token)
            node = next(children, None)
            if node is None:
                break
            path.append(node)
        return path

    def _uses_long_rope(self, context: Context) -> bool:
        """Whether the run uses the rotary frequencies of long contexts; a run never changes them (`LoadedModel.max_tokens`)."""
        return self._rope_boundary is not None and context.prompt_length > self._rope_boundary

    def _chunk_size(self, context: Context) -> int:
        """How many tokens of a prompt to run in one forward pass.

        The first pass of a prompt beyond the rope boundary has to reach beyond it, as the pass's last position decides which
        rotary frequencies the model uses.
        """
        if self._rope_boundary is not None and self._uses_long_rope(context):
            return max(PREFILL_CHUNK, self._rope_boundary + 1 - self.committed)
        return PREFILL_CHUNK

    def _forward_pass(self, context: Context, draft: TreeNodes, first: int, last: int) -> ForwardPass:
        """Set the cache's length to `first`; make positions and mask.

        A token's position is its cache index, but a tree node's is the context's length plus its depth.
        """
        if last > self._positions.shape[0]:
            self._positions = torch.arange(max(last, self.cache.capacity), device=self._positions.device)
        positions, tree = self._positions[:last], None
        if not isinstance(draft.parents, range):
            tree = len(context), draft.parents
            nodes = torch.tensor(depths(draft.parents), device=positions.device) + len(context)
            positions = torch.cat((positions[: len(context)], nodes))
        mask = self._masks(first, positions, tree, self._dtype)
        if mask is None and tree is not None:
            raise SpecgenError("this model's attention uses ALiBi, which cannot run trees", "Take a method without draft trees")
        self.cache.length = first
        return ForwardPass(context, draft, first, last, positions[first:], mask, self.cache)


def common_prefix_length(left: Sequence[int], right: Sequence[int], limit: int | None = None) -> int:
    """How many of the first `limit` tokens are the same in both."""
    limit = min(len(left), len(right)) if limit is None else min(limit, len(left), len(right))
    if left[:limit] == right[:limit]:  # one comparison of lists is the fast path; a range never equals a list
        return limit
    return next((index for index in range(limit) if left[index] != right[index]), limit)


def context_limits(config: Any) -> tuple[int, int | None]:
    """A model's longest context (`NO_LIMIT` if its config does not say) and its rope boundary (None: none), in tokens."""
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or NO_LIMIT
    rope = getattr(config, "rope_parameters", None) or {}
    parameters = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    rope_types = {entry.get("rope_type") for entry in parameters}
    key = "original_max_position_embeddings"
    original = next((entry[key] for entry in parameters if key in entry), getattr(config, key, None))
    if "dynamic" in rope_types:  # beyond it the frequencies change with every token
        return original or limit, None
    return limit, original if "longrope" in rope_types else None
