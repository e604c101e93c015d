"""Tuning: what is recorded, simulated and chosen. Simulated runs are compared with real runs of the same methods."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import count
from unittest.mock import Mock

import pytest
from families import EOS
from tuning_helpers import COSTS, GREEDY, PROMPTS, TEXTS, PairOf, finished, really

from specgen.base.errors import SpecgenError
from specgen.base.settings import Settings, written
from specgen.base.types import SamplingParams
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.decoding.policy import LengthPolicy
from specgen.methods import METHODS, resolve, runs
from specgen.methods.adaptive import AdaptiveInputs
from specgen.methods.learned_drafting import Acceptance
from specgen.pair.pair import Pair, runners
from specgen.tune import tuner
from specgen.tune.candidates import SEARCHED, SIMULATED, distance_from_defaults, grid, searched_grid
from specgen.tune.outcome import Candidate, TuningOutcome, nearest_to_default, shortlist
from specgen.tune.recorded_drafts import Recorder, ReferenceOutput, mean_acceptance, record_reference
from specgen.tune.request import Deadline, TuningRequest
from specgen.tune.round_timing import SIGNALS, WINDOWS, LengthSweep, ParallelProbe, RoundProbe, measure_costs
from specgen.tune.settings_search import simulate_grids, tuned_skips
from specgen.tune.simulation import PairMeasurements, simulate
from specgen.tune.tuner import outcome_of, select_methods, tune


@pytest.fixture(scope="module")
def near(pair_of: PairOf) -> Pair:
    return pair_of("llama", "near")


@cache
def measured(pair: Pair, sampling: SamplingParams = GREEDY) -> PairMeasurements:
    target, draft = runners(pair)
    assert draft is not None
    references = [record_reference(pair, prompt, sampling) for prompt in PROMPTS]
    recorder = Recorder(target, draft, sampling)
    costs = {"echo": COSTS, "model": COSTS, "parallel": replace(COSTS, synchronisation_overhead=0.5)}
    return PairMeasurements(references, {"model": [recorder.record(reference) for reference in references]}, costs)


@pytest.fixture(scope="module")
def measurements(near: Pair) -> PairMeasurements:
    return measured(near)


_RUNS = [
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
    ("lookup", {"ngram": 2, "draft_cost": 0.0, "verify_cost": 0.3}),
    ("pearl", {"window": 1}),
    ("pearl", {"window": 3}),
    ("pearl", {"window": 8}),
    ("pearl", {"window": 4, "post_verify": False}),
    ("pearl", {"window": 4, "pre_verify": False}),
]


@pytest.mark.parametrize("draft", ["near", pytest.param("unrelated", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "given"), _RUNS)
def test_simulated_runs_count_what_real_runs_count(pair_of: PairOf, draft: str, name: str, given: dict[str, object]) -> None:
    """From one recording, whatever the policy: the same rounds, drafts, accepted tokens and output."""
    pair = pair_of("llama", draft)
    found, run = simulate(measured(pair, GREEDY), name, given), really(pair, name, given)
    assert found.token_ids == run.token_ids
    assert (found.rounds, found.drafted, found.accepted, found.drafts) == (run.rounds, run.drafted, run.accepted, run.drafts)


def test_rounds_are_priced_by_their_costs(measurements: PairMeasurements) -> None:
    plain, drafted = simulate(measurements, "ar", {}), simulate(measurements, "sd", {"k": 2})
    prefill = sum(reference.prefill_seconds for reference in measurements.references)
    assert plain.seconds == pytest.approx(prefill + 10 * (plain.new_tokens - len(PROMPTS)))
    own = sum(recorded.prefill_seconds for recorded in measurements.drafts["model"])
    assert drafted.seconds == pytest.approx(prefill + own + 10 * (drafted.rounds - len(PROMPTS)) + drafted.drafted)


def test_a_parallel_round_takes_the_longer_of_draft_and_pass(measurements: PairMeasurements) -> None:
    """A pass takes 10 s, a drafted token 1 s. A round in which a draft was started takes half a second more."""
    found = simulate(measurements, "pearl", {"window": 4})
    rounds = found.rounds - len(PROMPTS)
    assert found.phase_seconds["verify"] == pytest.approx(10.0 * rounds)
    without_a_draft = rounds - found.phase_seconds["draft"] / 0.5  # the target never waits for drafts of four tokens
    assert without_a_draft in range(len(PROMPTS) + 1), "an output's last round may have nothing left to draft"


def test_the_target_waits_for_a_draft_that_takes_longer_than_its_pass(pair_of: PairOf) -> None:
    """All tokens are accepted. Of 24 tokens the prefill gives one, a first pass over one token one more of 16 that are drafted.

    The second pass is over 15 tokens while the last 7 are drafted, and the third is over the remaining 6.
    """
    found = simulate(measured(pair_of("llama", "itself")), "pearl", {"window": 16})
    assert found.phase_seconds["verify"] == pytest.approx(len(PROMPTS) * 3 * 10)
    assert found.phase_seconds["draft"] == pytest.approx(len(PROMPTS) * ((16 - 10) + 2 * 0.5))
    # without pre-verify, it waits for all of the first draft of four; there are six, none of which takes longer than a pass
    found = simulate(measured(pair_of("llama", "itself")), "pearl", {"window": 4, "pre_verify": False})
    assert found.phase_seconds["draft"] == pytest.approx(len(PROMPTS) * (4 + 6 * 0.5))


def test_a_pass_is_priced_by_its_tokens(measurements: PairMeasurements) -> None:
    """It takes 9 s and one for each token: those of the draft, and the one before them."""
    rising = replace(COSTS, verification_cost=CostTable({8: Curve({1: 10.0, 2: 11.0})}))
    found = simulate(replace(measurements, costs={"model": rising}), "sd", {"k": 4})
    rounds = found.rounds - len(PROMPTS)
    assert found.drafted > rounds
    assert found.phase_seconds["verify"] == pytest.approx(10 * rounds + found.drafted)


def test_signals_and_a_prompt_processed_by_two_models_at_once_take_time(measurements: PairMeasurements) -> None:
    dear = {kind: replace(costs, signal_cost=0.25) for kind, costs in measurements.costs.items()}
    for name, signal_cost in (("svip", 0.25), ("sd", 0.0)):
        cheap, found = (simulate(replace(measurements, costs=costs), name, {}) for costs in (measurements.costs, dear))
        assert found.drafted > 0
        assert found.phase_seconds["draft"] - cheap.phase_seconds["draft"] == pytest.approx(signal_cost * found.drafted)
    for name, factor in (("pearl", 1.5), ("sd", 1.0)):
        given = {"window": 4} if name == "pearl" else {}
        alone, found = (simulate(replace(measurements, slowdown=slowdown), name, given) for slowdown in (1.0, 1.5))
        assert found.phase_seconds["prefill"] == pytest.approx(factor * alone.phase_seconds["prefill"])


def test_a_random_policy_draws_other_numbers_in_each_simulated_run(
    measurements: PairMeasurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the same ones when the simulation is repeated."""
    seeds: list[int] = []
    make_policy = runs.make_policy

    def recorded(settings: Settings, seed: int, adaptive: AdaptiveInputs | None) -> LengthPolicy:
        seeds.append(seed)
        return make_policy(settings, seed, adaptive)

    monkeypatch.setattr(runs, "make_policy", recorded)
    found = [simulate(measurements, "beta-ts", {"alpha": 2}) for _ in range(2)]
    assert found[0].drafted == found[1].drafted
    assert found[0].new_tokens == 3 * sum(len(reference.token_ids) for reference in measurements.references)
    assert len(set(seeds)) == len(seeds) / 2 == 3 * len(measurements.references)


