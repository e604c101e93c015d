"""GliDe's runner: its rows are those of a plain reference on the target's own keys and values, after any sequence of calls."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from families import make_model, model_of
from glide_models import GlideReference
from runner_checks import path_to, random_path, random_tree

from specgen.engine.heads.glide_runner import GlideRunner
from specgen.engine.model_runner import ModelRunner
from specgen.types import Context


def runners(reference: GlideReference, backend: str = "native") -> tuple[ModelRunner, GlideRunner]:
    model = model_of(reference.target, backend)
    target = ModelRunner(model)
    return target, GlideRunner(reference.weights, model, target)


def check(reference: GlideReference, logits: torch.Tensor, context: Context, tokens: list[int], parents: Any, start: int) -> None:
    """Assert that the logits from index `start` on are those of the reference, each path by itself."""
    assert logits.shape[0] == len(tokens) + 1 - start
    for index in range(start, len(tokens) + 1):
        expected = reference.drafted(context.ids, path_to(tokens, parents, index - 1))[-1]
        torch.testing.assert_close(logits[index - start], expected, atol=2e-4, rtol=1e-4)


FAMILIES = {  # what differs in the target's keys: grouped heads, norms, partial rotation, neighbouring pairs, none
    "llama": {},
    "qwen3": {},
    "stablelm": {"partial_rotary_factor": 0.5},
    "gemma2": {},
    "gemma3_text": {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "cohere": {},
    "mistral": {},
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_chains_and_trees_in_any_order_give_the_rows_of_the_reference(family: str, shared: bool) -> None:
    layers = 2 if family in ("llama", "gemma3_text") else 1
    reference = GlideReference(make_model(family, **FAMILIES[family]), layers=layers, shared=shared)
    target, draft = runners(reference)
    rng = random.Random(family)
    context = Context([1, 5, 6, 7])
    for step in range(10):
        if step == 6:  # another sequence that shares its beginning with the cached one
            context = Context([*context.ids[:3], 9, 9])
        tokens, parents = random_tree(rng, rng.randrange(0, 6))
        if step % 3 == 0:
            parents = list(range(-1, len(tokens) - 1))
        start = rng.randrange(len(tokens) + 1) if step % 2 else 0
        check(reference, draft.logits(context, tokens, parents, start=start).logits, context, tokens, parents, start)
        if rng.random() < 0.7:  # otherwise the target lacks tokens at the draft's next call
            target.logits(context, tokens, parents)
        context.extend([*(tokens[node] for node in random_path(rng, parents)), rng.randrange(3, 40)])
