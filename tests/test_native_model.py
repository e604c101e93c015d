"""The native decoder's logits against those of transformers' own models, for all families and their settings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import BOUNDARY, CASES, both, expected, variant
from runner_checks import path_to, random_path, random_tree

from specgen.engine import cached_prefix
from specgen.engine.model_runner import ModelRunner
from specgen.engine.native.native_model import NativeModel
from specgen.types import Context

TOLERANCE = 1e-4  # on logits of size 1 to 20


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
            made[family, index] = both(variant(family, index), tmp_path_factory.mktemp("model"))
        return made[family, index]

    return get


@pytest.mark.parametrize(("family", "index"), CASES)
@torch.no_grad()
def test_logits_without_a_cache(models: Any, family: str, index: int) -> None:
    module, native = models(family, index)
    for count in (1, BOUNDARY, 70):
        ids = random_ids(count)
        assert_close(native.reference_logits(ids), module(torch.tensor([ids]), use_cache=False).logits[0])


def random_calls(module: Any, native: NativeModel, rng: random.Random, prompt: list[int], longest: int, steps: int = 9) -> None:
    """Chains, trees, commits, growing drafts and other contexts in any order, up to `longest` tokens."""
    runner, context = ModelRunner(native), Context(prompt)
    for step in range(steps):
        if step == 6:  # another text with the same beginning
            context = Context([*prompt[:-2], *context.ids[len(prompt) - 2 : len(prompt) + 3], 9, 9][:longest])
        room = longest - len(context)
        tokens, parents = random_tree(rng, min(room, rng.choice((0, 1, 2, 5, 9, 17))))
        if step % 3 != 1:
            parents = list(range(-1, len(tokens) - 1))
        begin = min(len(tokens), rng.choice((0, 0, 1, 3)))
        if begin:
            runner.logits(context, tokens[:begin], parents[:begin])
        check(module, runner.logits(context, tokens, parents, start=begin).logits, context, tokens, parents, begin)
        accepted = [tokens[node] for node in random_path(rng, parents)]
        context.extend([*accepted, rng.randrange(3, 40)][: longest - len(context)])


@pytest.mark.parametrize(("family", "index"), CASES)
def test_a_runner_gives_the_logits_of_passes_without_a_cache(models: Any, family: str, index: int) -> None:
    module, native = models(family, index)
    rng = random.Random(f"{family} {index}")
    longest = BOUNDARY if native.shape.rope_boundary else 90
    random_calls(module, native, rng, random_ids(rng.randrange(2, 12), index), longest)


@pytest.mark.parametrize(("family", "index"), CASES)
def test_long_prompts_in_chunks_and_in_one_pass(
    models: Any, family: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, native = models(family, index)
    ids, tokens = random_ids(71), random_ids(5, 1)
    for size in (1024, 13):  # more than 64 tokens take other operations
        monkeypatch.setattr(cached_prefix, "PREFILL_CHUNK", size)
        for parents in (list(range(-1, 4)), [-1, 0, -1, 0, 3]):
            runner, context = ModelRunner(native), Context(ids)
            check(module, runner.logits(context, tokens, parents).logits, context, tokens, parents)
            context.extend(random_ids(2, 2))
            check(module, runner.logits(context, tokens, parents).logits, context, tokens, parents)
