"""Tuning: what is tried, timed, chosen and really run; `test_simulator.py` has the simulated
runs."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from families import make_model, save
from pair_helpers import draft_here, pair_of_models, pass_costs
from tuning_helpers import COSTS, GREEDY, PROMPTS, TEXTS, PairOf, finished, outcome
from typer.testing import CliRunner

import specgen
from specgen.base.errors import SpecgenError
from specgen.base.settings import written
from specgen.base.types import Context
from specgen.cli.app import app
from specgen.compare.prompts import ListedPrompt, load_prompts
from specgen.decoding.costs import LONG_COPIES, CostTable, Curve, RoundCosts, SpeedupModel
from specgen.engine.model_runner import ModelRunner, time_passes
from specgen.methods import METHODS, distance_from_defaults, resolve, skip_search
from specgen.pair import profile as profiles
from specgen.pair.pair import Pair
from specgen.tune import tuner
from specgen.tune.outcome import (
    Candidate,
    Deadline,
    Objective,
    TuningOutcome,
    TuningRequest,
    combinations,
    grid,
    is_searched,
    is_simple,
    nearest_to_default,
    plain_of,
    shortlist,
)
from specgen.tune.real_runs import PlainSpeed, RealRuns
from specgen.tune.round_timing import (
    LENGTHS,
    ReferenceOutput,
    measure_costs,
    record_reference,
    time_parallel_rounds,
)
from specgen.tune.simulator import Simulator
from specgen.tune.tuner import Tuner, best_lossy, one_of_each, outcome_of, run_second_prompt, tune
from specgen.view import theme
from specgen.view.pair_report import show_tuning

PLAIN = Candidate("ar", {}, 100.0, 100.0, 1.0)


@pytest.fixture(scope="module")
def near(pair_of: PairOf) -> Pair:
    return pair_of("llama", "near")


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real runs end after a few turns: on tiny models and on a clock that counts its readings,
    fifty show no more."""
    monkeypatch.setattr(tuner, "MOST_REPEATS", 4)


def request(readings: float, names: list[str] | None = None, **given: Any) -> TuningRequest:
    """A request with time for so many readings of a clock on which each takes a second, whatever
    the machine's speed."""
    return TuningRequest(TEXTS, GREEDY, Deadline.after(readings, count().__next__), names, **given)


@pytest.mark.parametrize("name", [*filter(is_simple, METHODS), *filter(is_searched, METHODS)])
def test_every_candidate_is_a_setting_of_its_method(name: str) -> None:
    """Settings near the defaults come first: a search that is short of time has then tried other
    policies too."""
    settings = [*grid(name), *combinations(METHODS[name].tuning.shapes)]
    assert len({written(name, given) for given in settings}) == len(settings)
    for given in settings:
        resolve(METHODS[name], given, has_predictor=True)
    values = resolve(METHODS[name], {}, has_predictor=True).values
    if name not in ("ar", "pearl", "eesd", "block", "heuristic"):
        assert all(values[key] == value for key, value in settings[0].items()), (
            "the defaults are tried first"
        )
    method = METHODS[name]
    distances = [min(2, distance_from_defaults(method, given)) for given in grid(name)]
    assert distances == sorted(distances)


def test_real_rounds_of_each_kind_are_timed(near: Pair) -> None:
    """A round without a draft is the target's alone, not extrapolated: this could give any number
    on a disturbed machine."""
    references = [record_reference(near, PROMPTS[0], replace(GREEDY, max_new_tokens=16))]
    kinds = ["echo", "model", "parallel", "exit"]
    costs, failures = measure_costs(
        near, kinds, references, GREEDY, Deadline.after(40, count().__next__), lambda _: None
    )
    assert (set(costs), set(failures)) == ({"echo", "model", "parallel"}, {"exit"})
    alone = costs["echo"].verification_cost
    model = costs["model"]
    widest = [
        max(max(curve.points) for curve in kind.verification_cost.curves.values())
        for kind in (costs["echo"], model)
    ]
    room = [length for length in LONG_COPIES if 4 * length <= near.target.context_limit]
    assert widest == [1 + max(room), 1 + max(LENGTHS)], "copied drafts are longer"
    ((_, drafting),) = model.draft_cost.curves.items()
    assert drafting.points[0] == 0
    assert all(seconds > 0 for length, seconds in drafting.points.items() if length)
    assert all(
        curve.points[1] == alone.at(1, length)
        for length, curve in model.verification_cost.curves.items()
    )
    parallel = costs["parallel"]
    assert all(
        table.at(tokens, 8) > 0
        for tokens in (1, 2)
        for table in (parallel.draft_cost, parallel.verification_cost)
    )
    assert parallel.synchronisation_overhead >= 0


