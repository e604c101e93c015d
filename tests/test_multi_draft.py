"""SpecTr and SpecInfer by enumeration: over all random paths of a round, the output has the target's distribution."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from scripted_models import TableRunner, scripted_run
from statistics_checks import Distribution, output_distribution

from specgen import factory, methods
from specgen.decoding import logits_ops, multi_draft
from specgen.decoding.drafters import DraftSetup
from specgen.decoding.multi_draft import Acceptance, MultiDraftDrafter, TreeSampling, k_sequential, multi_round
from specgen.decoding.policies import Fixed
from specgen.engine.model_runner import ModelOutput
from specgen.errors import RunError
from specgen.types import Context, Draft, SamplingParams

SIZE = 3
PROMPT = [0, 2, 1]
ROUNDING = 1e-5  # distributions are float32
JUDGES = {"specinfer": multi_round, "spectr": k_sequential}


class Small(TableRunner):
    """A table for three tokens; `zero` sets the probability of one of them to 0 in each row, as top-k would."""

    vocab_size = num_embeddings = SIZE

    def __init__(self, seed: int, *, zero: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(SIZE, SIZE, SIZE, generator=generator) * 1.5
        if zero:
            cut = torch.randint(SIZE, (SIZE, SIZE, 1), generator=generator)
            self.table.scatter_(2, cut, -torch.inf)


class Paths:
    """Replaces randomness: enumerates all outcomes of every draw and Bernoulli trial; `weight` is the path's probability."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # for each choice on the current path the outcomes not tried yet, the current one last
        self._untried: list[list[tuple[Any, float]]] = []
        self._position = 0
        self.weight = 1.0
        monkeypatch.setattr(logits_ops, "draw", self._draw)
        monkeypatch.setattr(logits_ops, "bernoulli", self._flips)

    def all(self, run: Callable[[], tuple[int, ...]]) -> Distribution:
        found: Distribution = defaultdict(float)
        while True:
            self._position, self.weight = 0, 1.0
            outcome = run()
            found[outcome] += self.weight
            while self._untried and len(self._untried[-1]) == 1:
                self._untried.pop()
            if not self._untried:
                return dict(found)
            self._untried[-1].pop()

    def _choose(self, outcomes: Callable[[], Iterator[tuple[Any, float]]]) -> Any:
        if self._position == len(self._untried):
            self._untried.append([(value, weight) for value, weight in outcomes() if weight > 0])
        value, weight = self._untried[self._position][-1]
        self._position += 1
        self.weight *= weight
        return value

    def _draw(self, probs: torch.Tensor, _: object) -> torch.Tensor:
        rows = (probs / probs.sum(-1, keepdim=True)).reshape(-1, probs.shape[-1]).tolist()

        def outcomes() -> Iterator[tuple[Any, float]]:
            for tokens in product(range(len(rows[0])), repeat=len(rows)):
                weight = 1.0
                for row, token in zip(rows, tokens, strict=True):
                    weight *= row[token]
                yield torch.tensor(tokens).reshape(probs.shape[:-1]), weight

        return self._choose(outcomes)

    def _flips(self, chances: torch.Tensor, _: object) -> torch.Tensor:
        assert not chances.isnan().any()
        flat = chances.clamp(0, 1).flatten().tolist()

        def outcomes() -> Iterator[tuple[Any, float]]:
            for flips in product((False, True), repeat=len(flat)):
                weight = 1.0
                for chance, flip in zip(flat, flips, strict=True):
                    weight *= chance if flip else 1 - chance
                yield torch.tensor(flips).reshape(chances.shape), weight

        return self._choose(outcomes)


def exact(
    runner: TableRunner, sampling: SamplingParams, length: int, eos: frozenset[int], start: Distribution | None = None
) -> Distribution:
    """The distribution of the outputs when the target alone continues `start` to `length` tokens."""
    return output_distribution(
        lambda tokens: logits_ops.warp(runner.row([*PROMPT, *tokens]), sampling).tolist(), length, eos, start
    )


