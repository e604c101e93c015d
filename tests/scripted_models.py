"""A model runner and an acceptance predictor whose outputs are known, for tests of drafters, verifiers and complete runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgen.engine.model_runner import ModelOutput
from specgen.types import Context

VOCAB = 6
PROMPT = [0, 3, 1, 2, 3, 1]  # it contains matches for prompt lookup


class TableRunner:
    """A model runner whose logits are a function of the last two tokens."""

    vocab_size = num_embeddings = VOCAB
    context_limit = 1000
    device = torch.device("cpu")

    def __init__(self, seed: int, scale: float = 1.5) -> None:
        self.table = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale

    def row(self, ids: Sequence[int]) -> torch.Tensor:
        return self.table[ids[-2], ids[-1]]

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        paths = [context.ids[-2:]]
        for node, token in enumerate(draft):
            paths.append([*paths[node if parents is None else parents[node] + 1], token])
        rows = torch.stack([self.row(path) for path in paths[start:]])
        return ModelOutput(rows, rows)


class TopProbPredictor:
    """An acceptance predictor: the largest softmax value of the draft's hidden state, which is what a `TableRunner` gives."""

    def begin(self, context: Context) -> None:
        pass

    def score(self, draft_row: torch.Tensor, position: int) -> torch.Tensor:
        return draft_row.softmax(dim=-1).max()
