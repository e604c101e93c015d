"""Runs with the length policy `adaptive` on scripted models: what it learns from them, and rounds in which it drafts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch
from scripted_models import TableRunner, ids_of, scripted_run
from tuning_helpers import GREEDY as GREEDY_SAMPLING
from tuning_helpers import PROMPTS, PairOf

from specgen.base.types import Context, Round, SamplingParams, TokenStatus
from specgen.decoding.costs.drafting_costs import DraftingCosts
from specgen.decoding.costs.pearl_window import Window
from specgen.decoding.costs.round_costs import CostTable, Curve, RoundCosts
from specgen.decoding.drafting import ModelDrafter, Setup
from specgen.decoding.logits_ops import greedy_statistics
from specgen.methods import METHODS, available_policies
from specgen.methods.acceptance_calibration import AcceptanceCalibration, features
from specgen.methods.adaptive import AUTO, Adaptive, AdaptiveInputs
from specgen.methods.learned_drafting import Learned
from specgen.methods.pearl_schedule import Parallel
from specgen.pair.figures import Figures
from specgen.pair.pair import runners
from specgen.tune.round_timing import record_reference
from specgen.tune.simulator import PricedParallelDrafter, PricedTarget, ReferenceVerifier, SimulatedClock
from specgen.workers.worker import DraftWorker

TOKEN = Learned.prior(DraftingCosts.linear(0.0, 0.0), 0.0).token.prior


@contextmanager
def noted_labels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, bool]]]:
    """The scores and outcomes of the judged tokens from which a greedy run's policy learns, in order."""
    labels: list[tuple[float, bool]] = []
    learn = AcceptanceCalibration.learn

    def noted(self: AcceptanceCalibration, score: float, accepted: bool) -> None:
        if self.prior == TOKEN:
            labels.append((round(score, 9), accepted))
        learn(self, score, accepted)

    with monkeypatch.context() as patch:
        patch.setattr(AcceptanceCalibration, "learn", noted)
        yield labels


