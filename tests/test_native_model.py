"""The native decoder's logits against those of transformers' own models, for all families and their settings."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import BOUNDARY, CASES, ROPES, VARIANTS, both, expected, load, longrope, variant
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


def in_turn(families: Iterable[str], kinds: Sequence[Any]) -> list[Any]:
    """Every family with every kind. Llama with all, the others with one in turn; the rest is slow."""
    return [
        pytest.param(family, kind, marks=() if family == "llama" or (row + column) % len(kinds) == 0 else pytest.mark.slow)
        for (row, family), (column, kind) in product(enumerate(families), enumerate(kinds))
    ]


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


def compare_calls(module: Any, native: NativeModel, seed: str) -> None:
    """A tree, an accepted path of it, and a chain."""
    rng, context, runner = random.Random(seed), Context(random_ids(7)), ModelRunner(native)
    for size in (9, 5):
        tokens, parents = random_tree(rng, size)
        check(module, runner.logits(context, tokens, parents).logits, context, tokens, parents)
        context.extend([*(tokens[node] for node in random_path(rng, parents)), 8])
    chain = list(range(-1, 3))
    check(module, runner.logits(context, tokens[:4], chain).logits, context, tokens[:4], chain)


@pytest.mark.parametrize(("family", "index"), CASES)
@torch.no_grad()
def test_logits_without_a_cache(models: Any, family: str, index: int) -> None:
    module, native = models(family, index)
    for count in (1, BOUNDARY, 70):
        ids = random_ids(count)
        assert_close(native.reference_logits(ids), module(torch.tensor([ids]), use_cache=False).logits[0])


@pytest.mark.parametrize(
    ("family", "index"),
    [
        pytest.param(family, index, marks=() if index == len(VARIANTS[family]) - 1 else pytest.mark.slow)
        for family in VARIANTS
        for index in range(len(VARIANTS[family]))
    ],
)
def test_long_prompts_in_chunks_and_in_one_pass(models: Any, family: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, native = models(family, index)
    ids, tokens = random_ids(71), random_ids(5, 1)
    for size, parents in ((1024, [-1, 0, -1, 0, 3]), (13, list(range(-1, 4)))):  # passes of 64 tokens take other operations
        monkeypatch.setattr(cached_prefix, "PREFILL_CHUNK", size)
        runner, context = ModelRunner(native), Context(ids)
        check(module, runner.logits(context, tokens, parents).logits, context, tokens, parents)
        context.extend(random_ids(2, 2))
        check(module, runner.logits(context, tokens, parents).logits, context, tokens, parents)


@pytest.mark.parametrize("family", VARIANTS)
def test_many_tokens_at_once(models: Any, family: str) -> None:
    """Chains and trees of 64 tokens and more, whose attention has other operations and other masks."""
    module, native = models(family)
    runner, context = ModelRunner(native), Context(random_ids(9))
    tokens, parents = random_tree(random.Random(family), 66)
    for of_tokens in (parents, list(range(-1, 65))):
        check(module, runner.logits(context, tokens, of_tokens, start=60).logits, context, tokens, of_tokens, 60)


@pytest.mark.parametrize("family", VARIANTS)
def test_padded_passes_and_packed_weights_give_the_same_logits(models: Any, family: str) -> None:
    index = len(VARIANTS[family]) - 1
    module, _ = models(family, index)
    native = load(models.folder(family, index), pack=True, min_rows=4)
    assert all(choice.packed for choice in native.product_choices)
    compare_calls(module, native, family)


@pytest.mark.parametrize(("family", "dtype"), in_turn(VARIANTS, [torch.bfloat16, torch.float16]))
@torch.no_grad()
def test_narrow_dtypes_are_as_good_as_in_transformers(models: Any, family: str, dtype: torch.dtype) -> None:
    module, _ = models(family)
    native = load(models.folder(family), dtype)
    own = AutoModelForCausalLM.from_pretrained(models.folder(family), dtype=dtype, attn_implementation="eager")
    ids = torch.tensor([random_ids(100, seed) for seed in range(3)])
    reference = module(ids, use_cache=False).logits.log_softmax(-1)
    found = torch.stack([native.reference_logits(row).float() for row in ids.tolist()]).log_softmax(-1)
    of_transformers = own(ids, use_cache=False).logits.float().log_softmax(-1)
    ours, theirs = ((reference.exp() * (reference - other)).sum(-1) for other in (found, of_transformers))
    assert ours.mean() < 1.5 * theirs.mean() + 1e-6
    assert ours.quantile(0.9) < 2 * theirs.quantile(0.9) + 1e-6
    right, their_right = ((other.argmax(-1) == reference.argmax(-1)).float().mean() for other in (found, of_transformers))
    assert right > their_right - 0.03


def layered(models: Any, family: str) -> tuple[TransformersModel, NativeModel]:
    """Both backends' model of a family whose layers transformers can run one by one."""
    module, native = models(family)
    own = TransformersModel(module)
    own.check_layers("this test")
    return own, native


def compare_runners(runners: tuple[ModelRunner, ModelRunner], seed: str, longest: int) -> None:
    """Compares logits and the hidden states before the LM head of two runners in the same calls."""
    rng, context = random.Random(seed), Context(random_ids(6))
    for step in range(6):
        tokens, parents = random_tree(rng, min(longest - len(context), rng.choice((0, 1, 3, 9))))
        if step % 2:
            parents = list(range(-1, len(tokens) - 1))
        first, second = (runner.logits(context, tokens, parents) for runner in runners)
        assert_close(first.logits, second.logits)
        if first.hidden_states is not None and second.hidden_states is not None:
            assert_close(first.hidden_states, second.hidden_states)
        accepted = [tokens[node] for node in random_path(rng, parents)]
        context.extend([*accepted, rng.randrange(3, 40)][: longest - len(context)])


@pytest.mark.parametrize("family", LAYERED)
def test_layers_with_parts_left_out(models: Any, family: str) -> None:
    pair = layered(models, family)
    longest = BOUNDARY if pair[0].shape.rope_boundary else 80
    for parts in ([LayerPart(0), LayerPart(2, attention=False), LayerPart(3, mlp=False)], [LayerPart(1), LayerPart(3)]):
        runners = [ModelRunner(model, forward=model.forward(parts)) for model in pair]
        compare_runners((runners[0], runners[1]), family, longest)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2), (12, 2)])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("family", "index"), CASES)
def test_every_rotary_embedding_with_every_grouping(
    tmp_path: Path, family: str, index: int, rope: str, heads: tuple[int, int]
) -> None:
    changes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 96, "head_dim": 96 // heads[0]}
    if family == "phi3" and rope not in ("default", "longrope"):
        pytest.skip("Phi-3 has no other rotary embeddings")
    scaling = longrope(48 // heads[0]) if rope == "longrope" else ROPES[rope]  # it has a number for each rotated pair
    changes |= {"rope_scaling": scaling, "partial_rotary_factor": 1.0}
    try:
        module, native = both(variant(family, index, **changes), tmp_path)
    except ValueError as error:
        pytest.skip(f"refused: {error}")
    compare_calls(module, native, f"{family} {index} {rope}")
