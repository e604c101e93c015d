"""One model and one sequence: say which tokens you want logits for, and the session keeps what it can of its cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from specgen.errors import SpecgenError
from specgen.inference import inference
from specgen.models.cache import BufferCache
from specgen.models.masks import Masks, depths
from specgen.types import Context

PREFILL_CHUNK = 1024  # a mask of chunk x context is all that a long prompt may cost on top of its cache


class Rows(NamedTuple):
    """`logits` [rows, vocabulary] in the model's dtype; valid until the session's next call."""

    logits: torch.Tensor


class Nodes(NamedTuple):
    """A draft whose rows are cached; a chain's parents are a range."""

    tokens: list[int]
    parents: Sequence[int]

    def child(self, parent: int, token: int) -> int:
        """The node behind `parent` that holds `token`, -1 where there is none."""
        for node in range(parent + 1, len(self.tokens)):
            if self.parents[node] == parent and self.tokens[node] == token:
                return node
        return -1


def _chain(length: int) -> range:
    """The parents of a chain; as a range it costs nothing to make, slice or compare."""
    return range(-1, length - 1)


_EMPTY = Nodes([], _chain(0))


class Reshaping(Protocol):
    """What a model's generation config does to its logits (penalties), seen per row."""

    def __call__(
        self, logits: torch.Tensor, context: Context, tokens: Sequence[int], parents: Sequence[int], start: int
    ) -> torch.Tensor: ...


