"""Greedy ids equal transformers' own `generate`, for every family, method, kind of draft, draft length and backend."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
from families import BACKENDS, FAMILIES, NATIVE, make_model, plain, prompt
from runner_checks import RUN_BY
from scripted_models import LENGTH_SETTINGS

from specgen.base.settings import parse_pairs
from specgen.base.types import SamplingParams
from specgen.pair.pair import Pair

LENGTHS = tuple(range(1, 9))
DRAFTS = ("unrelated", "near", "itself")
PEARL = ("pearl", "pearl:pre_verify=false", "pearl:post_verify=false")
ADAPTIVE = "adaptive:draft_cost=0.3:verify_cost=0.1"  # drafts of all lengths, and none in some rounds
SUFFIX = "suffix:draft_cost=0:verify_cost=0.01"
METHODS = (
    *("ar", "sd", "heuristic", "confidence", "svip", "beta-ts", "lookup", SUFFIX, "spectr", "specinfer", ADAPTIVE),
    *("lookahead", "ouroboros"),
    *PEARL,
)
COUNT = 14
PROMPTS = 3  # twice as many are run; transformers takes most of the time
AXES = (tuple(FAMILIES), METHODS, DRAFTS, LENGTHS, ("auto", "transformers"))
Case = tuple[str, str, str, int, str]


def pairwise() -> Iterator[Case]:
    """Cases that cover every pair of values of different axes, chosen greedily and deterministically."""
    rng = random.Random(0)
    missing = {((i, a), (j, b)) for (i, left), (j, right) in combinations(enumerate(AXES), 2) for a, b in product(left, right)}
    while missing:
        (i, a), (j, b) = rng.choice(sorted(missing, key=str))

        def case(fixed: dict[int, object]) -> tuple[object, ...]:
            return tuple(fixed.get(axis, rng.choice(values)) for axis, values in enumerate(AXES))

        tried = [case({i: a, j: b}) for _ in range(30)]
        best = max(tried, key=lambda one: len(missing & set(combinations(enumerate(one), 2))))
        missing -= set(combinations(enumerate(best), 2))
        yield best  # type: ignore[misc]


@cache
def expected(family: str, seed: int) -> list[int]:
    """The target of a family does not depend on its draft."""
    return plain(make_model(family), prompt(seed), COUNT)


def check(pair: Pair, family: str, method: str, length: int) -> None:
    name, *fixed = method.split(":")
    setting = LENGTH_SETTINGS.get(name)
    settings: dict[str, object] = dict(parse_pairs(fixed))
    if setting is not None:
        settings[setting] = length
    for seed in (length % PROMPTS, length % PROMPTS + 100):  # the second run starts with the caches of the first
        wanted = expected(family, seed)
        result = pair.generate(prompt(seed), name, SamplingParams(max_new_tokens=COUNT), **settings)
        assert result.token_ids == wanted
        assert [token for round_ in result.rounds for token in round_.token_ids] == wanted
        assert result.summary["finish_reason"] == ("eos" if wanted[-1] in pair.target.eos_ids else "length")


def default_or_slow(case: Case) -> Any:
    """The parameters of a case. Slow are, of the families that specgen has a decoder for, most on transformers, half on it."""
    family, method, _, length, backend = case
    is_slow = family in NATIVE and (length % 4 != 1 if backend == "transformers" else length % 2 == 0 and method != "sd")
    return pytest.param(*case, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("family", "method", "draft", "length", "backend"), list(map(default_or_slow, pairwise())))
def test_greedy_ids_are_the_targets_own(
    pair_of: Callable[..., Pair], family: str, method: str, draft: str, length: int, backend: str
) -> None:
    check(pair_of(family, draft, backend), family, method, length)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), RUN_BY)
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_ids_in_the_full_product(pair_of: Callable[..., Pair], family: str, backend: str, draft: str) -> None:
    pair = pair_of(family, draft, backend)
    for method, length in product(METHODS, LENGTHS):
        check(pair, family, method, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_sampling_from_the_target_itself_accepts_everything(pair_of: Callable[..., Pair], length: int) -> None:
    pair = pair_of("llama", "itself", BACKENDS[length % 2])
    sampling = SamplingParams(max_new_tokens=30, temperature=0.9, top_k=20, top_p=0.95, seed=length, ignore_eos=True)
    summary = pair.generate(prompt(5), "sd", sampling, k=length).summary
    # both compute the same logits up to rounding, so a token at the edge of top-p may be rejected
    assert summary["acceptance_rate"] > 0.97


def test_any_policy_runs_on_any_drafter_that_feeds_it(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of("llama", "near")
    ids = prompt(11)
    expected = plain(make_model("llama"), ids, COUNT)
    combinations_ = [("sd", p) for p in ("fixed", "heuristic", "confidence", "svip", "beta-ts")]
    combinations_ += [(method, "adaptive") for method in ("sd:width=2", "lookup", "spectr", "specinfer", "pearl")]
    combinations_ += [("pearl", p) for p in ("fixed", "heuristic", "confidence", "svip", "beta-ts")]
    combinations_ += [("lookup", p) for p in ("fixed", "heuristic", "beta-ts")]
    for method, policy in combinations_:
        name, *fixed = method.split(":")
        given: dict[str, object] = {**parse_pairs(fixed), **({"window": 6} if method == "pearl" else {})}
        if policy == "adaptive":
            given |= {"verify_cost": 0.05, **({} if name == "pearl" else {"draft_cost": 0.1})}
        result = pair.generate(ids, name, SamplingParams(max_new_tokens=COUNT), policy=policy, **given)
        assert result.token_ids == expected, (method, policy)
