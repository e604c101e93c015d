"""What stands in the slots of a cache, told by content: the rollback of every method happens here, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgen.engine.kv_cache import KVCache
from specgen.types import Context

PREFILL_CHUNK = 1024  # a mask of chunk x context is all that a long prompt may cost on top of its cache


class TreeNodes(NamedTuple):
    """A draft whose rows are cached; a chain's parents are a range."""

    tokens: list[int]
    parents: Sequence[int]

    def child(self, parent: int, token: int) -> int:
        """The node behind `parent` that holds `token`, -1 where there is none."""
        for node in range(parent + 1, len(self.tokens)):
            if self.parents[node] == parent and self.tokens[node] == token:
                return node
        return -1


def chain(length: int) -> range:
    """The parents of a chain; as a range it costs nothing to make, slice or compare."""
    return range(-1, length - 1)


NONE = TreeNodes([], chain(0))


class ForwardRange(NamedTuple):
    """The slots `first` to `last` of a context with a draft tree behind it: what a pass runs over."""

    context: Context
    draft: TreeNodes
    first: int
    last: int

    @property
    def ids(self) -> list[int]:
        committed = len(self.context)
        return (
            self.context.ids[self.first : self.last]
            + self.draft.tokens[max(self.first - committed, 0) : max(self.last - committed, 0)]
        )


class CachedPrefix:
    """The first slots of a cache hold `committed` tokens of a context, the next ones the nodes of a draft behind them.

    An interruption may come between any two statements, and must find what counts as cached to be cached: so the draft's nodes,
    which stand behind the committed tokens, are given up before the number of these changes.
    """

    def __init__(self, cache: KVCache, device: torch.device, rope_boundary: int | None) -> None:
        self.cache = cache
        self._device = device
        self._rope_boundary = rope_boundary
        self.forget()

    def forget(self) -> None:
        self._context = Context(())
        self.committed = 0
        self.draft: TreeNodes = NONE

    @property
    def filled(self) -> int:
        return self.committed + len(self.draft.tokens)

    def keep(self, context: Context, draft: TreeNodes, start: int) -> None:
        """Reduce what counts as cached to what a call for the rows from `start` on can use; the slots stay where they are."""
        self.follow(context)
        if start == 0 or self.committed < len(context):
            self.draft = NONE
            self.committed = min(self.committed, len(context) - (start == 0))
        else:
            cached = self.draft
            reusable = min(shared_length(cached.tokens, draft.tokens), shared_length(cached.parents, draft.parents), start - 1)
            self.draft = TreeNodes(cached.tokens[:reusable], cached.parents[:reusable])

    def follow(self, context: Context) -> None:
        """Count what is cached of this context, the nodes of the last draft that were committed since among it."""
        if context is not self._context:
            shared = shared_length(self._context.ids, context.ids, self.committed)
            if self.is_long(context) != self.is_long(self._context):
                shared = 0
            if shared < self.committed:
                self.draft = NONE
            self.committed = shared
            self._context = context
        cached = self.draft
        path = self._path(context, len(context))
        if not path:
            return
        length = len(path)
        self.draft = NONE
        if path[-1] != length - 1:
            self.cache.gather([self.committed + node for node in path], self.committed, self._device)
        self.committed += length
        if isinstance(cached.parents, range):
            self.draft = TreeNodes(cached.tokens[length:], chain(len(cached.tokens) - length))

    def row_before_last(self, context: Context) -> int | None:
        """Which row of the last pass over a draft the context's last token came after, if the context only went on since:
        0 stands for the row behind the context of then, i + 1 for the one behind node i. None where it is not known."""
        if context is not self._context or self.committed >= len(context):
            return None
        path = self._path(context, len(context) - 1)
        if self.committed + len(path) != len(context) - 1:
            return None
        return path[-1] + 1 if path else 0

    def advance(self, committed: int, draft: TreeNodes = NONE) -> None:
        """Count as cached what was run."""
        self.committed = committed
        self.draft = draft

    def lend(self, committed: int) -> None:
        """The slots behind the first `committed` are about to be written by somebody else."""
        self.draft = NONE
        self.committed = min(self.committed, committed)

    def _path(self, context: Context, end: int) -> list[int]:
        """The cached nodes that hold the context's tokens from the committed ones on, at most up to `end`."""
        path: list[int] = []
        node = -1
        while self.committed + len(path) < end:
            node = self.draft.child(node, context.ids[self.committed + len(path)])
            if node < 0:
                break
            path.append(node)
        return path

    def is_long(self, context: Context) -> bool:
        """On which side of the rotary frequencies' change a run is; it stays there (`LoadedModel.limit_for`)."""
        return self._rope_boundary is not None and context.prompt_length > self._rope_boundary

    def chunk(self, context: Context) -> int:
        """How many tokens of a long prompt to run at once. A pass that ends before the change of the rotary frequencies would
        be computed with the wrong ones, so the first chunk of a prompt beyond it reaches beyond it too."""
        if self._rope_boundary is not None and self.is_long(context):
            return max(PREFILL_CHUNK, self._rope_boundary + 1 - self.committed)
        return PREFILL_CHUNK


def shared_length(left: Sequence[int], right: Sequence[int], limit: int | None = None) -> int:
    """How many of the first `limit` tokens are the same in both."""
    limit = min(len(left), len(right)) if limit is None else min(limit, len(left), len(right))
    if left[:limit] == right[:limit]:  # the common case, at the speed of a list comparison
        return limit
    return next(
        (position for position in range(limit) if left[position] != right[position]), limit
    )  # a range never equals a list
