"""CaPE: the candidates that it adds to a chain, what the length policy sees, and that each part of its verification is needed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from enumeration import PROMPT, ROUNDING, Paths, SmallRunner, exact, total_variation
from scripted_models import VOCAB, TableRunner, ids_of, scripted_run

from specgen import methods
from specgen.base.errors import SpecgenError
from specgen.base.types import Context, SamplingParams, Verdict
from specgen.decoding.drafting import ModelDrafter, Setup
from specgen.decoding.policy import DraftedToken, Fixed
from specgen.decoding.verification import RejectionSampling
from specgen.methods import cape
from specgen.methods.cape import CapeDrafter, further_candidates
from specgen.methods.sd import Heuristic

GREEDY, SAMPLED = SamplingParams(max_new_tokens=40), SamplingParams(max_new_tokens=40, temperature=0.9, top_k=4)


class Wide(TableRunner):
    """A table for 40 tokens with rows from flat to peaked."""

    vocab_size = num_embeddings = 40

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        scales = torch.tensor([0.5, 2.0, 4.0, 12.0])[torch.randint(4, (40, 40, 1), generator=generator)]
        self.table = torch.randn(40, 40, 40, generator=generator) * scales


class Seeing(Fixed):
    """Records the drafted tokens."""

    signals = frozenset({"top_prob"})

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.seen: list[DraftedToken] = []

    def keep_drafting(self, token: DraftedToken) -> bool:
        self.seen.append(token)
        return super().keep_drafting(token)


def test_the_number_of_candidates_is_the_papers() -> None:
    found = [further_candidates(top) for top in (0.01, 0.3, 0.31, 0.6, 0.61, 0.8, 0.81, 1.0, 1.0000001)]
    assert found == [7, 7, 5, 5, 3, 3, 1, 1, 1]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("keep_logits", [False, True])
def test_each_position_has_the_likeliest_other_tokens(sampling: SamplingParams, keep_logits: bool) -> None:
    """And the chain, its distributions and signals are those without candidates."""
    numbers = set()
    for seed in range(6):
        runner = Wide(seed)
        setup = Setup(runner, sampling, frozenset({3}), 40, seed, record=keep_logits)  # type: ignore[arg-type]
        chain = ModelDrafter(setup).propose(Context(PROMPT), Fixed(5), 30)
        policy, length = Seeing(5), len(chain.tokens)
        draft = CapeDrafter(setup).propose(Context(PROMPT), policy, 30)
        assert draft.tokens[:length] == chain.tokens
        assert (list(draft.parents[:length]), draft.levels) == (list(chain.parents), length)
        assert (draft.probs is None) == sampling.greedy
        assert sampling.greedy or torch.equal(draft.probs, chain.probs)
        for position, seen in enumerate(policy.seen):
            row = runner.row([*PROMPT, *chain.tokens[:position]])
            others = [token for token in row.argsort(descending=True).tolist() if token != chain.tokens[position]]
            wanted = others[: further_candidates(float(row.softmax(-1).max()))]
            nodes = [node for node in range(length, len(draft.tokens)) if draft.parents[node] == position - 1]
            assert [draft.tokens[node] for node in nodes] == wanted
            assert seen.nodes == 1 + len(wanted)
            assert {draft.top_probs[node] for node in nodes} == {chain.top_probs[position]}
            assert not keep_logits or all(torch.equal(draft.logits[node], row) for node in nodes)
            numbers.add(len(wanted))
    assert numbers == {1, 3, 5, 7}


def test_an_impossible_token_is_no_candidate() -> None:
    runner = TableRunner(3)
    runner.table[..., 2:5] = -math.inf
    draft = CapeDrafter(Setup(runner, vocab_size=VOCAB)).propose(Context(PROMPT), Fixed(3), 9)  # type: ignore[arg-type]
    assert set(draft.tokens) <= {0, 1, 5}
    assert len(draft.tokens) > 3


class Observing(Heuristic):
    """Records what was observed."""

    def __init__(self) -> None:
        super().__init__(4, 10)
        self.observed: list[tuple[int, int]] = []
        self.predictions = [0.5] * 4

    def observe(self, drafted: int, accepted: int) -> None:
        self.observed.append((drafted, accepted))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_policy_learns_of_levels(sampling: SamplingParams) -> None:
    plain = ids_of(scripted_run("ar", {}, Wide(1), None, sampling).rounds())
    run = scripted_run("sd", {"cape": True}, Wide(1), Wide(2), sampling)
    policy = Observing()
    rounds = list(replace(run, policy=policy).rounds())
    assert not sampling.greedy or ids_of(rounds) == plain
    assert policy.observed == [(round_.draft.levels, len(round_.verdict.path)) for round_ in rounds[1:]]
    assert {drafted for drafted, _ in policy.observed[:-4]} == {4}
    assert all(len(round_.draft.predicted) == round_.draft.levels for round_ in rounds)
    siblings = [round_ for round_ in rounds if round_.verdict.path and round_.verdict.path[-1] >= round_.draft.levels]
    assert siblings, "no further candidate was accepted"
    assert all(round_.verdict.source == "bonus" for round_ in siblings[:-1])


def one_round(
    monkeypatch: pytest.MonkeyPatch, further: int, change: Any = lambda draft: draft, sizes: tuple[int, int] = (4, 4)
) -> float:
    """Total variation between the target and a round with a chain of two tokens and `further` candidates at each."""
    target, model = SmallRunner(2, sizes[0]), SmallRunner(11, sizes[1])
    sampling = SamplingParams(temperature=1.0)
    drafter = CapeDrafter(Setup(model, sampling, frozenset(), sizes[0]))  # type: ignore[arg-type]
    verifier = RejectionSampling(sampling, torch.device("cpu"), 0)
    monkeypatch.setattr(cape, "further_candidates", lambda _: further)

    def round_() -> tuple[int, ...]:
        draft = change(drafter.propose(Context(PROMPT), Fixed(2), 2))
        verdict: Verdict = verifier.verify(draft, target.logits(Context(PROMPT), draft.tokens, draft.parents))
        assert verdict.token is not None
        return (*(draft.tokens[node] for node in verdict.path), verdict.token)

    with monkeypatch.context() as patch:
        begun = Paths(patch).all(round_)
    return total_variation(exact(target, sampling, 3, start=begun), exact(target, sampling, 3))


@pytest.mark.parametrize(("further", "sizes"), [(1, (4, 4)), (2, (4, 4)), (2, (4, 3)), (7, (3, 4))])
def test_any_number_of_candidates_is_lossless(further: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_round(monkeypatch, further, sizes=sizes) < ROUNDING


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("sd", {"cape": True, "width": 3}, "cape adds candidates to a chain, and width is 3"),
        ("sd", {"nodes": 9}, "nodes is 9, but width is 1"),
        ("eesd-tree", {"nodes": 9, "width": 1}, "nodes is 9, but width is 1"),
        ("pearl", {"cape": True}, "pearl has no setting 'cape'"),
        ("sd", {"every": 2}, "sd has no setting 'every'"),
    ],
)
def test_settings_that_exclude_each_other(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecgenError, match=message):
        methods.resolve(methods.find(name), given)