def distance(
    rule: multi_draft.AcceptanceRule,
    monkeypatch: pytest.MonkeyPatch,
    *,
    seed: int,
    k: int,
    drafts: int,
    zero: bool = False,
    eos: int = -1,
) -> float:
    """Total variation between the target and a round of `rule`, over all its random paths, continued by the target alone."""
    target, draft = Small(seed, zero=zero), Small(seed + 100)
    sampling = SamplingParams(temperature=1.0, top_p=0.9 if seed % 2 else 1.0)
    ends = frozenset({eos})
    drafter = MultiDraftDrafter(DraftSetup(draft, sampling, ends, SIZE), drafts=drafts)  # type: ignore[arg-type]
    verifier = TreeSampling(rule, sampling, torch.device("cpu"), 0)

    def round_() -> tuple[int, ...]:
        context = Context(PROMPT)
        proposed = drafter.propose(context, Fixed(k), k)
        verdict = verifier.verify(proposed, target.logits(context, proposed.tokens, proposed.parents))
        tokens = [proposed.tokens[node] for node in verdict.path]
        return tuple(tokens) if tokens and tokens[-1] in ends else (*tokens, verdict.token)  # type: ignore[arg-type]

    begun = Paths(monkeypatch).all(round_)
    assert sum(begun.values()) == pytest.approx(1, abs=ROUNDING)
    found = exact(target, sampling, k + 1, ends, begun)
    wanted = exact(target, sampling, k + 1, ends)
    return sum(abs(found.get(tokens, 0.0) - wanted.get(tokens, 0.0)) for tokens in {*found, *wanted}) / 2


