"""Tuning: what is recorded, what is replayed, what is chosen. Replay is held against real runs of the same methods."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from families import EOS

from specgen.compare.prompts import Prompt
from specgen.cost_model import CostTable, Curve, RoundCosts
from specgen.engine.layer_skipping import SkippedLayers
from specgen.errors import SpecgenError
from specgen.methods import METHODS, resolve
from specgen.pair import Pair
from specgen.traces.summary import Summary
from specgen.tuning import profile as profiles
from specgen.tuning.candidates import REPLAYED, grid, written
from specgen.tuning.outcome import Candidate, TuningOutcome, judged, nearest_to_default, shortlist
from specgen.tuning.recorded_drafts import Recorder, ReferenceOutput, record_answer
from specgen.tuning.round_timing import WINDOWS, ParallelProbe, RoundProbe
from specgen.tuning.simulation import Behaviour, simulate
from specgen.tuning.tuner import Tuner, TuningRequest
from specgen.types import SamplingParams

GREEDY = SamplingParams(max_new_tokens=24, seed=3)
PROMPTS = [[5, 9, 7, 3, 11, 5, 9, 7], [20, 21, 22, 4, 6], [8, 8, 13, 30, 31]]
COSTS = RoundCosts(CostTable({8: Curve({0: 0.0, 1: 1.0, 2: 2.0})}), CostTable({8: Curve({1: 10.0, 2: 10.0})}), 0.0)
PairOf = Callable[[str, str], Pair]


@pytest.fixture(scope="module")
def near(pair_of: PairOf) -> Pair:
    return pair_of("llama", "near")


def recorded(pair: Pair, sampling: SamplingParams = GREEDY) -> Behaviour:
    target, draft = pair.runners
    assert draft is not None
    answers = [record_answer(pair, prompt, sampling) for prompt in PROMPTS]
    recorder = Recorder(target, draft, sampling)
    parallel = replace(COSTS, synchronisation_overhead=0.5)
    costs = {"echo": COSTS, "model": COSTS, "parallel": parallel}
    return Behaviour(answers, {"model": [recorder.tape(answer) for answer in answers]}, costs)


@pytest.fixture(scope="module")
def behaviour(near: Pair) -> Behaviour:
    return recorded(near)


def really(pair: Pair, name: str, given: dict[str, object], sampling: SamplingParams = GREEDY) -> Summary:
    summary = Summary(name)
    for prompt in PROMPTS:
        for round_ in pair.rounds(prompt, name, sampling, **given):
            summary.add(round_)
    return summary


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ar", {}),
        ("sd", {"k": 1}),
        ("sd", {"k": 4}),
        ("sd", {"k": 16}),
        ("heuristic", {"k": 3, "max_draft": 6}),
        ("confidence", {"threshold": 0.3, "max_draft": 8}),
        ("confidence", {"threshold": 0.9, "max_draft": 20}),
        ("svip", {"threshold": 0.4, "max_draft": 12}),
        ("svip", {"threshold": 0.7, "max_draft": 40}),
        ("lookup", {"k": 4, "ngram": 2}),
        ("pearl", {"window": 1}),
        ("pearl", {"window": 3}),
        ("pearl", {"window": 8}),
        ("pearl", {"window": 4, "post_verify": False}),
        ("pearl", {"window": 4, "pre_verify": False}),
    ],
)
@pytest.mark.parametrize("draft", ["near", "unrelated"])
def test_replay_counts_what_real_runs_count(pair_of: PairOf, draft: str, name: str, given: dict[str, object]) -> None:
    """From one recording, whatever the policy: the same rounds, the same drafts, the same fates, the same tokens."""
    pair = pair_of("llama", draft)
    found, run = simulate(_kept(pair_of, draft), name, given), really(pair, name, given)
    assert found.token_ids == run.token_ids
    assert (found.rounds, found.drafted, found.accepted, found.drafts) == (run.rounds, run.drafted, run.accepted, run.drafts)


_RECORDED: dict[str, Behaviour] = {}


def _kept(pair_of: PairOf, draft: str) -> Behaviour:
    if draft not in _RECORDED:
        _RECORDED[draft] = recorded(pair_of("llama", draft))
    return _RECORDED[draft]


def test_rounds_are_priced_by_their_costs(behaviour: Behaviour) -> None:
    plain, drafted = simulate(behaviour, "ar", {}), simulate(behaviour, "sd", {"k": 2})
    prefill = sum(answer.prefill for answer in behaviour.answers)
    assert plain.seconds == pytest.approx(prefill + 10 * (plain.new_tokens - len(PROMPTS)))
    own = sum(tape.prefill for tape in behaviour.tapes["model"])
    assert drafted.seconds == pytest.approx(prefill + own + 10 * (drafted.rounds - len(PROMPTS)) + drafted.drafted)


def test_beside_each_other_the_slower_counts(behaviour: Behaviour) -> None:
    found = simulate(behaviour, "pearl", {"window": 4})
    rounds = found.rounds - len(PROMPTS)
    assert found.phase_seconds["verify"] == pytest.approx(10.0 * rounds)
    assert found.phase_seconds["draft"] <= 0.5 * rounds + 1e-9  # a draft of four hides behind a pass of ten


def test_a_policy_that_throws_dice_is_replayed_alike_every_time(behaviour: Behaviour) -> None:
    found = [simulate(behaviour, "beta-ts", {"alpha": 2}) for _ in range(2)]
    assert found[0].drafted == found[1].drafted
    assert found[0].new_tokens == 3 * sum(len(answer.token_ids) for answer in behaviour.answers)


def test_an_answer_that_ends_early_is_replayed_to_its_end(near: Pair) -> None:
    target, draft = near.runners
    assert draft is not None
    ended = ReferenceOutput([5, 9], [7, 3, EOS], 24, frozenset({EOS}), 0.1, 0.2)
    tape = Recorder(target, draft, GREEDY).tape(ended)
    found = simulate(Behaviour([ended], {"model": [tape]}, {"model": COSTS}), "sd", {"k": 4})
    assert found.token_ids == [7, 3, EOS]


def test_in_sampling_tapes_hold_the_overlap(pair_of: PairOf, near: Pair) -> None:
    sampling = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5)
    found = recorded(near, sampling)
    rates = [tape.acceptance for tape in found.tapes["model"]]
    assert all(rate is not None and 0.5 < rate < 1 for rate in rates), "a near copy is often right, and never quite"
    itself = recorded(pair_of("llama", "itself"), sampling)
    assert all(tape.acceptance == pytest.approx(1, abs=1e-4) for tape in itself.tapes["model"])
    everything = simulate(itself, "sd", {"k": 4})
    assert everything.acceptance_rate == 1
    # over many runs the rate comes near to that of real ones, whose fates are other draws
    real = sum(really(near, "sd", {"k": 1}, replace(sampling, seed=seed)).acceptance_rate or 0 for seed in range(6)) / 6
    told = sum(chance for tape in found.tapes["model"] for chance in tape.chances) / sum(
        len(tape.chances) for tape in found.tapes["model"]
    )
    assert told == pytest.approx(real, abs=0.15)


@pytest.mark.parametrize("name", REPLAYED)
def test_every_candidate_is_a_setting_of_its_method(name: str) -> None:
    settings = grid(name)
    assert len({written(name, given) for given in settings}) == len(settings)
    for given in settings:
        resolve(METHODS[name], given, has_predictor=True)
    values = resolve(METHODS[name], {}, has_predictor=True).values
    if name not in ("ar", "pearl", "eesd-cali", "eesd-beta", "heuristic"):
        assert all(values[key] == value for key, value in settings[0].items()), "the usual one is tried first"


def test_curves_go_through_their_points_and_on() -> None:
    curve = Curve({1: 1.0, 3: 2.0, 5: 6.0})
    assert [curve.at(tokens) for tokens in (1, 2, 3, 4, 5, 6)] == [1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    assert Curve({4: 2.0}).at(9) == 2.0
    surface = CostTable({10: Curve({1: 1.0}), 110: Curve({1: 2.0})})
    assert surface.at(1, 60) == pytest.approx(1.5)
    assert surface.at(1, 10_000) > 2
    assert surface.at(1, 0) == pytest.approx(0.9)


def test_rounds_are_timed_where_they_happen(near: Pair) -> None:
    probe = RoundProbe(near, "sd", PROMPTS[:1], GREEDY, lengths=(1, 3))
    probe.run(0.05)
    costs = probe.costs
    curve = next(iter(costs.draft_cost.curves.values()))
    assert set(curve.points) == {0, 1, 3}
    assert 0 < curve.points[1] < curve.points[3]
    assert set(next(iter(costs.verification_cost.curves.values())).points) == {2, 4}
    assert 0 <= costs.signal_cost < curve.points[3]


def test_one_run_of_pearl_times_every_window(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine that is slow for a moment would make one window slow. What the rounds took is what they are expected to."""
    monkeypatch.setattr("specgen.tuning.round_timing.ROUNDS", 2 * len(WINDOWS))
    probe = ParallelProbe(near, PROMPTS[:1], GREEDY)
    probe.run(0.0)
    costs = probe.costs
    assert set(next(iter(costs.draft_cost.curves.values())).points) >= {0, *WINDOWS}
    assert costs.synchronisation_overhead is not None
    rounds = probe._behind[0][1].rounds
    taken = sum(seconds for *_, seconds in rounds)
    expected = sum(
        max(
            next(iter(costs.draft_cost.curves.values())).at(drafted),
            next(iter(costs.verification_cost.curves.values())).at(judged),
        )
        + costs.synchronisation_overhead
        for drafted, judged, _ in rounds
    )
    assert expected == pytest.approx(taken) if costs.synchronisation_overhead else expected >= taken


