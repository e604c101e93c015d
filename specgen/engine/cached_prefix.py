"""Says which tokens of a sequence a KV cache holds, and which forward passes run the others.

Rejected drafts are rolled back here, for all methods: a rollback only changes what counts as
cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specgen.base.measuring import prefill_reports
from specgen.base.types import Context
from specgen.engine.forward_pass import NO_NODES, Cache, ForwardPass, TreeNodes, chain_parents

PREFILL_CHUNK = 1024  # tokens per forward pass over a long prompt: bounds the activations' memory
_LEAST_REPORTED = 128  # tokens; a shorter prompt takes no long time
_SMALLEST_CHUNK = 256  # fewer would be slower
# most elements of a pass's mask: bounds its memory; smaller chunks take 10 % more time
_MASK_ELEMENTS = PREFILL_CHUNK << 15


def chunk_size(cached: int) -> int:
    """Returns how many tokens of a long prompt to run in one pass if `cached` tokens are in the KV
    cache already: fewer after many."""
    size = _MASK_ELEMENTS // (cached + PREFILL_CHUNK)
    return min(PREFILL_CHUNK, max(size - size % 64, _SMALLEST_CHUNK))


class CachedPrefix:
    """Says which tokens a model's KV cache holds: the first `committed` tokens of a context, then
    the nodes of a draft.

    An exception such as KeyboardInterrupt may come between any two statements. Even then, every
    token counted as cached is in the cache. Draft node i is at cache index `committed` + i, so
    `draft` is emptied before `committed` changes. `exact`: nothing is kept when the context
    changes, because keys and values that passes over draft trees have computed may differ from a
    chain's in some bits.
    """

    def __init__(self, cache: Cache, rope_boundary: int | None, *, exact: bool = False) -> None:
        self.cache = cache
        # called like `Cache.gather` when nodes of a tree are accepted; heads add their own
        self.gathers = [cache.gather]
        self._rope_boundary = rope_boundary
        self._is_exact = exact
        self.clear()

    def clear(self) -> None:
        """Counts no token as cached any more."""
        self._context = Context(())
        self.committed = 0
        self.draft: TreeNodes = NO_NODES

    @property
    def length(self) -> int:
        return self.committed + len(self.draft.tokens)

    def truncate_for(self, context: Context, draft: TreeNodes, start: int) -> None:
        """Stops counting as cached what a call of `ModelRunner.logits` with these arguments has to
        run.

        The call returns logits from index `start` on: index 0 follows the context, index i + 1
        follows draft node i. They are computed by running the tokens that they follow, so these
        tokens must not count as cached. Cached tokens that differ from `context` and `draft` are
        dropped too.
        """
        self.switch_to(context)
        if start == 0 or self.committed < len(context):
            self.truncate(len(context) - (start == 0))
        else:
            cached = self.draft
            kept = common_prefix_length(cached.tokens, draft.tokens, start - 1)
            if not (isinstance(cached.parents, range) and isinstance(draft.parents, range)):
                kept = common_prefix_length(cached.parents, draft.parents, kept)
            if kept < len(cached.tokens):
                self.draft = TreeNodes(cached.tokens[:kept], cached.parents[:kept])

    def switch_to(self, context: Context) -> None:
        """Counts as cached only tokens with which `context` begins, and the draft nodes after them.

        Draft nodes that have been accepted are part of `context` now, and become committed tokens.
        If the draft is a tree, their keys and values are moved next to those of the other committed
        tokens, and the rest of the draft is dropped.
        """
        if context is not self._context:
            shared = common_prefix_length(self._context.ids, context.ids, self.committed)
            if self._is_exact or self.uses_long_rope(context) != self.uses_long_rope(self._context):
                shared = 0
            if shared < self.committed:
                self.truncate(shared)
            self._context = context
        cached = self.draft
        if not cached.tokens or self.committed == len(context):
            return
        path = matching_path(cached, context.ids[self.committed :])
        if not path:
            return
        length = len(path)
        self.draft = NO_NODES
        if path[-1] != length - 1:
            for gather in self.gathers:
                gather([self.committed + node for node in path], self.committed)
        self.committed += length
        if isinstance(cached.parents, range):
            self.draft = TreeNodes(
                cached.tokens[length:], chain_parents(len(cached.tokens) - length)
            )

    def missing_passes(
        self, context: Context, draft: TreeNodes, last: int
    ) -> Iterator[ForwardPass]:
        """Returns the forward passes over those tokens of context and draft, before index `last`,
        that the KV cache lacks.

        A long prompt is run in chunks and reported to `prefill_reports`; the last pass runs the
        rest of the context and the draft. The caller must run each pass before it takes the next
        one: then the tokens of the pass count as cached, and the cache's length changes.
        """
        missing = min(last, len(context)) - self.committed
        if missing <= min(PREFILL_CHUNK, _LEAST_REPORTED):
            return self._passes(context, draft, last)
        return self._reported_passes(context, draft, last, missing)

    def _reported_passes(
        self, context: Context, draft: TreeNodes, last: int, missing: int
    ) -> Iterator[ForwardPass]:
        """Yields the passes of `missing_passes`, and reports them; `missing` tokens of the context
        are run."""
        begin = self.committed
        prefill_reports.report(id(self), 0, missing)
        for forward_pass in self._passes(context, draft, last):
            done = self.committed - begin
            size = min(forward_pass.last - forward_pass.first, missing - done)
            with prefill_reports.within(id(self), done, size, missing):
                yield forward_pass
            if done + size < missing:
                prefill_reports.report(id(self), done + size, missing)
        prefill_reports.report(id(self), missing, missing)

    def _passes(self, context: Context, draft: TreeNodes, last: int) -> Iterator[ForwardPass]:
        """Yields the passes of `missing_passes` without reports."""
        length = len(context)
        while (
            length - self.committed > (size := self._chunk_size(context)) and self.committed < last
        ):
            yield self._forward_pass(context, NO_NODES, self.committed, self.committed + size)
            self.committed += size
        if self.length < last:
            yield self._forward_pass(context, draft, self.length, length + len(draft.tokens))
            self.committed = length
            self.draft = draft

    def ran(self, forward_pass: ForwardPass) -> None:
        """Counts the tokens of a pass as cached, after all tokens before it."""
        length = len(forward_pass.context)
        self.committed = min(forward_pass.last, length)
        self.draft = forward_pass.draft if forward_pass.last > length else NO_NODES

    def set_committed(self, context: Context, committed: int) -> None:
        """Counts exactly the first `committed` tokens of `context` as cached, because another
        runner has written them."""
        self.clear()
        self._context = context
        self.committed = committed

    def uses_long_rope(self, context: Context) -> bool:
        """Whether the model uses its rotary frequencies for long contexts (LongRoPE) in a run with
        this context.

        The prompt's length decides. A run with a shorter prompt ends before its output needs these
        frequencies (`LoadedModel.max_tokens`).
        """
        return self._rope_boundary is not None and context.prompt_length > self._rope_boundary

    def truncate(self, committed: int) -> None:
        """Counts at most the first `committed` tokens of the context as cached, and no draft nodes.

        Fewer if a recurrent layer's state cannot be rolled back as far.
        """
        self.draft = NO_NODES
        self.committed = self.cache.restorable(min(self.committed, committed))

    def _chunk_size(self, context: Context) -> int:
        """Returns how many tokens of a prompt to run in the next forward pass.

        A LongRoPE model uses its long-context frequencies in passes whose last position is beyond a
        boundary. If the prompt is longer than this boundary, all its passes have to use them, so
        the first pass already has to reach beyond the boundary.
        """
        boundary = self._rope_boundary if self.uses_long_rope(context) else None
        return max(
            chunk_size(self.committed), 0 if boundary is None else boundary + 1 - self.committed
        )

    def _forward_pass(
        self, context: Context, draft: TreeNodes, first: int, last: int
    ) -> ForwardPass:
        """Returns the pass over the tokens `first` to `last - 1` of context and draft, and sets the
        cache's length."""
        self.cache.length = first
        return ForwardPass(context, draft, first, last, self.cache, self.uses_long_rope(context))


def matching_path(draft: TreeNodes, tokens: Sequence[int]) -> list[int]:
    """Returns the nodes of the path from the tree's root whose tokens are the first ones of
    `tokens`.

    The path ends before the first token that no child of its last node has.
    """
    path: list[int] = []
    for token in tokens:
        parent = path[-1] if path else -1
        children = range(parent + 1, len(draft.tokens))
        node = next(
            (
                node
                for node in children
                if draft.parents[node] == parent and draft.tokens[node] == token
            ),
            None,
        )
        if node is None:
            break
        path.append(node)
    return path


def common_prefix_length(
    left: Sequence[int], right: Sequence[int], limit: int | None = None
) -> int:
    """Returns how many elements at the beginning of `left` and `right` are equal, at most `limit`
    (None: no limit)."""
    limit = min(len(left), len(right)) if limit is None else min(limit, len(left), len(right))
    # one comparison of lists is the fast path; a range never equals a list
    if left[:limit] == right[:limit]:
        return limit
    return next((index for index in range(limit) if left[index] != right[index]), limit)
