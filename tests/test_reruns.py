"""What no tape holds is run again on rows that are kept: the same rounds as real runs, at the seconds that were looked up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from families import exit_of, make_model, save

import specgen
from specgen.compare.prompts import Prompt
from specgen.cost_model import CostTable, Curve, RoundCosts
from specgen.pair import Pair
from specgen.traces.summary import Summary
from specgen.tuning import profile as profiles
from specgen.tuning import simulated_runs as module
from specgen.tuning.candidates import RERUN, grid, trees
from specgen.tuning.recorded_drafts import record_answer
from specgen.tuning.settings_search import search
from specgen.tuning.simulated_runs import SimulatedRun, SimulatedRuns
from specgen.tuning.tuner import Tuner, TuningRequest
from specgen.types import SamplingParams

PROMPTS = [[5, 9, 7, 3, 11, 5, 9, 7], [20, 21, 22, 4, 6]]
GREEDY = SamplingParams(max_new_tokens=20, seed=0)
SAMPLED = replace(GREEDY, temperature=1.0, top_k=8)
COSTS = RoundCosts(CostTable({8: Curve({0: 0.0, 1: 1.0, 2: 2.0})}), CostTable({8: Curve({1: 10.0, 2: 10.0})}), 0.0)
PairOf = Callable[[str, str], Pair]
CHAINS = [("spectr", {"drafts": 3, "k": 3}), ("specinfer", {"drafts": 2, "k": 4})]
LOSSY = [
    ("mtad", {"beams": 4, "k": 3, "tau": 0.3}),
    ("mtad", {"beams": 2, "k": 5, "tau": 0.05}),
    ("bild", {"k": 4, "fallback": 0.1}),
]
TREES = [("sd", {"width": 2, "depth": 3}), ("sd", {"width": 4, "depth": 2, "k": 2}), ("sd", {"width": 3, "k": 4})]


@pytest.fixture(scope="module")
def near(pair_of: PairOf) -> Pair:
    return pair_of("llama", "near")


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target with an exit and a predictor, neither trained, and no draft model."""
    folder = save(make_model("llama", num_hidden_layers=4), tmp_path_factory.mktemp("early"))
    target = specgen.load(folder, device="cpu", dtype="float32").target
    return Pair(target, None, exit_layer=exit_of(target.model, 2))


def rerunning(pair: Pair, sampling: SamplingParams, priced: Sequence[tuple[str, dict[str, object]]] = ()) -> SimulatedRuns:
    """Its costs are known already."""
    answers = [record_answer(pair, prompt, sampling) for prompt in PROMPTS]
    made = SimulatedRuns(pair, answers, sampling)
    made.price = lambda name, given: None  # type: ignore[method-assign]
    made._costs = _Always()
    return made


class _Always(dict):  # type: ignore[type-arg]
    def __missing__(self, key: object) -> RoundCosts:
        return COSTS


def really(pair: Pair, name: str, given: dict[str, object], sampling: SamplingParams) -> Summary:
    summary = Summary(name)
    for prompt in PROMPTS:
        for round_ in pair.rounds(prompt, name, sampling, **given):
            summary.add(round_)
    return summary


def same(found: Summary, run: Summary) -> bool:
    """The same rounds, the same drafts, the same fates, the same tokens."""
    figures = [(one.rounds, one.drafted, one.accepted, one.drafts, one.token_ids) for one in (found, run)]
    return figures[0] == figures[1]


@pytest.mark.parametrize(("name", "given"), TREES + CHAINS + LOSSY)
def test_reruns_count_what_real_runs_count(near: Pair, name: str, given: dict[str, object]) -> None:
    found = rerunning(near, GREEDY).run(name, given)
    assert same(found.summary, really(near, name, given, GREEDY))
    assert (found.perplexity is None) == ((name, given) not in LOSSY)


@pytest.mark.parametrize(("name", "given"), CHAINS + LOSSY)
def test_in_sampling_a_seed_makes_the_same_run(near: Pair, name: str, given: dict[str, object]) -> None:
    assert same(rerunning(near, SAMPLED).run(name, given).summary, really(near, name, given, SAMPLED))


@pytest.mark.parametrize("given", [{"width": 2, "depth": 3}, {"width": 3, "depth": 4, "max_draft": 3}])
def test_trees_of_an_early_exit_ask_its_predictor(early: Pair, given: dict[str, object]) -> None:
    """A policy that throws dice is run three times, the first with the seed of the real run."""
    found = rerunning(early, GREEDY).run("eesd-tree", given).summary
    runs = [really(early, "eesd-tree", given, replace(GREEDY, seed=seed)) for seed in range(3)]
    assert found.token_ids == [token for run in runs for token in run.token_ids]
    assert (found.rounds, found.drafted, found.accepted) == tuple(
        sum(getattr(run, figure) for run in runs) for figure in ("rounds", "drafted", "accepted")
    )


def test_nothing_is_asked_twice(near: Pair) -> None:
    made = rerunning(near, GREEDY)
    for name, given in TREES + LOSSY:
        made.run(name, given)
    runners = [runner for components, _ in made._components.values() for runner in (components.target, components.draft)]
    passes = [runner.passes for runner in runners]  # type: ignore[union-attr]
    for name, given in TREES + LOSSY:
        made.run(name, given)
    assert [runner.passes for runner in runners] == passes  # type: ignore[union-attr]


def test_each_pass_of_a_draft_has_its_price(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Recorder, "prefill", lambda self, answer: 0.25)
    found = rerunning(near, GREEDY).run("mtad", {"beams": 4, "k": 2, "tau": 0.3}).summary
    rounds = found.rounds - len(PROMPTS)
    assert found.phase_seconds["verify"] == pytest.approx(10.0 * rounds)
    # two levels a round, but for the last one of each prompt, which may have less room
    assert 2.0 * (rounds - len(PROMPTS)) <= found.phase_seconds["draft"] - 0.25 * len(PROMPTS) <= 2.0 * rounds