@pytest.mark.parametrize("name", ["eagle", "glide", "medusa", "ouroboros", "mtad"])
def test_settings_near_the_defaults_are_tried_first(name: str) -> None:
    """A search that is short of time has then tried a chain and other length policies of a method with trees."""
    distances = [distance_from_defaults(name, given) for given in grid(name)]
    assert distances[0] == 0
    assert [min(2, distance) for distance in distances] == sorted(min(2, distance) for distance in distances)
    assert 1 in distances


def test_adaptive_learns_from_prompt_to_prompt_of_one_simulation(
    measurements: PairMeasurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught, learn = Counter[int](), Acceptance.learn

    def counted(self: Acceptance, score: float, accepted: bool) -> None:
        taught[id(self)] += 1
        learn(self, score, accepted)

    with monkeypatch.context() as patch:
        patch.setattr(Acceptance, "learn", counted)
        found = simulate(measurements, "adaptive", {})
    assert found.token_ids == [token for reference in measurements.references for token in reference.token_ids]
    assert found.drafted > 0
    unseen = found.accepted + found.rejections - sum(taught.values())
    assert unseen <= len(measurements.references), "all judged tokens of all prompts but end-of-sequence tokens"
    learned = measurements.learned["model"].copy()
    simulate(measurements, "svip", {})
    assert simulate(measurements, "adaptive", {}).seconds == found.seconds
    assert measurements.learned["model"] == learned
    assert simulate(measurements, "adaptive", {"draft_cost": 100}).drafted < found.drafted
    assert grid("adaptive") == [{}]


def test_an_output_that_ends_early_is_simulated_to_its_end(near: Pair) -> None:
    target, draft = runners(near)
    assert draft is not None
    ended = ReferenceOutput([5, 9], [7, 3, EOS], 24, frozenset({EOS}), 0.1, 0.2)
    recorded = Recorder(target, draft, GREEDY).record(ended)
    found = simulate(PairMeasurements([ended], {"model": [recorded]}, {"model": COSTS}), "sd", {"k": 4})
    assert found.token_ids == [7, 3, EOS]


def test_when_sampling_the_acceptance_probability_is_the_overlap(pair_of: PairOf, near: Pair) -> None:
    sampling = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5)
    found = measured(near, sampling)
    for recorded in found.drafts["model"]:
        assert 0.5 < mean_acceptance({"model": [recorded]})["model"] < 1, "a near copy is often right, but not always"
    itself = measured(pair_of("llama", "itself"), sampling)
    assert all(p == pytest.approx(1, abs=1e-4) for drafts in itself.drafts["model"] for p in drafts.acceptance_probabilities)
    assert simulate(itself, "sd", {"k": 4}).acceptance_rate == 1
    # over many runs the rate approaches that of real ones, which draw other random numbers
    real = sum(really(near, "sd", {"k": 1}, replace(sampling, seed=seed)).acceptance_rate or 0 for seed in range(6)) / 6
    assert mean_acceptance(found.drafts)["model"] == pytest.approx(real, abs=0.15)


