"""Simulated runs on memoised model outputs: the same rounds as real runs, with seconds from measured costs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from families import make_model, save, with_exit
from head_layouts import write_head
from tuning_helpers import COSTS, PROMPTS, PairOf, really
from typer.testing import CliRunner

import specgen
from specgen.base.types import SamplingParams
from specgen.cli.app import app
from specgen.compare.prompts import Prompt, load_prompts
from specgen.decoding.costs.round_costs import RoundCosts
from specgen.pair.figures import Figures
from specgen.pair.pair import Pair
from specgen.tune import profile as profiles
from specgen.tune import simulated_runs as module
from specgen.tune import tuner
from specgen.tune.outcome import Candidate, TuningOutcome
from specgen.tune.recorded_drafts import record_reference
from specgen.tune.request import BY_SPEED, Deadline, Objective, TuningRequest
from specgen.tune.round_timing import RoundProbe
from specgen.tune.settings_search import SearchResult, search
from specgen.tune.simulated_runs import SimulatedRuns
from specgen.tune.tuner import tune

GREEDY = SamplingParams(max_new_tokens=20, seed=0)
SAMPLED = replace(GREEDY, temperature=1.0, top_k=8)
CHAINS = [("spectr", {"drafts": 3, "k": 3}), ("specinfer", {"drafts": 2, "k": 4})]
LOSSY = [
    ("mtad", {"beams": 4, "k": 3, "tau": 0.3}),
    ("mtad", {"beams": 2, "k": 5, "tau": 0.05}),
    ("bild", {"k": 4, "fallback": 0.1}),
]
LEARNERS = [("lookahead", {"window": 4}), ("ouroboros", {"k": 3, "branches": 2})]
HEADS = {"medusa": "medusa-v2", "eagle": "eagle1", "glide": "glide"}
OF_HEADS: list[tuple[str, dict[str, object]]] = [
    ("medusa", {}),
    ("medusa", {"nodes": 0, "k": 3}),
    ("eagle", {}),
    ("eagle", {"width": 1, "k": 3, "cape": True}),
    ("eagle", {"policy": "svip", "threshold": 0.9, "width": 2, "nodes": 4}),
    ("glide", {"policy": "svip", "threshold": 0.9}),
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
    return with_exit(Pair(target, None), 2)


@pytest.fixture(scope="module")
def headed(pair_of: PairOf, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target with a random head of each kind."""
    target = pair_of("llama", "near").target
    pair = Pair(target, None)
    folder = tmp_path_factory.mktemp("heads")
    for kind, layout in HEADS.items():
        pair.parts.name(write_head(folder / kind, layout, target.folder), is_exit=False)
    return pair


class Probe:
    """A `CostProbe` of constant costs; the names of the methods it times go to `timed`."""

    costs = COSTS

    def __init__(self, timed: list[str], name: str) -> None:
        self._timed, self._name = timed, name

    def run(self, deadline: Deadline) -> None:
        self._timed.append(self._name)


def simulated(pair: Pair, sampling: SamplingParams, plain: RoundCosts = COSTS, timed: list[str] | None = None) -> SimulatedRuns:
    references = [record_reference(pair, prompt, sampling) for prompt in PROMPTS]
    names = [] if timed is None else timed
    return SimulatedRuns(pair, references, sampling, plain, probe=lambda pair, name, *_, **__: Probe(names, name))


def same(found: Figures, run: Figures) -> bool:
    """The same rounds, drafts, accepted tokens and output."""
    figures = [(one.rounds, one.drafted, one.accepted, one.drafts, one.token_ids) for one in (found, run)]
    return figures[0] == figures[1]


@pytest.mark.parametrize(("name", "given"), TREES + CHAINS + LOSSY + LEARNERS)
def test_simulated_runs_count_what_real_runs_count(near: Pair, name: str, given: dict[str, object]) -> None:
    found = simulated(near, GREEDY).run(name, given)
    assert same(found, really(near, name, given, GREEDY, repeat=0))
    assert (found.perplexity is None) == ((name, given) not in LOSSY)


@pytest.mark.parametrize(("name", "given"), CHAINS + LOSSY + LEARNERS)
def test_in_sampling_a_seed_makes_the_same_run(near: Pair, name: str, given: dict[str, object]) -> None:
    assert same(simulated(near, SAMPLED).run(name, given), really(near, name, given, SAMPLED, repeat=0))