@pytest.mark.parametrize(
    ("method", "options", "window"),
    [
        ("adaptive", {"lookup": False}, None),
        ("sd", {"policy": "adaptive", "width": 2}, None),
        ("pearl", {"window": 3}, None),
        ("pearl", {"window": 3, "pre_verify": False}, None),
        ("pearl", {"window": 3, "post_verify": False}, None),
        ("pearl", {"window": 6}, Window(4, 4, lead=2, is_flexible=True)),
    ],
)
def test_each_judged_token_of_a_run_is_learned_once(
    method: str, options: dict[str, object], window: Window | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own score and outcome, in order, also where drafts are cut when the target's pass ends."""
    given_ = {**options, "verify_cost": 0.02, **({"policy": "adaptive"} if method == "pearl" else {"draft_cost": 0.05})}
    for seed in range(6):
        target, draft = TableRunner(seed), TableRunner(seed + 1)
        draft.table = torch.where(
            torch.rand(6, 6, 1, generator=torch.Generator().manual_seed(seed)) < 0.7, target.table, draft.table
        )
        with closing(DraftWorker.in_this_process(draft)) as worker, noted_labels(monkeypatch) as learned:  # type: ignore[arg-type]
            run = scripted_run(method, given_, target, draft, SamplingParams(max_new_tokens=40), worker=worker)
            if window is not None:
                assert isinstance(run.schedule, Parallel)
                run.schedule = replace(run.schedule, window=window)
            rounds = list(run.rounds())
        assert [score for score, _ in learned] == pytest.approx([score for score, _ in judged(rounds)], abs=1e-3)
        assert [accepted for _, accepted in learned] == [accepted for _, accepted in judged(rounds)]
        if window is None:  # how long a flexible window's drafts are depends on the machine
            assert len(learned) > 20
            assert len({len(round_.draft.tokens) for round_ in rounds}) > 2


def judged(rounds: Sequence[Round]) -> list[tuple[float, bool]]:
    """The score of the likeliest token of each level up to the first rejected one, and whether a token of it was accepted."""
    found = []
    for round_ in rounds:
        draft, path = round_.draft, round_.verdict.path
        depths = [0]
        for parent in draft.parents:
            depths.append(depths[parent + 1] + 1)
        statuses = round_.statuses
        for level in range(1, draft.levels + 1):
            nodes = [node for node in range(len(draft.tokens)) if depths[node + 1] == level]
            accepted = any(node in path for node in nodes)
            if not accepted and (len(path) < level - 1 or round_.verdict.source != "correction"):
                continue
            entropy, top_prob = draft.entropies[nodes[0]], draft.top_probs[nodes[0]]
            assert accepted or TokenStatus.REJECTED in statuses
            found.append((round(TOKEN.score(features(entropy, top_prob, top_prob)), 9), accepted))
    return found


CHOOSING = [row.name for row in METHODS.values() if row.any_policy and "adaptive" in available_policies(row)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [name for name in CHOOSING if name != "pearl"])  # beside the target's pass a token is free
def test_any_method_can_draft_nothing(name: str, temperature: float) -> None:
    """Such rounds have a reason, and they are no drafts of length 0."""
    target, draft = TableRunner(0), TableRunner(1)
    sampling = SamplingParams(max_new_tokens=24, temperature=temperature)
    given = {"policy": "adaptive", "draft_cost": 4.0, "verify_cost": 4.0, "exploration": 0.1}
    rounds = list(scripted_run(name, given, target, draft, sampling).rounds())
    assert len(ids_of(rounds)) == 24
    if temperature == 0 and METHODS[name].lossless:
        assert ids_of(rounds) == ids_of(scripted_run("ar", {}, target, None, sampling).rounds())
    declined = [round_ for round_ in rounds if (round_.draft.stop_reason or "").startswith("no draft: ")]
    assert len(declined) > 3
    assert all(len(round_.token_ids) == 1 and round_.verdict.source is None for round_ in declined)
    summary, drafted = Figures(name, rounds), [len(round_.draft.tokens) for round_ in rounds if round_.draft.tokens]
    assert summary.mean_draft_length == (sum(drafted) / len(drafted) if drafted else None)


def test_simulated_pearl_judges_each_token_once(pair_of: PairOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own signals, though the policy has seen the tokens that are cut off where the target's pass ends."""
    pair = pair_of("llama", "near")
    reference = record_reference(pair, PROMPTS[0], GREEDY_SAMPLING)
    flat = CostTable({10: Curve({0: 3.0, 8: 3.2})})  # passes that take as long as three drafted tokens
    costs = RoundCosts(CostTable({10: Curve({0: 0.0, 8: 8.0})}), flat)
    clock = SimulatedClock()
    linear = DraftingCosts.linear(0.0, 1e-4)
    policy = Adaptive(AUTO, AUTO, 3, 40, AdaptiveInputs(linear, Learned.prior(linear, 0.0), in_parallel=True))
    simulated = PricedTarget(reference, costs, clock)
    draft = runners(pair)[1]
    assert draft is not None
    setup = Setup(draft, GREEDY_SAMPLING, reference.eos_ids, draft.vocab_size)
    drafter = PricedParallelDrafter(ModelDrafter(setup), policy, simulated, costs, clock)
    schedule = Parallel(drafter, Window(6, 6, lead=1, is_flexible=True))
    made = pair.run(pair.request(PROMPTS[0], "ar", GREEDY_SAMPLING))
    made = replace(made, target=simulated, policy=policy, verifier=ReferenceVerifier(), schedule=schedule, clock=clock)
    with noted_labels(monkeypatch) as learned:
        rounds = list(made.rounds())
    assert ids_of(rounds) == reference.token_ids
    assert any("pass ended" in (round_.draft.stop_reason or "") for round_ in rounds)
    wanted, generated = [], 0
    for round_ in rounds:
        accepted = len(round_.verdict.path)
        for position in range(accepted + (round_.verdict.source == "correction")):
            context = Context(reference.prompt_ids)
            context.extend(reference.token_ids[: generated + position])
            logits = draft.logits(context).logits[0]
            _, entropy, top = greedy_statistics(logits)
            wanted.append((TOKEN.score(features(entropy, top, top)), position < accepted))
        generated += len(round_.token_ids)
    assert [kept for _, kept in learned] == [kept for _, kept in wanted]
    assert [score for score, _ in learned] == pytest.approx([score for score, _ in wanted], abs=1e-3)
    assert len(wanted) > 10
