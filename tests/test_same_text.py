"""The same request gives the same text, whatever times are measured and whatever ran before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pair_helpers import pair_of_models

import specgen
from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.methods import POLICIES
from specgen.methods.base import Method
from specgen.pair.pair import Pair
from specgen.tune.pair_inspection import obstacle

PROMPT = "User: Where is Oslo?\nAssistant:"
TOKENS = 10
SEEDED = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=3, ignore_eos=True)
GREEDY = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
# run with their own policy by default
SEARCHED = ("medusa", "eagle", "glide", "block", "eesd-tree")


class Weather:
    """A clock whose steps are random: microseconds, seconds, or none at all. Each machine that it
    stands for is another one."""

    def __init__(self) -> None:
        self._random = Random(0)
        self._now = 0.0
        self.change()

    def change(self) -> None:
        self._scale = 10.0 ** self._random.uniform(-6, 1)

    def __call__(self) -> float:
        if self._random.random() < 0.8:
            self._now += self._scale * self._random.expovariate(1.0)
        return self._now


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Weather:
    made = Weather()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """What unseeded runs measure: the clock is random, so that few steps show as much as many."""
    for module, values in {
        "pass_times": {"_WARM_UP": 1, "_STEPS": 4, "_ROUGH_STEPS": 2},
        "skip_search": {"SEARCH_SECONDS": 0.0, "PROMPTS": 1, "NEW_TOKENS": 8},
    }.items():
        for name, value in values.items():
            monkeypatch.setattr(f"specgen.methods.{module}.{name}", value)


@pytest.fixture(scope="module")
def loaded() -> Iterator[Pair]:
    with specgen.load(device="cpu", dtype="float32") as pair:
        yield pair


def fresh(loaded: Pair) -> Pair:
    """A pair of the same models that knows nothing."""
    pair = pair_of_models(loaded.target, loaded.draft)
    pair.parts = loaded.parts
    return pair


def policies_of(method: Method) -> list[str]:
    """The length policies that the method takes, its own first. Not those that its drafter cannot
    feed."""
    names = [method.policy or ""]
    for name in POLICIES:
        with suppress(SpecgenError):
            if method.any_policy and name != method.policy:
                methods.resolve(method, {"policy": name})
                names.append(name)
    return names


def cases() -> Iterator[Any]:
    for name, method in specgen.METHODS.items():
        if method.alias_of or method.decodes_greedily:
            continue
        for position, policy in enumerate(policies_of(method)):
            is_usual = position == 0 or (policy == "adaptive" and name not in SEARCHED)
            marks = () if is_usual else pytest.mark.slow
            yield pytest.param(
                name, {"policy": policy} if position else {}, marks=marks, id=f"{name}-{policy}"
            )


def tokens_and_drafts(
    pair: Pair, name: str, sampling: SamplingParams, settings: dict[str, Any]
) -> Any:
    result = pair.generate(PROMPT, name, sampling, **settings)
    return result.token_ids, [list(round_.draft.tokens) for round_ in result.rounds]


def check(
    loaded: Pair,
    weather: Weather,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, dict[str, Any]],
    sampling: SamplingParams,
) -> None:
    """Runs a request on pairs that know nothing, after other runs, and with what these have stored:
    nothing changes."""
    name, settings = case
    folders = (str(tmp_path / f"cache{number}") for number in count())
    monkeypatch.setenv("SPECGEN_CACHE", next(folders))
    first = fresh(loaded)
    error = obstacle(first, name)
    if error is not None:
        pytest.skip(error.message)

    expected = tokens_and_drafts(first, name, sampling, settings)
    assert len(expected[0]) == TOKENS
    for other in ({"temperature": 0.0}, {"temperature": 1.0, "seed": None}):
        weather.change()
        first.generate(PROMPT[6:], name, sampling, max_new_tokens=5, **settings, **other)
    assert tokens_and_drafts(first, name, sampling, settings) == expected, (
        "after other runs of the pair"
    )
    first.close()

    weather.change()
    assert tokens_and_drafts(fresh(loaded), name, sampling, settings) == expected, (
        "with what was stored"
    )
    monkeypatch.setenv("SPECGEN_CACHE", next(folders))
    weather.change()
    assert tokens_and_drafts(fresh(loaded), name, sampling, settings) == expected, (
        "without what was stored"
    )


@pytest.mark.parametrize(("name", "settings"), list(cases()))
def test_a_seed_gives_the_same_tokens_whatever_the_clock_says(
    loaded: Pair,
    weather: Weather,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    settings: dict[str, Any],
) -> None:
    check(loaded, weather, tmp_path, monkeypatch, (name, settings), SEEDED)


LOSSY = [
    name
    for name, method in specgen.METHODS.items()
    if not method.lossless and not method.decodes_greedily
]


@pytest.mark.parametrize("policy", ["adaptive", "beta-ts"])
@pytest.mark.parametrize("name", LOSSY)
def test_greedy_tokens_of_a_lossy_method_follow_neither_the_clock_nor_chance(
    loaded: Pair,
    weather: Weather,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    policy: str,
) -> None:
    """What such a method commits depends on the lengths of its drafts, also without a seed."""
    check(loaded, weather, tmp_path, monkeypatch, (name, {"policy": policy}), GREEDY)


def test_what_a_repeatable_request_takes_follows_from_sizes(loaded: Pair) -> None:
    pair = fresh(loaded)
    run = pair.run(pair.request(PROMPT, "pearl", SEEDED))
    assert pair.draft is not None
    share = pair.draft.files.active_parameters / pair.target.files.active_parameters
    assert run.settings.values["window"] == round(1 / share)
    assert run.costs is None
    run = pair.run(pair.request(PROMPT, "selfsd", SEEDED))
    assert run.settings.values["skip"] == "+".join(
        map(str, range(1, pair.target.model.shape.num_layers - 1, 2))
    )