def test_timed_passes_are_over_distinct_tokens(near: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a token share the experts of a mixture, so their passes would take less time than a
    text's."""
    seen = list[list[int]]()
    logits = ModelRunner.logits
    fresh = pair_of_models(near.target, near.draft)
    monkeypatch.setenv("SPECGEN_CACHE", "/dev/null/none")  # nothing is known

    def recorded(
        runner: ModelRunner, context: Context, draft: Sequence[int] = (), *given: Any, **named: Any
    ) -> Any:
        seen.extend([list(draft)] * (runner._forward.model is near.target.model))  # type: ignore[attr-defined]
        return logits(runner, context, draft, *given, **named)

    monkeypatch.setattr(ModelRunner, "logits", recorded)
    reference = record_reference(fresh, PROMPTS[0], GREEDY)
    for timing in (
        lambda: time_passes(fresh.target.runner(), [1, 4], 20),
        lambda: pass_costs(fresh, 20),
        lambda: measure_costs(
            fresh,
            ["echo"],
            [reference],
            GREEDY,
            Deadline.after(9, count().__next__),
            lambda _: None,
        ),
    ):
        seen.clear()
        timing()
        assert max(map(len, seen)) > 2
        assert all(len({*draft}) == len(draft) for draft in seen)


@pytest.mark.parametrize("shorter", ["target", "draft"])
def test_pearl_that_drafts_nothing_is_left_out(tmp_path: Path, shorter: str) -> None:
    """Where a context has no room for drafts."""
    length = {"target": {}, "draft": {}} | {shorter: {"max_position_embeddings": 9}}
    folders = [save(make_model("llama", **length[role]), tmp_path / role) for role in length]
    reference = ReferenceOutput(PROMPTS[0], [1], 24, frozenset(), 0.1, 0.1)
    with specgen.load(*folders, device="cpu", dtype="float32") as pair:
        draft_here(pair)
        with pytest.raises(SpecgenError, match="pearl drafts nothing"):
            time_parallel_rounds(pair, reference, GREEDY)


def test_tuning_chooses_what_it_measured(near: Pair) -> None:
    """Plain decoding and the default are really run whatever the user named."""
    steps = Mock()
    found = tune(near, request(140, ["sd", "svip", "lookup"]), steps)
    assert {each.name for each in found.methods} == {"ar", "adaptive", "sd", "svip", "lookup"}
    assert plain_of(found.methods).measured is not None
    assert found.default.measured is not None
    assert found.best.measured is not None
    assert found.verdict != "no time"
    assert found.chosen in (found.best, plain_of(found.methods))
    assert found.best.name in ("sd", "svip", "lookup")
    assert found.chosen.measured is not None
    assert 0 < (found.acceptance_probability or 0) <= 1
    # these may all be far behind
    said = [step for step in finished(steps) if "of trees, drafts and beams" not in step]
    parts = (
        "really run, tokens/s: ar",
        "a target pass takes",
        "the target accepts",
        "settings of",
        "really run, on",
    )
    assert len(said) == len(parts)
    assert all(part in step for part, step in zip(parts, said, strict=True))


def test_without_time_the_default_stays(near: Pair) -> None:
    steps = Mock()
    found = tune(near, request(0), steps)
    assert finished(steps)[-1].endswith("no time for more")
    assert (found.verdict, found.chosen, found.simulated) == ("no time", found.default, 0)
    assert (found.default.name, found.speedup_of(found.chosen)) == ("adaptive", 1.0)
    assert found.missing_seconds > 0
    assert "time was short" in found.left_out["sd"]
    assert [each.name for each in found.methods] == ["ar"]


def test_when_sampling_each_prompt_has_a_seed_of_its_own(near: Pair) -> None:
    prompts = [replace(TEXTS[0], index=number) for number in range(2)]
    task = replace(request(1000), prompts=prompts, sampling=replace(GREEDY, temperature=1.0))
    first, second = Tuner(near, task, Mock()).try_likeliest(["sd"])
    assert first.prompt_ids == second.prompt_ids
    assert first.token_ids != second.token_ids


def test_an_unrelated_draft_does_not_pay(pair_of: PairOf) -> None:
    """Passes of both models cost the same and few tokens are accepted: plain decoding is chosen,
    and the outcome says why."""
    pair = pair_of("llama", "unrelated")
    passes = (
        Curve({tokens: float(tokens) for tokens in range(17)}),
        Curve(dict.fromkeys(range(1, 18), 1.0)),
    )
    costs = RoundCosts(*(CostTable({8: curve}) for curve in passes))
    made = Simulator(
        pair,
        [record_reference(pair, ids, GREEDY) for ids in PROMPTS],
        GREEDY,
        {"echo": costs, "model": costs},
    )
    task = request(1000)
    run = Tuner(pair, replace(task, names=["svip", "confidence"]), Mock())
    candidates = run.choose(made, ["ar", "svip", "confidence"])
    assert not run.left_out
    found = outcome_of(made, candidates, task, {}, made.run("sd", {"k": 1}).acceptance_rate)
    assert (found.chosen.name, found.methods[0].name) == ("adaptive", "ar"), (
        "expected speeds replace nothing"
    )
    assert found.speedup_of(found.best) < 0.9
    assert (found.acceptance_probability or 0) < 0.5
    assert found.speedup_model is not None
    assert found.speedup_model.relative_draft_cost == 1
    plain = plain_of(found.methods).predicted
    confirmed = [
        replace(each, measured=each.predicted, speedup=each.predicted / plain, low=0.1, high=0.9)
        for each in found.methods
    ]
    after = replace(
        found, methods=[*confirmed, Candidate("adaptive", {}, 1.0, 1.0, 0.9, 0.8, 0.95)]
    )
    assert (found.verdict, after.verdict, after.chosen.name) == ("no time", "does not pay", "ar")


@pytest.mark.parametrize("fails", ["before", "while measuring", "while simulating"])
def test_methods_that_cannot_be_tuned_have_a_reason(
    near: Pair, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A tuning of none but such methods is refused."""
    run = Tuner(near, request(0), Mock())
    names = run.select()
    assert "exit layer" in run.left_out["eesd"]
    assert "--methods selfsd" in run.left_out["selfsd"]
    assert set(names).isdisjoint(run.left_out)
    wanted = ["eesd", "ar"]
    reason = ".*an exit layer"
    if fails != "before":
        wanted = ["sd", "ar"]
        reason = "sd: it failed"
        recorded = [record_reference(near, PROMPTS[0], GREEDY)]
        simulator = Simulator(near, recorded, GREEDY, {"echo": COSTS})

        def failing(self: Tuner, *_: object) -> Any:
            self.left_out["sd"] = "it failed"
            return (simulator, None) if fails == "while measuring" else [PLAIN]

        monkeypatch.setattr(Tuner, "try_likeliest", lambda *_: recorded)
        monkeypatch.setattr(
            Tuner,
            "measure",
            failing if fails == "while measuring" else lambda *_: (simulator, None),
        )
        monkeypatch.setattr(Tuner, "choose", failing)
    with pytest.raises(SpecgenError, match=f"no method can be tuned: {reason}"):
        tune(near, request(300, wanted), Mock())


def test_copies_are_tuned_where_a_text_repeats(demo_pair: Pair) -> None:
    """The bundled target continues the second prompt with a text that repeats."""
    sampling = replace(GREEDY, max_new_tokens=56)
    costs = RoundCosts(
        CostTable({8: Curve({tokens: 0.1 * tokens for tokens in range(17)})}),
        CostTable({8: Curve({tokens: 1 + 0.02 * tokens for tokens in range(1, 18)})}),
    )
    prompts = load_prompts(None)
    copies = []
    for prompt in (prompts[0].text, prompts[7].text):
        ids = demo_pair.tokenizer.encode(prompt)
        reference = record_reference(demo_pair, ids, sampling)
        made = Simulator(demo_pair, [reference], sampling, {"echo": costs, "model": costs})
        tried = [
            Candidate("sd", given, made.run("sd", given).tokens_per_second or 0.0)
            for given in grid("sd")
            if given["k"] in (3, 5)
        ]
        copies.append(nearest_to_default(tried).settings.get("copy"))
    assert copies == [None, "auto"]


def of(*candidates: Candidate) -> TuningOutcome:
    return TuningOutcome(candidates, GREEDY, 8, {})


@pytest.mark.parametrize(
    ("speedup", "low", "high", "verdict"),
    [
        (1.5, 1.2, 1.8, "pays"),
        (0.9, 0.8, 0.97, "does not pay"),
        (1.02, 0.97, 1.06, "unclear"),
        (0.98, 0.9, 1.1, "does not pay"),
    ],
)
def test_the_interval_decides(speedup: float, low: float, high: float, verdict: str) -> None:
    """Plain decoding takes the default's place only where it was faster, on more than one
    prompt."""
    best = Candidate("sd", {"k": 3}, 100.0, 100.0, speedup, low, high)
    slow = Candidate("adaptive", {}, 70.0, 70.0, 0.7, 0.65, 0.75)
    on_one_prompt = replace(slow, low=None, high=None)
    found = of(best, PLAIN, slow)
    assert (found.chosen, found.verdict) == (best if verdict == "pays" else PLAIN, verdict)
    for default in (
        replace(slow, speedup=1.01, low=0.9, high=1.1),
        on_one_prompt,
        replace(slow, measured=None, speedup=None),
    ):
        kept = of(replace(best, speedup=0.6, low=0.5, high=0.7), PLAIN, default)
        assert kept.chosen == kept.default == default
    assert of(best, PLAIN).default == Candidate("adaptive", {}, PLAIN.predicted)


def test_what_was_only_simulated_is_never_chosen() -> None:
    simulated = Candidate("sd", {"k": 3}, 150.0)
    ran = Candidate("lookup", {}, 105.0, 105.0, 1.05, 0.9, 1.2)
    nothing_ran = of(simulated, replace(PLAIN, measured=None, speedup=None))
    assert (nothing_ran.chosen.name, nothing_ran.verdict) == ("adaptive", "no time")
    found = of(simulated, ran, PLAIN)
    assert (found.promising, found.verdict, found.chosen.name) == (
        simulated,
        "unconfirmed",
        "adaptive",
    )
    hardly = of(replace(simulated, predicted=112.0), ran, PLAIN)
    assert (hardly.promising, hardly.verdict) == (None, "unclear")
    faster = of(simulated, replace(ran, low=1.01), PLAIN)
    assert (faster.promising, faster.verdict, faster.chosen.name) == (simulated, "pays", "lookup")
    one_prompt = of(replace(ran, low=None, high=None), PLAIN)
    assert (one_prompt.verdict, one_prompt.chosen.name) == ("unconfirmed", "adaptive")


def test_one_that_was_faster_on_one_prompt_leaves_the_result_open() -> None:
    """The default was slower on two prompts, so it is known better. But the other may pay, and
    plain decoding is not chosen."""
    default = Candidate("adaptive", {}, 90.0, 90.0, 0.9, 0.85, 0.95)
    lookup = Candidate("lookup", {}, 150.0, 150.0, 1.5)
    found = of(lookup, PLAIN, default)
    assert (found.best, found.promising, found.verdict, found.chosen) == (
        default,
        lookup,
        "unconfirmed",
        default,
    )
    slow = of(replace(lookup, measured=95.0, speedup=0.95), PLAIN, default)
    assert (slow.promising, slow.verdict, slow.chosen) == (None, "does not pay", PLAIN)
    fast = of(lookup, PLAIN, replace(default, speedup=1.2, low=1.1))
    assert (fast.promising, fast.verdict, fast.chosen.name) == (lookup, "pays", "adaptive")
    simulated = of(replace(lookup, measured=None, speedup=None), PLAIN)
    assert (simulated.verdict, simulated.chosen.name) == ("unconfirmed", "adaptive"), (
        "only plain decoding ran"
    )


@pytest.mark.parametrize(
    ("speedup", "time_for", "expected"),
    [
        (1.5, 2, {"adaptive": 2, "lookup": 2, "sd": 1}),
        (1.5, 1, {"adaptive": 2, "lookup": 1, "sd": 1}),
        (1.5, 0, {"adaptive": 1, "lookup": 1, "sd": 1}),
        (0.9, 2, {"adaptive": 2, "lookup": 1, "sd": 1}),
    ],
)
def test_the_likely_winner_runs_on_a_second_prompt_where_there_is_time(
    speedup: float, time_for: int, expected: dict[str, int]
) -> None:
    """`time_for` is the number of methods that can still be run."""
    runs = Mock()
    speeds = {"ar": 1.0, "adaptive": 0.8, "lookup": speedup, "sd": 0.7}
    ran = dict.fromkeys(("adaptive", "lookup", "sd"), 1)

    def run(wanted: list[Candidate], prompts: list[ListedPrompt], deadline: Deadline) -> None:
        assert prompts == [TEXTS[1]]
        if len(wanted) <= time_for:
            for each in wanted:
                ran[each.name] += 1

    runs.run.side_effect = run
    runs.measured.side_effect = lambda each: replace(each, speedup=speeds[each.name])
    runs.prompts.side_effect = lambda each: list(range(ran[each.name]))
    candidates = [Candidate(name, {}, 0.0) for name in speeds]
    run_second_prompt(candidates, runs, TEXTS[1], Deadline.after(1.0))
    assert ran == expected


def test_few_tokens_decide_nothing() -> None:
    slow = Candidate("adaptive", {}, 90.0, 90.0, 0.9, 0.8, 0.95, prompts=2, tokens=32)
    assert (of(slow, PLAIN).verdict, of(slow, PLAIN).chosen) == ("unconfirmed", slow)
    fast = replace(slow, speedup=1.5, low=1.4, high=1.6)
    assert of(fast, PLAIN).verdict == "unconfirmed"
    assert of(replace(fast, tokens=64), PLAIN).verdict == "pays"
    assert of(replace(slow, tokens=64), PLAIN).chosen == PLAIN


def test_costs_explain_only_what_they_agree_with() -> None:
    """Times of passes scatter: one over two tokens may seem to take less than one over one, or
    twice as long."""
    shorter = SpeedupModel({1: 1.0, 2: 0.8}, 0.13, 8)
    longer = SpeedupModel({1: 1.0, 2: 2.0}, 0.13, 8)
    assert shorter.break_even_acceptance(1) == pytest.approx(0.13)
    assert longer.break_even_acceptance(1) is None
    fast = Candidate("sd", {}, 185.0, 185.0, 1.85, 1.8, 1.9)
    slow = Candidate("sd", {}, 80.0, 80.0, 0.8, 0.7, 0.9)
    for model, method, is_said in (
        (shorter, fast, True),
        (longer, fast, False),
        (shorter, slow, False),
        (longer, slow, True),
    ):
        out = io.StringIO()
        found = replace(of(method, PLAIN), speedup_model=model, acceptance_probability=0.81)
        show_tuning(theme.ThemedConsole("mono", file=out, width=200, no_color=True), found, None)
        assert ("of a target pass" in out.getvalue()) == is_said


def test_a_row_has_speeds_from_the_same_runs(near: Pair) -> None:
    runs = RealRuns(near, request(1000), Mock(), PlainSpeed(0.0, 0.0))
    sd = Candidate("sd", {"k": 2}, 0.0)
    runs.run([], TEXTS, Deadline.after(1000, count().__next__))
    runs.run([sd], TEXTS[:2], Deadline.after(1000, count().__next__))
    found = runs.measured(sd)
    plain = runs.measured(PLAIN)
    assert (found.prompts, plain.prompts) == (2, 3)
    assert found.tokens is not None
    assert found.measured is not None
    assert found.plain is not None
    assert found.speedup == pytest.approx(found.measured / found.plain)
    assert 0 < (found.draft_length or 0) <= 2
    out = io.StringIO()
    show_tuning(
        theme.ThemedConsole("mono", file=out, width=200, no_color=True), of(found, plain), None
    )
    (row,) = (
        line.split() for line in out.getvalue().splitlines() if line.strip().startswith("sd:k=2 ")
    )
    assert row[1:4] == [f"{found.measured:.1f}", f"{found.plain:.1f}", "2"]


def test_only_named_methods_are_chosen() -> None:
    """The default is measured for comparison, and decides nothing."""
    default = Candidate("adaptive", {}, 185.0, 185.0, 1.85, 1.8, 1.9)
    named = Candidate("sd", {"k": 3}, 150.0, 150.0, 1.5, 1.4, 1.6)
    found = of(default, named, PLAIN)
    assert (found.best, found.chosen) == (default, default)
    for names in (["sd"], ["sd", "svip"]):
        only = replace(found, named=names)
        assert (only.best, only.chosen, only.verdict) == (named, named, "pays")
    for low, speedup in ((0.9, 1.0), (0.8, 0.9), (None, 1.2)):
        slow = replace(
            found, methods=[default, replace(named, speedup=speedup, low=low), PLAIN], named=["sd"]
        )
        assert slow.chosen == PLAIN
    assert replace(found, named=["sd", "adaptive"]).chosen == default
    nothing_ran = of(
        replace(named, measured=None, speedup=None, low=None), replace(PLAIN, measured=None)
    )
    assert replace(nothing_ran, named=["sd"]).chosen.name == "ar"


def test_which_candidate_of_a_method_stays() -> None:
    """The tuned settings, unless the default ones are the fastest that ran."""
    default = Candidate("svip", {}, 90.0, 90.0, 1.2, 1.1, 1.3)
    tuned = Candidate("svip", {"threshold": 0.3}, 130.0)
    other = Candidate("lookup", {}, 99.0, 99.0, 1.1, 1.05, 1.2)
    assert one_of_each([tuned, other, PLAIN, default]) == [PLAIN, other, default]
    assert one_of_each([tuned, replace(other, low=1.15), PLAIN, default]) == [
        tuned,
        PLAIN,
        replace(other, low=1.15),
    ]


def test_how_a_method_is_chosen() -> None:
    steady, moody = (
        Candidate(name, {}, 150.0, 150.0, 1.5, 1.3, 1.7) for name in ("svip", "lookup")
    )
    # fast on some prompts only
    moody = replace(moody, measured=160.0, speedup=1.6, low=0.9, high=2.9)
    assert of(moody, steady, PLAIN).best.name == "svip"
    once = replace(moody, low=None, high=None)
    assert of(once, steady, PLAIN).best.name == "svip", "one run on one prompt shows little"
    assert of(once, replace(steady, speedup=1.5, low=None), PLAIN).best.name == "lookup", (
        "the measured speed decides"
    )
    assert (
        of(replace(moody, measured=None, speedup=None, low=None), steady, PLAIN).best.name == "svip"
    ), "measured ones come first"

    def listed(**speeds: float) -> list[str]:
        return [
            entry.name
            for entry in shortlist([Candidate(name, {}, speed) for name, speed in speeds.items()])
        ]

    assert listed(confidence=240, svip=225, sd=200, heuristic=190, pearl=165) == [
        "confidence",
        "svip",
        "pearl",
    ]
    assert listed(confidence=240, svip=225, sd=200, heuristic=190, pearl=150) == [
        "confidence",
        "svip",
        "sd",
    ]
    assert listed(confidence=240, lookup=170, pearl=150) == ["confidence", "pearl"]
    assert listed() == []


def test_defaults_are_kept_where_other_settings_are_hardly_better() -> None:
    tried = [
        Candidate("svip", {"threshold": threshold, "c": 0.15, "max_draft": longest}, speed)
        for threshold, longest, speed in (
            (0.4, 40, 98.0),
            (0.5, 8, 100.0),
            (0.4, 8, 99.0),
            (0.7, 4, 40.0),
        )
    ]
    assert nearest_to_default(tried) == tried[0]
    assert nearest_to_default(tried[1:]) == tried[2]
    assert nearest_to_default([replace(tried[0], predicted=90.0), tried[1]]) == tried[1]
    # lookup adapts its length, or has a fixed one
    for fixed, chosen in ((99.0, {"ngram": 3}), (120.0, {"k": 6, "ngram": 2})):
        speeds = {
            written("lookup", {"ngram": 3}): 98.0,
            written("lookup", {"k": 6, "ngram": 2}): fixed,
        }
        tried = [
            Candidate("lookup", given, speeds.get(written("lookup", given), 90.0))
            for given in grid("lookup")
        ]
        assert nearest_to_default(tried).settings == chosen


def test_settings_of_lossy_methods_are_chosen_by_speed_and_perplexity() -> None:
    """Plain decoding's perplexity is 2."""

    def best(
        objective: str = "speed", bound: str | None = None, *tried: tuple[float, float | None]
    ) -> int | None:
        found = [
            Candidate("mtad", {"k": k}, speed, perplexity=perplexity)
            for k, (speed, perplexity) in enumerate(tried)
        ]
        chosen = best_lossy(found, 2.0, Objective.parse(objective, bound))
        return None if chosen is None else int(chosen.settings["k"])

    assert best("speed", None, (10.0, 2.5), (5.0, 2.0), (3.0, 1.5), (20.0, None)) == 1
    assert best("speed", None, (10.0, 2.5), (5.0, 2.2)) is None
    tried = (10.0, 2.5), (5.0, 2.09), (3.3, 1.5001), (4.0, 1.5003)
    assert best("perplexity", None, *tried) == 3, "of equal perplexities the fastest"
    bounds = (None, "105%", "2.09", "99%", "3", " 200 % ")
    assert [best("speed", bound, *tried) for bound in bounds] == [3, 1, 1, 3, 0, 0]


def test_each_method_is_tried_before_further_settings_of_lossless_and_then_of_lossy_ones() -> None:
    first, second, third = ({"k": number} for number in (1, 2, 3))
    tried = {
        "mtad": [first, second],
        "sd": [first, second, third],
        "eagle": [first],
        "fly": [first],
    }
    before = [(name, first) for name in tried]
    later = [("sd", second), ("sd", third), ("mtad", second)]
    assert tuner._in_turn(tried) == [before[2], before[1], before[0], before[3], *later]
    cheap = tuner._in_turn({name: [first] for name in ("adaptive", "sd", "suffix", "lookup", "ar")})
    assert [name for name, _ in cheap] == ["ar", "lookup", "suffix", "adaptive", "sd"], (
        "those that run no model come first"
    )


def test_a_lossy_method_is_tuned_on_request_and_never_chosen(near: Pair) -> None:
    """Its output's perplexity is below the bound, and its speed far above plain decoding's."""
    task = request(120, ["mtad"], objective=Objective.parse("speed", "1000000%"))
    found = tune(
        near, replace(task, prompts=TEXTS[:2], sampling=replace(GREEDY, temperature=1.0)), Mock()
    )
    assert "mtad" not in found.left_out
    assert found.best.name == found.chosen.name == "ar"
    lossy, plain = (
        next(each for each in found.methods if each.name == name) for name in ("mtad", "ar")
    )
    assert lossy.perplexity is not None
    assert plain.perplexity is not None
    assert lossy.measured is not None, "it was requested, so it is really run"
    fast = [replace(entry, measured=9.0, speedup=9.0, low=8.0) for entry in (lossy, plain)]
    assert replace(found, methods=fast).chosen.name == "ar"


def test_a_named_lossy_method_is_really_run_however_slow_it_is_expected_to_be() -> None:
    default = Candidate("adaptive", {}, 2000.0, 2000.0, 20.0)
    slow = Candidate("mtad", {"k": 8, "beams": 8}, 10.0)
    assert tuner.worth_running([PLAIN, default, slow], ["mtad"]) == [slow, default]
    assert tuner.worth_running([PLAIN, default, slow], []) == [default]
    assert tuner.worth_running([PLAIN, default, replace(slow, measured=9.0)], ["mtad"]) == [default]


def test_tune_takes_the_objective_and_shows_perplexities(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """--json and the profile have plain decoding's perplexity beside the lossy method's."""
    lossy = Candidate("mtad", {"k": 4, "beams": 2, "tau": 0.1}, 120.0, perplexity=1.07)
    found = replace(outcome(), methods=[lossy, Candidate("ar", {}, 80.0, perplexity=1.12)])
    given = ["tune", "--methods", "mtad", "--objective", "perplexity"]
    perplexities = {"mtad": 1.07, "ar": 1.12}
    tuned = Mock()
    tuned.return_value = found
    monkeypatch.setattr(tuner, "tune", tuned)
    line = json.loads(CliRunner().invoke(app, [*given, "--out", str(tmp_path), "--json"]).stdout)
    assert (line["objective"], line["perplexity"]) == ("perplexity", perplexities)
    assert tuned.call_args.args[1].objective == Objective(lowest_perplexity=True)
    kept = profiles.load(tmp_path)
    assert {name: entry.perplexity for name, entry in kept.methods.items()} == perplexities
    assert kept.measured.prompt_fingerprints == [
        prompt.fingerprint for prompt in load_prompts(None, for_tuning=True, limit=8)
    ]


def test_tune_and_compare_take_different_examples() -> None:
    tuned = load_prompts(None, for_tuning=True)
    compared = load_prompts(None)
    assert not {prompt.fingerprint for prompt in tuned} & {
        prompt.fingerprint for prompt in compared
    }
    assert (
        {prompt.category for prompt in tuned}
        == {prompt.category for prompt in compared}
        == {"code", "math", "news", "chat"}
    )
    assert Counter(
        prompt.category for prompt in load_prompts(None, for_tuning=True, limit=8)
    ) == dict.fromkeys(("code", "math", "news", "chat"), 2)
    first = {
        prompt.text[:32]
        for prompt in tuned
        if prompt.name in ("tune-sum-of-squares", "tune-tickets")
    }
    target = SimpleNamespace(context_limit=1000, tokenizer=SimpleNamespace(encode=list))
    assert first <= {"".join(prompt) for prompt in skip_search.example_prompts(target)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("speeds", "missing", "said"),
    [
        (
            [],
            61.0,
            "Not enough time to tell what is fastest here: generate uses adaptive, the default",
        ),
        (
            [(0.93, None, None)],
            0.0,
            (
                "Not confirmed: 0.93× with adaptive, on too few prompts. Until then generate "
                "uses adaptive"
            ),
        ),
        (
            [(1.1, 0.9, 1.3)],
            0.0,
            "No clear gain here: 1.10× at best (95%: 0.90–1.30). So generate uses adaptive",
        ),
        ([(0.9, 0.8, 0.95)], 0.0, "0.90× at best. So generate decodes plainly for this pair."),
        ([(1.2, 1.1, 1.3), (None, None, None)], 0.0, "sd: 1.90× expected"),
        (
            [(0.9, 0.8, 0.95), (None, None, None)],
            0.0,
            "Not confirmed by enough real runs: sd, 1.90× expected. Until then",
        ),
        (
            [(0.9, 0.8, 0.95), (1.5, None, None)],
            0.0,
            "Not confirmed by enough real runs: sd, 1.50× on one prompt. Until then",
        ),
    ],
)
def test_the_report_says_what_it_knows(speeds: list[Any], missing: float, said: str) -> None:
    names = ("adaptive", "sd")
    others = [
        Candidate(name, {}, 190.0, None if speed[0] is None else 93.0, *speed)
        for name, speed in zip(names, speeds, strict=False)
    ]
    plain = PLAIN if speeds else replace(PLAIN, measured=None, speedup=None)
    found = TuningOutcome([plain, *others], GREEDY, 3, {}, real_runs=7, missing_seconds=missing)
    out = io.StringIO()
    show_tuning(
        theme.ThemedConsole("mono", file=out, width=200, no_color=True), found, None, budget=60.0
    )
    text = " ".join(out.getvalue().split())
    assert said in text
    assert ("--budget 130, for what was left out" in text) == bool(missing)
    assert ("7 runs of up to 24 tokens" in text) == bool(speeds)
