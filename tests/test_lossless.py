"""Greedy ids equal transformers' own `generate`, for every family, backend and method, with good
drafts and bad ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from draft_lengths import LENGTH_SETTINGS
from families import (
    BACKENDS,
    CONTEXT,
    IS_OLD_TRANSFORMERS,
    MIXTURES,
    make_model,
    near_copy,
    plain,
    prompt,
    save,
    with_exit,
)
from pair_helpers import pair_of_models
from runner_checks import HYBRID, LAYERED, RUN_BY, CountedLayers, four_layers

import specgen
from specgen import methods
from specgen.base.settings import parse_pairs
from specgen.base.types import SamplingParams
from specgen.pair.pair import Pair

PairOf = Callable[..., Pair]
COUNT = 10
MODELS = RUN_BY + HYBRID
COSTS = "draft_cost=0.1:verify_cost=0.05"
DRAFTS = ("unrelated", "near", "itself")
METHODS = f"""
ar sd heuristic confidence svip beta-ts lookup suffix:draft_cost=0:verify_cost=0.01 spectr specinfer
lookahead ouroboros
adaptive:draft_cost=0.3:verify_cost=0.1 pearl pearl:pre_verify=false pearl:post_verify=false
sd:width=3 sd:width=2:depth=3
sd:width=4:nodes=8 sd:cape=true sd:width=2:policy=adaptive:{COSTS} spectr:policy=adaptive:{COSTS}
pearl:policy=svip
""".split()
OF_LAYERS = f"""
eesd:{COSTS} eesd-fixed eesd-fixed:policy=svip eesd-fixed:cape=true eesd-beta eesd-cali
eesd-cali:sampling_prediction=false
eesd-cali:model_prediction=false eesd-tree:width=2 eesd-tree:width=3:theta0=1:sigma_model=0.001
eesd-tree:width=3:nodes=7
eesd-tree:policy=adaptive:width=2:{COSTS} selfsd:skip=1+2 selfsd:skip=0a+1m+2:policy=fixed
selfsd:skip=1+2:policy=fixed:cape=true
""".split()


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> PairOf:
    """A target of four layers with an untrained exit after layer N, without a draft model."""

    @cache
    def folder(family: str) -> str:
        return save(make_model(family, **four_layers(family)), tmp_path_factory.mktemp(family))

    @cache
    def made(family: str, depth: int, backend: str) -> Pair:
        target = specgen.load(folder(family), device="cpu", dtype="float32", backend=backend).target
        return with_exit(pair_of_models(target, None), depth)

    return made


KNOWN: dict[tuple[Path, int], list[int]] = {}  # transformers' ids by target and prompt


def check(pair: Pair, written: str, length: int) -> None:
    """Two runs, the second with the caches of the first."""
    name, *given = written.split(":")
    settings: dict[str, object] = dict(parse_pairs(given))
    settings |= (
        {LENGTH_SETTINGS[name]: length}
        if name in LENGTH_SETTINGS and "policy=" not in written
        else {}
    )
    for seed in (length % 3, length % 3 + 100):
        at = pair.target.folder, seed
        if at not in KNOWN:
            KNOWN[at] = plain(pair.target.transformers_module, prompt(seed), COUNT)
        result = pair.generate(
            prompt(seed), name, SamplingParams(max_new_tokens=COUNT, seed=seed), **settings
        )
        assert result.token_ids == KNOWN[at], (written, length)
        assert result.summary["finish_reason"] == (
            "eos" if KNOWN[at][-1] in pair.target.eos_ids else "length"
        )


@pytest.mark.parametrize("number", range(len(MODELS)))
def test_greedy_ids_are_the_targets_own(pair_of: PairOf, number: int) -> None:
    """Each family and backend runs one method, and each method is run by two families or more, with
    several kinds of drafts."""
    assert IS_OLD_TRANSFORMERS or len(MODELS) >= 2 * len(METHODS)
    draft = DRAFTS[(number + number // len(METHODS)) % 3]
    check(
        pair_of(MODELS[number][0], draft, MODELS[number][1]),
        METHODS[number % len(METHODS)],
        1 + number % 8,
    )


@pytest.mark.parametrize("number", range(len(LAYERED)))
def test_greedy_ids_of_drafts_by_the_targets_own_layers(early: PairOf, number: int) -> None:
    family, backend = LAYERED[number]
    assert len(LAYERED) >= len(OF_LAYERS)
    check(
        early(family, 1 + number % 2, backend), OF_LAYERS[number % len(OF_LAYERS)], 1 + number % 8
    )


@pytest.mark.parametrize("family", MIXTURES)
def test_greedy_ids_of_mixtures(pair_of: PairOf, family: str) -> None:
    for number, written in enumerate(("lookup", "pearl:window=3", "selfsd:skip=1", "sd:width=3")):
        check(pair_of(family, DRAFTS[number % 3], "native"), written, 1 + number)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), MODELS)
@pytest.mark.parametrize("length", range(1, 9))
def test_greedy_ids_in_the_full_product(
    pair_of: PairOf, early: PairOf, family: str, backend: str, length: int
) -> None:
    for draft, written in product(DRAFTS, METHODS):
        check(pair_of(family, draft, backend), written, length)
    for depth, written in product((1, 2), OF_LAYERS * ((family, backend) in LAYERED)):
        check(early(family, depth, backend), written, length)


def test_greedy_ids_with_penalties_and_up_to_the_contexts_end(tmp_path: Path) -> None:
    """Penalties apply to draft and target; the last positions belong to the output, whatever drafts
    need."""
    model = make_model("llama", **four_layers("llama"))
    model.generation_config.repetition_penalty = 1.4
    model.generation_config.no_repeat_ngram_size = 2
    folders = [
        save(each, tmp_path / str(number)) for number, each in enumerate((model, near_copy(model)))
    ]
    pair = with_exit(specgen.load(*folders, device="cpu", dtype="float32"), 1)
    ids = (prompt(1) * 30)[: CONTEXT - 16]
    wanted = plain(pair.target.transformers_module, ids, 16)
    for written in METHODS + OF_LAYERS:
        name, *given = written.split(":")
        given += ["window=3"] * (name == "pearl")
        result = pair.generate(
            ids, name, SamplingParams(max_new_tokens=40, seed=0), **dict(parse_pairs(given))
        )
        assert result.token_ids == wanted, written


@pytest.mark.parametrize("backend", BACKENDS)
def test_perfect_drafts_are_accepted(pair_of: PairOf, tmp_path: Path, backend: str) -> None:
    """Sampled from the target itself; or without layers or parts of layers that give zeros, which
    has no effect."""
    sampling = SamplingParams(
        max_new_tokens=31, temperature=0.9, top_k=20, top_p=0.95, seed=3, ignore_eos=True
    )
    # both compute the same logits up to rounding, so a token at the edge of top-p may be rejected
    assert (
        pair_of("llama", "itself", backend)
        .generate(prompt(5), "sd", sampling, k=4)
        .summary["acceptance_rate"]
        > 0.97
    )
    model = make_model("llama", **four_layers("llama"))
    first, second = model.model.layers[1:3]
    for output in (first.self_attn.o_proj, second.self_attn.o_proj, second.mlp.down_proj):
        torch.nn.init.zeros_(output.weight)
    pair = specgen.load(save(model, tmp_path), device="cpu", dtype="float32", backend=backend)
    greedy = SamplingParams(max_new_tokens=31, ignore_eos=True)
    rounds = pair.generate(prompt(3), "selfsd", greedy, skip="1a+2", policy="fixed", k=4).rounds
    assert [len(round_.verdict.path) for round_ in rounds[1:]] == [4] * 6


@pytest.mark.parametrize(
    ("name", "depth", "backend"),
    [
        ("eesd-fixed", 1, "native"),
        ("eesd-beta", 2, "transformers"),
        ("eesd-cali", 2, "native"),
        ("eesd-tree", 1, "native"),
    ],
)
def test_whole_runs_run_each_token_once(
    tmp_path: Path, name: str, depth: int, backend: str
) -> None:
    """The target's layers run the prompt, each correction or bonus token but the last, and each
    drafted token, each once."""
    folder = save(make_model("llama", num_hidden_layers=4), tmp_path)
    pair = with_exit(
        pair_of_models(
            specgen.load(folder, device="cpu", dtype="float32", backend=backend).target, None
        ),
        depth,
    )
    counted = CountedLayers(pair.target.model, pair.parts.named["exit"].load().layers)  # type: ignore[union-attr]
    # runs the layers to check them, which is not counted
    pair.parts.runners(methods.find(name).needs)
    for temperature in (0.0, 1.0):
        pair.forget()
        counted.tokens.clear()
        rounds = pair.generate(
            [1, 5, 6, 7, 8, 9], name, SamplingParams(24, temperature, ignore_eos=True, seed=1)
        ).rounds
        drafted = sum(len(round_.draft.tokens) for round_ in rounds)
        assert drafted > 8
        assert [counted.tokens[str(layer)] for layer in range(4)] == [
            6 + len(rounds) - 1 + drafted
        ] * 4
        assert counted.tokens["exit 0"] < counted.tokens["0"]