@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize(
    "case",
    [
        {"seed": 0, "k": 1, "drafts": 1},
        {"seed": 5, "k": 1, "drafts": 2},
        {"seed": 2, "k": 1, "drafts": 4},
        {"seed": 3, "k": 1, "drafts": 4, "zero": True},
        {"seed": 4, "k": 2, "drafts": 2},
        {"seed": 7, "k": 2, "drafts": 2, "eos": 2, "zero": True},
        {"seed": 8, "k": 1, "drafts": 3},
    ],
    ids=str,
)
def test_a_round_over_all_its_random_paths(name: str, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert distance(JUDGES[name], monkeypatch, **case) < ROUNDING


def unscaled(p: torch.Tensor, tokens: torch.Tensor, counts: Any, drawn_from: Any) -> Acceptance:
    """SpecTr with rho = 1."""
    q = drawn_from(0, len(counts))
    return Acceptance(p.gather(1, tokens) / q.gather(1, tokens), (p - q).clamp_min(0))


def for_all(p: torch.Tensor, tokens: torch.Tensor, counts: Any, drawn_from: Any) -> Acceptance:
    """SpecTr that uses the rho of all chains where fewer survive."""
    return k_sequential(p, tokens, [max(*counts, 2)] * len(counts), drawn_from)


def unweighted(p: torch.Tensor, tokens: torch.Tensor, counts: Any, drawn_from: Any) -> Acceptance:
    """SpecTr whose residual subtracts the whole overlap of p and q, without the weight A / b."""
    chances, q = k_sequential(p, tokens, counts, drawn_from).probs, drawn_from(0, len(counts))
    rho = (p.gather(1, tokens) / (q.gather(1, tokens) * chances))[:, :1]
    return Acceptance(chances, p - torch.minimum(q, p / rho))


def never_lowered(p: torch.Tensor, tokens: torch.Tensor, counts: Any, drawn_from: Any) -> Acceptance:
    """SpecInfer that verifies later candidates with the target's whole distribution instead of the residual."""
    q = drawn_from(0, len(counts))
    return Acceptance(p.gather(1, tokens) / q.gather(1, tokens), multi_round(p, tokens, counts, drawn_from).residual)


@pytest.mark.parametrize("mistake", [unscaled, pytest.param(for_all, marks=pytest.mark.slow), unweighted, never_lowered])
def test_the_enumeration_notices_known_mistakes(mistake: multi_draft.AcceptanceRule, monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"k": 2, "drafts": 2} if mistake is for_all else {"k": 1, "drafts": 3}
    assert distance(mistake, monkeypatch, seed=2, **size) > 0.01


@pytest.mark.parametrize("name", JUDGES)
def test_the_enumeration_notices_duplicates_that_are_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = multi_draft._candidates
    monkeypatch.setattr(
        multi_draft,
        "_candidates",
        lambda draft: candidates(Draft(draft.tokens, draft.parents, draws=list(dict.fromkeys(draft.draws)))),
    )
    assert distance(JUDGES[name], monkeypatch, seed=2, k=1, drafts=3) > 0.05


def test_a_tree_of_distinct_deterministic_candidates_is_lossless_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k candidates, each with a one-hot distribution: a rejected one is removed from the target's."""
    target, sampling = Small(1), SamplingParams(temperature=1.0)
    verifier = TreeSampling(multi_round, sampling, torch.device("cpu"), 0)
    draft = Draft((2, 0, 1, 2), (-1, -1, 0, 0))

    def round_() -> tuple[int, ...]:
        verdict = verifier.verify(draft, target.logits(Context(PROMPT), draft.tokens, draft.parents))
        return (*(draft.tokens[node] for node in verdict.path), verdict.token)  # type: ignore[return-value]

    found = exact(target, sampling, 3, frozenset(), Paths(monkeypatch).all(round_))
    wanted = exact(target, sampling, 3, frozenset())
    assert found == pytest.approx(wanted, abs=ROUNDING)


@pytest.mark.parametrize("rule", JUDGES.values())
def test_more_drafts_are_accepted_more_often(rule: multi_draft.AcceptanceRule) -> None:
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
    drafter = MultiDraftDrafter(DraftSetup(TableRunner(2), sampling, eos, 6, seed), drafts=drafts)  # type: ignore[arg-type]
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
def test_nan_logits_are_an_error(rule: multi_draft.AcceptanceRule) -> None:
    verifier = TreeSampling(rule, SamplingParams(temperature=1.0), torch.device("cpu"), 0)
    draft = Draft((1, 2), (-1, -1), probs=torch.full((2, 4), 0.25), draws=(0, 1))
    with pytest.raises(RunError, match="target model's logits hold NaN"):
        verifier.verify(draft, ModelOutput(torch.full((3, 4), torch.nan)))
    with pytest.raises(RunError, match="target model's logits hold NaN"):
        verifier.verify(Draft(), ModelOutput(torch.full((1, 4), torch.nan)))


def test_one_draft_is_speculative_sampling() -> None:
    """With one chain both accept each position with min(1, p / q), as `sd` does."""
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0)
    rates = {}
    for name in ("sd", *JUDGES):
        accepted = drafted = 0
        for seed in range(60):
            settings = {"k": 2} | ({"drafts": 1} if name in JUDGES else {})
            for round_ in scripted_run(name, settings, TableRunner(1), TableRunner(2), sampling, seed=seed).rounds():
                accepted += len(round_.verdict.path)
                drafted += len(round_.draft.tokens)
        rates[name] = accepted / drafted
    assert rates["spectr"] == pytest.approx(rates["sd"], abs=0.03)
    assert rates["specinfer"] == pytest.approx(rates["sd"], abs=0.03)


@pytest.mark.parametrize("name", ["mtad", "bild", "spectr", "specinfer"])
def test_no_draft_beyond_the_drafts_own_context_or_vocabulary(name: str) -> None:
    def length(context_limit: int, num_embeddings: int, limit: int) -> int:
        runner = TableRunner(2)
        runner.context_limit, runner.num_embeddings = context_limit, num_embeddings
        method = methods.find(name)
        settings = methods.resolve(method, {"fallback": 0} if name == "bild" else {})
        components = factory.Components(runner, runner, SamplingParams(), frozenset(), 6, 0)  # type: ignore[arg-type]
        return factory.make_drafter(method, settings, components).propose(Context([0, 3, 1]), Fixed(4), limit).levels

    assert length(1000, 6, 10) == 4
    assert length(1000, 6, 2) == 2
    assert length(5, 6, 10) == 2
    assert length(3, 6, 10) == 0
    assert length(1000, 3, 10) == 0, "the context holds token 3"
    assert length(1000, 6, 0) == 0