@pytest.mark.parametrize("name", [*SIMULATED, *SEARCHED])
def test_every_candidate_is_a_setting_of_its_method(name: str) -> None:
    settings = [*grid(name), *searched_grid(name)]
    assert len({written(name, given) for given in settings}) == len(settings)
    for given in settings:
        resolve(METHODS[name], given, has_predictor=True)
    values = resolve(METHODS[name], {}, has_predictor=True).values
    if name not in ("ar", "pearl", "eesd-cali", "eesd-beta", "heuristic"):
        assert all(values[key] == value for key, value in settings[0].items()), "the defaults are tried first"


def test_curves_go_through_their_points_and_on() -> None:
    curve = Curve({1: 1.0, 3: 2.0, 5: 6.0})
    assert [curve.at(tokens) for tokens in (1, 2, 3, 4, 5, 6)] == [1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    assert Curve({4: 2.0}).at(9) == 2.0
    surface = CostTable({10: Curve({1: 1.0}), 110: Curve({1: 2.0})})
    assert surface.at(1, 60) == pytest.approx(1.5)
    assert surface.at(1, 10_000) > 2
    assert surface.at(1, 0) == pytest.approx(0.9)


def test_real_rounds_of_each_length_are_timed(near: Pair) -> None:
    probe = RoundProbe(near, "sd", PROMPTS[:1], GREEDY, lengths=(1, 3), signals=SIGNALS)
    probe.run(Deadline.after(20, count().__next__))
    costs = probe.costs
    curve = next(iter(costs.draft_cost.curves.values()))
    assert set(curve.points) == {0, 1, 3}
    assert all(curve.points[length] > 0 for length in (1, 3))
    assert set(next(iter(costs.verification_cost.curves.values())).points) == {2, 4}
    assert costs.signal_cost >= 0


def test_the_time_of_a_round_without_a_draft_is_that_of_the_target_alone(near: Pair) -> None:
    """And not extrapolated from the passes over drafts, which could give any number on a disturbed machine."""
    references = [record_reference(near, PROMPTS[0], replace(GREEDY, max_new_tokens=16))]
    costs = measure_costs(near, ["echo", "model"], references, GREEDY, Deadline.after(40, count().__next__), lambda _: None).costs
    alone, drafting = costs["echo"].verification_cost, costs["model"].verification_cost
    assert all(curve.points[1] == alone.at(1, length) for length, curve in drafting.curves.items())


def test_a_sweep_keeps_its_length_while_a_run_warms_up() -> None:
    sweep, lengths = LengthSweep((1, 3)), []
    sweep.start_run()
    for _ in range(5):
        lengths.append(sweep.length)
        sweep.observe(0, 0)  # not called for the pass over the prompt
    assert lengths == [1, 1, 3, 1, 3]


def test_one_run_of_pearl_times_every_window(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a machine that is slow for a moment would make one window slow. The costs add up to the measured seconds."""
    monkeypatch.setattr("specgen.tune.round_timing.PARALLEL_ROUNDS", 2 * len(WINDOWS))
    probe = ParallelProbe(near, PROMPTS[:1], GREEDY)
    probe.run(Deadline.after(0, count().__next__))
    costs = probe.costs
    assert set(next(iter(costs.draft_cost.curves.values())).points) >= {0, *WINDOWS}
    assert costs.synchronisation_overhead is not None
    assert max(next(iter(costs.verification_cost.curves.values())).points) > 2, "passes over pending tokens are timed too"
    rounds = probe._timings[0].parallel_rounds
    taken = sum(seconds for *_, seconds in rounds)
    expected = sum(
        max(
            next(iter(costs.draft_cost.curves.values())).at(drafted),
            next(iter(costs.verification_cost.curves.values())).at(tokens),
        )
        + costs.synchronisation_overhead
        for drafted, tokens, _ in rounds
    )
    assert expected == pytest.approx(taken) if costs.synchronisation_overhead else expected >= taken


def request(readings: float, names: list[str] | None = None) -> TuningRequest:
    """A request with time for so many readings of a clock on which each takes a second, whatever the machine's speed."""
    return TuningRequest(TEXTS, GREEDY, Deadline.after(readings, count().__next__), names)


def test_when_sampling_each_prompt_has_a_seed_of_its_own(near: Pair) -> None:
    task = replace(request(1000), prompts=[TEXTS[0]] * 2, sampling=replace(GREEDY, temperature=1.0))
    first, second = tuner.record_references(near, task, Mock())
    assert first.token_ids != second.token_ids


def test_tuning_chooses_what_it_measured(near: Pair) -> None:
    steps = Mock()
    outcome = tune(near, request(250, ["sd", "svip", "lookup"]), steps)
    assert {found.name for found in outcome.methods} == {"ar", "sd", "svip", "lookup"}
    assert outcome.plain.measured is not None
    assert outcome.best.measured is not None
    assert outcome.verdict != "unconfirmed"
    assert "confirmation" not in outcome.left_out
    assert outcome.chosen.name == (outcome.best.name if outcome.verdict == "pays" else "ar")
    assert outcome.speedup_model is not None
    assert 0 < (outcome.acceptance_probability or 0) <= 1
    parts = ("plain decoding gives", "the target accepts", "a target pass takes", "settings of", "shapes of", "really run")
    assert len(finished(steps)) == len(parts)
    assert all(part in step for part, step in zip(parts, finished(steps), strict=True))


def test_without_time_the_outcome_is_not_confirmed(near: Pair) -> None:
    steps = Mock()
    outcome = tune(near, request(0, ["sd"]), steps)
    assert any(step.startswith("1 setting of 1 method simulated") for step in finished(steps)), "plain decoding is not counted"
    assert outcome.best.measured is None
    assert outcome.verdict == "unconfirmed"
    assert "confirmation" in outcome.left_out
    assert {found.name for found in outcome.methods} == {"ar", "sd"}


def test_methods_with_less_certain_speeds_are_run_sooner() -> None:
    def chosen(**speeds: float) -> list[str]:
        return [entry.name for entry in shortlist([Candidate(name, {}, speed) for name, speed in speeds.items()])]

    assert chosen(confidence=240, svip=225, sd=200, heuristic=190, pearl=165) == ["confidence", "svip", "pearl"]
    assert chosen(confidence=240, svip=225, sd=200, heuristic=190, pearl=150) == ["confidence", "svip", "sd"]
    assert chosen(confidence=240, lookup=170, pearl=150) == ["confidence", "pearl"]
    assert chosen() == []


def test_an_unrelated_draft_does_not_pay(pair_of: PairOf) -> None:
    """Passes of both models cost the same and few tokens are accepted: plain decoding is chosen, and the outcome says why."""
    passes = Curve({tokens: float(tokens) for tokens in range(17)}), Curve(dict.fromkeys(range(1, 18), 1.0))
    costs = RoundCosts(*(CostTable({8: curve}) for curve in passes))
    found = replace(measured(pair_of("llama", "unrelated")), costs={"echo": costs, "model": costs})
    grids = simulate_grids(found, ["ar", "sd", "svip", "confidence"], Deadline.after(1000, count().__next__))
    assert not grids.left_out
    outcome = outcome_of(found, grids.candidates, GREEDY, {})
    assert outcome.chosen.name == outcome.methods[0].name == "ar"
    assert outcome.speedup_of(outcome.best) < 0.9
    assert outcome.verdict == "unconfirmed"
    assert (outcome.acceptance_probability or 0) < 0.5
    assert outcome.relative_draft_cost == 1
    confirmed = [
        replace(each, measured=each.predicted, speedup=each.predicted / outcome.plain.predicted) for each in outcome.methods
    ]
    assert replace(outcome, methods=confirmed).verdict == "does not pay"


@pytest.mark.slow
def test_layers_to_skip_are_searched_only_where_that_is_asked(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "tuned_skips", lambda *_: Candidate("selfsd", {"skip": "1"}, 1e6, 7))
    steps = Mock()
    outcome = tune(near, request(300, ["selfsd"]), steps)
    found = next(entry for entry in outcome.methods if entry.name == "selfsd")
    assert (found.settings, found.tried) == ({"skip": "1"}, 7)
    assert found.measured is not None
    assert any("layers to skip" in step and found.written in step for step in finished(steps))
    monkeypatch.undo()
    slow = ReferenceOutput([1, 5], [6] * 10, 10, frozenset(), 1.0, 1000.0)  # there is no time to measure one set of layers
    with pytest.raises(SpecgenError, match="time was short"):
        tuned_skips(near, [slow], 12.0)


def test_methods_that_cannot_be_tuned_have_a_reason(near: Pair) -> None:
    selection = select_methods(near, None)
    assert "no exit layer" in selection.left_out["eesd-beta"]
    assert "--methods selfsd" in selection.left_out["selfsd"]
    assert set(selection.simulated).isdisjoint(selection.left_out)


@pytest.mark.parametrize("fails", ["before", "while measuring", "while simulating"])
def test_a_tuning_without_any_of_the_named_methods_is_refused(near: Pair, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    names, steps = ["eesd", "eesd-beta", "ar"], Mock()
    if fails != "before":
        names = ["sd", "ar"]
        selection = tuner.Selection(["ar"], [], False, {"sd": "it failed"})
        left_out = {"sd": "it failed"} if fails == "while measuring" else {}
        monkeypatch.setattr(tuner, "measure_pair", lambda *_: (replace(selection, left_out=left_out), None))
        monkeypatch.setattr(tuner, "choose_method", lambda *_: replace(outcome(PLAIN), left_out={"sd": "it failed"}))
    reason = "eesd, eesd-beta: there is no exit layer" if fails == "before" else "sd: it failed"
    with pytest.raises(SpecgenError, match=f"no method can be tuned: {reason}"):
        tune(near, request(300, names), steps)
    assert not steps.mock_calls


def test_a_draft_model_with_too_short_a_context_is_refused(near: Pair) -> None:
    target, draft = runners(near)
    assert draft is not None
    long = ReferenceOutput([1] * 100, [2] * 24, 24, frozenset(), 0.1, 0.2)
    with pytest.raises(SpecgenError, match="cannot follow"):
        Recorder(target, draft, GREEDY).record(long)


PLAIN = Candidate("ar", {}, 100.0, 1, 100.0, 1.0)


def outcome(*methods: Candidate) -> TuningOutcome:
    return TuningOutcome(methods, GREEDY, 8, {})


@pytest.mark.parametrize(
    ("speedup", "low", "high", "verdict"),
    [(1.5, 1.2, 1.8, "pays"), (0.9, 0.8, 0.97, "does not pay"), (1.02, 0.97, 1.06, "unclear"), (0.98, 0.9, 1.1, "does not pay")],
)
def test_the_interval_decides(speedup: float, low: float, high: float, verdict: str) -> None:
    best = Candidate("sd", {"k": 3}, 100.0, 1, 100.0, speedup, low, high)
    found = outcome(best, PLAIN)
    assert (found.chosen, found.verdict) == (best if verdict == "pays" else PLAIN, verdict)


@pytest.mark.parametrize(("predicted", "chosen"), [(300.0, "sd"), (105.0, "ar")])
def test_expected_speeds_alone_confirm_nothing(predicted: float, chosen: str) -> None:
    found = outcome(Candidate("sd", {"k": 3}, predicted), replace(PLAIN, measured=None, speedup=None))
    assert (found.chosen.name, found.verdict) == (chosen, "unconfirmed")


def test_a_method_that_is_fast_on_some_prompts_only_is_not_chosen() -> None:
    steady, moody = (Candidate(name, {}, 150.0, 1, 150.0, 1.5, 1.3, 1.7) for name in ("svip", "lookup"))
    moody = replace(moody, measured=160.0, speedup=1.6, low=0.9, high=2.9)

    def best(*found: Candidate) -> str:
        return outcome(*found, PLAIN).best.name

    assert best(moody, steady) == "svip"
    assert best(replace(moody, low=None, high=None), steady) == "lookup", "too few runs to tell: the measured speed decides"
    assert best(replace(moody, measured=None, speedup=None, low=None), steady) == "svip", "measured methods come first"


def test_defaults_are_kept_where_other_settings_are_hardly_better() -> None:
    tried = [
        Candidate("svip", {"threshold": threshold, "c": 0.15, "max_draft": longest}, speed)
        for threshold, longest, speed in ((0.4, 40, 98.0), (0.5, 8, 100.0), (0.4, 8, 99.0), (0.7, 4, 40.0))
    ]
    assert nearest_to_default(tried) == replace(tried[0], tried=4)
    assert nearest_to_default(tried[1:]) == replace(tried[2], tried=3)
    assert nearest_to_default([replace(tried[0], predicted=90.0), tried[1]]) == replace(tried[1], tried=2)


def test_lookup_is_tuned_to_adapted_lengths_or_a_fixed_one() -> None:
    """Its default policy, `adaptive`, is taken unless a fixed length is clearly faster."""
    for fixed, chosen in ((99.0, {"ngram": 3}), (120.0, {"k": 6, "ngram": 2})):
        speeds = {written("lookup", {"ngram": 3}): 98.0, written("lookup", {"k": 6, "ngram": 2}): fixed}
        tried = [Candidate("lookup", given, speeds.get(written("lookup", given), 90.0)) for given in grid("lookup")]
        assert nearest_to_default(tried).settings == chosen
    assert {resolve(METHODS["lookup"], each.settings).policy for each in tried} == {"adaptive", "fixed"}