class Quiet:
    def __init__(self) -> None:
        self.said: list[str] = []

    def done(self, what: str, seconds: float) -> None:
        self.said.append(what)

    def doing(self, what: str, seconds_left: float) -> None: ...


def tuned(pair: Pair, seconds: float, names: list[str] | None = None) -> tuple[Tuner, Quiet]:
    texts = [Prompt(index, text) for index, text in enumerate(["one two three", "abc abc abc", "0123456789"])]
    quiet = Quiet()
    return Tuner(pair, TuningRequest(texts, GREEDY, time.perf_counter() + seconds, names), quiet), quiet


def test_tuning_ends_with_a_choice_that_was_measured(near: Pair) -> None:
    for budget in (3.0, 9.0, 27.0):  # on a busy machine the first may be too short for real runs
        tuner, quiet = tuned(near, budget, ["sd", "svip", "lookup"])
        start = time.perf_counter()
        outcome = tuner.run()
        assert time.perf_counter() - start < budget + 2.5, "a loose bound, for busy machines"
        if "confirmation" not in outcome.left_out:
            break
    assert {found.name for found in outcome.methods} == {"ar", "sd", "svip", "lookup"}
    assert outcome.plain.measured is not None
    assert outcome.best.measured is not None
    assert outcome.chosen.name == (outcome.best.name if outcome.verdict == "pays" else "ar")
    assert outcome.speedup_model is not None
    assert 0 < (outcome.acceptance or 0) <= 1
    steps = ("plain decoding gives", "a target pass takes", "the target accepts", "settings of", "run again", "really run")
    assert len(quiet.said) == len(steps)
    assert all(step in said for step, said in zip(steps, quiet.said, strict=True))


