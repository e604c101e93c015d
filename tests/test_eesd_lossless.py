"""Early exit, draft trees and layer skipping give the target's output with bad drafts, too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from families import BACKENDS, CONTEXT, FAMILIES, make_model, plain, prompt, save, with_exit
from runner_checks import LAYERED, RUN_BY, four_layers, quick

import specgen
from specgen.base.types import SamplingParams
from specgen.pair.pair import Pair

COUNT = 14
LAYERS = 4  # as many as `four_layers` gives
METHODS = {
    "eesd": {},
    "eesd-fixed": {"k": 4},
    "eesd-fixed:policy": {"policy": "svip"},
    "eesd-beta": {},
    "eesd-cali": {},
    "eesd-cali:model": {"sampling_prediction": False},
    "eesd-cali:sampling": {"model_prediction": False},
    "eesd-tree": {"width": 2, "depth": 4},
    "eesd-tree:3": {"width": 3, "depth": 3, "theta0": 1.0, "sigma_model": 0.001},
    "eesd-tree:4": {"width": 4, "depth": 6},
    "eesd-tree:dynamic": {"width": 3, "depth": 4, "nodes": 7},
    "eesd-fixed:cape": {"k": 3, "cape": True},
    "eesd-tree:adaptive": {"policy": "adaptive", "width": 2, "draft_cost": 0.1, "verify_cost": 0.05},
    "selfsd": {"skip": "1+2"},
    "selfsd:parts": {"skip": "0a+1m+2", "policy": "fixed", "k": 5},
    "selfsd:cape": {"skip": "1+2", "policy": "fixed", "k": 3, "cape": True},
}


@pytest.fixture(scope="module")
def pair_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """A float32 target of four layers without a draft model, with an untrained exit after layer N, by default native."""

    @cache
    def folder(family: str) -> str:
        return save(make_model(family, **four_layers(family)), tmp_path_factory.mktemp(family))

    @cache
    def made(family: str, backend: str) -> Pair:
        return specgen.load(folder(family), device="cpu", dtype="float32", backend=backend)

    @cache
    def of_depth(family: str, depth: int, backend: str = "native") -> Pair:
        target = made(family, backend).target
        return with_exit(Pair(target, None), depth)

    return of_depth


def exits() -> Iterator[tuple[str, str, int]]:
    """Every family and backend with one depth of the exit."""
    for number, (family, backend) in enumerate(LAYERED):
        yield family, backend, (1, LAYERS // 2)[number // 2 % 2]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), LAYERED)
def test_greedy_ids_with_another_depth_of_the_exit(pair_with: Callable[..., Pair], family: str, backend: str) -> None:
    depths = {(family, backend): depth for family, backend, depth in exits()}
    check_greedy_ids(pair_with, family, backend, 3 - depths[family, backend], list(METHODS))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend", "depth"), list(exits()))
def test_greedy_ids_of_all_methods(pair_with: Callable[..., Pair], family: str, backend: str, depth: int) -> None:
    check_greedy_ids(pair_with, family, backend, depth, list(METHODS))


@pytest.mark.parametrize(("family", "backend", "depth"), quick(exits()))
def test_greedy_ids_are_the_targets_own(pair_with: Callable[..., Pair], family: str, backend: str, depth: int) -> None:
    """Of a third of the methods: in turn another third, so that several families, exits and both backends run each method."""
    turn = (list(FAMILIES).index(family) + BACKENDS.index(backend)) % 3
    check_greedy_ids(pair_with, family, backend, depth, list(METHODS)[turn::3])


def check_greedy_ids(pair_with: Callable[..., Pair], family: str, backend: str, depth: int, names: list[str]) -> None:
    pair = pair_with(family, depth, backend)
    expected = {seed: plain(pair.target.transformers_module, prompt(seed), COUNT) for seed in (depth, depth + 100)}
    for name, (seed, tokens) in zip(names, cycle(expected.items()), strict=False):
        # the caches hold another method's run on another prompt
        result = pair.generate(
            prompt(seed), name.partition(":")[0], SamplingParams(max_new_tokens=COUNT, seed=seed), **METHODS[name]
        )
        assert result.token_ids == tokens, (name, seed)


@pytest.mark.parametrize("length", range(1, 9))
def test_greedy_ids_for_every_length_of_draft(pair_with: Callable[..., Pair], length: int) -> None:
    pair = pair_with("qwen2", 1, BACKENDS[length % 2])
    ids = prompt(length)
    expected = plain(pair.target.transformers_module, ids, COUNT)
    runs: list[tuple[str, dict[str, object]]] = [
        ("eesd-fixed", {"k": length}),
        ("eesd-beta", {"max_draft": length, "alpha": 50}),
        ("eesd-tree", {"width": 1 + length % 4, "depth": length, "theta0": 1.0}),
        ("selfsd", {"skip": "1+2", "k": length}),
    ]
    for name, settings in runs:
        result = pair.generate(ids, name, SamplingParams(max_new_tokens=COUNT, seed=1), **settings)
        assert result.token_ids == expected, name
        assert max(round_.draft.levels for round_ in result.rounds) <= length


def every_tree() -> Iterator[object]:
    """All drafts and widths with the native Llama, one draft and width with the others; the rest are slow tests."""
    for (family, backend), (draft, width) in product(
        [case for case in RUN_BY if case[0] in ("llama", "gemma2", "gpt2", "gpt_neox")],
        [("unrelated", 3), ("near", 2), ("near", 4), ("itself", 2)],
    ):
        often = (family, backend) == ("llama", "native") or (draft, width) == ("near", 4)
        yield pytest.param(family, draft, width, backend, marks=() if often else pytest.mark.slow)


@pytest.mark.parametrize(("family", "draft", "width", "backend"), list(every_tree()))
def test_trees_of_a_draft_model(pair_of: Callable[..., Pair], family: str, draft: str, width: int, backend: str) -> None:
    pair = pair_of(family, draft, backend)
    ids = prompt(width)
    expected = plain(pair.target.transformers_module, ids, COUNT)
    for settings in ({"k": 4}, {"depth": 3}, {"policy": "svip"}, {"k": 3, "nodes": 8}):
        result = pair.generate(ids, "sd", SamplingParams(max_new_tokens=COUNT), width=width, **settings)
        assert result.token_ids == expected, settings
        widest = max(list(round_.draft.parents).count(-1) for round_ in result.rounds)
        assert widest == width
    result = pair.generate(ids, "sd", SamplingParams(max_new_tokens=COUNT), k=3, cape=True)
    assert result.token_ids == expected
    assert any(not round_.draft.is_chain for round_ in result.rounds)


def test_a_tree_of_the_target_itself_is_accepted_to_its_leaves(demo_pair: Pair) -> None:
    """For a trained target. An untrained one's continuations are so alike that the greedy path need not be among the two best."""
    itself = Pair(demo_pair.target, demo_pair.target)
    result = itself.generate("def add(a, b):\n", "sd", SamplingParams(max_new_tokens=31, ignore_eos=True), width=2, k=4)
    assert [len(round_.verdict.path) for round_ in result.rounds[1:]] == [4] * 6
    assert all(round_.verdict.source == "bonus" for round_ in result.rounds[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_that_skip_a_layer_without_effect_are_fully_accepted(tmp_path: Path, backend: str) -> None:
    """Skipping a layer leaves the residual stream unchanged, as a layer whose attention and MLP give zeros does."""
    model = make_model("llama", **four_layers("llama"))
    layer = model.model.layers[2]
    for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
        torch.nn.init.zeros_(output.weight)
    pair = specgen.load(save(model, tmp_path), device="cpu", dtype="float32", backend=backend)
    sampling = SamplingParams(max_new_tokens=31, ignore_eos=True)
    result = pair.generate(prompt(3), "selfsd", sampling, skip="2", policy="fixed", k=4)
    assert [len(round_.verdict.path) for round_ in result.rounds[1:]] == [4] * 6


@pytest.mark.parametrize("name", METHODS)
def test_sampled_runs_repeat_with_their_seed_after_runs_of_other_methods(pair_with: Callable[..., Pair], name: str) -> None:
    pair = pair_with("llama", 1)
    sampling = SamplingParams(max_new_tokens=12, temperature=0.9, top_k=20, seed=5)
    method, settings = name.partition(":")[0], METHODS[name]
    first = pair.generate(prompt(5), method, sampling, **settings).token_ids
    pair.generate(prompt(6), "lookup", sampling)
    rounds = pair.rounds(prompt(7), method, sampling, **settings)
    for _ in range(2):
        next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    assert pair.generate(prompt(5), method, sampling, **settings).token_ids == first


def test_penalties_apply_to_draft_and_target(tmp_path: Path) -> None:
    model = make_model("llama", **four_layers("llama"))
    model.generation_config.repetition_penalty = 1.4
    model.generation_config.no_repeat_ngram_size = 2
    target = specgen.load(save(model, tmp_path), device="cpu", dtype="float32").target
    pair = with_exit(Pair(target, None), 1)
    ids = prompt(4)
    expected = plain(target.transformers_module, ids, 16)
    for name, settings in METHODS.items():
        result = pair.generate(ids, name.partition(":")[0], SamplingParams(max_new_tokens=16, seed=0), **settings)
        assert result.token_ids == expected, name


def test_a_run_to_the_contexts_end(pair_with: Callable[..., Pair]) -> None:
    pair = pair_with("mistral", 2)
    rng = random.Random(0)
    ids = [rng.randrange(3, 40) for _ in range(CONTEXT - 20)]
    expected = plain(pair.target.transformers_module, ids, 20)
    for name, settings in METHODS.items():
        result = pair.generate(ids, name.partition(":")[0], SamplingParams(max_new_tokens=50, seed=0), **settings)
        assert result.token_ids == expected[: len(result.token_ids)]
        assert len(result.token_ids) in (20, len(expected))
