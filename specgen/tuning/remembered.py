"""A draft model that is asked nothing twice: trees of every shape are drafted by the real drafter, on rows that are kept.

What follows a path of drafted tokens behind a place in the answer is the same for every shape of tree, so the widest and deepest
one pays for the passes, and the others find nearly all of their rows here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specgen.models.session import Rows
from specgen.types import Context

if TYPE_CHECKING:
    from specgen.models.session import DraftSession
    from specgen.tuning.behaviour import Answer

MOST_BYTES = 512 << 20  # of rows; what comes later is computed each time


class RememberedSession:
    """A session (`DraftSession`) along one answer. Its contexts are the answer's beginnings, whoever made them. `vocab_size` is
    the target's."""

    def __init__(self, session: DraftSession, answer: Answer, vocab_size: int) -> None:
        self._session, self._answer = session, answer
        self.context_limit, self.known_ids = session.context_limit, session.known_ids
        self.vocab_size, self.device = vocab_size, session.device
        self._rows: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self._contexts: dict[int, Context] = {}
        self.passes = self._bytes = 0

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> Rows:
        """As `Session.logits`."""
        tokens = list(draft)
        above = list(range(-1, len(tokens) - 1)) if parents is None else list(parents)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, above, strict=True):
            paths.append((*paths[parent + 1], token))
        begin = len(context) - context.prompt_length
        keys = [(begin, path) for path in paths[start:]]
        if all(key in self._rows for key in keys):
            return Rows(torch.stack([self._rows[key] for key in keys]))
        self.passes += 1
        found = self._session.logits(self._context(begin), tokens, above, start=start).logits
        for key, row in zip(keys, found, strict=True):
            if self._bytes < MOST_BYTES and key not in self._rows:
                self._rows[key] = row.clone()
                self._bytes += row.numel() * row.element_size()
        return Rows(found)

    def _context(self, begin: int) -> Context:
        if begin not in self._contexts:
            made = self._contexts[begin] = Context(self._answer.prompt_ids)
            if begin:
                made.extend(self._answer.token_ids[:begin])
        return self._contexts[begin]
