"""A draft tree that grows level by level: the draft model runs once for each level, whatever its width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from specgen.decoding import logits_ops
from specgen.decoding.drafters import DraftSetup, draft_statistics
from specgen.types import Context, Draft


class DraftTree:
    """Nodes after a context. The draft model's KV cache holds them, so that no node is run twice."""

    def __init__(self, setup: DraftSetup, context: Context) -> None:
        assert setup.runner is not None
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.hidden: torch.Tensor | None = None  # [nodes, width] of the last logits, if the runner returns hidden states
        self._runner, self._setup, self._context = setup.runner, setup, context
        self._logits: list[torch.Tensor] = []
        self._last_run = -1  # the last node that the model was run on

    def add(self, parent: int, token: int) -> int:
        """A node of the next level. Raises RunError for token -1, which says that the logits held a NaN."""
        self.tokens.append(logits_ops.valid_token(token, "draft"))
        self.parents.append(parent)
        return len(self.tokens) - 1

    def next_logits(self, nodes: Sequence[int]) -> torch.Tensor:
        """The logits [nodes, vocabulary] after each of `nodes`, which were added since the last call; [-1] for the context."""
        first = self._last_run + 1 if self.tokens else -1
        self._last_run = len(self.tokens) - 1
        output = self._runner.logits(self._context, self.tokens, self.parents, start=first + 1)
        logits = output.logits[:, : self._setup.vocab_size]
        self._logits.append(logits)
        self.hidden = output.hidden_states
        positions = [node - first for node in nodes]
        if positions == list(range(logits.shape[0])):
            return logits
        selected = torch.tensor(positions, device=logits.device)
        self.hidden = None if output.hidden_states is None else output.hidden_states[selected]
        return logits[selected]

    def draft(self, reason: str, **fields: Any) -> Draft:
        """All nodes as a draft; `fields` are those of `Draft` that the tree does not know."""
        return Draft(self.tokens, self.parents, stop_reason=reason, **self._recorded(range(len(self.tokens))), **fields)

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`; empty for -1."""
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = self.parents[node]
        return path

    def path_draft(self, path: Sequence[int], reason: str, **fields: Any) -> Draft:
        """The nodes of a path as a chain."""
        return Draft.chain([self.tokens[node] for node in path], stop_reason=reason, **self._recorded(path), **fields)

    def _recorded(self, nodes: Iterable[int]) -> dict[str, Any]:
        """Entropies and top probabilities of the distributions that `nodes` came from, in one transfer; the logits if kept."""
        logits = torch.cat(self._logits)
        parents = [self.parents[node] for node in nodes]
        origins = sorted(set(parents))
        entropies, top_probs = draft_statistics(logits[torch.tensor([origin + 1 for origin in origins], device=logits.device)])
        at = {origin: position for position, origin in enumerate(origins)}
        return {
            "entropies": [entropies[at[parent]] for parent in parents],
            "top_probs": [top_probs[at[parent]] for parent in parents],
            "logits": logits[torch.tensor([parent + 1 for parent in parents], device=logits.device)]
            if self._setup.keep_logits
            else None,
        }