def test_without_time_the_expected_figures_answer(near: Pair) -> None:
    tuner, _ = tuned(near, 0.0, ["sd"])
    outcome = tuner.run()
    assert outcome.best.measured is None
    assert "confirmation" in outcome.left_out
    assert {found.name for found in outcome.methods} == {"ar", "sd"}


def test_what_is_less_sure_is_really_run_sooner() -> None:
    def chosen(**speeds: float) -> list[str]:
        return [entry.name for entry in shortlist([Candidate(name, {}, True, speed, 1) for name, speed in speeds.items()])]

    assert chosen(confidence=240, svip=225, sd=200, heuristic=190, pearl=165) == ["confidence", "svip", "pearl"]
    assert chosen(confidence=240, svip=225, sd=200, heuristic=190, pearl=150) == ["confidence", "svip", "sd"]
    assert chosen(confidence=240, lookup=170, pearl=150) == ["confidence", "pearl"]
    assert chosen() == []


def test_an_unrelated_draft_does_not_pay(pair_of: PairOf) -> None:
    """Both models cost the same here and agree on next to nothing: plain decoding it is, and the report can say why."""
    tuner, _ = tuned(pair_of("llama", "unrelated"), 3.0, ["sd", "svip", "confidence"])
    outcome = tuner.run()
    assert outcome.verdict != "pays"
    assert outcome.chosen.name == "ar"
    assert (outcome.acceptance or 0) < 0.5
    assert (outcome.relative_draft_cost or 0) > 0.5


