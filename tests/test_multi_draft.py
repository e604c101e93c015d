"""SpecTr's and SpecInfer's drafts and verdicts. `test_enumeration.py` has their exact output distributions."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from scripted_models import TableRunner

from specgen import methods
from specgen.base.errors import RunError
from specgen.base.types import Context, Draft, SamplingParams
from specgen.decoding.drafting import Setup
from specgen.decoding.policy import Fixed
from specgen.engine.model_runner import ModelOutput
from specgen.methods import runs
from specgen.methods.multi_draft_tree import AcceptanceRule, MultiDraftDrafter, TreeSampling, k_sequential, multi_round

JUDGES = {"specinfer": multi_round, "spectr": k_sequential}


@pytest.mark.parametrize("rule", JUDGES.values())
def test_more_drafts_are_accepted_more_often(rule: AcceptanceRule) -> None:
    """More drafts raise the acceptance probability; with one draft it is the overlap of p and q."""
    p, q = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.2, 0.3, 0.5]])
    found = []
    for drafts in (1, 2, 3):
        accepted = 0.0
        for tokens in product(range(3), repeat=drafts):
            chances, _ = rule(p, torch.tensor([tokens]), [drafts], lambda j, n: q)
            refused = float((1 - chances.clamp(0, 1)).prod())
            accepted += float(q[0, list(tokens)].prod()) * (1 - refused)
        found.append(accepted)
    assert found[0] == pytest.approx(0.6, abs=1e-6)
    assert found[0] + 0.05 < found[1] < found[2] - 0.05


def chains(sampling: SamplingParams, drafts: int, k: int, eos: frozenset[int] = frozenset(), seed: int = 0) -> Draft:
    drafter = MultiDraftDrafter(Setup(TableRunner(2), sampling, eos, 6, seed), drafts=drafts)  # type: ignore[arg-type]
    return drafter.propose(Context([0, 3, 1]), Fixed(k), k)


@pytest.mark.parametrize("seed", range(5))
def test_chains_share_their_beginnings_and_keep_their_number(seed: int) -> None:
    draft = chains(SamplingParams(temperature=1.0), drafts=6, k=3, seed=seed)
    assert draft.draws is not None
    assert len(draft.draws) == 18
    assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft.tokens), "chains that agree share a node"
    assert all(parent < node for node, parent in enumerate(draft.parents))
    assert draft.probs.shape == (len(draft.tokens), 6)
    assert torch.allclose(draft.probs.sum(-1), torch.ones(len(draft.tokens)))
    runner = TableRunner(2)
    rows = runner.logits(Context([0, 3, 1]), draft.tokens, draft.parents).logits.softmax(-1)
    assert torch.allclose(draft.probs, rows[torch.tensor(draft.parents) + 1], atol=1e-6), "each node's own distribution"
    entropies = -(draft.probs * draft.probs.log()).sum(-1)
    assert torch.allclose(torch.tensor(draft.entropies), entropies, atol=1e-5)


def test_greedy_chains_begin_with_the_likeliest_distinct_tokens() -> None:
    draft = chains(SamplingParams(), drafts=3, k=2)
    table = TableRunner(2)
    assert list(draft.tokens[:3]) == table.row([3, 1]).topk(3).indices.tolist()
    assert list(draft.parents) == [-1, -1, -1, 0, 1, 2]
    assert list(draft.tokens[3:]) == [int(table.row([1, token]).argmax()) for token in draft.tokens[:3]]
    assert draft.probs is None


def test_chains_end_at_their_own_end_of_sequence() -> None:
    draft = chains(SamplingParams(), drafts=6, k=3, eos=frozenset({0, 1, 2}))
    ended = {node for node, token in enumerate(draft.tokens) if token in (0, 1, 2)}
    assert ended
    assert not ended & set(draft.parents)
    assert draft.stop_reason == "limit 3"
    assert chains(SamplingParams(), drafts=6, k=3, eos=frozenset(range(6))).stop_reason == "eos"


@pytest.mark.parametrize("rule", JUDGES.values())
def test_nan_logits_are_an_error(rule: AcceptanceRule) -> None:
    verifier = TreeSampling(rule, SamplingParams(temperature=1.0), torch.device("cpu"), 0)
    draft = Draft((1, 2), (-1, -1), probs=torch.full((2, 4), 0.25), draws=(0, 1))
    with pytest.raises(RunError, match="target model's logits hold NaN"):
        verifier.verify(draft, ModelOutput(torch.full((3, 4), torch.nan)))
    with pytest.raises(RunError, match="target model's logits hold NaN"):
        verifier.verify(Draft(), ModelOutput(torch.full((1, 4), torch.nan)))


@pytest.mark.parametrize("name", ["mtad", "bild", "spectr", "specinfer"])
def test_no_draft_beyond_the_drafts_own_context_or_vocabulary(name: str) -> None:
    def length(context_limit: int, num_embeddings: int, limit: int) -> int:
        runner = TableRunner(2)
        runner.context_limit, runner.num_embeddings = context_limit, num_embeddings
        method = methods.find(name)
        settings = methods.resolve(method, {"fallback": 0} if name == "bild" else {})
        components = Setup(runner, vocab_size=6)  # type: ignore[arg-type]
        return runs.make_drafter(method, settings, components).propose(Context([0, 3, 1]), Fixed(4), limit).levels

    assert length(1000, 6, 10) == 4
    assert length(1000, 6, 2) == 2
    assert length(5, 6, 10) == 2
    assert length(3, 6, 10) == 0
    assert length(1000, 3, 10) == 0, "the context holds token 3"
    assert length(1000, 6, 0) == 0
