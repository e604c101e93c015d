"""A session that is asked nothing twice: drafts of every shape are made by the real drafters, on rows that are kept.

What follows a path of drafted tokens behind a context is the same whatever shape the draft has, so the largest pay for the
passes, and the others find nearly all of their rows here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from specgen.engine.model_runner import ModelOutput

if TYPE_CHECKING:
    from specgen.engine.model_runner import DraftRunner
    from specgen.types import Context

MOST_BYTES = 128 << 20  # of rows; what comes later is computed each time


class _Row(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor | None


class MemoisedRunner:
    """A session (`DraftRunner`) for runs behind one prompt. `calls` counts what it was asked, `passes` what it had to ask."""

    def __init__(self, runner: DraftRunner) -> None:
        self._runner = runner
        self.context_limit, self.num_embeddings = runner.context_limit, runner.num_embeddings
        self.vocab_size, self.device = runner.vocab_size, runner.device
        self._rows: dict[tuple[tuple[int, ...], tuple[int, ...]], _Row] = {}
        self.calls = self.passes = self._bytes = 0

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        """As `Session.logits`."""
        self.calls += 1
        tokens = list(draft)
        above = list(range(-1, len(tokens) - 1)) if parents is None else list(parents)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, above, strict=True):
            paths.append((*paths[parent + 1], token))
        behind = tuple(context.ids[context.prompt_length :])
        keys = [(behind, path) for path in paths[start:]]
        if all(key in self._rows for key in keys):
            kept = [self._rows[key] for key in keys]
            hidden = [row.hidden for row in kept if row.hidden is not None]
            return ModelOutput(torch.stack([row.logits for row in kept]), torch.stack(hidden) if hidden else None)
        self.passes += 1
        found = self._runner.logits(context, tokens, above, start=start)
        for position, key in enumerate(keys):
            if self._bytes < MOST_BYTES and key not in self._rows:
                row = found.logits[position].clone()
                self._rows[key] = _Row(row, None if found.hidden_states is None else found.hidden_states[position].clone())
                self._bytes += row.numel() * row.element_size()
        return found
