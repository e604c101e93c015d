"""Verdicts on hand-made logits, the target's distribution in sampled outputs, and the numbers that
are computed from logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from families import BACKENDS, make_model, model_of
from runner_checks import uncached
from statistics_checks import (
    LENGTH,
    SIGNIFICANCE,
    TOKENS,
    first_tokens,
    p_value,
)
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specgen.base.errors import RunError
from specgen.base.settings import parse_pairs
from specgen.base.types import Context, Draft, SamplingParams, Verdict
from specgen.decoding import token_sampling
from specgen.decoding.verification import GreedyVerifier, RejectionSampling, survival
from specgen.engine.model_runner import ModelOutput, ModelRunner
from specgen.testing.enumeration import ROUNDING, Paths, SmallRunner, exact, output_distribution
from specgen.testing.scripted_models import PROMPT, TableRunner, scripted_run
from specgen.workers.worker import DraftWorker

SAMPLING = SamplingParams(temperature=1.0)


def rows(*choices: int) -> ModelOutput:
    """Logits whose likeliest tokens are `choices`."""
    return ModelOutput(torch.nn.functional.one_hot(torch.tensor(choices), 8).float() * 9)


def sampler(**options: Any) -> RejectionSampling:
    return RejectionSampling(
        SamplingParams(temperature=1.0, **options), torch.device("cpu"), seed=0
    )


CHAIN = Draft.chain((1, 2))
TREE = Draft((1, 2, 3, 4), (-1, -1, 1, 1))
BRANCHES = Draft((1, 2, 3), (-1, -1, 0))


@pytest.mark.parametrize(
    ("draft", "choices", "verdict"),
    [
        (Draft(), (3,), Verdict((), 3, None)),
        (CHAIN, (1, 2, 3), Verdict((0, 1), 3, "bonus")),
        (CHAIN, (1, 5, 3), Verdict((0,), 5, "correction")),
        (CHAIN, (4, 2, 3), Verdict((), 4, "correction")),
        (CHAIN, (1, 2), Verdict((0, 1), None, None)),  # without a row behind the draft, as in PEARL
        (CHAIN, (1, 5), Verdict((0,), 5, "correction")),
        (TREE, (2, 0, 4, 0, 6), Verdict((1, 3), 6, "bonus")),
        (TREE, (2, 0, 7, 0, 6), Verdict((1,), 7, "correction")),
        (BRANCHES, (5, 3, 0, 0), Verdict((), 5, "correction")),
        (BRANCHES, (2, 0, 3, 6), Verdict((1,), 3, "bonus")),  # the 3 follows the other branch
    ],
)
def test_verdicts_follow_the_targets_choices(
    draft: Draft, choices: tuple[int, ...], verdict: Verdict
) -> None:
    """Greedily, and in sampling if there is no other choice."""
    assert GreedyVerifier().verify(draft, rows(*choices)) == verdict
    assert sampler(top_k=1).verify(draft, rows(*choices)) == verdict


@pytest.mark.parametrize(
    "verifier", [GreedyVerifier(), sampler(top_k=1)], ids=["greedy", "sampling"]
)
def test_nan_logits_are_an_error_where_a_token_depends_on_them(verifier: Any) -> None:
    for position in (0, 1):
        broken = rows(1, 2).logits
        broken[position, 3] = math.nan
        with pytest.raises(RunError, match="NaN"):
            verifier.verify(Draft.chain((1,)), ModelOutput(broken))
    broken = rows(4, 2).logits
    broken[1, 3] = math.nan  # the row after a rejected token
    assert verifier.verify(Draft.chain((1,)), ModelOutput(broken)) == Verdict((), 4, "correction")


@pytest.mark.parametrize("position", [0, 1, 2])
def test_nan_logits_in_a_row_of_a_drawn_draft_are_an_error(position: int) -> None:
    broken = rows(1, 2, 3).logits
    broken[position, 3] = math.nan
    probs = torch.eye(8)[[1, 2]]
    with pytest.raises(RunError, match="NaN"):
        sampler().verify(Draft.chain((1, 2), probs=probs), ModelOutput(broken))


def test_equal_distributions_accept_everything_and_an_empty_residual_is_no_nan() -> None:
    logits = ModelOutput(torch.tensor([[1.0, 1.0, -torch.inf, -torch.inf]] * 2))
    verifier = sampler()
    draft = Draft((0,), (-1,), probs=torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
    verdicts = {verifier.verify(draft, logits) for _ in range(50)}
    assert verdicts == {Verdict((0,), token, "bonus") for token in (0, 1)}


def test_drawn_chains_are_verified_as_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens, by enumeration: 11/9 are accepted on average, and 10/9 would be token by
    token."""
    p = torch.tensor([1 / 3, 2 / 3])
    q = torch.tensor([2 / 3, 1 / 3])
    verifier = sampler()
    generator = torch.Generator()

    def round_() -> int:
        tokens = [int(token_sampling.draw(q, generator)) for _ in range(2)]
        draft = Draft.chain(tokens, probs=torch.stack((q, q)))
        return len(verifier.verify(draft, ModelOutput(p.log().repeat(3, 1))).path)

    accepted = Paths(monkeypatch).all(round_)
    assert sum(count * share for count, share in accepted.items()) == pytest.approx(11 / 9)