def test_heads_read_the_targets_hidden_states_in_simulated_runs(headed: Pair) -> None:
    """The real target is not run in greedy simulations, and its runner has run something else before."""
    runs, drafted, accepted = simulated(headed, GREEDY), 0, 0
    for name, given in OF_HEADS:
        found = runs.run(name, given)
        assert same(found, really(headed, name, given, GREEDY)), (name, given)
        assert found.drafted > 0
        drafted, accepted = drafted + found.drafted, accepted + found.accepted
    assert accepted > 0


@pytest.mark.parametrize(("name", "given"), [("medusa", {}), ("eagle", {"width": 1}), ("glide", {"cape": True})])
def test_heads_sample_in_simulated_runs_as_in_real_ones(headed: Pair, name: str, given: dict[str, object]) -> None:
    assert same(simulated(headed, SAMPLED).run(name, given), really(headed, name, given, SAMPLED, repeat=0))


@pytest.mark.parametrize("given", [{"width": 2, "depth": 3}, {"width": 3, "depth": 4, "max_draft": 3}])
def test_trees_of_an_early_exit_use_its_predictor(early: Pair, given: dict[str, object]) -> None:
    """A random policy is run three times on each prompt."""
    found = simulated(early, GREEDY).run("eesd-tree", given)
    runs = [really(early, "eesd-tree", given, GREEDY, repeat) for repeat in range(3)]
    assert found.token_ids == [token for run in runs for token in run.token_ids]
    assert (found.rounds, found.drafted, found.accepted) == tuple(
        sum(getattr(run, figure) for run in runs) for figure in ("rounds", "drafted", "accepted")
    )


def test_levels_that_a_tree_leaves_out_are_timed_and_its_nodes_are_counted_once(headed: Pair) -> None:
    """A tree of at most two nodes, of four levels of four: the head runs four times, and the target verifies two nodes."""
    shape = {"width": 4, "nodes": 2}
    probe = RoundProbe(headed, "eagle", PROMPTS[:1], GREEDY, lengths=(4,), settings=shape)
    probe.run(Deadline.after(0, count().__next__))
    ((_, curve),) = probe.costs.draft_cost.curves.items()
    assert set(curve.points) == {0, 4}
    run = headed.run(headed.request(PROMPTS[0], "eagle", GREEDY, **shape))
    with patch.object(run.policy, "keep_drafting", wraps=run.policy.keep_drafting) as judged:
        for round_ in run.rounds():
            assert sum(call.args[0].nodes for call in judged.call_args_list) == len(round_.draft.tokens)
            judged.reset_mock()


def test_no_pass_is_computed_twice(near: Pair) -> None:
    made = simulated(near, GREEDY)
    for name, given in TREES + LOSSY:
        made.run(name, given)
    runners = [runner for components, _ in made._components.values() for runner in (components.target, components.draft)]
    passes = [runner.passes for runner in runners]  # type: ignore[union-attr]
    for name, given in TREES + LOSSY:
        made.run(name, given)
    assert [runner.passes for runner in runners] == passes  # type: ignore[union-attr]


def test_each_pass_of_a_draft_has_its_price(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "draft_prefill_seconds", lambda *_: 0.25)
    found = simulated(near, GREEDY).run("mtad", {"beams": 4, "k": 2, "tau": 0.3})
    rounds = found.rounds - len(PROMPTS)
    assert found.phase_seconds["verify"] == pytest.approx(10.0 * rounds)
    # two levels per round, except the last one of each prompt, which may have less room
    assert 2.0 * (rounds - len(PROMPTS)) <= found.phase_seconds["draft"] - 0.25 * len(PROMPTS) <= 2.0 * rounds


def test_each_shape_is_timed_once(near: Pair) -> None:
    timed: list[str] = []
    runs = simulated(near, GREEDY, timed=timed)
    for name, given in [("mtad", {"k": 2}), ("mtad", {"k": 3, "tau": 0.5}), ("mtad", {"beams": 2}), ("bild", {})]:
        runs.run(name, given)
    assert timed == ["ar", "mtad", "ar", "ar", "mtad", "ar", "ar", "bild", "ar"]