def test_layers_to_skip_are_searched_for_where_that_is_asked(near: Pair, tmp_path: Path) -> None:
    for budget in (2.0, 6.0, 18.0):  # on a busy machine the first may be too short for a search
        begun = time.perf_counter()
        tuner, watch = tuned(near, budget, ["selfsd"])
        outcome = tuner.run()
        assert time.perf_counter() - begun < 2 * budget + 2, "a loose bound, for busy machines"
        if "selfsd" not in outcome.left_out:
            break
    found = next(entry for entry in outcome.methods if entry.name == "selfsd")
    assert found.tried >= 1
    assert found.predicted > 0
    assert str(SkippedLayers.parse(str(found.settings["skip"]), 3)) == found.settings["skip"]
    assert any("layers to skip" in said and found.written in said for said in watch.said)
    assert "selfsd" not in outcome.left_out
    profiles.save(profiles.made_of(outcome, profiles.profile_key_of(near)), tmp_path)
    assert profiles.load(tmp_path).settings_of("selfsd") == found.settings
    hasty, _ = tuned(near, 12.0, ["selfsd"])
    slow = ReferenceOutput([1, 5], [6] * 10, 10, frozenset(), 1.0, 1000.0)  # not even a first guess can be measured in the time
    assert hasty._with_skips([slow], []) == ([], "")
    assert "time was short" in hasty.left_out["selfsd"]


def test_what_cannot_be_tuned_is_named(near: Pair) -> None:
    tuner, _ = tuned(near, 0.0)
    assert "no exit layer" in tuner.left_out["eesd-beta"]
    assert "--methods selfsd" in tuner.left_out["selfsd"]
    assert set(tuner.names).isdisjoint(tuner.left_out)


def test_a_draft_that_cannot_follow_is_said(near: Pair) -> None:
    target, draft = near.runners
    assert draft is not None
    long = ReferenceOutput([1] * 100, [2] * 24, 24, frozenset(), 0.1, 0.2)
    with pytest.raises(SpecgenError, match="cannot follow"):
        Recorder(target, draft, GREEDY).tape(long)


@pytest.mark.parametrize(
    ("speedup", "low", "high", "verdict"),
    [(1.5, 1.2, 1.8, "pays"), (0.9, 0.8, 0.97, "does not pay"), (1.02, 0.97, 1.06, "unclear"), (0.98, 0.9, 1.1, "does not pay")],
)
def test_the_interval_decides(speedup: float, low: float, high: float, verdict: str) -> None:
    best = Candidate("sd", {"k": 3}, True, 100.0, 1, 0.5, 100.0, speedup, low, high)
    assert judged(best, Candidate("ar", {}, True, 100.0, 1)) == verdict


def test_what_is_fast_on_some_prompts_alone_is_not_chosen() -> None:
    plain = Candidate("ar", {}, True, 100.0, 1, None, 100.0, 1.0)
    steady, moody = (Candidate(name, {}, True, 150.0, 1, 0.5, 150.0, 1.5, 1.3, 1.7) for name in ("svip", "lookup"))
    moody = replace(moody, measured=160.0, speedup=1.6, low=0.9, high=2.9)

    def best(*found: Candidate) -> str:
        return TuningOutcome([*found, plain], plain, "pays", GREEDY, 8, {}).best.name

    assert best(moody, steady) == "svip"
    assert best(replace(moody, low=None, high=None), steady) == "lookup", "too few runs to tell: the measured speed decides"
    assert best(replace(moody, measured=None, speedup=None, low=None), steady) == "svip", "what was really run goes before"


def test_usual_settings_are_kept_where_others_are_hardly_better() -> None:
    tried = [
        Candidate("svip", {"threshold": threshold, "c": 0.15, "max_draft": longest}, True, speed, 1)
        for threshold, longest, speed in ((0.4, 40, 98.0), (0.5, 8, 100.0), (0.4, 8, 99.0), (0.7, 4, 40.0))
    ]
    assert nearest_to_default(tried).settings == {"threshold": 0.4, "c": 0.15, "max_draft": 40}
    assert nearest_to_default(tried).tried == 4
    assert nearest_to_default(tried[1:]).settings == {"threshold": 0.4, "c": 0.15, "max_draft": 8}
    assert nearest_to_default([replace(tried[0], predicted=90.0), *tried[1:2]]).settings == {
        "threshold": 0.5,
        "c": 0.15,
        "max_draft": 8,
    }
