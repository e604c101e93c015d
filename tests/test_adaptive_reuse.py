"""What runs with the length policy `adaptive` share, and what they must not: learned numbers and measured costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_models import TableRunner, scripted_run

from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.decoding.policy import DraftedToken, LengthPolicy
from specgen.methods.adaptive import AUTO, Adaptive, AdaptiveInputs
from specgen.methods.drafting_guard import LONGEST_PAUSE
from specgen.methods.learned_drafting import Learned
from specgen.pair import drafting_knowledge, measurements
from specgen.pair.pair import Pair
from specgen.tune.simulator import PricedDrafter, SimulatedClock

PROMPT = [5, 9, 7, 3]
COSTS: dict[str, object] = {"draft_cost": 0.1, "verify_cost": 0.02}


def run_of(pair: Pair) -> Any:
    return lambda *given, **settings: pair.run(pair.request(*given, **settings))


def one_length(**points: float) -> CostTable:
    return CostTable({100: Curve({int(name[1:]): seconds for name, seconds in points.items()})})


def test_only_equal_settings_and_sampling_share_what_is_learned(near: Pair) -> None:
    def learned(method: str = "adaptive", sampling: SamplingParams | None = None, **given: object) -> object:
        policy: Any = near.run(near.request(PROMPT, method, sampling, **COSTS | given)).policy
        return policy.learned

    hot = SamplingParams(temperature=1.0)
    assert learned() is learned()
    assert learned() is learned(sampling=SamplingParams(max_new_tokens=9, top_k=5)), "greedily top-k changes nothing"
    assert learned(sampling=hot) is learned(sampling=replace(hot, stop=("x",)))
    others = [
        learned(),
        learned(sampling=hot),
        learned(sampling=replace(hot, top_k=2)),
        learned(sampling=replace(hot, top_p=0.5)),
        learned(exploration=0.1),  # its pauses are not those of other runs
        learned(max_draft=3),
        learned(lookup=False),
        learned("spectr", hot, policy="adaptive"),
        learned("specinfer", hot, policy="adaptive"),  # another rule of acceptance
    ]
    assert len({id(each) for each in others}) == len(others)
    assert learned(sampling=replace(hot, seed=1)) is not learned(sampling=replace(hot, seed=1))


def test_the_prefill_of_the_draft_model_is_not_timed() -> None:
    """It is part of the first draft, which has to be one of the rounds that warm up."""
    lengths: list[int] = []

    class Drafting(TableRunner):
        def logits(self, context: Context, draft: Any = (), parents: Any = None, *, start: int = 0) -> Any:
            lengths.append(len(context))
            return super().logits(context, draft, parents, start=start)

    sampling = SamplingParams(max_new_tokens=80)
    run = scripted_run("adaptive", {"lookup": False, **COSTS}, TableRunner(0), Drafting(0), sampling)
    generated = len(run.context)
    drafting_knowledge.time_rounds(run)
    assert lengths[0] == generated + 1, "the first draft comes in the first round after the target's prefill"


def test_costs_of_a_noisy_machine_are_not_negative() -> None:
    falling = one_length(_1=0.010, _2=0.013, _5=0.012, _9=0.0105)
    costs = DraftingCosts.of_rounds(RoundCosts(one_length(_0=0, _4=0.004, _8=0.008), falling), 100)
    assert all(costs.next_cost(tokens) >= 0.1 - 1e-9 for tokens in range(40))


def test_copied_tokens_are_no_drafts_of_the_model() -> None:
    """Else the check of measured costs finds that drafts take no time, and drops costs that fit."""
    added: list[int] = []
    noted: Any = SimpleNamespace(add=lambda drafted, *_: added.append(drafted), conclude=lambda: None)
    run = scripted_run("adaptive", COSTS, TableRunner(0), TableRunner(7), SamplingParams(max_new_tokens=80))
    run = replace(run, check=noted)
    rounds = list(run.rounds())[1:]
    copied = ["lookup" in (round_.draft.stop_reason or "") for round_ in rounds]
    assert any(copied)
    assert any(added)
    assert not any(drafted for drafted, is_copied in zip(added, copied, strict=True) if is_copied)
    first = next(number for number, round_ in enumerate(rounds) if round_.draft.tokens and not copied[number])
    assert added[first] == 0, "the model's first draft includes its prefill"


def test_a_draft_model_that_could_not_be_timed_is_not_taken_to_be_free(near: Pair, tmp_path: Path) -> None:
    """For instance because the timed context has a token that its vocabulary lacks. A later process tries again."""
    run = near.run(near.request(PROMPT, "adaptive", SamplingParams(max_new_tokens=60), lookup=False, **COSTS))
    never: Any = SimpleNamespace(propose=lambda *_: Draft())
    request: Any = near.request(PROMPT, "adaptive")
    near._knowledge.measure(request, lambda *_, **__: replace(run, drafter=never), 200)
    assert near._knowledge.inputs(request, None).costs.draft == pytest.approx(1.0)
    assert not measurements._stored()


def test_bild_is_timed_with_drafts_of_all_lengths(near: Pair) -> None:
    """It ends drafts by itself, before the lengths that are to be timed."""
    request: Any = near.request(PROMPT, "bild", policy="adaptive")
    costs = drafting_knowledge.time_rounds(near._knowledge._timed_run(request, run_of(near), 200))
    assert set(next(iter(costs.draft_cost.curves.values())).points) == {0, 1, 4, 8}


def test_a_simulated_draft_model_that_never_drafts_runs_over_no_prompt() -> None:
    clock = SimulatedClock()
    runner: Any = SimpleNamespace(calls=0)
    costs = RoundCosts(one_length(_0=0, _4=0.004), one_length(_1=0.01, _5=0.012))
    drafter: Any = SimpleNamespace(propose=lambda *_: Draft(stop_reason="no draft"))
    made = PricedDrafter(drafter, runner, costs, clock, 5.0)
    assert made.propose(Context(PROMPT), LengthPolicy(), 9).stop_reason == "no draft"
    assert sum(clock.seconds().values()) == 0


@pytest.mark.parametrize("verify", [0.02, 0.2])
def test_drafting_returns_after_a_long_text_without_accepted_tokens(verify: float) -> None:
    """Though the draft model then has to read many tokens: this alone must not be the reason for the next pause."""
    costs = DraftingCosts.linear(0.4, verify)
    policy = Adaptive(AUTO, AUTO, 6.0, 40, AdaptiveInputs(costs, Learned.prior(costs, 0.0)))
    sure, unsure = {"entropy": 0.02, "top_prob": 0.99, "prob": 0.99}, {"entropy": 1.0, "top_prob": 0.5, "prob": 0.5}

    def drafts(signals: dict[str, float], rounds: int, *, accepted: bool) -> int:
        count = 0
        for _ in range(rounds):
            length = int(policy.starts_draft())
            while length and policy.keep_drafting(DraftedToken(length, signals)):
                length += 1
            policy.observe(length, length if accepted else 0)
            count += length > 0
        return count

    assert drafts(unsure, 12_000, accepted=False) < 150
    assert drafts(sure, LONGEST_PAUSE + 200, accepted=True) > 150
