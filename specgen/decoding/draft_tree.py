"""A draft tree that grows level by level: the draft model runs once for each level, whatever its width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specgen.base.types import Context, Draft
from specgen.decoding import logits_ops
from specgen.decoding.drafters import DraftSetup, draft_statistics
from specgen.engine.devices import upload


class DraftTree:
    """The drafted tokens (nodes) after a context. The draft model's KV cache holds the nodes, so each is computed only once."""

    def __init__(self, setup: DraftSetup, context: Context) -> None:
        assert setup.runner is not None
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.hidden: torch.Tensor | None = None  # [nodes, width] of the last logits, if the runner returns hidden states
        self.unpenalised: torch.Tensor | None = None  # [nodes, ...] of the last logits: see `ModelOutput.unpenalised_part`
        self._runner, self._setup, self._context = setup.runner, setup, context
        self._logits: list[torch.Tensor] = []  # without penalties
        self._statistics: list[tuple[float, float]] = []  # see `add_statistics`; `_logits` are of later nodes
        self._last_run = -1  # the last node that the model was run on

    def add(self, parent: int, token: int) -> int:
        """Adds a token after node `parent` (-1: the context) and returns the number of its node.

        Raises RunError if the token is -1, which means that the logits held a NaN.
        """
        self.tokens.append(logits_ops.valid_token(token, "draft"))
        self.parents.append(parent)
        return len(self.tokens) - 1

    def add_statistics(self, statistics: Sequence[tuple[float, float]]) -> None:
        """Adds entropy and top probability of logits that a device kept: first those after the context, then after each node."""
        self._statistics += statistics
        self._last_run = len(self._statistics) - 2

    def next_logits(self, nodes: Sequence[int]) -> torch.Tensor:
        """Runs the draft model on all nodes added since the last call. Returns the logits [nodes, vocabulary] after `nodes`.

        `nodes` are some of the added nodes. The first call, with [-1], returns the logits after the context.
        """
        first = self._last_run + 1 if self.tokens else -1
        self._last_run = len(self.tokens) - 1
        output = self._runner.logits(self._context, self.tokens, self.parents, start=first + 1)
        logits = output.logits[:, : self._setup.vocab_size]
        self.hidden, self.unpenalised = output.hidden_states, output.unpenalised_part(self._setup.vocab_size)
        own = logits if self.unpenalised is None else self.unpenalised
        self._logits.append(own.clone())  # valid until the runner's next call
        positions = [node - first for node in nodes]
        if positions == list(range(logits.shape[0])):
            return logits
        selected = upload(torch.tensor(positions), logits.device)
        self.hidden = None if self.hidden is None else self.hidden[selected]
        self.unpenalised = None if self.unpenalised is None else self.unpenalised[selected]
        return logits[selected]

    def draft(self, reason: str, **fields: Any) -> Draft:
        """Returns all nodes as a draft. `reason` says why it ended; `fields` are further fields of `Draft` by name."""
        return Draft(self.tokens, self.parents, stop_reason=reason, **self._recorded(range(len(self.tokens))), **fields)

    def part(self, nodes: Sequence[int], reason: str) -> Draft:
        """Returns some of the nodes, each after its parent, as a draft with the nodes in this order. `reason`: why it ended."""
        at = {node: position for position, node in enumerate((-1, *nodes), -1)}
        parents = [at[self.parents[node]] for node in nodes]
        return Draft([self.tokens[node] for node in nodes], parents, stop_reason=reason, **self._recorded(nodes))

    def path(self, node: int) -> list[int]:
        """The nodes on the path from the context to `node`, including it; empty if `node` is -1."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def path_draft(self, path: Sequence[int], reason: str, **fields: Any) -> Draft:
        """Returns the nodes of one path as a chain. `reason` says why the draft ended; `fields` are further fields of `Draft`."""
        return Draft.chain([self.tokens[node] for node in path], stop_reason=reason, **self._recorded(path), **fields)

    def _recorded(self, nodes: Sequence[int]) -> dict[str, Any]:
        """The fields `entropies`, `top_probs` and `logits` of `Draft` for `nodes`, from the logits that each was chosen from.

        Empty without nodes. The numbers need one transfer to the host. `logits` is None unless the setup keeps logits.
        """
        if not nodes:
            return {}
        parents, known = [self.parents[node] for node in nodes], self._statistics
        of_origin = {row - 1: numbers for row, numbers in enumerate(known)}
        kept = None
        if self._logits:
            logits, first = torch.cat(self._logits), len(known) - 1
            origins = sorted({*parents} - of_origin.keys())
            rows = logits[upload(torch.tensor([origin - first for origin in origins], dtype=torch.int64), logits.device)]
            of_origin |= zip(origins, zip(*draft_statistics(rows), strict=True), strict=True)
            if self._setup.keep_logits:
                at = upload(torch.tensor([parent - first for parent in parents]), logits.device)
                kept = logits[at, : self._setup.vocab_size]
        entropies, top_probs = zip(*(of_origin[parent] for parent in parents), strict=True)
        return {"entropies": entropies, "top_probs": top_probs, "logits": kept}