class Session:
    """The only code that touches a cache. Callers never roll back: the cache is addressed by its content.

    A session may be called with any context at any time. An interrupted call leaves it usable.
    """

    def __init__(
        self, model: Any, context_limit: int, rope_boundary: int | None = None, reshaping: Reshaping | None = None
    ) -> None:
        self.context_limit = context_limit
        self.known_ids: int = model.get_input_embeddings().weight.shape[0]
        head = model.get_output_embeddings()
        self.vocab_size: int = self.known_ids if head is None else head.weight.shape[0]
        self.device: torch.device = model.device
        self._rope_boundary = rope_boundary
        self._dtype: torch.dtype = model.dtype
        self._model = model
        self._reshaping = reshaping
        self._masks = Masks(model)
        known = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in known
        self._takes_keep = "logits_to_keep" in known
        self._cache = BufferCache(model.config.get_text_config().num_hidden_layers)
        self._positions = torch.arange(64, device=self.device)
        self.forget()

    def forget(self) -> None:
        """Drop all that is cached, so that the next call pays for its whole context: for measurements."""
        self._context = Context(())
        self._committed = 0  # the first slots hold this many tokens of the context,
        self._draft: Nodes = _EMPTY  # the next ones these nodes of the last draft

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
    ) -> Rows:
        """The rows after the last context token (row 0) and after each draft token (rows 1, 2, ...), from row `start` on.

        Keeps the longest cached prefix of `context` (along the matching path of the last draft tree) and, of the draft, what
        stands before row `start` and is unchanged; runs the model once on what is missing. `parents` are those of a tree
        (each node behind its parent, -1 the context), None or a range for a chain.
        """
        tokens = list(draft)
        chain = _chain(len(tokens))
        tree = None if parents is None or isinstance(parents, range) or list(parents) == list(chain) else list(parents)
        nodes = chain if tree is None else tree
        self._keep(context, tokens, nodes, start)
        while len(context) - self._committed > (size := self._chunk(context)):
            self._run(context.ids[self._committed : self._committed + size], None, keep=1)
            self._committed += size
        missing = context.ids[self._committed :] + tokens[len(self._draft.tokens) :]
        logits = self._run(missing, None if tree is None else (len(context), tree), keep=len(tokens) + 1 - start)
        self._committed = len(context)
        self._draft = Nodes(tokens, nodes)
        if self._reshaping is not None:
            logits = self._reshaping(logits, context, tokens, nodes, start)
        return Rows(logits)

    # An interruption may come between any two statements below, and must find what counts as cached to be cached: so the draft's
    # nodes, which stand behind the committed tokens, are given up before the number of these changes.

    def _keep(self, context: Context, tokens: list[int], parents: Sequence[int], start: int) -> None:
        """Reduce what counts as cached to what this call can use; the slots themselves stay where they are."""
        if context is not self._context:
            shared = _shared_length(self._context.ids, context.ids, self._committed)
            if self._is_long(context) != self._is_long(self._context):
                shared = 0
            if shared < self._committed:
                self._draft = _EMPTY
            self._committed = shared
            self._context = context
        self._adopt(context)
        if start == 0 or self._committed < len(context):
            self._draft = _EMPTY
            self._committed = min(self._committed, len(context) - (start == 0))
        else:
            cached = self._draft
            reusable = min(_shared_length(cached.tokens, tokens), _shared_length(cached.parents, parents), start - 1)
            self._draft = Nodes(cached.tokens[:reusable], cached.parents[:reusable])

    def _adopt(self, context: Context) -> None:
        """Count the nodes of the last draft that were committed since as context, made contiguous if they came from a tree."""
        cached = self._draft
        path: list[int] = []
        node = -1
        while self._committed + len(path) < len(context):
            node = cached.child(node, context.ids[self._committed + len(path)])
            if node < 0:
                break
            path.append(node)
        if not path:
            return
        length = len(path)
        self._draft = _EMPTY
        if path[-1] != length - 1:
            self._cache.gather([self._committed + node for node in path], self._committed, self.device)
        self._committed += length
        if isinstance(cached.parents, range):
            self._draft = Nodes(cached.tokens[length:], _chain(len(cached.tokens) - length))

    def _is_long(self, context: Context) -> bool:
        """On which side of the rotary frequencies' change a run is; it stays there (`LoadedModel.limit_for`)."""
        return self._rope_boundary is not None and context.prompt_length > self._rope_boundary

    def _chunk(self, context: Context) -> int:
        """How many tokens of a long prompt to run at once. A pass that ends before the change of the rotary frequencies would
        be computed with the wrong ones, so the first chunk of a prompt beyond it reaches beyond it too."""
        if self._rope_boundary is not None and self._is_long(context):
            return max(PREFILL_CHUNK, self._rope_boundary + 1 - self._committed)
        return PREFILL_CHUNK

    def _run(self, ids: list[int], tree: tuple[int, list[int]] | None, keep: int) -> torch.Tensor:
        """One pass over `ids`, written behind what is cached. Returns its last `keep` rows [keep, vocabulary]."""
        past = self._committed + len(self._draft.tokens)
        positions = self._slot_positions(past + len(ids), tree)
        self._cache.length = past
        options: dict[str, Any] = {}
        if self._takes_positions:
            options["position_ids"] = positions[None, past:]
        if self._takes_keep:
            options["logits_to_keep"] = keep
        mask = self._masks(past, positions, tree, self._dtype)
        if mask is None and tree is not None:
            raise SpecgenError(
                "this model's attention has ALiBi biases, which know no trees", "Take a method without draft trees"
            )
        output = self._model(
            input_ids=torch.tensor([ids], device=self.device),
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            **options,
        )
        logits: torch.Tensor = output.logits[0]
        return logits[-keep:]

    def _slot_positions(self, slots: int, tree: tuple[int, list[int]] | None) -> torch.Tensor:
        """The position of each slot [slots]: its own number, but for a tree's nodes the context's length plus their depth."""
        if slots > self._positions.shape[0]:
            self._positions = torch.arange(max(slots, self._cache.capacity), device=self.device)
        if tree is None:
            return self._positions[:slots]
        committed, parents = tree
        nodes = torch.tensor(depths(parents), device=self.device) + committed
        return torch.cat((self._positions[:committed], nodes))


def _shared_length(left: Sequence[int], right: Sequence[int], limit: int | None = None) -> int:
    """How many of the first `limit` tokens are the same in both."""
    limit = min(len(left), len(right)) if limit is None else min(limit, len(left), len(right))
    if left[:limit] == right[:limit]:  # the common case, at the speed of a list comparison
        return limit
    return next((place for place in range(limit) if left[place] != right[place]), limit)  # a range never equals a list