def test_a_shape_is_timed_between_plain_passes_that_correct_its_costs(near: Pair) -> None:
    """A pass alone takes 10 s now and took 30 s together with all other methods: the machine is three times as fast now."""
    timed: list[str] = []
    verify = [
        simulated(near, GREEDY, plain, timed).run("mtad", {"k": 2}).phase_seconds["verify"] for plain in (COSTS, COSTS.times(3))
    ]
    assert verify == pytest.approx([verify[0], 3 * verify[0]])
    assert timed == ["ar", "mtad", "ar"] * 2


def test_real_probes_time_a_shape(near: Pair) -> None:
    references = [record_reference(near, prompt, GREEDY) for prompt in PROMPTS]
    runs = SimulatedRuns(near, references, GREEDY, COSTS, probe=RoundProbe, clock=count().__next__)
    assert runs.run("mtad", {"k": 2}).seconds > 0


class GivenRuns:
    """In place of `SimulatedRuns`: given seconds and perplexities by `tau`."""

    plain_perplexity = 2.0

    def __init__(self, figures: dict[float, tuple[float, float | None]]) -> None:
        self._figures = figures

    def run(self, name: str, given: dict[str, float]) -> Figures:
        seconds, perplexity = self._figures[given["tau"]]
        summary = Figures(name)
        summary.token_ids, summary.phase_seconds["verify"] = [1] * 10, seconds
        summary.log_likelihood = None if perplexity is None else -10 * math.log(perplexity)
        return summary


def searched(
    figures: dict[float, tuple[float, float | None]], readings: int = 9, objective: Objective = BY_SPEED
) -> SearchResult:
    grids = {"mtad": [{"tau": tau} for tau in figures]}
    deadline = Deadline.after(readings, count().__next__)
    return search(GivenRuns(figures), grids, deadline, lambda what: None, objective)  # type: ignore[arg-type]


def test_of_settings_that_keep_plain_decodings_perplexity_the_fastest_is_found() -> None:
    found = searched({0.1: (1.0, 2.5), 0.3: (2.0, 2.0), 0.5: (3.0, 1.5), 0.7: (0.5, None)})
    (best,) = found.candidates
    assert best.settings == {"tau": 0.3}
    assert best.predicted == pytest.approx(5.0)
    assert best.tried == found.tried == 4
    none = searched({0.1: (1.0, 2.5), 0.3: (2.0, 2.2)})
    assert none.left_out == {"mtad": "none of 2 settings has a perplexity of at most 2.000, the lowest being 2.200"}
    assert none.plain_perplexity == 2.0
    late = searched({0.1: (1.0, 1.0)}, 0)
    assert "time was short" in late.left_out["mtad"]


def test_settings_are_chosen_by_the_lowest_perplexity_or_under_another_bound() -> None:
    """Plain decoding's perplexity is 2."""
    figures = {0.1: (1.0, 2.5), 0.3: (2.0, 2.09), 0.5: (3.0, 1.5001), 0.6: (2.5, 1.5003), 0.7: (4.0, None)}

    def tau(objective: str, bound: str | None = None) -> float:
        (best,) = searched(figures, objective=Objective.parse(objective, bound)).candidates
        return float(best.settings["tau"])

    assert tau("perplexity") == 0.6, "of equal perplexities the fastest"
    assert [tau("speed", bound) for bound in (None, "105%", "2.09", "99%", "3", " 200 % ")] == [0.6, 0.3, 0.3, 0.6, 0.1, 0.1]
    (unbounded,) = searched({0.1: (1.0, 99.0)}, objective=Objective.parse("perplexity", None)).candidates
    assert unbounded.perplexity == pytest.approx(99)
    unknown = searched({0.1: (1.0, None)}, objective=Objective.parse("perplexity", None))
    assert unknown.left_out == {"mtad": "none of 1 setting has a perplexity"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--objective quality", "--objective is 'quality'. It has to be speed or perplexity"),
        ("--max-perplexity 0.9", "--max-perplexity is '0.9'"),
        ("--max-perplexity 0%", "a percentage of plain decoding's such as 105%"),
        ("--max-perplexity nan", "--max-perplexity is 'nan'"),
        ("--max-perplexity two", "--max-perplexity is 'two'"),
        ("--objective perplexity --max-perplexity 2", "--max-perplexity cannot be combined with --objective perplexity"),
        ("--objective perplexity --methods sd", "--objective perplexity is for lossy methods, and none is tuned"),
        ("--methods joint", "joint is only a yardstick for other methods and cannot be tuned"),
        ("--max-perplexity 105", "write 105% for a percentage of plain decoding's"),
        ("--max-perplexity 110% -m svip", "--max-perplexity is for lossy methods, and none is tuned"),
        ("--train --objective perplexity", "--objective cannot be combined with --train"),
    ],
)
def test_a_wrong_objective_is_one_line(arguments: str, said: str) -> None:
    result = CliRunner().invoke(app, ["tune", *arguments.split()])
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in " ".join(result.stderr.split())


