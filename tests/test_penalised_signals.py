"""With penalties, tokens are chosen from penalised logits, and signals describe the draft model's own distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing

import pytest
import torch
from scripted_models import TableRunner, ids_of, scripted_run

from specgen.base.types import Context, SamplingParams
from specgen.decoding.drafting import Drafter, HostChain, ModelDrafter, Setup
from specgen.decoding.policy import DraftedToken, Fixed
from specgen.decoding.tree import TopKTreeDrafter
from specgen.engine.forward_pass import ModelOutput
from specgen.workers.worker import DraftWorker

OWN, PENALISED = 2.0, 3.0  # the largest logit of either distribution; the other nine are 0


def largest(logit: float) -> float:
    return math.exp(logit) / (math.exp(logit) + 9)


class PenalisedRunner:
    """After token n the model's own likeliest token is n + 1; with penalties it is n + 2."""

    device, vocab_size, num_embeddings, context_limit = torch.device("cpu"), 10, 10, 100

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        last = [context.ids[-1], *draft][start:]
        penalised, own = (torch.zeros(len(last), 10) for _ in range(2))
        for row, token in enumerate(last):
            own[row, (token + 1) % 10], penalised[row, (token + 2) % 10] = OWN, PENALISED
        return ModelOutput(penalised, None, own)


class Seeing(Fixed):
    """Keeps each token that it sees."""

    signals = frozenset({"entropy", "prob", "top_prob", "margin"})

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.seen: list[DraftedToken] = []

    def keep_drafting(self, token: DraftedToken) -> bool:
        self.seen.append(token)
        return super().keep_drafting(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["on a CPU", "on a device", "tree"])
def test_signals_describe_the_models_own_distribution(monkeypatch: pytest.MonkeyPatch, kind: str, temperature: float) -> None:
    if kind == "on a device":
        monkeypatch.setattr(HostChain, "_choose_on_cpu", HostChain._choose)
    setup = Setup(PenalisedRunner(), SamplingParams(temperature=temperature), frozenset(), 10, seed=4, record=True)
    drafter: Drafter = TopKTreeDrafter(setup, width=1) if kind == "tree" else ModelDrafter(setup)
    policy = Seeing(6)
    draft = drafter.propose(Context([1]), policy, 9)
    likeliest = [(before + 2) % 10 for before in (1, *draft.tokens)]
    assert (list(draft.tokens) == likeliest[:6]) == (temperature == 0 or kind == "tree")
    top, other = largest(OWN), (1 - largest(OWN)) / 9
    entropy = -top * math.log(top) - 9 * other * math.log(other)
    assert draft.entropies == pytest.approx([entropy] * 6, rel=1e-5)
    assert draft.top_probs == pytest.approx([top] * 6, rel=1e-5)
    assert draft.logits.max(dim=-1).indices.tolist() == [(before + 1) % 10 for before in (1, *draft.tokens)][:6]
    for token, drafted_id, best in zip(policy.seen, draft.tokens, likeliest, strict=False):
        assert (token["entropy"], token["top_prob"], token["margin"]) == pytest.approx((entropy, top, top - other), rel=1e-5)
        chosen = largest(PENALISED) if drafted_id == best else (1 - largest(PENALISED)) / 9
        assert token["prob"] == pytest.approx(chosen, rel=1e-5), "of the distribution that the token was chosen from"


class ForbiddingRunner(TableRunner):
    """A draft model whose penalties forbid every token after token 2, as they can if its vocabulary lacks the target's others."""

    def logits(
        self, context: Context, draft: Sequence[int] = (), parents: Sequence[int] | None = None, *, start: int = 0
    ) -> ModelOutput:
        own = super().logits(context, draft, parents, start=start).logits
        last = torch.tensor([context.ids[-1], *draft][start:])
        return ModelOutput(own.masked_fill((last == 2)[:, None], -math.inf), own, own)


DRAFTERS: list[tuple[str, dict[str, object]]] = [
    ("sd", {"k": 4}),
    ("sd", {"policy": "confidence"}),
    ("sd", {"k": 4, "cape": True}),
    ("sd", {"k": 4, "width": 3}),
    ("sd", {"policy": "svip", "width": 2, "nodes": 5}),
    ("sd", {"policy": "adaptive", "width": 2, "draft_cost": 0, "verify_cost": 0}),
    ("adaptive", {"draft_cost": 0, "verify_cost": 0}),
    ("mtad", {"beams": 3}),
    ("bild", {"fallback": 0}),
    ("spectr", {"drafts": 2}),
    ("specinfer", {"drafts": 3, "policy": "confidence"}),
    ("ouroboros", {}),
    ("pearl", {"window": 3}),
    ("eesd-tree", {"width": 2, "theta0": 1.0}),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("method", "settings"), DRAFTERS, ids=str)
def test_a_draft_ends_where_penalties_forbid_all_its_tokens(method: str, settings: dict[str, object], temperature: float) -> None:
    reasons: set[str | None] = set()
    for seed in range(6):
        draft, sampling = ForbiddingRunner(seed), SamplingParams(max_new_tokens=20, temperature=temperature)
        with closing(DraftWorker.in_this_process(draft)) as worker:  # type: ignore[arg-type]
            run = scripted_run(method, settings, TableRunner(seed), draft, sampling, worker=worker)
            rounds = list(run.rounds())
        assert len(ids_of(rounds)) == 20
        reasons |= {round_.draft.stop_reason for round_ in rounds}
    assert any("no candidates" in str(reason) for reason in reasons)
