"""Which tokens the entries of a KV cache belong to. Every method's rollback happens here, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgen.engine.kv_cache import KVCache
from specgen.types import Context

PREFILL_CHUNK = 1024  # tokens per forward pass over a long prompt: bounds the mask's and the activations' memory


class TreeNodes(NamedTuple):
    """The drafted tokens of a tree, and the index of each one's parent (-1: the context). A chain's parents are a range."""

    tokens: list[int]
    parents: Sequence[int]

    def child(self, parent: int, token: int) -> int:
        """The index of `parent`'s child that holds `token`, -1 if there is none."""
        for node in range(parent + 1, len(self.tokens)):
            if self.parents[node] == parent and self.tokens[node] == token:
                return node
        return -1


def chain_parents(length: int) -> range:
    """The parents of a chain; a range costs nothing to make, slice or compare."""
    return range(-1, length - 1)


NO_NODES = TreeNodes([], chain_parents(0))


class ForwardRange(NamedTuple):
    """What one forward pass runs over: the tokens with the cache indices `first` to `last - 1`, of a context and then a draft."""

    context: Context
    draft: TreeNodes
    first: int
    last: int

    @property
    def token_ids(self) -> list[int]:
        length = len(self.context)
        first, last = max(self.first - length, 0), max(self.last - length, 0)
        return self.context.ids[self.first : self.last] + self.draft.tokens[first:last]


class CachedPrefix:
    """The cached tokens: the first `committed` tokens of a context, then the nodes of a draft.

    An interruption may come between any two statements, and every token counted as cached has to be cached then. So the draft's
    nodes are dropped before `committed`, which their cache indices depend on, changes.
    """

    def __init__(self, cache: KVCache, device: torch.device, rope_boundary: int | None) -> None:
        self.cache = cache
        self._device = device
        self._rope_boundary = rope_boundary
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
            if self.uses_long_rope(context) != self.uses_long_rope(self._context):
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
            self.cache.gather([self.committed + node for node in path], self.committed, self._device)
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

    def set_cached(self, committed: int, draft: TreeNodes = NO_NODES) -> None:
        """Count as cached what a forward pass has written."""
        self.committed = committed
        self.draft = draft

    def truncate(self, committed: int) -> None:
        """Count at most the first `committed` tokens as cached."""
        self.draft = NO_NODES
        self.committed = min(self.committed, committed)

    def _matching_path(self, context: Context, end: int) -> list[int]:
        """The cached draft nodes that hold the context's tokens from index `committed` on, up to `end` at most."""
        path: list[int] = []
        node = -1
        while self.committed + len(path) < end:
            node = self.draft.child(node, context.ids[self.committed + len(path)])
            if node < 0:
                break
            path.append(node)
        return path

    def uses_long_rope(self, context: Context) -> bool:
        """Whether the run uses the rotary frequencies of long contexts; one run never changes them (`LoadedModel.limit_for`)."""
        return self._rope_boundary is not None and context.prompt_length > self._rope_boundary

    def chunk_size(self, context: Context) -> int:
        """How many tokens of a prompt to run in one forward pass.

        The first pass of a prompt beyond the rope boundary has to reach beyond it, as the pass's last position decides which
        rotary frequencies the model uses.
        """
        if self._rope_boundary is not None and self.uses_long_rope(context):
            return max(PREFILL_CHUNK, self._rope_boundary + 1 - self.committed)
        return PREFILL_CHUNK


def common_prefix_length(left: Sequence[int], right: Sequence[int], limit: int | None = None) -> int:
    """How many of the first `limit` tokens are the same in both."""
    limit = min(len(left), len(right)) if limit is None else min(limit, len(left), len(right))
    if left[:limit] == right[:limit]:  # one comparison of lists is the fast path; a range never equals a list
        return limit
    return next((index for index in range(limit) if left[index] != right[index]), limit)
