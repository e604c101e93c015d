"""The native decoder's logits against those of transformers' own models, for all families and their settings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import BOUNDARY, CASES, VARIANTS, both, expected, load, variant
from runner_checks import path_to, random_path, random_tree
from transformers import AutoModelForCausalLM

from specgen.base.types import Context
from specgen.engine import cached_prefix
from specgen.engine.forward_pass import LayerPart
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.native_model import NativeModel
from specgen.engine.transformers.transformers_model import TransformersModel

TOLERANCE = 1e-4  # on logits of size 1 to 20
LAYERED = [family for family in VARIANTS if family not in ("gemma3_text", "granite")]  # as Llama in transformers


def random_ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 96) for _ in range(count)]


def assert_close(found: torch.Tensor, logits: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == logits.shape
    assert logits.abs().max() > 0.5
    torch.testing.assert_close(found, logits, rtol=0, atol=tolerance)


def check(module: Any, found: torch.Tensor, context: Context, tokens: list[int], parents: list[int], start: int = 0) -> None:
    """Compares a runner's logits, from index `start` on, with those of passes over each path without a cache."""
    paths = [context.ids + path_to(tokens, parents, index - 1) for index in range(start, len(tokens) + 1)]
    assert_close(found, expected(module, paths))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns both backends' model of a family's variant, made once."""
    made: dict[tuple[str, int], tuple[Any, NativeModel]] = {}

    def get(family: str, index: int = 0) -> tuple[Any, NativeModel]:
        if (family, index) not in made:
            made[family, index] = both(variant(family, index), folder(family, index))
        return made[family, index]

    def folder(family: str, index: int = 0) -> Path:
        return base / f"{family} {index}"

    base = tmp_path_factory.mktemp("models")
    get.folder = folder  # type: ignore[attr-defined]
    return get


@pytest.mark.parametrize(("family", "index"), CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(models: Any, family: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache; after prompts in chunks and in one pass; trees and chains of a few tokens, and of 64 and more, whose
    attention has other operations and other masks; with padded passes and packed weights."""
    module, native = models(family, index)
    for count in (1, BOUNDARY, 70):
        ids = random_ids(count)
        assert_close(native.reference_logits(ids), module(torch.tensor([ids]), use_cache=False).logits[0])
    padded = load(models.folder(family, index), pack=True, min_rows=4)
    assert all(choice.packed for choice in padded.product_choices)
    long_tree = random_tree(random.Random(family), 66)
    for runner, size in ((ModelRunner(native), 1024), (ModelRunner(native), 13), (ModelRunner(padded), 1024)):
        monkeypatch.setattr(cached_prefix, "PREFILL_CHUNK", size)
        context = Context(random_ids(BOUNDARY + 9 if size == 13 or native.shape.rope_boundary else 7))
        trees = (random_ids(5, 1), [-1, 0, -1, 0, 3]), long_tree, (long_tree[0], [*range(-1, 65)])
        for tokens, parents in trees:
            start = max(0, len(tokens) - 6)
            check(module, runner.logits(context, tokens, parents, start=start).logits, context, tokens, parents, start)
            context.extend([tokens[0], 8])


@pytest.mark.parametrize(("number", "family"), list(enumerate(VARIANTS)))
@torch.no_grad()
def test_narrow_dtypes_are_as_good_as_in_transformers(models: Any, number: int, family: str) -> None:
    (module, _), dtype = models(family), (torch.bfloat16, torch.float16)[number % 2]
    native = load(models.folder(family), dtype)
    own = AutoModelForCausalLM.from_pretrained(models.folder(family), dtype=dtype, attn_implementation="eager")
    ids = torch.tensor([random_ids(100, seed) for seed in range(3)])
    reference = module(ids, use_cache=False).logits.log_softmax(-1)
    found = torch.stack([native.reference_logits(row).float() for row in ids.tolist()]).log_softmax(-1)
    theirs = own(ids, use_cache=False).logits.float().log_softmax(-1)
    divergences = [(reference.exp() * (reference - other)).sum(-1) for other in (found, theirs)]
    assert divergences[0].mean() < 1.5 * divergences[1].mean() + 1e-6
    assert divergences[0].quantile(0.9) < 2 * divergences[1].quantile(0.9) + 1e-6


@pytest.mark.parametrize("family", LAYERED)
def test_layers_with_parts_left_out(models: Any, family: str) -> None:
    module, native = models(family)
    both_models, longest = (TransformersModel(module), native), BOUNDARY if native.shape.rope_boundary else 80
    both_models[0].check_layers("this test")
    for parts in ([LayerPart(0), LayerPart(2, attention=False), LayerPart(3, mlp=False)], [LayerPart(1), LayerPart(3)]):
        runners = [ModelRunner(model, forward=model.forward(parts)) for model in both_models]
        rng, context = random.Random(family), Context(random_ids(6))
        for step in range(6):
            tokens, parents = random_tree(rng, min(longest - len(context), rng.choice((0, 1, 3, 9))))
            if step % 2:
                parents = list(range(-1, len(tokens) - 1))
            first, second = (runner.logits(context, tokens, parents) for runner in runners)
            assert_close(first.logits, second.logits)
            assert first.hidden_states is not None
            assert second.hidden_states is not None
            assert_close(first.hidden_states, second.hidden_states)
            accepted = [tokens[node] for node in random_path(rng, parents)]
            context.extend([*accepted, rng.randrange(3, 40)][: longest - len(context)])
