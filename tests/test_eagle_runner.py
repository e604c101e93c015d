"""EAGLE heads as draft models: their logits by definition, whatever was drafted, accepted or interrupted before."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from eagle_heads import drafted, features_of, logits_of, random_head
from families import VOCAB, make_model, model_of
from runner_checks import path_to, random_path, random_tree

from specgen.engine.heads.eagle_runner import EagleRunner, make_runners
from specgen.engine.heads.weights import EagleWeights
from specgen.engine.model import Model
from specgen.engine.model_runner import ModelRunner
from specgen.types import Context

REDUCED = [*range(3, 40), 41, 77]
HEADS: dict[str, dict[str, Any]] = {
    "1": {"version": 1},
    "1 biases, 2 layers": {"version": 1, "biases": True, "layers": 2, "own_embedding": VOCAB},
    "3": {"version": 3},
    "3 reduced": {"version": 3, "vocabulary": REDUCED},
    "3 qwen": {"version": 3, "vocabulary": REDUCED, "qk_norm": True, "norm_before_residual": True, "layers": 2},
}


@cache
def target(family: str, backend: str) -> tuple[Any, Model]:
    module = make_model(family)
    return module, model_of(module, backend)


class Checked:
    """A head's runner on a target, whose logits are compared with the definition's."""

    def __init__(self, head: EagleWeights, family: str = "llama", backend: str = "native") -> None:
        self.module, self.model = target(family, backend)
        self.head = head
        self.target, self.runner = make_runners(head, self.model, ModelRunner(self.model), lambda: None)
        assert isinstance(self.runner, EagleRunner)

    def embed(self, ids: list[int]) -> torch.Tensor:
        table = self.head.tensors.get("embed_tokens.weight")
        return self.model.embeddings(torch.tensor(ids)) if table is None else table[ids]

    def check(self, context: Context, draft: list[int], parents: list[int] | None = None, start: int = 0) -> None:
        """Assert that the logits and predicted features from index `start` on are those of the definition."""
        output = self.runner.logits(context, draft, parents, start=start)
        assert output.hidden_states is not None
        assert output.logits.shape == (len(draft) + 1 - start, self.model.vocab_size)
        features = features_of(self.module, self.head, context.ids)
        links = list(range(-1, len(draft) - 1)) if parents is None else parents
        for index in range(start, len(draft) + 1):
            path = path_to(draft, links, index - 1)
            with torch.no_grad():
                hidden = drafted(self.head, self.embed, features, context.ids, path)[-1:]
                logits = logits_of(self.head, self.model, hidden)
            torch.testing.assert_close(output.hidden_states[index - start], hidden[0], atol=5e-4, rtol=1e-3)
            torch.testing.assert_close(output.logits[index - start], logits[0], atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_the_definition(name: str) -> None:
    """Rows of chains and of all paths of trees, after any mixture of acceptances, new contexts and repeated calls."""
    rng = random.Random(name)
    checked = Checked(random_head(**HEADS[name]))
    contexts = [Context([1, *(rng.randrange(3, 40) for _ in range(size))]) for size in (1, 6)]
    for _ in range(8):
        context = rng.choice(contexts)
        if rng.random() < 0.2:
            context = Context([*context.ids[: rng.randrange(2, len(context) + 1)], rng.randrange(3, 40)])
            contexts[rng.randrange(2)] = context
        draft, parents = random_tree(rng, rng.randrange(1, 7))
        if rng.random() < 0.4:
            parents = list(range(-1, len(draft) - 1))
        for start in sorted({0, rng.randrange(len(draft) + 1), len(draft)}):  # what was run before is not run again
            checked.check(context, draft, parents, start)
        path = random_path(rng, parents)
        context.extend([*(draft[node] for node in path), rng.randrange(3, 40)])
