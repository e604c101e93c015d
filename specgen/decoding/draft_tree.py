"""A draft that branches while it is drafted: its nodes live in the draft model's session, which runs each of them once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specgen.decoding import logits_ops
from specgen.errors import nan_logits
from specgen.types import Context

if TYPE_CHECKING:
    from specgen.engine.model_runner import DraftRunner


class DraftTree:
    """Nodes behind a context, added level by level; one pass of the model a level, whatever its width."""

    def __init__(self, runner: DraftRunner, context: Context, vocab_size: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._runner, self._context, self._vocab_size = runner, context, vocab_size
        self._rows: list[torch.Tensor] = []
        self.hidden: torch.Tensor | None = None  # [nodes, width] behind the last rows, where the session tells
        self._run = -1  # the last node that the model was run on

    def add(self, parent: int, token: int) -> int:
        """A node of the next level. `token` is -1 where it came out of a NaN, which raises RunError."""
        if token < 0:
            raise nan_logits("draft")
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def rows(self, nodes: Sequence[int]) -> torch.Tensor:
        """The logits [nodes, vocabulary] after each of `nodes`, all added since the last call; [-1] is the context's end."""
        first = self._run + 1 if self.tokens else -1
        self._run = len(self.tokens) - 1
        found = self._runner.logits(self._context, self.tokens, self.parents, start=first + 1)
        rows = found.logits[:, : self._vocab_size]
        self._rows.append(rows)
        self.hidden = found.hidden_states
        positions = [node - first for node in nodes]
        if positions == list(range(rows.shape[0])):
            return rows
        selected = torch.tensor(positions, device=rows.device)
        self.hidden = None if found.hidden_states is None else found.hidden_states[selected]
        return rows[selected]

    def logits(self, nodes: Sequence[int]) -> torch.Tensor:
        """The rows [nodes, vocabulary] that each of `nodes` came from, for the record."""
        rows = torch.cat(self._rows)
        return rows[torch.tensor([self.parents[node] + 1 for node in nodes], device=rows.device)]

    def figures(self, nodes: Sequence[int]) -> tuple[list[float], list[float]]:
        """Entropy (nats) and top probability of the unwarped distribution that each of `nodes` came from, in one transfer."""
        origins = sorted({self.parents[node] for node in nodes})
        rows = torch.cat(self._rows)
        selected = rows[torch.tensor([origin + 1 for origin in origins], device=rows.device)]
        negative, top = torch.stack(logits_ops.figures(selected)).tolist()
        if math.isnan(sum(negative)):
            raise nan_logits("draft")
        position = {origin: at for at, origin in enumerate(origins)}
        of_nodes = [position[self.parents[node]] for node in nodes]
        return [abs(negative[at]) for at in of_nodes], [math.exp(top[at]) for at in of_nodes]