def test_tune_takes_the_objective_and_shows_perplexities(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The report, --json and the profile have plain decoding's perplexity beside the lossy method's."""
    objectives = []

    def tuned(pair: Pair, request: TuningRequest, observer: object, rounded: object) -> TuningOutcome:
        objectives.append((request.objective, {prompt.for_tuning for prompt in request.prompts}))
        lossy = Candidate("mtad", {"k": 4, "beams": 2, "tau": 0.1}, 120.0, 9, perplexity=1.07)
        return TuningOutcome([lossy, Candidate("ar", {}, 80.0, perplexity=1.12)], request.sampling, 8, {})

    monkeypatch.setattr(tuner, "tune", tuned)
    given = ["tune", "--methods", "mtad", "--objective", "perplexity", "--out", str(tmp_path)]
    shown = CliRunner().invoke(app, given).stderr
    assert re.search(r"^mtad:k=4:beams=2:tau=0\.1 .* lossy, perplexity 1\.07$", shown, flags=re.MULTILINE)
    assert re.search(r"^ar .* perplexity 1\.12$", shown, flags=re.MULTILINE)
    line = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    assert (line["objective"], line["perplexity"]) == ("perplexity", {"mtad": 1.07, "ar": 1.12})
    assert objectives == [(Objective(lowest_perplexity=True), {True})] * 2
    kept = profiles.load(tmp_path)
    assert {name: entry.perplexity for name, entry in kept.methods.items()} == {"mtad": 1.07, "ar": 1.12}
    assert kept.measured.prompt_fingerprints == [prompt.fingerprint for prompt in load_prompts(None, for_tuning=True, limit=8)]


def test_searches_run_on_prompts_of_all_categories() -> None:
    found = [list(tuner._spread(range(count), 4)) for count in (2, 5, 8, 9)]  # type: ignore[arg-type]
    assert found == [[0, 1], [0, 1, 2, 3], [0, 2, 4, 6], [0, 2, 4, 6]]


def test_a_lossy_method_is_tuned_on_request_and_never_chosen(near: Pair, tmp_path: Path) -> None:
    """Its output's perplexity is below the bound, and its speed far above plain decoding's."""
    texts = [Prompt(index, text) for index, text in enumerate(["one two three", "abc abc abc"])]
    sampling = replace(SAMPLED, top_k=0)
    bound = Objective.parse("speed", "1000000%")
    request = TuningRequest(texts, sampling, Deadline.after(200, count().__next__), ["mtad"], objective=bound)
    outcome = tune(near, request, Mock())
    assert "mtad" not in outcome.left_out
    assert outcome.best.name == outcome.chosen.name == "ar"
    found = next(entry for entry in outcome.methods if entry.name == "mtad")
    assert found.perplexity is not None
    assert found.measured is not None, "it was requested, so it is really run"
    fast = [replace(entry, measured=9.0, speedup=9.0, low=8.0) for entry in outcome.methods]
    assert replace(outcome, methods=fast).chosen.name == "ar"
    assert {entry.name: entry for entry in outcome.methods}["ar"].perplexity is not None
    profiles.save(profiles.from_outcome(outcome, profiles.profile_key_of(near)), tmp_path)
    kept = profiles.load(tmp_path)
    assert kept.chosen.method == "ar"
    assert kept.methods["mtad"].perplexity == pytest.approx(found.perplexity, rel=1e-4)