def test_shapes_are_timed_once(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimulatedRuns(near, [record_answer(near, prompt, GREEDY) for prompt in PROMPTS], GREEDY)
    timed: list[str] = []
    usual = module.RoundProbe

    def counted(pair: Pair, name: str, *others: object, **options: object) -> object:
        timed.append(name)
        return usual(pair, name, *others, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "RoundProbe", counted)
    monkeypatch.setattr(module, "_PROBED", 0.02)
    for name, given in [("mtad", {"k": 2}), ("mtad", {"k": 3, "tau": 0.5}), ("mtad", {"beams": 2}), ("bild", {})]:
        assert made.run(name, given).summary.seconds > 0
    assert timed == ["mtad", "mtad", "bild"]


def test_a_shape_is_priced_at_the_pace_of_all_else(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed in one moment, on a machine that was three times slower in all others."""

    class Constant:
        costs = COSTS

        def __init__(self, *_: object, **__: object) -> None: ...

        def run(self, seconds: float) -> None: ...

    monkeypatch.setattr(module, "RoundProbe", Constant)
    answers = [record_answer(near, prompt, GREEDY) for prompt in PROMPTS]
    verify = [
        SimulatedRuns(near, answers, GREEDY, plain).run("mtad", {"k": 2}).summary.phase_seconds["verify"]
        for plain in (None, COSTS, COSTS.times(3))
    ]
    assert verify == pytest.approx([verify[0], verify[0], 3 * verify[0]])


def test_a_shape_is_timed_beside_plain_passes(near: Pair) -> None:
    answers = [record_answer(near, prompt, GREEDY) for prompt in PROMPTS]
    made = SimulatedRuns(near, answers, GREEDY, COSTS)
    made.price("mtad", {"k": 2})
    (costs,) = made._costs.values()
    assert min(costs.verification_cost.at(tokens, 8) for tokens in (1, 4)) > 1, "COSTS has passes of ten seconds"


def test_every_candidate_is_a_setting_of_its_method(near: Pair, early: Pair) -> None:
    for name in RERUN:
        pair = early if name == "eesd-tree" else near
        for given in grid(name):
            pair.plan(PROMPTS[0], name, GREEDY, **given)
    for given in trees():
        near.plan(PROMPTS[0], "sd", GREEDY, **given)


class _Told:
    """In the place of SimulatedRuns: speeds and perplexities that are given."""

    plain_perplexity = 2.0

    def __init__(self, told: dict[float, tuple[float, float | None]]) -> None:
        self._told = told

    def run(self, name: str, given: dict[str, float]) -> SimulatedRun:
        seconds, perplexity = self._told[given["tau"]]
        summary = Summary(name)
        summary.token_ids, summary.phase_seconds["verify"] = [1] * 10, seconds
        return SimulatedRun(summary, perplexity)


def searched(told: dict[float, tuple[float, float | None]], seconds: float = 9.0) -> object:
    grids = {"mtad": [{"tau": tau} for tau in told]}
    return search(_Told(told), grids, time.perf_counter() + seconds, lambda what: None)  # type: ignore[arg-type]


def test_the_fastest_counts_whose_perplexity_is_not_above_plain_decodings() -> None:
    found = searched({0.1: (1.0, 2.5), 0.3: (2.0, 2.0), 0.5: (3.0, 1.5), 0.7: (0.5, None)})
    assert found.best["mtad"].settings == {"tau": 0.3}  # type: ignore[attr-defined]
    assert found.best["mtad"].predicted == pytest.approx(5.0)  # type: ignore[attr-defined]
    assert found.tried["mtad"] == 4  # type: ignore[attr-defined]
    none = searched({0.1: (1.0, 2.5), 0.3: (2.0, 2.2)})
    assert none.left_out == {  # type: ignore[attr-defined]
        "mtad": "none of 2 settings keeps sd's perplexity of 2.00, the lowest being 2.20"
    }
    late = searched({0.1: (1.0, 1.0)}, -1.0)
    assert "time was short" in late.left_out["mtad"]  # type: ignore[attr-defined]


def test_a_lossy_method_is_tuned_where_it_is_asked_for_and_never_chosen(near: Pair, tmp_path: Path) -> None:
    class Quiet:
        def done(self, what: str, seconds: float) -> None: ...

        def doing(self, what: str, seconds_left: float) -> None: ...

    texts = [Prompt(index, text) for index, text in enumerate(["one two three", "abc abc abc"])]
    sampling = replace(SAMPLED, top_k=0)
    for budget in (2.0, 6.0, 18.0):  # on a busy machine the first may be too short for reruns
        outcome = Tuner(near, TuningRequest(texts, sampling, time.perf_counter() + budget, ["mtad"]), Quiet()).run()
        if "time was short" not in outcome.left_out.get("mtad", ""):
            break
    assert outcome.chosen.name == "ar"
    found = {entry.name: entry for entry in outcome.methods}
    if "mtad" in outcome.left_out:  # with two short answers chance may have it so
        assert "keeps sd's perplexity" in outcome.left_out["mtad"]
    else:
        assert found["mtad"].perplexity is not None
        assert not found["mtad"].lossless
    profiles.save(profiles.made_of(outcome, profiles.profile_key_of(near)), tmp_path)
    kept = profiles.load(tmp_path)
    assert kept.chosen.method == "ar"
    assert ("mtad" in kept.methods) == ("mtad" in found)
