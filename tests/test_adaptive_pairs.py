"""What `adaptive` knows about a pair: costs that are measured once, and what runs learn for later runs; on tiny models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from families import make_model, near_copy, plain, prompt, save
from worker_helpers import PROMPT, posix, save_pair

import specgen
from specgen.base.types import SamplingParams
from specgen.decoding.costs.cost_check import CostCheck
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.methods.runs import make_policy
from specgen.pair import drafting_knowledge, measurements
from specgen.pair.pair import Pair

COSTS: dict[str, object] = {"draft_cost": 0.1, "verify_cost": 0.02}
GREEDY = SamplingParams(max_new_tokens=30, ignore_eos=True)
SEEDED = SamplingParams(max_new_tokens=30, temperature=1.0, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("penalties"))


@pytest.fixture
def load(folders: tuple[str, str]) -> Iterator[Callable[[], Pair]]:
    """Loads the pair anew; its target has penalties."""
    pairs: list[Pair] = []

    def loaded() -> Pair:
        pairs.append(specgen.load(*folders, device="cpu", dtype="float32"))
        return pairs[-1]

    yield loaded
    for pair in pairs:
        pair.close()


def lengths(pair: Pair, sampling: SamplingParams, method: str = "adaptive", **given: object) -> tuple[list[int], list[int]]:
    """The output and the length of each draft."""
    result = pair.generate(PROMPT, method, sampling, **(COSTS | given))
    return result.token_ids, [len(round_.draft.tokens) for round_ in result.rounds]


UNSEEDED = SamplingParams(max_new_tokens=30, temperature=1.0, ignore_eos=True)


def test_equal_seeds_give_equal_rounds_whatever_was_learned_meanwhile(load: Callable[[], Pair]) -> None:
    pair = load()
    before = lengths(pair, SEEDED)
    for sampling in (GREEDY, UNSEEDED):
        lengths(pair, sampling)
    assert lengths(pair, SEEDED) == before


def test_greedy_and_unseeded_runs_learn_for_later_runs(load: Callable[[], Pair]) -> None:
    pair = load()
    seen = []
    for sampling in (GREEDY, UNSEEDED, GREEDY, UNSEEDED, SEEDED):
        learned = pair.run(pair.request(PROMPT, "adaptive", sampling, **COSTS)).policy.learned  # type: ignore[attr-defined]
        before = learned.token.information
        lengths(pair, sampling)
        seen.append((before > 0, learned.token.information > before))
    assert seen == [(False, True), (False, True), (True, True), (True, True), (False, False)]


@posix
def test_in_pearl_the_worker_keeps_what_it_learned(load: Callable[[], Pair]) -> None:
    pair = load()
    given: dict[str, Any] = {"policy": "adaptive", "window": 4, "verify_cost": 0.02}

    def states(sampling: SamplingParams) -> list[Any]:
        return [round_.policy_state for round_ in pair.generate(PROMPT, "pearl", sampling, **given).rounds[1:]]

    seeded, first, second = states(SEEDED), states(GREEDY), states(GREEDY)
    assert first[0] != first[-1], "the state comes from the worker"
    assert first[0] != second[0], "the second run begins with what the first one learned"
    assert states(SEEDED) == seeded, "the same seed, the same drafts"
    [learned] = pair._knowledge._learned.values()
    assert learned.token.information == 0, "the copy in this process saw no token and learned nothing"


def test_costs_are_measured_once_and_kept_in_the_cache(
    load: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))  # other tests have measured this pair
    measured = []

    def times(run: object, **_: object) -> RoundCosts:
        measured.append(run)
        return RoundCosts(CostTable({16: Curve({0: 0.0, 4: 0.004})}), CostTable({16: Curve({1: 0.01, 5: 0.012})}))

    monkeypatch.setattr(drafting_knowledge, "time_rounds", times)
    monkeypatch.setattr(CostCheck, "conclude", lambda *_: None)  # these times are not the machine's
    first, second = load(), load()
    for pair, count in ((first, 1), (first, 1), (second, 1)):
        pair.generate(PROMPT, "adaptive", GREEDY, verify_cost=0.5)
        assert len(measured) == count
        [found] = pair.measurements._known.values()
        assert found.verification_cost.at(5, 16) == 0.012
    second.generate(PROMPT, "adaptive", SamplingParams(max_new_tokens=5, temperature=1.0, top_k=5, top_p=0.9))
    assert len(measured) == 2, "other work on the logits"
    second.generate(PROMPT, "adaptive", SamplingParams(max_new_tokens=5, temperature=1.0, top_k=7, top_p=0.8))
    second.generate(PROMPT, "adaptive", SamplingParams(max_new_tokens=5, temperature=1.0, top_k=5, top_p=0.9), **COSTS)
    second.generate(PROMPT, "sd", SamplingParams(max_new_tokens=5, temperature=1.0), policy="svip")
    assert len(measured) == 2


def test_costs_in_the_cache_that_make_no_sense_are_measured_again(
    load: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {"drafting": {"16": {"0": "x"}}, "judging": {}}
    monkeypatch.setattr(measurements, "_stored", lambda: {"rounds": defaultdict(lambda: broken)})
    measured: list[object] = []

    def times(run: object, **_: object) -> RoundCosts:
        measured.append(run)
        return RoundCosts(CostTable({16: Curve({0: 0.0, 4: 0.004})}), CostTable({16: Curve({1: 0.01, 5: 0.012})}))

    monkeypatch.setattr(drafting_knowledge, "time_rounds", times)
    load().generate(PROMPT, "adaptive", SamplingParams(max_new_tokens=5))
    assert len(measured) == 1


def test_a_draft_model_that_follows_only_part_of_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its costs are measured within its own context; after that the target decodes alone."""
    monkeypatch.setattr(drafting_knowledge, "_SECONDS", 0.0)  # one round of each length
    target = make_model("llama")
    short = near_copy(make_model("llama", max_position_embeddings=24))
    folders = save(target, tmp_path / "target"), save(short, tmp_path / "draft")
    with specgen.load(*folders, device="cpu", dtype="float32") as pair:
        for seed, count in ((3, 14), (3, 60)):
            ids = prompt(seed)
            result = pair.generate(ids, "adaptive", SamplingParams(max_new_tokens=count))
            assert result.token_ids == plain(target, ids, count)
        assert len(pair.measurements._known) == 2, "two lengths of the context"
        for costs in pair.measurements._known.values():
            assert set(next(iter(costs.draft_cost.curves.values())).points) == {0, 1, 4, 8}
            assert costs.verification_cost.at(1, 1) > 0


@pytest.mark.parametrize("given_", [{}, {"verify_cost": 0.1}], ids=str)
def test_pearl_with_a_given_window_measures_what_it_needs(
    load: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch, given_: dict[str, object]
) -> None:
    """What verification costs, unless a setting says it. Drafting is free beside the target's pass."""
    pair = load()
    monkeypatch.setattr(pair, "_worker", None)
    ids = pair.generate(PROMPT, "ar", GREEDY).token_ids
    assert pair.generate(PROMPT, "pearl", GREEDY, policy="adaptive", window=4, **given_).token_ids == ids
    assert bool(pair.measurements._known) == (not given_)
    run: Any = pair.run(pair.request(PROMPT, "pearl", GREEDY, policy="adaptive", window=4, **given_))
    policy: Any = make_policy(run.settings, 0, run.schedule.drafter._setup.adaptive)
    assert policy._costs.draft == 0
    assert policy._costs.verification.at(1) == given_.get("verify_cost", policy._costs.verification.at(1))
