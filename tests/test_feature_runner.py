"""The hidden states that a target keeps for a head: those of transformers, whatever was drafted, accepted and run before."""

from __future__ import annotations

import random

import pytest
import torch
from families import BACKENDS, VOCAB, make_model, model_of
from runner_checks import LAYERED, quick, random_tree

from specgen.base.types import Context
from specgen.engine.native.graphs import Captures
from specgen.engine.native.native_model import NativeModel
from specgen.engine.parts.feature_runner import FeatureRunner


def expected(module: torch.nn.Module, ids: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    """The features of all tokens but the last, by one pass of transformers."""
    states = module(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap][0, :-1] for tap in taps], dim=-1)


def check(module: torch.nn.Module, runner: FeatureRunner, taps: tuple[int, ...]) -> None:
    rng = random.Random(0)
    context = Context([1, 5, 6, 7])
    for step in range(8):
        if step == 5:
            context = Context([*context.ids[:6], 9, 9])
        tokens, parents = random_tree(rng, rng.randrange(0, 7))
        runner.logits(context, tokens, parents)
        path, node = [], -1
        while rng.random() < 0.7 and (children := [i for i, parent in enumerate(parents) if parent == node]):
            node = rng.choice(children)
            path.append(tokens[node])
        context.extend([*path, rng.randrange(3, VOCAB)])
        if step % 3:
            assert torch.allclose(runner.features(context), expected(module, context.ids, taps), atol=2e-4)


@pytest.mark.parametrize(("family", "backend"), quick(LAYERED))
def test_features_are_those_of_transformers(family: str, backend: str) -> None:
    module = make_model(family)
    taps = (0, 1, module.config.num_hidden_layers)
    check(module, FeatureRunner(model_of(module, backend), taps), taps)


def test_static_passes_give_the_same_features() -> None:
    module = make_model("llama", num_hidden_layers=2)
    model = model_of(module, "native")
    assert isinstance(model, NativeModel)
    model.captures = Captures()
    check(module, FeatureRunner(model, (1, 2)), (1, 2))


def test_only_what_reduce_returns_is_kept() -> None:
    module = make_model("llama", num_hidden_layers=2)
    runner = FeatureRunner(model_of(module, "native"), (1, 2), reduce=lambda features: features[:, :3] * 2)
    context = Context([1, 5, 6, 7])
    assert torch.allclose(runner.features(context), 2 * expected(module, context.ids, (1, 2))[:, :3], atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_embeddings_and_head_are_the_models_own(backend: str) -> None:
    module = make_model("gemma3_text" if backend == "native" else "llama")
    model, ids = model_of(module, backend), [5, 6, 7]
    output = module(torch.tensor([ids]), output_hidden_states=True)
    assert torch.allclose(model.embeddings(torch.tensor(ids)), output.hidden_states[0][0], atol=1e-5)
    assert torch.allclose(model.head_logits(output.hidden_states[-1][0]), output.logits[0], atol=1e-4)
