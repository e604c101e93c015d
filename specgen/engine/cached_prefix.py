"""Keeps track of which tokens a KV cache holds. The rollback of rejected drafts happens here for all methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from specgen.engine.attention_masks import AttentionMasks, Mask, depths
from specgen.engine.kv_cache import KVCache
from specgen.errors import SpecgenError
from specgen.types import Context

PREFILL_CHUNK = 1024  # tokens per forward pass over a long prompt: bounds the mask's and the activations' memory
NO_LIMIT = 1 << 30  # tokens; the context length of a model whose config states none


class TreeNodes(NamedTuple):
    """The drafted tokens of a tree, and for each token the index of its parent (-1: the context).

    For a chain, in which each token follows the one before, `parents` is a `range`.
    """

    tokens: list[int]
    parents: Sequence[int]


def chain_parents(length: int) -> range:
    """Returns the parent indices of a chain of `length` tokens: -1, 0, 1, ... A range is cheap to make, slice and compare."""
    return range(-1, length - 1)


NO_NODES = TreeNodes([], chain_parents(0))


class ForwardPass(NamedTuple):
    """The inputs of one forward pass over some of the tokens of a context followed by a draft.

    `first` and `last` say which: the pass runs tokens `first` to `last - 1` and writes their keys and values to the same indices
    of `cache`. `positions` [n] are the positions of these tokens, `mask` is their attention mask.
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
        """The ids [1, n] of the tokens to run, on the model's device."""
        length = len(self.context)
        first, last = max(self.first - length, 0), max(self.last - length, 0)
        ids = self.context.ids[self.first : self.last] + self.draft.tokens[first:last]
        return torch.tensor([ids], device=self.positions.device)


class CachedPrefix:
    """Says which tokens a model's KV cache holds: the first `committed` tokens of a context, then the nodes of a draft.

    An exception such as KeyboardInterrupt may come between any two statements; every token counted as cached must be in the cache
    then. The cache indices of draft nodes start at `committed`, so `draft` is emptied before `committed` changes.
    """

    def __init__(self, model: Any, cache: KVCache) -> None:
        self.cache = cache
        self._rope_boundary = context_limits(model.config)[1]
        self._dtype: torch.dtype = model.dtype
        self._masks = AttentionMasks(model)
        self._positions = torch.arange(64, device=model.device)
        self.clear()

    def clear(self) -> None:
        """Counts no token as cached."""
        self._context = Context(())
        self.committed = 0
        self.draft: TreeNodes = NO_NODES

    @property
    def length(self) -> int:
        return self.committed + len(self.draft.tokens)

    def truncate_for(self, context: Context, draft: TreeNodes, start: int) -> None:
        """Drops all cached tokens that a call of `ModelRunner.logits` with these arguments has to run.

        Logits index 0 follows the context, index i + 1 follows draft node i. The logits from index `start` on are wanted. Each of
        them is computed by running the token that it follows, so these tokens must not count as cached. Tokens that differ from
        `context` and `draft` are dropped too.
        """
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
        """Counts as cached only the tokens with which `context` begins, and the draft nodes after them.

        Draft nodes that have been accepted are part of `context` now, and count as committed. In a tree, their keys and values
        are moved next to those of the other committed tokens, and the rest of the draft is dropped.
        """
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
        """Returns the index of the logits of the last call that predicted the last token of `context`; None if no logits did.

        Logits index 0 follows the context of that call, index i + 1 its draft node i.
        """
        if context is not self._context or self.committed >= len(context):
            return None
        path = self._matching_path(context, len(context) - 1)
        if self.committed + len(path) != len(context) - 1:
            return None
        return path[-1] + 1 if path else 0

    def missing_passes(self, context: Context, draft: TreeNodes, last: int) -> Iterator[ForwardPass]:
        """Yields the forward passes over the tokens before index `last` of context and draft that the KV cache lacks.

        A long prompt is run in chunks; the last pass runs the rest of the context and the draft. The caller must run each pass
        before it takes the next one: asking for the next one counts the tokens as cached and makes the pass's mask and positions
        invalid. Raises SpecgenError for a tree on a model with ALiBi.
        """
        while self.committed < last and len(context) - self.committed > (size := self._chunk_size(context)):
            yield self._forward_pass(context, NO_NODES, self.committed, self.committed + size)
            self.committed += size
        if self.length < last:
            yield self._forward_pass(context, draft, self.length, len(context) + len(draft.tokens))
            self.committed = len(context)
            self.draft = draft

    def set_committed(self, context: Context, committed: int) -> None:
        """Counts exactly the first `committed` tokens of `context` as cached, because another runner has written them."""
        self.clear()
        self._context = context
        self.committed = committed

    def truncate(self, committed: int) -> None:
        """Counts at most the first `committed` tokens of the context as cached, and no draft nodes."""
        self.draft = NO_NODES
        self.committed = min(self.committed, committed)

    def _matching_path(self, context: Context, end: int) -> list[int]:
        """Returns the path of cached draft nodes, from the root on, whose tokens equal the context's from index `committed` on.

        It ends at the first token without an equal node, or before context index `end`.
        """
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
        """Whether the model uses its rotary frequencies for long contexts (LongRoPE) in a run with this context.

        The prompt's length decides: a run ends before a shorter prompt's output needs them (`LoadedModel.max_tokens`).
        """
        return self._rope_boundary is not None and context.prompt_length > self._rope_boundary

    def _chunk_size(self, context: Context) -> int:
        """Returns how many tokens of a prompt to run in one forward pass.

        A LongRoPE model uses its long-context frequencies in passes whose last position is beyond a boundary. So if the prompt is
        longer than this boundary, already its first pass has to reach beyond it.
        """
        if self._rope_boundary is not None and self._uses_long_rope(context):
            return max(PREFILL_CHUNK, self._rope_boundary + 1 - self.committed)
        return PREFILL_CHUNK

    def _forward_pass(self, context: Context, draft: TreeNodes, first: int, last: int) -> ForwardPass:
        """Returns the pass over the tokens `first` to `last - 1` of context and draft, and sets the KV cache's length to `first`.

        A token's position is its cache index. A tree node's position is the context's length plus the node's depth.
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
    """Returns how many numbers at the beginning of `left` and `right` are equal, at most `limit` (None: no limit)."""
    limit = min(len(left), len(right)) if limit is None else min(limit, len(left), len(right))
    if left[:limit] == right[:limit]:  # one comparison of lists is the fast path; a range never equals a list
        return limit
    return next((index for index in range(limit) if left[index] != right[index]), limit)


def context_limits(config: Any) -> tuple[int, int | None]:
    """Returns a model's longest context and its rope boundary, both in tokens, from its config.

    The longest context is `NO_LIMIT` if the config states none. The rope boundary is the length beyond which a LongRoPE model
    uses other rotary frequencies; None for other models.
    """
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