@pytest.mark.parametrize(
    ("p", "q", "reached"),
    [
        ((0.2, 0.6), (0.4, 0.2), (1.0, 0.5, 1.0)),
        ((0.4, 0.1), (0.2, 0.4), (1.0, 1.0, 0.25)),
        ((0.0, 0.9), (0.5, 0.1), (1.0, 0.0, 0.0)),
        ((0.5,), (0.0,), (1.0, 1.0)),  # a token of probability 0, drawn through rounding
    ],
)
def test_how_often_so_many_tokens_are_accepted(
    p: Sequence[float], q: Sequence[float], reached: Sequence[float]
) -> None:
    assert survival(p, q) == pytest.approx(list(reached))


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize(
    ("drawn", "tokens", "parents"),
    [
        (0, (2, 0, 1, 2), (-1, -1, 0, 0)),
        (0, (1, 0, 2), (-1, 0, 1)),
        (1, (2, 0, 1), (0, 0, 2)),
        (2, (0, 1), (-1, 2)),  # another candidate than the first drawn token, and one after it
    ],
)
def test_candidates_that_were_not_drawn_keep_the_targets_distribution(
    drawn: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    one_by_one: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By enumeration, after a chain of `drawn` tokens. The target's tokens are drawn where needed,
    or at once as on a GPU."""
    target = SmallRunner(1)
    draft = SmallRunner(5)
    prompt = [0, 1, 1, 0, 1]
    monkeypatch.setattr(torch.Tensor, "is_cpu", one_by_one)
    verifier = sampler()
    generator = torch.Generator()

    def round_() -> tuple[int, ...]:
        chain: list[int] = []
        probs = []
        for _ in range(drawn):
            probs.append(token_sampling.warp(draft.row([*prompt, *chain]), SAMPLING))
            chain.append(int(token_sampling.draw(probs[-1], generator)))
        nodes = Draft(
            [*chain, *tokens],
            [*range(-1, drawn - 1), *parents],
            probs=torch.stack(probs) if probs else None,
        )
        verdict = verifier.verify(
            nodes, target.logits(Context(prompt), nodes.tokens, nodes.parents)
        )
        return (*(nodes.tokens[node] for node in verdict.path), verdict.token or 0)

    found = Paths(monkeypatch).all(round_)
    assert (
        max(map(len, found))
        == 1 + Draft(range(drawn + len(tokens)), [*range(-1, drawn - 1), *parents]).levels
    )
    assert exact(target, SAMPLING, drawn + 4, start=found) == pytest.approx(
        exact(target, SAMPLING, drawn + 4), abs=ROUNDING
    )


# samples


def p_value_of(
    written: str,
    target: Any,
    draft: Any,
    rows_of: Any,
    runs: int,
    eos: Sequence[int] = (),
    **warp: Any,
) -> float:
    """The chi-square test of the first tokens' joint distribution in so many runs. `rows_of` gives
    the target's logits."""
    sampling = SamplingParams(max_new_tokens=LENGTH, temperature=1.2, **warp)
    (method, *settings) = written.split(":")
    worker = DraftWorker.in_this_process(draft)
    chosen: Any = dict(parse_pairs(settings))
    given = [
        scripted_run(method, chosen, target, draft, sampling, eos=eos, seed=seed, worker=worker)
        for seed in range(runs)
    ]
    expected = output_distribution(
        lambda made: token_sampling.warp(rows_of([*PROMPT, *made]), sampling).tolist(), TOKENS, eos
    )
    return p_value(Counter(map(first_tokens, given)), expected)


@pytest.mark.parametrize("runs", [400, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("method", "eos", "warp"),
    [
        ("sd:k=3", (), {"top_p": 0.9, "top_k": 5}),
        ("lookup:k=3:ngram=2", (1, 4), {}),
        ("sd:k=3:width=2", (), {"top_k": 4}),
    ],
)
def test_the_first_tokens_have_the_targets_distribution(
    method: str, eos: Sequence[int], warp: dict[str, Any], runs: int
) -> None:
    """`test_enumeration.py` has the exact distributions of all methods, in shorter runs."""
    target = TableRunner(1)
    assert p_value_of(method, target, TableRunner(2), target.row, runs, eos, **warp) > SIGNIFICANCE


@pytest.mark.parametrize(
    ("name", "backend", "runs"),
    [
        ("sd:k=3", "native", 200),
        *(pytest.param("pearl:window=3", each, 4000, marks=pytest.mark.slow) for each in BACKENDS),
    ],
)
def test_samples_of_a_real_model(name: str, backend: str, runs: int) -> None:
    """The same on model runners with KV caches: a random Llama with a vocabulary of twelve
    tokens."""
    shape = {"vocab_size": 12, "num_hidden_layers": 1, "initializer_range": 0.4}
    modules = make_model("llama", **shape), make_model("llama", seed=5, **shape)
    target, draft = (ModelRunner(model_of(module, backend)) for module in modules)
    assert (
        p_value_of(name, target, draft, lambda ids: uncached(modules[0], ids), runs, top_k=8)
        > SIGNIFICANCE
    )


# numbers from logits


@pytest.mark.parametrize("top_k", [0, 1, 3, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01, 1e-46, 1e-320])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("vocabulary", [8, 1000])
def test_warping_is_transformers(top_k: int, top_p: float, min_p: float, vocabulary: int) -> None:
    logits = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(3)) * 4
    scores = TemperatureLogitsWarper(0.7)(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    scores = MinPLogitsWarper(min_p)(None, scores) if min_p else scores
    ours = token_sampling.warp(
        logits, SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    )
    assert torch.allclose(ours, scores.softmax(-1), atol=1e-6)
    assert torch.equal(ours > 0, scores.softmax(-1) > 0)


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    counts = Counter(int(token_sampling.draw(weights, generator)) for _ in range(4000))
    assert set(counts) == {1, 3, 4}, "never what has no weight"
    assert abs(counts[1] / 4000 - 0.5) < 0.04
    for nothing in ([0.0, 0.0], [math.nan, 1.0], [1.0, math.nan]):
        assert int(token_sampling.draw(torch.tensor(nothing), generator)) == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.01, 8.0])
def test_entropy_and_largest_probability(dtype: torch.dtype, scale: float) -> None:
    """Against float64, with many tokens, an impossible one and an offset that exp could not
    take."""
    logits = (torch.randn(40_000, generator=torch.Generator().manual_seed(1)) * scale + 200).to(
        dtype
    )
    logits[7] = -torch.inf
    probs = logits.double().softmax(dim=-1)
    wanted = [float(torch.special.entr(probs).sum()), float(probs.max())]
    assert torch.stack(token_sampling.entropy_and_top_prob(logits)).tolist() == pytest.approx(
        wanted, rel=1e-5
    )
    token, *found = token_sampling.greedy_statistics(logits)
    assert [token] == token_sampling.argmax_tokens(logits[None])
    assert found == pytest.approx(wanted, rel=1e-5)
    for broken in ([0.0, math.nan], [math.nan, 0.0], [math.inf, 0.0], [-math.inf] * 2):
        assert math.isnan(token_sampling.greedy_statistics(torch.tensor(broken))[1])
