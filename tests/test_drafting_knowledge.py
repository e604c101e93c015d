"""What the length policy `adaptive` knows about a pair: from a profile, or measured, checked and stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console
from scripted_models import TableRunner, scripted_run
from tuning_helpers import outcome

from specgen.base.errors import SpecgenError
from specgen.base.types import SamplingParams
from specgen.cli import profile_lookup
from specgen.decoding.costs.cost_check import FEWEST_ROUNDS, CostCheck
from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.methods.first_acceptance import FirstAcceptance
from specgen.methods.learned_drafting import Learned
from specgen.pair import drafting_knowledge, measurements
from specgen.pair.pair import Pair
from specgen.tune import profile as profiles

SAMPLING = SamplingParams(max_new_tokens=60, ignore_eos=True)
PROMPT = [5, 9, 7, 3]


def costs(factor: float = 1.0) -> RoundCosts:
    drafting, verification = {0: 0.0, 1: 0.002, 8: 0.016}, {1: 0.01, 2: 0.012, 9: 0.02}
    return RoundCosts(CostTable({128: Curve(drafting)}), CostTable({128: Curve(verification)})).times(factor)


def test_what_was_learned_is_saved_and_read_again() -> None:
    learned = Learned.prior(DraftingCosts.linear(0.2, 0.02), 1.0)
    for number in range(50):
        learned.token.learn(number / 10, number % 3 > 0)
        learned.following.learn(number / 20, number % 4 > 0)
        learned.lookup.learn(1 + number % 9, number % 2, ended=number % 5 > 0)
        learned.first.add(number % 2 > 0)
        learned.add_draft(number % 3, 0.4, 0.1)
        learned.add_round(1.4, 1 + number % 3)
    saved = learned.as_dict()
    for same in (Learned.of_dict(saved, 1.0), learned.copy()):
        assert same == learned
        same.add_draft(0, 1.0, 0.1)
        same.add_draft(2, 1.0, 0.1)
        same.first.add(accepted=False)
        for calibration in (same.token, same.following, same.lookup.acceptance):
            calibration.learn(1.3, accepted=False)
        same.guard.count(9.0, 1, 1.0)
        assert learned.as_dict() == saved
        assert learned.guard.loss == 0
        for name, numbers in same.as_dict().items():
            assert numbers != saved[name] or name == "worth", f"{name} is shared"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"first": None}, "first is missing"),
        ({"surprise": [1.0]}, "surprise is unknown"),
        ({"first": [1.0]}, "first has 1 numbers instead of 8"),
        ({"token_offsets": [1.0] * 40}, "token_offsets has 40 numbers instead of 13"),
        ({"worth": [float("inf"), 1.0]}, "worth has an infinite number"),
        ({"worth": [0.0, 1.0]}, "worth, later, waste or gains counts no tokens or drafts"),
        ({"later": [1.0, 0.0]}, "worth, later, waste or gains counts no tokens or drafts"),
        ({"waste": [1.0, -1.0]}, "worth, later, waste or gains counts no tokens or drafts"),
        ({"gains": [1.0, -1.0]}, "worth, later, waste or gains counts no tokens or drafts"),
        ({"first": [0.5] * 7 + [0.02]}, "weights are negative or their sum is not 1"),
        ({"first": [-0.5, 1.5] + [0.0] * 5 + [0.02]}, "weights are negative or their sum is not 1"),
        ({"first": [1.0] + [0.0] * 7}, "the probability of a change is not between 0 and 1"),
        ({"following_informations": [1.0] * 4 + [-1.0]}, r"a sum of p \(1 - p\) is negative"),
        ({"lookup_sums": [0.0, 1.0, 0.0, -1.0]}, r"a sum of p \(1 - p\) is negative"),
        ({"token_offsets": [2000.0] * 13}, "an offset is larger than 1000"),
    ],
)
def test_saved_numbers_that_cannot_be_are_refused(changes: dict[str, Any], named: str) -> None:
    saved: dict[str, Any] = Learned.prior(DraftingCosts.linear(0.2, 0.02), 0.0).as_dict() | changes
    with pytest.raises(ValueError, match=named):
        Learned.of_dict({name: numbers for name, numbers in saved.items() if numbers is not None}, 0.0)


@pytest.mark.parametrize(
    ("position", "value", "said"),
    [
        (("learned", "model", "first"), [0.0] * 8, "measured.learned.model: weights are negative or their sum is not 1"),
        (("learned", "model", "worth"), [1.0, "x"], "measured.learned.model.worth.1: "),
        (("costs", "echo", "judging"), {}, "measured.costs.echo: costs of a round are missing"),
        (("costs", "echo", "judging", 8), {1: 0.0}, "measured.costs.echo: costs of a round are not positive"),
    ],
)
def test_measured_numbers_that_cannot_be_are_refused(
    near: Pair, tmp_path: Path, position: tuple[str | int, ...], value: Any, said: str
) -> None:
    path = profiles.save(profiles.from_outcome(outcome(), profiles.profile_key_of(near)), tmp_path)
    document = yaml.safe_load(path.read_text())
    changed = document["measured"]
    for key in position[:-1]:
        changed = changed[key]
    changed[position[-1]] = value
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(SpecgenError, match=said):
        profiles.load(tmp_path)


def test_a_profile_replaces_the_measurement(near: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drafting_knowledge, "time_rounds", lambda *_, **__: pytest.fail("measured"))
    learned = Learned.prior(DraftingCosts.linear(0.2, 0.02), 0.0)
    learned.first = FirstAcceptance([1.0, *[0.0] * 6])
    made = replace(outcome(), costs={"model": costs().as_dict()}, learned={"model": learned.as_dict()})
    profiles.save(profiles.from_outcome(made, profiles.profile_key_of(near)), tmp_path)
    found = profile_lookup.find(near, SAMPLING, tmp_path, Console(), quiet=True)
    assert found is not None
    assert near.measurements.tuned_costs == {"model": costs()}
    assert near.measurements.tuned_learned["model"].first.weights == learned.first.weights
    assert near.measurements.tuned_learned["model"].worth == pytest.approx(learned.worth, rel=1e-4)
    first = next(round_ for round_ in near.generate(PROMPT, "adaptive", SAMPLING).rounds if round_.mode == "sequential")
    assert (first.draft.stop_reason or "").startswith("no draft: gain 0.0"), "first tokens were hardly ever accepted"
    older = found.model_copy(update={"measured": found.measured.model_copy(update={"learned": {}})})
    older.inform(near.measurements)
    assert near.measurements.tuned_learned == {}


@pytest.mark.parametrize(("factor", "stays"), [(1e6, False), (1e-6, False), (None, True)])
def test_costs_that_do_not_fit_the_clock_are_measured_again_by_later_processes(
    near: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, factor: float | None, stays: bool
) -> None:
    if factor is None:
        monkeypatch.setattr(CostCheck, "add", lambda *_: None)  # nothing is known about the rounds
    monkeypatch.setattr(drafting_knowledge, "time_rounds", lambda *_, **__: costs(factor or 1.0))
    first = near.generate(PROMPT, "adaptive", SAMPLING)
    monkeypatch.setattr(drafting_knowledge, "time_rounds", lambda *_, **__: pytest.fail("measured again"))
    rounds = len(first.rounds) - 1
    for _ in range(3):
        rounds += len(near.generate(PROMPT, "adaptive", SAMPLING).rounds) - 1
    assert rounds > FEWEST_ROUNDS
    assert len(measurements._stored()["rounds"]) == stays


def test_each_round_is_checked_but_not_the_first_draft() -> None:
    """The draft model runs over the prompt in the first one."""
    added: list[tuple[int, float, int, float]] = []
    concluded: list[int] = []
    noted: Any = SimpleNamespace(add=lambda *given: added.append(given), conclude=lambda: concluded.append(len(added)))
    run = scripted_run("sd", {"k": 3}, TableRunner(0), TableRunner(0), SamplingParams(max_new_tokens=20))
    run = replace(run, check=noted)
    rounds = list(run.rounds())[1:]
    assert [drafted for drafted, *_ in added] == [0, *(len(round_.draft.tokens) for round_ in rounds[1:])]
    assert [width for _, _, width, _ in added] == [len(round_.draft.tokens) + 1 for round_ in rounds]
    for (_, drafting, _, verification), round_ in zip(added, rounds, strict=True):
        assert drafting + verification == pytest.approx(sum(round_.seconds.values()))
    assert concluded == [len(rounds)]


def test_the_default_of_a_pair_needs_prepare_first(near: Pair) -> None:
    with pytest.raises(SpecgenError, match="adaptive is not prepared for this run"):
        near.run(near.request(PROMPT))
    assert near.run(near.request(PROMPT, draft_cost=0.2, verify_cost=0.02)).settings.policy == "adaptive"
